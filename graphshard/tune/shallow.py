"""The same model with fewer of its equal blocks: much smaller, and each block costs the same."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import nn

from graphshard.errors import GraphshardError
from graphshard.policy.tree import ModuleTree
from graphshard.tune.blocks import Blocks
from graphshard.tune.captures import Captures
from graphshard.tune.simulator import Simulator
from graphshard.tune.space import Candidate, Group, Ladder, Space, rounded
from graphshard.tune.tuning import Outcome

DEPTHS = (4, 6)
"""Blocks of the two smaller models; with fewer, the blocks at the two ends would be most of it."""


LEAST = 10
"""Models of fewer blocks are simulated whole."""


@dataclass
class Shallow:
    """Two models of `DEPTHS` blocks, and the outcomes that follow for one of `depth`.

    In a step of equal blocks each one after the first few adds the same time, whether compute or
    communication bounds it, and at each point of the step the same bytes. So both are lines in the
    number of blocks, drawn through two of them. (The peak, a maximum of such lines, is no less than
    the one drawn.)
    """

    few: Simulator
    more: Simulator
    depth: int

    def outcomes(self, group: Group) -> list[Outcome]:
        """Those of all candidates of `group` that can be had."""
        found = map(self.outcome, self.few.space.candidates(group))
        return [outcome for outcome in found if outcome is not None]

    def outcome(self, candidate: Candidate) -> Outcome | None:
        """That of `candidate` for the whole model."""
        few, more = self.few.outcome(candidate), self.more.outcome(candidate)
        return None if few is None or more is None else self.drawn_out(few, more)

    def rung(self, ladder: Ladder, step: int) -> Outcome | None:
        """That of the rung `step` of `ladder`, the bytes of which are drawn out as well."""
        few, more = self.few.rung(ladder, step), self.more.rung(ladder, step)
        return None if few is None or more is None else self._rung(ladder, few, more)

    def _rung(self, ladder: Ladder, few: Outcome, more: Outcome) -> Outcome:
        a, b = few.candidate.group.budget, more.candidate.group.budget
        assert a is not None
        assert b is not None
        budget = round(a + self._share * (b - a))
        return replace(self.drawn_out(few, more), candidate=ladder.rung(rounded(budget)))

    @property
    def _share(self) -> float:
        first, second = DEPTHS
        return (self.depth - first) / (second - first)

    def along(self, few: float, more: float) -> float:
        """The figure of the whole model, from those of the two smaller ones."""
        return few + self._share * (more - few)

    def drawn_out(self, few: Outcome, more: Outcome) -> Outcome:
        """The whole model's outcome, from those of the two smaller ones."""
        return few.drawn_out(more, self._share)

    def within(self, space: Space) -> Shallow:
        """The same for candidates of another space."""
        return replace(self, few=self.few.within(space), more=self.more.within(space))

    def sweep(self) -> None:
        """Collect what is not needed any more."""
        self.few.sweep()
        self.more.sweep()

    @property
    def simulated(self) -> int:
        """Programs simulated."""
        return self.few.simulated + self.more.simulated


def shallow_of(model: nn.Module, captures: Captures, space: Space) -> Shallow | None:
    """The smaller models of `model`; None if its blocks are few or not alike, or it needs all."""
    lists = _equal_lists(model, space.blocks)
    if not lists or len({length for _, length in lists}) > 1 or lists[0][1] < LEAST:
        return None
    simulators = []
    for depth in DEPTHS:
        cut = _cut(model, [fqn for fqn, _ in lists], depth)
        own = Captures(cut, captures.args, captures.kwargs, captures.device)
        blocks = Blocks(ModuleTree(cut))
        simulator = Simulator(cut, own, space, blocks.fqns)
        first = Candidate(next(iter(space.groups())))
        try:
            captured = own.of(simulator.plan(first))
        except (GraphshardError, IndexError, KeyError):
            return None  # its forward counts on all blocks
        if len(captured.params) != len(list(cut.parameters())):
            return None
        simulators.append(simulator)
    return Shallow(simulators[0], simulators[1], lists[0][1])


def _equal_lists(model: nn.Module, blocks: Blocks) -> list[tuple[str, int]]:
    """The lists that hold all blocks, by name, and their lengths; none if blocks are not alike."""
    holders = dict.fromkeys(blocks.tree.parent[fqn] for fqn in blocks.fqns)
    found = []
    for fqn in holders:
        module = blocks.tree.modules[fqn]
        children = list(module.children())
        plain = type(module) in (nn.ModuleList, nn.Sequential)
        if not fqn or not plain or len({_kind(child) for child in children}) != 1:
            return []
        found.append((fqn, len(children)))
    inside = [inner for fqn in blocks.fqns for inner in blocks.tree.modules[fqn].modules()]
    shares = len(set(map(id, inside))) < len(inside)
    return [] if shares else found


def _kind(module: nn.Module) -> Any:
    """What two equal blocks agree in: classes, and the shapes of parameters and buffers."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    return (
        tuple((name, type(inner)) for name, inner in module.named_modules()),
        tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors),
        module.training,
    )


def _cut(model: nn.Module, lists: Sequence[str], depth: int) -> nn.Module:
    """`model` with the first `depth` entries of each of `lists`; parameters are the same ones."""
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
