"""Optimizer state by parameter names: sharded, whole or local, and back again.

The form is that of torch.distributed.checkpoint.state_dict:
`{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [names], ...}]}`.
A tensor of its parameter's shape is laid out as the parameter is; all else ("step", the row and
column statistics of a factored optimizer) is the same on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphshard.runtime.lowered import Bindings
from graphshard.state.slots import Slot, agree, gathered, local_of, slots_of
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
    """The state of `optim` by parameter names.

    Raises:
        CheckpointError: on every rank, if it holds a parameter that is not the module's.
    """
    group = bindings.group
    problem = None if form in KINDS else f"kind must be one of {', '.join(KINDS)}; got {form!r}"
    slots: dict[int, Slot] = {}
    if problem is None:
        slots, problem = slots_of_optimizer(module, bindings, optim)
    agree(group, problem)
    keep = form != "full" or group.rank == 0 or not rank0_only

    def given(value: Any) -> Any:
        if not isinstance(value, Tensor) or form == "sharded":
            return value
        if form == "local":
            return local_of(value)
        whole = gathered(value, group)
        return whole.cpu() if keep and cpu else whole if keep else None

    state = {}
    groups = []
    for param_group in optim.param_groups:
        for param in param_group["params"]:
            if param in optim.state:
                entries = state_of(optim, param).items()
                # In the order of the groups, which is the same on every rank.
                state[slots[id(param)].name] = {key: given(value) for key, value in entries}
        names = [slots[id(param)].name for param in param_group["params"]]
        groups.append({**param_group, "params": names})
    return {"state": state, "param_groups": groups} if keep else {}


def slots_of_optimizer(
    module: nn.Module, bindings: Bindings, optim: torch.optim.Optimizer
) -> tuple[dict[int, Slot], str | None]:
    """The module's slots by the identity of their tensors, and what is wrong with `optim`."""
    slots = {id(slot.tensor): slot for slot in slots_of(module, bindings)}
    for index, param_group in enumerate(optim.param_groups):
        for position, param in enumerate(param_group["params"]):
            if id(param) not in slots:
                return slots, (
                    f"parameter {position} of the optimizer's group {index}, of shape "
                    f"{list(param.shape)}, is not the sharded module's; make the optimizer from "
                    "sharded.parameters()"
                )
    return slots, None
