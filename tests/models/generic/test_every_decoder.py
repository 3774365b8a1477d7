"""How every decoder of transformers runs here: no wrong one, no crash."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.models.generic.every_decoder import decoders, result_of


@pytest.mark.thorough
@pytest.mark.long
def test_every_decoder_is_right_or_refused() -> None:
    """Each as a tiny checkpoint, in a process with a deadline; -s prints the table."""
    pytest.importorskip("transformers")  # children inherit it: importing takes seconds
    names = decoders()
    with ThreadPoolExecutor(2) as pool:
        table = dict(zip(names, pool.map(result_of, names), strict=True))
    lines = [f"{name:50} {result}" for name, result in table.items()]
    print("\n".join(lines))
    counts = Counter(result.partition(":")[0] for result in table.values())
    print(counts)
    assert [line for line in lines if " wrong: " in line or " crash: " in line] == []
    assert counts["native"] + counts["generic"] >= 100
