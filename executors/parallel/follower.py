"""Ranks other than 0, which repeat the steps of rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from paged.cache.tiers.follower import FollowerFiles
from paged.errors import CheckpointError, PagedError, RankFailedError
from paged.executors.parallel.driver import compare_states
from paged.executors.parallel.messages import Channel, Kind, StepMessage
from paged.models.loading.weights import read_headers
from paged.models.lora.checkpoint import adapter_files
from paged.models.paged_lm import PagedCausalLM
from paged.models.parallel.fingerprint import checkpoint_parts
from paged.models.weight_update import Source, read_new_weights, replace_weights

# Block moves of rank 0's cache that every rank repeats, by method name.
_MOVES = ("clear", "copy", "swap_in", "swap_out")
# Methods of `FollowerFiles` that rank 0 calls.
_FILE_CALLS = ("read_files", "keep_files", "drop_files", "write_files")


def follow(model: PagedCausalLM) -> None:
    """Repeat the work of rank 0 until it shuts down.

    Raises:
        RankFailedError: a rank has ended or does not answer.
    """
    channel, manager = Channel(model.ranks), model.kv_manager
    files: FollowerFiles | None = None
    if manager.files is not None:
        files = FollowerFiles(manager.files, manager.tensors)
    try:
        with torch.no_grad():
            while _obey(model, files, channel, *channel.receive()):
                pass
        model.ranks.close()
        if files is not None:
            files.close()
    except RankFailedError:
        raise
    except BaseException as error:
        model.ranks.fail(f"rank {model.ranks.rank} failed within a step ({type(error).__name__}: {error})")
        raise


def load_adapter(model: PagedCausalLM, name: str, path: str | Path) -> Exception | None:
    """Load an adapter on all ranks or on none; return the error, if any."""
    failure: Exception | None = None
    is_first, is_loaded = False, False
    try:
        is_first = model.adapters.load(name, path)
        is_loaded = True
        parts = {}
        if model.ranks.size > 1:
            parts = checkpoint_parts(*adapter_files(Path(path)))
    except (PagedError, OSError) as error:
        failure = error
    failed = _failed(model, failure)
    try:
        if failed:
            raise failure or CheckpointError(f"adapter {name!r}: ranks {failed} cannot load it from {path}")
        model.ranks.see_that_same(parts)
    except (PagedError, OSError) as error:
        if is_loaded:
            model.adapters.unload(name)
        return error
    if is_first:
        model.warm_up_adapters()
    return None


def update_weights(model: PagedCausalLM, source: Source, *, check_finite: bool) -> Exception | None:
    """Replace the weights on all ranks or on none; return the error, if any."""
    failure: Exception | None = None
    try:
        new = read_new_weights(model, source, check_finite=check_finite)
        parts = {}
        if model.ranks.size > 1:
            parts = checkpoint_parts({}, read_headers(Path(str(source))))
    except (PagedError, OSError) as error:
        failure = error
    failed = _failed(model, failure)
    if failed:
        return failure or CheckpointError(f"ranks {failed} cannot read the weights from {source}")
    try:
        model.ranks.see_that_same(parts)
    except PagedError as error:
        return error
    if model.memory.level:
        model.memory.restore()
    replace_weights(model, new)
    if model.memory.level:
        model.memory.resume()
    return None


def wake(model: PagedCausalLM) -> None:
    """Allocate the device memory of a model asleep at level 1 again."""
    model.memory.restore()
    model.memory.resume()


def _failed(model: PagedCausalLM, failure: Exception | None) -> list[int]:
    """Return the ranks on which the call failed."""
    flags = model.ranks.compare(torch.tensor([int(failure is not None)]))
    return [rank for rank, flag in enumerate(flags) if flag]


def _text(word: NDArray[Any]) -> str:
    return word.tobytes().decode()


def _obey(
    model: PagedCausalLM, files: FollowerFiles | None, channel: Channel, kind: Kind, arrays: list[NDArray[Any]]
) -> bool:
    """Run the work of a message; return whether more messages follow."""
    ranks = model.ranks
    if kind is Kind.STEP:
        message = StepMessage.read(arrays, model.device)
        if message.num_device_ids:
            ids = torch.empty(message.num_device_ids, dtype=torch.int64, device=model.device)
            message.step.device_ids = ranks.broadcast(ids, on_device=True)
        step, row_adapters = message.step, message.row_adapters
        shape = model.graphs.shape_of(step, is_adapted=row_adapters is not None)
        rows = model.run_step(step, shape, row_adapters)
        if message.draws is not None:
            model.draw(rows, message.draws)
        elif not step.returns_hidden:
            model.gather_logits(rows)
    elif kind is Kind.MOVE_BLOCKS:
        name = _text(arrays[0])
        assert name in _MOVES + _FILE_CALLS
        owner: Any = model.kv_manager.tensors
        if name in _FILE_CALLS:
            owner = files
        arguments = [array.tolist() for array in arrays[1:]]
        getattr(owner, name)(*arguments)
    elif kind is Kind.COMPARE_READ:
        assert files is not None
        number, is_late = arrays[0].tolist()
        ranks.compare(torch.from_numpy(files.progress(number, is_late=bool(is_late))))
    elif kind is Kind.WARM_UP:
        model.prepare()
    elif kind is Kind.LOAD_LORA:
        adapter, path = arrays
        load_adapter(model, _text(adapter), _text(path))
    elif kind is Kind.UPDATE_WEIGHTS:
        path, check_finite = arrays
        update_weights(model, _text(path), check_finite=bool(_text(check_finite)))
    elif kind is Kind.SLEEP:
        model.memory.sleep(int(arrays[0].tobytes()))
    elif kind is Kind.WAKE:
        wake(model)
    elif kind is Kind.UNLOAD_LORA:
        model.adapters.unload(_text(arrays[0]))
    else:
        states = ranks.compare(channel.state)
        if kind is Kind.STOP:
            return False
        compare_states(channel, states)
    return True
