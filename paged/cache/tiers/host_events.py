"""Notifications of a host tier: blocks stored in host memory and removed from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostBlockStored:
    """A block was copied to host memory; `hash` is the chained hash of its position."""

    hash: int | bytes


@dataclass(frozen=True)
class HostBlockRemoved:
    """A block in host memory was dropped; `hash` is the chained hash of its position."""

    hash: int | bytes


HostEvent = HostBlockStored | HostBlockRemoved
