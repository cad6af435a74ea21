"""What a policy asks for one unit, and how that follows from the policy's own fields."""

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
    """How one unit is treated.

    reshard: what becomes of its gathered parameters after forward: True, they are freed and
    gathered again; False, they are kept; a number of ranks, each group of so many keeps them
    sharded among itself.
    """

    strategy: Strategy = Strategy.FULL_SHARD
    reshard: bool | int = True
    precision: MixedPrecision | None = None

    @property
    def reshard_ranks(self) -> int | None:
        """Size of the groups that keep its parameters sharded after forward, if such groups do."""
        return None if isinstance(self.reshard, bool) else self.reshard

    def difference(self, other: UnitOptions) -> str:
        """The options that are other than those of `other`, as stable text; "" if none is."""
        return ", ".join(
            f"{name}={text_of(value)}"
            for name, value in vars(self).items()
            if value != getattr(other, name)
        )


def options_of(policy: Policy, unit: str, overrides: Mapping[str, Any]) -> UnitOptions:
    """The options of `unit` under `policy`, of which `overrides` replace some fields.

    The root is kept unsharded between forward and backward unless `policy.reshard_root`, or an
    override for it, says otherwise.

    Raises:
        PolicyError: parameters are to be offloaded, and kept whole on the device; or are to be
            freed under a strategy that keeps them.
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
