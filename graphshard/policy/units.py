"""Policies that choose units by size, by class, or by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from graphshard.errors import PolicyError
from graphshard.policy.base import Policy, as_set, text_of
from graphshard.policy.fields import is_int, named_arguments
from graphshard.policy.strategy import Strategy
from graphshard.policy.tree import ModuleTree

__all__ = ["BlockPolicy", "LambdaPolicy", "Policy", "SizePolicy", "Strategy"]


@named_arguments
@dataclass(frozen=True, repr=False)
class SizePolicy(Policy):
    """Units by size, as torch's `size_based_auto_wrap_policy`, but a tied parameter counts once.

    A module becomes a unit if it has `min_num_params` elements or more besides those of the units
    below it. A tied parameter counts in the lowest module above all its users, whose unit would
    hold it; torch counts it once per user.

    Args:
        min_num_params: least number of elements of a unit, inclusive. A whole float (1e8) works.
        force_leaf: modules of these classes (and subclasses) and the modules below them never
            become units; their parameters go to the unit around them.
        exclude: modules of these classes (and subclasses) never become units, but modules below
            them may.

    Raises:
        PolicyError: a field has an invalid value.
    """

    min_num_params: int = 100_000_000
    force_leaf: Iterable[type] = frozenset({nn.MultiheadAttention})
    exclude: Iterable[type] = frozenset({nn.ModuleList, nn.ModuleDict})

    def __post_init__(self) -> None:
        super().__post_init__()
        number: int | float = self.min_num_params
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if not is_int(number) or number < 0:
            raise PolicyError(
                f"min_num_params must be a whole number of elements, 0 or more; got {number!r}"
            )
        object.__setattr__(self, "min_num_params", number)
        for name in ("force_leaf", "exclude"):
            classes = as_set(name, getattr(self, name))
            if not all(isinstance(c, type) for c in classes):
                raise PolicyError(f"{name} must hold module classes; got {text_of(classes)}")
            object.__setattr__(self, name, classes)

    def select(self, tree: ModuleTree) -> list[str]:
        """See `Policy.select`."""
        min_num_params, leaves, excluded = (
            self.min_num_params,
            tuple(self.force_leaf),
            tuple(self.exclude),
        )
        below = tree.numel_below()
        reachable: set[str] = set()
        for fqn, module in tree.modules.items():
            reached = not fqn or tree.parent[fqn] in reachable
            if reached and below[fqn] >= min_num_params and not isinstance(module, leaves):
                reachable.add(fqn)
        taken = dict.fromkeys(tree.modules, 0)  # elements in units at or below a module
        chosen: set[str] = set()
        for fqn in reversed(tree.modules):  # children first
            if not fqn:
                continue
            remainder = below[fqn] - taken[fqn]
            is_large = fqn in reachable and remainder >= min_num_params
            if is_large and not isinstance(tree.modules[fqn], excluded):
                chosen.add(fqn)
                taken[fqn] = below[fqn]
            taken[tree.parent[fqn]] += taken[fqn]
        return [fqn for fqn in tree.modules if fqn in chosen]


@named_arguments
@dataclass(frozen=True, repr=False)
class BlockPolicy(Policy):
    """Every module of the given classes is a unit.

    Args:
        classes: classes (subclasses match too), class names (case-sensitive, exact), or a single
            one of either. None or an empty collection: the model's own `_no_split_modules`.

    Raises:
        PolicyError: `classes` holds something else. `select` raises it if a class matches no
            module, or if none is given and no `_no_split_modules` of the model matches.
    """

    classes: Iterable[type | str] | type | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        classes = self.classes
        if isinstance(classes, (type, str)):
            classes = (classes,)
        classes = as_set("classes", classes or ())
        if not all(isinstance(c, (type, str)) for c in classes):
            raise PolicyError(f"classes must hold classes or class names; got {text_of(classes)}")
        object.__setattr__(self, "classes", classes or None)

    def select(self, tree: ModuleTree) -> list[str]:
        """See `Policy.select`."""
        classes = self.classes or _no_split_modules(tree)
        assert isinstance(classes, frozenset)
        types = tuple(c for c in classes if isinstance(c, type))
        matched: set[type | str] = set()
        chosen: list[str] = []
        for fqn, module in tree.modules.items():
            hits = classes & {type(module).__name__, *(c for c in types if isinstance(module, c))}
            if hits:
                matched |= hits
                if fqn:
                    chosen.append(fqn)
        # A model's own list may name classes that this configuration of the model lacks.
        missing = classes - matched if self.classes or not matched else frozenset()
        if missing:
            class_names = sorted({type(module).__name__ for module in tree.modules.values()})
            raise PolicyError(
                f"no module of the model is of class {', '.join(sorted(map(text_of, missing)))}; "
                f"name one of the classes it has: {', '.join(class_names)}"
            )
        refuse_containers(type(self).__name__, tree, chosen)
        return chosen


@named_arguments
@dataclass(frozen=True, repr=False)
class LambdaPolicy(Policy):
    """Every module for which `fn(module)` is True is a unit; `fn` is not called for the root.

    Args:
        fn: takes an `nn.Module` and returns a bool, the same one on every rank.

    Raises:
        PolicyError: `fn` is not callable. `select` raises it if `fn` returns no bool.
    """

    fn: Callable[[nn.Module], bool]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.fn):
            raise PolicyError(f"fn must be a function of a module; got {self.fn!r}")
        if isinstance(self.fn, type) and issubclass(self.fn, nn.Module):
            name = self.fn.__name__
            raise PolicyError(
                f"fn must be a function of a module; got the class {name}; write "
                f"BlockPolicy({{{name}}}) to make a unit of each {name}"
            )

    def select(self, tree: ModuleTree) -> list[str]:
        """See `Policy.select`."""
        chosen = []
        for fqn, module in tree.modules.items():
            if not fqn:
                continue
            answer = self.fn(module)
            if not isinstance(answer, bool):
                raise PolicyError(
                    f"fn must return True or False; it returned {answer!r} for {fqn} "
                    f"({type(module).__name__})"
                )
            if answer:
                chosen.append(fqn)
        refuse_containers(type(self).__name__, tree, chosen)
        return chosen


def _no_split_modules(tree: ModuleTree) -> frozenset[str]:
    model = tree.modules[""]
    names = frozenset(getattr(model, "_no_split_modules", None) or ())
    if not names:
        raise PolicyError(
            f"BlockPolicy() without classes takes the model's _no_split_modules, and "
            f"{type(model).__name__} has none; name the classes, as in BlockPolicy({{Block}})"
        )
    return names


def is_container(module: nn.Module) -> bool:
    """Whether `module` only holds other modules and never runs itself."""
    holds = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return holds and type(module).forward is nn.Module.forward


def refuse_containers(who: str, tree: ModuleTree, chosen: Iterable[str]) -> None:
    """Refuse units of containers that never run."""
    for fqn in chosen:
        module = tree.modules[fqn]
        if is_container(module):
            raise PolicyError(
                f"{who} makes a unit of {fqn}, a {type(module).__name__}, but a "
                "container without a forward never runs; choose the modules in it instead"
            )
