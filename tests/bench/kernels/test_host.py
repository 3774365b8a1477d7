"""What a layer costs the host, in counts: calls of Python functions and launches, where kernels never run."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="it counts launches")

# A tenth more than there are. Plain calls, with checks, tile choice and Triton's binder, take 580 and 876.
MOST_CALLS = {"dense": 100, "MoE": 191}
LAUNCHES = {"dense": 6, "MoE": 9}

_SCRIPT = """
import gc, json, os, weakref
import torch
from paged.bench.kernels import host
from paged.kernels.common.compilation import serving_begins

host.pretend_gpu()
found = {}
for name, layer in (("dense", host.dense_layer()), ("MoE", host.moe_layer())):
    calls = sum(host.python_calls(call) for call in layer.values())
    before = host._Compiled.num_launches
    for call in layer.values():
        call()
    found[name] = calls, host._Compiled.num_launches - before
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
        calls, launches = found[name]
        assert calls <= MOST_CALLS[name]
        assert launches == LAUNCHES[name]
    assert found["tensors"] == 0
    assert "_rms_norm_kernel" in found["refused"]
