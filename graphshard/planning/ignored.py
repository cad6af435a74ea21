"""The parameters and modules that a policy ignores."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from graphshard.errors import PolicyError
from graphshard.policy.base import Policy


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
