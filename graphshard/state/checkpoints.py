"""Save and load training states as torch.distributed.checkpoint (DCP) directories; see README.md.

Loading checks everything before it changes anything.
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.errors import CheckpointError
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.cuda_graphs import wait_before_the_end
from graphshard.runtime.group import Group
from graphshard.runtime.lower import Bindings
from graphshard.state.dcp import (
    StoredCheckpoint,
    coordinating,
    empty_like,
    nested,
    open_checkpoint,
    read_entries,
)
from graphshard.state.dcp_write import CommittingWriter
from graphshard.state.load import Match, match
from graphshard.state.manifest import series_of
from graphshard.state.optim import STEP, prepare_load, require_same_copies, sharded_state_dict
from graphshard.state.state_tensors import (
    Keeper,
    StateTensor,
    by_name,
    local_of,
    memory_like,
    region_of,
    state_tensors_of,
)
from graphshard.state.training_state import (
    PARTS,
    RNG,
    PartsToLoad,
    checked_states,
    load_states,
    parts_to_save,
    random_staging,
    random_states,
    set_states,
)
from graphshard.torch_private import compat as torch_compat


def save_checkpoint(
    module: nn.Module,
    bindings: Bindings,
    path: str | os.PathLike[str],
    optim: torch.optim.Optimizer | None,
    scheduler: Any,
    scaler: Any,
    extra: Mapping[str, Any] | None,
    *,
    keep: int | None,
    background: Callable[[], Any] | None,
    last: Saving | None = None,
) -> Saving | None:
    """See `ShardedModule.save_checkpoint`.

    `background` makes the process group to write with in the background; `last` is the last save
    there, to wait for.
    """
    group, agreement = bindings.group, bindings.agreement
    copies: dict[str, str] = {}
    with agreement.part() as part:
        if last is not None:
            last.end()
        if keep is not None:
            if keep < 1:
                raise CheckpointError(f"keep must be 1 or more checkpoints, or None; got {keep}")
            series_of(Path(path))
        if background is not None and group.process_group is None:
            raise CheckpointError(
                "saving in the background needs a process group; there is one rank"
            )
        state: Any = {"model": module.state_dict()}
        if optim is not None:
            state["optim"], part.same[:], copies = sharded_state_dict(module, bindings, optim)
        state |= parts_to_save(scheduler, scaler, extra)
        random = {str(group.rank): random_states(group)}
        writer = CommittingWriter(path, group.size, keep if group.rank == 0 else None)
        if background is not None:
            state = staged(state)
        state[RNG] = random  # copies already
    if optim is not None:
        require_same_copies(group, agreement, copies)
    if background is None:
        alone = group.process_group is None
        writer.save(state, coordinating(group.process_group), alone=alone)
        with agreement.part():
            writer.end()
        return None
    process_group = background()
    executor = ThreadPoolExecutor(1, thread_name_prefix="graphshard-save")

    def run() -> None:
        writer.save(state, process_group)
        writer.end()

    saving = Saving()
    saving.set_running_or_notify_cancel()  # so that nobody cancels it on one rank alone
    executor.submit(saving.run, run)
    executor.shutdown(wait=False)
    wait_before_the_end(saving, group.process_group, process_group)
    return saving


class Saving(Future[None]):
    """A save in the background. Its error is told once: by its methods, or by the next save."""

    def __init__(self) -> None:
        super().__init__()
        self._told = False

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end; see `concurrent.futures.Future.result`."""
        self.exception(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return its error; see `concurrent.futures.Future.exception`."""
        error = super().exception(timeout)
        self._told = True
        return error

    def end(self) -> None:
        """Wait for the end."""
        wait([self])
        if not self._told:
            self.result()

    def run(self, write: Callable[[], None]) -> None:
        """Do what this waits for; called on a thread of its own."""
        try:
            write()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(None)
        finally:
            del self, write  # the error would refer to itself by this function, and keep the copies


def load_checkpoint(
    module: nn.Module,
    bindings: Bindings,
    path: str | os.PathLike[str],
    optim: torch.optim.Optimizer | None,
    scheduler: Any,
    scaler: Any,
    extra: MutableMapping[str, Any] | None,
    *,
    strict: bool,
    trust: bool,
    last: Saving | None = None,
) -> Match:
    """See `ShardedModule.load_checkpoint`; `last` is the last save in the background."""
    group, agreement = bindings.group, bindings.agreement
    optim_values: dict[str, Any] = {}
    with agreement.part() as part:
        if last is not None:
            last.end()
        state_tensors = state_tensors_of(module, bindings)
        stored = open_checkpoint(path, trust=trust)
        stored.verify(group.rank, group.size)
        keys = stored.below(stored.prefix_of(by_name(state_tensors)))
        matched = match(state_tensors, stored.infos(keys), strict=strict)
        keys = {name: keys[key] for name, key in matched.keys.items()}
        staging = {keys[t.name]: memory_like(t.tensor) for t in state_tensors if t.name in keys}
        if optim is not None:
            optim_values = _optimizer_staging(stored, state_tensors)
        parts = PartsToLoad(stored, scheduler, scaler, extra, strict=strict)
        entries = {
            **staging, **optim_values, **parts.staging, **random_staging(stored, group)
        }  # fmt: skip
        part.same.append(f"save {stored.save_id} in {path}")
    if strict:
        _require_asked(parts, path, group, agreement)
    keeper = Keeper()

    def read() -> tuple[dict[str, Any], dict[str, Any]]:
        read_entries(stored, entries, group.process_group)
        optim_state = {} if optim is None else _optimizer_dict(stored, entries, optim_values)
        return optim_state, checked_states(stored, entries, group)

    optim_state, own_states = keeper.keep(read) or ({}, {})
    keeper.end(agreement)
    with _all_or_nothing(bindings, parts, entries):
        with agreement.part():
            load_states(own_states, stored, group)
        if optim is not None:
            prepare_load(module, bindings, optim, optim_state, form=None)()
    for state_tensor in state_tensors:
        if state_tensor.name in keys:
            value = entries[keys[state_tensor.name]]
            state_tensor.write(local_of(value), region_of(value))
    parts.fill_extra(entries)
    return matched


@contextmanager
def _all_or_nothing(
    bindings: Bindings, parts: PartsToLoad, entries: Mapping[str, Any]
) -> Iterator[None]:
    """Restore the objects in `parts`; take that and random states back if the body fails."""
    before = random_states(bindings.group)
    undo: Callable[[], None] | None = None
    try:
        with bindings.agreement.part():
            undo = parts.load_objects(entries)
        yield
    except BaseException:
        set_states(before, bindings.group)
        if undo is not None:
            undo()
        raise


def _require_asked(
    parts: PartsToLoad, path: str | os.PathLike[str], group: Group, agreement: Agreement
) -> None:
    """Check that each name of the checkpoint's `extra` is asked for by some rank."""
    own = parts.unasked()
    seen = [own] if group.backend == "fake" else group.all_gather_object(own)
    with agreement.part():
        if nobodys := frozenset.intersection(*seen):
            raise CheckpointError(
                f"{path} has extra {min(nobodys)!r}, which no rank asks for; pass it in extra, or "
                "an empty dict to get all, or load with strict=False"
            )


def _optimizer_prefix(stored: StoredCheckpoint) -> tuple[str, ...] | None:
    for path in stored.paths.values():
        if path[0] in PARTS:
            continue
        for depth in range(min(2, len(path) - 1)):
            if path[depth] == "param_groups":
                return path[:depth]
    return None


def _optimizer_staging(
    stored: StoredCheckpoint, state_tensors: list[StateTensor]
) -> dict[str, Any]:
    prefix = _optimizer_prefix(stored)
    if prefix is None:
        raise CheckpointError(
            f'{stored.folder} has no optimizer state by names (no "param_groups"); load it '
            "without optim"
        )
    named = by_name(state_tensors)
    staging: dict[str, Any] = {}
    for key, path in stored.paths.items():
        depth = len(prefix)
        if path[:depth] != prefix or path[depth : depth + 1] not in (("state",), ("param_groups",)):
            continue
        entry = stored.tensor(key)
        rest = path[len(prefix) :]
        if entry is None:
            staging[key] = None
            continue
        state_tensor = named.get(rest[1]) if len(rest) == 3 else None
        like_param = (
            state_tensor is not None and rest[2] != STEP and tuple(entry.size) == state_tensor.shape
        )
        if state_tensor is not None and like_param and isinstance(state_tensor.tensor, DTensor):
            staging[key] = memory_like(state_tensor.tensor)
        else:
            staging[key] = empty_like(entry)
    return staging


def _optimizer_dict(
    stored: StoredCheckpoint, entries: Mapping[str, Any], keys: Mapping[str, Any]
) -> dict[str, Any]:
    prefix = _optimizer_prefix(stored) or ()
    tree: Any = nested({key: entries[key] for key in keys}, stored.paths)
    for name in prefix:
        tree = tree[name]
    groups = tree["param_groups"]
    if isinstance(groups, dict):  # DCP saves a list as a dict by index
        if sorted(groups) != sorted(map(str, range(len(groups)))):
            raise CheckpointError(
                f"{stored.folder} is damaged: its parameter groups have no numbers in order"
            )
        groups = [groups[str(number)] for number in range(len(groups))]
    return {"state": tree.get("state", {}), "param_groups": groups}


def background_group(group: Group) -> Any:
    """Return a new Gloo process group for saving while the ranks train; all ranks call this."""
    return dist.new_group(
        dist.get_process_group_ranks(group.process_group),
        timeout=group.timeout,
        backend="gloo",
        use_local_synchronization=True,
        group_desc="graphshard",
    )


# -- copies for a save in the background ----------------------------------------------------------


@torch.no_grad()
def staged(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy of nested values, with tensors on the CPU; of a DTensor, this rank's part.

    A value that stands in two places is copied once, by `memo`. Torch's own stager copies the
    storage under each tensor. Under SHARD_OPTIMIZER a parameter is a part of the storage of the
    whole one, and torch fails at the wrapper of such a DTensor.
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    made: Any
    if isinstance(value, DTensor):
        local = torch_compat.local_tensor(value)
        made = torch_compat.dtensor_like(value, local.detach().to("cpu", copy=True))
    elif isinstance(value, Tensor):
        made = value.detach().to("cpu", copy=True)
    elif type(value) in (dict, OrderedDict):
        made = type(value)((key, staged(item, memo)) for key, item in value.items())
    elif type(value) in (list, tuple):
        made = type(value)(staged(item, memo) for item in value)
    else:
        return copy.deepcopy(value, memo)
    memo[id(value)] = made
    return made
