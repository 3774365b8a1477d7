"""Translate instructions that touch memory, other threads, barriers or the matrix unit into calls of `batch.Batch`."""

from __future__ import annotations

import re

from paged.bench.compiled.arithmetic import Translate
from paged.bench.compiled.code import TYPES, BlockCode, split_address
from paged.bench.compiled.errors import NotModelledError
from paged.bench.compiled.products import POISON, WgmmaKind
from paged.bench.compiled.ptx import Instruction

_SPACES = ("global", "shared", "param")
_ADDRESS_TYPES = {"global": "u8", "shared": "u4"}
_MEMORIES = {"global": "B.memory", "shared": "B.shared"}
_ATOMICS = ("add", "cas")
_ORDERS = ("acq_rel", "acquire", "release", "relaxed")
_TENSOR_ADDRESS = re.compile(r"\[\s*([%\w~]+)\s*,\s*\{([^}]*)\}\s*\]")
_SUM_TYPES = {"f32": "f4", "s32": "i4"}
_MMA_NUMBERS = {"bf16": 2, "f16": 2, "tf32": 1, "s8": 4, "u8": 4, "e4m3": 4, "e5m2": 4}  # numbers in a register


def _space(i: Instruction) -> str:
    for part in i.parts[1:]:
        name = part.partition("::")[0]
        if name in _SPACES:
            return name
    raise NotModelledError(i.text)


def _count(i: Instruction) -> int:
    for part in i.parts:
        if part in ("v2", "v4", "v8"):
            return int(part[1:])
    return 1


def _size(i: Instruction) -> int:
    return int(TYPES[i.type][1:])


def _load(code: BlockCode, i: Instruction) -> None:
    space, kind = _space(i), TYPES[i.type]
    if "acquire" in i.parts:
        raise NotModelledError(i.text)
    if space == "param":
        _load_param(code, i, kind)
        return
    address = code.address(i.name(1), _ADDRESS_TYPES[space])
    values = code.assign(f"{_MEMORIES[space]}.load({address}, {_size(i)}, {_count(i)}, {code.mask(i)}, {code.site})")
    for place, name in enumerate(i.names(0)):
        item = f"{values}[{place}]"
        if kind[0] != "u":
            item += f".view({kind})"
        code.write(i, name, kind, item)


def _load_param(code: BlockCode, i: Instruction, kind: str) -> None:
    base, offset = split_address(i.name(1))
    if i.predicate or _count(i) > 1 or base not in code.program.params:
        raise NotModelledError(i.text)
    code.write(i, i.name(0), kind, f"B.param({code.program.params[base].offset + offset}, {kind!r})")


def _store(code: BlockCode, i: Instruction) -> None:
    space = _space(i)
    if space == "param" or "release" in i.parts:
        raise NotModelledError(i.text)
    address = code.address(i.name(0), _ADDRESS_TYPES[space])
    values = code.arrays(i.names(1), f"u{_size(i)}")
    code.add(f"{_MEMORIES[space]}.store({address}, {values}, {_size(i)}, {code.mask(i)}, {code.site})")


def _atomic(code: BlockCode, i: Instruction) -> None:
    space, kind = _space(i), TYPES[i.type]
    operations = [part for part in i.parts if part in _ATOMICS]
    if space == "param" or not operations or _count(i) > 1 or kind == "f2" or i.type in ("bf16", "f16x2", "bf16x2"):
        raise NotModelledError(i.text)
    first_operand = int(i.op == "atom")
    operands = []
    for index in range(first_operand + 1, len(i.operands)):
        operands += i.names(index)
    address = code.address(i.name(first_operand), _ADDRESS_TYPES[space])
    order = next((part for part in i.parts if part in _ORDERS), "relaxed")
    before = code.assign(
        f"{_MEMORIES[space]}.atomic({operations[0]!r}, {address}, {kind!r}, {code.arrays(operands, kind)}, "
        f"{order!r}, {code.mask(i)}, {code.site})"
    )
    if i.op == "atom":
        code.write(i, i.names(0)[0], kind, before)


def _copy(code: BlockCode, i: Instruction) -> None:
    mask = code.mask(i)
    name = i.parts[2]
    if name == "commit_group":
        code.add(f"B.copies.commit({mask})")
    elif name == "wait_group":
        code.add(f"B.copies.wait({int(i.name(0))}, {mask})")
    elif name in ("ca", "cg"):
        size = int(i.name(2), 0)
        num_read = code.array(str(size), "u4")
        if len(i.operands) > 3:
            num_read = code.array(i.name(3), "u4")
        places = f"{code.address(i.name(0), 'u4')}, {code.address(i.name(1), 'u8')}"
        code.add(f"B.copies.begin({places}, {size}, {num_read}, {mask}, {code.site})")
    elif i.parts[2:4] == ["bulk", "tensor"] and i.parts[5].startswith("shared") and i.parts[6] == "global":
        tensor = _TENSOR_ADDRESS.fullmatch(i.name(1))
        if tensor is None:
            raise NotModelledError(i.text)
        coordinates = code.arrays([part.strip() for part in tensor[2].split(",")], "i4")
        source = f"{code.array(tensor[1], 'u8')}, {coordinates}"
        places = f"{code.address(i.name(0), 'u4')}, {source}, {code.address(i.name(2), 'u4')}"
        code.add(f"B.tensors.begin({places}, {mask}, {code.site})")
    else:
        raise NotModelledError(i.text)


def _mbarrier(code: BlockCode, i: Instruction) -> None:
    name, mask = i.parts[1], code.mask(i)
    if name == "init":
        address, count = code.address(i.name(0), "u4"), code.array(i.name(1), "u4")
        code.add(f"B.tensors.begin_barrier({address}, {count}, {mask}, {code.site})")
    elif name == "inval":
        code.add(f"B.tensors.end_barrier({code.address(i.name(0), 'u4')}, {mask}, {code.site})")
    elif name == "arrive":
        num_bytes = "None"
        if i.parts[2] == "expect_tx":
            num_bytes = code.array(i.name(2), "u4")
        code.add(f"B.tensors.arrive({code.address(i.name(1), 'u4')}, {num_bytes}, {mask}, {code.site})")
    elif name == "try_wait" and "parity" in i.parts:
        address, parity = code.address(i.name(1), "u4"), code.array(i.name(2), "u4")
        code.write(i, i.name(0), "p", f"B.tensors.try_wait({address}, {parity}, {mask}, {code.site})")
    else:
        raise NotModelledError(i.text)


def _load_matrices(code: BlockCode, i: Instruction) -> None:
    if "m8n8" not in i.parts or i.type != "b16":
        raise NotModelledError(i.text)
    names = i.names(0)
    address = code.address(i.name(1), "u4")
    values = code.assign(
        f"B.shared.load_matrices({address}, {len(names)}, {'trans' in i.parts}, {code.mask(i)}, {code.site})"
    )
    for place, name in enumerate(names):
        code.write(i, name, "u4", f"{values}[{place}]")


def _store_matrices(code: BlockCode, i: Instruction) -> None:
    address, values = code.address(i.name(0), "u4"), code.arrays(i.names(1), "u4")
    code.add(f"B.shared.store_matrices({address}, {values}, {'trans' in i.parts}, {code.mask(i)}, {code.site})")


def _mma(code: BlockCode, i: Instruction) -> None:
    """Translate an mma of m16n8: [16, k] times [k, 8]."""
    shape, (result_type, a_type, b_type, sum_type) = i.parts[3], i.parts[-4:]
    if not shape.startswith("m16n8k") or result_type != sum_type or sum_type not in _SUM_TYPES or i.predicate:
        raise NotModelledError(i.text)
    if a_type not in _MMA_NUMBERS or 2 * len(i.names(1)) * _MMA_NUMBERS[a_type] != int(shape.partition("k")[2]):
        raise NotModelledError(i.text)
    kind = _SUM_TYPES[sum_type]
    a = code.fragment(i.names(1), a_type, 2)
    b = code.fragment(i.names(2), b_type, 1)
    sums = code.matrix(i.names(3), kind)
    product = code.assign(f"B.mma({a}, {b}, {sums}, m)")
    code.write_elements(i.names(0), product, kind)


def _wgmma(code: BlockCode, i: Instruction) -> None:
    name, mask = i.parts[1], code.mask(i)
    if name == "fence":
        return
    if name == "commit_group":
        code.add(f"B.groups.commit({mask})")
    elif name == "wait_group":
        _wait_for_products(code, int(i.name(0)), mask)
    else:
        _begin_product(code, i, mask)


def _wait_for_products(code: BlockCode, num_allowed: int, mask: str) -> None:
    """Write the accumulators that a wait brings."""
    registers = code.assign(f"B.groups.wait({num_allowed}, {mask})")
    for name in code.program.accumulators:
        held = code.register(name, "u4")
        code.put(name, "u4", f"B.groups.arrived({registers}, {code.program.numbers[name]}, {held})")


def _begin_product(code: BlockCode, i: Instruction, mask: str) -> None:
    targets = i.names(0)
    is_in_registers = isinstance(i.operands[1], list)
    immediates = [int(i.name(index)) for index in range(4, len(i.operands))]
    kind = code.program.constant_object(WgmmaKind.of(i.parts[4:8], immediates, is_in_registers))
    if is_in_registers:
        a = code.arrays(i.names(1), "u4")
    else:
        a = code.array(i.name(1), "u8")
    numbers = tuple(code.program.numbers[name] for name in targets)
    operands = f"{a}, {code.array(i.name(2), 'u8')}, {code.array(i.name(3), 'p')}"
    code.add(f"B.groups.begin({kind}, {numbers}, {code.arrays(targets, 'u4')}, {operands}, {mask}, {code.site})")
    for name in targets:
        code.write(i, name, "u4", f"B.full({code.program.constant(POISON)})")


def _barrier(code: BlockCode, i: Instruction) -> None:
    name = i.parts[1]
    if name == "warp":
        return  # threads of a warp run in step
    if name not in ("sync", "cta") or "red" in i.parts or "arrive" in i.parts:
        raise NotModelledError(i.text)
    num_threads = 0
    if len(i.operands) > 1:
        num_threads = int(i.name(1), 0)
    code.add(f"B.barrier({num_threads}, {code.mask(i)}, {code.site})")


def _fence(code: BlockCode, i: Instruction) -> None:
    if i.parts[1] == "proxy":
        code.add(f"B.shared.fence_proxy({code.mask(i)})")


def _wait_for_grid(code: BlockCode, i: Instruction) -> None:
    if i.parts[1] == "wait":
        code.add(f"B.memory.wait_for_grid({code.mask(i)})")


def _nothing(code: BlockCode, i: Instruction) -> None:
    """Translate an instruction that changes no value."""


def _shuffle(code: BlockCode, i: Instruction) -> None:
    first, _, second = i.name(0).partition("|")
    operands = ", ".join(code.array(i.name(index), "u4") for index in (1, 2, 3))
    values = code.assign(f"B.shuffle({i.parts[2]!r}, {operands}, {code.mask(i)}, {code.site})")
    code.write(i, first, "u4", f"{values}[0]")
    if second:
        code.write(i, second, "p", f"{values}[1]")


def _reduce(code: BlockCode, i: Instruction) -> None:
    kind = TYPES[i.type]
    if kind[0] == "f":
        raise NotModelledError(i.text)
    code.write(i, i.name(0), kind, f"B.reduce({i.parts[2]!r}, {code.array(i.name(1), kind)}, {code.mask(i)})")


def _vote(code: BlockCode, i: Instruction) -> None:
    if i.parts[2] != "ballot":
        raise NotModelledError(i.text)
    code.write(i, i.name(0), "u4", f"B.ballot({code.array(i.name(1), 'p')}, {code.mask(i)})")


def _elect(code: BlockCode, i: Instruction) -> None:
    first, _, second = i.name(0).partition("|")
    chosen = code.assign(f"B.elect({code.mask(i)})")
    code.write(i, first, "u4", f"{chosen}[0]")
    if second:
        code.write(i, second, "p", f"{chosen}[1]")


EFFECTS: dict[str, Translate] = {
    "ld": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "cp": _copy,
    "mbarrier": _mbarrier,
    "ldmatrix": _load_matrices,
    "stmatrix": _store_matrices,
    "mma": _mma,
    "wgmma": _wgmma,
    "bar": _barrier,
    "fence": _fence,
    "membar": _nothing,
    "griddepcontrol": _wait_for_grid,
    "shfl": _shuffle,
    "redux": _reduce,
    "vote": _vote,
    "elect": _elect,
}
