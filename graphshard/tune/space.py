"""What is tried: candidates, in groups that share all but where gathers are issued."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from graphshard.hardware.hardware import Hardware
from graphshard.policy.base import Policy
from graphshard.policy.by_module import ModulePolicy
from graphshard.policy.strategy import Strategy
from graphshard.tune.auto_policy import AutoPolicy, is_auto
from graphshard.tune.blocks import Blocks

_PLAIN = "fsdp"


@dataclass(frozen=True)
class Sharding:
    """What becomes of parameters after forward; `kept`: of how many last blocks they stay."""

    strategy: Strategy
    reshard: bool | int | None = None
    root: bool = False
    kept: int = 0


@dataclass(frozen=True)
class Group:
    """Candidates that are alike but for `backward_prefetch`, `forward_prefetch` and `schedule`."""

    units: int  # which of `Space.unit_choices`
    sharding: Sharding
    recompute: Any = None
    offload: frozenset[str] | None = None
    budget: int | None = None  # of recompute "budget", in bytes as a policy counts them


@dataclass(frozen=True)
class Candidate:
    """A policy to try: a group and how its gathers are issued."""

    group: Group
    backward: str | None = "pre"
    forward: int = 0
    schedule: str = _PLAIN


RUNGS = 10
"""Budgets tried between recomputing everything and nothing, less one."""


@dataclass(frozen=True)
class Ladder:
    """Candidates alike but for how much they recompute: all that may be, nothing, and between."""

    least: Candidate
    most: Candidate
    words: frozenset[str]  # of `recompute` in between

    def rung(self, budget: int) -> Candidate:
        """The candidate that recomputes as little as makes a step fit in `budget` bytes."""
        group = replace(self.most.group, recompute=self.words, budget=budget)
        return replace(self.most, group=group)


def rounded(budget: int) -> int:
    """`budget` to whole MiB, where that changes little."""
    mib = 1 << 20
    return budget if budget < 256 * mib else budget // mib * mib


@dataclass(frozen=True)
class Space:
    """All that `auto` leaves open for a model of these `blocks` on ranks of `mesh_shape`."""

    auto: AutoPolicy
    blocks: Blocks
    mesh_shape: tuple[int, ...]
    hardware: Hardware

    # -- from candidates to policies -------------------------------------------------------------

    def policy(self, candidate: Candidate, blocks: Sequence[str] | None = None) -> Policy:
        """The explicit policy of `candidate`; `blocks`, those of a model with fewer of them."""
        group, sharding = candidate.group, candidate.group.sharding
        values: dict[str, Any] = {
            "strategy": sharding.strategy,
            "reshard_after_forward": sharding.reshard,
            "reshard_root": sharding.root,
            "recompute": group.recompute,
            "offload": group.offload,
            "memory_budget": group.budget,
            "schedule": candidate.schedule,
        }
        if candidate.schedule == _PLAIN:
            values["backward_prefetch"] = candidate.backward
            values["forward_prefetch"] = candidate.forward
        else:
            values["hardware"] = self.hardware
        values = self._fixed | values
        if not sharding.kept:
            return replace(self.unit_choices[group.units], **values)
        last = (self.blocks.fqns if blocks is None else blocks)[-sharding.kept :]
        entries: dict[type | str, Mapping[str, Any]] = {}
        base: Policy | None = self.unit_choices[group.units]
        if isinstance(base, ModulePolicy):
            entries, base = dict(base.modules), base.base
        for fqn in last:
            entries[fqn] = {**entries.get(fqn, {}), "reshard_after_forward": False}
        return ModulePolicy(entries, base=base, **values)

    @cached_property
    def _fixed(self) -> dict[str, Any]:
        return self.auto.fixed()

    # -- what there is to choose -----------------------------------------------------------------

    def groups(self) -> list[Group]:
        """Every group but those of recompute "budget", the likeliest of each kind first."""
        return [
            Group(units, sharding, recompute, offload)
            for offload in self._offloads
            for recompute in self.recomputes
            for units, choice in enumerate(self.unit_choices)
            for sharding in self._shardings(choice)
            if self._possible(sharding, offload)
        ]

    def candidates(self, group: Group) -> list[Candidate]:
        """The ways to issue the gathers of `group`."""
        schedules = ["fsdp", "overlap"] if is_auto(self.auto.schedule) else [self.auto.schedule]
        found = []
        for schedule in schedules:
            if schedule != _PLAIN:
                found.append(Candidate(group, schedule=schedule))
                continue
            found += [Candidate(group, *p) for p in self._prefetches(group.sharding)]
        return found

    def plain(self, group: Group) -> bool:
        """Whether the root and the last block are treated as they are by default, or as fixed."""
        fixed = not is_auto(self.auto.reshard_root)
        return not group.sharding.kept and (fixed or not group.sharding.root)

    def probes(self, group: Group) -> list[Candidate]:
        """The candidate of `group` that is likely among its best, and soon simulated."""
        candidates = self.candidates(group)
        likely = [c for c in candidates if (c.backward, c.forward) == ("pre", 1)]
        plain = [c for c in candidates if c.schedule == _PLAIN]
        return (likely or plain or candidates)[:1]

    @cached_property
    def unit_choices(self) -> list[Policy]:
        """Policies that choose units."""
        if isinstance(self.auto.units, Policy):
            return [self.auto.units]
        return self.blocks.unit_choices()

    @property
    def tries_budgets(self) -> bool:
        """Whether parts of the activations may be recomputed, as a budget asks."""
        return is_auto(self.auto.recompute)

    def ladder(self, candidate: Candidate) -> Ladder:
        """From `candidate`, which recomputes all it may, to one that recomputes nothing."""
        most = replace(candidate, group=replace(candidate.group, recompute=None))
        return Ladder(candidate, most, frozenset({"budget", *self.blocks.classes}))

    @property
    def everything(self) -> frozenset[str]:
        """The `recompute` that saves the most."""
        return frozenset(self.regions)

    @property
    def regions(self) -> tuple[str, ...]:
        """What is recomputed by itself: classes of blocks, or "units" where there are none."""
        return self.blocks.classes or ("units",)

    @cached_property
    def recomputes(self) -> list[Any]:
        """Values of `recompute` without budgets, the least work first."""
        if not is_auto(self.auto.recompute):
            return [Policy(recompute=self._fixed["recompute"]).recompute]
        whole = self.everything
        found: list[Any] = [None, frozenset({"selective", *self.blocks.classes})]
        found += [frozenset({part}) for part in self.blocks.parts]
        return [*found, whole]

    @cached_property
    def _offloads(self) -> list[frozenset[str] | None]:
        if not is_auto(self.auto.offload):
            given = Policy(offload=self.auto.offload).offload
            return [given]  # type: ignore[list-item]
        if self.hardware.is_host:
            return [None]
        params, activations = frozenset({"params"}), frozenset({"activations"})
        return [None, activations, params, params | activations]

    def _shardings(self, units: Policy) -> Iterator[Sharding]:
        strategies = [s for s in Strategy if self._allowed(s)]
        if not is_auto(self.auto.strategy):
            strategies = [Strategy(self.auto.strategy)]
        chosen = set(units.select(self.blocks.tree))
        last = self.blocks.fqns[-1:] if chosen.issuperset(self.blocks.fqns) else ()
        for strategy in strategies:
            if not strategy.frees_after_forward:
                if self._matches(False if self._is(False) else None, False):
                    yield Sharding(strategy, False if self._is(False) else None)
                continue
            for reshard in self._reshards():
                for root in (False, True):
                    if not self._matches(reshard, root) or (root and reshard is False):
                        continue
                    yield Sharding(strategy, reshard, root)
                    if last and reshard is None and is_auto(self.auto.reshard_after_forward):
                        yield Sharding(strategy, reshard, root, kept=1)

    def _is(self, value: Any) -> bool:
        return self.auto.reshard_after_forward is value

    def _reshards(self) -> list[bool | int | None]:
        """Values of `reshard_after_forward` under a strategy that frees parameters."""
        given = self.auto.reshard_after_forward
        if not is_auto(given):
            return [given]  # type: ignore[list-item]
        node, ranks = self.hardware.gpus_per_node, self.mesh_shape[-1]
        return [None, node] if node < ranks and ranks % node == 0 and node > 1 else [None]

    def _matches(self, reshard: Any, root: bool) -> bool:
        """Whether what is fixed allows these values."""
        auto = self.auto
        if not is_auto(auto.reshard_root) and auto.reshard_root != root:
            return False
        given = auto.reshard_after_forward
        return is_auto(given) or (given is reshard or (given == reshard and type(given) is int))

    def _allowed(self, strategy: Strategy) -> bool:
        if self.mesh_shape == (1,) and strategy is not Strategy.NO_SHARD:
            return False
        if len(self.mesh_shape) == 2:
            return strategy.hybrid or strategy is Strategy.NO_SHARD
        casts = self.auto.mixed_precision and self.auto.mixed_precision.param_dtype
        return not strategy.hybrid and not (casts and strategy is Strategy.SHARD_OPTIMIZER)

    def _possible(self, sharding: Sharding, offload: frozenset[str] | None) -> bool:
        offloaded = offload is not None and "params" in offload
        return not (offloaded and sharding.strategy is Strategy.SHARD_OPTIMIZER)

    def _prefetches(self, sharding: Sharding) -> list[tuple[str | None, int]]:
        """Where gathers may be issued; one way only in a phase in which there are none."""
        auto = self.auto
        again = sharding.strategy.frees_after_forward and sharding.reshard is not False
        backward: Sequence[Any] = ("pre", "post", None) if again else ("pre",)
        forward: Sequence[Any] = (0,) if sharding.strategy is Strategy.NO_SHARD else (0, 1, 2)
        if not is_auto(auto.backward_prefetch):
            backward = (auto.backward_prefetch,)
        if not is_auto(auto.forward_prefetch):
            forward = (auto.forward_prefetch,)
        return list(product(backward, forward))
