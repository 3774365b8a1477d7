"""Tests of and on an emulated machine with GPUs; where there are real ones, Triton's interpreter is not to be had."""

from collections.abc import Iterator

import pytest
import torch

from tests.emulated_device.emulator.device import EmulatedCuda


def pytest_runtest_setup() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")


@pytest.fixture
def cuda() -> Iterator[EmulatedCuda]:
    """One emulated GPU, on while the test runs."""
    with EmulatedCuda() as machine:
        yield machine
