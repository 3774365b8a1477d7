"""`paged` itself, and `paged generate`: right answers, options that reach the engine, named errors."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import paged
from paged import ChatTokenizer
from paged.executors.command_line import cli
from paged.executors.command_line.cli import RECALL
from paged.models.recall.task import RecallPrompt, sample_prompts
from tests.models.lora.folders import Adapter

Generate = Callable[..., dict[str, Any]]


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Generate:
    """What `paged generate --json` prints; its errors with exit code 1."""

    def run(*arguments: str, code: int = 0) -> dict[str, Any]:
        assert cli.main(["generate", *arguments, "--json"]) == code
        found = capsys.readouterr()
        return json.loads(found.out) if code == 0 else {"error": found.err}

    return run


@pytest.fixture
def prompt() -> RecallPrompt:
    return sample_prompts(3, 1)[0]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The bundled checkpoint, in a folder of one's own."""
    return Path(shutil.copytree(RECALL, tmp_path / "mine", ignore=shutil.ignore_patterns("*.py", "__pycache__")))


def texts(result: dict[str, Any]) -> list[str]:
    return [answer["text"].strip() for answer in result["answers"]]


def test_help_and_version_take_no_torch() -> None:
    for argument, expected in (("--version", f"paged {paged.__version__}\n"), ("--help", "generate")):
        code = (
            f"import sys; from paged.executors.command_line.cli import main\ntry: main(['{argument}'])\n"
            "except SystemExit as end: assert not end.code and 'torch' not in sys.modules"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert expected in result.stdout


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert "--json" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--no-such-option"])
    assert end.value.code == 2


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


def test_prompts_of_files_and_errors(
    capsys: pytest.CaptureFixture[str], generate: Generate, tmp_path: Path, prompt: RecallPrompt
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f"{prompt.text}\n\n")
    assert cli.main(["generate", "--prompts", str(path), "--prompt", prompt.text]) == 0
    assert capsys.readouterr().out.count(f"\n{prompt.answer}\n") == 2
    for arguments, message in (
        (("--prompts", str(tmp_path / "none")), "No such file"),
        (("--num-blocks", "2"), "the cache holds 32"),
        (("--lora", "french"), "expected NAME=FOLDER"),
        (("--lora", "french=x", "--lora", "french=y"), "each name once"),
        (("--temperature", "-1"), "temperature: -1.0, expected"),
        (("--prompt", "x", "--chat"), "no chat template"),
        (("--device", "gpu"), "--device gpu: expected cpu, cuda"),
        *([] if torch.cuda.is_available() else [(("--device", "cuda"), "--device cuda: torch sees no GPU here")]),
    ):
        assert message in generate(*arguments, code=1)["error"]


def test_prompts_of_stdin(
    generate: Generate, copy: Path, prompt: RecallPrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by name, or where a model of one's own is given no prompts and stdin is no terminal."""
    for arguments in (("--prompts", "-"), (str(copy),)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{prompt.text}\n"))
        assert texts(generate(*arguments)) == [prompt.answer]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "no prompts" in generate(str(copy), code=1)["error"]
    assert generate("--count", "1")["summary"]["correct"] == 1, "the bundled task does not wait for stdin"
    terminal = io.StringIO("never read")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert "no prompts" in generate(str(copy), code=1)["error"]


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
    assert generate("--count", "2", "--kv-cache-dtype", "fp8")["summary"]["correct"] == 2


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


def test_folders_that_lack_files(generate: Generate, copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    (copy / "model.safetensors").rename(copy / "weights.bin")
    error = generate(str(copy), "--prompt", "x", code=1)["error"]
    assert "tokenizer.json, *.safetensors missing; there is config.json" in error
    assert "a file, expected a folder" in generate(str(copy / "config.json"), "--prompt", "x", code=1)["error"]
    assert "no such folder, and no OWNER/NAME" in generate("./nowhere", "--prompt", "x", code=1)["error"]


def test_models_of_the_hub(
    generate: Generate, copy: Path, prompt: RecallPrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str], list[str]]] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns, ignore_patterns))
        return str(copy)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert texts(generate("owner/model-1.5", "--prompt", prompt.text)) == [prompt.answer]
    ((repo_id, wanted, unwanted),) = asked
    files = (
        "model.safetensors",
        "config.json",
        "chat_template.jinja",
        "tokenizer.model",
        "a.bin",
        "consolidated.safetensors",
    )
    filtered = huggingface_hub.utils.filter_repo_objects(files, allow_patterns=wanted, ignore_patterns=unwanted)
    assert (repo_id, tuple(filtered)) == ("owner/model-1.5", files[:4])

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    error = generate("owner/model", "--prompt", "x", code=1)["error"]
    assert "UnsupportedError" in error
    assert "pip install" in error


def test_hub_offline(tmp_path: Path) -> None:
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-m", "paged", "generate", "owner/model", "--prompt", "x"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "CheckpointError: model 'owner/model': no such folder, not in the Hub's cache" in result.stderr
    assert "hf download owner/model" in result.stderr
    assert "Traceback" not in result.stderr


# The interpreter would take minutes.
_TWINS = {"PAGED_BACKEND": "torch"}


def _process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m paged` with these."""
    command = [sys.executable, "-m", "paged", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)


@pytest.mark.parametrize("arguments", [["--help"], ["bench"], ["bench", "--json"], ["info"]])
@pytest.mark.parametrize("is_buffered", [True, False])
def test_a_full_disk(arguments: list[str], is_buffered: bool) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": "" if is_buffered else "1"}
    with open("/dev/full", "w") as full:
        result = _process(*arguments, stdout=full, env=environment)
    assert (result.returncode, result.stderr) == (1, "paged: OSError: No space left on device\n")


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams(closed: tuple[int, ...]) -> None:
    """What is not there is not written to, be it by a progress bar."""
    code = (
        f"import os, sys; [os.close(one) for one in {closed}]; "
        "os.execv(sys.executable, [sys.executable, '-m', 'paged', 'generate', '--count', '1'])"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | _TWINS)
    assert result.returncode == 0
    assert (result.stdout == "") == (1 in closed)
    assert "Traceback" not in result.stderr


def test_nobody_reads() -> None:
    receiver, sender = os.pipe()
    os.close(receiver)
    result = _process("bench", "--json", stdout=sender)
    os.close(sender)
    assert (result.returncode, result.stderr) == (0, "")
    assert _process("bench", "--json", stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("wait_s", [0.0, 0.05, 0.2, 0.5, 1.0, 2.0])
def test_an_interrupt_at_any_moment(wait_s: float) -> None:
    """From the first import of ours on: before it Python itself starts."""
    code = (
        "import sys, paged.__main__ as entry; print('here', flush=True); "
        "sys.argv = ['paged', 'generate', '--count', '99999']; sys.exit(entry.main())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "here\n"
        time.sleep(0.02 + wait_s)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()


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
