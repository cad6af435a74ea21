"""What a policy's field `recompute` asks for: which calls are recomputed, and what of them is kept.

    "units"        every call of every unit but the root
    a class        every call of a module of it; or its name, or several of either
    "selective"    of those calls (of the units', if no class is given) keep the results of matrix
                   products, convolutions and attention, and recompute the rest
    "budget"       of those calls (of the units' and the root's own code, if no class is given)
                   recompute as little as makes the step fit in `memory_budget`

A word and classes together are given as a collection: ("selective", Block).
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
    """The field `recompute`, read.

    classes: each call of a module of these is a region. units: each call of a unit is. selective,
    budget: what is kept of a region; neither: nothing but its inputs.
    """

    classes: frozenset[type | str] = frozenset()
    units: bool = False
    selective: bool = False
    budget: bool = False

    @classmethod
    def of(cls, value: Any) -> RecomputeChoice:
        """`value` as given for the field.

        Raises:
            PolicyError: it is neither None, a word above, a class, a class name, nor a collection
                of those; or the words exclude each other.
        """
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
                'recompute="selective" says what to keep and "budget" finds it out; give one'
            )
        if UNITS in words and classes:
            raise PolicyError(
                'recompute takes either the units or classes as regions; leave out "units" or the '
                "classes"
            )
        return cls(
            classes,
            units=bool(words) and not classes,
            selective=SELECTIVE in words,
            budget=BUDGET in words,
        )

    def modules(self, tree: ModuleTree) -> tuple[str, ...]:
        """FQNs of the modules of `classes`, in module order; subclasses match a class, not a name.

        Raises:
            PolicyError: a class matches no module; names it.
        """
        types = tuple(c for c in self.classes if isinstance(c, type))
        missing = set(self.classes)
        found = []
        for fqn, module in tree.modules.items():
            hits = self.classes & {
                type(module).__name__, *(c for c in types if isinstance(module, c))
            }  # fmt: skip
            missing -= hits
            if hits:
                found.append(fqn)
        if missing:
            names = sorted(c if isinstance(c, str) else c.__name__ for c in missing)
            has = sorted({type(module).__name__ for module in tree.modules.values()})
            raise PolicyError(
                f"recompute names {', '.join(names)}, of which the model has no module; name one "
                f"of the classes it has ({', '.join(has)}), or one of {', '.join(WORDS)}"
            )
        return tuple(found)


def as_field(value: Any) -> Any:
    """`value` in the one form the policy keeps it in: a lone word or class as it is."""
    if value is None or isinstance(value, (str, type)):
        return value
    entries = frozenset(value)
    if not entries:
        return None
    return next(iter(entries)) if len(entries) == 1 else entries
