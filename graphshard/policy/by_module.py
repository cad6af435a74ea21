"""`ModulePolicy`: units by class or name, each with options of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from graphshard.errors import PolicyError
from graphshard.policy.base import Policy, text_of
from graphshard.policy.placement import RequestedPlacement, checked_where
from graphshard.policy.strategy import Strategy
from graphshard.policy.tree import ModuleTree, TreeParam
from graphshard.policy.units import refuse_containers

UNIT_OVERRIDES = ("strategy", "reshard_after_forward", "mixed_precision")


OVERRIDES = (*UNIT_OVERRIDES, "placement", "unit")


Key = type | str


Match = tuple[Key, Mapping[str, Any], list[str]]


@dataclass(frozen=True, repr=False)
class ModulePolicy(Policy):
    """Chosen modules are units, with options of their own, beside those another policy chooses.

        ModulePolicy(
            {
                "layers.31": {"reshard_after_forward": False},
                nn.Embedding: {"strategy": "NO_SHARD"},
                "*.experts": {"placement": {"w?": 1}},
            },
            base=BlockPolicy({Block}),
        )

    Args:
        modules: which modules, and what is other for them than the policy's own fields say. A key
            is a class (subclasses match), or a shell pattern that must match a module's whole FQN,
            case-sensitive ("*" matches dots too; "" is the root). A value maps some of

            `strategy`, `reshard_after_forward`, `mixed_precision`: as the fields of those names.
                A `strategy` also sets aside the policy's and earlier entries'
                `reshard_after_forward`; NO_SHARD, earlier entries' `placement`, too.
            `placement`: the dim the unit's parameters are split along, or "replicate": of all that
                can be (the dim must be a multiple of the ranks; dim 0 is padded if it is none), or
                a mapping from patterns on the parameters' names within the module to one of these.
                A name without wildcards must be possible.
            `unit`: False leaves the module in the unit around it, and only says how its parameters
                are placed.

            Where several entries match, the later override the earlier ones, field by field.
        base: chooses further units. Its shared fields must be the defaults; give them here.

    Raises:
        PolicyError: a field has a value outside its range; and from `select`, `overrides` and the
            planner, if a key matches nothing or asks for what its modules cannot have.
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
        for key, wanted in self.modules.items():
            _check_entry(key, wanted)
        object.__setattr__(self, "modules", {k: dict(v) for k, v in self.modules.items()})
        base = self.base
        if base is not None and not isinstance(base, Policy):
            raise PolicyError(f"base must be an instance of a Policy or None; got {base!r}")
        chosen = (
            [] if base is None else [*base.chosen_options(), *(["notes"] if base.notes else [])]
        )
        if chosen:
            raise PolicyError(
                f"base chooses units and nothing else, but it sets {', '.join(chosen)}; give that "
                "to the ModulePolicy itself"
            )

    def select(self, tree: ModuleTree) -> list[str]:
        """See `Policy.select`."""
        chosen = set() if self.base is None else set(self.base.select(tree))
        for _, wanted, fqns in self._matches(tree):
            if wanted.get("unit", True):
                chosen.update(fqns)
        return [fqn for fqn in tree.modules if fqn and fqn in chosen]

    def overrides(self, tree: ModuleTree) -> Mapping[str, Mapping[str, Any]]:
        """See `Policy.overrides`; `placement` is given as a `RequestedPlacement` by parameter."""
        given = {} if self.base is None else self.base.overrides(tree)
        found: dict[str, dict[str, Any]] = {fqn: dict(o) for fqn, o in given.items()}
        around = tree.units_around(self.select(tree))
        owned: dict[str, list[TreeParam]] = {}
        for entry in tree.params:
            owned.setdefault(around[entry.home], []).append(entry)
        for key, wanted, fqns in self._matches(tree):
            for fqn in fqns:
                self._override(key, wanted, found.setdefault(fqn, {}))
            for fqn, entry, wish in _wishes(key, wanted, fqns, tree, around, owned):
                placed = found.setdefault(fqn, {}).setdefault("placement", {})
                placed[entry.names[0]] = wish
        return {fqn: own for fqn, own in found.items() if own}

    def _override(self, key: Key, wanted: Mapping[str, Any], own: dict[str, Any]) -> None:
        if "strategy" in wanted:
            own.pop("reshard_after_forward", None)
            if Strategy(wanted["strategy"]) is Strategy.NO_SHARD:
                own.pop("placement", None)
        own |= {name: wanted[name] for name in UNIT_OVERRIDES if name in wanted}
        _check_fields(key, {"strategy": self.strategy, **own})

    def _matches(self, tree: ModuleTree) -> Iterator[Match]:
        """Each key with the FQNs it matches, at least one, in module order."""
        for key, wanted in self.modules.items():
            if isinstance(key, str):
                fqns = [fqn for fqn in tree.modules if fnmatchcase(fqn, key)]
            else:
                fqns = [fqn for fqn, module in tree.modules.items() if isinstance(module, key)]
            if not fqns:
                classes = {type(module).__name__ for module in tree.modules.values()}
                said = (
                    f"{key} is the name of a class; use the class itself as the key"
                    if key in classes
                    else "keys are module classes, or patterns for a module's whole FQN"
                )
                raise PolicyError(f"{_named(key)}: no module of the model matches; {said}")
            if wanted.get("unit", True):
                refuse_containers(_named(key), tree, fqns)
            yield key, wanted, fqns


def _wishes(
    key: Key,
    wanted: Mapping[str, Any],
    fqns: Iterable[str],
    tree: ModuleTree,
    around: Mapping[str, str],
    owned: Mapping[str, list[TreeParam]],
) -> Iterator[tuple[str, TreeParam, RequestedPlacement]]:
    """What `wanted["placement"]` says of each parameter: its unit, itself, and what is wished."""
    if "placement" not in wanted:
        return
    by_name = _by_name(wanted["placement"])
    unmatched = dict.fromkeys(by_name)
    for fqn in fqns:
        unit = around[fqn]
        for entry in owned.get(unit, ()):
            if not tree.is_below(entry.home, fqn):
                continue
            names = _names_within(fqn, entry)
            for pattern, where in by_name.items():
                if any(fnmatchcase(name, pattern) for name in names):
                    unmatched.pop(pattern, None)
                    by = f"{_named(key)}, placement of {pattern!r}"
                    yield (
                        unit,
                        entry,
                        RequestedPlacement(where, by, strict=not set(pattern) & set("*?[")),
                    )
    if unmatched:
        raise PolicyError(
            f"{_named(key)}: no parameter of a module it matches has a name like "
            f"{', '.join(map(repr, unmatched))}; names are those within the module, and parameters "
            "of units inside it are not its own"
        )


def _names_within(fqn: str, entry: TreeParam) -> list[str]:
    """The names of a parameter as the module `fqn` has them."""
    prefix = f"{fqn}." if fqn else ""
    return [name[len(prefix) :] for name in entry.names if name.startswith(prefix)]


def _check_entry(key: Any, wanted: Any) -> None:
    """Check what one entry says by itself."""
    if not isinstance(key, (type, str)):
        raise PolicyError(
            f"ModulePolicy: a key must be a module class or a pattern for a module's FQN; got "
            f"{key!r}"
        )
    if not isinstance(wanted, Mapping):
        raise PolicyError(
            f"{_named(key)}: its value must be a mapping of overrides; got {wanted!r}"
        )
    unknown = [name for name in wanted if name not in OVERRIDES]
    if unknown:
        raise PolicyError(
            f"{_named(key)}: unknown override {', '.join(map(repr, unknown))}; a module can "
            f"override {', '.join(OVERRIDES)}"
        )
    _check_fields(key, {name: wanted[name] for name in ("mixed_precision",) if name in wanted})
    if "strategy" in wanted:
        _check_fields(key, {name: wanted[name] for name in UNIT_OVERRIDES if name in wanted})
    elif "reshard_after_forward" in wanted:
        _check_fields(key, {"reshard_after_forward": wanted["reshard_after_forward"]})
    unit = wanted.get("unit", True)
    if not isinstance(unit, bool):
        raise PolicyError(f"{_named(key)}: unit must be True or False; got {unit!r}")
    if not unit and set(wanted) != {"unit", "placement"}:
        raise PolicyError(
            f"{_named(key)}: a module that is no unit can override placement only, and must; got "
            f"{text_of(dict(wanted))}"
        )
    for pattern, where in _by_name(wanted.get("placement", {})).items():
        if not isinstance(pattern, str):
            raise PolicyError(
                f"{_named(key)}: placement maps patterns for parameter names; got {pattern!r}"
            )
        checked_where(where, _named(key))


def _by_name(placement: Any) -> Mapping[str, Any]:
    return placement if isinstance(placement, Mapping) else {"*": placement}


def _check_fields(key: Key, values: Mapping[str, Any]) -> None:
    """Check overrides as the fields of a policy are checked."""
    try:
        Policy(**values)
    except PolicyError as error:
        raise PolicyError(f"{_named(key)}: {error}") from None


def _named(key: Key) -> str:
    return f"ModulePolicy key {text_of(key)}"
