"""Replaces what vLLM lacks on a machine without accelerator and compiled extension, and nothing else of it."""

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

# vLLM's CUDA platform imports the extension for the operators it registers; none of them is called here.
_EXTENSION = "vllm._C_stable_libtorch"
if importlib.util.find_spec("vllm") is not None and importlib.util.find_spec(_EXTENSION) is None:
    sys.modules[_EXTENSION] = ModuleType(_EXTENSION)


@pytest.fixture(scope="session", autouse=True)
def _cuda_platform() -> Iterator[None]:
    """Backends are chosen as vLLM's CUDA platform does it, on what it takes for an H100.

    Where there is no GPU vLLM's own platform is one without a device that knows no backend at all.
    """
    from vllm.platforms import current_platform
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    with pytest.MonkeyPatch.context() as patch:
        if not current_platform.is_cuda():
            platform = type(current_platform)
            patch.setattr(platform, "device_name", "H100", raising=False)
            patch.setattr(
                platform, "get_device_capability", classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
            )
            choose = CudaPlatformBase.get_attn_backend_cls.__func__
            patch.setattr(platform, "get_attn_backend_cls", classmethod(choose))
        yield
