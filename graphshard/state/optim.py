"""Optimizer state by parameter names: sharded, full or local.

The form is that of torch.distributed.checkpoint.state_dict:
`{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [names], ...}]}`.
A tensor with its parameter's shape is laid out as the parameter; other values ("step", the row and
column statistics of a factored optimizer) are the same on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphshard.runtime.lowered import Bindings
from graphshard.state.state_tensors import (
    StateTensor,
    gather_full,
    local_of,
    raise_together,
    state_tensors_of,
)
from graphshard.training.local_steps import state_of

KINDS = ("sharded", "full", "local")


def optimizer_state_dict(
    module: nn.Module,
    bindings: Bindings,
    optim: torch.optim.Optimizer,
    *,
    form: str,
    rank0_only: bool,
    cpu: bool,
) -> dict[str, Any]:
    """Return the state of `optim` by parameter names.

    Args:
        module: the sharded module.
        bindings: its shards.
        optim: an optimizer of its parameters.
        form: "sharded" (DTensors), "full" or "local" (this rank's parts).
        rank0_only: return {} on other ranks; for form "full".
        cpu: move tensors to the CPU; for form "full".

    Raises:
        CheckpointError: on every rank, if the optimizer has a parameter that is not the module's.
    """
    group = bindings.group
    problem = None if form in KINDS else f"kind must be one of {', '.join(KINDS)}; got {form!r}"
    state_tensors: dict[int, StateTensor] = {}
    if problem is None:
        state_tensors, problem = state_tensors_of_optimizer(module, bindings, optim)
    raise_together(group, problem)
    keep = form != "full" or group.rank == 0 or not rank0_only

    def in_form(value: Any) -> Any:
        if not isinstance(value, Tensor) or form == "sharded":
            return value
        if form == "local":
            return local_of(value)
        full = gather_full(value, group)
        return full.cpu() if keep and cpu else full if keep else None

    state = {}
    groups = []
    for param_group in optim.param_groups:
        for param in param_group["params"]:
            if param in optim.state:
                entries = state_of(optim, param).items()
                # Gathers follow the order of the groups, which is the same on every rank.
                name = state_tensors[id(param)].name
                state[name] = {key: in_form(value) for key, value in entries}
        names = [state_tensors[id(param)].name for param in param_group["params"]]
        groups.append({**param_group, "params": names})
    return {"state": state, "param_groups": groups} if keep else {}


def state_tensors_of_optimizer(
    module: nn.Module, bindings: Bindings, optim: torch.optim.Optimizer
) -> tuple[dict[int, StateTensor], str | None]:
    """Return the module's tensors by `id`, and a problem if `optim` has other parameters."""
    state_tensors = {
        id(state_tensor.tensor): state_tensor for state_tensor in state_tensors_of(module, bindings)
    }
    for index, param_group in enumerate(optim.param_groups):
        for position, param in enumerate(param_group["params"]):
            if id(param) not in state_tensors:
                return state_tensors, (
                    f"parameter {position} of the optimizer's group {index}, of shape "
                    f"{list(param.shape)}, is not the sharded module's; make the optimizer from "
                    "sharded.parameters()"
                )
    return state_tensors, None
