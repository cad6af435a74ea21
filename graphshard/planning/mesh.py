"""Check the mesh of ranks that a plan is made for, and fit units' options to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from graphshard.errors import PlanError, PolicyError
from graphshard.planning.options import UnitOptions
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.base import Policy
from graphshard.policy.strategy import Strategy

_PLAIN_OF = {
    Strategy.HYBRID_SHARD: Strategy.FULL_SHARD,
    Strategy.HYBRID_SHARD_ZERO2: Strategy.SHARD_GRAD_OP,
}


_HYBRID_OF = {plain: hybrid for hybrid, plain in _PLAIN_OF.items()}


def checked_mesh(
    world_size: int, mesh_shape: Sequence[int] | None, policy: Policy
) -> tuple[int, ...]:
    """Return the mesh shape of the ranks: `(ranks,)` or `(replicas, ranks to shard over)`."""
    if type(world_size) is not int or world_size < 1:
        raise PlanError(
            f"world_size must be a whole number of ranks, 1 or more; got {world_size!r}"
        )
    if mesh_shape is None:
        strategy = Strategy(policy.strategy)
        if strategy.hybrid:
            raise PolicyError(
                f"strategy {strategy.value} shards over groups of ranks and replicates over the "
                f"groups, and {world_size} ranks do not say how many make a group; pass "
                "mesh_shape=(replicas, ranks to shard over)"
            )
        return (world_size,)
    shape = tuple(mesh_shape)
    if any(type(size) is not int or size < 1 for size in shape):
        raise PlanError(f"the sizes of a mesh are whole numbers, 1 or more; got {shape}")
    if prod(shape) != world_size:
        raise PlanError(
            f"a mesh of shape {shape} has {prod(shape)} ranks, but world_size is {world_size}; "
            "make them agree"
        )
    if len(shape) not in (1, 2):
        raise PlanError(
            f"a mesh has one dimension, or two: (replicas, ranks to shard over); got shape {shape}"
        )
    return shape


def fitted(options: UnitOptions, unit: str, mesh_shape: tuple[int, ...]) -> UnitOptions:
    """Return the `options` of `unit`, adapted to this mesh.

    Resharding to groups of one rank means keeping parameters whole, and resharding to one group of
    all ranks means freeing them.
    """
    name, strategy, shard_size = unit or "(root)", options.strategy, mesh_shape[-1]
    if len(mesh_shape) == 2 and not (strategy.hybrid or strategy is Strategy.NO_SHARD):
        instead = _HYBRID_OF.get(strategy)
        raise PolicyError(
            f"strategy {strategy.value} of unit {name} is for a mesh of one dimension; got "
            f"{mesh_shape}; pass a mesh of one dimension"
            + (
                f", or use {instead.value} to shard over its last dimension and replicate over "
                "its first"
                if instead
                else ""
            )
        )
    if len(mesh_shape) == 1 and strategy.hybrid:
        raise PolicyError(
            f"strategy {strategy.value} of unit {name} needs a mesh of two dimensions (replicas, "
            f"ranks to shard over); got {mesh_shape}; pass such a mesh, or use "
            f"{_PLAIN_OF[strategy].value}"
        )
    ranks = options.reshard_ranks
    if ranks is None:
        return options
    if shard_size % ranks:
        raise PlanError(
            f"unit {name} is to be resharded to groups of {ranks} ranks after forward, but "
            f"{ranks} does not divide the {shard_size} ranks it is sharded over; choose a divisor "
            f"of {shard_size}"
        )
    if ranks in (1, shard_size):
        return replace(options, reshard=ranks != 1)
    return options


def name_of_all_reduce(function: Any, plan: ShardingPlan) -> str:
    """The name of the caller's average over replicas; "" if there is none."""
    if function is None:
        return ""
    if not callable(function):
        raise PolicyError(f"replica_all_reduce must be a function or None; got {function!r}")
    if len(plan.mesh_shape) != 2:
        raise PolicyError(
            "replica_all_reduce replaces the all_reduce over the first dimension of a mesh, and "
            f"this one has shape {plan.mesh_shape}; use a HYBRID strategy and a mesh of two "
            "dimensions, such as init_device_mesh(device, (1, ranks))"
        )
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
