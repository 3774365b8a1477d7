"""Instructions that compute, beside PyTorch or Python's integers."""

import math
import struct

import pytest
import torch

from tests.compiled.ptx_program import run

_PLACES = """
	mov.u32 %r0, %tid.x;
	mul.wide.u32 %rd8, %r0, 4;
	add.s64 %rd3, %rd0, %rd8;
	add.s64 %rd4, %rd1, %rd8;
	add.s64 %rd5, %rd2, %rd8;
	ld.global.b32 %r1, [%rd3];
	ld.global.b32 %r2, [%rd4];
"""
_WORDS = [0, 1, 2, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE]
_WORDS += [0xFFFFFFFF, 0x12345678, 0xDEADBEEF, 0x3F800000, 0xC0490FDB, 0x55555555, 0xAAAAAAAA, 0x00800000]
_NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 1e-8, 1e30, -3.7, 448.0, 464.0, 465.0, 57344.0, 61440.0, 65504.0]
_NUMBERS += [65520.0, 1e38, math.inf, -math.inf, math.nan, 2.0**-10, 2.0**-9 + 2.0**-11, 3.0e-7, 6.1e-5]


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _signed(word: int, bits: int = 32) -> int:
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> bits - 1 else word


def _computed(instructions: str, pairs: list[tuple[int, int]]) -> list[int]:
    """%r3 of the instructions for pairs of words in %r1 and %r2."""
    count = -(-len(pairs) // 32) * 32
    padded = pairs + [(0, 0)] * (count - len(pairs))
    first, second = (torch.tensor([_signed(pair[index]) for pair in padded], dtype=torch.int32) for index in (0, 1))
    out = torch.zeros(count, dtype=torch.int32)
    body = f"{_PLACES}\n{instructions}\n\tst.global.b32 [%rd5], %r3;"
    assert run(body, (first, second, out), threads=count).kinds() == []
    return [word & 0xFFFFFFFF for word in out.tolist()[: len(pairs)]]


def _shifted(a: int, b: int) -> int:
    return _signed(a) >> min(b, 32)


def _field(a: int, b: int) -> int:
    return _signed(_signed(a) >> (b & 31), 5)


def _bytes(a: int, b: int, selector: int) -> int:
    both = (a | b << 32).to_bytes(8, "little")
    chosen = []
    for position in range(4):
        choice = selector >> 4 * position & 15
        byte = both[choice & 7]
        chosen.append((255 if byte & 128 else 0) if choice & 8 else byte)
    return int.from_bytes(bytes(chosen), "little")


def _divided(a: int, b: int) -> int:
    return int(abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1))


@pytest.mark.parametrize(
    ("instruction", "formula"),
    [
        ("add.s32 %r3, %r1, %r2;", lambda a, b: a + b),
        ("add.s16x2 %r3, %r1, %r2;", lambda a, b: (a + b & 0xFFFF) | ((a >> 16) + (b >> 16) & 0xFFFF) << 16),
        ("sub.s32 %r3, %r1, %r2;", lambda a, b: a - b),
        ("mul.lo.s32 %r3, %r1, %r2;", lambda a, b: a * b),
        ("mul.hi.u32 %r3, %r1, %r2;", lambda a, b: a * b >> 32),
        ("mul.hi.s32 %r3, %r1, %r2;", lambda a, b: _signed(a) * _signed(b) >> 32),
        ("mad.lo.s32 %r3, %r1, %r2, 7;", lambda a, b: a * b + 7),
        ("shl.b32 %r3, %r1, %r2;", lambda a, b: a << b if b < 32 else 0),
        ("shr.u32 %r3, %r1, %r2;", lambda a, b: a >> b if b < 32 else 0),
        ("shr.s32 %r3, %r1, %r2;", _shifted),
        ("shf.l.wrap.b32 %r3, %r1, %r2, 4;", lambda a, b: b << 4 | a >> 28),
        ("shf.r.wrap.b32 %r3, %r1, %r2, 4;", lambda a, b: a >> 4 | b << 28),
        ("and.b32 %r3, %r1, %r2;", lambda a, b: a & b),
        ("xor.b32 %r3, %r1, %r2;", lambda a, b: a ^ b),
        ("not.b32 %r3, %r1;", lambda a, _: ~a),
        ("min.s32 %r3, %r1, %r2;", lambda a, b: min(_signed(a), _signed(b))),
        ("max.u32 %r3, %r1, %r2;", max),
        ("min.relu.s32 %r3, %r1, %r2;", lambda a, b: max(0, min(_signed(a), _signed(b)))),
        ("popc.b32 %r3, %r1;", lambda a, _: a.bit_count()),
        ("prmt.b32 %r3, %r1, %r2, 0x7351;", lambda a, b: _bytes(a, b, 0x7351)),
        ("prmt.b32 %r3, %r1, %r2, 0x8A9F;", lambda a, b: _bytes(a, b, 0x8A9F)),
        ("and.b32 %r4, %r2, 15; bfe.u32 %r3, %r1, %r4, 5;", lambda a, b: a >> (b & 15) & 31),
        ("and.b32 %r4, %r2, 31; bfe.s32 %r3, %r1, %r4, 5;", _field),
        ("cvt.u16.u32 %rs1, %r1; cvt.s32.s16 %r3, %rs1;", lambda a, _: _signed(a, 16)),
        ("cvt.s8.s32 %rs1, %r1; cvt.s32.s8 %r3, %rs1;", lambda a, _: _signed(a, 8)),
        ("mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r3, {%rs2, %rs1};", lambda a, _: a >> 16 | a << 16),
        ("setp.lt.s32 %p0, %r1, %r2; selp.b32 %r3, 3, 5, %p0;", lambda a, b: 3 if _signed(a) < _signed(b) else 5),
        ("setp.lt.u32 %p0, %r1, %r2; selp.b32 %r3, 3, 5, %p0;", lambda a, b: 3 if a < b else 5),
        ("mov.b32 %r3, 9; setp.eq.b32 %p0, %r1, %r2; @!%p0 mov.b32 %r3, 4;", lambda a, b: 9 if a == b else 4),
    ],
)
def test_integers(instruction: str, formula: object) -> None:
    pairs = [(a, b) for a in _WORDS for b in _WORDS]
    assert callable(formula)
    assert _computed(instruction, pairs) == [formula(a, b) & 0xFFFFFFFF for a, b in pairs]


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_division(kind: str) -> None:
    pairs = [(a, b) for a in _WORDS for b in _WORDS if b and (kind == "u32" or (a, b) != (0x80000000, 0xFFFFFFFF))]
    read = (lambda word: word) if kind == "u32" else _signed
    quotients = [_divided(read(a), read(b)) for a, b in pairs]
    remainders = [read(a) - quotient * read(b) for (a, b), quotient in zip(pairs, quotients, strict=True)]
    assert _computed(f"div.{kind} %r3, %r1, %r2;", pairs) == [quotient & 0xFFFFFFFF for quotient in quotients]
    assert _computed(f"rem.{kind} %r3, %r1, %r2;", pairs) == [remainder & 0xFFFFFFFF for remainder in remainders]


@pytest.mark.parametrize(
    ("instruction", "formula"),
    [
        ("add.f32 %r3, %r1, %r2;", torch.add),
        ("mul.f32 %r3, %r1, %r2;", torch.mul),
        ("max.f32 %r3, %r1, %r2;", torch.fmax),
        ("max.NaN.f32 %r3, %r1, %r2;", torch.maximum),
        ("fma.rn.f32 %r3, %r1, %r2, %r1;", lambda a, b: (a.double() * b.double() + a.double()).float()),
        (
            "cvt.rn.bf16.f32 %rs1, %r1; cvt.rn.bf16.f32 %rs2, %r2; fma.rn.f32.bf16 %r3, %rs1, %rs2, %r1;",
            lambda a, b: (a.bfloat16().double() * b.bfloat16().double() + a.double()).float(),
        ),
        (
            "cvt.rn.bf16.f32 %rs1, %r1; add.rn.f32.bf16 %r3, %rs1, %r2;",
            lambda a, b: a.bfloat16().float() + b,
        ),
        ("abs.f32 %r3, %r1;", lambda a, _: a.abs()),
        ("neg.f32 %r3, %r1;", lambda a, _: -a),
        ("max.f32 %r3, %r1, %r2, 0f40000000;", lambda a, b: torch.fmax(torch.fmax(a, b), torch.tensor(2.0))),
        ("cvt.rn.bf16x2.f32 %r3, %r1, %r2;", lambda a, b: torch.stack([b, a], 1).bfloat16()),
        ("cvt.rn.f16x2.f32 %r3, %r1, %r2;", lambda a, b: torch.stack([b, a], 1).half()),
        ("cvt.rn.bf16.f32 %rs1, %r1; cvt.f32.bf16 %r3, %rs1;", lambda a, _: a.bfloat16().float()),
        ("cvt.rn.f16.f32 %rs1, %r1; cvt.f32.f16 %r3, %rs1;", lambda a, _: a.half().float()),
    ],
)
def test_floats(instruction: str, formula: object) -> None:
    pairs = [(a, b) for a in _NUMBERS for b in _NUMBERS]
    first, second = (torch.tensor([pair[index] for pair in pairs]) for index in (0, 1))
    assert callable(formula)
    want = formula(first, second)
    got = torch.tensor([_signed(word) for word in _computed(instruction, [(_bits(a), _bits(b)) for a, b in pairs])],
                       dtype=torch.int32).view(want.dtype).view(want.shape)  # fmt: skip
    assert ((got == want) | (got.isnan() & want.isnan())).all()


@pytest.mark.parametrize("name", ["lt", "ltu", "ne", "neu", "nan"])
def test_comparisons_with_nan(name: str) -> None:
    is_true = name.endswith(("u", "nan"))
    code = f"setp.{name}.f32 %p0, %r1, %r2; selp.b32 %r3, 1, 0, %p0;"
    assert _computed(code, [(_bits(math.nan), _bits(1.0))]) == [int(is_true)]


def test_halves_toward_zero() -> None:
    values = [1.0, 1.0009, -1.0009, 0.33333, 1e-9, -1e-9, 65519.0, 3.0e-7]
    got = _computed("cvt.rz.f16.f32 %rs1, %r1; cvt.f32.f16 %r3, %rs1;", [(_bits(value), 0) for value in values])
    numbers = torch.tensor([_signed(word) for word in got], dtype=torch.int32).view(torch.float32)
    exact = torch.tensor(values)
    assert (numbers.abs() <= exact.abs()).all()
    further = torch.nextafter(numbers.half(), (torch.inf * exact.sign()).half()).float()
    assert ((numbers == exact) | (further.abs() > exact.abs())).all()


def test_whole_numbers_of_floats() -> None:
    got = _computed("cvt.rzi.s32.f32 %r3, %r1;", [(_bits(value), 0) for value in (2.7, -2.7, 3e9, -3e9, math.nan)])
    assert [_signed(word) for word in got] == [2, -2, 2**31 - 1, -(2**31), 0]


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        # 1, the largest number, beyond it, infinity, half of the smallest (a tie), 1.5 of it (a tie), a tie, NaN
        ("e4m3", [0x38, 0x7E, 0x7E, 0xFE, 0x00, 0x02, 0x38, 0x7F]),
        ("e5m2", [0x3C, 0x7B, 0x7B, 0xFB, 0x00, 0x02, 0x3C, 0x7F]),
    ],
)
def test_eight_bit_floats(kind: str, codes: list[int]) -> None:
    largest, smallest, step = {"e4m3": (448.0, 2.0**-9, 2.0**-3), "e5m2": (57344.0, 2.0**-16, 2.0**-2)}[kind]
    values = [1.0, largest, 1.07 * largest, -math.inf, smallest / 2, 1.5 * smallest, 1 + step / 2, math.nan]
    code = f"cvt.rn.satfinite.{kind}x2.f32 %rs1, %r2, %r1; cvt.u32.u16 %r3, %rs1;"
    got = _computed(code, [(_bits(value), _bits(1.0)) for value in values])
    assert got == [codes[0] << 8 | low for low in codes]
    back = (
        f"cvt.u16.u32 %rs1, %r1; cvt.rn.f16x2.{kind}x2 %r4, %rs1; mov.b32 {{%rs1, %rs2}}, %r4; cvt.f32.f16 %r3, %rs1;"
    )
    exact = {codes[0]: 1.0, codes[1]: largest, 0x80 | codes[1]: -largest, 0x01: smallest}
    assert _computed(back, [(low, 0) for low in exact]) == [_bits(value) for value in exact.values()]


def test_a_warp_exchanges_values() -> None:
    lanes = [(lane, 0) for lane in range(64)]
    assert _computed("shfl.sync.bfly.b32 %r3, %r1, 5, 31, -1;", lanes) == [lane ^ 5 for lane in range(64)]
    up = _computed("shfl.sync.up.b32 %r3, %r1, 3, 0, -1;", lanes)
    assert up == [lane - 3 if lane % 32 >= 3 else lane for lane in range(64)]
    idx = _computed("shfl.sync.idx.b32 %r3, %r1, 7, 31, -1;", lanes)
    assert idx == [lane // 32 * 32 + 7 for lane in range(64)]
    assert _computed("redux.sync.add.s32 %r3, %r1, -1;", lanes) == [496] * 32 + [1520] * 32
    ballot = "setp.lt.u32 %p0, %r1, 40; vote.sync.ballot.b32 %r3, %p0, -1;"
    assert _computed(ballot, lanes) == [0xFFFFFFFF] * 32 + [0xFF] * 32
    elected = "elect.sync %r4|%p0, -1; selp.b32 %r3, 1, 0, %p0;"
    assert _computed(elected, lanes) == [int(lane % 32 == 0) for lane in range(64)]


def test_threads_take_different_branches() -> None:
    code = """
	mov.b32 %r3, 0;
	and.b32 %r4, %r1, 3;
$L_MORE:
	setp.eq.s32 %p0, %r4, 0;
	@%p0 bra $L_DONE;
	add.s32 %r3, %r3, 10;
	add.s32 %r4, %r4, -1;
	bra $L_MORE;
$L_DONE:
	add.s32 %r3, %r3, 1;
"""
    assert _computed(code, [(lane, 0) for lane in range(32)]) == [lane % 4 * 10 + 1 for lane in range(32)]
