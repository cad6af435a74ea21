"""Extrapolate the time and memory of a deep model from two shallow copies of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import nn

from graphshard.errors import GraphshardError
from graphshard.policy.tree import ModuleTree
from graphshard.tune.blocks import Blocks
from graphshard.tune.captures import Captures
from graphshard.tune.simulator import Simulator
from graphshard.tune.space import BudgetRange, Candidate, CandidateGroup, Space, rounded
from graphshard.tune.tuning import CandidateResult

DEPTHS = (4, 6)
"""Blocks of the two smaller models; with fewer, the first and last blocks would dominate."""


LEAST = 10
"""Models with fewer blocks are simulated in full."""


@dataclass
class Extrapolator:
    """Results for a model of `depth` equal blocks, extrapolated from two models of `DEPTHS` blocks.

    Each block after the first few adds the same seconds and, at each point of the step, the same
    bytes, so both are linear in the number of blocks. See README.md.
    """

    small: Simulator
    large: Simulator
    depth: int

    def results(
        self, group: CandidateGroup, stop: Callable[[], bool] = lambda: False
    ) -> list[CandidateResult]:
        """Return the results of all possible candidates of `group`, or those until `stop()`."""
        candidates = self.small.space.candidates(group)
        results = [self.result(candidate) for candidate in candidates if not stop()]
        return [result for result in results if result is not None]

    def result(self, candidate: Candidate) -> CandidateResult | None:
        """Return the result of `candidate` for the full model; None if it is impossible."""
        small, large = self.small.result(candidate), self.large.result(candidate)
        if small is None or large is None:
            return None
        return small.extrapolated(large, self._share)

    def at_budget(self, budgets: BudgetRange, step: int) -> CandidateResult | None:
        """Return the result at `step` of `budgets`; the budget is extrapolated as well."""
        small, large = self.small.at_budget(budgets, step), self.large.at_budget(budgets, step)
        if small is None or large is None:
            return None
        a, b = small.candidate.group.budget, large.candidate.group.budget
        assert a is not None
        assert b is not None
        candidate = budgets.candidate(rounded(round(self.extrapolate(a, b))))
        return replace(small.extrapolated(large, self._share), candidate=candidate)

    @property
    def _share(self) -> float:
        first, second = DEPTHS
        return (self.depth - first) / (second - first)

    def extrapolate(self, small: float, large: float) -> float:
        """Extrapolate a figure of the full model from those of the two smaller ones."""
        return small + self._share * (large - small)

    def in_space(self, space: Space) -> Extrapolator:
        """Return an extrapolator of the same models for candidates of another space."""
        return replace(self, small=self.small.in_space(space), large=self.large.in_space(space))

    def collect_garbage(self) -> None:
        """Collect unreachable objects of recent simulations."""
        self.small.collect_garbage()
        self.large.collect_garbage()

    @property
    def simulated(self) -> int:
        """Number of programs simulated."""
        return self.small.simulated + self.large.simulated


def extrapolator_of(model: nn.Module, captures: Captures, space: Space) -> Extrapolator | None:
    """Return an extrapolator for `model`.

    None if its blocks are fewer than `LEAST` or differ, or its forward needs all of them.
    """
    lists = _equal_lists(model, space.blocks)
    if not lists or len({length for _, length in lists}) > 1 or lists[0][1] < LEAST:
        return None
    simulators = []
    for depth in DEPTHS:
        cut = _cut(model, [fqn for fqn, _ in lists], depth)
        cut_captures = Captures(cut, captures.args, captures.kwargs, captures.device)
        blocks = Blocks(ModuleTree(cut))
        simulator = Simulator(cut, cut_captures, space, blocks.fqns)
        first = Candidate(next(iter(space.groups())))
        try:
            captured = cut_captures.of(simulator.plan(first))
        except (GraphshardError, IndexError, KeyError):
            return None  # its forward needs all blocks
        if len(captured.params) != len(list(cut.parameters())):
            return None
        simulators.append(simulator)
    return Extrapolator(simulators[0], simulators[1], lists[0][1])


def _equal_lists(model: nn.Module, blocks: Blocks) -> list[tuple[str, int]]:
    """Return the FQNs and lengths of the lists that hold all blocks; empty if blocks differ."""
    holders = dict.fromkeys(blocks.tree.parent[fqn] for fqn in blocks.fqns)
    lists = []
    for fqn in holders:
        module = blocks.tree.modules[fqn]
        children = list(module.children())
        plain = type(module) in (nn.ModuleList, nn.Sequential)
        if not fqn or not plain or len({_kind(child) for child in children}) != 1:
            return []
        lists.append((fqn, len(children)))
    inside = [inner for fqn in blocks.fqns for inner in blocks.tree.modules[fqn].modules()]
    shares = len(set(map(id, inside))) < len(inside)
    return [] if shares else lists


def _kind(module: nn.Module) -> Any:
    """Return a key that is equal for equal blocks: classes, and shapes of their tensors."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    return (
        tuple((name, type(inner)) for name, inner in module.named_modules()),
        tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors),
        module.training,
    )


def _cut(model: nn.Module, lists: Sequence[str], depth: int) -> nn.Module:
    """Copy `model` with the first `depth` entries of each of `lists`; parameters are shared."""
    tensors = chain(model.parameters(), model.buffers())
    cut = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for fqn in lists:
        parent, _, name = fqn.rpartition(".")
        entries = list(cut.get_submodule(fqn).children())[:depth]
        kind = type(cut.get_submodule(fqn))
        short = kind(entries) if kind is nn.ModuleList else kind(*entries)
        short.train(cut.get_submodule(fqn).training)
        setattr(cut.get_submodule(parent), name, short)
    return cut
