"""Translate a PTX kernel to Python: a function for each basic block, over arrays with a number for each thread.

A function takes the registers, the `batch.Batch` and the mask of threads, and returns the block that follows, or a
condition and the blocks for threads where it is true and false. It stores only registers that some block reads before
it writes them.
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


class Translation:
    """A kernel as functions of its blocks.

    text: its PTX. sites: its instructions by number. executed: blocks that have run. sources: Python lines of blocks.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.kernel = ptx.read(text)
        self.program = _program(self.kernel)
        codes = [(BlockCode(self.program), block) for block in self.kernel.blocks]
        following = [_translate(code, self.kernel, block) for code, block in codes]
        names, texts = [], []
        for (code, block), expression in zip(codes, following, strict=True):
            code.store()
            code.add(f"return {expression}")
            names.append(f"block_{block.index}")
            texts.append(f"def block_{block.index}(R, B, m):\n " + "\n ".join(code.lines))
        self.python = "\n".join(texts)
        scope = {"np": np, "N": numerics, "where": np.where, **self.program.constants}
        for kind, dtype in DTYPES.items():
            scope[kind] = dtype.type
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


def _translate(code: BlockCode, kernel: Kernel, block: Block) -> str:
    """Translate a block, and return the expression for the block that follows."""
    following = str(block.index + 1)
    for i in block.instructions:
        code.site = len(code.program.sites)
        code.program.sites.append(i)
        if i.op in _BRANCHES:
            following = _following(code, i, kernel, block.index + 1)
            continue
        try:
            _TRANSLATE[i.op](code, i)
        except KeyError as error:  # an instruction, a type or a comparison that no table has
            raise NotModelledError(i.text) from error
    return following


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
