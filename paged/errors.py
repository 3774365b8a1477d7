"""The error family: what was given, what was expected, and everything left as it was."""

from paged.kernels.common.errors import InvalidInputError as InvalidInputError
from paged.kernels.common.errors import PagedError as PagedError
from paged.kernels.common.errors import UnsupportedError as UnsupportedError


class OutOfBlocksError(PagedError):
    """The pool cannot supply the blocks a call needs.

    Attributes:
        needed: blocks the whole call needs beyond those its sequences hold.
        free: blocks that could be handed out when it was made.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"needs {needed} more KV cache blocks, {free} are free")
        self.needed = needed
        self.free = free


class RankFailedError(PagedError):
    """Of the processes that run a model together one has ended or does not answer; none of them can go on."""


class SequenceTooLongError(PagedError):
    """A sequence would grow beyond the longest length the cache or the model allows."""


class CheckpointError(PagedError):
    """A checkpoint is incomplete, malformed or unsafe; the message names the tensor and the file."""


class StaleHandleError(PagedError):
    """A handle was used after its sequence had been freed."""
