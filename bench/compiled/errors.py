"""What ends a run on compiled code."""

from paged.errors import PagedError


class NotModelledError(PagedError):
    """The compiled code uses something that this executor does not model."""


class StoppedError(PagedError):
    """A launch cannot go on. kind: such as "deadlock"."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
