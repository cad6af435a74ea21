"""Checks of dataclass fields, written as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graphshard.errors import PolicyError

Check = tuple[Callable[[Any], bool], str]
"""Whether a value is valid, and the words for a valid value after "must be"."""


def check_fields(owner: object, checks: Mapping[str, Check], prefix: str = "") -> None:
    """Check fields of `owner` by name; `prefix` starts the message."""
    for name, (is_valid, expected) in checks.items():
        value = getattr(owner, name)
        if not is_valid(value):
            raise PolicyError(f"{prefix}{name} must be {expected}; got {value!r}")


def is_int(value: object) -> bool:
    """Whether `value` is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


FLAG: Check = (_is_flag, "True or False")
