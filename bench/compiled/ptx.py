"""Read the PTX that Triton writes: parameters, registers, and instructions in basic blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from paged.bench.compiled.errors import NotModelledError

Operand = str | list[str]
"""A register, a number, an address in brackets, or the parts of a vector."""

# Type of a register or parameter -> bytes; a predicate has none.
NUM_BYTES = {"b8": 1, "s8": 1, "u8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4}
NUM_BYTES |= {"s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}
PREDICATE = 0  # bytes of a predicate

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)(.*?)\n\{", re.DOTALL)
_PARAM = re.compile(r"\.param\b.*?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?$")
_ALIGN = re.compile(r"\.align\s+\d+\s+|\.ptr\s+|\.global\s+")
_FILE = re.compile(r'\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"')
_LOCATION = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+\d+")
_LABEL = re.compile(r"([\w$]+):(?!:)\s*")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_REGISTER = re.compile(r"([%\w$]+)(?:<(\d+)>)?$")
_USED_BYTES = re.compile(r'\.pragma\s+"used_bytes_mask (\w+)"')
_STATEMENT = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^{}]*\}|\[[^\[\]]*(?:\{[^{}]*\})?[^\[\]]*\]|[^,{}\[\]]+")
_NAME = re.compile(r"[%$A-Za-z_][\w$.]*")
_ENDS_BLOCK = ("bra", "ret", "exit", "trap")
# Labels for debuggers, which no branch names.
_DEBUG_LABELS = ("$L__tmp", "$L__func", "$L__debug")


@dataclass
class Instruction:
    """One instruction.

    parts: the opcode between its dots, such as ["add", "s32"]. predicate: the register that guards it, or "".
    is_negated: whether a false predicate lets it run. source: the Python line that it comes from. line: its line in the
    PTX. used_bytes: for a load, a bit for each byte whose value is used.
    """

    parts: list[str]
    predicate: str
    is_negated: bool
    operands: list[Operand]
    source: str
    line: int
    text: str
    used_bytes: int | None = None

    @property
    def op(self) -> str:
        return self.parts[0]

    @property
    def type(self) -> str:
        return self.parts[-1]

    def name(self, index: int) -> str:
        """Return an operand that is no vector."""
        operand = self.operands[index]
        if isinstance(operand, list):
            raise NotModelledError(self.text)
        return operand

    def names(self, index: int) -> list[str]:
        """Return an operand's parts; a scalar is its only part."""
        operand = self.operands[index]
        if isinstance(operand, list):
            return operand
        return [operand]


@dataclass
class Block:
    """Instructions without a branch between them. Only the last one may branch."""

    index: int
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True)
class Param:
    """A kernel parameter: its place in the parameters' memory, and its bytes."""

    name: str
    offset: int
    size: int


@dataclass
class Kernel:
    """The kernel of a module. registers: name -> bytes. labels: name -> index of a block."""

    name: str
    params: list[Param]
    registers: dict[str, int]
    blocks: list[Block]
    labels: dict[str, int]
    num_threads: int

    def instructions(self) -> list[Instruction]:
        listed = []
        for block in self.blocks:
            listed += block.instructions
        return listed


def read(text: str) -> Kernel:
    """Return the only kernel of a PTX module."""
    code, _, debug = text.partition("\t.section")
    entry = _ENTRY.search(code)
    if entry is None:
        raise NotModelledError("a PTX module without a kernel")
    name, params, directives = entry.groups()
    threads = re.search(r"\.reqntid\s+(\d+)", directives)
    if threads is None:
        raise NotModelledError(f"{name}: no .reqntid")
    reader = _Reader(dict(_FILE.findall(code + debug)))
    start = entry.end()
    reader.read_body(code[start:], first_line=code.count("\n", 0, start) + 1)
    return Kernel(name, _params(params), reader.registers, reader.blocks, reader.labels, int(threads[1]))


def _params(text: str) -> list[Param]:
    params: list[Param] = []
    offset = 0
    for line in text.split(","):
        match = _PARAM.match(_ALIGN.sub("", line.strip()))
        if match is None:
            continue
        kind, name, length = match.groups()
        size = NUM_BYTES[kind] * int(length or 1)
        alignment = min(size, 64)
        offset = -(-offset // alignment) * alignment
        params.append(Param(name, offset, size))
        offset += size
    return params


class _Reader:
    """Reads the body of a kernel line by line."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files
        self.registers: dict[str, int] = {}
        self.blocks = [Block(0)]
        self.labels: dict[str, int] = {}
        self._scopes: list[dict[str, str]] = []  # names declared inside of { }, and their unique names
        self._num_scopes = 0
        self._source = ""
        self._used_bytes: int | None = None
        self._is_over = False

    def read_body(self, body: str, first_line: int) -> None:
        for number, line in enumerate(body.split("\n"), first_line):
            if location := _LOCATION.match(line):
                self._set_source(location, line)
                continue
            text = line.partition("//")[0].strip()
            while text and not self._is_over:
                text = self._read_next(text, number)
        if not self.blocks[-1].instructions and self.blocks[-1].index not in self.labels.values():
            self.blocks.pop()

    def _set_source(self, location: re.Match[str], line: str) -> None:
        _, _, comment = line.partition("//")
        file = self.files.get(location[1], location[1]).rpartition("/")[2]
        self._source = comment.strip() or f"{file}:{location[2]}"

    def _read_next(self, text: str, line: int) -> str:
        """Read a brace, a label or a statement, and return what follows it on the line."""
        if text[0] == "{":
            self._num_scopes += 1
            self._scopes.append({})
            return text[1:].strip()
        if text[0] == "}":
            if self._scopes:
                self._scopes.pop()
            else:
                self._is_over = True
            return text[1:].strip()
        if label := _LABEL.match(text):
            self._add_label(label[1])
            return text[label.end() :]
        statement, _, text = text.partition(";")
        self._read_statement(statement.strip(), line)
        return text.strip()

    def _add_label(self, name: str) -> None:
        if name.startswith(_DEBUG_LABELS):
            return
        self._begin_block()
        self.labels[self._declare(name)] = self.blocks[-1].index

    def _begin_block(self) -> None:
        if self.blocks[-1].instructions:
            self.blocks.append(Block(len(self.blocks)))

    def _declare(self, name: str) -> str:
        """Return a unique name for a register or label that is declared here."""
        if not self._scopes:
            return name
        unique = f"{name}~{self._num_scopes}"
        self._scopes[-1][name] = unique
        return unique

    def _read_statement(self, statement: str, line: int) -> None:
        if registers := _REGISTERS.match(statement):
            self._add_registers(*registers.groups())
        elif used := _USED_BYTES.match(statement):
            self._used_bytes = int(used[1], 0)
        elif statement and not statement.startswith("."):
            self._add_instruction(statement, line)

    def _add_registers(self, kind: str, names: str) -> None:
        size = NUM_BYTES.get(kind, PREDICATE)
        for declaration in names.split(","):
            match = _REGISTER.match(declaration.strip())
            assert match is not None
            name, count = match.groups()
            numbered = [name]
            if count:
                numbered = [f"{name}{number}" for number in range(int(count))]
            for register in numbered:
                self.registers[self._declare(register)] = size

    def _add_instruction(self, statement: str, line: int) -> None:
        match = _STATEMENT.match(statement)
        if match is None:
            raise NotModelledError(statement)
        negation, predicate, opcode, operands = match.groups()
        parts = [part.replace("\0", "::") for part in opcode.replace("::", "\0").split(".")]
        instruction = Instruction(
            parts=parts,
            predicate=self._unique(predicate or ""),
            is_negated=bool(negation),
            operands=[self._operand(operand.strip()) for operand in _OPERAND.findall(operands) if operand.strip()],
            source=self._source,
            line=line,
            text=" ".join(statement.split())[:160],
            used_bytes=self._used_bytes,
        )
        self._used_bytes = None
        self.blocks[-1].instructions.append(instruction)
        if instruction.op in _ENDS_BLOCK:
            self._begin_block()

    def _unique(self, name: str) -> str:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return name

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return [self._renamed(part.strip()) for part in text[1:-1].split(",")]
        return self._renamed(text)

    def _renamed(self, text: str) -> str:
        """Return an operand's text with unique names."""
        if not self._scopes:
            return text
        return _NAME.sub(lambda match: self._unique(match[0]), text)
