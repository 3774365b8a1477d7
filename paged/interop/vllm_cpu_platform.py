"""Makes vLLM's CPU platform give the backend that was chosen: it knows its own alone, and takes one of them instead."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum


class _OfferingCustom(classmethod):  # type: ignore[type-arg]
    """A platform's `get_attn_backend_cls` that answers for CUSTOM as vLLM's GPU platforms do: its path, or why not."""

    def __init__(self, given: Any) -> None:
        def get_attn_backend_cls(
            cls: Any, selected_backend: Any, attn_selector_config: Any, *others: Any, **named: Any
        ) -> Any:
            if selected_backend is not AttentionBackendEnum.CUSTOM:
                return given(selected_backend, attn_selector_config, *others, **named)
            backend = selected_backend.get_class()
            reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
            if reasons:
                raise ValueError(
                    f"Selected backend {selected_backend} is not valid for this configuration. Reason: {reasons}"
                )
            return selected_backend.get_path()

        super().__init__(get_attn_backend_cls)


def offer_custom() -> None:
    """Wrap the CPU platform's choice of a backend, once; other platforms stay as they are."""
    platform = type(current_platform)
    if current_platform.is_cpu() and not isinstance(vars(platform).get("get_attn_backend_cls"), _OfferingCustom):
        platform.get_attn_backend_cls = _OfferingCustom(platform.get_attn_backend_cls)
