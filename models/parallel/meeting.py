"""Rendezvous of the processes of one model, and process groups that only this model uses."""

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
    """The processes of one model.

    rank: number of this process. store: a store that only these processes use. has_gloo: whether the caller's group
    uses gloo; then gloo also carries GPU tensors.
    """

    rank: int
    size: int
    store: Store
    has_gloo: bool

    def group(self, name: str, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
        """Connect all processes by gloo or NCCL, whichever the device needs.

        Raises:
            RuntimeError: a process did not join in time.
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
            nccl._set_sequence_number_for_group()
            group._register_backend(device, kind.NCCL, nccl)
        return group


def meet(mesh: Any, timeout: timedelta) -> Meeting:
    """Find the other processes of the mesh, of the default process group, or of torchrun's environment.

    Every process counts the models that it has met others for. The model's store has this number in its name, because
    the shared store still holds addresses of earlier models, which `torch.distributed.new_group` would find.

    Raises:
        InvalidInputError: the mesh has the wrong type or dimensions, or there is neither a group nor an environment.
        RankFailedError: not all processes of the environment joined in time.
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
                f"tensor_parallel_size: found neither a default process group nor torchrun's environment ({error})"
            ) from error
        except RuntimeError as error:
            raise RankFailedError(f"not all processes joined in {timeout.total_seconds():g} s ({error})") from error
        members, has_gloo = list(range(size)), False
    name = f"paged/{','.join(map(str, members))}"
    number = place.add(f"{name}/{rank}", 1)
    return Meeting(rank, len(members), PrefixStore(f"{name}/{number}", place), has_gloo)


@cache
def _environment(*variables_and_timeout: Any) -> tuple[Store, int, int]:
    """Return the environment's store, rank and size. Cached, as other processes may still need the store."""
    place: tuple[Store, int, int] = next(rendezvous("env://", timeout=variables_and_timeout[-1]))
    return place


def _group_of(mesh: Any) -> dist.ProcessGroup:
    if not isinstance(mesh, dist.device_mesh.DeviceMesh):
        raise InvalidInputError(f"mesh: {type(mesh).__name__}, expected a torch DeviceMesh")
    if mesh.ndim == 1:
        return mesh.get_group()
    names = mesh.mesh_dim_names or ()
    if "tp" not in names:
        raise InvalidInputError(f"mesh: dimensions {names or mesh.ndim}, expected one, or one named 'tp'")
    return mesh.get_group("tp")
