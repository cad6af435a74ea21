"""`ModulePolicy`: units chosen by class or name, each with its own options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from graphshard.errors import PolicyError
from graphshard.policy.base import Policy, require_units_only, text_of
from graphshard.policy.fields import named_arguments
from graphshard.policy.placement import RequestedPlacement, checked_where
from graphshard.policy.strategy import Strategy
from graphshard.policy.tree import ModuleTree, TreeParam
from graphshard.policy.units import refuse_containers

UNIT_OVERRIDES = ("strategy", "reshard_after_forward", "mixed_precision")


OVERRIDES = (*UNIT_OVERRIDES, "placement", "unit")


Key = type | str


_Match = tuple[Key, Mapping[str, Any], list[str]]


@named_arguments
@dataclass(frozen=True, repr=False)
class ModulePolicy(Policy):
    """Named modules become units with their own options, besides the units of a base policy.

        ModulePolicy(
            {
                "layers.31": {"reshard_after_forward": False},
                nn.Embedding: {"strategy": "NO_SHARD"},
                "*.experts": {"placement": {"w?": 1}},
            },
            base=BlockPolicy({Block}),
        )

    Args:
        modules: the overrides of each module. A key is a class (subclasses match), or a shell
            pattern that must match a module's whole FQN, case-sensitive ("*" matches dots too; ""
            is the root). A value maps some of these names to values:

            `strategy`, `reshard_after_forward`, `mixed_precision`: as the fields of those names.
                A `strategy` also cancels the policy's and earlier entries'
                `reshard_after_forward`; NO_SHARD also cancels earlier entries' `placement`.
            `placement`: the dim that the unit's parameters are split along, or "replicate"; or a
                mapping from patterns for parameter names within the module to one of these. A
                parameter of a name without wildcards must have the dim, others that do not have it
                are left out.
            `unit`: False keeps the module in the unit around it, and only places its parameters.

            If several entries match, later ones override earlier ones, field by field.
        base: a policy that chooses more units. Its shared fields must have their default values;
            give them here instead.

    Raises:
        PolicyError: a field has an invalid value. `select`, `overrides` and the planner raise it if
            a key matches nothing or its modules cannot have an override.
    """

    modules: Mapping[Key, Mapping[str, Any]]
    base: Policy | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.modules, Mapping):
            raise PolicyError(
                "modules must be a mapping from classes or FQN patterns to mappings of overrides; "
                f"got {self.modules!r}"
            )
        for key, entry in self.modules.items():
            _check_entry(key, entry)
        object.__setattr__(self, "modules", {k: dict(v) for k, v in self.modules.items()})
        base = self.base
        if base is not None and not isinstance(base, Policy):
            raise PolicyError(f"base must be an instance of a Policy or None; got {base!r}")
        if base is not None:
            require_units_only(base, "base", "ModulePolicy")

    def select(self, tree: ModuleTree) -> list[str]:
        """See `Policy.select`."""
        chosen = set() if self.base is None else set(self.base.select(tree))
        for _, entry, fqns in self._matches(tree):
            if entry.get("unit", True):
                chosen.update(fqns)
        return [fqn for fqn in tree.modules if fqn and fqn in chosen]

    def overrides(self, tree: ModuleTree) -> Mapping[str, Mapping[str, Any]]:
        """See `Policy.overrides`; `placement` maps parameters to `RequestedPlacement`s."""
        base_overrides = {} if self.base is None else self.base.overrides(tree)
        by_unit: dict[str, dict[str, Any]] = {
            fqn: dict(options) for fqn, options in base_overrides.items()
        }
        around = tree.units_around(self.select(tree))
        unit_params: dict[str, list[TreeParam]] = {}
        for param in tree.params:
            unit_params.setdefault(around[param.home], []).append(param)
        for key, entry, fqns in self._matches(tree):
            for fqn in fqns:
                self._override(key, entry, by_unit.setdefault(fqn, {}))
            for fqn, param, request in _requests(key, entry, fqns, tree, around, unit_params):
                placements = by_unit.setdefault(fqn, {}).setdefault("placement", {})
                placements[param.names[0]] = request
        return {fqn: options for fqn, options in by_unit.items() if options}

    def _override(self, key: Key, entry: Mapping[str, Any], options: dict[str, Any]) -> None:
        if "strategy" in entry:
            options.pop("reshard_after_forward", None)
            if Strategy(entry["strategy"]) is Strategy.NO_SHARD:
                options.pop("placement", None)
        options |= {name: entry[name] for name in UNIT_OVERRIDES if name in entry}
        _check_fields(key, {"strategy": self.strategy, **options})

    def _matches(self, tree: ModuleTree) -> Iterator[_Match]:
        """Yield each key, its overrides and the FQNs it matches (at least one), in module order."""
        for key, entry in self.modules.items():
            if isinstance(key, str):
                fqns = [fqn for fqn in tree.modules if fnmatchcase(fqn, key)]
            else:
                fqns = [fqn for fqn, module in tree.modules.items() if isinstance(module, key)]
            if not fqns:
                classes = {type(module).__name__ for module in tree.modules.values()}
                hint = (
                    f"{key} is the name of a class; use the class itself as the key"
                    if key in classes
                    else "keys are module classes, or patterns for a module's whole FQN"
                )
                raise PolicyError(f"{_named(key)}: no module of the model matches; {hint}")
            if entry.get("unit", True):
                refuse_containers(_named(key), tree, fqns)
            yield key, entry, fqns


def _requests(
    key: Key,
    entry: Mapping[str, Any],
    fqns: Iterable[str],
    tree: ModuleTree,
    around: Mapping[str, str],
    unit_params: Mapping[str, list[TreeParam]],
) -> Iterator[tuple[str, TreeParam, RequestedPlacement]]:
    """Yield the unit, the parameter and the placement that `entry["placement"]` requests for it."""
    if "placement" not in entry:
        return
    by_name = _by_name(entry["placement"])
    unmatched = dict.fromkeys(by_name)
    for fqn in fqns:
        unit = around[fqn]
        for param in unit_params.get(unit, ()):
            if not tree.is_below(param.home, fqn):
                continue
            inside = f"{fqn}." if fqn else ""
            names = [name.removeprefix(inside) for name in param.names if name.startswith(inside)]
            for pattern, where in by_name.items():
                if any(fnmatchcase(name, pattern) for name in names):
                    unmatched.pop(pattern, None)
                    by = f"{_named(key)}, placement of {pattern!r}"
                    yield (
                        unit,
                        param,
                        RequestedPlacement(where, by, strict=not set(pattern) & set("*?[")),
                    )
    if unmatched:
        raise PolicyError(
            f"{_named(key)}: no parameter of a module it matches has a name like "
            f"{', '.join(map(repr, unmatched))}; give names within the module (parameters of units "
            "inside it belong to those units)"
        )


def _check_entry(key: Any, entry: Any) -> None:
    if not isinstance(key, (type, str)):
        raise PolicyError(
            f"ModulePolicy: a key must be a module class or a pattern for a module's FQN; got "
            f"{key!r}"
        )
    if not isinstance(entry, Mapping):
        raise PolicyError(f"{_named(key)}: its value must be a mapping of overrides; got {entry!r}")
    unknown = [name for name in entry if name not in OVERRIDES]
    if unknown:
        raise PolicyError(
            f"{_named(key)}: unknown override {', '.join(map(repr, unknown))}; a module can "
            f"override {', '.join(OVERRIDES)}"
        )
    _check_fields(key, {name: entry[name] for name in UNIT_OVERRIDES if name in entry})
    unit = entry.get("unit", True)
    if not isinstance(unit, bool):
        raise PolicyError(f"{_named(key)}: unit must be True or False; got {unit!r}")
    if not unit and set(entry) != {"unit", "placement"}:
        raise PolicyError(
            f"{_named(key)}: a module that is no unit can override placement only, and must; got "
            f"{text_of(dict(entry))}"
        )
    for pattern, where in _by_name(entry.get("placement", {})).items():
        if not isinstance(pattern, str):
            raise PolicyError(
                f"{_named(key)}: placement maps patterns for parameter names; got {pattern!r}"
            )
        checked_where(where, _named(key))


def _by_name(placement: Any) -> Mapping[str, Any]:
    return placement if isinstance(placement, Mapping) else {"*": placement}


def _check_fields(key: Key, values: Mapping[str, Any]) -> None:
    try:
        Policy(**values)
    except PolicyError as error:
        raise PolicyError(f"{_named(key)}: {error}") from None


def _named(key: Key) -> str:
    return f"ModulePolicy key {text_of(key)}"
