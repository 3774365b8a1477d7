"""`paged generate`: right answers, options that reach the engine, where prompts and checkpoints come from, errors."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from paged import Engine, LlmExecutor, SamplingParams
from paged.errors import CheckpointError, UnsupportedError
from paged.models.recall.task import sample_prompts
from paged.serving.command_line import cli
from paged.serving.command_line.cli import RECALL
from tests.models.drafts.heads import save_head
from tests.models.lora.folders import Adapter

Generate = Callable[..., dict[str, Any]]
PROMPT = sample_prompts(3, 1)[0]


@pytest.fixture
def generate(run: Generate) -> Generate:
    """What `paged generate --json` prints; its errors with exit code 1."""
    return partial(run, "generate")


def stdin_of(text: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(text.encode()))


def texts(result: dict[str, Any]) -> list[str]:
    """The answers, without spaces around."""
    return [answer["text"].strip() for answer in result["answers"]]


def test_command_answers_its_own_task(capsys: pytest.CaptureFixture[str], generate: Generate) -> None:
    result = generate("--count", "4", "--device", "cpu")
    assert result["summary"]["correct"] == 4
    assert result["summary"]["peak_blocks"] > 0
    assert [answer["text"] for answer in result["answers"]] == [answer["expected"] for answer in result["answers"]]
    assert cli.main(["generate", "--count", "3", "--dtype", "bfloat16"]) == 0
    table = capsys.readouterr().out
    assert table.count(" right") == 3 + 1
    assert "torch.bfloat16" in table
    assert cli.main(["generate", "--count", "2", "--max-new-tokens", "1"]) == 1, "one token is too short an answer"
    assert "WRONG, expected" in capsys.readouterr().out


def test_prompts_stream(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Only the text of one goes to stdout; files have one a line, and blank ones."""
    assert cli.main(["generate", "--prompt", PROMPT.text]) == 0
    found = capsys.readouterr()
    assert found.out == f"{PROMPT.answer}\n"
    assert "tokens/s" in found.err
    path = tmp_path / "prompts.txt"
    path.write_text(f"{PROMPT.text}\n\n")
    assert cli.main(["generate", "--prompts", str(path), "--prompt", PROMPT.text]) == 0
    assert capsys.readouterr().out.count(f"\n{PROMPT.answer}\n") == 2


def test_sampling_options(generate: Generate) -> None:
    arguments = ("--prompt", PROMPT.text, "--temperature", "30", "--ignore-eos", "--max-new-tokens", "6", "-n", "3")
    first, again, other = (texts(generate(*arguments, "--seed", seed)) for seed in ("1", "1", "2"))
    assert first == again != other
    assert len(set(first)) == 3
    (greedy,) = generate("--prompt", PROMPT.text, "--stop", PROMPT.answer[-2:])["answers"]
    assert (greedy["text"], greedy["finish_reason"]) == (PROMPT.answer[:-2], "stop")


def test_speculation_and_drafts(generate: Generate) -> None:
    whole = ("--count", "3", "--max-new-tokens", "8", "--chunk-size", "512", "--token-budget", "2048")
    options = ((), ("--speculate", "2"), ("--draft", str(RECALL), "--draft-min-probability", "0.5"))
    results = [generate(*whole, *option) for option in options]
    assert texts(results[0]) == texts(results[1]) == texts(results[2])
    plain, looked_up, drafted = (result["summary"] for result in results)
    assert plain["draft_tokens"] == 0 < looked_up["draft_tokens"]
    assert 0 < drafted["accepted_tokens"] <= drafted["draft_tokens"]
    assert drafted["steps"] < plain["steps"]


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("mtp", marks=pytest.mark.thorough)])
def test_draft_heads(kind: str, generate: Generate, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A random head drafts, the answers stay right, and no tensor is reported as not loaded."""
    save_head(kind, tmp_path)
    model, draft = (tmp_path, "mtp") if kind == "mtp" else (RECALL, tmp_path)
    result = generate(str(model), "--prompt", PROMPT.text, "--draft", str(draft), "--speculate", "2")
    assert texts(result) == [PROMPT.answer]
    assert result["summary"]["accepted_tokens"] < result["summary"]["draft_tokens"]
    assert not caplog.records


def test_adapters_answer_side_by_side(generate: Generate, tmp_path: Path) -> None:
    """One that changes next to nothing is right, and one that changes much is not."""
    weak = Adapter(("q_proj", "o_proj"), alpha=1e-6, seed=1).save(tmp_path / "weak", RECALL)
    strong = Adapter(("q_proj", "o_proj"), alpha=1e3, seed=1).save(tmp_path / "strong", RECALL)
    result = generate("--prompt", PROMPT.text, "--lora", f"weak={weak}", "--lora", f"strong={strong}")
    assert [answer["adapter"] for answer in result["answers"]] == ["weak", "strong"]
    right, wrong = texts(result)
    assert right == PROMPT.answer != wrong


def test_chat_template(generate: Generate, copy: Path) -> None:
    """The system's text makes the question one that the template completes."""
    facts, _, question = PROMPT.text.partition("; ")
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}; {{ messages[1].content }}")
    assert texts(generate(str(copy), "--chat", "--system", facts, "--prompt", question)) == [PROMPT.answer]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--count", "-1"), "--count -1: expected 1 to 100000"),
        (("--system", "x"), "--system: only allowed with --chat"),
        (("--speculate", "2", "--draft-min-probability", "0.5"), "--draft-min-probability 0.5: expected --draft"),
        (("--device", "mps"), "device: 'mps', expected 'cpu', 'cuda', 'cuda:1'"),
        (("--prompt", "\udcff"), "is half of a surrogate pair"),
        (("--prompt", "x", "--chat"), "no chat template"),
        (("--prompts", "no/file"), "No such file"),
        (("--lora", "french"), "expected NAME=FOLDER"),
        (("\x1b]8;;x\x07\u202e", "--prompt", "x"), r"model '\x1b]8;;x\x07\u202e': no such folder"),
        (("\x00", "--prompt", "x"), "model"),
        (("./nowhere", "--prompt", "x"), "no such folder, and not OWNER/NAME"),
        ((str(RECALL / "config.json"), "--prompt", "x"), "a file, expected a folder"),
    ],
)
def test_options_that_are_no_good_are_one_line(arguments: tuple[str, ...], message: str, generate: Generate) -> None:
    error = generate(*arguments, code=1)["error"]
    assert message in error
    assert error.count("\n") == 1


def test_prompts_of_stdin(generate: Generate, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name, or where a model of one's own is given no prompts and stdin is no terminal."""
    for arguments in (("--prompts", "-"), (str(copy),)):
        monkeypatch.setattr(sys, "stdin", stdin_of(f"{PROMPT.text}\n"))
        assert texts(generate(*arguments)) == [PROMPT.answer]
    monkeypatch.setattr(sys, "stdin", stdin_of(""))
    assert "no prompts" in generate(str(copy), code=1)["error"]
    assert generate("--count", "1")["summary"]["correct"] == 1, "the bundled task does not wait for stdin"
    terminal = io.StringIO("never read")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert "no prompts" in generate(str(copy), code=1)["error"]


def test_models_of_the_hub(generate: Generate, inspect: Generate, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` downloads what running takes, and `inspect` no weights."""
    files = ["config.json", "chat_template.jinja", "tokenizer.model", "a.bin", "consolidated.safetensors"]
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        asked.append((repo_id, [*huggingface_hub.utils.filter_repo_objects(["model.safetensors", *files], **patterns)]))
        return str(copy)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert texts(generate("owner/model-1.5", "--prompt", PROMPT.text)) == [PROMPT.answer]
    assert inspect("owner/model")["parameters"] == 178_432
    assert asked == [("owner/model-1.5", ["model.safetensors", *files[:3]]), ("owner/model", files[:3])]

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    error = generate("owner/model", "--prompt", "x", code=1)["error"]
    assert "UnsupportedError" in error


@pytest.mark.parametrize(
    ("says", "given", "expected"),
    [
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}, (), (0.7, 0.8, 20, 1.1)),
        ({"do_sample": True, "temperature": 0.7, "top_k": None}, ("--temperature", "0.2"), (0.2, 1.0, 0, 1.0)),
        ({"temperature": 0.7, "top_k": 20}, ("--temperature", "0", "--top-k", "0"), (0.0, 1.0, 0, 1.0)),
        ({"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1}, (), (0.0, 1.0, 0, 1.1)),
        ({}, (), (0.0, 1.0, 0, 1.0)),
    ],
)
def test_sampling_is_what_the_checkpoint_says(
    says: dict[str, Any],
    given: tuple[str, ...],
    expected: tuple[float, ...],
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3], **says}))
    added: list[SamplingParams] = []
    add = Engine.add_request
    monkeypatch.setattr(
        Engine, "add_request", lambda self, ids, params, **rest: added.append(params) or add(self, ids, params, **rest)
    )
    assert cli.main(["generate", str(copy), "--prompt", PROMPT.text, "--max-new-tokens", "1", "--verbose", *given]) == 0
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    assert tuple(getattr(added[0], name) for name in names) == expected
    table = [line.split(maxsplit=2) for line in capsys.readouterr().err.splitlines()[:6]]
    for name, value, source in table:
        if name in names:
            is_given, is_said = f"--{name.replace('_', '-')}" in given, says.get(name) is not None
            is_said |= name == "temperature" and says.get("do_sample") is False
            assert source == ("command line" if is_given else "generation_config.json" if is_said else "default")
            assert float(value) == getattr(added[0], name)
    assert " ".join(table[-1]).split() == ["end", "tokens", "1,", "3", "checkpoint"]
    params = LlmExecutor.from_pretrained(copy, num_blocks=4).default_sampling_params
    of_file = {name: value for name, value in says.items() if value is not None and name in names}
    if says.get("do_sample") is False:
        of_file["temperature"] = 0.0
    assert params == SamplingParams(**of_file)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1), ("temperature", True), ("top_p", 1.5), ("top_k", 0.5), ("top_k", "20")]
)
def test_sampling_that_cannot_be_is_named(name: str, value: object, copy: Path, generate: Generate) -> None:
    """By who uses it: the checkpoint loads."""
    (copy / "generation_config.json").write_text(json.dumps({name: value}))
    assert f"generation_config.json: {name}: " in generate(str(copy), "--prompt", "x", code=1)["error"]
    executor = LlmExecutor.from_pretrained(copy, num_blocks=4)
    with pytest.raises(CheckpointError, match=name):
        _ = executor.default_sampling_params


def test_from_pretrained_takes_the_hubs_cache(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    commit, cached = "0" * 40, tmp_path / "hub" / "models--an-owner--its-model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    shutil.copytree(copy, cached / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    assert LlmExecutor.from_pretrained("an-owner/its-model", num_blocks=4).info().model_id == "an-owner/its-model"
    with pytest.raises(CheckpointError, match=r"an-owner/other.*not in the Hub's cache"):
        LlmExecutor.from_pretrained("an-owner/other")
    shutil.copytree(copy, tmp_path / "an-owner" / "other")
    assert LlmExecutor.from_pretrained("an-owner/other", num_blocks=4).info().model_id == "other", (
        "a folder comes first"
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedError, match="huggingface_hub"):
        LlmExecutor.from_pretrained("an-owner/its-model")
