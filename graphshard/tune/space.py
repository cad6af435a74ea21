"""The search space: candidate policies, in groups that differ only in where gathers are issued.

Units are chosen by the blocks of a model, by large parts of them, and by size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from torch import nn

from graphshard.cost.estimate import Estimate
from graphshard.hardware.hardware import Hardware
from graphshard.policy.base import Policy
from graphshard.policy.by_module import ModulePolicy
from graphshard.policy.strategy import Strategy
from graphshard.policy.tree import ModuleTree
from graphshard.policy.units import BlockPolicy, SizePolicy, is_container
from graphshard.tune.request import PolicyRequest, is_auto

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
            if parent is None or not self.numel[fqn] or is_container(module):
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
                if heavy and any(module.children()) and not is_container(module):
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


PLAIN = "fsdp"
"""The schedule that issues gathers in FSDP's order."""


@dataclass(frozen=True)
class Sharding:
    """A way to shard and free parameters; `reshard` is `reshard_after_forward`."""

    strategy: Strategy
    reshard: bool | int | None = None
    reshard_root: bool = False


@dataclass(frozen=True)
class CandidateGroup:
    """Candidates that differ only in `backward_prefetch`, `forward_prefetch` and `schedule`."""

    units: int  # index in `Space.unit_choices`
    sharding: Sharding
    recompute: Any = None
    offload: frozenset[str] | None = None
    budget: int | None = None  # bytes of `Policy.memory_budget`, for recompute "budget"


@dataclass(frozen=True)
class Candidate:
    """A policy to try: a group, and where its gathers are issued."""

    group: CandidateGroup
    backward: str | None = "pre"
    forward: int = 0
    schedule: str = PLAIN


def rounded(budget: int) -> int:
    """Round `budget` bytes down to whole MiB if it is 256 MiB or more."""
    mib = 1 << 20
    return budget if budget < 256 * mib else budget // mib * mib


@dataclass(frozen=True)
class Space:
    """All policies that `auto` allows for a model of these `blocks` on a mesh of `mesh_shape`."""

    auto: PolicyRequest
    blocks: Blocks
    mesh_shape: tuple[int, ...]
    hardware: Hardware

    # -- memory ----------------------------------------------------------------------------------

    @cached_property
    def budget(self) -> int:
        """The bytes that torch may reserve: what was asked for, or what a device leaves for it.

        A device has a communicator for each dim of the mesh with several ranks.
        """
        return self.auto.budget(self.hardware, sum(size > 1 for size in self.mesh_shape))

    def further_bytes(self, estimate: Estimate) -> int:
        """Bytes beside reserved ones that `budget` leaves no room for: of further communicators.

        Without a cache (`allocator="none"`) those of cuBLAS's workspaces, too. 0 for a budget that
        was asked for, which is of what torch reserves alone.
        """
        if self.auto.memory_budget is not None:
            return 0
        beside = estimate.device_bytes - estimate.reserved_bytes
        return max(0, beside - (estimate.hardware.memory_bytes - self.budget))

    # -- from candidates to policies -------------------------------------------------------------

    def policy(self, candidate: Candidate) -> Policy:
        """Return the explicit policy of `candidate`."""
        group, sharding = candidate.group, candidate.group.sharding
        values: dict[str, Any] = {
            "strategy": sharding.strategy,
            "reshard_after_forward": sharding.reshard,
            "reshard_root": sharding.reshard_root,
            "recompute": group.recompute,
            "offload": group.offload,
            "memory_budget": group.budget,
            "schedule": candidate.schedule,
        }
        if candidate.schedule == PLAIN:
            values["backward_prefetch"] = candidate.backward
            values["forward_prefetch"] = candidate.forward
        else:
            values["hardware"] = self.hardware
        values = self._fixed | values
        return replace(self.unit_choices[group.units], **values)

    @cached_property
    def _fixed(self) -> dict[str, Any]:
        return self.auto.fixed()

    # -- the choices -----------------------------------------------------------------------------

    def groups(self) -> list[CandidateGroup]:
        """Return every group without budgets, the likeliest first."""
        return [
            CandidateGroup(units, sharding, recompute, offload)
            for offload in self._offloads
            for recompute in self.recomputes
            for units, choice in enumerate(self.unit_choices)
            for sharding in self._shardings()
            if offload is None
            or "params" not in offload
            or sharding.strategy is not Strategy.SHARD_OPTIMIZER
        ]

    def candidates(self, group: CandidateGroup) -> list[Candidate]:
        """Return the candidates of `group`: the ways to issue its gathers."""
        candidates = []
        for schedule in self.schedules:
            if schedule != PLAIN:
                candidates.append(Candidate(group, schedule=schedule))
                continue
            candidates += [Candidate(group, *p) for p in self._prefetches(group.sharding)]
        return candidates

    @property
    def schedules(self) -> tuple[str, ...]:
        """The values of `schedule` that may be chosen; "overlap" decides on prefetching itself."""
        if not is_auto(self.auto.schedule):
            return (self.auto.schedule,)
        fixed = (self.auto.backward_prefetch, self.auto.forward_prefetch)
        may_overlap = all(map(is_auto, fixed)) and not self.auto.gather_unused
        return (PLAIN, "overlap") if may_overlap else (PLAIN,)

    def is_default(self, group: CandidateGroup) -> bool:
        """Whether the root has its default, or fixed, resharding."""
        return not is_auto(self.auto.reshard_root) or not group.sharding.reshard_root

    def likeliest(self, group: CandidateGroup) -> Candidate:
        """Return a candidate of `group` that is likely among its best."""
        candidates = self.candidates(group)
        likely = [c for c in candidates if (c.backward, c.forward) == ("pre", 1)]
        plain = [c for c in candidates if c.schedule == PLAIN]
        return (likely or plain or candidates)[0]

    def plain(self, group: CandidateGroup) -> list[Candidate]:
        """The candidates of `group` in FSDP's order: "pre" first, smaller distances first."""
        return [c for c in self.candidates(group) if c.schedule == PLAIN]

    def fastest(self, group: CandidateGroup) -> Candidate:
        """The candidate of `group` with the most prefetching, in FSDP's order if allowed."""
        plain = self.plain(group) or self.candidates(group)
        return [candidate for candidate in plain if candidate.backward == plain[0].backward][-1]

    def complexity(self, candidate: Candidate) -> tuple[bool | int, ...]:
        """A key that is smaller for simpler policies; it decides between those as fast."""
        group, sharding = candidate.group, candidate.group.sharding
        return (
            group.budget is not None,
            group.offload is not None,
            group.recompute is not None,
            candidate.schedule != PLAIN,
            sharding.reshard_root or sharding.reshard is not None,
        )

    @cached_property
    def unit_choices(self) -> list[Policy]:
        """The policies that choose the units."""
        if isinstance(self.auto.units, Policy):
            return [self.auto.units]
        return self.blocks.unit_choices()

    @property
    def tries_budgets(self) -> bool:
        """Whether recompute "budget" may be tried."""
        return is_auto(self.auto.recompute)

    def with_budgets(self, group: CandidateGroup) -> CandidateGroup:
        """Return `group` with just enough recomputed to fit in a budget, which is still to set."""
        return replace(group, recompute=frozenset({"budget", *self.blocks.classes}), budget=None)

    @property
    def recompute_all(self) -> frozenset[str]:
        """The value of `recompute` that saves the most memory: blocks, or units without these."""
        return frozenset(self.blocks.classes or ("units",))

    @cached_property
    def recomputes(self) -> list[Any]:
        """Values of `recompute` without budgets, the least work first."""
        if not is_auto(self.auto.recompute):
            return [Policy(recompute=self._fixed["recompute"]).recompute]
        selective = frozenset({"selective", *self.blocks.classes})
        parts = [frozenset({part}) for part in self.blocks.parts]
        return [None, selective, *parts, self.recompute_all]

    @cached_property
    def _offloads(self) -> list[frozenset[str] | None]:
        if not is_auto(self.auto.offload):
            offload = Policy(offload=self.auto.offload).offload
            return [offload]  # type: ignore[list-item]
        if self.hardware.is_host:
            return [None]
        params, activations = frozenset({"params"}), frozenset({"activations"})
        return [None, activations, params, params | activations]

    def _shardings(self) -> Iterator[Sharding]:
        strategies = [s for s in Strategy if self._allowed(s)]
        if not is_auto(self.auto.strategy):
            strategies = [Strategy(self.auto.strategy)]
        for strategy in strategies:
            if not strategy.frees_after_forward:
                keeps = False if self.auto.reshard_after_forward is False else None
                if self._matches(keeps, False):
                    yield Sharding(strategy, keeps)
                continue
            for reshard in self._reshards():
                for root in (False, True):
                    if not self._matches(reshard, root) or (root and reshard is False):
                        continue
                    yield Sharding(strategy, reshard, root)

    def _reshards(self) -> list[bool | int | None]:
        """Values of `reshard_after_forward` under a strategy that frees parameters."""
        reshard = self.auto.reshard_after_forward
        if not is_auto(reshard):
            return [reshard]  # type: ignore[list-item]
        node, ranks = self.hardware.gpus_per_node, self.mesh_shape[-1]
        return [None, node] if node < ranks and ranks % node == 0 and node > 1 else [None]

    def _matches(self, reshard: Any, root: bool) -> bool:
        auto = self.auto
        if not is_auto(auto.reshard_root) and auto.reshard_root != root:
            return False
        fixed = auto.reshard_after_forward
        return is_auto(fixed) or (fixed is reshard or (fixed == reshard and type(fixed) is int))

    def _allowed(self, strategy: Strategy) -> bool:
        if self.mesh_shape == (1,) and strategy is not Strategy.NO_SHARD:
            return False
        if len(self.mesh_shape) == 2:
            return strategy.hybrid or strategy is Strategy.NO_SHARD
        casts = self.auto.mixed_precision and self.auto.mixed_precision.param_dtype
        return not strategy.hybrid and not (casts and strategy is Strategy.SHARD_OPTIMIZER)

    def _prefetches(self, sharding: Sharding) -> list[tuple[str | None, int]]:
        """Return the prefetch options; only one in a phase without gathers."""
        auto = self.auto
        regathers = sharding.strategy.frees_after_forward and sharding.reshard is not False
        backward: Sequence[Any] = ("pre", "post", None) if regathers else ("pre",)
        forward: Sequence[Any] = (0,) if sharding.strategy is Strategy.NO_SHARD else (0, 1, 2)
        if not is_auto(auto.backward_prefetch):
            backward = (auto.backward_prefetch,)
        if not is_auto(auto.forward_prefetch):
            forward = (auto.forward_prefetch,)
        return list(product(backward, forward))
