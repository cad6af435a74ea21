"""reduce_in_pieces: an embedding's gradient is made, and reduced, some columns at a time."""

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
"""More pieces than this save little more memory, and each costs some launches."""


@dataclass(frozen=True)
class ReduceInPieces(Candidate):
    """Compute the gradient of an embedding's weight, rows x width, in pieces of its columns.

    A gradient is as large as the vocabulary however few tokens a batch has. A piece needs only its
    columns of the gradient of what was looked up, so it is made while the one before it is reduced,
    and two pieces are there at once instead of the whole. Rows are split over ranks and columns are
    not, so a rank's shard is the pieces it gets side by side. Sums are over the same numbers in the
    same order.

    Of a tied parameter the sum of what its other uses give, which is there whole, and what the
    embedding gives is made and reduced so, instead of three whole gradients. Those to which a kept
    one is added, or which are averaged over replicas as well, stay whole.

    Args:
        pieces: how many to make; 2 or more. None: as many as are large enough to use the network
            well, 8 at most.
    """

    pieces: int | None = None

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: the number is left to this pass, and the program has no budget, which says
                what it is timed on.
        """
        if plan.replicas > 1:
            return
        scatters = [n for n in program.nodes(BACKWARD) if n.target is ops.reduce_scatter]
        for reduce in scatters:
            params = params_of(reduce)
            operands: Sequence[fx.Node] = reduce.args[0]  # type: ignore[assignment]
            for name, grad in list(zip(params, operands, strict=True)):
                made = ops.origin(grad)
                if (
                    not _is_made_for(made, grad)
                    or _lookup(made) is None
                    or plan.layouts[name].dim
                    or _is_part(reduce)
                ):
                    continue
                size = made.meta["val"].numel() * grad.meta["val"].dtype.itemsize
                pieces = self.pieces or self._number(program, reduce, size)
                pieces = min(pieces, made.meta["val"].shape[-1])
                if pieces > 1:
                    _Pieces(program, reduce, made, pieces).insert(name)

    @staticmethod
    def _number(program: Program, reduce: fx.Node, size: int) -> int:
        hardware = budget_of(program).hardware
        shape = shape_of(reduce, program, hardware.gpus_per_node)
        return min(MOST, size // max(1, saturating_bytes(shape, hardware)))


def _is_part(reduce: fx.Node) -> bool:
    return Collective.of(reduce).columns is not None


def _lookup(made: fx.Node) -> fx.Node | None:
    """The embedding's gradient that `made` is, or ends a sum with; None if there is none."""
    if made.target is aten.embedding_dense_backward.default:
        return made
    if made.target is not aten.add.Tensor or made.kwargs or len(made.args) != 2:
        return None
    found = None
    for value in made.args:
        if not isinstance(value, fx.Node) or value.meta["val"].shape != made.meta["val"].shape:
            return None
        if value.target is aten.embedding_dense_backward.default and len(value.users) == 1:
            found = value
    return found


def _is_made_for(made: fx.Node, grad: fx.Node) -> bool:
    """Whether the gradient `grad` is `made`, cast at most, which nobody else reads."""
    node = grad
    while node is not made:
        if node.target is not ops.cast or len(node.users) > 1:
            return False
        node = node.all_input_nodes[0]
    return len(made.users) == 1


@dataclass
class _Pieces:
    """The rewrite of one gradient, which `made` computes and `reduce` reduces."""

    program: Program
    reduce: fx.Node
    made: fx.Node
    number: int

    def insert(self, name: str) -> None:
        (wait,) = self.reduce.users
        params = params_of(self.reduce)
        if len(params) > 1:
            wait = take_operands(self.program, wait, [params.index(name)])
        reduce = ops.collective_of(wait)
        (whole,) = unpacks(wait)
        width: int = self.made.meta["val"].shape[-1]
        bounds = [width * piece // self.number for piece in range(self.number + 1)]
        shards: list[fx.Node] = []
        before: fx.Node | None = None  # the wait of the piece before
        for index, columns in enumerate(pairwise(bounds)):
            # The first is made where the whole was, behind what is under way there.
            grad = self._made(self.made, columns, self.made if not index else reduce)
            if before is not None:
                for node in (before, *unpacks(before)):
                    reduce.prepend(node)
            before = self._reduced(reduce, wait, self._cast(grad, reduce), columns)
            shards += unpacks(before)
        self._joined(whole, shards)
        transfers = transfers_into(reduce)
        for node in (whole, wait, reduce):
            self.program.graph.erase_node(node)
        erase_dead([*self.made.all_input_nodes, self.made, *transfers])

    def _made(self, made: fx.Node, columns: tuple[int, int], before: fx.Node) -> fx.Node:
        """These columns of `made`, the embedding's gradient or a sum with it."""
        with self.program.graph.inserting_before(before):
            if made.target is not aten.embedding_dense_backward.default:
                parts = tuple(
                    self._made(value, columns, before)
                    if value is _lookup(made)
                    else self._columns(value, columns)
                    for value in made.all_input_nodes
                )
                return self._op(made.target, parts, "columns")
            grad, *rest = made.args
            part = self._columns(grad, columns)
            return self._op(made.target, (part, *rest), "columns_grad")

    def _columns(self, value: Any, columns: tuple[int, int]) -> fx.Node:
        last = value.meta["val"].dim() - 1
        return self._op(aten.slice.Tensor, (value, last, *columns), "columns")

    def _op(self, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        vals: Any = fx.map_arg(args, lambda node: node.meta["val"])
        with self.made.meta["val"].fake_mode:
            val = target(*vals)
        meta = self.made.meta
        place = {"unit": meta["unit"], "phase": meta["phase"]}
        node = insert_node(
            self.program, target, args, {}, name=f"{self.made.name}_{name}", val=val, **place
        )
        node.meta = {**meta, "val": val}
        return node

    def _cast(self, grad: fx.Node, reduce: fx.Node) -> fx.Node:
        """`grad`, the gradient of some columns, in the dtype it is reduced in."""
        for cast in transfers_into(reduce):
            with self.program.graph.inserting_before(reduce):
                again = self.program.graph.node_copy(
                    cast, {cast.all_input_nodes[0]: grad}.__getitem__
                )
            with grad.meta["val"].fake_mode:
                val = grad.meta["val"].to(OneTensor.of(cast).dtype)
            again.meta = {**cast.meta, "val": val}
            grad = again
        return grad

    def _reduced(
        self, reduce: fx.Node, wait: fx.Node, grad: fx.Node, columns: tuple[int, int]
    ) -> fx.Node:
        """A reduce of `grad`, which stands for these columns, as `reduce` is; its wait."""
        graph = self.program.graph
        with graph.inserting_before(reduce):
            part = graph.node_copy(reduce)
            part.args, part.kwargs = (
                ([grad],),
                replace(Collective.of(reduce), columns=columns).kwargs,
            )
            part.meta = dict(reduce.meta)
        shape = wait.meta["val"][0].shape
        val = fake_like(wait.meta["val"][0], (*shape[:-1], columns[1] - columns[0]))
        with graph.inserting_before(wait):
            own = graph.node_copy(wait, lambda _: part)
            own.meta = {**wait.meta, "val": [val]}
            (whole,) = unpacks(wait)
            picked = graph.node_copy(whole, lambda _: own)
            picked.meta = {**whole.meta, "val": val}
        return own

    def _joined(self, whole: fx.Node, shards: list[fx.Node]) -> None:
        """Let who reads `whole` read the `shards` side by side."""
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
