"""Planning: decide from a model's shapes which parameters are gathered together.

Planning reads no parameter values and needs no process group, so the model may be on meta.
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
    Along,
    RequestedPlacement,
    requested_placements,
    split_along,
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

    A unit has the parameters of its module without those of units below it. A parameter tied over
    several units belongs to the lowest unit above all its users. Under NO_SHARD every parameter is
    replicated; otherwise the policy or `graphshard.policy.placement.split_along` chooses
    what each is split along.

    Args:
        model: on any device, meta included.
        policy: chooses the units and their options.
        world_size: number of all ranks.
        mesh_shape: `(world_size,)`, also meant by None, or `(replicas, ranks to shard over)`, which
            the HYBRID strategies need: the ranks of one column hold equal shards.

    Returns:
        The plan; its `program` is None.
    """
    require_module(model)
    require_policy(policy)
    mesh_shape = checked_mesh(world_size, mesh_shape, policy)
    ignored = ignored_by(policy, model)
    tree = ModuleTree(model, ignored.params)
    check_model(tree, world_size)
    unit_fqns = ["", *(fqn for fqn in policy.select(tree) if not ignored.covers(fqn))]
    around = tree.units_around(unit_fqns)
    overrides = policy.overrides(tree)
    requested = {fqn: options_of(policy, fqn, overrides.get(fqn, {})) for fqn in unit_fqns}
    if policy.reshard_root and requested[""].reshard is False:
        raise PolicyError(
            f"reshard_root=True frees the root after forward, and strategy "
            f"{requested[''].strategy.value} with reshard_after_forward="
            f"{policy.reshard_after_forward} keeps it; leave one of them out"
        )
    options = {
        fqn: fitted(unit_options, fqn, mesh_shape) for fqn, unit_options in requested.items()
    }
    for fqn in unit_fqns:
        _check_resident(fqn, options[fqn])
    unit_params: dict[str, list[TreeParam]] = {fqn: [] for fqn in unit_fqns}
    for param in tree.params:
        unit_params[around[param.home]].append(param)
    layouts_of: dict[str, list[ParamLayout]] = {}
    granted: dict[str, bool] = {}  # by request: whether some parameter could be placed so
    for fqn in unit_fqns:
        names = [param.names[0] for param in unit_params[fqn]]
        placements = requested_placements(overrides.get(fqn, {}).get("placement"), names, fqn)
        layouts_of[fqn] = [
            _layout(param, options[fqn], mesh_shape[-1], placements.get(param.names[0]), granted)
            for param in unit_params[fqn]
        ]
    _require_granted(granted)
    units = tuple(
        Unit(fqn, type(tree.modules[fqn]).__name__, tuple(layouts), options[fqn])
        for fqn, layouts in layouts_of.items()
    )
    ignored_layouts = tuple(_ignored_layout(param) for param in tree.ignored)
    recomputed = RecomputeChoice.of(policy.recompute).modules(tree)
    plan = ShardingPlan(
        units, policy, world_size, mesh_shape, recomputed=recomputed, ignored=ignored_layouts
    )
    return replace(plan, warnings=(*plan_warnings(plan), *reshard_warnings(requested)))


def require_policy(policy: object) -> None:
    """Check that `policy` is a `Policy`."""
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


def _ignored_layout(param: TreeParam) -> ParamLayout:
    return ParamLayout(
        fqn=param.names[0],
        names=param.names,
        shape=tuple(param.param.shape),
        dtype=param.param.dtype,
        requires_grad=param.param.requires_grad,
        placement=IGNORED,
        world_size=1,
    )


def _check_resident(unit: str, options: UnitOptions) -> None:
    """Refuse options that resident parameters cannot have."""
    if options.strategy is not Strategy.SHARD_OPTIMIZER:
        return
    if options.precision is not None and options.precision.param_dtype is not None:
        raise PolicyError(
            f"strategy SHARD_OPTIMIZER of unit {unit or '(root)'} computes with the parameters "
            "that each rank keeps, so a param_dtype of mixed_precision has no place in it; use "
            "SHARD_GRAD_OP, which casts shards before it gathers them"
        )


def _layout(
    param: TreeParam,
    options: UnitOptions,
    ranks: int,
    request: RequestedPlacement | None,
    granted: dict[str, bool],
) -> ParamLayout:
    shape, dtype = tuple(param.param.shape), param.param.dtype
    resident = options.strategy is Strategy.SHARD_OPTIMIZER
    dim = _dim(param, options, ranks, request, granted)
    return ParamLayout(
        fqn=param.names[0],
        names=param.names,
        shape=shape,
        dtype=dtype,
        requires_grad=param.param.requires_grad,
        placement=REPLICATED if dim is None else SHARDED,
        world_size=ranks,
        dim=dim or 0,
        resident=resident and dim is not None,
        precision=options.precision if _is_cast(param) else None,
    )


def _is_cast(param: TreeParam) -> bool:
    """Whether mixed precision casts a parameter: a floating-point one that is not a BatchNorm's."""
    return param.param.is_floating_point() and not any(map(keeps_its_dtype, param.holders))


def _dim(
    param: TreeParam,
    options: UnitOptions,
    ranks: int,
    request: RequestedPlacement | None,
    granted: dict[str, bool],
) -> Along | None:
    """What to split a parameter along, or None to replicate it."""
    name, shape = param.names[0], tuple(param.param.shape)
    if request is not None:
        if options.strategy is Strategy.NO_SHARD and request.where != REPLICATED:
            raise PolicyError(
                f"{request.by}: parameter {name!r} is to be split along dim {request.where}, but "
                "its unit's strategy NO_SHARD splits nothing; leave one of them out"
            )
        fits = request.fits(shape)
        if request.strict and not fits:
            raise PolicyError(
                f"{request.by}: parameter {name!r} of shape {list(shape)} cannot be split along "
                f"dim {request.where}, which it does not have; choose another dim, or "
                f'"{REPLICATED}"'
            )
        granted[request.by] = granted.get(request.by, False) or fits
        if fits:
            return request.where if isinstance(request.where, int) else None
    if options.strategy is Strategy.NO_SHARD:
        return None
    return split_along(shape, param.param.dtype.itemsize, ranks)


def _require_granted(granted: Mapping[str, bool]) -> None:
    for by, any_fits in granted.items():
        if not any_fits:
            raise PolicyError(
                f"{by}: none of the parameters it is for has that dim; choose another, or leave it "
                "out"
            )
