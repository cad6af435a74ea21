"""Save and load training states as torch.distributed.checkpoint (DCP) directories.

Loading checks everything before it changes anything. Any torch program can read the directory:
{"model": state dict, "optim": optimizer state by names, "rng": {rank: random state}}.
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
    StoredCheckpoint,
    cause_of,
    empty_like,
    nested,
    open_checkpoint,
    read_entries,
)
from graphshard.state.matching import Match, match
from graphshard.state.optim import optimizer_state_dict
from graphshard.state.optim_load import STEP, prepare_load
from graphshard.state.state_tensors import (
    StateTensor,
    all_gather_objects,
    by_name,
    raise_together,
    region_of,
    state_tensors_of,
)
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
    """Write model, optimizer and random state.

    Args:
        module: the sharded module.
        bindings: its shards.
        path: the directory.
        optim: an optimizer of its parameters, or None.
        background: a process group to write with in the background; None: write before returning.

    Returns:
        A future of the write in the background, or None.

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
            future: Any = async_save(
                state, checkpoint_id=path, process_group=background, planner=RankZeroFirst()
            )
            return future
        alone = group.process_group is None
        world = _world(group)
        save(state, checkpoint_id=path, process_group=world, no_dist=alone, planner=RankZeroFirst())
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
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
    """Check and read the whole checkpoint, then load it.

    Args:
        module: the sharded module.
        bindings: its shards.
        path: the directory.
        optim: an optimizer of its parameters to load too, or None.
        strict: refuse missing and unexpected keys of the model.

    Returns:
        The matched, missing and unexpected keys of the model.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged or does not fit; the module
            and the optimizer are unchanged.
    """
    group = bindings.group
    state_tensors = state_tensors_of(module, bindings)
    problem, stored, matched = None, None, Match()
    values: dict[str, Any] = {}
    optim_values: dict[str, Any] = {}
    try:
        stored = open_checkpoint(path)
        keys = stored.below(stored.prefix_of(by_name(state_tensors)))
        infos = {}
        for name, key in keys.items():
            entry = stored.tensor(key)
            assert entry is not None
            infos[name] = (tuple(entry.size), entry.properties.dtype)
        matched = match(state_tensors, infos, strict=strict)
        values = {
            keys[matched.keys[state_tensor.name]]: _staging_tensor(state_tensor)
            for state_tensor in state_tensors
            if state_tensor.name in matched.keys
        }
        if optim is not None:
            optim_values = _optimizer_staging(stored, state_tensors)
    except CheckpointError as error:
        problem = str(error)
    raise_together(group, problem)
    assert stored is not None

    random_states = _random_staging(stored, group)
    entries = {**values, **optim_values, **random_states}
    try:
        read_entries(stored, entries, group.process_group)
    except CheckpointError as error:
        problem = str(error)
    raise_together(group, problem)
    commit: Callable[[], None] | None = None
    if optim is not None:
        commit = prepare_load(
            module, bindings, optim, _optimizer_dict(stored, entries, optim_values), form=None
        )
    for state_tensor in state_tensors:
        if state_tensor.name in matched.keys:
            value = entries[keys[matched.keys[state_tensor.name]]]
            local = torch_compat.local_tensor(value) if isinstance(value, DTensor) else value
            state_tensor.write(local, region_of(value))
            state_tensor.mark_filled()
    if commit is not None:
        commit()
    _load_random_state(random_states and entries, stored, group)
    return matched


def _staging_tensor(state_tensor: StateTensor) -> Tensor:
    """Return CPU memory to read this rank's part of a tensor into."""
    local = torch.empty_like(state_tensor.local, device="cpu")
    if isinstance(state_tensor.tensor, DTensor):
        return torch_compat.dtensor_like(state_tensor.tensor, local)
    return local


def _optimizer_prefix(stored: StoredCheckpoint) -> tuple[str, ...] | None:
    for path in stored.paths.values():
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
        if path[: len(prefix)] != prefix or path[len(prefix)] not in ("state", "param_groups"):
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
            staging[key] = _staging_tensor(state_tensor)
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
        groups = [groups[number] for number in sorted(groups, key=int)]
    return {"state": tree.get("state", {}), "param_groups": groups}


# -- random state ---------------------------------------------------------------------------------


def _random_state(group: Group) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if group.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(group.device)
    return state


def _random_staging(stored: StoredCheckpoint, group: Group) -> dict[str, Any]:
    """Return memory to read all ranks' random states into; {} if their number has changed."""
    paths = {key: path for key, path in stored.paths.items() if path[0] == RNG and len(path) == 3}
    if len({path[1] for path in paths.values()}) != group.size:
        return {}
    return {key: empty_like(entry) for key in paths if (entry := stored.tensor(key)) is not None}


def _load_random_state(entries: Mapping[str, Any], stored: StoredCheckpoint, group: Group) -> None:
    states = {
        path[2]: entries[key]
        for key, path in stored.paths.items()
        if key in entries and path[:2] == (RNG, str(group.rank))
    }
    if not states:
        if group.rank == 0 and any(path[0] == RNG for path in stored.paths.values()):
            warnings.warn(
                f"random states were not restored, since {stored.folder} was written by another "
                "number of ranks",
                stacklevel=4,
            )
        return
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and group.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], group.device)


def _world(group: Group) -> Any:
    """Return the process group that coordinates a save; None for the default group."""
    process_group = group.process_group
    if process_group is None or group.size == dist.get_world_size():
        return None
    return process_group


def background_group(group: Group) -> Any:
    """Return a new Gloo process group for saving while the ranks train.

    Raises:
        CheckpointError: there is no process group.
    """
    if group.process_group is None:
        raise CheckpointError("saving in the background needs a process group; there is one rank")
    ranks = all_gather_objects(group, dist.get_rank())
    return dist.new_group(ranks, backend="gloo")
