"""Optimizer state by parameter names: sharded, full or local.

The form is that of torch.distributed.checkpoint.state_dict:
`{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [names], ...}]}`.
A tensor with its parameter's shape is laid out as the parameter; other values ("step", the row and
column statistics of a factored optimizer) must be the same on every rank, which is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.errors import CheckpointError
from graphshard.runtime.lowered import Bindings
from graphshard.state.local_steps import state_of
from graphshard.state.optim_copies import copies_of_state, require_same_copies
from graphshard.state.state_tensors import (
    Keeper,
    StateTensor,
    gather_full,
    gathered_line,
    local_of,
    state_tensors_of,
)

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
    """See `ShardedModule.optimizer_state_dict`, whose `kind` is `form` here."""
    group, agreement = bindings.group, bindings.agreement
    keep = form != "full" or group.rank == 0 or not rank0_only
    with agreement.part() as part:
        if form not in KINDS:
            raise CheckpointError(f"kind must be one of {', '.join(KINDS)}; got {form!r}")
        entries = entries_of(module, bindings, optim)
        copies: dict[str, str] = {}
        if form == "full":
            part.same += gathered_lines(entries)
            copies = copies_of_state(group, _with_params(optim, entries))
    if form != "full":
        return _state_dict(optim, entries, local_part if form == "local" else lambda value: value)
    require_same_copies(group, agreement, copies)
    keeper = Keeper()

    def whole(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        full = gather_full(value, group)
        return keeper.keep(full.cpu if cpu else full.detach) if keep else None

    state = _state_dict(optim, entries, whole)
    keeper.end(agreement)
    return state if keep else {}


def sharded_state_dict(
    module: nn.Module, bindings: Bindings, optim: torch.optim.Optimizer
) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """As `optimizer_state_dict` of form "sharded"; and what of it must be alike on all ranks.

    That is the tensors that ranks gather, and copies to give to `require_same_copies`.
    """
    entries = entries_of(module, bindings, optim)
    copies = copies_of_state(bindings.group, _with_params(optim, entries))
    return _state_dict(optim, entries, lambda value: value), gathered_lines(entries), copies


Entries = dict[int, tuple[str, Mapping[str, Any] | None]]
"""By the `id` of a parameter, in the order of the optimizer's groups, its name and its state."""


def entries_of(module: nn.Module, bindings: Bindings, optim: torch.optim.Optimizer) -> Entries:
    """The name and state of every parameter of `optim`."""
    state_tensors = state_tensors_of_optimizer(module, bindings, optim)
    return {
        id(param): (
            state_tensors[id(param)].name,
            state_of(optim, param) if param in optim.state else None,
        )
        for param_group in optim.param_groups
        for param in param_group["params"]
    }


def _with_params(
    optim: torch.optim.Optimizer, entries: Entries
) -> Iterator[tuple[Tensor, str, Mapping[str, Any]]]:
    for param_group in optim.param_groups:
        for param in param_group["params"]:
            name, state = entries[id(param)]
            yield param, name, state or {}


def gathered_lines(entries: Entries) -> list[str]:
    """The tensors that ranks gather, in their order."""
    return [
        gathered_line(f"{key} of {name}", value)
        for name, state in entries.values()
        for key, value in (state or {}).items()
        if isinstance(value, DTensor)
    ]


def _state_dict(
    optim: torch.optim.Optimizer, entries: Entries, in_form: Callable[[Any], Any]
) -> dict[str, Any]:
    state = {
        name: {key: in_form(value) for key, value in param_state.items()}
        for name, param_state in entries.values()
        if param_state is not None
    }
    groups = [
        {**group, "params": [entries[id(param)][0] for param in group["params"]]}
        for group in optim.param_groups
    ]
    return {"state": state, "param_groups": groups}


def local_part(value: Any) -> Any:
    """This rank's part of a tensor; other values as they are."""
    return local_of(value) if isinstance(value, Tensor) else value


def state_tensors_of_optimizer(
    module: nn.Module, bindings: Bindings, optim: torch.optim.Optimizer
) -> dict[int, StateTensor]:
    """Return the module's tensors by `id`."""
    state_tensors = {
        id(state_tensor.tensor): state_tensor for state_tensor in state_tensors_of(module, bindings)
    }
    for index, param_group in enumerate(optim.param_groups):
        for position, param in enumerate(param_group["params"]):
            if id(param) not in state_tensors:
                raise CheckpointError(
                    f"parameter {position} of the optimizer's group {index}, of shape "
                    f"{list(param.shape)}, is not the sharded module's; make the optimizer from "
                    "sharded.parameters()"
                )
    return state_tensors
