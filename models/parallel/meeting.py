"""How the processes of a model find each other, and the groups that belong to that model alone."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from paged.errors import InvalidInputError, RankFailedError


class Meeting(NamedTuple):
    """One model's processes. rank: this one's place among them. store: only they write to it. has_gloo: the caller's
    group is one of gloo, which then carries the tensors of a GPU, too.
    """

    rank: int
    size: int
    store: Store
    has_gloo: bool

    def group(self, name: str, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
        """Connect all processes, with gloo or NCCL as the device needs.

        Raises:
            RuntimeError: one did not come in time.
        """
        store, kind = PrefixStore(name, self.store), dist.ProcessGroup.BackendType
        group = dist.ProcessGroup(store, self.rank, self.size)
        if device.type == "cpu" or self.has_gloo:
            group._set_default_backend(kind.GLOO)
            gloo = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)
            group._register_backend(device, kind.GLOO, gloo)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            group._set_default_backend(kind.NCCL)
            nccl = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            group._register_backend(device, kind.NCCL, nccl)
        return group


def meet(mesh: Any, timeout: timedelta) -> Meeting:
    """Find the other processes of the mesh, of the default process group, or of torchrun's environment.

    Every process counts the models it meets others for. A model's store is named after that number: addresses of an
    earlier model are still in the store that all share, and `torch.distributed.new_group` would find them.

    Raises:
        InvalidInputError: the mesh is of another kind, or nothing names the processes.
        RankFailedError: not all processes of the environment came in time.
    """
    if dist.is_initialized():
        group: Any = dist.group.WORLD if mesh is None else _group_of(mesh)
        members, place = dist.get_process_group_ranks(group), _get_default_store()
        rank, has_gloo = members.index(dist.get_rank()), dist.get_backend(group) == "gloo"
    else:
        try:
            place, rank, size = _environment(*map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT", "RANK")), timeout)
        except ValueError as error:
            raise InvalidInputError(
                f"tensor_parallel_size: there is neither a default process group nor torchrun's environment ({error})"
            ) from error
        except RuntimeError as error:
            raise RankFailedError(f"not all processes came in {timeout.total_seconds():g} s ({error})") from error
        members, has_gloo = list(range(size)), False
    name = f"paged/{','.join(map(str, members))}"
    number = place.add(f"{name}/{rank}", 1)
    return Meeting(rank, len(members), PrefixStore(f"{name}/{number}", place), has_gloo)


@cache
def _environment(*given: Any) -> tuple[Store, int, int]:
    """Keep the store: another process may meet this one for a second model before this one has left the first."""
    found: tuple[Store, int, int] = next(rendezvous("env://", timeout=given[-1]))
    return found


def _group_of(mesh: Any) -> dist.ProcessGroup:
    if not isinstance(mesh, dist.device_mesh.DeviceMesh):
        raise InvalidInputError(f"mesh: {type(mesh).__name__}, expected a torch DeviceMesh")
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and "tp" not in names:
        raise InvalidInputError(f"mesh: dimensions {names or mesh.ndim}, expected one, or one that is named 'tp'")
    return mesh.get_group("tp" if mesh.ndim > 1 else None)
