"""pool_collectives: note how much memory collectives need in a pool of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import fx

from graphshard.cost.collective_cost import ranks_of
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops, packing
from graphshard.program.annotations import CollectiveMemory
from graphshard.program.collective import Collective, operands_of, wait_of
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import Program

ROUNDED = 512
"""Bytes that the CUDA allocator rounds a request up to a multiple of."""


def is_pooled(node: fx.Node, program: Program) -> bool:
    """Whether the buffers of `node` come from the pool.

    These are gathers into new buffers and reduce_scatters, over the group that parameters are
    sharded over. The results of reduces are gradients, which outlive the step.
    """
    if node.target not in (ops.all_gather, ops.reduce_scatter):
        return False
    collective = Collective.of(node)
    if collective.in_place or collective.ranks is not None or collective.group != ops.SHARD:
        return False
    return ranks_of(node, program) > 1


def pool_bytes(program: Program, plan: ShardingPlan) -> int:
    """The most bytes of the pool that are in use at once, each tensor rounded up."""
    live = peak = 0
    freed_at: Counter[fx.Node] = Counter()
    in_use: dict[tuple[fx.Node, int], int] = {}
    for node in program.nodes():
        if is_pooled(node, program):
            wait = wait_of(node)
            assert wait is not None
            messages = sum(_messages(node, program))
            live += messages
            freed_at[wait] += messages
            if node.target is ops.all_gather:
                dims = Collective.of(node).dims
                for index, size in enumerate(_full_sizes(node, plan)):
                    live += size
                    if dims[index]:  # copied out of the buffer at the wait
                        freed_at[wait] += size
                    else:
                        in_use[node, index] = size
        peak = max(peak, live)
        live -= freed_at[node]
        if node.target is ops.release:
            live -= in_use.pop(ops.released(node), 0)
        elif node.target is ops.free:
            gather = ops.collective_of(node)
            live -= sum(in_use.pop((gather, i), 0) for i in range(len(operands_of(gather))))
    return peak


def _messages(node: fx.Node, program: Program) -> Iterator[int]:
    """Bytes of the tensors that are alive from the launch to the wait."""
    ranks = ranks_of(node, program)
    if node.target is ops.all_gather:
        shards = [operand.meta["val"] for operand in operands_of(node)]
        sizes = [shard.numel() * shard.itemsize for shard in shards]
        dtypes = [shard.dtype for shard in shards]
        for indices in packing.packed(sizes, dtypes, packing.GATHER_BELOW["nccl"]):
            size = sum(sizes[i] for i in indices)
            yield from (_rounded(size), _rounded(size * ranks))
        return
    wait = wait_of(node)
    assert wait is not None
    shards = wait.meta["val"]
    sizes = [shard.numel() * shard.itemsize for shard in shards]
    dtypes = [shard.dtype for shard in shards]
    packs = packing.packed(sizes, dtypes, packing.REDUCE_BELOW["nccl"])
    alone = set(range(len(sizes))).difference(*packs)
    for indices in (*packs, *([i] for i in sorted(alone))):
        yield _rounded(sum(sizes[i] for i in indices) * ranks)


def _full_sizes(node: fx.Node, plan: ShardingPlan) -> Iterator[int]:
    """Bytes of the full buffers of a gather, in operand order."""
    params = Collective.of(node).params
    for name, operand in zip(params, operands_of(node), strict=True):
        shape = plan.layouts[name].gathered_shape
        yield _rounded(prod(shape) * operand.meta["val"].itemsize)


def _rounded(size: int) -> int:
    return -(-size // ROUNDED) * ROUNDED


@dataclass(frozen=True)
class PoolCollectives(Pass):
    """Note on the program the pool that buffers of its collectives come from, and its size.

    The graph does not change. `graphshard.runtime.collective_memory` makes the pool.

    Args:
        kind: the policy's `collective_memory`, "nccl" or "symmetric".
    """

    kind: str

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Set `program.collective_memory`."""
        program.collective_memory = CollectiveMemory(self.kind, pool_bytes(program, plan))
