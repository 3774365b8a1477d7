"""What a layer costs the host, in counts: calls of Python functions and launches, where kernels never run."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="it counts launches")

# Plain operations check arguments, choose tiles and go through Triton's binder. A layer known makes 62 of their 496
# calls, with experts 101 of 720, by Triton 3.7.
MOST_CALLS = 0.2
LAUNCHES = {"dense": 6, "MoE": 9}

_SCRIPT = """
import gc, json, os, weakref
import torch
from paged.bench.kernels import host
from paged.kernels.core.launch import serving_begins
from paged.kernels.core.device import using_numba

host.pretend_gpu()
found = {}
def count(layer):
    with using_numba(False):  # as in a forward
        return sum(host.python_calls(call) for call in layer.values())


for name, layer_of in (("dense", host.dense_layer), ("MoE", host.moe_layer)):
    layer = layer_of()
    calls = count(layer)
    before = host._Compiled.num_launches
    for call in layer.values():
        call()
    launches = host._Compiled.num_launches - before
    found[name] = calls, count(layer_of(num_tokens=4 * host.NUM_TOKENS)), count(layer_of(lambda plain: plain)), launches
    del layer, call
gc.collect()
found["tensors"] = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

os.environ["PAGED_JIT"] = "error"
import paged
x, weight = torch.empty(4, 64), torch.empty(64)
paged.rms_norm(x, weight)
serving_begins()
paged.rms_norm(torch.empty(5, 64), weight)  # another batch, the same kernel
try:
    paged.rms_norm(x.half(), weight)
except paged.UnsupportedError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


def test_a_layer_known_is_few_calls_and_launches_and_keeps_no_tensor() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _SCRIPT]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    for name in ("dense", "MoE"):
        calls, calls_of_more_tokens, plain_calls, launches = found[name]
        assert 0 < calls < MOST_CALLS * plain_calls
        assert calls_of_more_tokens == calls
        assert launches == LAUNCHES[name]
    assert found["tensors"] == 0
    assert "_rms_norm_kernel" in found["refused"]
