"""Any arguments: an exit status, one line that says why where it is not 0, and nothing that steers a terminal."""

import io
import json
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from paged.serving.command_line.cli import main
from paged.tools.printable import one_line, printable, xml_text
from tests.fuzz.children import MOST_LOOPS, call_in_child
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import STEERING

ODD = st.text(max_size=6) | st.sampled_from([
    *("", "-", "--", "-1", "0", "1", "1.5", "nan", "inf", "-inf", "1e400", "9" * 30, "9" * 5000, "x", "\x1b]8;;x\x07"),
    *("�", "\u202ea", "\x00", "a" * 5000, "mps", "meta", "cuda:99", "cpu", "1_0", " 1", "\N{ARABIC-INDIC DIGIT ONE}"),
    *("=", "a=b", "a/b", "\n", "{}", "%s", "/dev/null", "/proc/self/mem", "..", "tests", "float16", "fp8"),
])  # fmt: skip
OPTIONS = """
    --prompt --prompts --system --count -n --max-new-tokens --temperature --top-k --top-p --min-p --repetition-penalty
    --presence-penalty --seed --stop --device --dtype --kv-cache-dtype --block-size --num-blocks
    --num-swap-blocks --max-seq-len --lora --max-lora-rank --chunk-size --token-budget --max-num-seqs --speculate
    --draft --draft-min-probability --none
""".split()
FLAGS = [["--chat"], ["--ignore-eos"], ["--parse-special"], ["--json"], ["--he"]]


@st.composite
def arguments(draw: st.DrawFn) -> list[str]:
    """Of generate mostly, with one prompt, so that what is right is quick."""
    option = st.tuples(st.sampled_from(OPTIONS), ODD).map(list) | st.sampled_from(FLAGS)
    odd = [part for one in draw(st.lists(option, max_size=3)) for part in one]
    command = draw(st.sampled_from(["generate"] * 8 + ["inspect", "info", "bench"]) | ODD)
    if command == "generate":
        return [command, "--count", "1", "--max-new-tokens", "2", *odd]
    return [command, *draw(st.lists(ODD | st.sampled_from(["--json", "--columns", "--device-memory"]), max_size=2))]


def run(*argv: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a command line, in a child."""
    return call_in_child(_run, argv, loops=20 * MOST_LOOPS, megabytes=1500).result  # type: ignore[no-any-return]


def _run(argv: Sequence[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([*argv])
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


@fuzz(arguments(), examples=3, thorough=20)
def test_command_line(case: Any) -> None:
    code, out, err = run(*case)
    assert code in (0, 1, 2)
    assert not STEERING.search(out)
    told = [line for line in re.split("[\n\r]", err) if line.startswith("paged")]
    is_answer = any(said in out for said in ("WRONG", '"correct": false', '"supported": false'))
    if code == 2 or (code == 1 and not is_answer):
        assert len(told) == 1, err
        assert not STEERING.search(told[0]), err
    assert "Traceback" not in err


def test_a_right_command_line_is_right() -> None:
    code, out, err = run("generate", "--count", "1", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["summary"]["correct"] == 1


STEERED = st.text(st.sampled_from("\x1b\x07\x9b\u202e\u2066\n\t\r\x7f\ud800\ufffe\U000e0041ab<&"))


@fuzz(st.text() | STEERED, examples=200)
def test_shown_text(case: Any) -> None:
    shown = printable(case)
    assert not STEERING.search(shown)
    assert printable(shown) == shown
    if not STEERING.search(case) and case.isprintable():
        assert shown == case
    assert shown.count("\n") == case.count("\n")
    assert "\n" not in one_line(case)
    assert "\t" not in one_line(case)
    assert len(one_line(case * 1000, 100)) <= 110 * 10
    shown.encode()
    assert not re.search("[\ufffe\uffff]", xml_text(case))


def test_shown_text_keeps_what_is_plain() -> None:
    for text in ("Größe, naïve 你好 😀", "👩\u200d👩\u200d👧", "می\u200cخوب", "a\tb\nc"):
        assert printable(text) == text
    assert printable("\x1b[2J\x9b1m\u202ex\r") == r"\x1b[2J\x9b1m\u202ex\r"


def test_prompts_end_at_newlines_alone(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes("a\x0bb\x0cc\x85d\u2028e\x1cf\rg\n\n  \nnext\r\n".encode())
    code, out, _ = run("generate", "--prompts", str(path), "--max-new-tokens", "1", "--json")
    assert code == 0
    assert [answer["prompt"] for answer in json.loads(out)["answers"]] == ["a\x0bb\x0cc\x85d\u2028e\x1cf\rg", "next"]
    path.write_bytes(b"\xff\xfe")
    code, out, err = run("generate", "--prompts", str(path))
    assert (code, out) == (1, "")
    assert re.fullmatch(r"paged: InvalidInputError: --prompts .*: 'utf-8' codec can't decode .*\n", err)
