"""What the user asks for: frozen dataclasses that check themselves and hold no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Any

from torch import nn

from graphshard.errors import PolicyError
from graphshard.module_tree import ModuleTree


class Strategy(StrEnum):
    """Which state is sharded, in torch's names."""

    FULL_SHARD = "FULL_SHARD"  # parameters are freed after forward and gathered again (ZeRO-3)
    SHARD_GRAD_OP = "SHARD_GRAD_OP"  # gathered once, kept until their backward is done (ZeRO-2)
    NO_SHARD = "NO_SHARD"  # a full copy per rank, gradients all-reduced (DDP)


@dataclass(frozen=True, kw_only=True, repr=False)
class Policy:
    """The fields all policies share.

    A policy of your own derives from this and says in `select` which modules become units.

    Args:
        strategy: a `Strategy` or its name.
        backward_prefetch: where a unit's gather in backward is issued: "pre", before the compute of
            the unit that runs before it; "post", after that compute and before its gradients are
            reduced; None, only when the unit itself needs it.
        forward_prefetch: how many units ahead of its use a gather is issued in forward.
        reshard_root: free the root unit after forward and gather it again for backward.
        recompute: "units" computes the forward of every unit but the root again in backward, so
            that only its inputs are saved; None leaves that to the model. Regions under
            `torch.utils.checkpoint` are recomputed either way.
        memory_budget: the most bytes of unsharded parameters that may live at once on a rank;
            a program that passes it is a `VerifyError`. None: no bound.
        sync_module_states: take rank 0's parameters and buffers on every rank.

    Raises:
        PolicyError: a field has a value outside its range.
    """

    strategy: Strategy | str = Strategy.FULL_SHARD
    backward_prefetch: str | None = "pre"
    forward_prefetch: int = 0
    reshard_root: bool = False
    recompute: str | None = None
    memory_budget: int | None = None
    sync_module_states: bool = False

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "strategy", Strategy(self.strategy))
        except ValueError:
            names = ", ".join(s.value for s in Strategy)
            raise PolicyError(f"strategy must be one of {names}; got {self.strategy!r}") from None
        if self.backward_prefetch not in ("pre", "post", None):
            raise PolicyError(
                f'backward_prefetch must be "pre", "post" or None; got {self.backward_prefetch!r}'
            )
        if not _is_int(self.forward_prefetch) or self.forward_prefetch < 0:
            raise PolicyError(
                f"forward_prefetch must be an int, 0 or more; got {self.forward_prefetch!r}"
            )
        if self.recompute not in ("units", None):
            raise PolicyError(f'recompute must be "units" or None; got {self.recompute!r}')
        if self.memory_budget is not None and (
            not _is_int(self.memory_budget) or self.memory_budget <= 0
        ):
            raise PolicyError(
                f"memory_budget must be a positive int of bytes or None; got {self.memory_budget!r}"
            )
        for name in ("reshard_root", "sync_module_states"):
            if not isinstance(getattr(self, name), bool):
                raise PolicyError(f"{name} must be True or False; got {getattr(self, name)!r}")

    def select(self, tree: ModuleTree) -> list[str]:
        """FQNs of the modules that become units besides the root, which always is one.

        Raises:
            PolicyError: the policy asks for what the model does not have.
        """
        raise PolicyError(
            f"{type(self).__name__} does not say which modules become units; use SizePolicy, "
            "BlockPolicy or LambdaPolicy, or define select(self, tree) in a subclass"
        )

    def own_options(self) -> dict[str, str]:
        """The fields that only this kind of policy has, as stable text."""
        return {f.name: _text(getattr(self, f.name)) for f in fields(self) if f.name not in _SHARED}

    def shared_options(self) -> dict[str, str]:
        """The fields every policy has, as stable text."""
        return {name: _text(getattr(self, name)) for name in _SHARED}

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain data, ready for JSON: its kind, and every field."""
        values = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        return {"kind": type(self).__name__, **values}

    def __repr__(self) -> str:
        options = self.own_options() | self.shared_options()
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in options.items())})"


_SHARED = tuple(f.name for f in fields(Policy))


@dataclass(frozen=True, repr=False)
class SizePolicy(Policy):
    """Units by size: torch's `size_based_auto_wrap_policy`, but a tied parameter counts once.

    A module becomes a unit if what remains of it, after the units chosen below it are taken out,
    still has `min_num_params` elements or more. A tied parameter counts in the lowest module above
    all its users, which is where it would be stored; torch counts it once per user.

    Args:
        min_num_params: elements a unit must at least have, inclusive. A whole float (1e8) will do.
        force_leaf: modules of these classes (subclasses too) neither become units nor are looked
            into; their parameters go to the unit around them.
        exclude: modules of these classes (subclasses too) never become units, but are looked into.

    Raises:
        PolicyError: a field has a value outside its range.
    """

    min_num_params: int = 100_000_000
    force_leaf: Iterable[type] = frozenset({nn.MultiheadAttention})
    exclude: Iterable[type] = frozenset({nn.ModuleList, nn.ModuleDict})

    def __post_init__(self) -> None:
        super().__post_init__()
        number: int | float = self.min_num_params
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if not _is_int(number) or number < 0:
            raise PolicyError(
                f"min_num_params must be a whole number of elements, 0 or more; got {number!r}"
            )
        object.__setattr__(self, "min_num_params", number)
        for name in ("force_leaf", "exclude"):
            classes = _as_set(name, getattr(self, name))
            if not all(isinstance(c, type) for c in classes):
                raise PolicyError(f"{name} must hold module classes; got {_text(classes)}")
            object.__setattr__(self, name, classes)

    def select(self, tree: ModuleTree) -> list[str]:
        """See `Policy.select`."""
        least, leaves, excluded = self.min_num_params, tuple(self.force_leaf), tuple(self.exclude)
        below = tree.numel_below()
        looked_into: set[str] = set()
        for fqn, module in tree.modules.items():
            reached = not fqn or tree.parent[fqn] in looked_into
            if reached and below[fqn] >= least and not isinstance(module, leaves):
                looked_into.add(fqn)
        taken = dict.fromkeys(tree.modules, 0)  # elements in units at or below a module
        chosen: set[str] = set()
        for fqn in reversed(tree.modules):  # children first
            if not fqn:
                continue
            remainder = below[fqn] - taken[fqn]
            big = fqn in looked_into and remainder >= least
            if big and not isinstance(tree.modules[fqn], excluded):
                chosen.add(fqn)
                taken[fqn] = below[fqn]
            taken[tree.parent[fqn]] += taken[fqn]
        return [fqn for fqn in tree.modules if fqn in chosen]


@dataclass(frozen=True, repr=False)
class BlockPolicy(Policy):
    """Every module of some classes is a unit.

    Args:
        classes: classes (subclasses match too), class names (case-sensitive, exact), a single one
            of either, or None or nothing for the model's own `_no_split_modules`.

    Raises:
        PolicyError: `classes` holds something else; and from `select`, if a class matches nothing,
            or none is given and the model has no `_no_split_modules` that match.
    """

    classes: Iterable[type | str] | type | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        classes = self.classes
        if isinstance(classes, (type, str)):
            classes = (classes,)
        classes = _as_set("classes", classes or ())
        if not all(isinstance(c, (type, str)) for c in classes):
            raise PolicyError(f"classes must hold classes or class names; got {_text(classes)}")
        object.__setattr__(self, "classes", classes or None)

    def select(self, tree: ModuleTree) -> list[str]:
        """See `Policy.select`."""
        wanted = self.classes or _no_split_modules(tree)
        assert isinstance(wanted, frozenset)
        types = tuple(c for c in wanted if isinstance(c, type))
        matched: set[type | str] = set()
        chosen: list[str] = []
        for fqn, module in tree.modules.items():
            hits = wanted & {type(module).__name__, *(c for c in types if isinstance(module, c))}
            if hits:
                matched |= hits
                if fqn:
                    chosen.append(fqn)
        # A model's own list may name classes that this configuration of it does not have.
        missing = wanted - matched if self.classes or not matched else frozenset()
        if missing:
            has = sorted({type(module).__name__ for module in tree.modules.values()})
            raise PolicyError(
                f"no module of the model is of class {', '.join(sorted(map(_text, missing)))}; "
                f"name one of the classes it has: {', '.join(has)}"
            )
        _refuse_containers(self, tree, chosen)
        return chosen


@dataclass(frozen=True, repr=False)
class LambdaPolicy(Policy):
    """Every module for which `fn(module)` is True is a unit; the root is not asked about.

    Args:
        fn: takes an `nn.Module` and returns a bool; should be the same on every rank.

    Raises:
        PolicyError: `fn` is not callable; and from `select`, if it returns no bool.
    """

    fn: Callable[[nn.Module], bool]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.fn):
            raise PolicyError(f"fn must be a function of a module; got {self.fn!r}")

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
        _refuse_containers(self, tree, chosen)
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


def _refuse_containers(policy: Policy, tree: ModuleTree, chosen: Iterable[str]) -> None:
    for fqn in chosen:
        module = tree.modules[fqn]
        if (
            isinstance(module, (nn.ModuleList, nn.ModuleDict))
            and type(module).forward is nn.Module.forward
        ):
            raise PolicyError(
                f"{type(policy).__name__} makes a unit of {fqn}, a {type(module).__name__}, but a "
                "container without a forward never runs; choose the modules in it instead"
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_set(name: str, value: Any) -> frozenset[Any]:
    try:
        return frozenset(value)
    except TypeError:
        raise PolicyError(f"{name} must be a set of classes; got {value!r}") from None


def _text(value: Any) -> str:
    """Text that is the same in every process: no addresses, no hash order."""
    if isinstance(value, frozenset):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    if isinstance(value, Enum):
        return str(value.value)
    if _is_int(value):
        return f"{value:_}"
    if isinstance(value, type):
        return value.__name__
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return repr(value)


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(c if isinstance(c, str) else _text(c) for c in value)
    if value is None or type(value) in (bool, int, str):
        return value
    return _text(value)
