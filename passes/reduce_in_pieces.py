"""reduce_in_pieces: compute and reduce an embedding's gradient some columns at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from graphshard.cost.collective_cost import saturating_bytes, shape_of
from graphshard.passes.by_cost import Candidate
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import transfers_into, unpacks
from graphshard.program.collective import Collective, OneTensor, params_of
from graphshard.program.edit import erase_dead, fake_like, insert_node, take_operands
from graphshard.program.program import BACKWARD, Program
from graphshard.schedule.evaluate import budget_of

aten = torch.ops.aten


MOST = 8
"""The most pieces; more save little memory, and each costs kernel launches."""


@dataclass(frozen=True)
class ReduceInPieces(Candidate):
    """Compute the gradient of an embedding's weight `(rows, width)` in pieces of columns.

    The gradient has as many rows as the vocabulary, however few tokens a batch has. A piece needs
    only its columns of the looked-up gradient, so each is computed while the previous one is
    reduced, and two pieces are in memory at once instead of the whole. Ranks split the rows, so a
    rank's shard is the concatenation of its reduced pieces. Sums are over the same numbers in the
    same order.

    For a tied parameter, the sum of the embedding's gradient and the full gradient of its other
    uses is computed and reduced in pieces, which avoids two more full gradients. Gradients that an
    accumulated one is added to, or that are averaged over replicas too, stay whole.

    Args:
        pieces: number of pieces, 2 or more. None: as many as are large enough to use the network
            well, at most 8.
    """

    pieces: int | None = None

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: `pieces` is None and the program has no budget, which names the hardware; see
                `SetBudget`.
        """
        if plan.has_replicas:
            return
        scatters = [n for n in program.nodes(BACKWARD) if n.target is ops.reduce_scatter]
        for reduce in scatters:
            params = params_of(reduce)
            operands: Sequence[fx.Node] = reduce.args[0]  # type: ignore[assignment]
            for name, grad in list(zip(params, operands, strict=True)):
                full = ops.origin(grad)
                if (
                    not _leads_only_to(full, grad)
                    or _lookup(full) is None
                    or plan.layouts[name].dim
                    or _is_piece(reduce)
                ):
                    continue
                size = full.meta["val"].numel() * grad.meta["val"].dtype.itemsize
                pieces = self.pieces or self._number(program, reduce, size)
                pieces = min(pieces, full.meta["val"].shape[-1])
                if pieces > 1:
                    _Pieces(program, reduce, full, pieces).insert(name)

    @staticmethod
    def _number(program: Program, reduce: fx.Node, size: int) -> int:
        hardware = budget_of(program).hardware
        shape = shape_of(reduce, program, hardware.gpus_per_node)
        return min(MOST, size // max(1, saturating_bytes(shape, hardware)))


def _is_piece(reduce: fx.Node) -> bool:
    return Collective.of(reduce).columns is not None


def _lookup(full: fx.Node) -> fx.Node | None:
    """The embedding's gradient that `full` is or adds to another value; None if neither."""
    if full.target is aten.embedding_dense_backward.default:
        return full
    if full.target is not aten.add.Tensor or full.kwargs or len(full.args) != 2:
        return None
    lookup = None
    for value in full.args:
        if not isinstance(value, fx.Node) or value.meta["val"].shape != full.meta["val"].shape:
            return None
        if value.target is aten.embedding_dense_backward.default and len(value.users) == 1:
            lookup = value
    return lookup


def _leads_only_to(full: fx.Node, grad: fx.Node) -> bool:
    """Whether `grad` is `full` or a cast of it, and nothing else reads `full`."""
    node = grad
    while node is not full:
        if node.target is not ops.cast or len(node.users) > 1:
            return False
        node = node.all_input_nodes[0]
    return len(full.users) == 1


@dataclass
class _Pieces:
    """The rewrite of one gradient, which `full` computes and `reduce` reduces."""

    program: Program
    reduce: fx.Node
    full: fx.Node
    number: int

    def insert(self, name: str) -> None:
        (wait,) = self.reduce.users
        params = params_of(self.reduce)
        if len(params) > 1:
            wait = take_operands(self.program, wait, [params.index(name)])
        reduce = ops.collective_of(wait)
        (whole,) = unpacks(wait)
        width: int = self.full.meta["val"].shape[-1]
        bounds = [width * piece // self.number for piece in range(self.number + 1)]
        shards: list[fx.Node] = []
        before: fx.Node | None = None  # the wait of the previous piece
        for index, columns in enumerate(pairwise(bounds)):
            # The first piece is computed in place of the full gradient.
            grad = self._piece(self.full, columns, self.full if not index else reduce)
            if before is not None:
                for node in (before, *unpacks(before)):
                    reduce.prepend(node)
            before = self._reduce_piece(reduce, wait, self._cast(grad, reduce), columns)
            shards += unpacks(before)
        self._concatenate(whole, shards)
        transfers = transfers_into(reduce)
        for node in (whole, wait, reduce):
            self.program.graph.erase_node(node)
        erase_dead([*self.full.all_input_nodes, self.full, *transfers])

    def _piece(self, full: fx.Node, columns: tuple[int, int], before: fx.Node) -> fx.Node:
        """Compute some columns of `full`, the embedding's gradient or a sum with it."""
        with self.program.graph.inserting_before(before):
            if full.target is not aten.embedding_dense_backward.default:
                terms = tuple(
                    self._piece(value, columns, before)
                    if value is _lookup(full)
                    else self._columns(value, columns)
                    for value in full.all_input_nodes
                )
                return self._insert_op(full.target, terms, "columns")
            grad, *rest = full.args
            grad_columns = self._columns(grad, columns)
            return self._insert_op(full.target, (grad_columns, *rest), "columns_grad")

    def _columns(self, value: Any, columns: tuple[int, int]) -> fx.Node:
        last = value.meta["val"].dim() - 1
        return self._insert_op(aten.slice.Tensor, (value, last, *columns), "columns")

    def _insert_op(self, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        vals: Any = fx.map_arg(args, lambda node: node.meta["val"])
        with self.full.meta["val"].fake_mode:
            val = target(*vals)
        meta = self.full.meta
        place = {"unit": meta["unit"], "phase": meta["phase"]}
        node = insert_node(
            self.program, target, args, {}, name=f"{self.full.name}_{name}", val=val, **place
        )
        node.meta = {**meta, "val": val}
        return node

    def _cast(self, grad: fx.Node, reduce: fx.Node) -> fx.Node:
        """Cast `grad`, the gradient of some columns, as the full gradient is cast."""
        for cast in transfers_into(reduce):
            with self.program.graph.inserting_before(reduce):
                cast_piece = self.program.graph.node_copy(
                    cast, {cast.all_input_nodes[0]: grad}.__getitem__
                )
            with grad.meta["val"].fake_mode:
                val = grad.meta["val"].to(OneTensor.of(cast).dtype)
            cast_piece.meta = {**cast.meta, "val": val}
            grad = cast_piece
        return grad

    def _reduce_piece(
        self, reduce: fx.Node, wait: fx.Node, grad: fx.Node, columns: tuple[int, int]
    ) -> fx.Node:
        """Reduce `grad`, the gradient of these columns, as `reduce` does; returns the wait."""
        graph = self.program.graph
        with graph.inserting_before(reduce):
            piece = graph.node_copy(reduce)
            piece.args, piece.kwargs = (
                ([grad],),
                replace(Collective.of(reduce), columns=columns).kwargs,
            )
            piece.meta = dict(reduce.meta)
        shape = wait.meta["val"][0].shape
        val = fake_like(wait.meta["val"][0], (*shape[:-1], columns[1] - columns[0]))
        with graph.inserting_before(wait):
            piece_wait = graph.node_copy(wait, lambda _: piece)
            piece_wait.meta = {**wait.meta, "val": [val]}
            (whole,) = unpacks(wait)
            result = graph.node_copy(whole, lambda _: piece_wait)
            result.meta = {**whole.meta, "val": val}
        return piece_wait

    def _concatenate(self, whole: fx.Node, shards: list[fx.Node]) -> None:
        """Redirect readers of `whole` to the concatenation of `shards`."""
        with self.program.graph.inserting_before(whole):
            joined = insert_node(
                self.program,
                aten.cat.default,
                (shards, whole.meta["val"].dim() - 1),
                {},
                name=f"{whole.name}_joined",
                unit=whole.meta["unit"],
                phase=BACKWARD,
                val=whole.meta["val"],
            )
        whole.replace_all_uses_with(joined)
