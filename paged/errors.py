"""Errors of this package, all derived from `PagedError`. A call that raises one is rolled back."""

from paged.kernels.common.errors import InvalidInputError as InvalidInputError
from paged.kernels.common.errors import PagedError as PagedError
from paged.kernels.common.errors import UnsupportedError as UnsupportedError


class OutOfBlocksError(PagedError):
    """The block pool has too few free blocks for a call.

    Attributes:
        needed: blocks that the call needs in addition to those of its sequences.
        free: blocks that could be handed out at that moment.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"needs {needed} more KV cache blocks, {free} are free")
        self.needed = needed
        self.free = free


class OutOfStateSlotsError(OutOfBlocksError):
    """A cache of a model with recurrent layers has too few free state slots for a call.

    Attributes:
        needed: slots that the call needs in addition to those of its sequences.
        free: slots that could be handed out at that moment.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)
        self.args = (f"needs {needed} more state slots for recurrent layers, {free} are free",)


class RankFailedError(PagedError):
    """A rank of a model that several processes share has ended or does not answer; no rank can go on."""


class SequenceTooLongError(PagedError):
    """A sequence would exceed the maximum length of the cache or the model."""


class ModelAsleepError(PagedError):
    """A forward needed a model whose weights and cache are not on the device; see `LlmExecutor.sleep`."""


class CheckpointError(PagedError):
    """A checkpoint is incomplete, malformed or unsafe; the message names the tensor and the file."""


class StaleHandleError(PagedError):
    """A handle was used whose sequence has been freed or is swapped out."""
