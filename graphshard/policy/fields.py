"""Checks of dataclass fields, written as a table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from graphshard.errors import KeywordError, PolicyError
from graphshard.format import meant

AnyCallable = TypeVar("AnyCallable", bound=Callable[..., Any])

Check = tuple[Callable[[Any], bool], str]
"""Whether a value is valid, and the words for a valid value after "must be"."""


def check_fields(owner: object, checks: Mapping[str, Check], prefix: str = "") -> None:
    """Check fields of `owner` by name; `prefix` starts the message."""
    for name, (is_valid, expected) in checks.items():
        value = getattr(owner, name)
        if not is_valid(value):
            raise PolicyError(f"{prefix}{name} must be {expected}; got {said(value)}")


def said(value: object) -> str:
    """`value` for an error; what torch's FSDPs have may have the name of what is ours."""
    return f"torch's {value!r}" if type(value).__module__.startswith("torch.distr") else repr(value)


def named_arguments(called: AnyCallable) -> AnyCallable:
    """Let `called`, a function or a dataclass, say what argument a misspelt one was meant to be."""
    function: Any = called.__init__ if isinstance(called, type) else called  # type: ignore[misc]
    names = inspect.signature(called).parameters

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in names:
                hint = meant(name, names) or f"; it takes {', '.join(names)}"
                raise KeywordError(f"{called.__name__} takes no argument {name!r}{hint}")
        return function(*args, **kwargs)

    if not isinstance(called, type):
        return cast(AnyCallable, checked)
    called.__init__ = checked  # type: ignore[misc]
    return called


def is_int(value: object) -> bool:
    """Whether `value` is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


FLAG: Check = (lambda value: isinstance(value, bool), "True or False")
