"""The definitions, which scan in chunks, against the rule token by token, both in float64."""

import pytest
import torch

from paged.bench.problems.arguments import map_tensors
from paged.kernels.recurrent import definition
from tests.float64 import f64
from tests.kernels.recurrent import loops
from tests.kernels.recurrent.problem import LAYERS, Seq, make_layer

STEPS = {
    "decode": (Seq(1, 70, 5), Seq(3, 9, 4, fresh=True), Seq(2)),
    "prompts": (Seq(150, snapshot=128), Seq(70, 100, 3, snapshot=128), Seq(0), Seq(9, 60)),
    "mixed": (Seq(1, 12, 7), Seq(66, 30, 0, snapshot=64), Seq(4)),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("layer", LAYERS)
def test_chunks_are_the_rule(layer: str, step: str, device: torch.device) -> None:
    """Outputs, states and rings; strong decay and erasure, so that a fault of either shows."""
    sizes = {"decay": 2.0, "beta": 1.0, "dtype": torch.bfloat16, "state_dtype": torch.bfloat16}
    problem, name, arguments = make_layer(layer, device, *STEPS[step], **sizes)
    want = getattr(loops, name)(**arguments)
    state = map_tensors(f64, arguments["state"])
    out = getattr(definition, name)(**map_tensors(f64_floats, arguments) | {"state": state, "batch": problem.batch})
    _assert_same(out, want.out)
    for part, tensor in vars(state).items():
        expected = getattr(want, part)
        if expected is not None:
            _assert_same(tensor, expected)


def f64_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Return floats in float64, ids as they are."""
    return f64(tensor) if tensor.is_floating_point() else tensor.cpu()


def _assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, equal_nan=True)
