"""`paged verify`: check every kernel on this machine against float64, in every supported dtype."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch

from paged.bench.benchmark import benchmark_dtype, check_only, released
from paged.bench.cards.cards import card_of
from paged.bench.check import Result, WrongResultError
from paged.bench.compiled.errors import NotModelledError
from paged.bench.problems.arguments import dtype_of
from paged.bench.traces.calls import TraceCall, calls_of
from paged.bench.verification.candidate import Candidate, NotTakenError, is_of
from paged.bench.verification.cases import CHECKS, Check
from paged.bench.verification.diagnosis import explain
from paged.bench.verification.replay import Replay, about, backends
from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.core import compat
from paged.kernels.core import device as devices
from paged.tools.recorder import read_call

if TYPE_CHECKING:
    from paged.bench.compiled.device import CompiledDevice


@dataclass(frozen=True)
class Row:
    """One check in one dtype.

    worst: its largest error as a fraction of the budget; None if `error` has the reason. first: the first wrong
    element. reason: a mistake of a candidate that would give this element.
    """

    case: str
    dtype: str
    worst: float | None
    seconds: float
    ok: bool
    error: str | None = None
    first: str | None = None
    reason: str | None = None


def run(args: argparse.Namespace) -> int:
    """Check everything and print a row for each check; return 1 if a result is wrong.

    Raises:
        UnsupportedError: the device does not exist, or its backend cannot run here.
    """
    if args.replay:
        recorded = read_call(args.replay, torch.device("cpu")).operation
        if args.op not in (None, recorded):
            raise InvalidInputError(f"--op {args.op}: {args.replay} holds a call of {recorded}")
        args.op = recorded
    if args.op:
        card_of(args.op)
    if args.candidate and not args.op:
        raise InvalidInputError("--candidate: expected --op NAME beside it, the operation whose place it takes")
    if args.compiled and (
        args.device == "cuda" or args.backend not in (None, "triton") or args.candidate or args.replay
    ):
        raise InvalidInputError(f"--compiled {args.compiled}: runs the Triton kernels of checks, on a CPU")
    if args.trace and (args.op or args.candidate or args.replay or args.compiled):
        raise InvalidInputError(
            "--trace: takes no --op, --candidate, --replay or --compiled; --only chooses definitions"
        )
    if not 0 < args.call_seconds < math.inf:
        raise InvalidInputError(f"--call-seconds {args.call_seconds}: expected more than 0")

    has_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if args.device == "cuda" or (has_gpu and args.device is None and not args.compiled):
        device = torch.device("cuda")
    if device.type == "cuda" and not has_gpu:
        raise UnsupportedError("--device cuda: torch finds no GPU; see `paged info`")
    wants_interpreter = args.backend == "triton" and device.type == "cpu" and not args.compiled
    if compat.HAS_TRITON and (wants_interpreter or args.compiled) and wants_interpreter != compat.interpreting():
        # The interpreter must be chosen before triton is imported.
        command = [sys.executable, "-m", "paged", "verify", "--device", "cpu", "--backend", "triton"]
        if args.compiled:
            command += ["--compiled", args.compiled, "--num-sms", str(args.num_sms), "--schedule", args.schedule]
        for option in ("quick", "json"):
            if getattr(args, option):
                command.append(f"--{option}")
        for option in ("only", "op", "candidate", "replay", "trace"):
            if getattr(args, option):
                command += [f"--{option}", str(getattr(args, option))]
        if args.candidate or args.trace:
            command += ["--call-seconds", str(args.call_seconds)]
        environment = {**os.environ, "TRITON_INTERPRET": str(int(wants_interpreter))}
        return subprocess.run(command, env=environment, check=False).returncode
    choice = args.backend or os.environ.get("PAGED_BACKEND", "")
    can_run_numba = device.type == "cpu" and devices.has_numba()
    if choice == "numba" and not can_run_numba:
        raise UnsupportedError(
            f"numba kernels cannot run on {device}: they need a CPU, numba, and PyTorch's GNU OpenMP"
        )
    if args.compiled:
        choice = "triton"
    if not choice and can_run_numba and not compat.interpreting():
        choice = "numba"
    backend, where = choice or "torch", f"on {device}"
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"PAGED_BACKEND": choice}))
        candidate = stack.enter_context(_candidate(args))
        compiled = None
        if args.compiled:
            compiled = stack.enter_context(_compiled(args))
        interpreted = False
        if devices.use_triton(device):
            backend, interpreted = "triton", device.type == "cpu"
        if args.replay:
            rows = list(_replay(args, device, candidate))
        elif args.trace:
            rows = list(_trace(args, device))
        else:
            rows = list(_check_all(args, device, candidate, compiled))
    wrong = sum(not row.ok for row in rows)
    not_checked = sum(row.ok and row.worst is None for row in rows)
    num_checked = len(rows) - not_checked
    if interpreted:
        where = "in Triton's interpreter"
    if args.compiled:
        where = f"compiled for {args.compiled}"
    if args.json:
        report = {"device": str(device), "backend": backend, "interpreted": compat.interpreting(), "wrong": wrong}
        report |= {"not_checked": not_checked, "compiled": args.compiled}
        print(json.dumps({**report, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        more = ""
        if not_checked:
            more = f" {not_checked} not checked,"
        by = backend
        if args.candidate:
            by = args.candidate
        print(f"{num_checked - wrong} of {num_checked} right,{more} by {by} {where}")
    return int(wrong > 0 or num_checked == 0)


@contextmanager
def _candidate(args: argparse.Namespace) -> Iterator[Candidate | None]:
    """Start the process of the candidate, if there is one, and end it."""
    if not args.candidate:
        yield None
        return
    candidate = Candidate(args.op, args.candidate, args.call_seconds)
    try:
        yield candidate
    finally:
        candidate.close()


def _compiled(args: argparse.Namespace) -> CompiledDevice:
    """Return the device that runs compiled kernels; its module needs Triton."""
    if not compat.HAS_TRITON:
        raise UnsupportedError(f"--compiled {args.compiled}: triton is not installed")
    from paged.bench.compiled.device import CompiledDevice

    return CompiledDevice(args.compiled, num_sms=args.num_sms, schedule=args.schedule)


def _check_all(
    args: argparse.Namespace, device: torch.device, candidate: Candidate | None, compiled: CompiledDevice | None
) -> Iterator[Row]:
    """Yield the rows, and print each at once; the last row may be a check that left the device unusable."""
    checks = list(CHECKS)
    if args.op:
        checks = [check for check in checks if is_of(args.op, check.name)]
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    if args.quick:
        checks = [check for check in checks if check.is_quick]
        dtypes = [benchmark_dtype(device)]
        if compiled is not None:
            dtypes = [torch.bfloat16]  # what models run on a GPU
    check_only(args.only, [check.name for check in checks])
    checks = [check for check in checks if args.only in check.name]
    width = _print_head(args, [check.name for check in checks])
    for check, dtype in itertools.product(checks, dtypes):
        if compiled is None:
            row = _row(check, device, dtype, candidate)
        else:
            row = _compiled_row(check, device, dtype, compiled)
        # Only a GPU can be lost. On a CPU the collection could take a second in a process with many objects.
        is_lost = device.type == "cuda" and not released(device)
        if is_lost:
            row = replace(row, ok=False, error=f"{row.error or ''} the device is lost: no other check can run".strip())
        if not args.json:
            _print(row, width)
        yield row
        if is_lost:
            return


def _replay(args: argparse.Namespace, device: torch.device, candidate: Candidate | None) -> Iterator[Row]:
    """Yield rows of a recorded call: as recorded, then by the candidate, or by each backend or the chosen one."""
    names = backends(device)
    if args.backend:
        names = [args.backend]
    replays = [Replay(args.replay, device, name) for name in ("", *names)]
    if candidate is not None:
        replays = [replays[0], Replay(args.replay, device, names[0], candidate.path)]
    width = _print_head(args, [replay.name for replay in replays], about(replays[0].call))
    for replay in replays:
        installed = candidate
        if not replay.backend:
            installed = None
        row = _row(replay, device, dtype_of(replay.arguments), installed, replay)
        if not args.json:
            _print(row, width)
        yield row


def _trace(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Yield rows of each call of a trace set: by each backend or the chosen one, by its reference, by solutions."""
    names = backends(device)
    if args.backend:
        names = [args.backend]
    with calls_of(args.trace, args.only) as calls:
        all_calls = list(calls)
        width = _print_head(args, [call.label(name) for call in all_calls for name in call.functions])
        for call in all_calls:
            for row in _rows_of_trace(args, device, call, names):
                if not args.json:
                    _print(row, width)
                yield row


def _rows_of_trace(args: argparse.Namespace, device: torch.device, call: TraceCall, names: list[str]) -> Iterator[Row]:
    for name, reason in call.refused.items():
        yield Row(call.label(name), "", None, 0.0, True, f"not checked: {reason}")
    if not call.operation:
        return
    for name in names:
        replay = Replay(call.path, device, name, label=call.name)
        yield _row(replay, device, dtype_of(replay.arguments), None, replay)
    for name, function in call.candidates.items():
        replay = Replay(call.path, device, names[0], name, call.name)
        try:
            candidate = Candidate(call.operation, function, args.call_seconds)
        except InvalidInputError as error:
            yield Row(replay.name, "", None, 0.0, False, str(error))
            continue
        try:
            yield _row(replay, device, dtype_of(replay.arguments), candidate, replay)
        finally:
            candidate.close()


def _print_head(args: argparse.Namespace, names: list[str], *above: str) -> int:
    """Print the head of the table, and return the width of its names."""
    width = max(map(len, names))
    if not args.json:
        print("\n".join([*above, f"{'case':{width}}  {'dtype':8}  {'error / budget':>14}  {'ms':>7}"]))
    return width


def _row(
    check: Check | Replay,
    device: torch.device,
    dtype: torch.dtype,
    candidate: Candidate | None,
    explained: Candidate | Replay | None = None,
) -> Row:
    """Return a check's row. explained: the call whose mistake is named; by default the candidate's last one."""
    start = time.perf_counter()
    row = Row(check.name, str(dtype).removeprefix("torch."), 0.0, 0.0, False)
    installed: AbstractContextManager[None] = nullcontext()
    seeds = [0]
    calls_before = 0
    if candidate is not None:
        calls_before = candidate.num_calls
        installed = candidate.installed()
        if isinstance(check, Check):
            seeds.append(1)  # new values with the same shapes expose a kernel that returns earlier results
    count = 0
    try:
        with installed:
            for seed in seeds:
                torch.manual_seed(seed)
                for result in check.results(device, dtype):
                    row = _with_result(row, result, explained or candidate)
                    if candidate is not None and result.name in candidate.again:
                        again = result._replace(
                            got=candidate.again[result.name], name=f"{result.name} of a second call"
                        )
                        row = _with_result(row, again, None)
                    count += 1
        if candidate is not None and candidate.num_calls == calls_before:
            raise NotTakenError("the case does not call the operation")
    except NotTakenError as error:
        if row.first is None:
            return replace(row, worst=None, ok=True, error=f"not checked: {error}")
    except NotModelledError as error:
        if row.first is None:
            return replace(row, worst=None, ok=True, error=f"not modelled: {error}")
    except WrongResultError as error:
        row = replace(row, worst=None, error=str(error))
    except Exception as error:  # other operations still get their rows
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        row = replace(row, worst=None, error=f"{type(error).__name__}: {error} ({where})")
    row = replace(row, seconds=time.perf_counter() - start)
    if row.worst is None:
        return row
    if math.isinf(row.worst):
        return replace(row, worst=None, error="infinite, NaN, or a whole number that differs")
    return replace(row, ok=count > 0 and row.worst <= 1)


def _compiled_row(check: Check, device: torch.device, dtype: torch.dtype, compiled: CompiledDevice) -> Row:
    """Return the row of a check whose kernels run as compiled code. A fault of memory or order is wrong, too."""
    compiled.report.clear()
    row = _row(check, device, dtype, None)
    faults = compiled.report.lines()
    if faults:
        reasons = [*filter(None, [row.error]), *faults]
        return replace(row, ok=False, error="; ".join(reasons))
    if row.ok and row.error is None and compiled.report.num_launches == 0:
        return replace(row, worst=None, error="not checked: it launches no kernel")
    return row


def _with_result(row: Row, result: Result, call: Candidate | Replay | None) -> Row:
    """Return the row with a result's error, and with its first wrong element if the row has none."""
    shares = result.shares()
    if shares.numel():
        row = replace(row, worst=max(row.worst or 0.0, float(shares.max())))
    index = result.first_wrong()
    if row.first is not None or index is None:
        return row
    reason = None
    if call is not None and call.card.name == "paged_attention":
        reason = explain(call.arguments, result, index)
    return replace(row, first=result.describe(index), reason=reason)


def _print(row: Row, width: int) -> None:
    worst, note = "", "ok"
    if row.worst is not None:
        worst = f"{row.worst:.3f}"
    if row.ok and row.error:
        note = row.error
    if not row.ok:
        note = "; ".join(filter(None, (f"WRONG {row.error or ''}".strip(), row.first, row.reason)))
    text = f"{row.case:{width}}  {row.dtype:8}  {worst:>14}  {1e3 * row.seconds:7.1f}  {note}".rstrip()
    text = text.replace("\n", "\n    ")  # so that no line of an error looks like a row
    print(text, flush=True)  # flushed, because a later check may end the process
