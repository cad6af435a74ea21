"""The blocks of a model that are alike before it runs, and values in the form to compare."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.capture.guards import CONTAINERS, frozen
from graphshard.capture.reads import OF_ANY_MODULE
from graphshard.capture.structure import Same
from graphshard.policy.precision import Precisions
from graphshard.torch_private.compat import SYMBOLIC, size_expression

FEWEST = 4
"""The calls of a kind from which on some are left out: two are traced in any case."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_HIDING = (MemberDescriptorType, type(lru_cache(len)))

_WEIGHTS = ("_parameters", "_buffers")


@dataclass(frozen=True)
class Form:
    """A tensor but for its values; `sizes` are its shape and strides in a form to compare."""

    sizes: tuple[Hashable, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    shape: tuple[Any, ...] = field(compare=False)
    stride: tuple[Any, ...] = field(compare=False)

    @staticmethod
    def of(tensor: Tensor) -> Form:
        """That of `tensor`."""
        shape: tuple[Any, ...] = tuple(tensor.shape)
        stride: tuple[Any, ...] = tensor.stride()
        sizes = (size_expression(s) if isinstance(s, SYMBOLIC) else s for s in (*shape, *stride))
        device, grad = tensor.device, tensor.requires_grad
        return Form(tuple(sizes), tensor.dtype, device, grad, shape, stride)

    def empty(self) -> Tensor:
        """A tensor of this form, that requires no gradient."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Block:
    """A module with siblings of its `likeness`; `modules` are it and those inside, by path."""

    fqn: str
    module: nn.Module
    likeness: Hashable
    modules: dict[str, nn.Module]

    def weights(self) -> list[tuple[dict[str, Any], str]]:
        """The tables of its modules and the names there that hold a parameter or buffer."""
        return [
            (vars(module)[table], name)
            for module in self.modules.values()
            for table in _WEIGHTS
            for name, tensor in vars(module)[table].items()
            if tensor is not None
        ]

    def attributes(self) -> Any:
        """What its modules hold besides parameters, buffers, modules and hooks, to compare."""
        return [
            (path, name, exact(value))
            for path, module in self.modules.items()
            for name, value in vars(module).items()
            if name not in OF_ANY_MODULE
        ]

    def hooks(self) -> tuple[Any, ...]:
        """How many hooks the modules inside have, and whether a forward was put over theirs."""
        inside = [vars(module) for path, module in self.modules.items() if path]
        return tuple((*(len(each[name]) for name in _HOOKS), "forward" in each) for each in inside)


def exact(value: Any) -> Any:
    """`value` in a form to compare: by all that it holds, or else by identity."""
    kind = type(value)
    if kind is partial:
        return kind, exact((value.func, value.args, value.keywords))
    if kind in (list, tuple, set, dict):
        items = (*value, *value.values()) if kind is dict else value
        return kind, len(value), (frozenset if kind is set else tuple)(map(exact, items))
    return Same(value) if isinstance(value, CONTAINERS) else frozen(value)


def alike_blocks(model: nn.Module, precisions: Precisions | None) -> Iterator[Block]:
    """The outermost modules with enough siblings of their likeness."""
    names = {id(module): fqn for fqn, module in model.named_modules()}
    reached = [("", model)]
    for fqn, module in reached:
        children = [
            (f"{fqn}.{name}" if fqn else name, each) for name, each in module.named_children()
        ]
        by_likeness: dict[Hashable, list[tuple[str, nn.Module]]] = {}
        for path, child in children:
            likeness = _likeness(path, child, precisions) if len(children) >= FEWEST else None
            by_likeness.setdefault(likeness, []).append((path, child))
        for likeness, alike in by_likeness.items():
            if likeness is None or len(alike) < FEWEST:
                reached += alike
            else:
                for path, child in alike:
                    modules = dict(child.named_modules())
                    # One that another block holds, too, has the name that it has there.
                    if all(f"{names[id(m)]}.".startswith(f"{path}.") for m in modules.values()):
                        yield Block(path, child, likeness, modules)


def _likeness(fqn: str, module: nn.Module, precisions: Precisions | None) -> Hashable:
    """What two modules share whose calls may be alike; None if no other's may."""
    modules = dict(module.named_modules(remove_duplicate=False))
    inside = [vars(each) for path, each in modules.items() if path]
    if "forward" in vars(module) or any(
        "forward" in attributes or any(attributes[name] for name in _HOOKS) for attributes in inside
    ):
        return None
    if len(modules) == 1 or not any(True for _ in module.parameters()):
        return None
    if any(_hides_state(type(each).__mro__) for each in modules.values()):
        return None
    return tuple(
        (
            path,
            type(each),
            each.training,
            _of_weights(each._parameters),
            _of_weights(each._buffers),
            precisions and _precision(f"{fqn}.{path}" if path else fqn, precisions),
        )
        for path, each in modules.items()
    )


@cache
def _hides_state(bases: tuple[type, ...]) -> bool:
    """Whether modules of a class of these bases have state past `vars`: slots, cached methods."""
    members = (value for base in bases for value in vars(base).values())
    return any(isinstance(value, _HIDING) for value in members)


def _precision(fqn: str, precisions: Precisions) -> Hashable:
    return repr((precisions.units.get(fqn), precisions.around(fqn)))


def _of_weights(table: dict[str, Any]) -> Hashable:
    return tuple(
        (name, None if tensor is None else (Form.of(tensor), frozen(dict(vars(tensor)))))
        for name, tensor in table.items()
    )
