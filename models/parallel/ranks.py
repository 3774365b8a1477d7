"""The processes that run one model together, and their collectives."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paged.errors import InvalidInputError, RankFailedError
from paged.kernels.common.scalars import as_bool, as_float, as_int
from paged.models.parallel.share import Share

# Ranks may take this much longer than others to load a model.
_LOADING = timedelta(hours=1)
# More ranks than any model has heads; a gloo group connects each with each.
_MAX_RANKS = 1024
_LEAST_SECONDS, _MOST_SECONDS = 0.1, 86_400.0


@dataclass(frozen=True)
class ParallelConfig:
    """How to spread one model over several processes; each holds a part of every layer and calls `from_pretrained`.

    Attributes:
        tensor_parallel_size: number of processes, 1 to 1024.
        expert_parallel: whether each process holds whole experts instead of a part of each.
        mesh: torch DeviceMesh of the processes, with one dimension or one named "tp". None for the default process
            group, which is made from torchrun's environment if there is none.
        timeout_s: seconds, 0.1 to 86,400, after which a process that does not answer counts as failed.
        check_steps: number of steps after which processes compare the messages they had and their results.

    Raises:
        InvalidInputError: a value has another type or is out of range.
    """

    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    mesh: Any = None
    timeout_s: float = 60.0
    check_steps: int = 256

    def __post_init__(self) -> None:
        as_int("tensor_parallel_size", self.tensor_parallel_size, 1, _MAX_RANKS)
        as_bool("expert_parallel", self.expert_parallel)
        as_int("check_steps", self.check_steps, 1)
        as_float("timeout_s", self.timeout_s, _LEAST_SECONDS, _MOST_SECONDS)


class Ranks:
    """This process among those that share a model; by default it is alone and sends nothing.

    Attributes:
        rank, size: number of this process and of all; rank 0 drives.
        num_bytes: bytes of the tensors that this process gave to collectives so far, by kind. A CUDA graph counts only
            when it is captured.

    Raises, in every method that sends or waits:
        RankFailedError: another process has ended or did not answer in time. Every later call, and every call after
            `close`, then raises it too, on all ranks.
    """

    def __init__(self, share: Share | None = None, *, config: ParallelConfig | None = None) -> None:
        self.share = share or Share()
        self.rank, self.size = self.share.rank, self.share.size
        self.config = config or ParallelConfig()
        self.num_bytes: Counter[str] = Counter()
        self._data: dist.ProcessGroup | None = None
        self._control: dist.ProcessGroup | None = None
        self._owns_default = False
        self._first = 0
        self._failure: str | None = None

    @classmethod
    def join(cls, config: ParallelConfig, device: torch.device) -> Ranks:
        """Connect to the other processes, of the default process group or the mesh.

        Raises:
            InvalidInputError: the number of processes is not tensor_parallel_size.
        """
        size = config.tensor_parallel_size
        if size == 1 and config.mesh is None:
            return cls(config=config)
        owns_default = not dist.is_initialized()
        if owns_default:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_LOADING)
        group = dist.group.WORLD if config.mesh is None else _group_of(config.mesh)
        assert group is not None
        members = dist.get_process_group_ranks(group)
        if len(members) != size:
            raise InvalidInputError(f"tensor_parallel_size: {size}, but there are {len(members)} processes")
        share = Share(members.index(dist.get_rank()), size, config.expert_parallel)
        ranks = cls(share, config=config)
        ranks._owns_default, ranks._first = owns_default, members[0]
        timeout = timedelta(seconds=config.timeout_s)
        options: dict[str, Any] = {"timeout": timeout, "use_local_synchronization": True}
        with ranks._guarded():
            ranks._data = dist.new_group(members, backend=dist.get_backend(group), **options)
            ranks._control = dist.new_group(members, backend="gloo", **options)
        return ranks

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x, in place."""
        if self.size > 1:
            with self._counted("sum", x):
                dist.all_reduce(x, group=self._data)
        return x

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of all ranks' x, in place."""
        return self.sum(x).div_(self.size)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return on rank 0 all ranks' rows [n, m] side by side, [n, size * m]; on others x."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        with self._counted("gather", x):
            dist.gather(x, parts, dst=self._first, group=self._data)
        return x if parts is None else torch.cat(parts, dim=-1)

    def gather_everywhere(self, x: torch.Tensor) -> torch.Tensor:
        """Return on every rank all ranks' rows [n, m] side by side, [n, size * m]."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._counted("gather_everywhere", x):
            dist.all_gather(parts, x.contiguous(), group=self._data)
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x on every rank by rank 0's, on the host."""
        with self._counted("broadcast", x):
            dist.broadcast(x, self._first, group=self._control)
        return x

    def broadcast_on_device(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x on every rank by rank 0's, on the device."""
        with self._counted("broadcast", x):
            dist.broadcast(x, self._first, group=self._data)
        return x

    def compare(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's values, int64 on the host."""
        if self.size == 1:
            return [values]
        found = [torch.empty_like(values) for _ in range(self.size)]
        with self._guarded():
            dist.all_gather(found, values, group=self._control)
        return found

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers."""
        return int(torch.stack(self.compare(torch.tensor([number]))).min())

    def see_that_same(self, options: str) -> None:
        """Check that all processes were given the same options.

        Raises:
            InvalidInputError: they were not.
        """
        sums = self.compare(torch.tensor([zlib.crc32(options.encode())]))
        others = [rank for rank, found in enumerate(sums) if not found.equal(sums[self.rank])]
        if others:
            raise InvalidInputError(f"options: ranks {others} were given others than {options}")

    def wait_for_all(self) -> None:
        """Wait until every rank calls this; one may be much later than others."""
        if self.size > 1:
            with self._guarded():
                dist.monitored_barrier(self._control, timeout=_LOADING)

    def fail(self, reason: str) -> None:
        """Leave the group, so that the others' calls fail, too."""
        if self._failure is None:
            self._failure = reason
            self._leave()

    def close(self) -> None:
        """Leave the group; the others' calls then fail."""
        self.fail("it has been shut down")

    def _leave(self) -> None:
        groups = [self._data, self._control, *([dist.group.WORLD] if self._owns_default else [])]
        self._data = self._control = None
        for group in groups:
            if group is not None:
                with suppress(RuntimeError, ValueError, AssertionError):  # the caller may have destroyed it
                    dist.destroy_process_group(group)

    @contextmanager
    def _counted(self, kind: str, x: torch.Tensor) -> Iterator[None]:
        with self._guarded():
            yield
        self.num_bytes[kind] += x.nbytes

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        if self._failure is not None:
            raise RankFailedError(f"rank {self.rank} of {self.size} cannot go on: {self._failure}")
        try:
            yield
        except RuntimeError as error:  # all that torch.distributed raises
            self.fail(f"another rank has ended, or did not answer in {self.config.timeout_s:g} s ({error})")
            raise RankFailedError(f"rank {self.rank} of {self.size} cannot go on: {self._failure}") from error


def _group_of(mesh: Any) -> dist.ProcessGroup:
    if not isinstance(mesh, dist.device_mesh.DeviceMesh):
        raise InvalidInputError(f"mesh: {type(mesh).__name__}, expected a torch DeviceMesh")
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and "tp" not in names:
        raise InvalidInputError(f"mesh: dimensions {names or mesh.ndim}, expected one, or one that is named 'tp'")
    return mesh.get_group("tp" if mesh.ndim > 1 else None)
