"""Which memory every node of a program allocates, and when it is given back.

One walk over the graph gives each value its storages: a view has those of what it views, a gather's
`wait` those the gather filled, any other op new ones. A storage lives from the node that allocates
it to the last node that reads a value in it, since the generated code drops every name after its
last use; what a gather filled lives until its `free`, whatever reads it. What lives in forward
beyond its last reader there is what backward reads.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from graphshard import ops
from graphshard.plan import ShardingPlan
from graphshard.program import BACKWARD, FORWARD, Program
from graphshard.views import is_view_op

UNSHARDED = "unsharded parameters"
ACTIVATIONS = "activations saved"
TEMPORARIES = "temporaries"
FULL_GRADIENTS = "gradients to reduce"
GRADIENTS = "gradients"
COMMUNICATION = "communication buffers"

END = 1 << 60
"""The place of a storage's death that lies after the step."""


@dataclass
class Storage:
    """Bytes that `node` allocates; alive from its place up to and including `last`."""

    node: fx.Node
    bytes: int
    category: str
    unit: str
    first: int
    last: int
    host: bool = False  # on the host, not on the device


class Storages:
    """Every storage of a program, in the order they are allocated.

    Args:
        program: rewritten.
        plan: the plan it was rewritten by.
        backend: "nccl" or "gloo", which need different buffers.
    """

    def __init__(self, program: Program, plan: ShardingPlan, backend: str) -> None:
        self.program = program
        self.plan = plan
        self.backend = backend
        self.all: list[Storage] = []
        self._of: dict[fx.Node, list[list[Storage]]] = {}  # by result of the node
        self._place = {node: place for place, node in enumerate(program.graph.nodes)}
        self._waits: dict[fx.Node, fx.Node] = {}
        for node in program.nodes():
            if node.target is ops.wait:
                self._waits[ops.collective_of(node)] = node
        for node in program.nodes():
            self._visit(node)
        self._close()

    # -- one node ---------------------------------------------------------------------------------

    def _visit(self, node: fx.Node) -> None:
        for value in node.all_input_nodes:
            self._read(value, self._last_read_by(node))
        if node.target is ops.free:
            source: Any = node.args[0]
            for storage in self._merged(source):
                storage.last = self._place[node]
        elif node.target is ops.wait:
            self._of[node] = self._of[ops.collective_of(node)]
        elif node.target is ops.all_gather:
            self._gather(node)
        elif node.target in ops.REDUCES:
            self._reduce(node)
        elif node.target is operator.getitem:
            self._pick(node)
        elif is_view_op(node.target):
            source = node.args[0]
            viewed = self._merged(source) if isinstance(source, fx.Node) else []
            self._of[node] = [viewed for _ in _results(node.meta.get("val"))]
        else:
            self._compute(node)

    def _last_read_by(self, node: fx.Node) -> int:
        """A collective reads its operands until it is waited for."""
        wait = self._waits.get(node)
        return self._place[node if wait is None else wait]

    def _read(self, value: fx.Node, place: int) -> None:
        for storages in self._of.get(value, ()):
            for storage in storages:
                if storage.category != UNSHARDED:
                    storage.last = max(storage.last, place)

    def _pick(self, node: fx.Node) -> None:
        source, index = node.args
        results = self._of.get(source, []) if isinstance(source, fx.Node) else []
        if isinstance(index, int) and -len(results) <= index < len(results):
            self._of[node] = [results[index]]
        else:
            self._of[node] = []

    def _compute(self, node: fx.Node) -> None:
        category = COMMUNICATION if ops.is_transfer(node) else TEMPORARIES
        self._of[node] = [
            [self._new(node, _bytes(tensor), category)] for tensor in _results(node.meta.get("val"))
        ]
        if node.target is ops.to_host:
            for storages in self._of[node]:
                storages[0].host = True

    def _gather(self, node: fx.Node) -> None:
        operands: Any = node.args[0]
        ranks = self._ranks(node)
        self._of[node] = [
            [self._new(node, _bytes(operand.meta["val"]) * ranks, UNSHARDED, END)]
            for operand in operands
        ]

    def _reduce(self, node: fx.Node) -> None:
        """What a reduce sends, receives and yields; its results share one storage per dtype."""
        operands: Any = node.args[0]
        ranks = self._ranks(node)
        results = self._waits[node].meta["val"]
        given = sum(_bytes(result) for result in results)
        if node.target is ops.all_reduce or ranks == 1:
            kept = self._new(node, given, COMMUNICATION)
        elif self.backend == "gloo" and ranks > 2:
            self._new(node, given * ranks, COMMUNICATION, self._place[self._waits[node]])
            kept = self._new(self._waits[node], given, COMMUNICATION)
        else:
            kept = self._new(node, given, COMMUNICATION)
        for operand, result in zip(operands, results, strict=True):
            padded = _bytes(result) * ranks
            copied = node.target is ops.reduce_scatter and padded != _bytes(operand.meta["val"])
            if copied:
                self._new(node, padded, COMMUNICATION, self._place[self._waits[node]])
        self._of[node] = [[kept] for _ in operands]

    def _new(self, node: fx.Node, size: int, category: str, last: int = -1) -> Storage:
        place = self._place[node]
        unit = str(node.meta.get("unit", ""))
        storage = Storage(node, size, category, unit, place, max(place, last))
        self.all.append(storage)
        return storage

    def _merged(self, node: fx.Node) -> list[Storage]:
        return [storage for storages in self._of.get(node, ()) for storage in storages]

    def _ranks(self, collective: fx.Node) -> int:
        from graphshard.cost.groups import ranks_of

        return ranks_of(collective, self.program, self.plan)

    # -- the ends ---------------------------------------------------------------------------------

    def _close(self) -> None:
        results = self.program.results()
        border = self._place[self.program.first_backward()]
        # What forward returns the user drops once backward begins, but for gradients.
        for value in (*results.outputs, *results.mutations):
            self._returned(value, border)
        for value in (*results.grads, *results.input_grads):
            self._returned(value, END, GRADIENTS)
        for storage in self.all:
            saved = storage.node.meta["phase"] == FORWARD and border < storage.last < END
            if storage.category == TEMPORARIES and saved:
                storage.category = ACTIVATIONS
        for node in self.program.nodes(BACKWARD):
            if node.target in ops.REDUCES:
                self._mark_operands(node)

    def _returned(self, value: Any, last: int, category: str | None = None) -> None:
        for storage in self._merged(value) if isinstance(value, fx.Node) else ():
            storage.last = max(storage.last, last)
            storage.category = category or storage.category

    def _mark_operands(self, reduce: fx.Node) -> None:
        operands: Any = reduce.args[0]
        for operand in operands:
            for storage in self._merged(ops.origin(operand)):
                if storage.category == TEMPORARIES:
                    storage.category = FULL_GRADIENTS


def _results(val: Any) -> Iterator[torch.Tensor]:
    """The tensors of a node's value by position; a result that is none has no bytes."""
    if isinstance(val, torch.Tensor):
        yield val
    elif isinstance(val, (tuple, list)):
        for entry in val:
            yield entry if isinstance(entry, torch.Tensor) else torch.empty(0, device="meta")


def _bytes(tensor: torch.Tensor) -> int:
    return int(prod(tensor.shape)) * tensor.dtype.itemsize
