"""Tiles stay as they were chosen, by measurement and compiler's reports; `python -m tests.kernels.attention.test_tiles`
writes them down again after a change that is meant."""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from paged.kernels.attention.plan import AttentionTile
from paged.kernels.attention.tiles import decode_tile, mla_tile, prefill_tile

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "gfx950", "cpu")
# Digests of `tiles_of`, by table, architecture and kind of cache.
RECORD = Path(__file__).with_name("tiles.json")
_SHAPES = 250  # of each table, architecture and kind
_ROWS = (1, 16, 17, 32, 33, 64, 65, 300)


def _tiles_of(table: str, arch: str, kind: str) -> Iterator[AttentionTile]:
    """The tiles of random shapes, the same in every run."""
    rng = random.Random(f"{table} {arch} {kind}")
    for _ in range(_SHAPES):
        element_size, rows = rng.choice((2, 2, 4)), rng.choice(_ROWS)
        head_dim, v_head_dim = (rng.choice((16, 48, 64, 96, 128, 192, 256, 320, 512)) for _ in range(2))
        sizes = head_dim, rng.choice((head_dim, v_head_dim)), element_size, arch, rng.choice((0, 8, 16, 32, 64, 128))
        more_scores = rng.random() < 0.4
        if table == "decode":
            yield decode_tile(*sizes, rows=rows, more_scores=more_scores, kind=kind)
        elif table == "prefill":
            yield prefill_tile(*sizes, more_scores=more_scores, kind=kind)
        else:
            yield mla_tile(v_head_dim, element_size, arch, rows=rows, kind=kind, chosen=more_scores)


def _digest(table: str, arch: str, kind: str) -> str:
    text = " ".join(str(tuple(vars(tile).values())) for tile in _tiles_of(table, arch, kind))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _groups() -> Iterator[tuple[str, str, str]]:
    yield from itertools.product(("decode", "prefill"), ARCHS, ("", "e4m3", "e5m2", "int8"))
    yield from itertools.product(("latents",), ARCHS, ("", "e4m3", "packed"))


@pytest.mark.parametrize("table", ["decode", "prefill", "latents"])
def test_random_shapes_take_the_tiles_that_were_recorded(table: str) -> None:
    """Those of compile cases are recorded in bench/compilation/clean, which tests/kernels/test_compile.py reads."""
    recorded = json.loads(RECORD.read_text())
    groups = [group for group in _groups() if group[0] == table]
    assert [group for group in groups if recorded[" ".join(group)] != _digest(*group)] == []


if __name__ == "__main__":
    RECORD.write_text(json.dumps({" ".join(group): _digest(*group) for group in _groups()}, indent=0) + "\n")
