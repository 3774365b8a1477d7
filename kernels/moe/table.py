"""Tuned tiles: JSON tables beside the kernels, one for a set of weights on a device, written by `bench.moe.tune`."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path

import torch

from paged.kernels.common.device import Device
from paged.kernels.moe.config import MoeShape, MoeTile, MoeTiles, fallback_tiles

FOLDER = Path(__file__).parent / "configs"


def moe_tiles(shape: MoeShape, dtype: torch.dtype, device: Device) -> MoeTiles:
    """The tiles tuned for the number of tokens nearest to that of `shape`, or `fallback_tiles` where nobody tuned.

    Says once which file is missing.
    """
    return _tiles(shape, str(dtype).removeprefix("torch."), device, FOLDER)


def table_name(num_experts: int, intermediate_size: int, device_name: str, dtype: str) -> str:
    """The file of a table, named as users of this field know it."""
    return f"E={num_experts},N={intermediate_size},device_name={device_name.replace(' ', '_')},dtype={dtype}.json"


@functools.lru_cache(maxsize=4096)
def _tiles(shape: MoeShape, dtype: str, device: Device, folder: Path) -> MoeTiles:
    if device.name:
        table = load_table(folder / table_name(shape.num_experts, shape.intermediate_size, device.name, dtype))
        if table:
            return table[min(table, key=lambda num_entries: abs(num_entries - shape.num_entries))]
    return fallback_tiles(shape, device)


@functools.cache
def load_table(path: Path) -> dict[int, MoeTiles]:
    """Number of entries (tokens times experts a token) -> tiles; empty, with a message, where there is no such file."""
    if not path.exists():
        logging.getLogger(__name__).warning(
            "no tuned MoE tiles in %s: tiles come from the shape; `python -m paged.bench.moe.tune` writes it",
            path,
        )
        return {}
    table = json.loads(path.read_text())
    top_k = int(table["top_k"])
    return {
        int(num_tokens) * top_k: MoeTiles(*(MoeTile(**row[name]) for name in ("gate_up", "down")))
        for num_tokens, row in table["tiles"].items()
    }
