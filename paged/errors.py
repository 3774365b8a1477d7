"""Errors of this package, derived from `PagedError`. A call that raises one of them is rolled back."""

from paged.kernels.core.errors import InvalidInputError as InvalidInputError
from paged.kernels.core.errors import PagedError as PagedError
from paged.kernels.core.errors import UnsupportedError as UnsupportedError


class OutOfBlocksError(PagedError):
    """The block pool has too few free blocks for a call.

    Attributes:
        needed: blocks that the call needs besides the blocks of its sequences.
        free: blocks that could be handed out at that moment.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"needs {needed} more KV cache blocks, {free} are free")
        self.needed = needed
        self.free = free


class PinBudgetError(OutOfBlocksError):
    """A pin would keep more blocks, or more states of recurrent layers, than `max_pinned_fraction` allows.

    Attributes:
        needed: blocks or states of all pins together, the new one included.
        free: most blocks or states that pins may keep.
    """

    def __init__(self, needed: int, free: int) -> None:
        PagedError.__init__(self, f"pins would keep {needed} blocks or states, max_pinned_fraction allows {free}")
        self.needed = needed
        self.free = free


class OutOfStateSlotsError(OutOfBlocksError):
    """The cache has too few free slots for states of recurrent layers, or for rows of open pools, for a call.

    Attributes:
        needed: slots that the call needs besides the slots of its sequences.
        free: slots that could be handed out at that moment.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)
        self.args = (f"needs {needed} more slots for states or rows of sequences, {free} are free",)


class CanaryError(PagedError):
    """A slot of the cache holds another token than its sequence has there; only with PAGED_CANARY=1.

    The message names the sequence, the position, the block, the offset in it, and what was found.
    """


class RankFailedError(PagedError):
    """A rank of a model distributed over processes has ended or does not answer; no rank can continue."""


class SequenceTooLongError(PagedError):
    """A sequence would exceed the maximum length of the cache or the model."""


class ModelAsleepError(PagedError):
    """A call needs a model whose weights and cache are not on the device; see `LlmExecutor.sleep`."""


class CheckpointError(PagedError):
    """A checkpoint is incomplete, malformed or unsafe; the message names the tensor and the file."""


class StaleHandleError(PagedError):
    """A call used the handle of a sequence that has been freed or is swapped out."""
