"""What would make room in a step that does not fit, by what it holds at its peak."""

from __future__ import annotations

from collections.abc import Iterator

from graphshard.cost.estimate import Estimate
from graphshard.cost.memory import OPTIMIZER, OPTIMIZER_STEP, SHARD_GRADIENTS, SHARDS
from graphshard.format import human_bytes
from graphshard.policy.strategy import Strategy
from graphshard.program.storages import AT_WORK, PARAMETERS, SAVED


def room(estimate: Estimate) -> dict[str, int]:
    """The most bytes of the peak that each change frees, the largest first.

    A change may free less, since another place of the step becomes the peak.
    """
    policy, ranks = estimate.plan.policy, estimate.plan.world_size
    strategy = Strategy(policy.strategy)
    held = estimate.memory.peak.by_category
    temporary = held.get(OPTIMIZER_STEP, 0)
    kept = sum(held.get(name, 0) for name in (SHARDS, SHARD_GRADIENTS, OPTIMIZER)) + temporary
    saved = held.get(SAVED, 0)
    found = {"half the batch": (saved + held.get(AT_WORK, 0)) // 2}
    if policy.recompute is None:
        found['recompute="units"'] = saved
    if not estimate.hardware.is_host:
        if not policy.offloads("activations"):
            found['offload="activations"'] = saved
        if not policy.offloads("params"):
            found['offload="params"'] = kept
    if estimate.optimizer == "adamw":
        found["a fused optimizer"] = temporary
    if strategy is Strategy.FULL_SHARD:
        found[f"{2 * ranks:,} ranks"] = kept // 2
    elif not strategy.hybrid:
        found['strategy="FULL_SHARD"'] = held.get(PARAMETERS, 0)
    return {name: size for name, size in sorted(found.items(), key=lambda one: -one[1]) if size}


def room_lines(estimate: Estimate) -> Iterator[str]:
    """One line on what would make room; none if the step fits."""
    if not estimate.fits:
        freed = [f"{human_bytes(size)} by {name}" for name, size in room(estimate).items()]
        yield f"room       frees at most {', '.join(freed)}; graphshard tune searches for what fits"
