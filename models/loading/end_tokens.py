"""The tokens that end an answer, as a checkpoint says."""

from __future__ import annotations

from pathlib import Path

from paged.errors import CheckpointError
from paged.models.loading.checkpoint_files import is_there
from paged.models.loading.hf_config import HfConfig
from paged.printable import one_line


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """From generation_config.json, else config.json, else what that says of text alone (`text_config`), as in
    transformers; each may hold one id or several.

    Raises:
        CheckpointError: a file is unreadable or malformed, or holds something else.
    """
    for name in ("generation_config.json", "config.json"):
        if not is_there(folder / name):
            continue
        hf = HfConfig.read(folder, name)
        text = hf.section("text_config") or hf
        found = next((one for one in (hf.value("eos_token_id"), text.value("eos_token_id")) if one is not None), None)
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            given = one_line(repr(found), 200)
            raise CheckpointError(f"{folder / name}: eos_token_id = {given}, expected one token id or a list of them")
        return tuple(ids)
    return ()
