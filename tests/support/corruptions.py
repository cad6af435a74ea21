"""Corrupting finished programs: every kind of `corruption_kinds`, at chosen places."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache

from corruption_kinds import HARMLESS, Kind
from corruption_programs import SETTINGS, sample

from graphshard.errors import VerifyError


def outcome(setting: str, kind: Kind, index: int) -> tuple[str, str]:
    """Corrupt a copy of a program at one place and verify it.

    Returns:
        The rule that refuses it, and the error; or HARMLESS.
    """
    corrupted = sample(setting).copy()
    kind.edit(corrupted, kind.places(corrupted.program)[index])
    try:
        corrupted.verify()
    except VerifyError as error:
        return rule_of(error), str(error)
    return HARMLESS, ""


def rule_of(error: VerifyError) -> str:
    """The name of the rule that `error` names."""
    return str(error).split("breaks the rule '")[1].split("'")[0]


@cache
def count(setting: str, kind: Kind) -> int:
    """The number of places where the program of a setting can be corrupted."""
    return len(kind.places(sample(setting).program))


def chosen(kind: Kind, *, programs: int, each: int) -> Iterator[tuple[str, int]]:
    """Up to `each` places in each of up to `programs` programs: (setting, index of the place).

    Other programs and other places for each kind, the same ones in each run.
    """
    first = zlib.crc32(kind.name.encode()) % len(SETTINGS)
    names = [*SETTINGS]
    fitting = [name for name in (*names[first:], *names[:first]) if count(name, kind)]
    for name in fitting[:programs]:
        number = count(name, kind)
        start = zlib.crc32(f"{kind.name} {name}".encode())
        step = max(1, number // each)
        yield from ((name, (start + i * step) % number) for i in range(min(number, each)))
