"""Whole training states in a directory of torch.distributed.checkpoint: checked, then taken over.

The directory is one that any program of torch can read: {"model": state dict, "optim": optimizer
state by names, "rng": {rank: random state}}.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from graphshard.errors import CheckpointError
from graphshard.runtime.group import Group
from graphshard.runtime.lowered import Bindings
from graphshard.state.dcp import (
    RankZeroFirst,
    Stored,
    cause_of,
    empty_like,
    nested,
    open_checkpoint,
    read_entries,
)
from graphshard.state.matching import Match, match
from graphshard.state.optim import optimizer_state_dict
from graphshard.state.optim_load import STEP, prepare
from graphshard.state.slots import Slot, agree, by_name, everyones, put, region_of, slots_of
from graphshard.torch_private import compat as torch_compat

RNG = "rng"


def save_checkpoint(
    module: nn.Module,
    bindings: Bindings,
    path: str | os.PathLike[str],
    optim: torch.optim.Optimizer | None,
    *,
    background: Any,
) -> Future[Any] | None:
    """Write model, optimizer and random state; with the process group `background`, meanwhile.

    Raises:
        CheckpointError: on every rank, if one cannot write.
    """
    group = bindings.group
    state: dict[str, Any] = {"model": module.state_dict()}
    if optim is not None:
        state["optim"] = optimizer_state_dict(
            module, bindings, optim, form="sharded", rank0_only=False, cpu=False
        )
    state[RNG] = {str(group.rank): _random_state(group)}
    try:
        if background is not None:
            saved: Any = async_save(
                state, checkpoint_id=path, process_group=background, planner=RankZeroFirst()
            )
            return saved
        alone = group.process_group is None
        world = _world(group)
        save(state, checkpoint_id=path, process_group=world, no_dist=alone, planner=RankZeroFirst())
    except (Exception, CheckpointException) as error:  # a BaseException, that
        raise CheckpointError(f"writing {path} failed: {cause_of(error)}") from error
    return None


def load_checkpoint(
    module: nn.Module,
    bindings: Bindings,
    path: str | os.PathLike[str],
    optim: torch.optim.Optimizer | None,
    *,
    strict: bool,
) -> Match:
    """Check and read everything, then take it over.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged or does not fit; nothing was
            changed.
    """
    group = bindings.group
    slots = slots_of(module, bindings)
    problem, stored, found = None, None, Match()
    values: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    try:
        stored = open_checkpoint(path)
        keys = stored.below(stored.prefix_of(by_name(slots)))
        described = {}
        for name, key in keys.items():
            entry = stored.tensor(key)
            assert entry is not None
            described[name] = (tuple(entry.size), entry.properties.dtype)
        found = match(slots, described, strict=strict)
        values = {
            keys[found.keys[slot.name]]: _staged(slot) for slot in slots if slot.name in found.keys
        }
        if optim is not None:
            optimizer = _staged_optimizer(stored, slots)
    except CheckpointError as error:
        problem = str(error)
    agree(group, problem)
    assert stored is not None

    random = _staged_random(stored, group)
    everything = {**values, **optimizer, **random}
    try:
        read_entries(stored, everything, group.process_group)
    except CheckpointError as error:
        problem = str(error)
    agree(group, problem)
    commit: Callable[[], None] | None = None
    if optim is not None:
        commit = prepare(
            module, bindings, optim, _optimizer_dict(stored, everything, optimizer), form=None
        )
    for slot in slots:
        if slot.name in found.keys:
            value = everything[keys[found.keys[slot.name]]]
            part = torch_compat.local_tensor(value) if isinstance(value, DTensor) else value
            put(slot.local, slot.region, part, region_of(value))
            slot.filled()
    if commit is not None:
        commit()
    _take_random(random and everything, stored, group)
    return found


def _staged(slot: Slot) -> Tensor:
    """Memory on the CPU to read a slot's part into."""
    local = torch.empty_like(slot.local, device="cpu")
    if isinstance(slot.tensor, DTensor):
        return torch_compat.dtensor_like(slot.tensor, local)
    return local


def _optimizer_prefix(stored: Stored) -> tuple[str, ...] | None:
    for path in stored.paths.values():
        for depth in range(min(2, len(path) - 1)):
            if path[depth] == "param_groups":
                return path[:depth]
    return None


def _staged_optimizer(stored: Stored, slots: list[Slot]) -> dict[str, Any]:
    prefix = _optimizer_prefix(stored)
    if prefix is None:
        raise CheckpointError(
            f'{stored.folder} has no optimizer state by names (no "param_groups"); load it '
            "without optim"
        )
    named = by_name(slots)
    staged: dict[str, Any] = {}
    for key, path in stored.paths.items():
        if path[: len(prefix)] != prefix or path[len(prefix)] not in ("state", "param_groups"):
            continue
        entry = stored.tensor(key)
        rest = path[len(prefix) :]
        if entry is None:
            staged[key] = None
            continue
        slot = named.get(rest[1]) if len(rest) == 3 else None
        like_param = slot is not None and rest[2] != STEP and tuple(entry.size) == slot.shape
        if slot is not None and like_param and isinstance(slot.tensor, DTensor):
            staged[key] = _staged(slot)
        else:
            staged[key] = empty_like(entry)
    return staged


def _optimizer_dict(
    stored: Stored, everything: Mapping[str, Any], keys: Mapping[str, Any]
) -> dict[str, Any]:
    prefix = _optimizer_prefix(stored) or ()
    tree: Any = nested({key: everything[key] for key in keys}, stored.paths)
    for name in prefix:
        tree = tree[name]
    groups = tree["param_groups"]
    if isinstance(groups, dict):  # lists are saved as dicts of numbers
        groups = [groups[number] for number in sorted(groups, key=int)]
    return {"state": tree.get("state", {}), "param_groups": groups}


# -- random state ---------------------------------------------------------------------------------


def _random_state(group: Group) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if group.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(group.device)
    return state


def _staged_random(stored: Stored, group: Group) -> dict[str, Any]:
    """What to read of random states: all ranks', if they were as many as now."""
    found = {key: path for key, path in stored.paths.items() if path[0] == RNG and len(path) == 3}
    if len({path[1] for path in found.values()}) != group.size:
        return {}
    return {key: empty_like(entry) for key in found if (entry := stored.tensor(key)) is not None}


def _take_random(everything: Mapping[str, Any], stored: Stored, group: Group) -> None:
    own = {
        path[2]: everything[key]
        for key, path in stored.paths.items()
        if key in everything and path[:2] == (RNG, str(group.rank))
    }
    if not own:
        if group.rank == 0 and any(path[0] == RNG for path in stored.paths.values()):
            warnings.warn(
                f"random states were not restored, since {stored.folder} was written by another "
                "number of ranks",
                stacklevel=4,
            )
        return
    torch.set_rng_state(own["cpu"])
    if "cuda" in own and group.device.type == "cuda":
        torch.cuda.set_rng_state(own["cuda"], group.device)


def _world(group: Group) -> Any:
    """The process group to coordinate by; None for all ranks there are."""
    process_group = group.process_group
    if process_group is None or group.size == dist.get_world_size():
        return None
    return process_group


def background_group(group: Group) -> Any:
    """A process group of its own, for saving while the ranks train."""
    if group.process_group is None:
        raise CheckpointError("saving in the background needs a process group; there is one rank")
    ranks = everyones(group, dist.get_rank())
    return dist.new_group(ranks, backend="gloo")
