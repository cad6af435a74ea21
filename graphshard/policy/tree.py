"""A model's modules and parameters as one tree, shared modules and tied parameters included.

Sharing makes the module hierarchy a graph. The tree over it puts a module or parameter that is
reached by several paths below the lowest module that lies on all of them (its immediate dominator).
For a model that shares nothing this is the module hierarchy itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

from torch import nn


@dataclass(frozen=True)
class TreeParam:
    """A parameter with all its names, in module order.

    holders: the modules that have it as an attribute. home: the FQN of the lowest module above all
    holders.
    """

    names: tuple[str, ...]
    param: nn.Parameter
    home: str
    holders: tuple[nn.Module, ...]


class ModuleTree:
    """The modules of `model` by their first FQNs, and its parameters, each object once.

    Attributes:
        modules: every module by its first FQN, in module order; "" is `model` itself.
        parent: FQN of the lowest module above all uses of a module; the root has none.
        params: every parameter that is not ignored, in module order of its first name.
        ignored: the other parameters, given by their `id`s, in the same order.
    """

    def __init__(self, model: nn.Module, ignored: Collection[int] = ()) -> None:
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self._first_name = {id(module): fqn for fqn, module in self.modules.items()}
        self.parent: dict[str, str] = {}
        self._depth = {"": 0}
        self._link(model)
        params = self._collect(model)
        self.params = tuple(entry for entry in params if id(entry.param) not in ignored)
        self.ignored = tuple(entry for entry in params if id(entry.param) in ignored)

    def _link(self, model: nn.Module) -> None:
        holders: dict[str, list[str]] = {}
        for fqn, module in self.modules.items():
            for child in module.children():
                holders.setdefault(self._first_name[id(child)], []).append(fqn)
        for fqn in self._holders_first(model):
            if fqn:
                self.parent[fqn] = self._above_all(holders[fqn])
                self._depth[fqn] = self._depth[self.parent[fqn]] + 1

    def _holders_first(self, model: nn.Module) -> Iterable[str]:
        """Yield every FQN after all modules that hold it: reversed depth-first post-order."""
        order: list[str] = []
        seen = {id(model)}
        stack = [(model, model.children())]
        while stack:
            module, children = stack[-1]
            child = next((c for c in children if id(c) not in seen), None)
            if child is None:
                order.append(self._first_name[id(module)])
                stack.pop()
            else:
                seen.add(id(child))
                stack.append((child, child.children()))
        return reversed(order)

    def _above_all(self, fqns: Iterable[str]) -> str:
        """The FQN of the lowest module that is each of `fqns` or lies above it."""

        def above_both(a: str, b: str) -> str:
            while a != b:
                if self._depth[a] >= self._depth[b]:
                    a = self.parent[a]
                else:
                    b = self.parent[b]
            return a

        return reduce(above_both, fqns)

    def _collect(self, model: nn.Module) -> tuple[TreeParam, ...]:
        params: dict[int, nn.Parameter] = {}
        names: dict[int, list[str]] = {}
        holders: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            holder = self._first_name[id(module)]
            for name, param in nn.Module.named_parameters(
                module, recurse=False, remove_duplicate=False
            ):
                key = id(param)
                params.setdefault(key, param)
                names.setdefault(key, []).append(f"{path}.{name}" if path else name)
                holders.setdefault(key, []).append(holder)
        return tuple(
            TreeParam(
                tuple(names[key]),
                param,
                self._above_all(holders[key]),
                tuple(self.modules[holder] for holder in holders[key]),
            )
            for key, param in params.items()
        )

    def units_around(self, units: Iterable[str]) -> Mapping[str, str]:
        """Map each module to the innermost unit that is or contains it; the root is a unit too."""
        chosen = {"", *units}
        around: dict[str, str] = {}
        for fqn in self.modules:  # a parent comes before its children
            around[fqn] = fqn if fqn in chosen else around[self.parent[fqn]]
        return around

    def is_below(self, inner: str, outer: str) -> bool:
        """Whether the module `inner` is `outer` or lies below it."""
        while self._depth[inner] > self._depth[outer]:
            inner = self.parent[inner]
        return inner == outer

    def numel_below(self) -> dict[str, int]:
        """Number of parameter elements in each module and below it, by FQN; each counts once."""
        numel = dict.fromkeys(self.modules, 0)
        for entry in self.params:
            numel[entry.home] += entry.param.numel()
        for fqn in reversed(self.modules):  # a parent comes before its children in module order
            if fqn:
                numel[self.parent[fqn]] += numel[fqn]
        return numel
