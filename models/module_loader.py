"""Load transformers' own module with the weights of a checkpoint, and check it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.dtypes import KvKind
from paged.kernels.core.errors import shown
from paged.models.generic.config import ModuleConfig
from paged.models.generic.interface import EXPERTS, PAGED
from paged.models.generic.network import ModuleNetwork, drop_unused
from paged.models.generic.own_attention import attention_of_text
from paged.models.loading.files_read import note_file, stamp_of
from paged.models.loading.kv_scales import is_kv_scale
from paged.models.loading.weights import StoredTensors, read_headers
from paged.models.module_check import check_module
from paged.models.parallel.ranks import Ranks
from paged.tools.printable import one_line

_LOG = logging.getLogger("paged")


def load_module_network(
    config: ModuleConfig,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cache_kinds: tuple[KvKind, KvKind],
    ranks: Ranks,
) -> ModuleNetwork:
    """Return a network over transformers' module with the weights of a folder, after it has passed `check_module`.

    With several ranks, each rank reads the whole module into host memory and moves its part to the device.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or has another shape; or a file cannot be read.
        UnsupportedError: the module gives other logits over a paged cache than without it; or the cache is 8-bit, and
            the files hold scales for such a cache.
    """
    with ranks.apart():
        module = _load(config, folder, dtype, cache_kinds=cache_kinds)
    check_module(config, module, device, ranks)
    _LOG.warning("%s: no family here; transformers' own %s runs over the paged cache", folder, config.architecture)
    network = ModuleNetwork(config, ranks.share, module, device)
    network.join(ranks)
    return network


def _load(config: ModuleConfig, folder: Path, dtype: torch.dtype, *, cache_kinds: tuple[KvKind, KvKind]) -> Any:
    """Return transformers' module with the weights of a folder, in host memory."""
    stored = read_headers(folder)  # refuses an index that points outside of the folder
    _note_files(folder)
    with _quiet():
        try:
            module, report = config.model_class.from_pretrained(
                folder,
                config=config.config,
                dtype=dtype,
                attn_implementation=attention_of_text(config.config, PAGED),
                experts_implementation=EXPERTS,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # transformers' code raises any type
            reason = one_line(f"{type(error).__name__}: {error}", 300)
            raise CheckpointError(f"{folder}: transformers cannot load it: {reason}") from error
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(map(str, report.get(f"{kind}_keys") or ()))
        if kind == "unexpected":
            kv_scales = list(filter(is_kv_scale, names))
            if kv_scales and any(kind.takes_scales for kind in cache_kinds):
                raise UnsupportedError(
                    f"{folder}: {shown(kv_scales[0])}: scales of an 8-bit cache need a family; without kv_cache_dtype "
                    "they are skipped"
                )
            names = [name for name in names if not _is_mask(name, stored) and name not in kv_scales]
        if names:
            raise CheckpointError(f"{folder}: {kind} tensors {shown(names[:4])}")
    module = module.get_submodule(config.text_module)
    drop_unused(module, config.unused)
    return module.eval().requires_grad_(False)


def _note_files(folder: Path) -> None:
    """Note all files of the folder, because the version of transformers decides which files it reads.

    Reading headers has already noted sharded weights in subfolders.
    """
    for file in sorted(folder.iterdir()):
        if file.is_file():
            note_file(file, stamp_of(file.stat()))


def _is_mask(name: str, stored: StoredTensors) -> bool:
    """Return whether an unexpected tensor is a causal mask or its fill value, which older versions stored as buffers.

    Published files of GPT-Neo, GPT-J, CodeGen and GPTBigCode have them.
    """
    if name not in stored:
        return False
    shape = stored[name].shape
    is_square = len(shape) == 4 and shape[:2] == [1, 1] and shape[2] == shape[3]
    return is_square or not shape


@contextmanager
def _quiet() -> Iterator[None]:
    """Load without transformers' progress bars and messages."""
    log = transformers.utils.logging
    level, has_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if has_bars:
            log.enable_progress_bar()
