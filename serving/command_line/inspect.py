"""`paged inspect`: describe a checkpoint without loading it, or draw the block tables of a KV cache."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged.errors import InvalidInputError, PagedError
from paged.models.loading.checkpoint_folder import checkpoint_folder
from paged.serving.command_line.engine_arguments import add_model_arguments
from paged.serving.command_line.safe_output import print_json
from paged.serving.command_line.sizes import as_bytes
from paged.tools.printable import one_line

if TYPE_CHECKING:
    from paged.cache.kv_cache import KvCacheHandle
    from paged.cache.manager import PagedKvCacheManager
    from paged.executors.llm_executor import LlmExecutor

DESCRIPTION = (
    "Describe a checkpoint without loading it: whether it is supported, its sizes, its memory and the tokens that fit "
    "beside it. The exit code is 1 if it cannot run. With --cache, draw a KV cache with sequences that share a "
    "prefix, fork, are swapped out and leave cached blocks. With --cache-folder, verify the files of a prefix "
    "cache; the exit code is 1 if a file is damaged."
)
# Numbers of ranks shown in the table.
_SIZES = (2, 4, 8, 16, 32, 64)
# Lines to print: label, name of the required value, text.
_LINES = (
    ("folder", "folder", "{folder}"),
    ("architecture", "classes", "{classes} ({model_type})"),
    ("supported", "verdict", "{verdict}"),
    ("backend", "backend", "{backend}"),
    ("not read", "unread", "{unread}: if the model's own code reads them, the answers are wrong"),
    ("missing files", "files", "{files}"),
    ("parameters", "parameters", "{parameters:,}"),
    ("stored", "elements", "{elements}"),
    ("dtype", "dtype", "{dtype}, KV cache {kv_cache_dtype}"),
    ("layers", "num_layers", "{num_layers}{windows}"),
    ("heads", "num_attention_heads", "{num_attention_heads}, KV {num_kv_heads}, head_dim {head_dim}"),
    ("experts", "num_experts", "{num_experts}"),
    ("vocabulary", "vocab_size", "{vocab_size}"),
    ("longest sequence", "max_seq_len", "{max_seq_len:,} tokens"),
    ("files", "stored_bytes", "{stored}"),
    ("weights", "weight", "{weight}"),
    ("tables", "host_bytes", "{host} of the weights, in host memory beside a GPU"),
    ("KV per token", "kv_bytes_per_token", "{kv_bytes_per_token:,} bytes"),
    ("long sequences", "growth_bytes", "{growth_bytes:,} bytes per token, and {sequence} per sequence"),
    ("state", "state_bytes", "{state} per sequence, and {conv} for convolutions"),
    ("calls of tools", "tools", "{tools}"),
    ("reasoning", "reasoning", "{reasoning}"),
    ("KV cache", "fits", "{fits} in {device}, in blocks of {block_size}: {sequences} sequences of full length"),
)
_RANK_LINE = "{tensor_parallel_size:5} {weight:>12} {kv_bytes_per_token:>12,} {tokens:>12} {sent:>13} {rate:>12,}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the checkpoint and the selection of output."""
    add_model_arguments(parser)
    parser.add_argument("--architectures", action="store_true", help="list the architectures that load, and exit")
    parser.add_argument("--device-memory", metavar="SIZE", help="141GB or 80GiB, say; default: this machine's GPU")
    spread = parser.add_argument_group("several processes")
    spread.add_argument("--tensor-parallel", type=int, metavar="N", help="memory and traffic of each of N ranks")
    spread.add_argument("--expert-parallel", action="store_true", help="place whole experts on ranks")
    spread.add_argument("--bandwidth", metavar="SIZE", default="50GB", help="bytes each rank sends per second; 50GB")
    parser.add_argument("--cache-folder", type=Path, metavar="DIR", help="list and verify a cache folder, and exit")
    cache = parser.add_argument_group("the picture")
    cache.add_argument("--cache", action="store_true", help="run a small workload and draw its cache")
    cache.add_argument("--svg", type=Path, metavar="FILE", help="also write the picture as SVG")
    cache.add_argument("--columns", type=int, default=32, help="blocks per line")


def run(args: argparse.Namespace) -> int:
    """Print the description; return 1 if the checkpoint cannot run."""
    import torch

    if (args.block_size is not None and args.block_size < 1) or args.columns < 1:
        raise InvalidInputError(f"--block-size {args.block_size}, --columns {args.columns}: expected at least 1")
    if args.svg is not None and not args.cache:
        raise InvalidInputError("--svg: only allowed with --cache")
    if args.architectures:
        from paged.models.registry import known_architectures

        print("\n".join(sorted(known_architectures())))
        return 0
    if args.cache_folder is not None:
        return _verify(args)
    if args.cache:
        return _draw(args)
    from paged.kernels.attention.tiles import default_block_size
    from paged.kernels.core.device import device_of
    from paged.models.loading.load_options import (
        as_cache_dtype,
        as_device,
        as_dtype,
        as_layers,
        as_rotation,
        as_state_dtype,
    )
    from paged.models.parallel.ranks import ParallelConfig
    from paged.models.parallel.share import Share
    from paged.serving.command_line.checkpoint_summary import summarize

    folder = checkpoint_folder(args.model, is_run=False)
    device_bytes = None
    if args.device_memory:
        device_bytes = as_bytes("--device-memory", args.device_memory)
    elif torch.cuda.is_available():
        device_bytes = torch.cuda.mem_get_info()[1]
    spreads = []
    if args.tensor_parallel is not None:
        parallel = ParallelConfig(args.tensor_parallel, args.expert_parallel)
        sizes = sorted({*_SIZES, parallel.tensor_parallel_size} - {1})
        spreads = [Share(0, size, args.expert_parallel) for size in sizes]
    dtype = as_dtype("--dtype", args.dtype)
    cache_dtype = as_cache_dtype("--kv-cache-dtype", args.kv_cache_dtype)
    block_size = args.block_size or default_block_size(device_of(as_device("device", None)).arch)
    summary = summarize(
        folder,
        device_bytes=device_bytes,
        dtype=dtype,
        kv_cache_dtype=cache_dtype,
        kept_layers=as_layers("--kv-cache-keep-layers", args.kv_cache_keep_layers),
        kv_rotation=as_rotation("--kv-cache-rotation", args.kv_cache_rotation),
        state_dtype=as_state_dtype("--state-dtype", args.state_dtype),
        block_size=block_size,
        spreads=spreads,
    )
    summary |= _forms(folder)
    if args.json:
        print_json(summary)
    else:
        _print(summary)
        _print_ranks(summary, as_bytes("--bandwidth", args.bandwidth))
    if not summary["supported"]:
        return 1
    for rank in summary["ranks"]:
        if rank["tensor_parallel_size"] == args.tensor_parallel and rank["reason"]:
            return 1
    return 0


def _forms(folder: Path) -> dict[str, str | None]:
    """Return the formats of calls and reasoning that a server would use, and the reason; None without a tokenizer."""
    from paged.serving.formats.tool_formats import Tongue
    from paged.serving.text.chat_tokenizer import ChatTokenizer

    try:
        tongue = Tongue.of(ChatTokenizer.from_folder(folder))
    except PagedError:
        return {"tools": None, "reasoning": None}
    tools, reasoning = tongue.reasons
    return {"tools": tools, "reasoning": reasoning}


def _verify(args: argparse.Namespace) -> int:
    """Print the content of a cache folder by model and layout, and damaged files; return 1 if there are any."""
    from paged.cache.tiers.block_file import BlockFileError
    from paged.cache.tiers.folder import CacheFolder

    if not args.cache_folder.is_dir():
        raise InvalidInputError(f"--cache-folder {args.cache_folder}: expected a folder")
    digests: dict[str, dict[str, int]] = {}
    damaged: dict[str, str] = {}
    folder = CacheFolder(args.cache_folder, None)
    for entry in folder.foreign():
        damaged[str(entry)] = "not a regular file"
    for file in folder.files():
        counts = digests.setdefault(file.path.parent.name, {"blocks": 0, "tokens": 0, "bytes": 0})
        counts["bytes"] += file.num_bytes
        if file.is_part:
            continue
        try:
            key, num_tokens = folder.verify(str(file.path.relative_to(args.cache_folder)))
            if file.path != args.cache_folder / key.name:
                raise BlockFileError(f"holds block {key.name}")
        except (BlockFileError, OSError) as error:
            damaged[str(file.path)] = str(error)
            continue
        counts["blocks"] += 1
        if key.column == 0:
            counts["tokens"] += num_tokens
    if args.json:
        print_json({"digests": digests, "damaged": damaged})
        return int(bool(damaged))
    for digest, counts in digests.items():
        print(f"{digest}  {counts['blocks']:,} blocks, {counts['tokens']:,} tokens, {_size(counts['bytes'])}")
    for path, reason in damaged.items():
        print(f"damaged: {one_line(path)}: {one_line(reason)}")
    if not digests:
        print("no blocks")
    return int(bool(damaged))


def _draw(args: argparse.Namespace) -> int:
    from paged.executors.llm_executor import LlmExecutor
    from paged.tools.picture import cache_picture

    executor = LlmExecutor.from_pretrained(
        checkpoint_folder(args.model), dtype=args.dtype, num_blocks=64, num_swap_blocks=16, block_size=args.block_size
    )
    picture = cache_picture(_run_tour(executor))
    if args.svg is not None:
        try:
            args.svg.write_text(picture.svg(args.columns), encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"--svg {args.svg}: {getattr(error, 'strerror', None) or error}") from error
    if args.json:
        print_json(asdict(picture))
    else:
        print(picture.text(args.columns))
    return 0


def _run_tour(executor: LlmExecutor) -> PagedKvCacheManager:
    """Fill a cache with blocks of every kind.

    It has a finished prompt that stays cached, two questions that share three blocks of instructions with it, a fork
    that has written, an idle fork, and a swapped-out sequence.
    """
    from paged.step.batch import UnifiedBatch, UnifiedBatchItem

    manager = executor.kv_manager
    assert manager is not None  # models of from_pretrained have a cache manager
    size, vocab_size = manager.config.block_size, executor.info().vocab_size

    def ids(first: int, count: int) -> list[int]:
        return [(first + 7 * index) % vocab_size for index in range(count)]

    def extend(handle: KvCacheHandle, token_ids: Sequence[int]) -> None:
        item = UnifiedBatchItem(handle.cache_id, token_ids, kv_cache=handle, pos_offset=handle.num_tokens)
        executor.unified_decode(UnifiedBatch([item]))

    def start(name: str, token_ids: list[int]) -> KvCacheHandle:
        handle = manager.allocate(name, token_ids=token_ids)
        extend(handle, token_ids[handle.num_tokens :])
        return handle

    instructions = ids(3, 3 * size)
    manager.free(start("finished", instructions + ids(4, 4 * size)))
    first = start("question 1", instructions + ids(5, 2 * size + size // 2))
    second = start("question 2", instructions + ids(6, size + size // 2))
    extend(manager.fork(first, "its fork"), ids(8, 1))
    manager.fork(second, "an idle fork")
    manager.swap_out(start("swapped out", ids(9, 2 * size)))
    return manager


def _size(num_bytes: int | None) -> str | None:
    if num_bytes is None:
        return None
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:,.2f} GB"
    return f"{num_bytes / 1e6:,.2f} MB"


def _print_ranks(summary: dict[str, Any], bandwidth: int) -> None:
    """Print the memory and traffic of each rank, and the tokens per second that the bandwidth allows."""
    if summary["ranks"]:
        print(f"\n{'ranks':>5} {'weights':>12} {'KV per token':>12} {'tokens':>12} {'sent/token':>13} {'tokens/s':>12}")
    for rank in summary["ranks"]:
        if rank["reason"] is not None:
            print(f"{rank['tensor_parallel_size']:5} no: {one_line(rank['reason'])}")
            continue
        values = rank | {
            "tokens": "",
            "weight": _size(rank["weight_bytes"]),
            "sent": _size(rank["sent_bytes"]),
            "rate": bandwidth // rank["sent_bytes"],
        }
        if rank["kv_tokens"] is not None:
            values["tokens"] = f"{rank['kv_tokens']:,}"
        print(_RANK_LINE.format_map(values))


def _print(summary: dict[str, Any]) -> None:
    values = summary | {
        "classes": ", ".join(summary["architectures"]) or "none",
        "verdict": "yes",
        "unread": ", ".join(summary["unknown_keys"]),
        "files": ", ".join(summary["missing"]),
        "elements": ", ".join(f"{count:,} {dtype}" for dtype, count in summary["tensors"].items()),
        "head_dim": summary["head_dim"] or "unknown size",
        "windows": "",
        "fits": "",
        "sequences": 0,
    }
    if not summary["supported"]:
        values["verdict"] = f"no: {summary['reason']}"
    if summary["sliding_layers"]:
        values["windows"] = f", {summary['sliding_layers']} with a sliding window"
    capacity = summary["kv_tokens"]
    if capacity is not None:
        values["fits"] = f"{capacity:,} tokens"
        if summary["max_seq_len"]:
            values["sequences"] = capacity // summary["max_seq_len"]
    for name in ("stored", "weight", "host", "device", "sequence", "state", "conv"):
        values[name] = _size(summary[f"{name}_bytes"])
    for name, needed, text in _LINES:
        if values[needed]:
            print(f"{name:17} {one_line(text.format_map(values))}")
    if summary["kv_bytes_per_token"] == 0:
        print(f"{'KV cache':17} none: a sequence has a state, however long it is")
    elif capacity is None:
        print(f"{'KV cache':17} give --device-memory to see how many tokens fit")
