"""`paged generate`: answer prompts in batches with a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from paged.errors import InvalidInputError, PagedError
from paged.executors.progress import progress_bar
from paged.models.loading.checkpoint_folder import checkpoint_folder
from paged.serving.command_line.cli import RECALL
from paged.serving.command_line.engine_arguments import (
    add_engine_arguments,
    add_model_arguments,
    lora_folders,
    make_engine,
)
from paged.serving.command_line.safe_output import native_stderr_dropped, print_json
from paged.tools.printable import one_line

if TYPE_CHECKING:
    from paged.executors.engine.engine import Engine
    from paged.executors.llm_executor import LlmExecutor
    from paged.executors.requests.output import RequestOutput
    from paged.executors.requests.sampling_params import SamplingParams
    from paged.prompt_embeds import PromptEmbeds
    from paged.serving.text.chat_tokenizer import ChatTokenizer

_MAX_COUNT = 100_000
# Limit of the prompt file in bytes, because the file may be endless, like /dev/zero. No context holds as many tokens.
_MAX_BYTES = 64 << 20
# Engine metrics to print.
_COUNTS = "steps mixed_steps prefill_tokens decode_tokens draft_tokens accepted_tokens".split()
Report = dict[str, Any]

DESCRIPTION = (
    "Answer all prompts at once: chunked prefill and decode steps share a forward. One prompt streams its answer. "
    "Without a model, use the bundled recall checkpoint. Without prompts, that checkpoint answers its own task and "
    "the answers are checked."
)


class Prompt(NamedTuple):
    """A prompt. expected: the right answer, or None if unknown."""

    text: str
    expected: str | None = None


@dataclass(frozen=True)
class PromptRequest:
    """A request for a prompt. index: index of the prompt. adapter: None for the base model."""

    index: int
    prompt: Prompt
    adapter: str | None
    output: RequestOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for prompts, sampling, model and engine."""
    add_model_arguments(parser)

    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    prompts.add_argument("--prompts", metavar="FILE", help="one prompt a line; - for stdin")
    prompts.add_argument("--chat", action="store_true", help="prompts are user messages for the chat template")
    prompts.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="image before each prompt; implies --chat; may be repeated",
    )
    prompts.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    prompts.add_argument(
        "--parse-special",
        action="store_true",
        help="treat special tokens written in a prompt as special tokens, not as plain text",
    )
    prompts.add_argument("--count", type=int, default=16, help="number of recall prompts if none are given")

    sampling = parser.add_argument_group("sampling")
    default = "default: from generation_config.json"
    sampling.add_argument("-n", type=int, default=1, help="answers per prompt")
    sampling.add_argument(
        "--max-new-tokens",
        type=int,
        default=32,
        metavar="N",
        dest="max_tokens",
        help="maximum tokens of each answer; %(default)s",
    )
    sampling.add_argument("--temperature", type=float, help=f"0 takes the most probable token; {default}, else 0")
    sampling.add_argument("--top-k", type=int, help=f"0 keeps all tokens; {default}, else 0")
    sampling.add_argument("--top-p", type=float, help=f"{default}, else 1")
    sampling.add_argument("--min-p", type=float, help=f"fraction of the highest probability; {default}, else 0")
    sampling.add_argument("--repetition-penalty", type=float, help=f"{default}, else 1")
    sampling.add_argument("--presence-penalty", type=float, default=0.0)
    sampling.add_argument("--frequency-penalty", type=float, default=0.0)
    sampling.add_argument("--seed", type=int, default=0, help="seed of sampling and of the recall prompts")
    sampling.add_argument("--verbose", action="store_true", help="print the source of each value on stderr")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    sampling.add_argument("--ignore-eos", action="store_true", help="continue after end tokens")
    add_engine_arguments(parser, "answer with; if given several times, each prompt is answered with each adapter")


def run(args: argparse.Namespace) -> int:
    """Answer and print the prompts; return 1 if an answer is known to be wrong."""
    from paged.serving.text.chat_tokenizer import ChatTokenizer

    folders = lora_folders(args.lora)
    prompts = _read_prompts(args)
    folder = checkpoint_folder(args.model)
    with native_stderr_dropped():
        tokenizer = ChatTokenizer.from_folder(folder)
        encoded = _encode(folder, tokenizer, prompts, args)
    params = _sampling_params(folder, args)
    engine = make_engine(folder, args, tokenizer)
    executor = cast("LlmExecutor", engine.executor)
    # Every prompt runs with every adapter, or without adapter.
    adapters: list[str | None] = [*folders] or [None]
    requests = []
    for index, prompt in enumerate(prompts):
        token_ids, embeds = encoded[index]
        for adapter in adapters:
            output = engine.add_request(token_ids, params, adapter=adapter, prompt_embeds=embeds)
            requests.append(PromptRequest(index, prompt, adapter, output))
    is_streamed = len(requests) == params.n == 1 and prompts[0].expected is None and not args.json
    peak_blocks, seconds = _run(engine, requests, is_streamed=is_streamed, shows_bar=not args.json)
    if executor.kv_manager is not None:
        executor.kv_manager.close_tiers()
    for request in requests:
        if request.output.error is not None:
            raise PagedError(f"prompt {request.index}: {request.output.error}")
    answers = []
    for request in requests:
        answers += _answers_of(request)
    summary = _summary_of(answers, engine, peak_blocks, seconds, len(prompts))
    if args.json:
        print_json({"answers": answers, "summary": summary})
    else:
        _print_answers(answers, summary, executor, tokenizer, is_streamed=is_streamed)
    has_wrong_answer = any(answer["correct"] is False for answer in answers)
    return int(has_wrong_answer)


def _read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Return the prompts: every `--prompt`, then the lines of `--prompts`.

    Without both, the bundled checkpoint has its own task; for other models, stdin is read unless it is a terminal.

    Raises:
        InvalidInputError: there are no prompts, or the file cannot be read.
    """
    texts, is_recall = list(args.prompt), False
    with contextlib.suppress(OSError, ValueError):  # an invalid path
        is_recall = Path(args.model).resolve() == RECALL
    if args.system is not None and not (args.chat or args.image):
        raise InvalidInputError("--system: only allowed with --chat")
    if not 0 < args.count <= _MAX_COUNT:
        raise InvalidInputError(f"--count {args.count}: expected 1 to {_MAX_COUNT}")
    if args.prompts is not None:
        texts += _lines(args.prompts)
    elif not texts and not is_recall and sys.stdin is not None and not sys.stdin.isatty():
        texts += _lines("-")
    if texts:
        return [Prompt(text) for text in texts]
    if args.prompts is not None or not is_recall:
        raise InvalidInputError("no prompts: give --prompt TEXT, --prompts FILE, or lines on stdin")
    from paged.models.recall.task import sample_prompts

    return [Prompt(prompt.text, prompt.answer) for prompt in sample_prompts(args.seed, args.count)]


def _lines(source: str) -> list[str]:
    """Return the non-blank lines. Only newlines end a line; form feeds, U+2028 and so on are text."""
    if source == "-" and sys.stdin is None:
        raise InvalidInputError("--prompts -: stdin is closed")
    try:
        # Read bytes, because the text stream accepts some invalid UTF-8.
        if source == "-":
            data = sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"--prompts {source}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > _MAX_BYTES:
        raise InvalidInputError(f"--prompts {source}: more than {_MAX_BYTES} bytes")
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def _encode(
    folder: Path, tokenizer: ChatTokenizer, prompts: Sequence[Prompt], args: argparse.Namespace
) -> list[tuple[list[int], PromptEmbeds | None]]:
    """Return token ids and rows of images. The vision tower is freed before the executor allocates memory."""
    options = {"parse_special": args.parse_special}
    if not (args.chat or args.image):
        return [(tokenizer.encode(prompt.text, **options), None) for prompt in prompts]
    system = []
    if args.system is not None:
        system.append({"role": "system", "content": args.system})
    parts = [{"type": "image"}] * len(args.image)
    chats = []
    for prompt in prompts:
        content: Any = prompt.text
        if args.image:
            content = [*parts, {"type": "text", "text": prompt.text}]
        chats.append([*system, {"role": "user", "content": content}])
    if not args.image:
        return [(tokenizer.encode_chat(messages, **options), None) for messages in chats]
    from paged.serving.vision.images import ImageRules
    from paged.serving.vision.vision_model import VisionModel

    images = [ImageRules().read_file(Path(file)) for file in args.image]
    vision = VisionModel.from_folder(folder, tokenizer, dtype=args.dtype, device=args.device)
    return [vision.encode_chat(messages, images, **options) for messages in chats]


def _sampling_params(folder: Path, args: argparse.Namespace) -> SamplingParams:
    """Take each value from the arguments, else the checkpoint, else a default. --verbose prints the source."""
    from paged.executors.requests.sampling_params import CHECKPOINT_PARAMS, SamplingParams, sampling_defaults
    from paged.models.loading.hf_config import HfConfig, read_eos_token_ids

    file = "generation_config.json"
    of_checkpoint = sampling_defaults(HfConfig.read(folder, file, may_lack=True))
    of_command = {}
    for field in fields(SamplingParams):
        value = getattr(args, field.name, None)
        if value is not None:
            of_command[field.name] = value
    params = SamplingParams(**{"temperature": 0.0} | of_checkpoint | of_command)
    if args.verbose:
        for name in CHECKPOINT_PARAMS:
            source = "default"
            if name in of_command:
                source = "command line"
            elif name in of_checkpoint:
                source = file
            print(f"{name:20} {getattr(params, name)!s:>16}  {source}", file=sys.stderr)
        end_tokens = ", ".join(map(str, read_eos_token_ids(folder)))
        print(f"{'end tokens':20} {end_tokens:>16}  checkpoint", file=sys.stderr)
    return params


def _run(engine: Engine, requests: Sequence[PromptRequest], *, is_streamed: bool, shows_bar: bool) -> tuple[int, float]:
    """Run all requests, showing text or a progress bar; return the peak of used blocks and the seconds."""
    manager = engine.executor.kv_manager
    assert manager is not None  # models from `from_pretrained` have a cache manager
    peak_blocks, printed, start = 0, 0, time.perf_counter()
    bar = progress_bar(len(requests), desc="generate", unit="prompt", shown=shows_bar and not is_streamed)
    with contextlib.closing(bar):
        while engine.num_unfinished:
            bar.update(sum(output.finished for output in engine.step()))
            peak_blocks = max(peak_blocks, manager.stats().used_blocks)
            if is_streamed:
                text = requests[0].output.outputs[0].text
                print(text[printed:], end="", flush=True)
                printed = len(text)
    return peak_blocks, time.perf_counter() - start


def _answers_of(request: PromptRequest) -> list[Report]:
    """Return the completions of a finished request; `expected` and `correct` are None if the answer is unknown."""
    prompt = request.prompt
    answers = []
    for completion in request.output.outputs:
        answer = {
            "prompt": prompt.text,
            "prompt_tokens": len(request.output.prompt_token_ids),
            "adapter": request.adapter,
            "text": completion.text,
            "new_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "expected": prompt.expected,
            "correct": None,
        }
        if prompt.expected is not None:
            answer["correct"] = completion.text.strip() == prompt.expected
        answers.append(answer)
    return answers


def _summary_of(
    answers: Sequence[Report], engine: Engine, peak_blocks: int, seconds: float, num_prompts: int
) -> Report:
    """Return the engine's measurements of a finished run.

    Token counts are tokens that the model ran, drafts included. peak_blocks is the peak of KV cache blocks in use.
    """
    metrics, manager = engine.metrics, engine.executor.kv_manager
    assert manager is not None
    num_correct = None
    if any(answer["expected"] is not None for answer in answers):
        num_correct = sum(answer["correct"] for answer in answers)
    return {
        "prompts": num_prompts,
        "correct": num_correct,
        **{name: getattr(metrics, name) for name in _COUNTS},
        "seconds": seconds,
        "tokens_per_second": (metrics.prefill_tokens + metrics.decode_tokens) / seconds,
        "peak_blocks": peak_blocks,
        "num_blocks": manager.config.num_blocks,
        "block_size": manager.config.block_size,
    }


def _print_answers(
    answers: Sequence[Report], summary: Report, executor: LlmExecutor, tokenizer: ChatTokenizer, *, is_streamed: bool
) -> None:
    """Print answers on stdout. If the text was streamed, print only counts, on stderr, so that stdout can be piped."""
    if is_streamed:
        print()
    elif summary["correct"] is None:
        for answer in answers:
            title = _short(answer["prompt"])
            if answer["adapter"] is not None:
                title += one_line(f" [{answer['adapter']}]")
            print(f"--- {title}\n{answer['text']}")
    else:
        _print_task(answers)
        print(f"{summary['correct']} of {len(answers)} right")
    counts = "{prefill_tokens} prompt and {decode_tokens} decode tokens in {steps} forwards ({mixed_steps} mixed)"
    if summary["draft_tokens"]:
        counts += ", {accepted_tokens} of {draft_tokens} drafts right"
    counts += ", {seconds:.2f} s, {tokens_per_second:.0f} tokens/s\n"
    counts += "KV cache: {peak_blocks} of {num_blocks} blocks used, {block_size} tokens each"
    info = executor.info()
    model = f"{one_line(info.model_id)} ({info.model_type}, {info.num_parameters:,} parameters, {info.dtype})"
    stream = sys.stderr if is_streamed else sys.stdout
    print(f"{model} on {info.device}: {counts.format(**summary)}", file=stream)


def _print_task(answers: Sequence[Report]) -> None:
    """Print one line per answer, with the expected answer."""
    texts = [one_line(answer["text"].strip()) for answer in answers]
    width = max([len(text) for text in texts] + [6])
    print(f"{'tokens':>6}  {'prompt':48}  {'answer':{width}}")
    for answer, text in zip(answers, texts, strict=True):
        note = "right"
        if not answer["correct"]:
            note = f"WRONG, expected {answer['expected']}"
        print(f"{answer['prompt_tokens']:6}  {_short(answer['prompt']):48}  {text:{width}}  {note}")


def _short(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= 48 else f"{line[:20]} ... {line[-23:]}"
