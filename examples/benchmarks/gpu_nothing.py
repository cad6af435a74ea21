"""Collectives that move nothing, and count what they would have: the same for both sides.

Torch's "fake" backend copies on the device instead of moving, once for each rank and tensor, which
costs two systems that gather in different ways different amounts. Here a collective is a call of
Python that adds up bytes, in graphshard's process groups as in `fully_shard`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import graphshard
from examples.benchmarks.stand_in import Done


@dataclass
class Counted:
    """Bytes of the full tensors that were gathered and reduced."""

    gathered: int = 0
    reduced: int = 0

    def clear(self) -> None:
        """Count from 0 again."""
        self.gathered = self.reduced = 0


class NoGroup:
    """A process group of graphshard's that moves nothing."""

    def __init__(self, counted: Counted) -> None:
        self.counted = counted

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Done:
        self.counted.gathered += sum(t.nbytes for t in outputs)
        return Done()

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Done:
        self.counted.reduced += sum(t.nbytes for t in inputs)
        return Done()

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Done:
        self.counted.reduced += sum(t.nbytes for t in tensors)
        return Done()

    allreduce_coalesced = allreduce


class _Buffers:
    """The memory of `fully_shard`'s collectives, as by default."""

    def __init__(self, counted: Counted) -> None:
        self.counted = counted

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class NoAllGather(_Buffers):
    """An all_gather of `fully_shard`'s that moves nothing."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        self.counted.gathered += output_tensor.nbytes


class NoReduceScatter(_Buffers):
    """A reduce_scatter of `fully_shard`'s that moves nothing."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.counted.reduced += input_tensor.nbytes


def nothing_moves(model: nn.Module) -> Counted:
    """Let the collectives of `model` count their bytes instead of moving them.

    model: under `fully_shard`, or compiled by graphshard on a "fake" group and not called yet.
    """
    counted = Counted()
    if isinstance(model, graphshard.ShardedModule):
        whole = model._graphshard.bindings.group
        assert whole.backend == "fake", "a group of ranks that do exist"
        assert not model.programs, "captured already; compile it without example inputs"
        for group in (whole, *whole.subgroups.values()):
            group.process_group = NoGroup(counted)
        return counted
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    assert sharded, "neither graphshard's nor fully_shard's"
    for module in sharded:
        module.set_custom_all_gather(NoAllGather(counted))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(NoReduceScatter(counted))  # type: ignore[arg-type]
    return counted
