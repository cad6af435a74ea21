"""Telling whether a pass changed anything, without reading what it left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import is_
from typing import Any

from graphshard.program import Program

Snapshot = Sequence[Any]


def snapshot(program: Program) -> Snapshot | None:
    """Everything of `program` that a pass may replace: its nodes in their order, and of each its
    operator, arguments and notes; its tables.

    Two of them are `equal` if nothing was replaced in between. Arguments of nodes are, whenever
    they change. None where something may change in place: symbolic sizes note what they are asked.
    """
    if program.sizes is not None:
        return None
    held: list[Any] = [getattr(program, field.name) for field in fields(program)]
    for node in program.graph.nodes:
        held += (node, node.op, node.target, node.args, node.kwargs)
        held += node.meta
        held += node.meta.values()
    return held


def equal(before: Snapshot | None, after: Snapshot | None) -> bool:
    """Whether both are of one program in which nothing was replaced."""
    if before is None or after is None or len(before) != len(after):
        return False
    return all(map(is_, before, after))
