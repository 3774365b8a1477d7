"""`paged quantize`: write a quantised copy of a checkpoint, which vLLM and transformers can also load."""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path

from paged.errors import InvalidInputError
from paged.models.loading.checkpoint_folder import checkpoint_folder
from paged.serving.command_line.safe_output import native_stderr_dropped, print_json
from paged.tools.printable import one_line

DESCRIPTION = (
    "Round the projections of a checkpoint to the nearest code and write it as compressed-tensors. Embeddings and "
    "routers stay as they are. One layer is in memory at a time. With --perplexity, also compare both checkpoints "
    "on a text."
)
# Number of tokens in a window of the perplexity; each window is one forward.
_WINDOW = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the checkpoint, the format and the output."""
    parser.add_argument("model", help="folder in Hugging Face layout, or OWNER/NAME on the Hub")
    parser.add_argument(
        "--format",
        required=True,
        choices=["int4", "int8", "fp8"],
        help="int4: weights in groups; int8, fp8: weights by row, activations by token",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="new folder")
    parser.add_argument(
        "--group-size", type=int, help="int4: columns that share a scale; default: 128, or 64 or 32 if rows need it"
    )
    parser.add_argument("--head", action="store_true", help="also round the LM head, in int4 to int8")
    parser.add_argument("--perplexity", type=Path, metavar="FILE", help="text to compare both checkpoints on")
    parser.add_argument(
        "--perplexity-tokens", type=int, default=4096, metavar="N", help="tokens of the text to use; 4096"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint; print its size and, if a text is given, both perplexities."""
    from paged.executors.progress import tracked
    from paged.models.quantized_writer import quantize_checkpoint

    folder = checkpoint_folder(args.model)
    if args.perplexity_tokens < 2:
        raise InvalidInputError(f"--perplexity-tokens {args.perplexity_tokens}: expected at least 2")
    ids = None if args.perplexity is None else _token_ids(folder, args.perplexity, args.perplexity_tokens)
    track = partial(tracked, shown=not args.json)
    options = {"group_size": args.group_size, "head": args.head, "track": track}
    sizes = quantize_checkpoint(folder, args.out, args.format, **options)
    report = {"folder": str(args.out), "format": args.format, "bytes": sizes["after"], "bytes_before": sizes["before"]}
    if ids is not None:
        report |= {"tokens": len(ids), "perplexity_before": perplexity(folder, ids)}
        report |= {"perplexity": perplexity(args.out, ids)}
    if args.json:
        print_json(report)
        return 0
    print(f"{one_line(str(args.out))}: {sizes['after'] / 1e6:,.1f} MB, before {sizes['before'] / 1e6:,.1f} MB")
    if ids is not None:
        before, after = report["perplexity_before"], report["perplexity"]
        print(f"perplexity {after:.4f}, before {before:.4f}, of {len(ids):,} tokens")
    return 0


def perplexity(folder: Path, ids: list[int]) -> float:
    """Return the perplexity of a text, where each token sees the earlier tokens in its window of 512."""
    import torch

    from paged.executors.llm_executor import LlmExecutor

    executor = LlmExecutor.from_pretrained(folder)
    window = min(_WINDOW, executor.info().max_sequence_length)
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, window):
        part = ids[start : start + window]
        logits = executor.model.forward_verify("perplexity", part)
        executor.release_cache("perplexity")
        targets = torch.tensor(part[1:], device=logits.device)
        total += torch.nn.functional.cross_entropy(logits[: len(targets)].float(), targets, reduction="sum").item()
        count += len(targets)
    executor.shutdown()
    return math.exp(min(total / max(count, 1), 700.0))


def _token_ids(folder: Path, file: Path, limit: int) -> list[int]:
    from paged.serving.text.chat_tokenizer import ChatTokenizer

    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InvalidInputError(f"--perplexity {file}: {error.strerror or error}") from error
    with native_stderr_dropped():
        ids = ChatTokenizer.from_folder(folder).encode(text)[:limit]
    if len(ids) < 2:
        raise InvalidInputError(f"--perplexity {file}: {len(ids)} tokens, expected at least 2")
    return ids
