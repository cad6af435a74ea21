"""State of a module some of whose children are sharded, and of its optimizers.

By torch.distributed.checkpoint, which knows the shards as the DTensors they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from graphshard.errors import CheckpointError
from graphshard.state.dcp import RankZeroFirst

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def full_state(module: nn.Module) -> dict[str, Any]:
    """Full tensors by name, on the host of rank 0; empty elsewhere. Every rank calls it."""
    return get_model_state_dict(module, options=_FULL)


def full_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name, full, on rank 0; empty elsewhere."""
    return get_optimizer_state_dict(module, optimizer, options=_FULL)


def load_full_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Take each rank's part of full tensors, given on every rank.

    Raises:
        CheckpointError: names or shapes do not fit.
    """
    own = module.state_dict()
    for name, value in state.items():
        if name in own and tuple(value.shape) != tuple(own[name].shape):
            raise CheckpointError(
                f"{name!r} has shape {list(value.shape)} in the checkpoint and "
                f"{list(own[name].shape)} in the model"
            )
    odd = sorted(own.keys() ^ state.keys())
    if strict and odd:
        where = "the checkpoint has not" if odd[0] in own else "the model has not"
        raise CheckpointError(f"{odd[0]!r} is a name that {where}; load with strict=False to pass")
    options = StateDictOptions(full_state_dict=True, strict=strict)
    set_model_state_dict(module, dict(state), options=options)


def load_full_optimizer_state(
    module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Take each rank's part of a full state by parameter name, given on every rank."""
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(module, optimizer, optim_state_dict=dict(state), options=options)


def save_sharded(path: Path, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Write every rank's part of the module and the optimizers into the folder `path`."""
    save(_sharded(module, optimizers), checkpoint_id=path, planner=RankZeroFirst())


def load_sharded(path: Path, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Read what `save_sharded` wrote, on any number of ranks.

    Raises:
        CheckpointError: the folder is none of a checkpoint, or of another model.
    """
    state = _sharded(module, optimizers)
    try:
        load(state, checkpoint_id=path)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded into this module: {error}") from error
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
