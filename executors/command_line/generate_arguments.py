"""The arguments of `paged generate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from paged.errors import InvalidInputError
from paged.executors.command_line.cli import RECALL

DESCRIPTION = (
    "Answers all prompts at once: chunked prefill and decode steps share a forward. One prompt streams its answer. "
    "Without a model it takes the bundled recall checkpoint; without prompts that checkpoint's own task, and checks "
    "the answers."
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which checkpoint, in which dtypes and blocks, and how to print."""
    parser.add_argument(
        "model", nargs="?", default=str(RECALL), help="folder in Hugging Face layout, or OWNER/NAME on the Hub"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="default: the checkpoint's own")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=["auto", "fp8", "fp8_e5m2", "int8"],
        default="auto",
        help="auto: that of the weights",
    )
    parser.add_argument("--block-size", type=int, help="tokens a KV cache block; default: the device's")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to run, how to choose tokens, and how to run it."""
    add_model_arguments(parser)

    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    prompts.add_argument("--prompts", metavar="FILE", help="one prompt a line; - for stdin")
    prompts.add_argument("--chat", action="store_true", help="prompts are a user's messages, by the chat template")
    prompts.add_argument("--system", metavar="TEXT", help="with --chat: what comes before")
    prompts.add_argument(
        "--parse-special",
        action="store_true",
        help="special tokens that are written in a prompt count as such; without it they are plain text",
    )
    prompts.add_argument("--count", type=int, default=16, help="recall prompts to make when none are given")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("-n", type=int, default=1, help="answers a prompt")
    sampling.add_argument("--max-new-tokens", "--max-tokens", type=int, default=32, metavar="N", dest="max_tokens")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the best token")
    sampling.add_argument("--top-k", type=int, default=0, help="0 for all")
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--min-p", type=float, default=0.0, help="share of the best token's probability")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0)
    sampling.add_argument("--presence-penalty", type=float, default=0.0)
    sampling.add_argument("--frequency-penalty", type=float, default=0.0)
    sampling.add_argument("--seed", type=int, default=0, help="of sampling, and of the recall prompts")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on beyond the model's end tokens")
    sampling.add_argument("--logprobs", type=int, metavar="K", help="log probabilities of each token and the best K")

    model = parser.add_argument_group("model and cache")
    model.add_argument("--device", help="cpu, cuda, cuda:1, ...")
    model.add_argument("--num-blocks", type=int, help="KV cache blocks")
    model.add_argument("--num-swap-blocks", type=int, default=0, help="blocks of host memory that may take a sequence")
    model.add_argument("--max-seq-len", type=int, help="longest sequence; default: the model's own limit")
    model.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="answer with this adapter; given several times, every prompt is answered with each",
    )
    model.add_argument("--max-lora-rank", type=int, default=64)

    engine = parser.add_argument_group("engine")
    engine.add_argument("--chunk-size", type=int, default=64, help="prompt tokens of one sequence a step")
    engine.add_argument("--token-budget", type=int, default=256, help="tokens a step")
    engine.add_argument("--max-num-seqs", type=int, default=256, help="sequences that run at the same time")
    engine.add_argument(
        "--warmup",
        action="store_true",
        help="first compile kernels and capture CUDA graphs; on a CPU, pack the weights",
    )
    engine.add_argument("--speculate", type=int, metavar="N", help="N drafts a step, looked up in the text itself")
    engine.add_argument("--draft", metavar="MODEL", help="a smaller checkpoint makes the drafts, 4 unless --speculate")


def lora_folders(arguments: Sequence[str]) -> dict[str, str]:
    """Adapters by name, from NAME=FOLDER each.

    Raises:
        InvalidInputError: an argument reads otherwise, or a name is there twice.
    """
    folders: dict[str, str] = {}
    for argument in arguments:
        name, _, folder = argument.partition("=")
        if not name or not folder or name in folders:
            raise InvalidInputError(f"--lora {argument}: expected NAME=FOLDER, each name once")
        folders[name] = folder
    return folders
