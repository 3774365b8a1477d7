"""Translate a PTX kernel to Python: a function for each basic block, over arrays with a number for each thread.

A function takes the registers, the `batch.Batch` and the mask of threads, and returns the block that follows, or a
condition and the blocks for threads where it is true and false. It stores only registers that later blocks read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paged.bench.compiled import numerics, ptx
from paged.bench.compiled.arithmetic import ARITHMETIC
from paged.bench.compiled.code import DTYPES, END, BlockCode, Program
from paged.bench.compiled.effects import EFFECTS
from paged.bench.compiled.errors import NotModelledError
from paged.bench.compiled.ptx import Block, Instruction, Kernel

_TRANSLATE = ARITHMETIC | EFFECTS
_BRANCHES = ("bra", "ret", "exit")
# Instructions whose first operand is no result.
_NO_RESULT = {"st", "bra", "ret", "exit", "bar", "red", "membar", "fence", "stmatrix", "griddepcontrol", "cp"}
_NO_RESULT_MBARRIER = ("init", "inval")


class Translation:
    """A kernel as functions of its blocks.

    text: its PTX. sites: its instructions by number. executed: blocks that have run. sources: Python lines of blocks.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.kernel = ptx.read(text)
        self.program = _program(self.kernel)
        live = _live_after(self.kernel, self.program)
        names, lines = [], []
        for block in self.kernel.blocks:
            names.append(f"block_{block.index}")
            lines.append(_function(self.kernel, self.program, block, live[block.index]))
        self.python = "\n".join(lines)
        scope = {"np": np, "N": numerics, "where": np.where, **self.program.constants}
        for code, dtype in DTYPES.items():
            scope[code] = dtype.type
        exec(compile(self.python, f"<{self.kernel.name}>", "exec"), scope)
        self.functions: list[Callable[..., Any]] = [scope[name] for name in names]
        self.sites = self.program.sites
        self.sources = [block.instructions[0].source if block.instructions else "" for block in self.kernel.blocks]
        self.executed: set[int] = set()
        self.waits_for_grid = any(i.parts[:2] == ["griddepcontrol", "wait"] for i in self.sites)


def _program(kernel: Kernel) -> Program:
    numbers = {name: number for number, name in enumerate(kernel.registers)}
    program = Program(kernel, numbers, {param.name: param for param in kernel.params})
    accumulators = set()
    for i in kernel.instructions():
        if i.parts[:2] == ["wgmma", "mma_async"]:
            accumulators.update(i.names(0))
    program.accumulators = sorted(accumulators)
    return program


def _function(kernel: Kernel, program: Program, block: Block, live: set[str]) -> str:
    """Return the Python text of a block's function. live: registers that later blocks read."""
    code = BlockCode(program)
    following = str(block.index + 1)
    for i in block.instructions:
        code.site = len(program.sites)
        program.sites.append(i)
        if i.op in _BRANCHES:
            following = _following(code, i, kernel, block.index + 1)
        elif i.op in _TRANSLATE:
            _TRANSLATE[i.op](code, i)
        else:
            raise NotModelledError(i.text)
    code.lines += code.stores(code.written & live)
    code.add(f"return {following}")
    return f"def block_{block.index}(R, B, m):\n " + "\n ".join(code.lines)


def _following(code: BlockCode, i: Instruction, kernel: Kernel, otherwise: int) -> str:
    """Return the expression for the block behind a branch."""
    target = END
    if i.op == "bra":
        target = kernel.labels[i.name(0)]
    if not i.predicate:
        return str(target)
    condition = code.register(i.predicate, "p")
    if i.is_negated:
        condition = f"~{condition}"
    return f"({condition}, {target}, {otherwise})"


def _live_after(kernel: Kernel, program: Program) -> list[set[str]]:
    """Return for each block the registers that blocks behind it read before they write them."""
    reads, writes = [], []
    for block in kernel.blocks:
        read, written = set[str](), set[str]()
        for i in block.instructions:
            results, operands = _registers_of(i, program)
            read |= operands - written
            written |= results
        reads.append(read)
        writes.append(written)
    live_before = [set(read) for read in reads]
    live_after: list[set[str]] = [set() for _ in kernel.blocks]
    is_changed = True
    while is_changed:
        is_changed = False
        for block in reversed(kernel.blocks):
            after = set[str]()
            for successor in _successors(kernel, block):
                after |= live_before[successor]
            before = reads[block.index] | (after - writes[block.index])
            if after != live_after[block.index] or before != live_before[block.index]:
                live_after[block.index], live_before[block.index] = after, before
                is_changed = True
    return live_after


def _registers_of(i: Instruction, program: Program) -> tuple[set[str], set[str]]:
    """Return the registers that an instruction writes and reads. A guarded one also reads what it may leave."""
    results: set[str] = set()
    operands = list(i.operands)
    is_product = i.op == "wgmma" and i.parts[1] == "mma_async"
    has_result = i.op not in _NO_RESULT and (i.op != "wgmma" or is_product)
    if i.op == "mbarrier" and i.parts[1] in _NO_RESULT_MBARRIER:
        has_result = False
    if has_result and operands:
        for text in i.names(0):
            results.update(program.registers_in(text))
        operands = operands[1:]
    read: set[str] = set()
    for operand in operands:
        for text in operand if isinstance(operand, list) else [operand]:
            read.update(program.registers_in(text))
    if i.parts[:2] == ["wgmma", "wait_group"]:
        results |= set(program.accumulators)
    if i.op == "wgmma":
        read |= results
    if i.predicate:
        read |= {i.predicate, *results}
    return results, read


def _successors(kernel: Kernel, block: Block) -> list[int]:
    successors = []
    last = None
    if block.instructions:
        last = block.instructions[-1]
    if last is not None and last.op == "bra":
        successors.append(kernel.labels[last.name(0)])
    if last is None or last.op not in _BRANCHES or last.predicate:
        successors.append(block.index + 1)
    return [index for index in successors if index < len(kernel.blocks)]
