"""Gradients that an all_reduce may overwrite, since nothing else reads them from its launch on."""

from __future__ import annotations

from torch import fx

from graphshard.program import ops
from graphshard.program.aliases import aliases_of, nbytes, storage_root, uses_of
from graphshard.program.collective import operands_of
from graphshard.program.packing import REDUCE_BELOW
from graphshard.program.regions import REGION
from graphshard.program.sizes import is_contiguous


def reduced_in_place(reduce: fx.Node, backend: str) -> frozenset[int]:
    """The operands of an all_reduce that `backend` averages where they lie, by their places.

    Others are copied: those that something else reads, that are no tensor of their own, or that are
    small, whose copies travel together. Gloo copies them in any case.
    """
    if reduce.target is not ops.all_reduce or backend == "gloo":
        return frozenset()
    operands = operands_of(reduce)
    roots = [storage_root(operand) for operand in operands]
    return frozenset(
        index
        for index, (operand, root) in enumerate(zip(operands, roots, strict=True))
        if roots.count(root) == 1
        and (nbytes(operand) or 0) >= REDUCE_BELOW.get(backend, 0)
        and _is_last_reader(reduce, operand, root)
    )


def _is_last_reader(reduce: fx.Node, operand: fx.Node, root: fx.Node) -> bool:
    """Whether `operand` is all of the storage that `root` allocated, which only `reduce` reads."""
    is_fresh = root.op == "call_function" and (
        root.target is ops.cast
        or (ops.is_unpack(root) and ops.collective_of(root).target in ops.REDUCES)
        # A compiled region may return one tensor for two values.
        or (ops.is_compute(root) and REGION not in root.meta)
    )
    if not is_fresh or root.meta["phase"] != reduce.meta["phase"]:
        return False
    if not is_contiguous(operand.meta["val"]) or nbytes(operand) != nbytes(root):
        return False
    if any(user.op == "output" for alias in aliases_of(root) for user in alias.users):
        return False
    own = {reduce, *reduce.users}
    return all(use in own or use < reduce for use in uses_of(root))
