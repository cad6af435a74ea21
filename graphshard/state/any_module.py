"""Save and load a module with sharded children, and its optimizers.

The shards are DTensors, so torch.distributed.checkpoint handles them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from graphshard.errors import CheckpointError
from graphshard.state.dcp import open_checkpoint, read_entries
from graphshard.state.dcp_write import CommittingWriter

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def full_state(module: nn.Module) -> dict[str, Any]:
    """Return full CPU tensors by name on rank 0, and {} elsewhere; every rank must call this."""
    return get_model_state_dict(module, options=_FULL)


def full_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's full state by parameter name on rank 0, and {} elsewhere."""
    return get_optimizer_state_dict(module, optimizer, options=_FULL)


def load_full_state(module: nn.Module, state: Mapping[Any, Any], *, strict: bool) -> None:
    """Load each rank's part of the full tensors `state`, which every rank must pass."""
    tensors = module.state_dict()
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{name!r} is no tensor by name in the checkpoint")
        if name in tensors and tuple(value.shape) != tuple(tensors[name].shape):
            raise CheckpointError(
                f"{name!r} has shape {list(value.shape)} in the checkpoint and "
                f"{list(tensors[name].shape)} in the model; build it with the "
                "sizes of the checkpoint's, or load another one"
            )
    mismatched = sorted(tensors.keys() ^ state.keys())
    if strict and mismatched:
        lacking = "checkpoint" if mismatched[0] in tensors else "model"
        raise CheckpointError(
            f"the {lacking} has no {mismatched[0]!r}; load with strict=False to ignore it"
        )
    options = StateDictOptions(full_state_dict=True, strict=strict)
    set_model_state_dict(module, dict(state), options=options)


def load_full_optimizer_state(
    module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Load each rank's part of a full state, which every rank must pass.

    Its parameters go by name, or, as those of a run that was not sharded, by number.
    """
    options = StateDictOptions(full_state_dict=True)
    try:
        named = state_by_name(state, optimizer, module, "the optimizer's state")
        set_optimizer_state_dict(module, optimizer, optim_state_dict=named, options=options)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the optimizer's state does not fit {type(optimizer).__name__}: {error}"
        ) from error


def state_by_name(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    module: nn.Module,
    source: str,
    otherwise: str = "",
) -> dict[str, Any]:
    """The `state` of an optimizer by the names of parameters; numbers count all groups in order.

    `source` and what to do `otherwise` are the beginning and the end of an error.
    """
    groups = state["param_groups"]
    theirs = [group["params"] for group in groups]
    if any(isinstance(each, str) for params in theirs for each in params):
        return dict(state)
    name_of = {id(param): name for name, param in module.named_parameters()}
    names = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if [*map(len, theirs)] != [*map(len, names)]:
        raise CheckpointError(
            f"{source} has groups of {[*map(len, theirs)]} parameters, and the optimizer has "
            f"groups of {[*map(len, names)]}; resume with the model and the optimizer's arguments "
            f"of that run{otherwise}"
        )
    by_number = {
        number: name
        for numbers, group in zip(theirs, names, strict=True)
        for number, name in zip(numbers, group, strict=True)
    }
    return {
        "state": {by_number[number]: values for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": group_names}
            for group, group_names in zip(groups, names, strict=True)
        ],
    }


def save_sharded(path: Path, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Write every rank's shards of the module and the optimizers into the folder `path`.

    A checkpoint that is there stays whole until the new one replaces it, and its files then go.
    """
    writer = CommittingWriter(path, dist.get_world_size() if dist.is_initialized() else 1)
    writer.save(_sharded(module, optimizers), None)
    writer.end()


def load_sharded(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], *, trust: bool = False
) -> None:
    """Load a folder written by `save_sharded`, on any number of ranks, optimizers in their order.

    `trust` unpickles whatever the folder holds, which may run code of its author.
    """
    state = _sharded(module, optimizers)
    stored = open_checkpoint(path, trust=trust)
    stored.verify()
    read_entries(stored, state, dist.group.WORLD if dist.is_initialized() else None)
    set_model_state_dict(module, state["model"])
    for index, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(module, optimizer, optim_state_dict=state[f"optimizer_{index}"])


def _sharded(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(module),
        **{
            f"optimizer_{index}": get_optimizer_state_dict(module, optimizer)
            for index, optimizer in enumerate(optimizers)
        },
    }
