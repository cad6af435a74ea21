"""What `copy.deepcopy` of a sharded module makes and takes over."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphshard.capture.traced_module import ORIGINALS
from graphshard.module.meta_model import meta_model_of
from graphshard.program import ops
from graphshard.runtime.group import Group, with_mesh
from graphshard.state.state_tensors import state_tensors_of

if TYPE_CHECKING:
    from graphshard.module.internals import _State

_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_pre_hooks",
    "_backward_hooks",
)  # fmt: skip


def groups_like(group: Group, found: Group) -> Group:
    """The group `found` with all that `group` has, on the same mesh; all ranks call this."""
    made = with_mesh(found, group.mesh_shape)
    made.replica_all_reduce, made.check = group.replica_all_reduce, group.check
    for name in group.subgroups:
        if name not in made.subgroups:  # a part of the group that shards
            made.within(int(name.removeprefix(ops.RESHARD)))
    return made


def model_like(sharded: nn.Module, state: _State, memo: dict[int, Any]) -> nn.Module:
    """A model to compile anew: the code and Python state of `sharded`, its weights on meta.

    Ignored parameters, which stay whole and in place, have values of their own.

    Args:
        sharded: the module that is copied.
        state: its state.
        memo: that of `copy.deepcopy`, by which what else is copied shares objects with the model.
    """
    model = meta_model_of(state.programs.meta_model, memo)
    for layout in state.bindings.plan.ignored:
        param = copy.deepcopy(sharded.get_parameter(layout.fqn))
        for name in layout.names:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = param
    return model


def take_over(twin: nn.Module, mine: _State, sharded: nn.Module, theirs: _State) -> None:
    """Give `twin`, compiled of `model_like(sharded)`, the values and flags of `sharded`.

    Args:
        twin: the new module.
        mine: its state.
        sharded: the module that is copied.
        theirs: the state of that.
    """
    to, of = state_tensors_of(twin, mine.bindings), state_tensors_of(sharded, theirs.bindings)
    with torch.no_grad():
        for tensor, original in zip(to, of, strict=True):
            tensor.local.copy_(original.local)
            tensor.mark_filled()
    mine.on_meta = theirs.on_meta
    for param, other in zip(twin.parameters(), sharded.parameters(), strict=True):
        param.requires_grad_(other.requires_grad)
    for part, other_part in zip(twin.modules(), sharded.modules(), strict=True):
        part.training = other_part.training
    # Code of the model may still reach the weights that it was compiled of.
    vars(mine.programs.meta_model)[ORIGINALS] = vars(theirs.programs.meta_model)[ORIGINALS]


def remember(memo: dict[int, Any], twin: nn.Module, sharded: nn.Module) -> None:
    """Note in the memo of `copy.deepcopy` what stands for what; copy the hooks of the root."""
    memo[id(sharded)] = twin
    for get in (nn.Module.modules, nn.Module.parameters, nn.Module.buffers):
        pairs = zip(get(sharded), get(twin), strict=True)
        memo.update((id(original), copied) for original, copied in pairs)
    for name in _HOOKS:
        vars(twin)[name] = copy.deepcopy(vars(sharded)[name], memo)
