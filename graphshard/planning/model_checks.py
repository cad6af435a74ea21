"""Which models can be sharded: what is refused, and what is warned of because it would get lost."""

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
        PlanError: it is something else, a class of modules among it.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise PlanError(
            f"the model must be an nn.Module; got the class {model.__name__}; make an instance of "
            "it first (on the meta device, if it is large)"
        )
    if not isinstance(model, nn.Module):
        raise PlanError(f"the model must be an nn.Module; got {type(model).__name__}")


def check_model(tree: ModuleTree) -> None:
    """Refuse a model that cannot be sharded, and warn of what of its state is left out.

    Raises:
        PlanError: a module is a ScriptModule, has parameters or buffers without a shape, or gives
            its parameters other names than the module tree does.
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
    own: Iterable[tuple[str, str, Any]] = (
        *(("parameter", name, value) for name, value in module._parameters.items()),
        *(("buffer", name, value) for name, value in module._buffers.items()),
    )
    for kind, name, value in own:
        if is_lazy(value):
            raise PlanError(
                f"{kind} {f'{fqn}.{name}' if fqn else name} has no shape yet (its module is lazy); "
                "run the model once on a sample input before planning it"
            )


def _refuse_other_names(fqn: str, module: nn.Module) -> None:
    if type(module).named_parameters is nn.Module.named_parameters:
        return
    in_tree = [name for name, _ in nn.Module.named_parameters(module)]
    given = [name for name, _ in module.named_parameters()]
    strange = [name for name in given if name not in set(in_tree)]
    # A root that leaves names out differs from what is planned; below it nobody asks.
    hidden = [] if fqn else [name for name in in_tree if name not in set(given)]
    if strange or hidden:
        raise PlanError(
            "parameters must have the names of the module tree, by which checkpoints and plans "
            f"know them; named_parameters() of {_described(fqn, module)} gives "
            f"{some_of(strange) or 'nothing'} where the tree has {some_of(hidden or in_tree)}; "
            "pass the modules without what renames them. Instead of checkpoint_wrapper call "
            'torch.utils.checkpoint in the forward, or use a policy with recompute="units"'
        )


def _warn_of_lost_state(tree: ModuleTree) -> None:
    hooked, extra = [], []
    for fqn, module in tree.modules.items():
        if torch_compat.has_state_dict_hooks(module):
            hooked.append(_described(fqn, module))
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extra.append(_described(fqn, module))
    for what, where in (("state-dict hooks", hooked), ("extra state", extra)):
        if where:
            warnings.warn(
                f"the sharded state_dict() holds parameters and buffers under their own names, and "
                f"nothing of the {what} of {some_of(where)}; save and load what they add yourself",
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
            "hooks on modules are captured with the forward and the backward: what they compute "
            "is in the program, but what else they do in Python (collect, print, count) happens "
            f"only while capturing; {some_of(hooks)}",
            stacklevel=5,  # the caller of compile or plan
        )


def _described(fqn: str, module: nn.Module) -> str:
    return f"{fqn or 'the model'} ({type(module).__name__})"
