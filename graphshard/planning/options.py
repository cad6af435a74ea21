"""The options of one unit, from the policy's fields and its overrides for the unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphshard.errors import PolicyError
from graphshard.policy.base import Policy, text_of
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.strategy import Strategy


@dataclass(frozen=True)
class UnitOptions:
    """The options of one unit.

    reshard: the state of its gathered parameters after forward. True: freed, and gathered again.
    False: kept unsharded. A number of ranks: kept sharded within each group of so many ranks.
    """

    strategy: Strategy = Strategy.FULL_SHARD
    reshard: bool | int = True
    precision: MixedPrecision | None = None

    @property
    def reshard_ranks(self) -> int | None:
        """Ranks in a group that keeps its parameters sharded after forward; None without groups."""
        return None if isinstance(self.reshard, bool) else self.reshard

    @property
    def text(self) -> str:
        """All options as stable text."""
        return ", ".join(f"{name}={text_of(value)}" for name, value in vars(self).items())

    def difference(self, other: UnitOptions) -> str:
        """The options that differ from those of `other`, as stable text; "" if none does."""
        return ", ".join(
            f"{name}={text_of(value)}"
            for name, value in vars(self).items()
            if value != getattr(other, name)
        )


def options_of(policy: Policy, unit: str, overrides: Mapping[str, Any]) -> UnitOptions:
    """Return the options of `unit` under `policy`, some of whose fields `overrides` replace.

    The root is kept unsharded between forward and backward, unless `policy.reshard_root` or an
    override for it frees it.
    """
    strategy = Strategy(overrides.get("strategy", policy.strategy))
    if strategy is Strategy.SHARD_OPTIMIZER and policy.offloads("params"):
        raise PolicyError(
            f"unit {unit or '(root)'}: strategy SHARD_OPTIMIZER keeps whole parameters on the "
            'device, and offload="params" keeps them on the host; leave one of them out (with '
            "SHARD_GRAD_OP gradients and optimizer states are sharded as well)"
        )
    reshard: bool | int | None = overrides.get("reshard_after_forward")
    if reshard is None and not unit and not policy.reshard_root:
        reshard = False
    if reshard is None and "strategy" not in overrides:
        reshard = policy.reshard_after_forward
    if reshard and not strategy.frees_after_forward:
        raise PolicyError(
            f"unit {unit or '(root)'}: strategy {strategy.value} keeps parameters after forward, "
            f"and reshard_after_forward={reshard!r} does not; leave one of them out"
        )
    if reshard is None:
        reshard = strategy.frees_after_forward
    return UnitOptions(strategy, reshard, overrides.get("mixed_precision", policy.mixed_precision))
