"""Our backend beside vLLM's own in real engines of several versions: `python -m tests.vllm.engine.compare FOLDER`.

FOLDER is the environment that `make vllm-engine` sets up: the engine of one version, and in vllm-VERSION the files of
others. Prints a table, and ends with 1 where ours differs, or fails where vLLM's does not. `--only WORD` runs the cases
whose name contains it again, `--version 0.32` that one alone; the table has the last results of all.
"""

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.vllm.engine.cases import CASES, Case

OURS, THEIRS = "CUSTOM", "CPU_ATTN"
TIME_LIMIT_S = 3600
# Of the cache, GiB. A function is sent to the workers to ask for their layers, which they take for insecure.
_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
Results = dict[tuple[str, str], dict[str, Any]]


def _run(cases: list[Case], backend: str, results: Path, python_path: str, log: Path) -> None:
    """Add lines to results; where the process ends, cases are left out."""
    environment = {**os.environ, **_ENVIRONMENT, **cases[0].env, "PYTHONPATH": python_path}
    environment["VLLM_CACHE_ROOT"] = str(results.parent / "cache")
    command = [sys.executable, "-m", "tests.vllm.engine.serve", str(results), backend, *(case.name for case in cases)]
    with log.open("a") as file:
        try:
            subprocess.run(command, env=environment, stdout=file, stderr=file, timeout=TIME_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            print("ended after", TIME_LIMIT_S, "s", file=file)


def _run_all(cases: list[Case], backend: str, *where: Any) -> None:
    """In as few processes as there may be: of one environment, and nothing after which vLLM does not start again."""
    alone = [case for case in cases if any(word in name for word in ("parallel", "specul") for name in case.options)]
    together = sorted((case for case in cases if case not in alone), key=lambda case: sorted(case.env))
    groups = [list(group) for _, group in groupby(together, key=lambda case: case.env)]
    for group in [*groups, *([case] for case in alone)]:
        _run(group, backend, *where)


def _read(results: Path) -> Results:
    """The last of each case and backend."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return {(line["case"], line["backend"]): line for line in lines}


def _cell(case: Case, results: Results) -> tuple[str, bool]:
    """What the table says of a case, and whether that is as it should be."""
    missing = {"failed": "no result"}
    ours, theirs = (results.get((case.name, backend), missing) for backend in (OURS, THEIRS))
    if theirs is missing and "failed" not in ours and case.like is not None:
        theirs = results.get((case.like, THEIRS), missing)
    if "failed" in ours or "failed" in theirs:
        texts = [result.get("failed", "runs").partition("\n")[0][:160] for result in (ours, theirs)]
        said = texts[0] if texts[0] == texts[1] else f"{texts[0]}; vLLM's own: {texts[1]}"
        is_known = case.vllm_fails is not None and case.vllm_fails in texts[0]
        return said.replace("|", "/"), is_known or (texts[0] == "runs" and texts[1] != missing["failed"])
    if ours["layers"] != ["PagedImpl"] or "PagedImpl" in theirs["layers"]:
        return f"ran {ours['layers']} and {theirs['layers']}", False
    if case.block_size not in (None, ours["block_size"]):
        return f"blocks of {ours['block_size']}", False
    if case.by_error:
        ratio = ours["error"] / theirs["error"]
        return f"error {ours['error']:.2e}, vLLM's {theirs['error']:.2e}", ratio <= 1.05
    equal = sum(a == b for a, b in zip(ours["tokens"], theirs["tokens"], strict=True))
    # vLLM's own blocks are longer than what prompts share.
    has_hits = ours["cached"] > 0 or "block_size" in case.options
    return f"{equal} of {len(ours['tokens'])} texts", equal == len(ours["tokens"]) and has_hits


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--version", default="")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    installed = version("vllm-cpu")
    paths = {installed: ""} | {path.name.removeprefix("vllm-"): str(path) for path in sorted(folder.glob("vllm-0.*"))}
    checkpoints, log = folder / "checkpoints", folder / "engines.log"
    checkpoints.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    cells: dict[str, list[str]] = {case.name: [] for case in CASES}
    is_right = True
    for number, python_path in paths.items():
        results = checkpoints / f"results-{number}.jsonl"
        if number.startswith(arguments.version):
            if not arguments.only:
                results.unlink(missing_ok=True)
            cases = [case for case in CASES if arguments.only in case.name]
            where = results, python_path, log
            _run_all([case for case in cases if case.like is None], THEIRS, *where)
            _run_all(cases, OURS, *where)
            found = _read(results)
            failed = [case for case in cases if "tokens" not in found.get((case.name, OURS), {})]
            _run_all([case for case in failed if case.like is not None], THEIRS, *where)
        found = _read(results)
        for case in CASES:
            text, holds = _cell(case, found)
            cells[case.name].append(text if holds else f"**{text}**")
            is_right &= holds
    print("| case |", " | ".join(f"vLLM {number}" for number in paths), "|")
    print("|---|" + "---|" * len(paths))
    for name, texts in cells.items():
        print(f"| {name} |", " | ".join(texts), "|")
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
