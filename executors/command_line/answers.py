"""What `paged generate` reports: answers, and what a whole run took."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paged.executors.command_line.prompts import Prompt
from paged.printable import one_line

if TYPE_CHECKING:
    from paged.executors.engine.engine import Engine
    from paged.executors.llm_executor import LlmExecutor
    from paged.executors.requests.output import RequestOutput
    from paged.executors.text.chat_tokenizer import ChatTokenizer

# Of the engine's metrics.
_COUNTS = "steps mixed_steps prefill_tokens decode_tokens draft_tokens accepted_tokens".split()
Report = dict[str, Any]


def answers_of(prompt: Prompt, adapter: str | None, output: RequestOutput) -> list[Report]:
    """The completions of a request that has ended. `expected` and `correct` are None unless the task tells what is
    right; `logprobs` has, for every token, log probabilities by token id, the chosen one first.
    """
    return [
        {
            "prompt": prompt.text,
            "prompt_tokens": len(output.prompt_token_ids),
            "adapter": adapter,
            "text": one.text,
            "new_tokens": len(one.token_ids),
            "finish_reason": one.finish_reason,
            "expected": prompt.expected,
            "correct": None if prompt.expected is None else one.text.strip() == prompt.expected,
            "logprobs": one.logprobs,
        }
        for one in output.outputs
    ]


def summary_of(answers: Sequence[Report], engine: Engine, peak_blocks: int, seconds: float, num_prompts: int) -> Report:
    """What the engine measured in a run that has ended. Tokens are those that went through the model, drafts included;
    blocks are of the KV cache, at the most.
    """
    metrics, manager = engine.metrics, engine.executor.kv_manager
    assert manager is not None
    is_task = any(answer["expected"] is not None for answer in answers)
    return {
        "prompts": num_prompts,
        "correct": sum(answer["correct"] for answer in answers) if is_task else None,
        **{name: getattr(metrics, name) for name in _COUNTS},
        "seconds": seconds,
        "tokens_per_second": (metrics.prefill_tokens + metrics.decode_tokens) / seconds,
        "peak_blocks": peak_blocks,
        "num_blocks": manager.config.num_blocks,
        "block_size": manager.config.block_size,
    }


def print_answers(
    answers: Sequence[Report], summary: Report, executor: LlmExecutor, tokenizer: ChatTokenizer, *, is_streamed: bool
) -> None:
    """Answers on stdout; what was done on stderr where the text was streamed, so that it can be piped on."""
    if is_streamed:
        print()
        _print_logprobs(answers[0], tokenizer)
    elif summary["correct"] is None:
        for answer in answers:
            adapter = "" if answer["adapter"] is None else f" [{answer['adapter']}]"
            print(f"--- {_short(answer['prompt'])}{one_line(adapter)}\n{answer['text']}")
            _print_logprobs(answer, tokenizer)
    else:
        _print_task(answers)
        print(f"{summary['correct']} of {len(answers)} right")
    info, stream = executor.info(), sys.stderr if is_streamed else sys.stdout
    drafts = ", {accepted_tokens} of {draft_tokens} drafts right" if summary["draft_tokens"] else ""
    counts = (
        "{prefill_tokens} prompt and {decode_tokens} decode tokens in {steps} forwards ({mixed_steps} mixed)"
        f"{drafts}, {{seconds:.2f}} s, {{tokens_per_second:.0f}} tokens/s\n"
        "KV cache: {peak_blocks} of {num_blocks} blocks used, {block_size} tokens each"
    )
    print(
        f"{one_line(info.model_id)} ({info.model_type}, {info.num_parameters:,} parameters, {info.dtype}) "
        f"on {info.device}: {counts.format(**summary)}",
        file=stream,
    )


def _print_task(answers: Sequence[Report]) -> None:
    """A line an answer, with what is right."""
    texts = [one_line(answer["text"].strip()) for answer in answers]
    width = max([len(text) for text in texts] + [6])
    print(f"{'tokens':>6}  {'prompt':48}  {'answer':{width}}")
    for answer, text in zip(answers, texts, strict=True):
        note = "right" if answer["correct"] else f"WRONG, expected {answer['expected']}"
        print(f"{answer['prompt_tokens']:6}  {_short(answer['prompt']):48}  {text:{width}}  {note}")


def _print_logprobs(answer: Report, tokenizer: ChatTokenizer) -> None:
    """A line a token: the chosen one's log probability, then those of the best."""
    for table in answer["logprobs"] or ():
        print("  " + "  ".join(f"{tokenizer.decode([token])!r} {value:.3f}" for token, value in table.items()))


def _short(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= 48 else f"{line[:20]} ... {line[-23:]}"
