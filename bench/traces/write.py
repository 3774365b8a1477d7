"""Write a trace set in the format of FlashInfer-Bench from our benchmarks' rows, or from recorded calls.

    paged bench trace-set FOLDER [--op NAME] [--scale full|small|check] [--dtype DTYPE] [--recorded FILE ...]

Definitions and workloads go to the folder, behind those that it has. Floating-point inputs of rows are random when a
set is read; those of a recorded call are stored. Other solvers read the set, and `paged verify --trace FOLDER` does.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from paged.bench.cards.card import SCALES
from paged.bench.cards.cards import CARDS, card_of
from paged.bench.problems.arguments import Arguments
from paged.bench.traces.schema import Definition, Workload, write_set
from paged.bench.traces.translations import TRANSLATIONS, Translation
from paged.errors import InvalidInputError, UnsupportedError
from paged.tools.recorder import read_call

_DTYPES = ("float32", "float16", "bfloat16")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the set; print the workloads, and what has no definition in the format."""
    translations = {translation.operation: translation for translation in TRANSLATIONS}
    parser = argparse.ArgumentParser(description="Write a FlashInfer-Bench trace set.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--op", help=f"rows of this operation: {' or '.join(translations)}; default: all of them")
    parser.add_argument("--scale", choices=SCALES, default="full", help="sizes of the rows; default: %(default)s")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the rows; default: %(default)s")
    parser.add_argument("--recorded", type=Path, nargs="+", default=[], metavar="FILE", help="these calls, no rows")
    args = parser.parse_args(argv)
    if args.op and card_of(args.op).name not in translations:
        raise InvalidInputError(f"--op {args.op}: no definition in the format; there are {', '.join(translations)}")
    if args.recorded:
        calls = _recorded(args.recorded)
    else:
        operations = list(translations)
        if args.op:
            operations = [args.op]
        calls = _rows(operations, args.scale, getattr(torch, args.dtype))
    definitions: dict[str, Definition] = {}
    workloads = []
    for name, operation, arguments in calls:
        try:
            if operation not in translations:
                raise UnsupportedError(f"no definition of {operation}")
            definition, workload = _workload(translations[operation], arguments, args.folder, bool(args.recorded))
        except UnsupportedError as error:
            print(f"{name}: not written: {error}")
            continue
        definitions[definition.name] = definition
        workloads.append(workload)
        print(f"{name}: {definition.name} {workload.uuid[:8]}")
    write_set(args.folder, definitions, workloads)
    return 0


def _rows(operations: Sequence[str], scale: str, dtype: torch.dtype) -> Iterator[tuple[str, str, Arguments]]:
    """Yield name, operation and arguments of the benchmarks' rows."""
    torch.manual_seed(0)
    for operation in operations:
        card = CARDS[operation]
        for row in card.rows:
            yield card.row_name(row), operation, card.problem(row, scale, torch.device("cpu"), dtype)


def _recorded(paths: Sequence[Path]) -> Iterator[tuple[str, str, Arguments]]:
    for path in paths:
        call = read_call(path, torch.device("cpu"))
        yield path.name, call.operation, call.arguments


def _workload(
    translation: Translation, arguments: Arguments, root: Path, stores_all: bool
) -> tuple[Definition, Workload]:
    """Return a call's definition and workload, and write the inputs that are not random to the set."""
    from safetensors.torch import save_file

    definition = translation.define(arguments)
    inputs = translation.inputs(definition, arguments)
    name = str(uuid.uuid4())
    path = Path("blob", "workloads", definition.op_type, definition.name, f"{definition.name}_{name}.safetensors")
    sources: dict[str, dict[str, object]] = {}
    stored = {}
    for key, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            sources[key] = {"type": "scalar", "value": value}
        elif stores_all or not value.is_floating_point():
            stored[key] = value.clone(memory_format=torch.contiguous_format)
            sources[key] = {"type": "safetensors", "path": str(path), "tensor_key": key}
        else:
            sources[key] = {"type": "random"}
    if stored:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        save_file(stored, root / path)
    sizes = definition.sizes(inputs)
    axes = {axis: sizes[axis] for axis, size in definition.axes.items() if size is None}
    return definition, Workload(definition.name, name, axes, sources, root)
