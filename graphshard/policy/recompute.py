"""A policy's field `recompute`: the calls to recompute in backward, and the results to keep.

    "units"        recompute every call of every unit but the root
    a class        recompute every call of a module of this class; a class name or several work too
    "selective"    keep the results of matrix products, convolutions and attention, and recompute
                   the rest of those calls (of the units' calls, if no class is given)
    "budget"       recompute only as much of those calls (of the units' calls and the root's own
                   code, if no class is given) as makes the step fit in `memory_budget`

A word and classes are combined in a collection: ("selective", Block).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from graphshard.errors import PolicyError
from graphshard.policy.tree import ModuleTree

UNITS = "units"


SELECTIVE = "selective"


BUDGET = "budget"


WORDS = (UNITS, SELECTIVE, BUDGET)


@dataclass(frozen=True)
class RecomputeChoice:
    """The parsed field `recompute`.

    classes: each call of a module of these classes is a region. units: each call of a unit is a
    region. selective, budget: how the results to keep are chosen; without either, only a region's
    inputs are kept.
    """

    classes: frozenset[type | str] = frozenset()
    units: bool = False
    selective: bool = False
    budget: bool = False

    @classmethod
    def of(cls, value: Any) -> RecomputeChoice:
        """Parse the field's value."""
        if value is None:
            return cls()
        entries = (value,) if isinstance(value, (str, type)) else value
        if not isinstance(entries, Collection) or not all(
            isinstance(entry, (str, type)) and entry != "" for entry in entries
        ):
            raise PolicyError(
                f"recompute must be one of {', '.join(map(repr, WORDS))}, classes or class names, "
                f"a collection of these, or None; got {value!r}"
            )
        words = {entry for entry in entries if entry in WORDS}
        classes = frozenset(entries) - words
        if {SELECTIVE, BUDGET} <= words:
            raise PolicyError(
                'recompute="selective" keeps fixed operators and "budget" chooses them; give one'
            )
        if UNITS in words and classes:
            raise PolicyError(
                'recompute takes either units or classes as regions; leave out "units" or the '
                "classes"
            )
        return cls(
            classes,
            units=bool(words) and not classes,
            selective=SELECTIVE in words,
            budget=BUDGET in words,
        )

    def modules(self, tree: ModuleTree) -> tuple[str, ...]:
        """FQNs of the modules of `classes`, in module order.

        A subclass matches a class, but not a class name.
        """
        types = tuple(c for c in self.classes if isinstance(c, type))
        missing = set(self.classes)
        fqns = []
        for fqn, module in tree.modules.items():
            hits = self.classes & {
                type(module).__name__, *(c for c in types if isinstance(module, c))
            }  # fmt: skip
            missing -= hits
            if hits:
                fqns.append(fqn)
        if missing:
            missing_names = sorted(c if isinstance(c, str) else c.__name__ for c in missing)
            class_names = sorted({type(module).__name__ for module in tree.modules.values()})
            raise PolicyError(
                f"recompute names {', '.join(missing_names)}, and the model has no such module; "
                f"name one of its classes ({', '.join(class_names)}), or one of {', '.join(WORDS)}"
            )
        return tuple(fqns)


def as_field(value: Any) -> Any:
    """Return `value` as the policy stores it: a single entry alone, several as a frozenset."""
    if value is None or isinstance(value, (str, type)):
        return value
    entries = frozenset(value)
    if not entries:
        return None
    return next(iter(entries)) if len(entries) == 1 else entries
