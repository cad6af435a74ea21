"""Parameters in groups an optimizer can take: each of one kind, with options found by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.errors import PolicyError

Options = Mapping[str, Any]


Rule = Callable[[str, nn.Parameter], Options | None] | Sequence[tuple[str, Options]]


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], rule: Rule | None
) -> list[dict[str, Any]]:
    """See `ShardedModule.parameter_groups`; `named` are pairs of a name and a parameter."""
    named = [(name, param) for name, param in named if param.requires_grad]
    options_of: Callable[[str, nn.Parameter], Any] = _as_function(rule, [name for name, _ in named])
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, param in named:
        options = options_of(name, param)
        options = {} if options is None else options
        if not isinstance(options, Mapping) or {"params", "names"} & options.keys():
            raise PolicyError(
                "the rule must give a dict of an optimizer's options (other than params and "
                f"names), or None; it gave {options!r} for {name!r}"
            )
        # repr: options need not be hashable (betas in a list).
        key = (*_kind(param), *sorted((k, repr(v)) for k, v in options.items()))
        group = groups.setdefault(key, {"params": [], "names": [], **options})
        group["params"].append(param)
        group["names"].append(name)
    return list(groups.values())


def _as_function(
    rule: Rule | None, names: Sequence[str]
) -> Callable[[str, nn.Parameter], Options | None]:
    if rule is None:
        return lambda name, param: None
    if callable(rule):
        return rule
    pairs = []
    rules: Sequence[Any] = rule
    for pair in rules:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise PolicyError(
                "rule must be a function of (name, parameter), or hold pairs of a regular "
                f"expression and a dict of options; got {pair!r}"
            )
        expression = re.compile(pair[0])
        if not any(map(expression.search, names)):
            raise PolicyError(f"the expression {pair[0]!r} matches no trainable parameter")
        pairs.append((expression, pair[1]))
    return lambda name, param: next((o for e, o in pairs if e.search(name)), None)


def _kind(param: Tensor) -> tuple[Any, ...]:
    if not isinstance(param, DTensor):
        return (None, param.dtype, param.device)
    return (param.device_mesh, param.dtype, param.device)
