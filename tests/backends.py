"""Backends of families of kernels that numba's loops stand in, too."""

import pytest

from paged.kernels.core.device import has_numba

needs_numba = pytest.mark.skipif(not has_numba(), reason="numba is not installed, or PyTorch has no GNU OpenMP")
BACKENDS = ["triton", "torch", pytest.param("numba", marks=needs_numba)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test through the Triton kernels, their PyTorch implementations and the loops compiled by numba."""
    monkeypatch.setenv("PAGED_BACKEND", request.param)
    return str(request.param)
