"""Plant faults into the PTX of kernels, one at a time, and count which of them are seen.

python -m paged.bench.compiled.faults [--arch sm_90] [--only TEXT] [--each N]

A fault is seen by name, if the executor reports one or stops, or by result, if a result exceeds its bound. It survives
if only bits of results or arguments change. Otherwise it has no effect in this run: nothing that the executor checks
was broken, and every bit is the same. Faults of order are also planted into all of a kernel's instructions at once,
which shows whether one without effect stands beside others. The table has a line for each kind.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paged.bench.benchmark import check_only, option_parser
from paged.bench.cards.card import Card, Row
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.bench.check import Result
from paged.bench.compiled.device import ARCHS, CompiledDevice
from paged.bench.compiled.report import Fault, Report
from paged.bench.compiled.translate import Translation
from paged.bench.problems.arguments import Arguments, map_tensors
from paged.errors import PagedError

Change = Callable[[re.Match[str]], str]

_LOADS = r"ld\.(?:volatile\.)?(?:global|shared)|st\.(?:global|shared)|cp\.async\.c[ag]|atom"
_WGMMA = re.compile(r"(wgmma\.mma_async\S+ +(?:\{[^}]*\}|\S+), *)(.*?)(%rd\d+)(, *%p\d+, *-?1, *-?1.*)")


@dataclass(frozen=True)
class Rule:
    """A kind of fault: where in a line it may be planted, and what stands there then."""

    kind: str
    pattern: str
    change: str | Change

    def planted(self, line: str) -> str | None:
        """Return the line with the fault, or None if it has no place for it."""
        changed, count = re.subn(self.pattern, self.change, line, count=1)
        if count == 0 or changed == line:
            return None
        return changed


def _weaker(match: re.Match[str]) -> str:
    return f"{match[1]}{int(match[2]) + 1};"


def _halved(match: re.Match[str]) -> str:
    return f"{match[1]}{int(match[2]) // 2};"


def _descriptor(delta: int) -> Change:
    """Return a change of wgmma's last descriptor, in a scope with a register of its own."""

    def change(match: re.Match[str]) -> str:
        head, middle, descriptor, end = match.groups()
        scope = "{ .reg .b64 %planted; " + f"add.s64 %planted, {descriptor}, {delta}; "
        return f"{scope}{head}{middle}%planted{end} }}"

    return change


def _narrower(match: re.Match[str]) -> str:
    """Return a store of the first half of a vector."""
    names = [name.strip() for name in match[4].split(",")]
    half = names[: len(names) // 2]
    width = f".v{len(half)}"
    if len(half) == 1:
        width = ""
    return f"{match[1]}{width}{match[3]}{{ {', '.join(half)} }};"


def _shorter(match: re.Match[str]) -> str:
    """Return a copy of half of the bytes."""
    return f"{match[1].replace('.cg.', '.ca.')}{int(match[2], 0) // 2}{match[3]}"


RULES = (
    Rule("wait_group dropped", r"(?:cp\.async|wgmma)\.wait_group\S*\s+\d+;", ""),
    Rule("wait_group weaker by one", r"((?:cp\.async|wgmma)\.wait_group\S*\s+)(\d+);", _weaker),
    Rule("bar.sync dropped", r"bar\.sync\s+0;", ""),
    Rule("proxy fence dropped", r"fence\.proxy\.async\S*;", ""),
    Rule("mbarrier wait dropped", r"@!complete\S* bra\S* waitLoop;", ""),
    Rule("mbarrier phase inverted", r"(try_wait\.parity\S+ [^,]+, \[[^\]]+\], )(%r\d+);", r"\g<1>1;"),
    Rule("mbarrier expects fewer bytes", r"(expect_tx\S+ _, \[[^\]]+\], )(\d+);", _halved),
    Rule("descriptor: address", _WGMMA.pattern, _descriptor(1)),
    Rule("descriptor: leading offset", _WGMMA.pattern, _descriptor(1 << 16)),
    Rule("descriptor: stride", _WGMMA.pattern, _descriptor(1 << 32)),
    Rule("descriptor: swizzle", _WGMMA.pattern, _descriptor(1 << 62)),
    Rule("store narrower", r"(st\.(?:global|shared))(\.v[24])(\.b\d+ \[[^\]]+\], )\{([^}]*)\};", _narrower),
    Rule("copy narrower", r"(cp\.async\.c[ag]\S* [^;]*\], )(0x10|16|8)\b(.*;)", _shorter),
    Rule("predicate dropped", rf"@!?%p\d+ (?=(?:{_LOADS}))", ""),
    Rule("predicate inverted", rf"@(?=%p\d+ (?:{_LOADS}|bra))", "@!"),
    Rule("load or store moved", r"((?:ld|st)\.(?:global|shared)\S* .*?\[ ?%rd?\d+)( ?\+ ?\d+)? ?\]", r"\g<1>+16]"),
    Rule("ldmatrix moved", r"(ldmatrix\S+\s+\{[^}]*\}, \[%r\d+)\]", r"\g<1>+16]"),
    Rule("ticket relaxed", r"(atom\.global\S*?)\.acq_rel", r"\g<1>.relaxed"),
)
# Operation and row that each kernel's faults are judged by, at the sizes of "check" unless `_SIZES` has others.
PROBLEMS = (
    ("paged_attention", "prefill"),
    ("paged_attention", "decode"),
    ("paged_mla_attention", "decode"),
    ("choose_keys", ""),
    ("choose_keys", "candidates"),
    ("gate_streams", ""),
    ("mix_snapshots", ""),
    ("mix_streams", "single pass"),
    ("reshape_and_cache", ""),
    ("qk_norm_rope_and_cache", ""),
    ("rms_norm", ""),
    ("route_and_align", ""),
    ("fused_moe", "decode"),
    ("fused_moe", "prefill"),
    ("quantized_linear", "int4 prefill"),
    ("quantized_linear", "e4m3 prefill"),
    ("gated_delta_rule", "decode"),
    ("gated_delta_rule", "prefill"),
    ("sample_tokens", "top_p"),
)
# Loops of five and more tiles, so that every stage of a pipeline is used again. Of experts as many tokens each, and a
# quarter of the work.
_SIZES: dict[tuple[str, str], dict[str, Any]] = {
    ("paged_attention", "prefill"): {"lengths": [(70, 460)]},
    ("paged_attention", "decode"): {"lengths": [(1, 2500), (1, 33), (1, 1)]},
    ("paged_mla_attention", "decode"): {"lengths": [(1, 900), (1, 33)]},
    ("fused_moe", "prefill"): {"tokens": 150, "num_experts": 4},
    # A full chunk behind another one, whose state is not zero.
    ("gated_delta_rule", "prefill"): {"lengths": [140, 20]},
}


SEEN = ("by name", "by result", "survived", "no effect")
# Kinds that are also planted into all of a kernel's instructions at once.
_ORDER = ("wait_group dropped", "bar.sync dropped", "proxy fence dropped", "mbarrier wait dropped")


@dataclass(frozen=True)
class Outcome:
    """What became of a fault. line: in the PTX, 0 for all of a kernel's. seen: one of SEEN."""

    kind: str
    kernel: str
    line: int
    text: str
    seen: str


class _SeenError(Exception):
    """The executor has reported a fault, so the rest of the run does not matter."""


class _FirstFault(Report):
    """A report that ends the run with the first fault."""

    def add(self, fault: Fault, detail: str, times: int = 1) -> None:
        super().add(fault, detail, times)
        raise _SeenError


class Problem:
    """A row of a card, with the expected results and their bounds, which are computed once."""

    def __init__(self, card: Card, row: Row) -> None:
        self.card, self.sizes = card, {**row.size("check"), **_SIZES.get((card.name, row.variant), {})}
        arguments = self._arguments()
        self.want = card.want(arguments)
        self.bounds = card.bounds(arguments, self.want)

    def run(self) -> tuple[list[Result], list[torch.Tensor]]:
        """Run the operation, and return its results beside the expected ones, and all bytes of arguments and results.

        Arguments are drawn again, because a plan that a call has made would spare the next one the planning kernel.
        """
        arguments = self._arguments()
        results = self.card.call(arguments)
        all_bytes: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            # Clone, because rows of one element may have any stride, which `view` refuses.
            flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
            all_bytes.append(flat.view(torch.uint8))
            return tensor

        map_tensors(keep, [arguments, results])
        return list(self.card.beside(arguments, results, self.want, self.bounds).values()), all_bytes

    def _arguments(self) -> Arguments:
        torch.manual_seed(0)
        return self.card.draw(Draw(torch.device("cpu"), torch.bfloat16), **self.sizes)


def outcomes(problem: Problem, device: CompiledDevice, per_kind: int) -> Iterator[Outcome]:
    """Plant up to `per_kind` faults of each kind into each kernel of a problem.

    Raises:
        WrongResultError: the problem is wrong without a fault.
    """
    first = len(device.translations)
    device.report.clear()
    results, right = problem.run()
    for result in results:
        result.check()
    assert not device.report.lines(), device.report.lines()
    for translation in device.translations[first:]:
        kernel = translation.kernel.name
        for rule in RULES:
            places = _places(translation, rule)
            for number, line in _spread(places, per_kind):
                seen = _seen(problem, right, device, translation, [(number, line)])
                yield Outcome(rule.kind, kernel, number, " ".join(line.split())[:100], seen)
            if rule.kind in _ORDER and places:
                seen = _seen(problem, right, device, translation, places)
                yield Outcome(f"{rule.kind}, all at once", kernel, 0, f"{len(places)} of them", seen)


def _places(translation: Translation, rule: Rule) -> list[tuple[int, str]]:
    """Return the lines that run and have a place for a fault: their numbers, and the lines with it."""
    run = set()
    for block in translation.kernel.blocks:
        if block.index in translation.executed:
            run |= {i.line for i in block.instructions}
    places = []
    for number, line in enumerate(translation.text.split("\n"), 1):
        changed = rule.planted(line)
        if number in run and changed is not None:
            places.append((number, changed))
    return places


def _spread(places: Sequence[tuple[int, str]], count: int) -> list[tuple[int, str]]:
    if len(places) <= count:
        return list(places)
    return [places[index * len(places) // count] for index in range(count)]


@contextmanager
def planted(translation: Translation, text: str) -> Iterator[None]:
    """Let a loaded kernel run other PTX."""
    before = dict(vars(translation))
    vars(translation).update(vars(Translation(text)))
    try:
        yield
    finally:
        vars(translation).update(before)


def _seen(
    problem: Problem,
    right: Sequence[torch.Tensor],
    device: CompiledDevice,
    translation: Translation,
    places: Sequence[tuple[int, str]],
) -> str:
    """Return what becomes of a fault in some lines of a kernel. right: all bytes without it."""
    lines = translation.text.split("\n")
    for number, line in places:
        lines[number - 1] = line
    device.report.clear()
    try:
        with planted(translation, "\n".join(lines)):
            results, all_bytes = problem.run()
    except _SeenError:
        return "by name"
    except (PagedError, ArithmeticError, ValueError, IndexError):
        return "by result"
    if any(result.first_wrong() is not None for result in results):
        return "by result"
    if all(map(torch.equal, all_bytes, right)):
        return "no effect"
    return "survived"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of kinds and the survivors; the exit code is 0."""
    parser = option_parser(__doc__, "only", "json")
    parser.add_argument("--arch", choices=ARCHS, default="sm_90")
    parser.add_argument("--each", type=int, default=4, metavar="N", help="faults of a kind in a kernel; %(default)d")
    args = parser.parse_args(argv)
    check_only(args.only, [f"{operation}.{row}" for operation, row in PROBLEMS])
    all_outcomes = []
    with CompiledDevice(args.arch, report=_FirstFault()) as device:
        for operation, variant in PROBLEMS:
            if args.only not in f"{operation}.{variant}":
                continue
            card = CARDS[operation]
            (row,) = [row for row in card.rows if row.variant == variant]
            for outcome in outcomes(Problem(card, row), device, args.each):
                all_outcomes.append(outcome)
                if outcome.seen in ("survived", "no effect"):
                    print(
                        f"{outcome.seen}: {outcome.kind}, {outcome.kernel} line {outcome.line}: {outcome.text}",
                        flush=True,
                    )
            if args.json:
                args.json.write_text(json.dumps([asdict(outcome) for outcome in all_outcomes], indent=1) + "\n")
    print(f"\n{'kind':32}" + "".join(f"{title:>10}" for title in ("planted", *SEEN)))
    for kind in dict.fromkeys(outcome.kind for outcome in all_outcomes):
        counts = Counter(outcome.seen for outcome in all_outcomes if outcome.kind == kind)
        print(f"{kind:32}{counts.total():10}" + "".join(f"{counts[seen]:10}" for seen in SEEN))
    counts = Counter(outcome.seen for outcome in all_outcomes)
    num_seen = counts["by name"] + counts["by result"]
    num_changing = num_seen + counts["survived"]
    print(f"{num_seen} of {num_changing} that change something seen on {args.arch}, of {counts.total()} planted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
