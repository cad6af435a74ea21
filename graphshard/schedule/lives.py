"""How many bytes each order of the same nodes holds, without bringing them into that order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import fx

from graphshard.cost.buffers import buffers_of
from graphshard.program import Program
from graphshard.schedule.budget import Budget
from graphshard.step_memory import Storage, storages_of


@dataclass(frozen=True)
class Lives:
    """The storages of a program that count in a budget, by the nodes that bound their lives.

    Nodes are numbers, those of `number`. Of each storage: size in bytes; the node it is born with
    (-1: with the step) and how many places behind that; the nodes one of which is its last, as a
    part of `ends` that begins at `start`, and how many places behind that. Storages that outlive
    the step come last and have no ends.
    """

    number: Mapping[fx.Node, int]
    size: np.ndarray
    first: np.ndarray
    late: np.ndarray
    ends: np.ndarray
    start: np.ndarray
    over: np.ndarray

    @classmethod
    def of(cls, program: Program, budget: Budget) -> Lives:
        """Those of `program`, whatever order its nodes stand in."""
        number = {node: index for index, node in enumerate(program.graph.nodes)}
        storages = list(storages_of(program).all)
        if not budget.of_policy:
            storages += buffers_of(program, budget.backend)
        storages = [storage for storage in storages if storage.size]
        storages.sort(key=lambda storage: not storage.ends)
        ends: list[int] = []
        start: list[int] = []
        for storage in storages:
            if storage.ends:
                start.append(len(ends))
                ends += [number[end] for end in storage.ends]
        return cls(
            number,
            _array(storage.size for storage in storages),
            _array(_number(storage, number) for storage in storages),
            _array(storage.late for storage in storages),
            _array(ends),
            _array(start),
            _array(storage.over for storage in storages if storage.ends),
        )

    def places(self, order: Iterable[fx.Node]) -> np.ndarray:
        """By node, where it stands in `order`, which has all nodes."""
        places = np.empty(len(self.number), dtype=np.int64)
        places[[self.number[node] for node in order]] = np.arange(len(self.number))
        return places

    def spans(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places at which each storage is born, and at which each that has an end dies."""
        born = np.where(self.first < 0, 0, places[self.first]) + self.late
        if not len(self.start):
            return born, self.start
        return born, np.maximum.reduceat(places[self.ends], self.start) + self.over

    def live(self, places: np.ndarray) -> np.ndarray:
        """By place, the bytes alive while the node there runs."""
        born, dies = self.spans(places)
        change = np.zeros(len(places) + 2, dtype=np.int64)
        np.add.at(change, born, self.size)
        np.subtract.at(change, dies + 1, self.size[: len(dies)])
        return np.cumsum(change)[: len(places)]


def _array(numbers: Iterable[int]) -> np.ndarray:
    return np.fromiter(numbers, dtype=np.int64)


def _number(storage: Storage, number: Mapping[fx.Node, int]) -> int:
    return -1 if storage.first is None else number[storage.first]
