"""What may stand in a folder under a file's name."""

from __future__ import annotations

import os
from pathlib import Path


def put(file: Path, kind: str) -> None:
    """Make `file` a pipe, a folder, a sparse file of 1 TiB, text in "utf-16", or a link to "itself" or to `kind`."""
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "sparse":
        file.touch()
        os.truncate(file, 1 << 40)
    elif kind == "utf-16":
        file.write_bytes("{}".encode("utf-16"))
    else:
        file.symlink_to(file.name if kind == "itself" else kind)
