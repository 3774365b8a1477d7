"""The processes that run one model together, and their collectives."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from paged.errors import InvalidInputError, RankFailedError
from paged.kernels.core.errors import as_bool, as_float, as_int, shown
from paged.models.parallel.meeting import Meeting, meet
from paged.models.parallel.share import Share

# Longest interval between two checks of the other ranks' progress.
_BEAT_S = 0.05
# Values of a rank's progress, which otherwise counts ticks, after it has finished or failed.
_DONE, _FAILED = -1, -2
# Limit of the number of ranks, above any model's number of heads. A limit is needed because gloo connects every pair.
_MAX_RANKS = 1024
_LEAST_SECONDS, _MOST_SECONDS = 0.1, 86_400.0


@dataclass(frozen=True)
class ParallelConfig:
    """How to spread one model over several processes; each holds a part of every layer and calls `from_pretrained`.

    Attributes:
        tensor_parallel_size: number of processes, 1 to 1024.
        expert_parallel: whether each process holds whole experts, not a part of each.
        mesh: torch DeviceMesh of the processes, with one dimension or one named "tp". None for the default process
            group or, without one, for the processes of torchrun's environment.
        timeout_s: seconds, 0.1 to 86,400, after which a process counts as failed if it does not join or answer, or
            makes no progress in loading.
        check_steps: number of steps between two comparisons of the processes' messages and results.

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
    """The processes that share a model, as this process sees them; by default one process, which sends nothing.

    Attributes:
        rank, size: number of this process and of all processes; rank 0 drives.
        num_bytes: bytes of the tensors that this process has given to collectives, by kind. A CUDA graph counts only
            when it is captured.

    Raises, in every method that sends or waits:
        RankFailedError: another process has ended or did not answer in time. Later calls, and all calls after `close`,
            raise it on all ranks.
    """

    def __init__(self, share: Share | None = None, *, config: ParallelConfig | None = None) -> None:
        self.share = share or Share()
        self.rank, self.size = self.share.rank, self.share.size
        self.config = config or ParallelConfig()
        self.num_bytes: Counter[str] = Counter()
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._meeting: Meeting | None = None
        self._progress = 0
        self._failure: str | None = None

    @classmethod
    def join(cls, config: ParallelConfig) -> Ranks:
        """Meet the other processes, see `meet`. They can then compare values and `connect`.

        Raises:
            InvalidInputError: the number of processes is not tensor_parallel_size, or the processes are unknown.
            RankFailedError: another process did not join in time.
        """
        size = config.tensor_parallel_size
        if size == 1 and config.mesh is None:
            return cls(config=config)
        meeting = meet(config.mesh, timedelta(seconds=config.timeout_s))
        if meeting.size != size:
            raise InvalidInputError(f"tensor_parallel_size: {size}, but there are {meeting.size} processes")
        ranks = cls(Share(meeting.rank, size, config.expert_parallel), config=config)
        ranks._meeting = meeting
        ranks._connect("control", torch.device("cpu"))
        return ranks

    def connect(self, device: torch.device) -> None:
        """Connect all processes for tensors of this device."""
        self._connect("data", device)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x, in place."""
        if self.size > 1:
            with self._sending("sum", x) as group:
                group.allreduce([x]).wait()
        return x

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of all ranks' x, in place."""
        return self.sum(x).div_(self.size)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return on rank 0 all ranks' rows [n, m] side by side, [n, size * m]; on other ranks return x."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts: list[torch.Tensor] = []
        if self.rank == 0:
            parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._sending("gather", x) as group:
            group.gather(parts, x, 0).wait()
        if self.rank == 0:
            return torch.cat(parts, dim=-1)
        return x

    def gather_everywhere(self, x: torch.Tensor) -> torch.Tensor:
        """Return on every rank all ranks' rows [n, m] side by side, [n, size * m]."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._sending("gather_everywhere", x) as group:
            group.allgather(parts, x.contiguous()).wait()
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: torch.Tensor, *, on_device: bool = False) -> torch.Tensor:
        """Overwrite x on every rank with rank 0's, on the host or on the device."""
        name = "control"
        if on_device:
            name = "data"
        with self._sending("broadcast", x, name) as group:
            group.broadcast(x, 0).wait()
        return x

    def compare(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's values, int64 on the host."""
        if self.size == 1:
            return [values]
        of_ranks = [torch.empty_like(values) for _ in range(self.size)]
        with self._guarded("control") as group:
            group.allgather(of_ranks, values).wait()
        return of_ranks

    def least(self, number: int) -> int:
        """Return the smallest of all ranks' numbers."""
        return int(torch.stack(self.compare(torch.tensor([number]))).min())

    def see_that_same(self, parts: Mapping[str, object]) -> None:
        """Check that all processes have equal parts: name -> value, compared as text.

        Raises:
            InvalidInputError: the parts differ; the message names the first difference.
        """
        names, texts = list(parts), list(map(str, parts.values()))
        # Compare names first: ranks with equal names have equally many texts.
        for compared, labels in (([repr(names)], ["names of settings and tensors"]), (texts, names)):
            checksums = [zlib.crc32(text.encode()) for text in compared]
            sums = torch.stack(self.compare(torch.tensor(checksums)))
            differs = sums != sums[self.rank]
            if differs.any():
                ranks, first = differs.any(1).nonzero().flatten().tolist(), int(differs.any(0).nonzero()[0])
                raise InvalidInputError(
                    f"{labels[first]}: ranks {ranks} have other values than {shown(compared[first])}"
                )

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run work that each rank does on its own, such as loading; wait for all ranks at the end.

        The work must not send anything. It may take any time if no rank spends `timeout_s` between two calls of `tick`.

        Raises:
            RankFailedError: another rank has failed, ended or stalled; `tick` raises it too.
        """
        if self.size == 1:
            yield
            return
        self._progress = 0
        watch = Thread(target=self._watch, name="paged-ranks-apart", daemon=True)
        watch.start()
        try:
            yield
            self._progress = _DONE
        except BaseException:
            self._progress = _FAILED
            raise
        finally:
            watch.join()
        self._check()

    def tick(self) -> None:
        """Tell the others that this rank makes progress in `apart`."""
        self._progress += 1
        self._check()

    def _watch(self) -> None:
        """Compare the progress of all ranks repeatedly until all are done or one has failed."""
        counts, moved, pause = [0] * self.size, [monotonic()] * self.size, _BEAT_S / 64
        with suppress(RankFailedError):
            while counts.count(_DONE) < self.size:
                pause = min(2 * pause, _BEAT_S)
                sleep(pause)
                before, counts = counts, torch.cat(self.compare(torch.tensor([self._progress]))).tolist()
                now = monotonic()
                failed: list[int] = []
                idle: list[int] = []
                for rank, count in enumerate(counts):
                    if count == _DONE or count != before[rank]:
                        moved[rank] = now
                    if count == _FAILED:
                        failed.append(rank)
                    if now - moved[rank] > self.config.timeout_s:
                        idle.append(rank)
                if failed and self.rank not in failed:
                    self.fail(f"ranks {failed} failed; see their own errors")
                elif idle:
                    self.fail(f"ranks {idle} made no progress in {self.config.timeout_s:g} s")
                if failed or idle:
                    return

    def fail(self, reason: str) -> None:
        """Leave the group, so that the other ranks' calls fail too."""
        if self._failure is None:
            self._failure = reason
            groups, self._groups = self._groups, {}
            for group in groups.values():
                with suppress(RuntimeError):
                    group.shutdown()

    def close(self) -> None:
        """Leave the group; the other ranks' calls then fail."""
        self.fail("it has been shut down")

    def _check(self) -> None:
        if self._failure is not None:
            raise RankFailedError(f"rank {self.rank} of {self.size} cannot go on: {self._failure}")

    @contextmanager
    def _sending(self, kind: str, x: torch.Tensor, name: str = "data") -> Iterator[dist.ProcessGroup]:
        with self._guarded(name) as group:
            yield group
        self.num_bytes[kind] += x.nbytes

    def _connect(self, name: str, device: torch.device) -> None:
        if self._meeting is not None:
            with self._errors():
                self._groups[name] = self._meeting.group(name, device, timedelta(seconds=self.config.timeout_s))

    @contextmanager
    def _guarded(self, name: str) -> Iterator[dist.ProcessGroup]:
        group = self._groups.get(name)
        self._check()
        assert group is not None
        with self._errors():
            yield group

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the only type that torch.distributed raises
            self.fail(f"another rank has ended, or did not answer in {self.config.timeout_s:g} s ({error})")
            raise RankFailedError(f"rank {self.rank} of {self.size} cannot go on: {self._failure}") from error
