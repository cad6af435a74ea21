"""Check that a model can be sharded: refuse it, or warn of state that would get lost."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from graphshard.errors import PlanError
from graphshard.format import some_of
from graphshard.policy.tree import ModuleTree
from graphshard.torch_private import compat as torch_compat


def require_module(model: object) -> None:
    """Check that `model` is an nn.Module.

    Raises:
        PlanError: it is something else, for example a module class.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise PlanError(
            f"the model must be an nn.Module; got the class {model.__name__}; make an instance of "
            "it first (on the meta device, if it is large)"
        )
    if not isinstance(model, nn.Module):
        raise PlanError(f"the model must be an nn.Module; got {type(model).__name__}")


def check_model(tree: ModuleTree) -> None:
    """Refuse a model that cannot be sharded; warn of state and hooks that sharding loses.

    Raises:
        PlanError: a module is a ScriptModule, has parameters or buffers without a shape, or names
            its parameters differently from the module tree.
    """
    for fqn, module in tree.modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(
                f"every module must be plain Python, since capture puts hooks on it; "
                f"{_described(fqn, module)} is a torch.jit.ScriptModule; pass the module it was "
                "scripted or traced from"
            )
        _refuse_lazy(fqn, module)
        _refuse_other_names(fqn, module)
    _warn_of_lost_state(tree)
    _warn_of_hooks(tree)


def _refuse_lazy(fqn: str, module: nn.Module) -> None:
    tensors: Iterable[tuple[str, str, Any]] = (
        *(("parameter", name, value) for name, value in module._parameters.items()),
        *(("buffer", name, value) for name, value in module._buffers.items()),
    )
    for kind, name, value in tensors:
        if is_lazy(value):
            raise PlanError(
                f"{kind} {f'{fqn}.{name}' if fqn else name} has no shape yet (its module is lazy); "
                "run the model once on a sample input before planning it"
            )


def _refuse_other_names(fqn: str, module: nn.Module) -> None:
    if type(module).named_parameters is nn.Module.named_parameters:
        return
    in_tree = [name for name, _ in nn.Module.named_parameters(module)]
    reported = [name for name, _ in module.named_parameters()]
    strange = [name for name in reported if name not in set(in_tree)]
    # Only the root's named_parameters() is used, so only there a missing name matters.
    hidden = [] if fqn else [name for name in in_tree if name not in set(reported)]
    if strange or hidden:
        raise PlanError(
            "parameters must have the names of the module tree, by which checkpoints and plans "
            f"know them; named_parameters() of {_described(fqn, module)} gives "
            f"{some_of(strange) or 'nothing'} where the tree has {some_of(hidden or in_tree)}; "
            "pass the modules without their renaming wrappers. Instead of checkpoint_wrapper call "
            'torch.utils.checkpoint in the forward, or use a policy with recompute="units"'
        )


def _warn_of_lost_state(tree: ModuleTree) -> None:
    hooked, extra = [], []
    for fqn, module in tree.modules.items():
        if torch_compat.has_state_dict_hooks(module):
            hooked.append(_described(fqn, module))
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extra.append(_described(fqn, module))
    for kind, modules in (("state-dict hooks", hooked), ("extra state", extra)):
        if modules:
            warnings.warn(
                "the sharded state_dict() holds parameters and buffers under their own names, and "
                f"nothing of the {kind} of {some_of(modules)}; save and load what they add "
                "yourself",
                stacklevel=5,  # the caller of compile or plan
            )


def _warn_of_hooks(tree: ModuleTree) -> None:
    hooks = [
        f"{_described(fqn, module)}: {getattr(hook, '__qualname__', type(hook).__name__)}"
        for fqn, module in tree.modules.items()
        for hook in torch_compat.module_hooks(module)
    ]
    if hooks:
        warnings.warn(
            "hooks on modules are captured with the forward and the backward: their tensor "
            "operations are in the program, but their other effects in Python (collect, print, "
            f"count) happen only while capturing; {some_of(hooks)}",
            stacklevel=5,  # the caller of compile or plan
        )


def _described(fqn: str, module: nn.Module) -> str:
    return f"{fqn or 'the model'} ({type(module).__name__})"
