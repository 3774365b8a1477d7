"""Every code block of the README and of docs/ runs as it stands, those of a page one after the other; examples run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paged
from paged.models.registry import ALIASES, ARCHITECTURES, WRAPPERS
from tests.structure import step

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = {
    page.name: re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE) for page in PAGES
}  # a page's languages and code
WITH = {language: [page for page in CODE if language in dict(CODE[page])] for language in ("python", "bash")}
# They compile, or import transformers or compilers.
SLOW = ["adding-a-kernel.md", "adding-a-model.md", "interop.md", "kernels.md"]

# Each page in a process of its own that begins with all of the package imported.
RUN_PAGES = """
import multiprocessing, os, runpy, sys
import paged, torch

def run(page):
    print("\\n##", page, flush=True)
    os.chdir(page)
    runpy.run_path("page.py", run_name="__main__")

loaded = [getattr(paged, name) for name in paged.__all__]
processes = [multiprocessing.get_context("fork").Process(target=run, args=(page,)) for page in sys.argv[1:]]
for process in processes:
    process.start()
    process.join()
sys.exit(any(process.exitcode for process in processes))
"""


def code_of(page: str, language: str, folder: Path) -> str:
    """A page's code of one language, to run in `folder`, where the bundled checkpoint lies."""
    folder.mkdir(exist_ok=True)
    (folder / "models").symlink_to(ROOT / "models")
    return "\n\n".join(code for found, code in CODE[page] if found == language)


def run(command: list[str], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "check": False, "timeout": 300}
    result = subprocess.run(command, cwd=folder, env=environment, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_blocks_have_a_language_that_runs() -> None:
    assert {language for blocks in CODE.values() for language, _ in blocks} == {"python", "bash"}


@pytest.mark.parametrize(
    "pages", [sorted({*WITH["python"]} - {*SLOW}), pytest.param(SLOW, marks=pytest.mark.thorough)], ids=["fast", "slow"]
)
def test_python_runs(pages: list[str], tmp_path: Path) -> None:
    """From files, as Triton reads the source of kernels."""
    for page in pages:
        code = code_of(page, "python", tmp_path / page)
        (tmp_path / page / "page.py").write_text(code)
    run([sys.executable, "-c", RUN_PAGES, *pages], tmp_path)


@pytest.mark.thorough  # commands take seconds each
@pytest.mark.parametrize("page", WITH["bash"])
def test_bash_runs(page: str, tmp_path: Path) -> None:
    code = code_of(page, "bash", tmp_path)
    paged = tmp_path / "bin" / "paged"  # a program, so that what runs behind the shell can be ended
    paged.parent.mkdir()
    paged.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m paged "$@"\n')
    paged.chmod(0o755)
    run(["bash", "-euc", f'PATH="{paged.parent}:$PATH"\n{code}'], tmp_path)


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, *ROOT.glob("*.md")]:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_named_files_are_there() -> None:
    """Except those of the kernel that a page adds."""
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for path in re.findall(r"`([\w./-]+(?:\.py|/))`", prose):
            if (ROOT / path.split("/")[0]).is_dir() and "squared_relu" not in path:
                # Not an empty folder that an earlier version left behind.
                assert (ROOT / path).is_file() or any((ROOT / path).rglob("*.py")), f"{page.name}: {path}"


def test_every_family_has_a_row() -> None:
    page = (ROOT / "docs" / "families.md").read_text()
    rows = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`\w+For.*)$", page, re.MULTILINE)]
    names = [name for row in rows for name in row if name.endswith(("ForCausalLM", "ForConditionalGeneration"))]
    assert sorted(names) == sorted((*ARCHITECTURES, *ALIASES, *WRAPPERS))
    assert {row[0]: row[1] for row in rows if row[0] in WRAPPERS} == WRAPPERS


def test_pages_count_the_architectures() -> None:
    counts = {}
    for page in PAGES:
        for count in re.findall(r"(\d+) \[?architectures", page.read_text()):
            counts[page.name] = int(count)
    assert counts == {"README.md": len(ARCHITECTURES), "executors.md": len(ARCHITECTURES)}


@pytest.mark.thorough  # loads a checkpoint
def test_picture_of_a_step_is_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    assert step.PATH.read_text() == step.draw(), "make picture"


@pytest.mark.thorough  # 5 s; it also fails on a dead link
def test_site_has_every_public_name(tmp_path: Path) -> None:
    run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)], ROOT)
    reference = "".join(page.read_text() for page in (tmp_path / "reference").rglob("*.html"))
    assert [name for name in paged._MODULE_OF if f'id="{paged._MODULE_OF[name]}.{name}"' not in reference] == []


EXAMPLES = {
    "attention": "3 queries over 12 keys: agree with PyTorch",
    "cache": "the same result without the cached prefix",
    "grpo": "the engine's log probabilities are the trainer's",
    "oracle": "the changed kernel: found, sees_a_future_key",
    "prefill_decode": "576 of 600 prompt tokens came from the other process",
    "ray_batch": "wren: -> pipe",
    "ray_serve": "2 replicas answer",
    "reference": "zebra: green wild compass ; (16 of 19 tokens cached)",
    "stream": "' lantern'",
    "two_processes": "[1, 1, 1, 404, 404, 404, 404, 404]",
}


def test_all_examples_are_run() -> None:
    """`train_draft_head` by tests/executors/speculation/test_head_proposer.py, which uses the heads."""
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, "train_draft_head"}


@pytest.mark.thorough
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str) -> None:
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if name == "two_processes" else []
    assert EXAMPLES[name] in run([sys.executable, *start, f"examples/{name}.py"], ROOT)
