"""`paged generate`: prompts through a checkpoint, many at once."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from paged.errors import InvalidInputError, PagedError, UnsupportedError
from paged.executors.command_line.answers import answers_of, print_answers, summary_of
from paged.executors.command_line.checkpoint_folder import checkpoint_folder
from paged.executors.command_line.generate_arguments import DESCRIPTION, add_arguments, lora_folders
from paged.executors.command_line.prompts import Prompt, read_prompts
from paged.executors.command_line.safe_output import native_stderr_dropped, print_json
from paged.executors.progress import progress_bar

if TYPE_CHECKING:
    import torch

    from paged.executors.engine.engine import Engine
    from paged.executors.llm_executor import LlmExecutor
    from paged.executors.requests.output import RequestOutput
    from paged.executors.requests.sampling_params import SamplingParams
    from paged.executors.speculation.proposer import Proposer
    from paged.executors.text.chat_tokenizer import ChatTokenizer

__all__ = ["DESCRIPTION", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Answer, print; 1 where an answer is known to be wrong."""
    from paged.executors.engine.config import EngineConfig
    from paged.executors.engine.engine import Engine
    from paged.executors.text.chat_tokenizer import ChatTokenizer

    folders = lora_folders(args.lora)
    prompts = read_prompts(args)
    folder = checkpoint_folder(args.model)
    with native_stderr_dropped():
        tokenizer = ChatTokenizer.from_folder(folder)
        ids = [_encode(tokenizer, prompt, args) for prompt in prompts]
    params = _sampling_params(args)
    executor = _executor(folder, args)
    for name, adapter in folders.items():
        executor.load_lora(name, adapter)
    if args.warmup:
        executor.warmup()
    engine = Engine(
        executor,
        EngineConfig(
            token_budget=args.token_budget,
            chunk_size=args.chunk_size,
            max_num_seqs=args.max_num_seqs,
            preemption="swap" if args.num_swap_blocks else "recompute",
        ),
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.eos_token_ids,
        proposer=_proposer(args),
        seed=args.seed,
    )
    # Every prompt with every adapter, or with none.
    pairs = [(index, name) for index in range(len(prompts)) for name in (folders or [None])]
    outputs = [
        engine.add_request(ids[index], params, metadata={"lora_adapter": name} if name else None)
        for index, name in pairs
    ]
    is_streamed = len(outputs) == params.n == 1 and prompts[0].expected is None and not args.json
    peak_blocks, seconds = _run(engine, outputs, is_streamed=is_streamed, shows_bar=not args.json)
    for (index, _), output in zip(pairs, outputs, strict=True):
        if output.error is not None:
            raise PagedError(f"prompt {index}: {output.error}")
    answers = [
        answer
        for (index, name), output in zip(pairs, outputs, strict=True)
        for answer in answers_of(prompts[index], name, output)
    ]
    summary = summary_of(answers, engine, peak_blocks, seconds, len(prompts))
    if args.json:
        print_json({"answers": [asdict(answer) for answer in answers], "summary": asdict(summary)})
    else:
        print_answers(answers, summary, executor, tokenizer, is_streamed=is_streamed)
    return int(any(answer.correct is False for answer in answers))


def _encode(tokenizer: ChatTokenizer, prompt: Prompt, args: argparse.Namespace) -> list[int]:
    if not args.chat:
        return tokenizer.encode(prompt.text, parse_special=args.parse_special)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = [*system, {"role": "user", "content": prompt.text}]
    return tokenizer.encode_chat(messages, parse_special=args.parse_special)


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    from paged.executors.requests.sampling_params import SamplingParams

    names = vars(args).keys() & {one.name for one in fields(SamplingParams)}
    return SamplingParams(**{name: vars(args)[name] for name in names})


def _executor(folder: Path, args: argparse.Namespace) -> LlmExecutor:
    import torch

    from paged.executors.llm_executor import LlmExecutor

    return LlmExecutor.from_pretrained(
        folder,
        device=_device(args.device),
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        max_seq_len=args.max_seq_len,
        num_swap_blocks=args.num_swap_blocks,
        kv_cache_dtype=args.kv_cache_dtype,
        max_loras=max(len(args.lora), 1),
        max_lora_rank=args.max_lora_rank,
    )


def _device(name: str | None) -> torch.device | None:
    import torch

    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidInputError(f"--device {name}: expected cpu, cuda, cuda:1, ...") from error
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"--device {name}: the kernels run on cpu and cuda (ROCm's GPUs too)")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f"--device {name}: torch sees no GPU here; `paged info` says more")
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.index is not None and device.index >= count:
        raise InvalidInputError(f"--device {name}: there are {count}, counted from 0")
    return device


def _proposer(args: argparse.Namespace) -> Proposer | None:
    from paged.executors.speculation.draft_model import DraftModel
    from paged.executors.speculation.prompt_lookup import PromptLookup

    count = args.speculate
    if args.draft is not None:
        draft = _executor(checkpoint_folder(args.draft), args)
        return DraftModel(draft, 4 if count is None else count, token_budget=args.token_budget)
    return None if count is None else PromptLookup(count)


def _run(engine: Engine, outputs: Sequence[RequestOutput], *, is_streamed: bool, shows_bar: bool) -> tuple[int, float]:
    """Step to the end, with the text or a bar as it comes; blocks in use at the most, and seconds."""
    manager, metrics = engine.executor.kv_manager, engine.metrics
    assert manager is not None  # from_pretrained's models keep their KV in one
    peak_blocks, printed, start = 0, 0, time.perf_counter()
    total = sum(len(output.prompt_token_ids) for output in outputs)
    with closing(progress_bar(total, desc="prefill, decode", unit="tok", shown=shows_bar and not is_streamed)) as bar:
        while engine.num_unfinished:
            before = metrics.prefill_tokens + metrics.decode_tokens, metrics.decode_tokens
            engine.step()
            peak_blocks = max(peak_blocks, manager.stats().used_blocks)
            bar.total += metrics.decode_tokens - before[1]
            bar.update(metrics.prefill_tokens + metrics.decode_tokens - before[0])
            if is_streamed:
                text = outputs[0].outputs[0].text
                print(text[printed:], end="", flush=True)
                printed = len(text)
    return peak_blocks, time.perf_counter() - start
