"""Prompt embeddings, for example of images: rows in place of token embeddings, their hashes and positions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged.cache.token_chain import content_id
from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.core.errors import as_int, shown
from paged.token_ids import as_token_ids

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_DIGEST_BYTES = 16


class EmbedsLimits(NamedTuple):
    """Limits of a model for `PromptEmbeds`.

    Attributes:
        hidden_size: size of a row.
        num_layers: maximum number of layers in `deepstack`.
        max_positions: one more than the largest rotary position.
        takes_rope_positions: whether the model's rotation has several axes.
        longest_span: longest span with bidirectional attention, limited by the sliding window; None for no limit.
    """

    hidden_size: int
    num_layers: int
    max_positions: int
    takes_rope_positions: bool
    longest_span: int | None


@dataclass(frozen=True, eq=False)
class PromptEmbeds:
    """Rows in place of the token embeddings at some positions of a prompt; the token ids there are placeholders.

    The prefix cache compares the content of the rows, not the placeholders: sequences share K/V if token ids and rows
    are equal. The rows are copied.

    Attributes:
        positions: [n], ascending positions in the prompt.
        rows: [n, hidden_size], float32, float16 or bfloat16, finite: inputs of the first layer in place of (scaled)
            token embeddings.
        deepstack: [m, n, hidden_size], added to the hidden states at `positions` after each of the first m layers
            (Qwen3-VL, 2025); None for none.
        rope_positions: int64 [3, prompt length], the temporal, vertical and horizontal position of every prompt token,
            see `mrope_positions`; None for the position in the sequence. Tokens after the prompt count on from the
            largest position.
        spans: (begin, end) of positions with bidirectional attention, ascending; every position has a row. A prefill
            chunk never cuts a span.

        Raises:
            InvalidInputError: a shape, dtype or value differs from the above.
    """

    positions: Sequence[int]
    rows: torch.Tensor
    deepstack: torch.Tensor | None = None
    rope_positions: torch.Tensor | None = None
    spans: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        positions = as_token_ids("positions", self.positions)
        previous = -1
        for position in positions:
            if position <= previous:
                raise InvalidInputError(f"positions: {shown(positions)}, expected ascending integers from 0 on")
            previous = position
        count = len(positions)
        object.__setattr__(self, "positions", tuple(positions))
        object.__setattr__(self, "rows", _checked("rows", self.rows, (count, None)))
        if self.deepstack is not None:
            deepstack = _checked("deepstack", self.deepstack, (None, count, self.rows.shape[1]))
            object.__setattr__(self, "deepstack", deepstack)
        if self.rope_positions is not None:
            object.__setattr__(self, "rope_positions", self._checked_rope(self.rope_positions))
        spans: list[tuple[int, int]] = []
        for begin, end in self.spans:
            spans.append((as_int("spans", begin), as_int("spans", end)))
        object.__setattr__(self, "spans", tuple(spans))
        have_rows, last = set(positions), 0
        for begin, end in spans:
            if not last <= begin < end or not have_rows.issuperset(range(begin, end)):
                raise InvalidInputError(f"spans: {begin, end}, expected ascending ranges of positions with rows")
            last = end

    def _checked_rope(self, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.shape[0] != 3 or value.is_floating_point():
            raise InvalidInputError(f"rope_positions: {_shape(value)}, expected int64 [3, prompt length]")
        rope = value.detach().to("cpu", torch.int64, copy=True)
        length = rope.shape[1]
        if not length or int(rope.min()) < 0 or int(rope.max()) >= length:
            low = high = 0
            if length:
                low, high = int(rope.min()), int(rope.max())
            raise InvalidInputError(f"rope_positions: {low} to {high}, expected 0 to {length - 1}, below the length")
        return rope

    @property
    def delta(self) -> int:
        """Rotary position minus sequence position of tokens after the prompt, at most 0."""
        return 0 if self.rope_positions is None else int(self.rope_positions.max()) + 1 - self.rope_positions.shape[1]

    def check(self, num_tokens: int, limits: EmbedsLimits | None) -> None:
        """Check that a model with `limits` can run these rows in a prompt of `num_tokens`.

        Raises:
            InvalidInputError: a size does not fit.
            UnsupportedError: the model does not support rows, rotary positions of several axes, or spans of this
                length.
        """
        if limits is None:
            raise UnsupportedError("prompt_embeds: this executor or model takes token ids only")
        if self.rows.shape[1] != limits.hidden_size:
            raise InvalidInputError(f"rows: {_shape(self.rows)}, expected [n, {limits.hidden_size}], the hidden size")
        if self.positions and self.positions[-1] >= num_tokens:
            raise InvalidInputError(f"positions: {self.positions[-1]}, expected less than {num_tokens}, the prompt")
        if self.deepstack is not None and len(self.deepstack) > limits.num_layers:
            raise InvalidInputError(f"deepstack: for {len(self.deepstack)} layers, the model has {limits.num_layers}")
        if self.rope_positions is not None:
            if not limits.takes_rope_positions:
                raise UnsupportedError("rope_positions: this model's rotation has one axis, expected None")
            if self.rope_positions.shape[1] != num_tokens:
                expected = f"[3, {num_tokens}], for the prompt"
                raise InvalidInputError(f"rope_positions: {_shape(self.rope_positions)}, expected {expected}")
            if num_tokens > limits.max_positions:
                expected = f"for at most {limits.max_positions} tokens"
                raise InvalidInputError(f"rope_positions: {_shape(self.rope_positions)}, expected {expected}")
        if limits.longest_span is not None and self.longest_span > limits.longest_span:
            expected = f"at most {limits.longest_span}, the model's sliding window"
            raise UnsupportedError(f"spans: one of {self.longest_span} tokens, expected {expected}")

    @property
    def longest_span(self) -> int:
        """Length of the longest span, 0 without spans."""
        return max((end - begin for begin, end in self.spans), default=0)

    def whole_spans(self, start: int, end: int) -> int:
        """Return the end of a chunk from `start` that cuts no span: the last one up to `end`, else the next one."""
        for first, last in self.spans:
            if first < end < last:
                if first > start:
                    return first
                return last
        return end

    def ids(self, token_ids: Sequence[int], start: int) -> Sequence[int]:
        """Return the ids that the prefix index uses for the tokens from position `start` on.

        A row's id is its `content_id`. A token whose rotary position is not the next one also has a `content_id`, made
        of its token id and rotary position. Therefore equal ids mean equal K/V.
        """
        first = bisect_left(self._marked, start)
        last = bisect_left(self._marked, start + len(token_ids))
        if first == last:
            return token_ids
        ids = list(token_ids)
        for position in self._marked[first:last]:
            digest = self._digests.get(position)
            if digest is None:
                digest = _digest(b"token", ids[position - start].to_bytes(8, "little"), self._rope_bytes(position))
            ids[position - start] = content_id(digest)
        return ids

    @cached_property
    def _irregular(self) -> NDArray[np.bool_]:
        """Mask of the tokens whose rotary position is not one more than the largest position before."""
        if self.rope_positions is None:
            return np.zeros(0, bool)
        rope = self.rope_positions.numpy()
        follow = np.concatenate([[0], np.maximum.accumulate(rope.max(0))[:-1] + 1])
        return np.asarray((rope != follow).any(0))

    @cached_property
    def _marked(self) -> list[int]:
        return sorted({*self.positions, *np.flatnonzero(self._irregular).tolist()})

    @cached_property
    def _digests(self) -> dict[int, bytes]:
        """Hash of the content at each position with a row. Within a span, the hash covers all rows of the span."""
        parts = [self.rows.cpu().view(torch.uint8).numpy()]
        if self.deepstack is not None:
            parts.append(self.deepstack.cpu().transpose(0, 1).flatten(1).view(torch.uint8).numpy())
        dtype = str(self.rows.dtype).encode()
        digests = {}
        for row, position in enumerate(self.positions):
            contents = [part[row].tobytes() for part in parts]
            digests[position] = _digest(dtype, *contents, self._rope_bytes(position))
        for begin, end in self.spans:  # with bidirectional attention, K/V also depend on later rows
            of_rows = [digests[position] for position in range(begin, end)]
            span_digest = _digest(b"span", *of_rows)
            for position in range(begin, end):
                digests[position] = _digest(span_digest, (position - begin).to_bytes(8, "little"))
        return digests

    def _rope_bytes(self, position: int) -> bytes:
        if self.rope_positions is None or not self._irregular[position]:
            return b""
        return self.rope_positions[:, position].numpy().tobytes()


def mrope_positions(
    num_tokens: int, positions: Sequence[int], image_grid_thw: Sequence[Sequence[int]], *, merge_size: int = 2
) -> torch.Tensor:
    """Return the rotary positions of a prompt with images, int64 [3, num_tokens], as in Qwen2-VL.

    A text token has the same position on all axes. An image token has the next position after the text before the
    image, plus its place in the grid. The token after an image has the largest position before it plus one (Wang et
    al., 2024, section 2.1).

    Args:
        num_tokens: length of the prompt.
        positions: positions of the image tokens, ascending.
        image_grid_thw: frames, rows and columns of patches of each image, in order.
        merge_size: number of patch rows, and of patch columns, that become one token.

    Raises:
        InvalidInputError: the number of grid tokens differs from the number of `positions`, or the tokens of an image
            are not consecutive.
    """
    grids = []
    expected = 0
    for t, height, width in image_grid_thw:
        num_frames = as_int("t", t, low=1)
        rows = as_int("grid", height, low=1) // merge_size
        columns = as_int("grid", width, low=1) // merge_size
        grids.append((num_frames, rows, columns))
        expected += num_frames * rows * columns
    if len(positions) != expected:
        raise InvalidInputError(f"image_grid_thw: {expected} tokens, expected {len(positions)}, as in positions")
    rope = torch.empty(3, num_tokens, dtype=torch.int64)
    end, following, used = 0, 0, 0
    for t, rows, columns in grids:
        count = t * rows * columns
        begin = positions[used]
        if positions[used + count - 1] != begin + count - 1 or begin + count > num_tokens:
            raise InvalidInputError(f"positions: from {begin}, expected {count} consecutive ones for an image")
        rope[:, end:begin] = torch.arange(following, following + begin - end)
        following += begin - end
        grid = torch.cartesian_prod(*map(torch.arange, (t, rows, columns)))
        rope[:, begin : begin + count] = following + grid.T
        following, end, used = following + max(t, rows, columns), begin + count, used + count
    rope[:, end:] = torch.arange(following, following + num_tokens - end)
    return rope


def _checked(name: str, value: Any, shape: tuple[int | None, ...]) -> torch.Tensor:
    """Check a tensor's shape, where None is any size, and return a contiguous copy."""
    fits = isinstance(value, torch.Tensor) and value.dim() == len(shape) and value.dtype in FLOAT_DTYPES
    if fits:
        fits = all(expected in (None, size) for size, expected in zip(value.shape, shape, strict=True))
    if not fits:
        sizes = ", ".join(map(str, shape)).replace("None", "any")
        raise InvalidInputError(f"{name}: {_shape(value)}, expected [{sizes}] of a float dtype")
    copy: torch.Tensor = value.detach().clone(memory_format=torch.contiguous_format)
    if not copy.isfinite().all():
        raise InvalidInputError(f"{name}: holds NaN or infinity, expected finite values")
    return copy


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return shown(value)
    return f"{value.dtype} {list(value.shape)}"


def _digest(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
