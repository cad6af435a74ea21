"""Which parameters a policy leaves alone."""

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
    """Parameters that are not sharded, by identity, and modules all of whose parameters are not."""

    params: frozenset[int] = frozenset()
    modules: frozenset[str] = frozenset()

    def covers(self, module: str) -> bool:
        """Whether the module of this FQN is ignored, or lies in one that is."""
        return any(not m or module == m or module.startswith(m + ".") for m in self.modules)


def ignored_by(policy: Policy, model: nn.Module) -> Ignored:
    """What `policy.ignored` stands for in `model`.

    A module stands for the parameters of its whole subtree; a tied parameter is ignored under all
    its names; a regular expression must match the whole FQN of modules or parameters (any name).

    Raises:
        PolicyError: an entry is no module or parameter of the model, matches nothing, or is no
            regular expression; or the root is ignored.
    """
    params: set[int] = set()
    modules: set[str] = set()
    entries: Iterable[Any] = policy.ignored or ()  # type: ignore[assignment]
    for entry in entries:
        found_modules, found_params = _found(entry, model)
        if "" in found_modules:
            raise PolicyError(
                f"ignored: {_text(entry)} is the whole model, of which nothing would be sharded"
            )
        modules |= found_modules
        params |= found_params
    for fqn in modules:
        params |= {id(param) for param in model.get_submodule(fqn).parameters()}
    return Ignored(frozenset(params), frozenset(modules))


def _found(entry: Any, model: nn.Module) -> tuple[set[str], set[int]]:
    named_modules = list(model.named_modules(remove_duplicate=False))
    named_params = list(model.named_parameters(remove_duplicate=False))
    if isinstance(entry, nn.Module):
        found = {fqn for fqn, module in named_modules if module is entry}, set[int]()
    elif isinstance(entry, Tensor):
        found = set[str](), {id(param) for _, param in named_params if param is entry}
    else:
        try:
            pattern = re.compile(entry)
        except re.error as error:
            raise PolicyError(f"ignored: {entry!r} is no regular expression ({error})") from None
        found = (
            {fqn for fqn, _ in named_modules if fqn and pattern.fullmatch(fqn)},
            {id(param) for name, param in named_params if pattern.fullmatch(name)},
        )
    if not any(found):
        raise PolicyError(
            f"ignored: {_text(entry)} is no module or parameter of the model"
            if not isinstance(entry, str)
            else f"ignored: the regular expression {entry!r} matches no module's and no "
            "parameter's whole FQN; for all below a module add .*"
        )
    return found


def _text(entry: Any) -> str:
    if isinstance(entry, Tensor):
        return f"a tensor of shape {tuple(entry.shape)}"
    return f"a {type(entry).__name__}" if isinstance(entry, nn.Module) else repr(entry)
