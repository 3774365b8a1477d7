"""Replaces what vLLM lacks on a machine without accelerator and compiled extension, and nothing else of it."""

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

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


@pytest.fixture(scope="session", autouse=True)
def _one_rank() -> Iterator[None]:
    """Linear layers ask for their group of ranks."""
    from vllm.distributed import parallel_state

    with pytest.MonkeyPatch.context() as patch:
        if parallel_state._TP is None:
            patch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=1, rank_in_group=0))
        yield


@pytest.fixture(scope="session", autouse=True)
def _without_extension() -> Iterator[None]:
    """Where there is no GPU, layers over latents pin no memory, merge as vLLM does on a CPU, and gather the context of
    prompts as the compiled function is described."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
    from vllm.platforms import current_platform
    from vllm.utils import torch_utils
    from vllm.v1.attention.ops.merge_attn_states import _merge_attn_states_torch

    with pytest.MonkeyPatch.context() as patch:
        if not current_platform.is_cuda():
            for module in (torch_utils, mla_attention, sparse_mla_attention):
                patch.setattr(module, "PIN_MEMORY", False)
            patch.setattr(mla_attention, "merge_attn_states", _merge_attn_states_torch)
            patch.setattr(_custom_ops, "gather_and_maybe_dequant_cache", _gather)
        yield


def _gather(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    seq_starts: torch.Tensor,
) -> None:
    """Rows of the cache from position seq_starts[i] of each sequence on, one sequence after another."""
    seqs = token_to_seq[:num_tokens].long()
    positions = torch.arange(num_tokens) - cu_seq_lens[seqs] + seq_starts[seqs]
    block_size = src_cache.shape[1]
    blocks = block_table[seqs, positions // block_size].long()
    if kv_cache_dtype == "fp8":
        rows = src_cache.view(torch.uint8)[blocks, positions % block_size].view(torch.float8_e4m3fn)
        dst[:num_tokens] = rows.float() * scale
    else:
        dst[:num_tokens] = src_cache[blocks, positions % block_size]
