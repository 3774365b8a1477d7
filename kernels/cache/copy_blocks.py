"""Copy blocks within every layer's caches (copy-on-write), or to other memory (swap)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch

from ..core.checks import check_device, check_is_tensor, check_tensor, check_writable
from ..core.compat import tl, triton
from ..core.custom_ops import Arguments
from ..core.device import use_triton
from ..core.errors import InvalidInputError, UnsupportedError, as_int, shown
from ..core.ids import Ids, check_all_ids
from ..core.launch import launch, wait_for_inputs
from ..core.operation import Run, operation

# 8-byte words that a program copies. With 4 warps, a thread makes four 16-byte accesses.
BLOCK_WORDS = 1024
# Integer dtypes by size in bytes. On a CPU, PyTorch copies 8-byte words 7 times as fast as bytes.
_WORD_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _copy_blocks_kernel(
    cache_ptrs_ptr,  # int64 [2, num_caches], the addresses of the sources, then of the targets
    block_pairs_ptr,  # int64 [num_pairs, 2], contiguous, source then destination
    words_per_block,
    stride_source_block,
    stride_target_block,
    ALIGNMENT: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """Copy BLOCK_WORDS words of one pair in one cache. ALIGNMENT divides the address of every block."""
    wait_for_inputs()
    pair_ptr = block_pairs_ptr + tl.program_id(0).to(tl.int64) * 2
    source = tl.load(pair_ptr)
    destination = tl.load(pair_ptr + 1)
    source_address = tl.load(cache_ptrs_ptr + tl.program_id(1))
    target_address = tl.load(cache_ptrs_ptr + tl.num_programs(1) + tl.program_id(1))
    # A block and itself fill up the pairs of a step in which few sequences copy. In a swap, equal ids are two blocks.
    if (source == destination) & (source_address == target_address):
        return
    source_ptr = _words(source_address, ALIGNMENT)
    target_ptr = _words(target_address, ALIGNMENT)
    offs = tl.program_id(2).to(tl.int64) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    mask = offs < words_per_block
    words = tl.load(source_ptr + source * stride_source_block + offs, mask=mask)
    tl.store(target_ptr + destination * stride_target_block + offs, words, mask=mask)


@triton.jit
def _words(address, ALIGNMENT: tl.constexpr):
    """A pointer to integers, which copies keep bit for bit; floats could lose a NaN's payload."""
    if ALIGNMENT >= 8:
        pointer = address.to(tl.pointer_type(tl.int64))
    elif ALIGNMENT == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    elif ALIGNMENT == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int8))
    return tl.multiple_of(pointer, ALIGNMENT)


class BlockCopy:
    """Block copies between fixed caches: one launch each, which a CUDA graph may capture.

    The host never waits, and only the pairs go to the device. The object keeps the caches alive.

    Args:
        sources, targets: lists of equally many tensors [num_blocks, ...], as `copy_blocks` takes them, with blocks of
            one size and dtype on one device. Not checked.
    """

    def __init__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self._sources, self._targets = sources, targets
        self.read_addresses()

    def read_addresses(self) -> None:
        """Send the caches' addresses to the device, on the current stream. Repeat it after the caches have moved."""
        sources, targets = self._sources, self._targets
        first = sources[0]
        block_bytes = math.prod(first.shape[1:]) * first.element_size()
        strides = [caches[0].stride(0) * first.element_size() for caches in (sources, targets)]
        addresses = [cache.data_ptr() for cache in (*sources, *targets)]
        self._alignment = math.gcd(16, block_bytes, *strides, *addresses)
        self._word_bytes = min(self._alignment, 8)
        self._words_per_block = block_bytes // self._word_bytes
        self._strides = [stride // self._word_bytes for stride in strides]
        self._addresses = _send(torch.tensor(addresses), first.device)

    def __call__(self, block_pairs: torch.Tensor) -> None:
        """Copy block source over block destination in every cache.

        block_pairs: int64 [num_pairs, 2] on the caches' device, not checked. No destination appears twice, or is a
        source in the same cache, but for pairs of equal blocks, which Triton skips.
        """
        if block_pairs.shape[0] == 0 or self._words_per_block == 0:
            return
        if not use_triton(self._sources[0]):
            from_blocks, to_blocks = block_pairs.unbind(1)
            for source, target in zip(self._sources, self._targets, strict=True):
                words = self._as_words(source).index_select(0, from_blocks)
                self._as_words(target).index_copy_(0, to_blocks, words)
            return
        launch(
            _copy_blocks_kernel,
            (block_pairs.shape[0], len(self._sources), triton.cdiv(self._words_per_block, BLOCK_WORDS)),
            cache_ptrs_ptr=self._addresses,
            block_pairs_ptr=block_pairs.contiguous(),
            words_per_block=self._words_per_block,
            stride_source_block=self._strides[0],
            stride_target_block=self._strides[1],
            ALIGNMENT=self._alignment,
            BLOCK_WORDS=BLOCK_WORDS,
            num_warps=4,
        )

    def _as_words(self, cache: torch.Tensor) -> torch.Tensor:
        """View a cache as integers [num_blocks, words_per_block]."""
        return cache.unsqueeze(-1).flatten(1).view(_WORD_DTYPES[self._word_bytes])


def _encode(arguments: Arguments) -> None:
    arguments["block_pairs"] = _as_tensor(arguments["block_pairs"])


@operation(mutates=("caches",), arguments={"block_pairs": "Tensor block_pairs"}, encode=_encode)
def copy_blocks(caches: Sequence[torch.Tensor], block_pairs: torch.Tensor | Sequence[tuple[int, int]]) -> Run[None]:
    """Copy block source over block destination in every cache, bit by bit, for every pair.

    Args:
        caches: tensors [num_blocks, ...] of one shape, dtype, device and strides, contiguous within a block.
        block_pairs: (source, destination) block ids, int64 [num_pairs, 2] or a sequence of pairs. No destination is a
            source or appears twice, so the order of pairs does not matter. Pairs on the host are checked. Pairs on a
            device are trusted, because reading them would wait; PAGED_CHECK=1 checks their range.

    Raises:
        InvalidInputError: caches differ or are strided within a block; pairs are malformed, out of range or clash.
        UnsupportedError: a CUDA graph is being captured; create a `BlockCopy` before, and capture its call.
    """
    if not isinstance(caches, list | tuple):
        raise InvalidInputError(f"caches: {shown(caches)}, expected a sequence of tensors")
    if caches:
        _check_caches(caches)
    return _copy


def _copy(caches: Sequence[torch.Tensor], block_pairs: torch.Tensor | Sequence[tuple[int, int]]) -> None:
    pairs = _as_tensor(block_pairs)  # an iterator can be read only once
    if not caches:
        return
    first = caches[0]
    check_tensor("block_pairs", pairs, ("num_pairs", 2), (torch.int64,))
    if pairs.device.type != "cpu":
        check_device("block_pairs", pairs, first.device)
    if pairs.device.type == "cpu" or not use_triton(first):
        pairs = pairs.cpu()
        _check_pairs(pairs.tolist(), first.shape[0])
        pairs = _send(pairs, first.device)
    else:
        check_all_ids("copy_blocks", Ids("block_pairs", pairs, 0, len(first) - 1), by_triton=True)
    BlockCopy(caches, caches)(pairs)


def _send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to `device` without waiting. PyTorch keeps the pinned memory until the copy has ended."""
    if device.type != "cuda":
        return host
    if torch.cuda.is_current_stream_capturing():  # a replay would copy pinned memory that has other contents by then
        raise UnsupportedError(
            "copy_blocks in the capture of a CUDA graph: make a BlockCopy before it, and capture that"
        )
    return host.pin_memory().to(device, non_blocking=True)


def _as_tensor(pairs: torch.Tensor | Sequence[tuple[int, int]]) -> torch.Tensor:
    if isinstance(pairs, torch.Tensor):
        return pairs
    try:
        listed = [(source, destination) for source, destination in pairs]
    except Exception:  # the argument may be any object
        raise InvalidInputError(f"block_pairs: {shown(pairs)}, expected (source, destination) block ids") from None
    ids = [
        as_int(f"block_pairs[{at // 2}]", block_id, -(2**63), 2**63 - 1) for at, block_id in enumerate(chain(*listed))
    ]
    return torch.tensor(ids, dtype=torch.int64).view(-1, 2)


def _check_caches(caches: Sequence[torch.Tensor]) -> None:
    first = caches[0]
    check_is_tensor("caches[0]", first)
    if first.dim() == 0:
        raise InvalidInputError("caches[0]: a scalar, expected [num_blocks, ...]")
    for index, cache in enumerate(caches):
        check_tensor(f"caches[{index}]", cache, first.shape, (first.dtype,), first.device)
        if cache.stride() != first.stride():
            raise InvalidInputError(f"caches[{index}]: strides {cache.stride()}, expected {first.stride()}")
        check_writable(f"caches[{index}]", cache)
    if not first[:1].squeeze(0).is_contiguous():
        raise InvalidInputError(f"caches: strides {first.stride()}, expected every block contiguous")


def _check_pairs(pairs: list[list[int]], num_blocks: int) -> None:
    sources = {source for source, _ in pairs}
    written: set[int] = set()
    for index, (source, destination) in enumerate(pairs):
        for block in (source, destination):
            if not 0 <= block < num_blocks:
                raise InvalidInputError(f"block_pairs[{index}]: block {block}, expected 0 to {num_blocks - 1}")
        if destination in sources:
            raise InvalidInputError(f"block_pairs[{index}]: destination {destination} is a source too")
        if destination in written:
            raise InvalidInputError(f"block_pairs[{index}]: destination {destination} appears twice")
        written.add(destination)
