"""Values of any kind, as Python expressions, so that a case that holds some is text and can be kept as a seed."""

import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st


class Hostile:
    """Raises whatever is asked of it."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("hostile")

    __index__ = __int__ = __float__ = __bool__ = __len__ = __iter__ = __hash__ = __eq__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __contains__ = __str__ = __repr__ = _refuse


_NAMES = {"np": np, "torch": torch, "nan": math.nan, "inf": math.inf}
_NAMES |= {"Decimal": Decimal, "Fraction": Fraction, "Hostile": Hostile}


# What hides text, or does more to a terminal than show it.
STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff\ufeff]"
)


def value(expression: str, **names: Any) -> Any:
    """What an expression drawn from here stands for, made anew; `names` may occur in it."""
    return eval(expression, _NAMES | names)


def expressions(text: str) -> st.SearchStrategy[str]:
    """One of those that semicolons part."""
    return st.sampled_from([one.strip() for one in text.split(";")])


# Whole numbers of every kind, most of them at an edge of some type.
INTEGERS = st.integers(-(10**6), 10**6).map(repr) | expressions("""
    0; 1; -1; 7; 100; 2**31 - 1; 2**31; -2**31; 2**63 - 1; 2**63; -2**63; 10**30; np.int8(100); np.int8(-1);
    np.uint8(200); np.int64(3); np.uint64(2**64 - 1); np.array(7); torch.tensor(7); torch.tensor(-1);
    torch.tensor(3, dtype=torch.uint8)
""")
FLOATS = st.floats().map(repr) | expressions("""
    0.0; -0.0; 1.5; nan; inf; -inf; 1e-46; 1e-40; 1e308; 5e-324; np.float32(0.5); np.float64('nan');
    torch.tensor(0.5); Decimal('NaN'); Decimal('1.5'); Fraction(1, 2); 1j
""")
# Lists and such, of ids or of anything but ids.
COLLECTIONS = expressions("""
    []; (); {}; set(); [7]; (7,); {7}; {7: 1.0}; {5: 'x'}; range(3); range(10**9); iter([1, 2]);
    (i for i in [1, 2]); np.array([7]); np.array([], dtype=np.int64); np.array([1.5]); np.zeros((2, 2), int);
    torch.tensor([7]); torch.tensor([[7]]); torch.tensor([0.5]); torch.tensor([], dtype=torch.int64); [True];
    [None]; [1.0]; ['a']; [[1]]; [-1]; [2**40]; [2**70]; [nan]; ['', 'b']; [Hostile()]; [1] * 5000
""")
OTHERS = expressions(r"""
    None; True; False; np.True_; torch.tensor(True); ''; 'a'; '1'; b'x'; '\ud800'; '\x00'; '\x1b[2J';
    'a' * 100_000; object(); Hostile(); int; print; ...; torch.float16; slice(3)
""")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
VALUES = st.one_of(INTEGERS, FLOATS, COLLECTIONS, OTHERS, JSON.map(repr))


def changed(content: Any, steps: list[int], new: Any) -> Any:
    """JSON in which one place holds something else: where, by steps that are taken modulo what is there."""
    if not steps or not isinstance(content, dict | list) or not content:
        return new
    key = (list(content) if isinstance(content, dict) else range(len(content)))[steps[0] % len(content)]
    copy = content.copy()
    copy[key] = changed(content[key], steps[1:], new)
    return copy
