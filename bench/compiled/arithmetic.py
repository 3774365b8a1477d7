"""Translate instructions that compute from a thread's own registers: arithmetic, bits, comparisons and conversions.

Each function adds the Python code of one instruction. Formulas are format strings, `{0}` is the first operand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from paged.bench.compiled.code import DTYPES, TYPES, BlockCode
from paged.bench.compiled.errors import NotModelledError
from paged.bench.compiled.ptx import Instruction

Translate = Callable[[BlockCode, Instruction], None]

# Packed types of floating-point numbers -> name of the functions that pack and unpack them.
_PAIRS = {"bf16x2": ("bf16", "u4"), "f16x2": ("f16", "u4"), "f32x2": ("f32", "u8")}
_FLOATS = ("f16", "bf16", "f32", "f64", *_PAIRS)
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED_COMPARISONS = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
# A comparison that is true for NaN -> the opposite one, which is false for it.
_UNORDERED = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
_ROUNDINGS = ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")
_TO_WHOLE = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}
_FLOAT8_PAIRS = {"e4m3x2": "e4m3", "e5m2x2": "e5m2"}
_MAX_SHIFT = 127  # NumPy shifts by more than the bits of a number give 0, or its sign


def _unsigned(kind: str) -> str:
    return f"u{kind[1:]}"


def _float(code: BlockCode, i: Instruction, formula: str, first: int = 1) -> None:
    """Apply a formula to floating-point operands, from operand `first` on. 16-bit types compute in float32."""
    operands = [i.name(index) for index in range(first, len(i.operands))]
    kind = i.type
    if "relu" in i.parts or "sat" in i.parts:
        raise NotModelledError(i.text)
    if kind in ("f32", "f64"):
        result = formula.format(*code.values(operands, TYPES[kind]), F=TYPES[kind])
        code.write(i, i.name(0), TYPES[kind], result)
    elif kind == "f16":
        values = [f"{code.array(operand, 'f2')}.astype(f4)" for operand in operands]
        code.write(i, i.name(0), "f2", f"({formula.format(*values, F='f4')}).astype(f2)")
    elif kind == "bf16":
        values = [f"N.from_bf16({code.array(operand, 'u2')})" for operand in operands]
        code.write(i, i.name(0), "u2", f"N.to_bf16({formula.format(*values, F='f4')})")
    else:
        name, word = _PAIRS[kind]
        pairs = [code.assign(f"N.unpack_{name}({code.array(operand, word)})") for operand in operands]
        low = formula.format(*(f"{pair}[0]" for pair in pairs), F="f4")
        high = formula.format(*(f"{pair}[1]" for pair in pairs), F="f4")
        code.write(i, i.name(0), word, f"N.pack_{name}({low}, {high})")


def _mixed_float(code: BlockCode, i: Instruction, formula: str) -> None:
    """Translate an operation of float32 whose operands but the last have 16 bits, such as add.rn.f32.bf16."""
    operands = []
    for index in range(1, len(i.operands) - 1):
        if i.type == "f16":
            operands.append(f"{code.array(i.name(index), 'f2')}.astype(f4)")
        else:
            operands.append(f"N.from_bf16({code.array(i.name(index), 'u2')})")
    last = code.value(i.name(len(i.operands) - 1), "f4")
    code.write(i, i.name(0), "f4", formula.format(*operands, last))


def _is_mixed(i: Instruction) -> bool:
    return "f32" in i.parts[:-1] and i.type in ("f16", "bf16")


def _binary(code: BlockCode, i: Instruction, symbol: str) -> None:
    formula = f"({{0}} {symbol} {{1}})"
    if _is_mixed(i):
        _mixed_float(code, i, formula)
    elif i.type in _FLOATS:
        _float(code, i, formula)
    else:
        kind = _unsigned(TYPES[i.type])
        code.write(i, i.name(0), kind, formula.format(*code.values([i.name(1), i.name(2)], kind)))


def _multiply(code: BlockCode, i: Instruction) -> None:
    kind = TYPES[i.type]
    if i.parts[1] == "wide":
        wide = f"{kind[0]}{2 * int(kind[1])}"
        code.write(i, i.name(0), wide, _wide_product(code, i, kind, wide))
    elif i.parts[1] == "hi":
        code.write(i, i.name(0), kind, f"N.mul_hi({code.array(i.name(1), kind)}, {code.array(i.name(2), kind)})")
    else:
        _binary(code, i, "*")


def _wide_product(code: BlockCode, i: Instruction, kind: str, wide: str) -> str:
    return f"{code.array(i.name(1), kind)}.astype({wide}) * {code.value(i.name(2), kind)}.astype({wide})"


def _multiply_add(code: BlockCode, i: Instruction) -> None:
    kind = TYPES[i.type]
    if i.parts[1] == "wide":
        wide = f"{kind[0]}{2 * int(kind[1])}"
        code.write(i, i.name(0), wide, f"{_wide_product(code, i, kind, wide)} + {code.value(i.name(3), wide)}")
    elif i.parts[1] == "lo":
        kind = _unsigned(kind)
        a, b, c = code.values([i.name(1), i.name(2), i.name(3)], kind)
        code.write(i, i.name(0), kind, f"{a} * {b} + {c}")
    else:
        raise NotModelledError(i.text)


def _fused_multiply_add(code: BlockCode, i: Instruction) -> None:
    if i.type == "f64":
        _float(code, i, "({0} * {1} + {2})")
    elif _is_mixed(i):
        _mixed_float(code, i, "N.fma({0}, {1}, {2})")
    else:
        _float(code, i, "N.fma({0}, {1}, {2})")


def _divide(code: BlockCode, i: Instruction) -> None:
    if i.type in _FLOATS:
        _float(code, i, "({0} / {1})")
    else:
        _by_function(code, i, "N.div", TYPES[i.type], 2)


def _by_function(code: BlockCode, i: Instruction, function: str, kind: str, count: int, result: str = "") -> None:
    """Call a function with the first `count` operands as arrays of a type."""
    arguments = ", ".join(code.array(i.name(index), kind) for index in range(1, count + 1))
    code.write(i, i.name(0), result or kind, f"{function}({arguments})")


def _extreme(code: BlockCode, i: Instruction, ignores_nan: str, keeps_nan: str) -> None:
    """Translate a minimum or maximum of two or three numbers, given NumPy's functions for both treatments of NaN."""
    if i.type in _FLOATS:
        function = ignores_nan
        if "NaN" in i.parts:
            function = keeps_nan
        formula = f"{function}({{0}}, {{1}})"
        if len(i.operands) == 4:
            formula = f"{function}({formula}, {{2}})"
        _float(code, i, formula)
        return
    formula = f"{keeps_nan}({{0}}, {{1}})"
    kind = TYPES[i.type]
    result = formula.format(*code.values([i.name(1), i.name(2)], kind))
    if "relu" in i.parts:
        result = f"np.maximum({result}, {kind}(0))"
    code.write(i, i.name(0), kind, result)


def _unary(code: BlockCode, i: Instruction, formula: str) -> None:
    """Translate an operation with one operand, of floating-point or signed numbers."""
    if i.type in _FLOATS:
        _float(code, i, formula)
    else:
        kind = TYPES[i.type]
        code.write(i, i.name(0), kind, formula.format(code.array(i.name(1), kind), F=kind))


def _bits(code: BlockCode, i: Instruction, symbol: str) -> None:
    kind = TYPES[i.type]
    a, b = code.values([i.name(1), i.name(2)], kind)
    code.write(i, i.name(0), kind, f"{a} {symbol} {b}")


def _invert(code: BlockCode, i: Instruction) -> None:
    kind = TYPES[i.type]
    code.write(i, i.name(0), kind, f"~{code.array(i.name(1), kind)}")


def _shift(code: BlockCode, i: Instruction, symbol: str) -> None:
    kind = TYPES[i.type]
    amount = i.name(2)
    if code.is_register(amount):
        limited = f"np.minimum({code.register(amount, 'u4')}, {_MAX_SHIFT}).astype({kind})"
    else:
        number = min(int(amount.rstrip("U"), 0), _MAX_SHIFT)
        limited = code.program.constant(DTYPES[kind].type(number))
    code.write(i, i.name(0), kind, f"{code.array(i.name(1), kind)} {symbol} {limited}")


def _funnel_shift(code: BlockCode, i: Instruction) -> None:
    arguments = ", ".join(code.array(i.name(index), "u4") for index in (1, 2, 3))
    code.write(i, i.name(0), "u4", f"N.funnel_shift({arguments}, {i.parts[1]!r}, {i.parts[2]!r})")


def _extract_field(code: BlockCode, i: Instruction) -> None:
    kind = TYPES[i.type]
    place = f"{code.array(i.name(2), 'u4')}, {code.array(i.name(3), 'u4')}"
    code.write(i, i.name(0), kind, f"N.bfe({code.array(i.name(1), kind)}, {place})")


def _permute_bytes(code: BlockCode, i: Instruction) -> None:
    if len(i.parts) > 2:
        raise NotModelledError(i.text)
    _by_function(code, i, "N.prmt", "u4", 3)


def _count_bits(code: BlockCode, i: Instruction) -> None:
    code.write(i, i.name(0), "u4", f"np.bitwise_count({code.array(i.name(1), TYPES[i.type])}).astype(u4)")


def _move(code: BlockCode, i: Instruction) -> None:
    kind = TYPES[i.type]
    if isinstance(i.operands[0], list):
        _split_register(code, i, kind)
    elif isinstance(i.operands[1], list):
        parts = i.operands[1]
        size = int(kind[1]) // len(parts)
        values = ", ".join(code.array(part, f"u{size}") for part in parts)
        code.write(i, i.name(0), _unsigned(kind), f"N.join({kind[1]}, {values})")
    else:
        target, source = i.name(0), i.name(1)
        if source in code.program.accumulators:
            code.add(f"B.check_copied_accumulator({code.program.numbers[source]}, {code.site})")
        is_plain = code.is_register(source) and code.natural_type(source) == code.natural_type(target)
        if is_plain and not i.predicate:
            code.copy(source, target)
        else:
            code.write(i, target, kind, code.array(source, kind))


def _split_register(code: BlockCode, i: Instruction, kind: str) -> None:
    """Move the parts of a register to registers of their own."""
    names = i.names(0)
    part = f"u{int(kind[1]) // len(names)}"
    whole = code.array(i.name(1), _unsigned(kind))
    parts = code.assign(f"np.ascontiguousarray({whole}).view({part}).reshape(-1, {len(names)})")
    for place, name in enumerate(names):
        code.write(i, name, part, f"np.ascontiguousarray({parts}[:, {place}])")


def _convert_address(code: BlockCode, i: Instruction) -> None:
    code.write(i, i.name(0), "u8", code.array(i.name(1), "u8"))


def _select(code: BlockCode, i: Instruction) -> None:
    kind = TYPES[i.type]
    choices = f"{code.value(i.name(1), kind)}, {code.value(i.name(2), kind)}"
    code.write(i, i.name(0), kind, f"where({code.array(i.name(3), 'p')}, {choices})")


def _comparison(name: str, a: str, b: str, is_float: bool) -> str:
    """Return an expression for a comparison. Without "u" at its end, it is false for NaN."""
    is_unequal = f"(({a} < {b}) | ({a} > {b}))"
    if name == "nan":
        return f"(np.isnan({a}) | np.isnan({b}))"
    if name == "num":
        return f"~(np.isnan({a}) | np.isnan({b}))"
    if name == "neu":
        return f"({a} != {b})"
    if name == "equ":
        return f"~{is_unequal}"
    if name in _UNORDERED:
        return f"~({a} {_UNORDERED[name]} {b})"
    if name == "ne" and is_float:
        return is_unequal
    return f"({a} {(_COMPARISONS | _UNSIGNED_COMPARISONS)[name]} {b})"


def _compare(code: BlockCode, i: Instruction) -> None:
    name, kind = i.parts[1], i.type
    combinations = [part for part in i.parts[2:-1] if part in ("and", "or", "xor")]
    operands = [i.name(1), i.name(2)]
    targets = i.name(0).split("|")
    if kind in _PAIRS:
        if combinations:
            raise NotModelledError(i.text)
        function, word = _PAIRS[kind]
        a, b = (code.assign(f"N.unpack_{function}({code.array(operand, word)})") for operand in operands)
        for half, target in enumerate(targets):
            code.write(i, target, "p", _comparison(name, f"{a}[{half}]", f"{b}[{half}]", True))
        return
    if kind == "bf16":
        a, b = (f"N.from_bf16({code.array(operand, 'u2')})" for operand in operands)
    else:
        a, b = code.values(operands, TYPES[kind])
    result = _comparison(name, a, b, kind in _FLOATS)
    if combinations:
        symbol = {"and": "&", "or": "|", "xor": "^"}[combinations[0]]
        other = i.name(3)
        negation = ""
        if other.startswith("!"):
            negation = "~"
        result = f"({result} {symbol} {negation}{code.array(other.lstrip('!'), 'p')})"
    variable = code.assign(result)
    code.write(i, targets[0], "p", variable)
    if len(targets) == 2:
        code.write(i, targets[1], "p", f"~{variable}")


def _convert(code: BlockCode, i: Instruction) -> None:
    target, source = [part for part in i.parts[1:] if part in TYPES or part in (*_FLOAT8_PAIRS, "tf32")][:2]
    rounding = next((part for part in i.parts if part in _ROUNDINGS), "")
    operands = [i.name(index) for index in range(1, len(i.operands))]
    if "relu" in i.parts or "sat" in i.parts:
        raise NotModelledError(i.text)
    if target in ("bf16x2", "f16x2") and source == "f32":
        _only_nearest(i, rounding)
        high, low = (code.array(operand, "f4") for operand in operands)
        code.write(i, i.name(0), "u4", f"N.pack_{target[:-2]}({low}, {high})")
    elif target in _FLOAT8_PAIRS:
        kind = _FLOAT8_PAIRS[target]
        if source == "f16x2":
            pair = f"*N.unpack_f16({code.array(operands[0], 'u4')})"
        else:
            high, low = (code.array(operand, "f4") for operand in operands)
            pair = f"{low}, {high}"
        code.write(i, i.name(0), "u2", f"N.pack_float8({pair}, {kind!r})")
    elif source in _FLOAT8_PAIRS:
        pair = f"N.unpack_float8({code.array(operands[0], 'u2')}, {_FLOAT8_PAIRS[source]!r})"
        code.write(i, i.name(0), "u4", f"N.pack_f16(*{pair})")
    elif target == "tf32":
        code.write(i, i.name(0), "u4", f"N.to_tf32({code.array(operands[0], 'f4')})")
    else:
        number = code.array(operands[0], TYPES[source])
        if source == "bf16":
            number, source = f"N.from_bf16({number})", "f32"
        code.write(i, i.name(0), TYPES[target], _converted_number(i, number, source, target, rounding))


def _converted_number(i: Instruction, number: str, source: str, target: str, rounding: str) -> str:
    """Return an expression for one number in another type."""
    is_float = source in _FLOATS
    kind = TYPES[target]
    if target == "bf16":
        _only_nearest(i, rounding)
        return f"N.to_bf16({number}.astype(f4))"
    if target in _FLOATS:
        if rounding in _TO_WHOLE:
            result = f"{_TO_WHOLE[rounding]}({number}).astype({kind})"
        elif rounding == "rz" and (source, target) == ("f32", "f16"):
            result = f"N.to_f16_toward_zero({number})"
        else:
            if rounding:
                _only_nearest(i, rounding)
            result = f"{number}.astype({kind})"
        return result
    if is_float:
        return f"N.to_integer({number}, {rounding!r}, {kind!r})"
    return f"{number}.astype({kind})"


def _only_nearest(i: Instruction, rounding: str) -> None:
    if rounding != "rn":
        raise NotModelledError(i.text)


ARITHMETIC: dict[str, Translate] = {
    "add": partial(_binary, symbol="+"),
    "sub": partial(_binary, symbol="-"),
    "mul": _multiply,
    "mad": _multiply_add,
    "fma": _fused_multiply_add,
    "div": _divide,
    "rem": lambda code, i: _by_function(code, i, "N.rem", TYPES[i.type], 2),
    "max": partial(_extreme, ignores_nan="np.fmax", keeps_nan="np.maximum"),
    "min": partial(_extreme, ignores_nan="np.fmin", keeps_nan="np.minimum"),
    "neg": partial(_unary, formula="(-{0})"),
    "abs": partial(_unary, formula="np.abs({0})"),
    "sqrt": partial(_unary, formula="np.sqrt({0})"),
    "rsqrt": partial(_unary, formula="({F}(1) / np.sqrt({0}))"),
    "rcp": partial(_unary, formula="({F}(1) / {0})"),
    "ex2": partial(_unary, formula="np.exp2({0})"),
    "lg2": partial(_unary, formula="np.log2({0})"),
    "sin": partial(_unary, formula="np.sin({0})"),
    "cos": partial(_unary, formula="np.cos({0})"),
    "tanh": partial(_unary, formula="np.tanh({0})"),
    "and": partial(_bits, symbol="&"),
    "or": partial(_bits, symbol="|"),
    "xor": partial(_bits, symbol="^"),
    "not": _invert,
    "shl": partial(_shift, symbol="<<"),
    "shr": partial(_shift, symbol=">>"),
    "shf": _funnel_shift,
    "bfe": _extract_field,
    "prmt": _permute_bytes,
    "popc": _count_bits,
    "mov": _move,
    "cvta": _convert_address,
    "selp": _select,
    "setp": _compare,
    "cvt": _convert,
}
