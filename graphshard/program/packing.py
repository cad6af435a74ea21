"""How ranks treat the operands of a collective: packed, overwritten, or made by a gather itself.

The cost of small tensors is their number, not their bytes, so they are packed into one message;
large ones are sent without a copy. The bounds were measured, see README.md. torch's "fake" group
stands for an NCCL group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from graphshard.program import ops
from graphshard.program.aliases import aliases_of, nbytes, storage_root, uses_of
from graphshard.program.collective import Collective, operands_of
from graphshard.program.regions import REGION
from graphshard.program.sizes import is_contiguous

# Dtypes that every backend can gather and, except integers, reduce; others are gathered as bytes.
MOVABLE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


PACKABLE = MOVABLE | {torch.complex64, torch.complex128}
"""Dtypes that are packed, and reduced; complex numbers are reduced as pairs of reals."""


GATHER_BELOW = {"gloo": 32 * 1024, "nccl": 64 * 1024, "fake": 64 * 1024}
"""Bytes of a shard below which a gather packs it, by backend."""


REDUCE_BELOW = {"gloo": 64 * 1024, "nccl": 64 * 1024, "fake": 64 * 1024}
"""Bytes of a gradient's shard below which a reduce packs it, by backend."""


def packed(sizes: Sequence[int], dtypes: Sequence[torch.dtype], below: int) -> list[list[int]]:
    """The indices of tensors to pack together: one list for each dtype with two or more.

    `sizes` and `below` are bytes. Dtypes that some backend cannot reduce are never packed.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        if size < below and dtype in PACKABLE:
            by_dtype.setdefault(dtype, []).append(index)
    return [indices for indices in by_dtype.values() if len(indices) > 1]


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
    val = operand.meta["val"]
    if not is_contiguous(val) or val.is_conj() or nbytes(operand) != nbytes(root):
        return False
    if any(user.op == "output" for alias in aliases_of(root) for user in alias.users):
        return False
    own = {reduce, *reduce.users}
    return all(use in own or use < reduce for use in uses_of(root))


def done_by_gather(node: fx.Node) -> fx.Node | None:
    """The gather that does `node`, an `arrive` or a cast of a shard, itself; None if none does.

    Nothing else reads the result then: the gather waits for the copy and casts on its own stream.
    It does on several ranks only: on one, the shard is the parameter.
    """
    if node.target not in (ops.cast, ops.arrive) or len(node.users) != 1:
        return None
    (reader,) = node.users
    if node.target is ops.arrive:
        if node.all_input_nodes[0].target is not ops.to_device:
            return None
        if reader.target is ops.cast:
            return done_by_gather(reader)
    elif not _is_shard(node.all_input_nodes[0]):
        return None
    takes = reader.target is ops.all_gather and not Collective.of(reader).in_place
    return reader if takes else None


def _is_shard(source: fx.Node) -> bool:
    """Whether `source` is a stored shard, or one that arrives from the host for one reader."""
    if source.target is ops.arrive:
        return len(source.users) == 1 and source.all_input_nodes[0].target is ops.to_device
    return source.op == "placeholder"
