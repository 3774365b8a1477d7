"""generate_steps and `paged generate` on the bundled checkpoint: right answers, any chunking, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from paged import InvalidInputError, LlmExecutor
from paged.executors import cli
from paged.executors.generate import Generation, generate_steps
from paged.models.recall.task import sample_prompts

RECALL = Path(cli.RECALL)
TOKENIZER = Tokenizer.from_file(str(RECALL / "tokenizer.json"))
EOS = cli._eos_token_ids(RECALL)


@pytest.fixture(autouse=True)
def _torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("PAGED_BACKEND", "torch")


def _answers(num_blocks: int, **options: int) -> list[str]:
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=num_blocks)
    prompts = sample_prompts(7, 6, max_tokens=160)
    generations = [Generation(str(i), TOKENIZER.encode(prompt.text).ids, 8) for i, prompt in enumerate(prompts)]
    for _ in generate_steps(executor, generations, eos_token_ids=EOS, block_size=16, **options):
        pass
    assert executor.kv_manager is not None
    assert executor.kv_manager.stats().used_blocks == 0
    texts = [TOKENIZER.decode([t for t in generation.token_ids if t not in EOS]).strip() for generation in generations]
    assert texts == [prompt.answer for prompt in prompts]
    return texts


def test_same_text_for_any_chunking_and_pool() -> None:
    whole = _answers(64, chunk_size=512, token_budget=2048)
    assert _answers(64, chunk_size=4, token_budget=64) == whole
    assert _answers(64, chunk_size=64, token_budget=7) == whole
    assert _answers(12, chunk_size=64, token_budget=256) == whole  # room for one or two prompts at a time


def test_steps_mix_prefill_and_decode_and_count_every_token() -> None:
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=64)
    lengths = (17, 90, 40)
    generations = [Generation(str(n), list(range(3, 3 + n)), 4) for n in lengths]
    steps = list(generate_steps(executor, generations, chunk_size=16, token_budget=48))
    assert sum(step.prefill_tokens for step in steps) == sum(lengths)
    assert sum(step.decode_tokens for step in steps) == 3 * len(lengths)
    assert any(step.prefill_tokens and step.decode_tokens for step in steps)
    assert all(step.prefill_tokens + step.decode_tokens <= 48 for step in steps)
    assert [len(generation.token_ids) for generation in generations] == [4, 4, 4]
    status = executor.status()
    assert (status.prefill_count, status.decode_count) == (3, 9)


def test_stopping_early_gives_the_blocks_back() -> None:
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=64)
    steps = generate_steps(executor, [Generation("a", [3] * 100, 50)], chunk_size=32)
    next(steps)
    assert executor.kv_manager is not None
    assert executor.kv_manager.stats().used_blocks > 0
    steps.close()
    assert executor.kv_manager.stats().used_blocks == 0


def test_rejects_what_can_never_run() -> None:
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=4)
    with pytest.raises(InvalidInputError, match="80 tokens with what it may generate, the cache holds 64"):
        next(generate_steps(executor, [Generation("a", [3] * 60, 10)], block_size=16))
    with pytest.raises(InvalidInputError, match="chunk_size 0"):
        next(generate_steps(executor, [Generation("a", [3], 1)], chunk_size=0))


def test_command_answers_its_own_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--count", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["summary"]["correct"] == 4
    assert result["summary"]["peak_blocks"] > 0
    assert [answer["text"] for answer in result["answers"]] == [answer["expected"] for answer in result["answers"]]
    assert cli.main(["generate", "--count", "3", "--dtype", "bfloat16"]) == 0
    table = capsys.readouterr().out
    assert table.count(" right") == 3 + 1
    assert "torch.bfloat16" in table


def test_command_takes_prompts_and_names_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (prompt,) = sample_prompts(3, 1)
    path = tmp_path / "prompts.txt"
    path.write_text(f"{prompt.text}\n\n")
    assert cli.main(["generate", "--prompts", str(path), "--prompt", prompt.text]) == 0
    assert capsys.readouterr().out.count(prompt.answer) >= 2
    for arguments, message in (
        ([str(tmp_path), "--prompt", "x"], "tokenizer.json: no such file"),
        ([str(tmp_path)], "no prompts"),
        (["--prompts", str(tmp_path / "none")], "No such file"),
        (["--num-blocks", "2"], "the cache holds 32"),
    ):
        assert cli.main(["generate", *arguments]) == 1
        assert message in capsys.readouterr().err
