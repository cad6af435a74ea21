"""Planning: which parameters are gathered together, from a model's shapes alone.

Reads no parameter's values and needs no process group, so a model on the meta device will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from graphshard.errors import PolicyError
from graphshard.planning.ignored import ignored_by
from graphshard.planning.layout import ParamLayout, Unit
from graphshard.planning.mesh import checked_mesh, fitted
from graphshard.planning.model_checks import check_model, require_module
from graphshard.planning.options import UnitOptions, options_of
from graphshard.planning.plan import IGNORED, ShardingPlan
from graphshard.planning.warnings import plan_warnings, reshard_warnings
from graphshard.policy.base import Policy
from graphshard.policy.placement import (
    REPLICATED,
    SHARDED,
    RequestedPlacement,
    requested_placements,
    split_dim,
)
from graphshard.policy.precision import keeps_its_dtype
from graphshard.policy.recompute import RecomputeChoice
from graphshard.policy.strategy import Strategy
from graphshard.policy.tree import ModuleTree, TreeParam


def make_plan(
    model: nn.Module,
    policy: Policy,
    *,
    world_size: int,
    mesh_shape: tuple[int, ...] | None = None,
) -> ShardingPlan:
    """Decide the units of `model` and how each parameter lies on the ranks.

    A unit owns the parameters of its module, less those of units below it. A parameter tied over
    several units belongs to the lowest unit above all its users. Under NO_SHARD every parameter is
    replicated; else `graphshard.placement.split_dim` says along which dim each is split, unless the
    policy does.

    Args:
        model: on any device, meta included.
        policy: says which modules are units.
        world_size: number of all ranks.
        mesh_shape: `(world_size,)`, which None means, or `(replicas, ranks to shard over)`, which
            the HYBRID strategies need: equal shards are kept by the ranks of one column.

    Returns:
        The plan, its `program` still None.

    Raises:
        PlanError: `model` is none that can be sharded, or the world size or mesh shape is
            impossible.
        PolicyError: `policy` is no policy, or asks for what the model or the mesh does not have.
    """
    require_module(model)
    require_policy(policy)
    mesh_shape = checked_mesh(world_size, mesh_shape, policy)
    ignored = ignored_by(policy, model)
    tree = ModuleTree(model, ignored.params)
    check_model(tree)
    unit_fqns = ["", *(fqn for fqn in policy.select(tree) if not ignored.covers(fqn))]
    around = tree.units_around(unit_fqns)
    overrides = policy.overrides(tree)
    asked = {fqn: options_of(policy, fqn, overrides.get(fqn, {})) for fqn in unit_fqns}
    if policy.reshard_root and asked[""].reshard is False:
        raise PolicyError(
            f"reshard_root=True frees the root after forward, and strategy "
            f"{asked[''].strategy.value} with reshard_after_forward="
            f"{policy.reshard_after_forward} keeps it; leave one of them out"
        )
    options = {fqn: fitted(wish, fqn, mesh_shape) for fqn, wish in asked.items()}
    for fqn in unit_fqns:
        _check_resident(fqn, options[fqn])
    entries: dict[str, list[TreeParam]] = {fqn: [] for fqn in unit_fqns}
    for entry in tree.params:
        entries[around[entry.home]].append(entry)
    owned: dict[str, list[ParamLayout]] = {}
    granted: dict[str, bool] = {}  # by wish that may be unfulfilled, whether some parameter does
    for fqn in unit_fqns:
        names = [entry.names[0] for entry in entries[fqn]]
        wishes = requested_placements(overrides.get(fqn, {}).get("placement"), names, fqn)
        owned[fqn] = [
            _layout(entry, options[fqn], mesh_shape[-1], wishes.get(entry.names[0]), granted)
            for entry in entries[fqn]
        ]
    _require_granted(granted, mesh_shape[-1])
    units = tuple(
        Unit(fqn, type(tree.modules[fqn]).__name__, tuple(layouts), options[fqn])
        for fqn, layouts in owned.items()
    )
    left_alone = tuple(_ignored_layout(entry) for entry in tree.ignored)
    recomputed = RecomputeChoice.of(policy.recompute).modules(tree)
    plan = ShardingPlan(
        units, policy, world_size, mesh_shape, recomputed=recomputed, ignored=left_alone
    )
    return replace(plan, warnings=(*plan_warnings(plan), *reshard_warnings(asked)))


def require_policy(policy: object) -> None:
    """Check that `policy` is one.

    Raises:
        PolicyError: it is not, or is a class of policies.
    """
    if isinstance(policy, type) and issubclass(policy, Policy):
        raise PolicyError(
            f"the policy must be an instance of a Policy; got the class {policy.__name__}; "
            f"call it: {policy.__name__}(...)"
        )
    if not isinstance(policy, Policy):
        raise PolicyError(
            f"the policy must be an instance of a Policy; got {policy!r}; use SizePolicy, "
            "BlockPolicy, LambdaPolicy, or a class of your own derived from Policy"
        )


def _ignored_layout(entry: TreeParam) -> ParamLayout:
    param = entry.param
    return ParamLayout(
        fqn=entry.names[0],
        names=entry.names,
        shape=tuple(param.shape),
        dtype=param.dtype,
        requires_grad=param.requires_grad,
        placement=IGNORED,
        world_size=1,
    )


def _check_resident(unit: str, options: UnitOptions) -> None:
    """Refuse what does not go with copies of parameters that ranks keep and compute with."""
    if options.strategy is not Strategy.SHARD_OPTIMIZER:
        return
    if options.precision is not None and options.precision.param_dtype is not None:
        raise PolicyError(
            f"strategy SHARD_OPTIMIZER of unit {unit or '(root)'} computes with the parameters "
            "that each rank keeps, so a param_dtype of mixed_precision has no place in it; use "
            "SHARD_GRAD_OP, which casts shards before it gathers them"
        )


def _layout(
    entry: TreeParam,
    options: UnitOptions,
    ranks: int,
    wish: RequestedPlacement | None,
    granted: dict[str, bool],
) -> ParamLayout:
    shape, dtype = tuple(entry.param.shape), entry.param.dtype
    resident = options.strategy is Strategy.SHARD_OPTIMIZER
    dim = _dim(entry, options, ranks, wish, granted)
    return ParamLayout(
        fqn=entry.names[0],
        names=entry.names,
        shape=shape,
        dtype=dtype,
        requires_grad=entry.param.requires_grad,
        placement=REPLICATED if dim is None else SHARDED,
        world_size=ranks,
        dim=dim or 0,
        resident=resident and dim is not None,
        precision=options.precision if _is_cast(entry) else None,
    )


def _is_cast(entry: TreeParam) -> bool:
    """Whether mixed precision casts a parameter: floating-point ones, but for BatchNorm's."""
    return entry.param.is_floating_point() and not any(map(keeps_its_dtype, entry.holders))


def _dim(
    entry: TreeParam,
    options: UnitOptions,
    ranks: int,
    wish: RequestedPlacement | None,
    granted: dict[str, bool],
) -> int | None:
    """The dim to split a parameter along, or None to replicate it."""
    name, shape = entry.names[0], tuple(entry.param.shape)
    if wish is not None:
        if options.strategy is Strategy.NO_SHARD and wish.where != REPLICATED:
            raise PolicyError(
                f"{wish.by}: parameter {name!r} is to be split along dim {wish.where}, but its "
                "unit's strategy NO_SHARD splits nothing; leave one of them out"
            )
        if options.strategy is Strategy.SHARD_OPTIMIZER and wish.where not in (0, REPLICATED):
            raise PolicyError(
                f"{wish.by}: parameter {name!r} is to be split along dim {wish.where}, but its "
                "unit's strategy SHARD_OPTIMIZER updates rows of it, which are along dim 0; leave "
                "one of them out"
            )
        fits = wish.fits(shape, ranks)
        if wish.strict and not fits:
            raise PolicyError(
                f"{wish.by}: parameter {name!r} of shape {list(shape)} cannot be split along dim "
                f"{wish.where} over {ranks} ranks, which must divide it; choose another dim, or "
                f'"{REPLICATED}"'
            )
        granted[wish.by] = granted.get(wish.by, False) or fits
        if fits:
            return wish.where if isinstance(wish.where, int) else None
    if options.strategy is Strategy.NO_SHARD:
        return None
    rows_only = options.strategy is Strategy.SHARD_OPTIMIZER
    return split_dim(shape, entry.param.dtype.itemsize, ranks, rows_only=rows_only)


def _require_granted(granted: Mapping[str, bool], ranks: int) -> None:
    for by, some in granted.items():
        if not some:
            raise PolicyError(
                f"{by}: none of the parameters it is for can be split along that dim over {ranks} "
                "ranks, which must divide it; choose another dim, or leave it out"
            )
