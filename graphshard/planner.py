"""Planning: which parameters are gathered together, from a model's shapes alone.

Reads no parameter's values and needs no process group, so a model on the meta device will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from torch import nn

from graphshard.errors import PlanError, PolicyError
from graphshard.model_checks import check_model, require_module
from graphshard.module_tree import ModuleTree, TreeParam
from graphshard.plan import REPLICATED, SHARDED, ParamLayout, ShardingPlan, Unit
from graphshard.plan_warnings import plan_warnings, with_capture_warnings
from graphshard.policy_base import Policy
from graphshard.strategy import Strategy
from graphshard.unit_options import UnitOptions, options_of

__all__ = ["make_plan", "with_capture_warnings"]


def make_plan(
    model: nn.Module,
    policy: Policy,
    *,
    world_size: int,
    mesh_shape: tuple[int, ...] | None = None,
) -> ShardingPlan:
    """Decide the units of `model` and how each parameter lies on `world_size` ranks.

    A unit owns the parameters of its module, less those of units below it. A parameter tied over
    several units belongs to the lowest unit above all its users. Under NO_SHARD every parameter is
    replicated, else only those without dimensions are.

    Args:
        model: on any device, meta included.
        policy: says which modules are units.
        world_size: number of ranks.
        mesh_shape: its factorisation; None means `(world_size,)`.

    Returns:
        The plan, its `program` still None.

    Raises:
        PlanError: `model` is none that can be sharded, or the world size or mesh shape is
            impossible.
        PolicyError: `policy` is no policy, or asks for what the model does not have.
    """
    require_module(model)
    _require_policy(policy)
    mesh_shape = _checked_mesh(world_size, mesh_shape)
    tree = ModuleTree(model)
    check_model(tree)
    unit_fqns = ["", *policy.select(tree)]
    owner = _owners(tree, frozenset(unit_fqns))
    overrides = policy.overrides(tree)
    options = {fqn: options_of(policy, fqn, overrides.get(fqn, {})) for fqn in unit_fqns}
    owned: dict[str, list[ParamLayout]] = {fqn: [] for fqn in unit_fqns}
    for entry in tree.params:
        unit = owner[entry.home]
        owned[unit].append(_layout(entry, options[unit], world_size))
    units = tuple(
        Unit(fqn, type(tree.modules[fqn]).__name__, tuple(layouts), options[fqn])
        for fqn, layouts in owned.items()
    )
    plan = ShardingPlan(units, policy, world_size, mesh_shape)
    return replace(plan, warnings=plan_warnings(plan))


def _require_policy(policy: object) -> None:
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


def _checked_mesh(world_size: int, mesh_shape: tuple[int, ...] | None) -> tuple[int, ...]:
    if type(world_size) is not int or world_size < 1:
        raise PlanError(
            f"world_size must be a whole number of ranks, 1 or more; got {world_size!r}"
        )
    shape = (world_size,) if mesh_shape is None else tuple(mesh_shape)
    if prod(shape) != world_size:
        raise PlanError(
            f"a mesh of shape {shape} has {prod(shape)} ranks, but world_size is {world_size}; "
            "make them agree"
        )
    if len(shape) != 1:
        raise PlanError(
            f"parameters are sharded over a mesh of one dimension; got shape {shape}; "
            f"pass ({world_size},) or leave it out"
        )
    return shape


def _owners(tree: ModuleTree, units: frozenset[str]) -> Mapping[str, str]:
    """The unit around each module: itself, or the one its parent belongs to."""
    owner: dict[str, str] = {}
    for fqn in tree.modules:  # a parent comes before its children
        owner[fqn] = fqn if fqn in units else owner[tree.parent[fqn]]
    return owner


def _layout(entry: TreeParam, options: UnitOptions, world_size: int) -> ParamLayout:
    param = entry.param
    replicated = options.strategy is Strategy.NO_SHARD or param.ndim == 0
    return ParamLayout(
        fqn=entry.names[0],
        names=entry.names,
        shape=tuple(param.shape),
        dtype=param.dtype,
        requires_grad=param.requires_grad,
        placement=REPLICATED if replicated else SHARDED,
        world_size=world_size,
    )
