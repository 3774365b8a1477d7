"""Arguments of commands that load a checkpoint, and the engine that they make."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged.errors import InvalidInputError
from paged.models.loading.checkpoint_folder import checkpoint_folder, local_folder
from paged.serving.command_line.cli import RECALL
from paged.serving.command_line.sizes import as_bytes

if TYPE_CHECKING:
    from paged.executors.engine.engine import Engine
    from paged.executors.llm_executor import LlmExecutor
    from paged.executors.speculation.drafting import Proposer
    from paged.executors.text.detokenizer import Tokenizer


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the checkpoint, its dtypes, the block size and the output."""
    add_checkpoint_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the checkpoint, its dtypes and the block size."""
    parser.add_argument(
        "model", nargs="?", default=str(RECALL), help="folder in Hugging Face layout, or OWNER/NAME on the Hub"
    )
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="default: the checkpoint's own")
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="DTYPE",
        help="auto (the dtype of the weights), fp8, fp8_e5m2, fp8_per_token_head, int8, int4 or nvfp4; two such as "
        "int8,int4 for keys and values",
    )
    parser.add_argument(
        "--kv-cache-keep-layers",
        default="",
        metavar="LAYERS",
        help="layers whose keys and values keep the dtype of the weights, such as 0,1",
    )
    parser.add_argument(
        "--kv-cache-rotation",
        choices=["hadamard", "hadamard_keys", "none"],
        default="none",
        help="rotate heads before they are cached, which helps int8 and int4: keys and values, or keys alone",
    )
    parser.add_argument(
        "--state-dtype",
        choices=["float32", "bfloat16", "int8"],
        default="float32",
        help="dtype of the states of recurrent layers",
    )
    parser.add_argument("--block-size", type=int, help="tokens per KV cache block; default: depends on the device")


def add_engine_arguments(parser: argparse.ArgumentParser, adapters: str) -> None:
    """Add the arguments of `make_engine` besides the model's. adapters: purpose of adapters, for the help."""
    model = parser.add_argument_group("model and cache")
    model.add_argument("--device", help="cpu, cuda, cuda:1, ...")
    model.add_argument("--num-blocks", type=int, help="number of KV cache blocks")
    model.add_argument("--num-swap-blocks", type=int, default=0, help="blocks of host memory for preempted sequences")
    model.add_argument(
        "--host-cache", metavar="SIZE", help="host memory for evicted prefixes, such as 8GiB; default: none"
    )
    model.add_argument(
        "--cache-folder", metavar="DIR", help="folder that keeps prefixes for restarts and other processes"
    )
    model.add_argument(
        "--cache-folder-limit", metavar="SIZE", help="maximum bytes of all files in it; default: no limit"
    )
    model.add_argument("--max-seq-len", type=int, help="maximum sequence length; default: the model's limit")
    model.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help=f"adapter to {adapters}",
    )
    model.add_argument(
        "--max-loras", type=int, default=1, help="maximum adapters loaded at once, if --lora names fewer"
    )
    model.add_argument("--max-lora-rank", type=int, default=64, help="largest rank of an adapter; %(default)s")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--chunk-size", type=int, default=64, help="prompt tokens per sequence and step")
    engine.add_argument("--token-budget", type=int, default=256, help="tokens per step")
    engine.add_argument("--max-num-seqs", type=int, default=256, help="largest number of running sequences")
    engine.add_argument(
        "--warmup",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="first compile kernels and capture CUDA graphs; on a CPU, record decode steps",
    )
    engine.add_argument("--speculate", type=int, metavar="N", help="N drafts per step, from n-grams of the text")
    engine.add_argument(
        "--draft",
        metavar="mtp|MODEL",
        help="drafts from the model's own multi-token head, or from a folder with an EAGLE-3 head or a draft model; 4 "
        "per step unless --speculate says N",
    )
    engine.add_argument(
        "--draft-min-probability",
        type=float,
        default=0.0,
        metavar="P",
        help="with --draft, verify drafts up to the first that is accepted with a lower probability, by the drafter's "
        "estimate; 0 verifies all",
    )


def make_engine(
    folder: Path, args: argparse.Namespace, tokenizer: Tokenizer, *, max_waiting: int | None = None
) -> Engine:
    """Load the checkpoint and adapters and make the engine; warm up if requested."""
    from paged.executors.engine.config import EngineConfig
    from paged.executors.engine.engine import Engine
    from paged.models.loading.hf_config import read_eos_token_ids

    executor = _executor(folder, args, _draft_head(args), **_tiers(args))
    for name, adapter in lora_folders(args.lora).items():
        executor.load_lora(name, adapter)
    if args.warmup:
        executor.warmup()
    return Engine(
        executor,
        EngineConfig(
            token_budget=args.token_budget,
            chunk_size=args.chunk_size,
            max_num_seqs=args.max_num_seqs,
            max_waiting=max_waiting,
            preemption="swap" if args.num_swap_blocks else "recompute",
        ),
        tokenizer=tokenizer,
        eos_token_ids=read_eos_token_ids(folder),
        proposer=_proposer(executor, args),
        seed=args.seed,
    )


def lora_folders(arguments: Sequence[str]) -> dict[str, str]:
    """Return adapter folders by name, from NAME=FOLDER arguments."""
    folders: dict[str, str] = {}
    for argument in arguments:
        name, _, folder = argument.partition("=")
        if not name or not folder or name in folders:
            raise InvalidInputError(f"--lora {argument}: expected NAME=FOLDER, each name once")
        folders[name] = folder
    return folders


def _tiers(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the prefix cache's tiers, which a draft model does not get."""
    options: dict[str, Any] = {"cache_folder": args.cache_folder}
    if args.host_cache is not None:
        options["host_cache_bytes"] = as_bytes("--host-cache", args.host_cache)
    if args.cache_folder_limit is not None:
        options["cache_folder_bytes"] = as_bytes("--cache-folder-limit", args.cache_folder_limit)
    return options


def _executor(folder: Path, args: argparse.Namespace, head: str | None = None, **tiers: Any) -> LlmExecutor:
    from paged.executors.llm_executor import LlmExecutor

    names = "device dtype num_blocks block_size max_seq_len num_swap_blocks kv_cache_dtype state_dtype max_lora_rank"
    options = {name: getattr(args, name) for name in [*names.split(), "kv_cache_keep_layers", "kv_cache_rotation"]}
    options |= tiers
    return LlmExecutor.from_pretrained(folder, **options, draft=head, max_loras=max(len(args.lora), args.max_loras))


def _draft_head(args: argparse.Namespace) -> str | None:
    """Return the draft head that `--draft` names, or None if it names a draft model."""
    from paged.models.draft_loader import MTP, is_eagle3

    draft: str | None = args.draft
    if draft is None or draft == str(MTP):
        return draft
    # A draft head needs no tokenizer of its own.
    if is_eagle3(checkpoint_folder(draft, is_run=False)):
        return str(local_folder(Path(draft)))
    return None


def _proposer(target: LlmExecutor, args: argparse.Namespace) -> Proposer | None:
    from paged.executors.speculation.draft_model import DraftModel
    from paged.executors.speculation.head_proposer import HeadProposer
    from paged.executors.speculation.prompt_lookup import PromptLookup

    count = args.speculate
    if args.draft is None and args.draft_min_probability:
        raise InvalidInputError(f"--draft-min-probability {args.draft_min_probability}: expected --draft beside it")
    if args.draft is None and count is None:
        return None
    if args.draft is None:
        return PromptLookup(count)
    if count is None:
        count = 4
    if target.capabilities().has_draft_head:
        return HeadProposer(target, count, min_probability=args.draft_min_probability)
    return DraftModel(
        _executor(checkpoint_folder(args.draft), args),
        count,
        token_budget=args.token_budget,
        min_probability=args.draft_min_probability,
    )
