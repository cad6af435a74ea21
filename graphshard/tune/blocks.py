"""The blocks of a model (its repeated modules), and policies that choose its units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from graphshard.policy.base import Policy
from graphshard.policy.by_module import ModulePolicy
from graphshard.policy.tree import ModuleTree
from graphshard.policy.units import BlockPolicy, SizePolicy

_HEAVY = 0.1
"""A child with at least this share of its block's parameters may be a unit."""


_LARGE = 0.25
"""A module outside all blocks with at least this share of a block's parameters may be a unit."""


_SIZES = 3
"""The most thresholds of `SizePolicy` that are tried."""


@dataclass(frozen=True)
class Blocks:
    """The repeated modules of `tree`: children of lists or sequences, at least two of a class."""

    tree: ModuleTree

    @cached_property
    def fqns(self) -> tuple[str, ...]:
        """The outermost repeated modules, in module order."""
        named = set(getattr(self.tree.modules[""], "_no_split_modules", None) or ())
        count = Counter(type(module).__name__ for module in self.tree.modules.values())
        blocks: list[str] = []
        for fqn, module in self.tree.modules.items():
            parent = self.tree.parent.get(fqn)
            if parent is None or not self.numel[fqn] or _is_container(module):
                continue
            listed = isinstance(self.tree.modules[parent], (nn.ModuleList, nn.Sequential))
            repeated = count[type(module).__name__] > 1 and any(module.children())
            if not (listed and repeated) and type(module).__name__ not in named:
                continue
            if not any(self.tree.is_below(fqn, outer) for outer in blocks):
                blocks.append(fqn)
        return tuple(blocks)

    @cached_property
    def numel(self) -> dict[str, int]:
        """Elements of the parameters in each module."""
        return self.tree.numel_below()

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of the blocks, sorted."""
        return tuple(sorted({self._class(fqn) for fqn in self.fqns}))

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Names of classes of the blocks' large children that have children, sorted."""
        classes = set()
        for fqn in self.fqns:
            for child in [inner for inner, parent in self.tree.parent.items() if parent == fqn]:
                module = self.tree.modules[child]
                heavy = self.numel[child] >= _HEAVY * self.numel[fqn]
                if heavy and any(module.children()) and not _is_container(module):
                    classes.add(self._class(child))
        return tuple(sorted(classes - set(self.classes)))

    @cached_property
    def large(self) -> tuple[str, ...]:
        """Leaf modules outside all blocks that are large enough to be units, in module order."""
        if not self.fqns:
            return ()
        least = _LARGE * max(self.numel[fqn] for fqn in self.fqns)
        homes = {entry.home for entry in self.tree.params}
        return tuple(
            fqn
            for fqn, module in self.tree.modules.items()
            if fqn and fqn in homes and not any(module.children()) and self.numel[fqn] >= least
            if not any(self.tree.is_below(fqn, block) for block in self.fqns)
        )

    def _class(self, fqn: str) -> str:
        return type(self.tree.modules[fqn]).__name__

    def unit_choices(self) -> list[Policy]:
        """Policies that each choose different units, the likeliest first; at least one."""
        choices: list[Policy] = list(self._by_class())
        biggest = max((self.numel[fqn] for fqn in self.fqns), default=self.numel[""])
        sizes = sorted({n for n in self.numel.values() if 0 < n <= biggest}, reverse=True)
        choices += [SizePolicy(min_num_params=n) for n in sizes]
        chosen: dict[tuple[str, ...], Policy] = {}
        by_size = 0
        for policy in choices:
            units = tuple(policy.select(self.tree))
            if units in chosen or (isinstance(policy, SizePolicy) and by_size == _SIZES):
                continue
            by_size += isinstance(policy, SizePolicy)
            chosen[units] = policy
        return list(chosen.values())

    def _by_class(self) -> Iterator[Policy]:
        if not self.fqns:
            return
        blocks = BlockPolicy(self.classes)
        yield blocks
        large: dict[type | str, dict[str, object]] = {fqn: {} for fqn in self.large}
        if large:
            yield ModulePolicy(large, base=blocks)
        if self.parts:
            halves = BlockPolicy(self.parts)
            chosen = halves.select(self.tree)
            inside = sum(
                self.numel[fqn]
                for fqn in chosen
                if not any(other != fqn and self.tree.is_below(fqn, other) for other in chosen)
            )
            whole = sum(self.numel[fqn] for fqn in self.fqns)
            yield halves if inside >= 0.95 * whole else BlockPolicy((*self.classes, *self.parts))


def _is_container(module: nn.Module) -> bool:
    """Whether `module` only holds other modules and never runs itself."""
    return (
        isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and type(module).forward is nn.Module.forward
    )
