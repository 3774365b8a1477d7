"""A step of rank 0 as the other ranks run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged.forward_step import ForwardStep
from paged.metadata import HostMetadata
from paged.models.logits_policy import Draws


class StepMessage(NamedTuple):
    """A step, the slot of each row's adapter, None for none, and what to draw from its logits, None for the logits.

    knows_ids: whether its token ids are those that are to run; else the device alone knows them.
    """

    step: ForwardStep
    row_slots: NDArray[np.int32] | None
    draws: Draws | None
    knows_ids: bool

    def arrays(self) -> list[NDArray[Any]]:
        """It as arrays."""
        step, host, slots = self.step, self.step.host, self.row_slots
        flags = host.max_seqlen_q, host.max_seqlen_k, self.knows_ids, slots is not None, self.draws is not None
        rows = np.empty(0, np.int32) if slots is None else slots
        draws = self.draws or Draws.of([])
        return [np.array(flags, np.int64), step.token_ids, step.row_ids, rows, *draws, *host.arrays]

    @classmethod
    def read(cls, arrays: Sequence[NDArray[Any]], device: torch.device) -> StepMessage:
        """What `arrays` returned on rank 0; the step has no sequences of this rank's cache."""
        flags, token_ids, row_ids, row_slots, *rest = arrays
        num_draws = len(Draws._fields)
        draws, (positions, slots, seq_lens, cu_seqlens_q, tables) = Draws(*rest[:num_draws]), rest[num_draws:]
        max_seqlen_q, max_seqlen_k, knows_ids, is_adapted, is_drawn = flags.tolist()
        metadata = HostMetadata(positions, slots, seq_lens, cu_seqlens_q, tables, max_seqlen_q, max_seqlen_k)
        step = ForwardStep(token_ids, metadata, row_ids, (), device)
        return cls(step, row_slots if is_adapted else None, draws if is_drawn else None, bool(knows_ids))
