"""The Python code of one basic block: which variable holds a register, as which type.

A register is an array with one number for each thread. Between blocks registers are unsigned, and predicates are bool.
Inside a block each value is also kept in the types that it was used as. In the code, `R` lists the registers, `B` is
the `batch.Batch` of threads, and `m` is the mask of threads that run the block, or None for all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paged.bench.compiled.errors import NotModelledError
from paged.bench.compiled.ptx import PREDICATE, Instruction, Kernel, Param

# PTX type -> NumPy's type code; "p" is a predicate. Packed pairs are words of bits.
TYPES = {"b8": "u1", "u8": "u1", "s8": "i1", "b16": "u2", "u16": "u2", "s16": "i2", "b32": "u4", "u32": "u4"}
TYPES |= {"s32": "i4", "b64": "u8", "u64": "u8", "s64": "i8", "f16": "f2", "bf16": "u2", "f32": "f4", "f64": "f8"}
TYPES |= {"pred": "p", "f16x2": "u4", "bf16x2": "u4", "f32x2": "u8"}
DTYPES = {code: np.dtype(code) for code in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")}
END = 1 << 30  # the block behind the last one

_SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid|laneid|warpid|clock64|globaltimer)(\.[xyz])?$")
_SPECIAL_64 = ("clock64", "globaltimer")
_ADDRESS = re.compile(r"\[\s*([%\w$.~]+)\s*(?:\+\s*(-?\w+))?\s*\]")


@dataclass
class Program:
    """What the code of all blocks shares.

    numbers: register -> its place in `R`. sites: the instructions; code names an instruction by its place here.
    accumulators: registers that wgmma writes some time after it was issued. exposed: registers that some block reads
    before it writes them.
    """

    kernel: Kernel
    numbers: dict[str, int]
    params: dict[str, Param]
    accumulators: list[str] = field(default_factory=list)
    exposed: set[str] = field(default_factory=set)
    constants: dict[str, Any] = field(default_factory=dict)
    sites: list[Instruction] = field(default_factory=list)
    _names: dict[tuple[str, bytes], str] = field(default_factory=dict)

    def constant(self, value: Any) -> str:
        """Return the name of a NumPy scalar."""
        key = (value.dtype.str, value.tobytes())
        if key not in self._names:
            self._names[key] = f"K{len(self._names)}"
            self.constants[self._names[key]] = value
        return self._names[key]

    def constant_object(self, value: object) -> str:
        """Return the name of any other object."""
        name = f"C{len(self.constants)}"
        self.constants[name] = value
        return name


class BlockCode:
    """Collects the lines of one block.

    i: the instruction that is translated, and site its number. written: registers that the block has changed.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lines: list[str] = []
        self.written: set[str] = set()
        self.site = 0
        self._num_temps = 0
        self._variables: dict[str, dict[str, str]] = {}  # register -> type -> variable
        # Register -> matrix product, place in it, and type, until the register is read.
        self._elements: dict[str, tuple[str, int, str]] = {}
        self._fragments: dict[tuple[str, ...], str] = {}

    # Values

    def add(self, line: str) -> None:
        self.lines.append(line)

    def assign(self, expression: str) -> str:
        """Assign to a new variable, and return its name."""
        self._num_temps += 1
        name = f"t{self._num_temps}"
        self.lines.append(f"{name} = {expression}")
        return name

    def is_register(self, operand: str) -> bool:
        return operand in self.program.numbers

    def is_array(self, operand: str) -> bool:
        return self.is_register(operand) or _SPECIAL.match(operand) is not None

    def natural_type(self, register: str) -> str:
        """Return the type that a register has between blocks."""
        size = self.program.kernel.registers[register]
        if size == PREDICATE:
            return "p"
        return f"u{size}"

    def register(self, name: str, kind: str) -> str:
        """Return the variable that holds a register as a type."""
        variables = self._variables.setdefault(name, {})
        if name in self._elements:
            matrix, place, element_kind = self._elements.pop(name)
            variables[element_kind] = self.assign(f"B.element({matrix}, {place})")
        if kind in variables:
            return variables[kind]
        natural = self.natural_type(name)
        if not variables:
            self.program.exposed.add(name)
            variables[natural] = self.assign(f"R[{self.program.numbers[name]}]")
            if kind == natural:
                return variables[natural]
        if "p" in (natural, kind):
            raise NotModelledError(f"register {name} as {kind}")
        known, variable = next(iter(variables.items()))
        if kind[1:] == natural[1:]:
            variables[kind] = self.assign(f"{variable}.view({kind})")
            return variables[kind]
        if known != natural:
            variable = self.register(name, natural)
        converted = f"{variable}.astype({kind})"
        if kind[1:] < natural[1:]:  # its lower part
            converted = f"{variable}.astype(u{kind[1:]})"
            if kind[0] != "u":
                converted += f".view({kind})"
        variables[kind] = self.assign(converted)
        return variables[kind]

    def value(self, operand: str, kind: str) -> str:
        """Return an expression for an operand: an array, or a scalar for a constant."""
        if self.is_register(operand):
            return self.register(operand, kind)
        if special := _SPECIAL.match(operand):
            held = "u4"
            if special[1] in _SPECIAL_64:
                held = "u8"
            return _converted(f"B.special[{operand[1:]!r}]", held, kind)
        if operand in self.program.params:
            return self.program.constant(np.uint64(PARAMS_BASE + self.program.params[operand].offset))
        if operand == "global_smem":
            return self.program.constant(DTYPES[kind].type(SHARED_BASE))
        return self.program.constant(_literal(operand, kind))

    def array(self, operand: str, kind: str) -> str:
        """Return an expression for an operand as an array with a number for each thread."""
        value = self.value(operand, kind)
        if self.is_array(operand):
            return value
        return f"B.full({value})"

    def arrays(self, operands: list[str], kind: str) -> str:
        """Return a tuple of arrays."""
        items = ", ".join(self.array(operand, kind) for operand in operands)
        return f"({items},)"

    def values(self, operands: list[str], kind: str) -> list[str]:
        """Return expressions of which at least one is an array."""
        if any(map(self.is_array, operands)):
            return [self.value(operand, kind) for operand in operands]
        first, *later = operands
        return [self.array(first, kind), *(self.value(operand, kind) for operand in later)]

    # Results

    def write(self, i: Instruction, name: str, kind: str, expression: str) -> None:
        """Give a register a value of a type. A type of other size is extended by its sign, or cut."""
        if name == "_":
            return
        natural = self.natural_type(name)
        if natural != "p" and kind[1:] != natural[1:]:
            if kind[0] == "f":
                raise NotModelledError(i.text)
            kind_there = f"{kind[0]}{natural[1:]}"
            expression, kind = f"({expression}).astype({kind_there})", kind_there
        if i.predicate:
            old = self.register(name, kind)
            predicate = self.register(i.predicate, "p")
            choices = f"{expression}, {old}"
            if i.is_negated:
                choices = f"{old}, {expression}"
            expression = f"where({predicate}, {choices})"
        self.put(name, kind, expression)

    def put(self, name: str, kind: str, expression: str) -> None:
        """Give a register a value of its own size."""
        variable = self.assign(expression)
        self._elements.pop(name, None)
        self._variables[name] = {kind: variable}
        self.written.add(name)

    def write_elements(self, names: list[str], matrix: str, kind: str) -> None:
        """Give registers the elements of a matrix product, which stays one array until a register is read."""
        for place, name in enumerate(names):
            self.written.add(name)
            self._variables[name] = {}
            self._elements[name] = (matrix, place, kind)

    def matrix(self, names: list[str], kind: str) -> str:
        """Return the sum that accumulators hold as a matrix."""
        held = self._elements.get(names[0])
        if held is not None:
            matrix = held[0]
            if all(self._elements.get(name) == (matrix, place, kind) for place, name in enumerate(names)):
                return matrix
        return self.assign(f"B.accumulators({self.arrays(names, kind)})")

    def fragment(self, names: list[str], kind: str, num_halves: int) -> str:
        """Return the matrix that registers hold as an operand of mma. Products share their operands' matrices."""
        arrays = self.arrays(names, "u4")
        key = (arrays, kind, str(num_halves))
        if key not in self._fragments:
            self._fragments[key] = self.assign(f"B.fragment({arrays}, {kind!r}, {num_halves})")
        return self._fragments[key]

    # Masks and addresses

    def mask(self, i: Instruction) -> str:
        """Return an expression for the mask of threads that run an instruction."""
        if not i.predicate:
            return "m"
        predicate = self.register(i.predicate, "p")
        if i.is_negated:
            predicate = f"~{predicate}"
        return f"({predicate} if m is None else m & {predicate})"

    def address(self, operand: str, kind: str) -> str:
        """Return an expression for an address in brackets, an array of "u4" or "u8"."""
        base, offset = split_address(operand)
        address = self.array(base, kind)
        if offset == 0:
            return address
        return f"({address} + {self.program.constant(np.int64(offset).astype(kind))})"

    def store(self) -> None:
        """Store the registers that the block has changed, if any block reads them before it writes them."""
        numbers = self.program.numbers
        values = []
        for name in sorted(self.written & self.program.exposed, key=numbers.__getitem__):
            values.append((numbers[name], self.register(name, self.natural_type(name))))
        if not values:
            return
        self.add("if m is None:")
        self.lines += [f" R[{number}] = {value}" for number, value in values]
        self.add("else:")
        self.lines += [f" R[{number}] = where(m, {value}, R[{number}])" for number, value in values]


SHARED_BASE = 1024  # the address of shared memory
PARAMS_BASE = 0x7F00_0000_0000  # the address of parameters, of which tensor maps are read by address


def split_address(operand: str) -> tuple[str, int]:
    """Return the register of an address and the number added to it."""
    match = _ADDRESS.fullmatch(operand)
    if match is None:
        raise NotModelledError(f"address {operand}")
    return match[1], int(match[2] or "0", 0)


def _converted(expression: str, held: str, kind: str) -> str:
    if held == kind:
        return expression
    if held[1:] == kind[1:]:
        return f"{expression}.view({kind})"
    return f"{expression}.astype({kind})"


def _literal(text: str, kind: str) -> Any:
    """Return the number that a PTX literal stands for."""
    if kind == "p":
        return np.bool_(int(text, 0))
    dtype = DTYPES[kind]
    if text.startswith(("0f", "0d")):
        bits = bytes.fromhex(text[2:])[::-1]
        if len(bits) != dtype.itemsize:
            raise NotModelledError(f"literal {text} as {kind}")
        return np.frombuffer(bits, dtype)[0]
    if kind[0] == "f" and "." in text:
        return dtype.type(float(text))
    number = int(text.rstrip("U"), 0) & ((1 << 8 * dtype.itemsize) - 1)
    return np.array(number, f"u{dtype.itemsize}").view(dtype)[()]
