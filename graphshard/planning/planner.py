"""Planning: decide from a model's shapes which parameters are gathered together.

Planning reads no parameter values and needs no process group, so the model may be on meta.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median_high
from typing import Any

from torch import Tensor, nn

from graphshard.errors import PlanError, PolicyError
from graphshard.format import human_bytes, some_of
from graphshard.planning.layout import ParamLayout, Unit, UnitOptions, options_of
from graphshard.planning.model_checks import check_model, require_module
from graphshard.planning.plan import IGNORED, ShardingPlan
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

    `mesh_shape` is `(world_size,)`, also meant by None, or `(replicas, ranks to shard over)`, which
    the HYBRID strategies need: the ranks of one column hold equal shards. The model may be on any
    device, meta included; the plan's `program` is None.
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
    if isinstance(policy, str):
        raise PolicyError(
            f"the policy must be an instance of a Policy; got {policy!r}; what the command line "
            "calls block is BlockPolicy(), block:A,B is BlockPolicy({'A', 'B'}), and size:N is "
            "SizePolicy(N)"
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


# -- what the policy ignores ----------------------------------------------------------------------


@dataclass(frozen=True)
class Ignored:
    """`id`s of the parameters that are not sharded, and FQNs of modules that are ignored whole."""

    params: frozenset[int] = frozenset()
    modules: frozenset[str] = frozenset()

    def covers(self, module: str) -> bool:
        """Whether the module of this FQN is ignored, or lies in an ignored one."""
        return any(not m or module == m or module.startswith(m + ".") for m in self.modules)


def ignored_by(policy: Policy, model: nn.Module) -> Ignored:
    """Resolve `policy.ignored` to parameters and modules of `model`.

    A module stands for the parameters of its whole subtree; a tied parameter is ignored under all
    its names; a regular expression must match the whole FQN of modules or parameters (any name).
    """
    params: set[int] = set()
    modules: set[str] = set()
    entries: Iterable[Any] = policy.ignored or ()  # type: ignore[assignment]
    for entry in entries:
        entry_modules, entry_params = _resolve(entry, model)
        if "" in entry_modules:
            raise PolicyError(
                f"ignored: {_text(entry)} is the whole model; nothing would be sharded"
            )
        modules |= entry_modules
        params |= entry_params
    for fqn in modules:
        params |= {id(param) for param in model.get_submodule(fqn).parameters()}
    return Ignored(frozenset(params), frozenset(modules))


def _resolve(entry: Any, model: nn.Module) -> tuple[set[str], set[int]]:
    named_modules = list(model.named_modules(remove_duplicate=False))
    named_params = list(model.named_parameters(remove_duplicate=False))
    modules: set[str] = set()
    params: set[int] = set()
    if isinstance(entry, nn.Module):
        modules = {fqn for fqn, module in named_modules if module is entry}
    elif isinstance(entry, Tensor):
        params = {id(param) for _, param in named_params if param is entry}
    else:
        try:
            pattern = re.compile(entry)
        except (re.error, OverflowError, RecursionError) as error:
            raise PolicyError(f"ignored: {entry!r} is no regular expression ({error})") from None
        modules = {fqn for fqn, _ in named_modules if fqn and pattern.fullmatch(fqn)}
        params = {id(param) for name, param in named_params if pattern.fullmatch(name)}
    if not modules and not params:
        raise PolicyError(
            f"ignored: {_text(entry)} is no module or parameter of the model"
            if not isinstance(entry, str)
            else f"ignored: the regular expression {entry!r} matches no module's and no "
            "parameter's whole FQN; add .* for everything below a module"
        )
    return modules, params


def _text(entry: Any) -> str:
    if isinstance(entry, Tensor):
        return f"a tensor of shape {tuple(entry.shape)}"
    return f"a {type(entry).__name__}" if isinstance(entry, nn.Module) else repr(entry)


# -- the mesh -------------------------------------------------------------------------------------


_PLAIN_OF = {
    Strategy.HYBRID_SHARD: Strategy.FULL_SHARD,
    Strategy.HYBRID_SHARD_ZERO2: Strategy.SHARD_GRAD_OP,
}


_HYBRID_OF = {plain: hybrid for hybrid, plain in _PLAIN_OF.items()}


def mesh_sizes(mesh_shape: Sequence[int] | str) -> tuple[int, ...]:
    """The sizes of a mesh that is given by them, or as text: "8", "2x4" or "(2, 4)".

    Raises:
        PlanError: they are no whole numbers of at least 1.
    """
    sizes: tuple[Any, ...] = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(mesh_shape)
    if isinstance(mesh_shape, str):
        parts = [part.strip() for part in re.split("[x,]", mesh_shape.strip("(), "))]
        sizes = tuple(int(part) if part.isdecimal() else part for part in parts)
    if any(type(size) is not int or size < 1 for size in sizes):
        raise PlanError(
            "the sizes of a mesh are whole numbers, 1 or more, as in (2, 4) or 2x4; got "
            f"{mesh_shape!r}"
        )
    return sizes


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
                "mesh_shape=(replicas, ranks to shard over), on the command line "
                "--mesh REPLICASxRANKS"
            )
        return (world_size,)
    shape = mesh_sizes(mesh_shape)
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


BACKENDS = ("eager", "inductor")
"""The backends that can run a program's compute."""


def require_backend(backend: str) -> None:
    """Raise `PolicyError` if there is no such backend."""
    if backend not in BACKENDS:
        raise PolicyError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")


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


# -- warnings -------------------------------------------------------------------------------------


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
            f"{type(plan.policy).__name__} makes no unit besides the root: the whole model is one "
            "unit, all parameters are gathered at once, and no communication overlaps compute; "
            "lower min_num_params, let fn return True for the model's blocks, or name their class "
            "in a BlockPolicy"
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
