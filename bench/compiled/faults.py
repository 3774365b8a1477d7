"""Plant faults into the PTX of kernels, one at a time, and count which of them are seen.

python -m paged.bench.compiled.faults [--arch sm_90] [--only TEXT] [--each N]

A fault is seen by name, if the executor reports one or stops; by result, if a result exceeds its bound; or it survives.
It is idle, and does not count, if its instruction runs for no thread, if a dropped predicate is true for all, or if
nothing uses what the instruction loads or stores: then garbage in its place, or its absence, survives too. The table
has a line for each kind; survivors are listed with their lines.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from paged.bench.benchmark import check_only, option_parser
from paged.bench.cards.card import Card, Row
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.bench.check import Result
from paged.bench.compiled.device import ARCHS, CompiledDevice
from paged.bench.compiled.report import Fault, Report
from paged.bench.compiled.translate import Translation
from paged.bench.problems.arguments import Arguments
from paged.errors import PagedError

Change = Callable[[re.Match[str]], str]

_LOADS = r"ld\.(?:volatile\.)?(?:global|shared)|st\.(?:global|shared)|cp\.async\.c[ag]|atom"
_GUARD = re.compile(r"\s*@(!?)(%p\d+) ")
_LOADED = re.compile(r"\s*(?:@!?%p\d+ )?(?:ld\.(?:volatile\.)?(?:global|shared)|ldmatrix)\S*\s+(\{[^}]*\}|%\w+)")
_GARBAGE = {"%rs": "mov.b16 {}, 0xFFFF;", "%r": "mov.b32 {}, 0xFFFFFFFF;", "%rd": "mov.b64 {}, 0xFFFFFFFFFFFFFFFF;"}
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
        head, middle, descriptor, rest = match.groups()
        scope = "{ .reg .b64 %planted; " + f"add.s64 %planted, {descriptor}, {delta}; "
        return f"{scope}{head}{middle}%planted{rest} }}"

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
# Operation and row that each kernel's faults are judged by, at the sizes of "check" unless `_SMALLER` has others.
PROBLEMS = (
    ("paged_attention", "prefill"),
    ("paged_attention", "decode"),
    ("paged_mla_attention", "decode"),
    ("choose_keys", ""),
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
# As many tokens an expert as at the sizes of "check", and a quarter of the work.
_SMALLER = {("fused_moe", "prefill"): {"tokens": 150, "num_experts": 4}}


@dataclass(frozen=True)
class Outcome:
    """What became of a fault. seen: "by name", "by result", "survived" or "idle"."""

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
        self.card, self.sizes = card, {**row.size("check"), **_SMALLER.get((card.name, row.variant), {})}
        arguments = self._arguments()
        self.want = card.want(arguments)
        self.bounds = card.bounds(arguments, self.want)

    def results(self) -> list[Result]:
        """Run the operation and return its results beside the expected ones.

        Arguments are drawn again, because a plan that a call has made would spare the next one the planning kernel.
        """
        arguments = self._arguments()
        return list(self.card.beside(arguments, self.card.call(arguments), self.want, self.bounds).values())

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
    for result in problem.results():
        result.check()
    assert not device.report.lines(), device.report.lines()
    for translation in device.translations[first:]:
        for rule in RULES:
            for number, line in _spread(_places(translation, rule), per_kind):
                lines = translation.text.split("\n")
                lines[number - 1] = line
                with planted(translation, "\n".join(lines)):
                    seen = _seen(problem, device)
                if seen == "survived" and _is_idle(problem, device, translation, number, rule.kind):
                    seen = "idle"
                if seen == "survived" and _is_unused(problem, device, translation, number, rule.kind):
                    seen = "idle"
                yield Outcome(rule.kind, translation.kernel.name, number, " ".join(line.split())[:100], seen)


def _is_idle(problem: Problem, device: CompiledDevice, translation: Translation, number: int, kind: str) -> bool:
    """Return whether a fault cannot matter: its instruction runs for no thread, or a dropped predicate is always true.

    To find out, the threads in question store to an address that is nowhere.
    """
    lines = translation.text.split("\n")
    guard = _GUARD.match(lines[number - 1])
    if guard is None:
        return False
    negation, predicate = guard.groups()
    if kind == "predicate dropped":
        negation = "" if negation else "!"
    lines[number - 1] = f"@{negation}{predicate} st.shared.b32 [0], 0; {lines[number - 1]}"
    with planted(translation, "\n".join(lines)):
        return _seen(problem, device) != "by name"


def _is_unused(problem: Problem, device: CompiledDevice, translation: Translation, number: int, kind: str) -> bool:
    """Return whether nothing uses what an instruction loads, or what a narrower or moved copy or store writes."""
    lines = translation.text.split("\n")
    line = lines[number - 1]
    loaded = _LOADED.match(line)
    if loaded is not None:
        guard = ""
        if kind == "predicate dropped" and (match := _GUARD.match(line)) is not None:
            guard = f"@{'' if match[1] else '!'}{match[2]} "  # the threads that did not load
        for name in re.findall(r"%[a-z]+\d+", loaded[1]):
            line += f" {guard}{_GARBAGE[name.rstrip('0123456789')].format(name)}"
    elif "narrower" in kind or "moved" in kind:
        line = ""
    else:
        return False
    lines[number - 1] = line
    with planted(translation, "\n".join(lines)):
        return _seen(problem, device) == "survived"


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


def _seen(problem: Problem, device: CompiledDevice) -> str:
    device.report.clear()
    is_wrong = False
    try:
        is_wrong = any(result.first_wrong() is not None for result in problem.results())
    except _SeenError:
        return "by name"
    except (PagedError, ArithmeticError, ValueError, IndexError):
        is_wrong = True
    if device.report.lines():
        return "by name"
    if is_wrong:
        return "by result"
    return "survived"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of kinds and the survivors; the exit code is 0."""
    parser = option_parser(__doc__, "only", "json")
    parser.add_argument("--arch", choices=ARCHS, default="sm_90")
    parser.add_argument("--each", type=int, default=4, metavar="N", help="faults of a kind in a kernel; %(default)d")
    args = parser.parse_args(argv)
    check_only(args.only, [f"{operation}.{row}" for operation, row in PROBLEMS])
    found = []
    with CompiledDevice(args.arch, report=_FirstFault()) as device:
        for operation, variant in PROBLEMS:
            if args.only not in f"{operation}.{variant}":
                continue
            card = CARDS[operation]
            (row,) = [row for row in card.rows if row.variant == variant]
            for outcome in outcomes(Problem(card, row), device, args.each):
                found.append(outcome)
                if outcome.seen == "survived":
                    print(f"survived: {outcome.kind}, {outcome.kernel} line {outcome.line}: {outcome.text}", flush=True)
            if args.json:
                args.json.write_text(json.dumps([asdict(outcome) for outcome in found], indent=1) + "\n")
    print(f"\n{'kind':32} {'planted':>8} {'by name':>8} {'by result':>10} {'survived':>9} {'idle':>5}")
    for kind in dict.fromkeys(outcome.kind for outcome in found):
        counts = Counter(outcome.seen for outcome in found if outcome.kind == kind)
        numbers = [counts[seen] for seen in ("by name", "by result", "survived", "idle")]
        print(f"{kind:32} {sum(numbers):8} {numbers[0]:8} {numbers[1]:10} {numbers[2]:9} {numbers[3]:5}")
    counts = Counter(outcome.seen for outcome in found)
    num_seen = counts["by name"] + counts["by result"]
    print(f"{num_seen} of {num_seen + counts['survived']} seen on {args.arch}, {counts['idle']} idle")
    return 0


if __name__ == "__main__":
    sys.exit(main())
