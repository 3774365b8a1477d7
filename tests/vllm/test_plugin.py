"""What vLLM finds: the installed entry point, the class behind CUSTOM, and its answers when a backend is chosen."""

import logging
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM's Python files: make vllm")

import vllm.platforms
import vllm.plugins
from vllm.config import AttentionConfig, CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import AttentionSelectorConfig, get_attn_backend

from paged.interop import vllm_plugin
from paged.interop.vllm_engine.backend import PagedBackend, PagedImpl
from paged.interop.vllm_engine.metadata import PagedMetadataBuilder

pytestmark = pytest.mark.thorough
CUSTOM = AttentionBackendEnum.CUSTOM


@pytest.fixture(autouse=True)
def _unregistered() -> Iterator[None]:
    CUSTOM.clear_override()
    yield
    CUSTOM.clear_override()


def _choose(**options: Any) -> type:
    """The class that vLLM's selector gives for 64-wide heads in float16, unless told otherwise."""
    parts = {"attention_config": AttentionConfig(backend=CUSTOM), "cache_config": CacheConfig(block_size=16)}
    config = VllmConfig(device_config=DeviceConfig(device="cpu"), **parts)
    with set_current_vllm_config(config):
        return get_attn_backend(**{"head_size": 64, "dtype": torch.float16, "kv_cache_dtype": "auto", **options})


def test_vllm_loads_the_installed_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="paged")
    assert found.load() is vllm_plugin.register
    with pytest.raises(ValueError, match="CUSTOM must be registered"):
        CUSTOM.get_class()
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    vllm.plugins.load_general_plugins()
    assert CUSTOM.get_path() == vllm_plugin.BACKEND
    assert issubclass(CUSTOM.get_class(), PagedBackend)


def test_registering_twice_is_registering_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        vllm_plugin.register()
        assert issubclass(CUSTOM.get_class(), PagedBackend)
    assert not caplog.records


def test_another_version_with_the_same_interface_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setattr(AttentionBackend, "supports_more", classmethod(lambda cls: False), raising=False)
    vllm_plugin.register()
    assert "not tested with vLLM 0.34.0" in caplog.text
    assert CUSTOM.get_path() == vllm_plugin.BACKEND


def test_a_parameter_more_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setattr(AttentionMetadataBuilder, "build", lambda self, common_prefix_len, mask: None)
    vllm_plugin.register()
    assert "AttentionMetadataBuilder.build(self, common_prefix_len, common_attn_metadata, fast_build=)" in caplog.text
    assert not CUSTOM.is_overridden()


@pytest.mark.parametrize("version", ["0.31.1", "0.34.0", "0.330.0", "1.33.0", "dev"])
def test_another_version_is_warned_of_and_left_alone(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even where there is no registry yet."""
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    assert f"vLLM is {version}, expected 0.32 or 0.33" in caplog.text
    assert not CUSTOM.is_overridden()


@pytest.mark.parametrize("version", ["0.32.1", "0.33.0", "0.33.1.dev7+g1234", "0.33.2+cu130"])
def test_builds_of_a_version_get_the_backend(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    vllm_plugin.register()
    assert CUSTOM.get_path() == vllm_plugin.BACKEND
    assert issubclass(CUSTOM.get_class(), PagedBackend)


def _choose_on_cpu(backend: Any, **options: Any) -> str:
    asked = {"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 16, **options}
    # As vLLM's selector calls it, by keyword.
    return CpuPlatform.get_attn_backend_cls(backend, attn_selector_config=AttentionSelectorConfig(**asked), num_heads=8)


def test_cpu_platform_gives_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone is wrapped, once, and for CUSTOM alone."""
    own = vars(CpuPlatform)["get_attn_backend_cls"]
    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", own)  # as it is again afterwards
    vllm_plugin.register()
    assert vars(CpuPlatform)["get_attn_backend_cls"] is own
    assert _choose_on_cpu(CUSTOM) == AttentionBackendEnum.CPU_ATTN.get_path()

    monkeypatch.setattr(vllm.platforms, "current_platform", CpuPlatform())
    vllm_plugin.register()
    wrapped = vars(CpuPlatform)["get_attn_backend_cls"]
    vllm_plugin.register()
    assert vars(CpuPlatform)["get_attn_backend_cls"] is wrapped
    assert _choose_on_cpu(CUSTOM) == CUSTOM.get_path()
    assert _choose_on_cpu(None) == _choose_on_cpu(AttentionBackendEnum.CPU_ATTN) != CUSTOM.get_path()
    with pytest.raises(ValueError, match=r"CUSTOM.* is not valid.*MLA not supported"):
        _choose_on_cpu(CUSTOM, use_mla=True)


def test_another_plugins_backend_stays(caplog: pytest.LogCaptureFixture) -> None:
    register_backend(CUSTOM, "other.Backend")
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    assert "CUSTOM is other.Backend" in caplog.text
    assert CUSTOM.get_path() == "other.Backend"


HONOURED: tuple[dict[str, Any], ...] = (
    {}, {"has_sink": True}, {"has_sliding_window": True}, {"use_per_head_quant_scales": True, "kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "float16"}, {"head_size": 8}, {"head_size": 80}, {"head_size": 512}, {"dtype": torch.float32},
    {"kv_cache_dtype": "int8_per_token_head"}, {"kv_cache_dtype": vllm_plugin.INT4_CACHES},
)  # fmt: skip
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"use_mla": True}, "MLA not supported"),
    ({"use_sparse": True}, "sparse not supported"),
    ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
    *(
        ({"attn_type": getattr(AttentionType, name)}, f"attention type AttentionType.{name} not supported")
        for name in ("ENCODER", "ENCODER_ONLY", "ENCODER_DECODER")
    ),
    ({"head_size": 513}, "head_size not supported"),
    ({"dtype": torch.float64}, "dtype not supported"),
    ({"kv_cache_dtype": "int8_per_token_head", "head_size": 66}, "heads of 66, no multiple of 4"),
    ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype bfloat16 is not supported for a model in torch.float16"),
    *(
        ({"kv_cache_dtype": name}, "kv_cache_dtype not supported")
        for name in ("fp8_e5m2", "int4_per_token_head", "nvfp4")
    ),
)


@pytest.mark.parametrize(("options", "reason"), [*((options, None) for options in HONOURED), *REFUSED], ids=str)
def test_chosen_for_what_it_honours_alone(options: dict[str, Any], reason: str | None) -> None:
    vllm_plugin.register()
    if reason is None:
        assert _choose(**options) is CUSTOM.get_class()
    else:
        with pytest.raises(ValueError, match=f"CUSTOM.* is not valid.*{reason}"):
            _choose(**options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"use_non_causal": True, "use_kv_connector": True, "use_adaptive_verification": True}, None),
        ({"use_batch_invariant": True, "use_dcp": True}, None),
        *(({"block_size": size}, None) for size in (8, 784)),
        *(({"device_capability": DeviceCapability(*version)}, None) for version in ((8, 0), (9, 4), (10, 0))),
        ({"device_capability": None}, None),
        ({"block_size": 12}, "block_size not supported"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
    ],
    ids=str,
)
def test_answers_to_what_the_run_asks(options: dict[str, Any], reason: str | None) -> None:
    asked: dict[str, Any] = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0), "attn_type": AttentionType.DECODER,
    }  # fmt: skip
    assert PagedBackend.validate_configuration(**{**asked, **options}) == ([] if reason is None else [reason])


def test_other_answers() -> None:
    """None of the layouts is preferred: all are read in place. Blocks of vLLM's own size need not be cut."""
    assert PagedBackend.supported_kv_cache_layouts() is None
    assert PagedBackend.get_preferred_block_size(16) == 16
    assert not PagedBackend.supports_alibi_sqrt()
    assert PagedBackend.get_builder_cls() is PagedMetadataBuilder
    impl = PagedImpl(4, 64, 0.125, 2)
    assert not impl.supports_quant_query_input
    assert not impl.fused_output_quant_supported(None)
