"""A step of rank 0 as the other ranks run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged.forward_step import ForwardStep
from paged.metadata import HostMetadata


class StepMessage(NamedTuple):
    """A step, the slot of each row's adapter, None for none, and whether its best tokens are wanted, not its logits.

    knows_ids: whether its token ids are those that are to run; else the device alone knows them.
    """

    step: ForwardStep
    row_slots: NDArray[np.int32] | None
    is_greedy: bool
    knows_ids: bool

    def arrays(self) -> list[NDArray[Any]]:
        """It as arrays."""
        step, host, slots = self.step, self.step.host, self.row_slots
        flags = host.max_seqlen_q, host.max_seqlen_k, self.is_greedy, self.knows_ids, slots is not None
        rows = np.empty(0, np.int32) if slots is None else slots
        return [np.array(flags, np.int64), step.token_ids, step.row_ids, rows, *host.arrays]

    @classmethod
    def read(cls, arrays: Sequence[NDArray[Any]], device: torch.device) -> StepMessage:
        """What `arrays` returned on rank 0; the step has no sequences of this rank's cache."""
        flags, token_ids, row_ids, row_slots, positions, slots, seq_lens, cu_seqlens_q, tables = arrays
        max_seqlen_q, max_seqlen_k, is_greedy, knows_ids, is_adapted = flags.tolist()
        metadata = HostMetadata(positions, slots, seq_lens, cu_seqlens_q, tables, max_seqlen_q, max_seqlen_k)
        step = ForwardStep(token_ids, metadata, row_ids, (), device)
        return cls(step, row_slots if is_adapted else None, bool(is_greedy), bool(knows_ids))
