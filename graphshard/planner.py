"""Planning: which parameters are gathered together, from a model's shapes alone.

Reads no parameter's values and needs no process group, so a model on the meta device will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from graphshard.errors import PolicyError
from graphshard.mesh_shape import checked_mesh, fitted
from graphshard.model_checks import check_model, require_module
from graphshard.module_tree import ModuleTree, TreeParam
from graphshard.plan import REPLICATED, SHARDED, ParamLayout, ShardingPlan, Unit
from graphshard.plan_warnings import plan_warnings, with_capture_warnings
from graphshard.policy_base import Policy
from graphshard.strategy import Strategy
from graphshard.unit_options import UnitOptions, options_of

__all__ = ["make_plan", "require_policy", "with_capture_warnings"]


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
    replicated, else only those without dimensions are.

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
    tree = ModuleTree(model)
    check_model(tree)
    unit_fqns = ["", *policy.select(tree)]
    owner = _owners(tree, frozenset(unit_fqns))
    overrides = policy.overrides(tree)
    options = {
        fqn: fitted(options_of(policy, fqn, overrides.get(fqn, {})), fqn, mesh_shape)
        for fqn in unit_fqns
    }
    owned: dict[str, list[ParamLayout]] = {fqn: [] for fqn in unit_fqns}
    for entry in tree.params:
        unit = owner[entry.home]
        owned[unit].append(_layout(entry, options[unit], mesh_shape[-1]))
    units = tuple(
        Unit(fqn, type(tree.modules[fqn]).__name__, tuple(layouts), options[fqn])
        for fqn, layouts in owned.items()
    )
    plan = ShardingPlan(units, policy, world_size, mesh_shape)
    return replace(plan, warnings=plan_warnings(plan))


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


def _owners(tree: ModuleTree, units: frozenset[str]) -> Mapping[str, str]:
    """The unit around each module: itself, or the one its parent belongs to."""
    owner: dict[str, str] = {}
    for fqn in tree.modules:  # a parent comes before its children
        owner[fqn] = fqn if fqn in units else owner[tree.parent[fqn]]
    return owner


def _layout(entry: TreeParam, options: UnitOptions, shard_size: int) -> ParamLayout:
    param = entry.param
    replicated = options.strategy is Strategy.NO_SHARD or param.ndim == 0
    return ParamLayout(
        fqn=entry.names[0],
        names=entry.names,
        shape=tuple(param.shape),
        dtype=param.dtype,
        requires_grad=param.requires_grad,
        placement=REPLICATED if replicated else SHARDED,
        world_size=shard_size,
    )
