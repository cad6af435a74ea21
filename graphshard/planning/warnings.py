"""Warnings about a plan: each names the cause and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median_high

from graphshard.format import human_bytes, some_of
from graphshard.planning.options import UnitOptions
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.strategy import Strategy

LARGE_UNIT_FACTOR = 8
"""Warn of units with more than this many times the elements of the median unit.

The root of a decoder (its embeddings) normally has two to six times as many under a BlockPolicy.
LLaMA-7B under SizePolicy(1e8) has a remainder unit with sixteen times as many, which doubles the
peak.
"""


_WHOLE = (Strategy.NO_SHARD, Strategy.SHARD_OPTIMIZER)  # gathers need no new memory


def plan_warnings(plan: ShardingPlan) -> tuple[str, ...]:
    """The warnings about a plan before capture, one sentence each."""
    return (
        *_no_units(plan),
        *_large_units(plan),
        *_empty_units(plan),
    )


def reshard_warnings(requested: Mapping[str, UnitOptions]) -> Iterator[str]:
    """Warn of units whose options reshard them to groups of one rank."""
    units = [unit or "(root)" for unit, options in requested.items() if options.reshard_ranks == 1]
    if units:
        yield (
            f"{subject_of('unit', units)} kept unsharded between forward and backward, as a group "
            "of one rank keeps whole parameters; say reshard_after_forward=False"
        )


def _no_units(plan: ShardingPlan) -> Iterator[str]:
    # A model with all its parameters in one module cannot be split.
    holders = {name.rpartition(".")[0] for name in plan.units[0].params}
    if len(plan.units) == 1 and len(holders) > 1:
        yield (
            "the policy makes no unit besides the root, so all parameters are gathered at once and "
            "no communication overlaps compute; lower min_num_params or name the model's blocks in "
            "a BlockPolicy"
        )


def _large_units(plan: ShardingPlan) -> Iterator[str]:
    """Warn of units far larger than the median unit.

    The root is compared too, but the median leaves it out, as it holds the remaining parameters.
    """
    sizes = [unit.numel for unit in plan.units if unit.fqn and unit.numel]
    if not sizes:
        return
    median = median_high(sizes)
    bound = LARGE_UNIT_FACTOR * median
    for unit in plan.units:
        if unit.numel <= bound or unit.options.strategy in _WHOLE:
            continue
        largest = max(unit.layouts, key=lambda layout: layout.numel)
        size = (
            f"unit {unit.fqn or '(root)'} is {unit.numel / median:.0f} times the median unit and "
            f"takes {human_bytes(unit.unsharded_bytes)} while gathered"
        )
        if unit.numel - largest.numel > bound:
            yield f"{size}; make units of the modules in it (a finer policy, or a smaller minimum)"
        elif not unit.fqn and _kept_between_phases(plan):
            yield (
                f"{size}, nearly all of it {largest.fqn}; set reshard_root=True to free between "
                "forward and backward what both read"
            )


def _kept_between_phases(plan: ShardingPlan) -> bool:
    root = plan.units[0].options
    return root.strategy.frees_after_forward and not root.reshard


def _empty_units(plan: ShardingPlan) -> Iterator[str]:
    empty = [unit.fqn for unit in plan.units if unit.fqn and not unit.layouts]
    if empty:
        yield (
            f"{subject_of('unit', empty)} without parameters: the modules have none, or only ones "
            "that units below own or that are tied to modules elsewhere; choose other modules"
        )


def subject_of(noun: str, names: Sequence[str]) -> str:
    """The subject and verb of a sentence: "units a, b, c, d and 3 more are"."""
    return f"{noun}s {some_of(names)} are" if len(names) > 1 else f"{noun} {names[0]} is"
