"""Cases that are known to fail, until what makes them fail is mended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest


def xfailing(cases: Iterable[str], reasons: Mapping[str, str]) -> list[object]:
    """Parameters of a test: those that have a reason must fail, by an assertion."""
    assert set(reasons) <= set(cases)
    return [
        pytest.param(case, marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason=reasons[case]))
        if case in reasons
        else case
        for case in cases
    ]
