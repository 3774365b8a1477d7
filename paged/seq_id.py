"""What names a sequence: the caller's choice, unique among those that live."""

from __future__ import annotations

SeqId = str | int
