"""The command line: `paged generate` runs prompts through a checkpoint, many at once."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paged.errors import InvalidInputError, PagedError, UnsupportedError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from paged.executors.llm_executor import LlmExecutor

RECALL = Path(__file__).resolve().parent.parent / "models" / "recall"


@dataclass(frozen=True)
class Answer:
    """One prompt's result; `expected` and `correct` are None unless the task tells what is right."""

    prompt: str
    prompt_tokens: int
    text: str
    new_tokens: int
    expected: str | None
    correct: bool | None


@dataclass(frozen=True)
class Summary:
    """A whole run. Tokens are those that went through the model; blocks are of the KV cache, at the most."""

    prompts: int
    correct: int | None
    steps: int
    mixed_steps: int
    prefill_tokens: int
    decode_tokens: int
    seconds: float
    tokens_per_second: float
    peak_blocks: int
    num_blocks: int
    block_size: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 1 for a named error or a wrong answer, 2 for arguments that do not parse."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except PagedError as error:
        print(f"paged: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paged", description="Paged attention and fused MoE in Triton.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="answer prompts with a checkpoint",
        description="Answers all prompts at once: chunked prefill and decode steps share a forward. Without a model "
        "it takes the bundled recall checkpoint; without prompts that checkpoint's own task, and checks the answers.",
    )
    generate.add_argument("model", nargs="?", type=Path, default=RECALL, help="folder in Hugging Face layout")
    generate.add_argument("--prompt", action="append", default=[], help="a prompt; may be given several times")
    generate.add_argument("--prompts", type=Path, help="a file with one prompt a line")
    generate.add_argument("--count", type=int, default=16, help="recall prompts to make when none are given")
    generate.add_argument("--seed", type=int, default=0, help="of the recall prompts")
    generate.add_argument("--max-new-tokens", type=int, default=32)
    generate.add_argument("--chunk-size", type=int, default=64, help="prompt tokens of one sequence a step")
    generate.add_argument("--token-budget", type=int, default=256, help="tokens a step")
    generate.add_argument("--device", help="cpu, cuda, cuda:1, ...")
    generate.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="default: the checkpoint's own")
    generate.add_argument("--block-size", type=int, default=16, help="tokens a KV cache block")
    generate.add_argument("--num-blocks", type=int, help="KV cache blocks")
    generate.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    generate.set_defaults(run=_generate)
    return parser


def _generate(args: argparse.Namespace) -> int:
    import torch

    from paged.executors.llm_executor import LlmExecutor

    prompts, expected = _prompts(args)
    tokenizer = _load_tokenizer(args.model)
    executor = LlmExecutor.from_pretrained(
        args.model,
        device=args.device,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        num_blocks=args.num_blocks,
        block_size=args.block_size,
    )
    answers, summary = _run(executor, tokenizer, prompts, expected, args)
    if args.json:
        print(json.dumps({"answers": [asdict(answer) for answer in answers], "summary": asdict(summary)}, indent=1))
    else:
        _print_table(answers, summary, executor)
    return int(summary.correct is not None and summary.correct < summary.prompts)


def _prompts(args: argparse.Namespace) -> tuple[list[str], list[str] | None]:
    """The prompts, and their answers where the recall task tells them."""
    prompts = list(args.prompt)
    if args.prompts is not None:
        try:
            prompts += [line for line in args.prompts.read_text().splitlines() if line.strip()]
        except OSError as error:
            raise InvalidInputError(f"--prompts {args.prompts}: {error.strerror}") from error
    if prompts:
        return prompts, None
    if args.model.resolve() != RECALL:
        raise InvalidInputError("no prompts: give --prompt or --prompts with a model of your own")
    from paged.models.recall.task import sample_prompts

    sampled = sample_prompts(args.seed, args.count)
    return [prompt.text for prompt in sampled], [prompt.answer for prompt in sampled]


def _load_tokenizer(model: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UnsupportedError("paged generate needs the tokenizers package: pip install 'paged[cli]'") from error
    path = model / "tokenizer.json"
    if not path.is_file():
        raise InvalidInputError(f"{path}: no such file")
    return Tokenizer.from_file(str(path))


def _eos_token_ids(model: Path) -> list[int]:
    """From generation_config.json, else config.json, as in transformers; either may hold one id or several."""
    for name in ("generation_config.json", "config.json"):
        path = model / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return list(found) if isinstance(found, list) else [int(found)]
    return []


def _run(
    executor: LlmExecutor,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    expected: Sequence[str] | None,
    args: argparse.Namespace,
) -> tuple[list[Answer], Summary]:
    from tqdm import tqdm

    from paged.executors.engine import Engine
    from paged.executors.engine_config import EngineConfig
    from paged.executors.sampling_params import SamplingParams

    manager = executor.kv_manager
    assert manager is not None  # from_pretrained's models keep their KV in one
    config = EngineConfig(token_budget=args.token_budget, chunk_size=args.chunk_size)
    engine = Engine(executor, config, tokenizer=tokenizer, eos_token_ids=_eos_token_ids(args.model))
    params = SamplingParams(temperature=0, max_tokens=args.max_new_tokens)
    outputs = [engine.add_request(tokenizer.encode(prompt).ids, params) for prompt in prompts]
    metrics, peak_blocks, start = engine.metrics, 0, time.perf_counter()
    total = sum(len(output.prompt_token_ids) for output in outputs)
    with tqdm(total=total, unit="tok", desc="prefill and decode", disable=args.json) as bar:
        while engine.num_unfinished:
            before = metrics.decode_tokens
            engine.step()
            used = manager.stats().used_blocks
            peak_blocks = max(peak_blocks, used)
            bar.total += metrics.decode_tokens - before
            bar.set_postfix(blocks=used, done=len(prompts) - engine.num_unfinished)
            bar.update(metrics.prefill_tokens + metrics.decode_tokens - bar.n)
    seconds = time.perf_counter() - start

    answers = []
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if output.error is not None:
            raise PagedError(f"prompt {index}: {output.error}")
        text = output.outputs[0].text.strip()
        want = None if expected is None else expected[index]
        answers.append(
            Answer(
                prompt=prompt,
                prompt_tokens=len(output.prompt_token_ids),
                text=text,
                new_tokens=len(output.outputs[0].token_ids),
                expected=want,
                correct=None if want is None else text == want,
            )
        )
    return answers, Summary(
        prompts=len(prompts),
        correct=None if expected is None else sum(bool(answer.correct) for answer in answers),
        steps=metrics.steps,
        mixed_steps=metrics.mixed_steps,
        prefill_tokens=metrics.prefill_tokens,
        decode_tokens=metrics.decode_tokens,
        seconds=seconds,
        tokens_per_second=(metrics.prefill_tokens + metrics.decode_tokens) / seconds,
        peak_blocks=peak_blocks,
        num_blocks=manager.config.num_blocks,
        block_size=args.block_size,
    )


def _print_table(answers: Sequence[Answer], summary: Summary, executor: LlmExecutor) -> None:
    marks = {True: "right", False: "WRONG", None: ""}
    width = max([len(answer.text) for answer in answers] + [6])
    print(f"{'tokens':>6}  {'prompt':48}  {'answer':{width}}")
    for answer in answers:
        prompt = answer.prompt if len(answer.prompt) <= 48 else f"{answer.prompt[:20]} ... {answer.prompt[-23:]}"
        note = marks[answer.correct] + (f", expected {answer.expected}" if answer.correct is False else "")
        print(f"{answer.prompt_tokens:6}  {prompt:48}  {answer.text:{width}}  {note}".rstrip())
    info = executor.info()
    if summary.correct is not None:
        print(f"{summary.correct} of {summary.prompts} right")
    print(
        f"{info.model_id} ({info.model_type}, {info.num_parameters:,} parameters, {info.dtype}) on {info.device}: "
        f"{summary.prefill_tokens} prompt and {summary.decode_tokens} decode tokens in {summary.steps} forwards "
        f"({summary.mixed_steps} mixed), {summary.seconds:.2f} s, {summary.tokens_per_second:.0f} tokens/s"
    )
    print(f"KV cache: {summary.peak_blocks} of {summary.num_blocks} blocks used, {summary.block_size} tokens each")
