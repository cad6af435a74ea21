"""Compiling the forms of a program, for which ranks on one host share what they have made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

from graphshard.pipeline import Stages
from graphshard.runtime.group import Group
from graphshard.runtime.region import Form, compile_all

T = TypeVar("T")


def compile_forms(forms: Sequence[Form], group: Group, progress: Stages) -> None:
    """Compile all of `forms` that are not compiled yet, in the order of this rank."""
    with progress.stage("compile", len(forms)):
        compile_all(turned(forms, *_place_on_host(group)), progress.advance)


def turned(forms: Sequence[T], rank: int, ranks: int) -> list[T]:
    """`forms` in the order in which one of the `ranks` on a host compiles them.

    Their compilers keep what they make in one cache on disk. So ranks begin at different places,
    every second one goes backwards, and each finds there what others made before it came to it.
    Nobody waits for anybody: what is not there yet a rank makes itself.
    """
    pair, back = divmod(rank, 2)
    begin = (pair + back) * len(forms) // -(-ranks // 2)
    order = [*forms[begin:], *forms[:begin]]
    return order[::-1] if back else order


def _place_on_host(group: Group) -> tuple[int, int]:
    """Which of the ranks of its host this one is; which of the group, where nobody says."""
    rank, ranks = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks):
        return int(rank), int(ranks)
    return group.rank, group.size
