"""`paged generate`: right answers, options that reach the engine, named errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged import ChatTokenizer
from paged.executors.command_line import cli
from paged.executors.command_line.cli import RECALL
from paged.models.recall.task import RecallPrompt
from tests.executors.command_line.commands import Generate, texts
from tests.models.lora.folders import Adapter


def test_command_answers_its_own_task(capsys: pytest.CaptureFixture[str], generate: Generate) -> None:
    result = generate("--count", "4")
    assert result["summary"]["correct"] == 4
    assert result["summary"]["peak_blocks"] > 0
    assert [answer["text"] for answer in result["answers"]] == [answer["expected"] for answer in result["answers"]]
    assert cli.main(["generate", "--count", "3", "--dtype", "bfloat16"]) == 0
    table = capsys.readouterr().out
    assert table.count(" right") == 3 + 1
    assert "torch.bfloat16" in table
    assert cli.main(["generate", "--count", "2", "--max-new-tokens", "1"]) == 1, "one token is too short an answer"
    assert "WRONG, expected" in capsys.readouterr().out


def test_one_prompt_streams(capsys: pytest.CaptureFixture[str], prompt: RecallPrompt) -> None:
    """Only the text goes to stdout."""
    assert cli.main(["generate", "--prompt", prompt.text]) == 0
    found = capsys.readouterr()
    assert found.out == f"{prompt.answer}\n"
    assert "tokens/s" in found.err


def test_chunks_and_budget_reach_the_engine(generate: Generate) -> None:
    def summary(*arguments: str) -> dict[str, int]:
        return dict(generate("--count", "3", *arguments)["summary"])

    whole, chunked = summary("--chunk-size", "512", "--token-budget", "2048"), summary("--token-budget", "32")
    assert whole["prefill_tokens"] == chunked["prefill_tokens"]
    assert chunked["steps"] >= whole["prefill_tokens"] / 32 > whole["steps"]
    assert chunked["mixed_steps"] > whole["mixed_steps"] == 0
    small = summary("--num-blocks", "48", "--max-num-seqs", "2", "--num-swap-blocks", "16", "--warmup")
    assert small["correct"] == 3
    assert small["peak_blocks"] <= 48


def test_sampling_options(generate: Generate, prompt: RecallPrompt) -> None:
    arguments = ("--prompt", prompt.text, "--temperature", "30", "--ignore-eos", "--max-new-tokens", "6", "-n", "3")
    first, again, other = (generate(*arguments, "--seed", seed) for seed in ("1", "1", "2"))
    assert texts(first) == texts(again) != texts(other)
    assert len(set(texts(first))) == 3
    for option in (("--top-k", "1"), ("--top-p", "1e-9"), ("--min-p", "1")):
        (best,) = set(texts(generate(*arguments, *option)))
        assert best.startswith(prompt.answer)
    (greedy,) = generate("--prompt", prompt.text, "--logprobs", "2", "--stop", prompt.answer[-2:])["answers"]
    assert greedy["text"] == prompt.answer[:-2]
    assert greedy["finish_reason"] == "stop"
    assert [len(table) for table in greedy["logprobs"]] == [2] * greedy["new_tokens"]
    free = generate("--prompt", prompt.text, "--ignore-eos", "--max-new-tokens", "20")
    held = generate("--prompt", prompt.text, "--ignore-eos", "--max-new-tokens", "20", "--frequency-penalty", "50")
    assert texts(free) != texts(held)


def test_speculation_cache_dtype_and_drafts(generate: Generate) -> None:
    whole = ("--count", "3", "--max-new-tokens", "8", "--chunk-size", "512", "--token-budget", "2048")
    plain = generate(*whole)
    looked_up, drafted = (
        generate(*whole, *option) for option in (("--speculate", "2"), ("--draft", str(RECALL), "--speculate", "3"))
    )
    assert texts(looked_up) == texts(drafted) == texts(plain)
    assert plain["summary"]["draft_tokens"] == 0 < looked_up["summary"]["draft_tokens"]
    assert 0 < drafted["summary"]["accepted_tokens"] <= drafted["summary"]["draft_tokens"]
    assert drafted["summary"]["steps"] < plain["summary"]["steps"]
    for name in ("fp8", "int8"):
        assert generate("--count", "2", "--kv-cache-dtype", name)["summary"]["correct"] == 2


def test_adapters_answer_side_by_side(generate: Generate, tmp_path: Path, prompt: RecallPrompt) -> None:
    """One that changes next to nothing is right, and one that changes much is not."""
    weak = Adapter(("q_proj", "o_proj"), alpha=1e-6, seed=1).save(tmp_path / "weak", RECALL)
    strong = Adapter(("q_proj", "o_proj"), alpha=1e3, seed=1).save(tmp_path / "strong", RECALL)
    result = generate("--prompt", prompt.text, "--lora", f"weak={weak}", "--lora", f"strong={strong}")
    assert [answer["adapter"] for answer in result["answers"]] == ["weak", "strong"]
    right, wrong = texts(result)
    assert right == prompt.answer != wrong
    assert (
        "rank 4, expected at most max_lora_rank 2"
        in generate("--lora", f"a={weak}", "--max-lora-rank", "2", code=1)["error"]
    )


def test_chat_template(generate: Generate, copy: Path, prompt: RecallPrompt) -> None:
    """The system's text makes the question one that the template completes."""
    facts, _, question = prompt.text.partition("; ")
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}; {{ messages[1].content }}")
    assert texts(generate(str(copy), "--chat", "--system", facts, "--prompt", question)) == [prompt.answer]
    (copy / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    assert "no system" in generate(str(copy), "--chat", "--prompt", question, code=1)["error"]


def test_options_that_are_no_good_are_one_line(generate: Generate) -> None:
    for arguments, message in (
        (("--count", "-1"), "--count -1: expected 1 to 100000"),
        (("--system", "x"), "--system: only with --chat"),
        (("--device", "mps"), "--device mps: the kernels run on cpu and cuda"),
        (("--prompt", "\udcff"), "is half of a character"),
        (("\x1b]8;;x\x07\u202e", "--prompt", "x"), r"model '\x1b]8;;x\x07\u202e': no such folder"),
        (("\x00", "--prompt", "x"), "model"),
        (("a" * 5000, "--prompt", "x"), "model"),
    ):
        error = generate(*arguments, code=1)["error"]
        assert message in error
        assert error.count("\n") == 1
    assert generate("--count", "1", "--device", "cpu")["summary"]["correct"] == 1


def test_special_tokens_in_prompts(generate: Generate, prompt: RecallPrompt, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count only where that is asked for."""
    asked: list[bool] = []
    encode = ChatTokenizer.encode

    def record(tokenizer: ChatTokenizer, text: str, *, parse_special: bool = False) -> list[int]:
        asked.append(parse_special)
        return encode(tokenizer, text, parse_special=parse_special)

    monkeypatch.setattr(ChatTokenizer, "encode", record)
    for option in ((), ("--parse-special",)):
        assert texts(generate("--prompt", prompt.text, *option)) == [prompt.answer]
    assert asked == [False, True]
