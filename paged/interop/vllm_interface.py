"""Compare the installed vLLM with the interface that the backend relies on.

    python -m paged.interop.vllm_interface [--record]

Prints lines that are gone (-), new (+), or whose function has another body (~, to be reviewed). "!" marks lines that
the backends override, call or read. If a marked line is gone, the exit code is 1, and the plug-in refuses an untested
vLLM. --record writes `EXPECTED`. Importing this module does not import vLLM.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

EXPECTED = Path(__file__).with_name("vllm_interface.txt")
# Names in vLLM that the backends need. An entry without a member means the class with all its public members.
NAMES = (
    "vllm.config:CompilationConfig.static_forward_context",
    "vllm.config:ParallelConfig.cp_kv_cache_interleave_size",
    "vllm.config:ParallelConfig.decode_context_parallel_size",
    "vllm.config:SchedulerConfig.max_num_batched_tokens",
    "vllm.distributed:is_global_first_rank",
    "vllm.distributed.parallel_state:get_dcp_group",
    "vllm.distributed.parallel_state:get_dcp_world_size_and_rank",
    "vllm.envs:VLLM_BATCH_INVARIANT",
    "vllm.model_executor.warmup.jit_warmup:VllmJitKernel",
    "vllm.platforms.interface:DeviceCapability",
    "vllm.platforms.interface:Platform.get_attn_backend_cls",
    "vllm.v1.attention.backend:AttentionBackend",
    "vllm.v1.attention.backend:AttentionCGSupport",
    "vllm.v1.attention.backend:AttentionImpl",
    "vllm.v1.attention.backend:AttentionLayer",
    "vllm.v1.attention.backend:AttentionMetadataBuilder",
    "vllm.v1.attention.backend:AttentionType",
    "vllm.v1.attention.backend:CommonAttentionMetadata",
    "vllm.v1.attention.backend:MultipleOf",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.CUSTOM",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.get_path",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.is_overridden",
    "vllm.v1.attention.backends.registry:register_backend",
    "vllm.v1.attention.backends.utils:get_dcp_local_seq_lens",
)
# More names, which only the backends for latents need.
LATENT_NAMES = (
    "vllm.config:AttentionConfig.hisparse_config",
    "vllm.config:AttentionConfig.mla_prefill_backend",
    "vllm.config:ParallelConfig.prefill_context_parallel_size",
    "vllm.config:get_current_vllm_config",
    "vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward_impl",
    "vllm.model_executor.layers.attention.mla_attention:MLAAttention.update_kv_cache",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonBackend",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonDecodeMetadata",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonImpl",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadata",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadataBuilder",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadataBuilder._build_decode",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonPrefillMetadata",
    "vllm.model_executor.layers.attention.mla_attention:QueryLenSupport",
    "vllm.model_executor.layers.attention.sparse_mla_attention:SparseMLACommonImpl",
    "vllm.model_executor.layers.attention.sparse_mla_attention:SparseMLACommonMetadata",
    "vllm.model_executor.layers.attention.sparse_mla_attention:SparseMLACommonMetadataBuilder",
    "vllm.model_executor.layers.attention.sparse_mla_attention:SparseMLACommonMetadataBuilder._build_req_id_per_token",
    "vllm.v1.attention.backend:max_decode_query_len",
    "vllm.v1.attention.backends.mla.prefill.base:MLAPrefillBackend",
    "vllm.v1.attention.backends.mla.prefill.registry:register_mla_prefill_backend",
)
# The backends' own classes, as text because importing them imports vLLM.
DERIVED = (
    "paged.interop.vllm_engine.backend:PagedBackend",
    "paged.interop.vllm_engine.backend:PagedImpl",
    "paged.interop.vllm_engine.backend:AttentionWarmup",
    "paged.interop.vllm_engine.metadata:PagedMetadataBuilder",
    "paged.interop.vllm_engine.latents:CachedRequests",
    "paged.interop.vllm_engine.latents:PagedMlaBackend",
    "paged.interop.vllm_engine.latents:PagedMlaBuilder",
    "paged.interop.vllm_engine.latents:PagedMlaImpl",
    "paged.interop.vllm_engine.latents:PagedPrefill",
    "paged.interop.vllm_engine.sparse_latents:PagedSparseMlaBackend",
    "paged.interop.vllm_engine.sparse_latents:PagedSparseMlaBuilder",
    "paged.interop.vllm_engine.sparse_latents:PagedSparseMlaImpl",
    "paged.interop.vllm_engine.sparse_latents:PagedSparseMlaMetadata",
)


class Line(NamedTuple):
    """Recorded name with a function's parameters or a class's fields. digest: hash of the body, "" if none."""

    text: str
    digest: str = ""
    is_used: bool = True


def gone(latents: bool = False) -> list[str]:
    """Return the lines that attention, or attention over latents, relies on and the installed vLLM lacks."""
    names = LATENT_NAMES if latents else NAMES
    installed = {line.text for line in _installed(names)}
    lines = [line for line in _expected() if line.text.startswith(LATENT_NAMES) == latents]
    return [line.text for line in lines if line.is_used and line.text not in installed]


def _expected() -> list[Line]:
    lines = []
    for line in EXPECTED.read_text().splitlines():
        mark, text, digest = line.split("\t")
        lines.append(Line(text, digest, mark == "!"))
    return lines


def _installed(names: tuple[str, ...] = NAMES + LATENT_NAMES) -> Iterator[Line]:
    for name in names:
        module, _, path = name.partition(":")
        class_name, _, member = path.partition(".")
        try:
            value = getattr(importlib.import_module(module), class_name)
        except (ImportError, AttributeError):
            continue
        if not inspect.isclass(value):
            yield _line(name, value)
        elif not member:
            yield from _class_lines(name, value)
        elif hasattr(value, member):
            yield _line(name, getattr(value, member))
        elif member in _fields(value):
            yield Line(name)


def _class_lines(name: str, value: Any) -> Iterator[Line]:
    fields = _fields(value)
    if fields:
        yield Line(f"{name} has {' '.join(fields)}")
    required = sorted(getattr(value, "__abstractmethods__", ()))
    if required:
        yield Line(f"{name} requires {' '.join(required)}")
    if issubclass(value, Enum | tuple):
        return
    for member in sorted(dir(value)):
        if not member.startswith("_") and member not in fields:
            yield _line(f"{name}.{member}", getattr(value, member))


def _fields(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    if issubclass(value, Enum):
        return list(value.__members__)
    return list(getattr(value, "_fields", ()))


def _line(name: str, value: Any) -> Line:
    """Return a function's name with its parameters ("=" marks a default) and the digest of its body."""
    if not inspect.isroutine(value):
        return Line(name)
    try:
        parameters = inspect.signature(value).parameters.values()
        source = inspect.getsource(value)
    except (TypeError, ValueError, OSError):  # functions written in C have no signature
        return Line(name)
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    words = []
    for parameter in parameters:
        default = "" if parameter.default is inspect.Parameter.empty else "="
        words.append(stars.get(parameter.kind, "") + parameter.name + default)
    return Line(f"{name}({', '.join(words)})", hashlib.sha256(source.encode()).hexdigest()[:8])


def _with_uses(lines: Iterator[Line]) -> Iterator[Line]:
    """Mark class members as unused unless the lists name them or a class of the backends also has them."""
    members: dict[str, set[str]] = {}
    for path in DERIVED:
        module, _, class_name = path.partition(":")
        bases = getattr(importlib.import_module(module), class_name).__mro__
        own = {name for base in bases if base.__module__.startswith("paged.") for name in vars(base)}
        for base in bases:
            members.setdefault(base.__name__, set()).update(own)
    for line in lines:
        name = line.text.partition("(")[0]
        class_name, _, member = name.partition(":")[2].partition(".")
        is_used = not member or name in NAMES + LATENT_NAMES or member in members.get(class_name, ())
        yield line._replace(is_used=is_used)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="what is installed is what the backend relies on")
    if parser.parse_args().record:
        marks = {True: "!", False: " "}
        lines = _with_uses(_installed())
        EXPECTED.write_text("".join(f"{marks[line.is_used]}\t{line.text}\t{line.digest}\n" for line in lines))
        return 0
    expected = {line.text: line for line in _expected()}
    installed = {line.text: line for line in _installed()}
    for text in sorted({**expected, **installed}):
        mark = "!" if text in expected and expected[text].is_used else " "
        if text not in installed:
            print(f"-{mark}", text)
        elif text not in expected:
            print("+ ", text)
        elif expected[text].digest != installed[text].digest:
            print(f"~{mark}", text)
    return 1 if gone() or gone(latents=True) else 0


if __name__ == "__main__":
    sys.exit(main())
