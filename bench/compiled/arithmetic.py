"""Translate instructions that compute from a thread's own registers: arithmetic, bits, comparisons and conversions.

Each function adds the Python code of one instruction. Formulas are format strings: `{0}` is the first operand, and
`{K}` the type of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from paged.bench.compiled.code import DTYPES, TYPES, BlockCode
from paged.bench.compiled.errors import NotModelledError
from paged.bench.compiled.ptx import Instruction

Translate = Callable[[BlockCode, Instruction], None]

# Instruction -> formula for integers and bits.
_INTEGERS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "mad": "{0} * {1} + {2}",
    "div": "N.div({0}, {1})",
    "rem": "N.rem({0}, {1})",
    "max": "np.maximum({0}, {1})",
    "min": "np.minimum({0}, {1})",
    "neg": "-{0}",
    "abs": "np.abs({0})",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "~{0}",
    "bfe": "N.bfe({0}, {1}, {2})",
    "prmt": "N.prmt({0}, {1}, {2})",
    "cvta": "{0}",
    "popc": "np.bitwise_count({0}).astype({K})",
}
_WRAPPING = ("add", "sub", "mul", "mad")  # signed or not, the bits are the same
# Instruction -> formula for floating-point numbers. A minimum or maximum ignores NaN unless it says otherwise.
_FLOATS = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "fma": "N.fma({0}, {1}, {2})",
    "div": "({0} / {1})",
    "max": "np.fmax({0}, {1})",
    "min": "np.fmin({0}, {1})",
    "neg": "(-{0})",
    "abs": "np.abs({0})",
    "sqrt": "np.sqrt({0})",
    "rsqrt": "({K}(1) / np.sqrt({0}))",
    "rcp": "({K}(1) / {0})",
    "ex2": "np.exp2({0})",
    "lg2": "np.log2({0})",
    "sin": "np.sin({0})",
    "cos": "np.cos({0})",
    "tanh": "np.tanh({0})",
}
_KEEPING_NAN = {"max": "np.maximum({0}, {1})", "min": "np.minimum({0}, {1})"}
# Packed types of floating-point numbers -> name of the functions that pack and unpack them, and the type of the word.
_PAIRS = {"bf16x2": ("bf16", "u4"), "f16x2": ("f16", "u4"), "f32x2": ("f32", "u8")}
_FLOAT_TYPES = ("f16", "bf16", "f32", "f64", *_PAIRS)
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
# A comparison that is true for NaN -> the opposite one, which is false for it.
_UNORDERED = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
_ROUNDINGS = ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")
_TO_WHOLE = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}
_FLOAT8_PAIRS = {"e4m3x2": "e4m3", "e5m2x2": "e5m2"}
_MAX_SHIFT = 127  # NumPy shifts by more than the bits of a number give 0, or its sign


def _operands(i: Instruction, first: int = 1) -> list[str]:
    return [i.name(index) for index in range(first, len(i.operands))]


def _compute(code: BlockCode, i: Instruction) -> None:
    """Translate an instruction that has a formula."""
    if i.type in _FLOAT_TYPES:
        _compute_floats(code, i)
    else:
        _compute_integers(code, i)


def _compute_integers(code: BlockCode, i: Instruction) -> None:
    if i.type in ("s16x2", "u16x2") and i.op in _WRAPPING:
        halves = [f"{code.array(operand, 'u4')}.view(u2)" for operand in _operands(i)]
        code.write(i, i.name(0), "u4", f"({_INTEGERS[i.op].format(*halves)}).view(u4)")
        return
    kind = TYPES[i.type]
    if i.op in _WRAPPING:
        kind = f"u{kind[1:]}"
    if i.op == "prmt" and len(i.parts) > 2:
        raise NotModelledError(i.text)
    result = _INTEGERS[i.op].format(*code.values(_operands(i), kind), K=kind)
    if "relu" in i.parts:
        result = f"np.maximum({result}, {kind}(0))"
    code.write(i, i.name(0), kind, result)


def _compute_floats(code: BlockCode, i: Instruction) -> None:
    """Compute with floating-point numbers. 16-bit types compute in float32."""
    if "relu" in i.parts or "sat" in i.parts:
        raise NotModelledError(i.text)
    formula, operands, kind = _FLOATS[i.op], _operands(i), i.type
    if "NaN" in i.parts:
        formula = _KEEPING_NAN[i.op]
    if i.op in _KEEPING_NAN and len(operands) == 3:
        formula = formula.replace("{1}", formula.replace("{0}", "{2}"))
    if kind in _PAIRS:
        name, word = _PAIRS[kind]
        pairs = [code.assign(f"N.unpack_{name}({code.array(operand, word)})") for operand in operands]
        low = formula.format(*(f"{pair}[0]" for pair in pairs))
        high = formula.format(*(f"{pair}[1]" for pair in pairs))
        code.write(i, i.name(0), word, f"N.pack_{name}({low}, {high})")
    elif "f32" in i.parts[:-1]:  # such as add.rn.f32.bf16, whose last operand is float32
        values = [_widened(code, operand, kind) for operand in operands[:-1]]
        code.write(i, i.name(0), "f4", formula.format(*values, code.value(operands[-1], "f4")))
    elif kind == "f16":
        result = formula.format(*(_widened(code, operand, kind) for operand in operands), K="f4")
        code.write(i, i.name(0), "f2", f"({result}).astype(f2)")
    elif kind == "bf16":
        result = formula.format(*(_widened(code, operand, kind) for operand in operands), K="f4")
        code.write(i, i.name(0), "u2", f"N.to_bf16({result})")
    else:
        if kind == "f64" and i.op == "fma":
            formula = "({0} * {1} + {2})"
        code.write(i, i.name(0), TYPES[kind], formula.format(*code.values(operands, TYPES[kind]), K=TYPES[kind]))


def _widened(code: BlockCode, operand: str, kind: str) -> str:
    """Return an expression for a 16-bit number as float32."""
    if kind == "f16":
        return f"{code.array(operand, 'f2')}.astype(f4)"
    return f"N.from_bf16({code.array(operand, 'u2')})"


def _multiply(code: BlockCode, i: Instruction) -> None:
    """Translate mul and mad: of floats, or the lower half, the upper half or all of a product of integers."""
    part, kind = i.parts[1], TYPES[i.type]
    if part == "wide":
        wide = f"{kind[0]}{2 * int(kind[1])}"
        product = f"{code.array(i.name(1), kind)}.astype({wide}) * {code.value(i.name(2), kind)}.astype({wide})"
        if i.op == "mad":
            product += f" + {code.value(i.name(3), wide)}"
        code.write(i, i.name(0), wide, product)
    elif part == "hi" and i.op == "mul":
        code.write(i, i.name(0), kind, f"N.mul_hi({code.array(i.name(1), kind)}, {code.array(i.name(2), kind)})")
    elif part == "hi":
        raise NotModelledError(i.text)
    else:
        _compute(code, i)


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
    if i.parts[2] != "wrap":
        raise NotModelledError(i.text)
    arguments = ", ".join(code.array(operand, "u4") for operand in _operands(i))
    code.write(i, i.name(0), "u4", f"N.funnel_shift({arguments}, {i.parts[1]!r})")


def _move(code: BlockCode, i: Instruction) -> None:
    kind = TYPES[i.type]
    if isinstance(i.operands[0], list):
        _split_register(code, i, kind)
    elif isinstance(i.operands[1], list):
        parts = i.operands[1]
        size = int(kind[1]) // len(parts)
        values = ", ".join(code.array(part, f"u{size}") for part in parts)
        code.write(i, i.name(0), f"u{kind[1:]}", f"N.join({kind[1]}, {values})")
    else:
        target, source = i.name(0), i.name(1)
        if source in code.program.accumulators:
            code.add(f"B.check_copied_accumulator({code.program.numbers[source]}, {code.site})")
        code.write(i, target, kind, code.array(source, kind))


def _split_register(code: BlockCode, i: Instruction, kind: str) -> None:
    """Move the parts of a register to registers of their own."""
    names = i.names(0)
    part = f"u{int(kind[1]) // len(names)}"
    register = code.array(i.name(1), f"u{kind[1:]}")
    parts = code.assign(f"np.ascontiguousarray({register}).view({part}).reshape(-1, {len(names)})")
    for place, name in enumerate(names):
        code.write(i, name, part, f"np.ascontiguousarray({parts}[:, {place}])")


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
    return f"({a} {_COMPARISONS[name]} {b})"


def _compare(code: BlockCode, i: Instruction) -> None:
    name, kind = i.parts[1], i.type
    operands = [i.name(1), i.name(2)]
    if kind in _PAIRS or len(i.operands) > 3 or "|" in i.name(0):
        raise NotModelledError(i.text)
    if kind == "bf16":
        a, b = (_widened(code, operand, kind) for operand in operands)
    else:
        a, b = code.values(operands, TYPES[kind])
    code.write(i, i.name(0), "p", _comparison(name, a, b, kind in _FLOAT_TYPES))


def _convert(code: BlockCode, i: Instruction) -> None:
    target, source = [part for part in i.parts[1:] if part in TYPES or part in (*_FLOAT8_PAIRS, "tf32")][:2]
    rounding = next((part for part in i.parts if part in _ROUNDINGS), "")
    operands = _operands(i)
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
    is_float = source in _FLOAT_TYPES
    kind = TYPES[target]
    if target == "bf16":
        _only_nearest(i, rounding)
        return f"N.to_bf16({number}.astype(f4))"
    if target in _FLOAT_TYPES:
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
    **dict.fromkeys([*_INTEGERS, *_FLOATS], _compute),
    "mul": _multiply,
    "mad": _multiply,
    "shl": partial(_shift, symbol="<<"),
    "shr": partial(_shift, symbol=">>"),
    "shf": _funnel_shift,
    "mov": _move,
    "selp": _select,
    "setp": _compare,
    "cvt": _convert,
}
