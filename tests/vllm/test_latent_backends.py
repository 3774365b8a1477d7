"""The backends for latents in vLLM's hands: their names, and what they refuse."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paged import InvalidInputError, UnsupportedError
from tests.tolerance import assert_close

pytest.importorskip("vllm", reason="needs vLLM's Python files: make vllm")

import pickle

from vllm.config import AttentionConfig, CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.attention import HiSparseConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend

from paged.interop.vllm_engine.latents import PagedMlaBackend, PagedMlaImpl, PagedPrefill
from paged.interop.vllm_engine.sparse_latents import PagedSparseMlaBackend, PagedSparseMlaImpl
from paged.interop.vllm_plugin import register
from tests.vllm.latent_runner import LatentRunner
from tests.vllm.runner import Batch

pytestmark = pytest.mark.thorough
BACKENDS = {"PAGED_MLA": PagedMlaBackend, "PAGED_MLA_SPARSE": PagedSparseMlaBackend}
LAYER: dict[str, Any] = {
    "num_heads": 3, "head_size": 576, "scale": 0.1, "num_kv_heads": 1, "alibi_slopes": None, "sliding_window": None,
    "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": AttentionType.DECODER,
    "kv_sharing_target_layer_name": None, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128, "kv_b_proj": None, "indexer": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def config() -> Iterator[VllmConfig]:
    register()
    config = VllmConfig(device_config=DeviceConfig(device="cpu"), cache_config=CacheConfig(block_size=16))
    with set_current_vllm_config(config):
        yield config


@pytest.mark.parametrize("name", BACKENDS)
def test_names_choose_the_backends(name: str, config: VllmConfig) -> None:
    config.attention_config = AttentionConfig(backend=name)
    options: dict[str, Any] = {"use_mla": True, "use_sparse": "SPARSE" in name}
    assert get_attn_backend(576, torch.bfloat16, "auto", **options) is BACKENDS[name]
    for refused, reason in (
        ({"use_mla": False}, "non-MLA not supported"),
        ({"use_sparse": not options["use_sparse"]}, "sparse not supported"),
    ):
        with pytest.raises(ValueError, match=reason):
            get_attn_backend(576, torch.bfloat16, "auto", **(options | refused))
    for dtype in ("fp8_e5m2", "nvfp4"):
        with pytest.raises(ValueError, match="kv_cache_dtype not supported"):
            get_attn_backend(576, torch.bfloat16, dtype, **options)
    for feature in ("pcp", "dcp"):
        assert not getattr(BACKENDS[name], f"supports_{feature}")()


def test_new_processes_read_the_names_before_they_load_plug_ins() -> None:
    names = AttentionBackendEnum["PAGED_MLA"], MLAPrefillBackendEnum["PAGED_MLA"]
    code = (
        "import pickle, sys; from types import ModuleType; sys.modules['vllm._C_stable_libtorch'] = ModuleType('x');"
        f"print(*[name.get_class().__name__ for name in pickle.loads({pickle.dumps(names)!r})])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    root = Path(__file__).parents[2]
    printed = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert printed.stdout.split()[-2:] == ["PagedMlaBackend", "PagedPrefill"], printed.stderr


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"sliding_window": 9}, "sliding_window"),
    ({"alibi_slopes": [0.5] * 3}, "alibi_slopes"),
    ({"logits_soft_cap": 3.0}, "logits_soft_cap"),
    ({"kv_sharing_target_layer_name": "layers.0"}, "kv_sharing_target_layer_name"),
    ({"q_pad_num_heads": 64}, "q_pad_num_heads"),
    ({"sinks": torch.zeros(3)}, "sinks"),
    ({"attn_type": AttentionType.ENCODER}, "attn_type"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
    ({"head_size": 520}, "520 numbers a token"),
)


@pytest.mark.parametrize(("changes", "match"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_layers_that_cannot_be_honoured_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises((UnsupportedError, InvalidInputError), match=match):
        PagedMlaImpl(**LAYER | changes)
    with pytest.raises((UnsupportedError, InvalidInputError), match=match):
        PagedSparseMlaImpl(**LAYER | changes, topk_indices_buffer=torch.zeros(4, 8, dtype=torch.int32))


def test_settings_that_cannot_be_honoured_are_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    impl = PagedMlaImpl(**LAYER)
    assert config.attention_config.mla_prefill_backend is MLAPrefillBackendEnum["PAGED_MLA"]
    assert not impl.fused_output_quant_supported(None)
    with pytest.raises(InvalidInputError, match="topk_indices_buffer"):
        PagedSparseMlaImpl(**LAYER)
    packed = LAYER | {"kv_cache_dtype": "fp8_ds_mla", "head_size": 512}
    with pytest.raises(InvalidInputError, match="head_size: 512, expected 576"):
        PagedSparseMlaImpl(**packed)
    for part, name, value in (
        (config.parallel_config, "decode_context_parallel_size", 2),
        (config.parallel_config, "prefill_context_parallel_size", 2),
        (config.attention_config, "hisparse_config", HiSparseConfig()),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(part, name, value)
            with pytest.raises(UnsupportedError, match=name):
                PagedMlaImpl(**LAYER)
    monkeypatch.setattr(type(current_platform), "fp8_dtype", classmethod(lambda cls: torch.float8_e4m3fnuz))
    with pytest.raises(UnsupportedError, match="e4m3fnuz"):
        PagedMlaImpl(**LAYER | {"kv_cache_dtype": "fp8"})


def test_graphs_hold_decodes_of_unequal_length(device: torch.device) -> None:
    runner = LatentRunner(device, layers=({},))
    assert runner.cudagraph_support.min_cg_support.name == "UNIFORM_BATCH"
    builder = runner.attn_groups[0][0].get_metadata_builder()
    assert builder.get_varlen_cudagraph_max_query_len(runner.config, None) == 5
    batch = Batch.on(device, (1, 37), (5, 18))
    (metadata,) = runner.metadata(batch, for_capture=True).values()
    assert metadata.decode.seq_lens.tolist() == [1, 1]
    plan = metadata.decode.plan()
    assert metadata.decode.plan() is plan
    runner.attn_groups[0][0].update_draft_decode_metadata({"layers.0.attn": metadata})
    assert metadata.decode.plan() is not plan


def test_prompts_attend_as_vllm_does_on_a_cpu(device: torch.device) -> None:
    """New tokens and a chunk of context, with their log-sum-exps, against vLLM's own PyTorch."""
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    both = [
        kind(num_heads=3, scale=0.1, **sizes, vllm_config=None) for kind in (PagedPrefill, CPUSDPAMLAPrefillBackend)
    ]
    offsets = torch.tensor([0, 5, 6, 17], dtype=torch.int32, device=device)
    context = torch.tensor([0, 9, 30], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(40, 3, size, device=device) for size in (192, 192, 256))
    v = v[..., 128:]
    chunk = SimpleNamespace(
        index=0, query_start_loc=offsets[:3], max_query_len=5, cu_seq_lens=context, max_seq_len=21
    )  # fmt: skip
    results = []
    for backend in both:
        backend.prepare_metadata(SimpleNamespace(query_start_loc=offsets, max_query_len=11))
        new = backend.run_prefill_new_tokens(q[:17], k[:17], v[:17], return_softmax_lse=True)
        results.append((*new, *backend.run_prefill_context_chunk(chunk, q[:6], k[:30], v[:30])))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs.double())
    with pytest.raises(UnsupportedError, match="output_scale"):
        both[0].run_prefill_new_tokens(q[:17], k[:17], v[:17], False, output_scale=torch.ones(1))
