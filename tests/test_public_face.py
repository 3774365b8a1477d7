"""Nothing that callers rely on changes unannounced."""

from difflib import unified_diff

from tests.public_face import RECORDED, public_face


def test_names_and_signatures_are_those_recorded() -> None:
    """If a change is meant: announce it in CHANGELOG, then `python -m tests.public_face` (docs/stability.md)."""
    changes = list(unified_diff(RECORDED.read_text().splitlines(), public_face().splitlines(), "recorded", "now", n=0))
    assert changes == [], "\n".join(changes)
