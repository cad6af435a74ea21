"""Keeping a part of a gathered parameter, to gather it again within a smaller group of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from graphshard.plan import ParamLayout
from graphshard.runtime.group import Group


class Reshard:
    """Copies this rank's part of k, `(ceil(d0/k), ...)`, out of a full parameter `(d0, ...)`.

    Of one split along another dim, the part along that.

    Args:
        layout: of the parameter on the `k` ranks.
        group: those ranks.
    """

    def __init__(self, layout: ParamLayout, group: Group) -> None:
        self.layout = layout
        self.rows = layout.rows(group.rank)
        # fx prints a call by these.
        self.__name__ = self.__qualname__ = "reshard"
        self.__module__ = "graphshard"

    def __call__(self, full: Tensor) -> Tensor:
        """A contiguous copy; zeros where the parameter ends before its part does."""
        start, stop = self.rows
        rows = full.narrow(self.layout.dim, start, stop - start)
        if stop - start == self.layout.padded_rows:
            return rows.clone(memory_format=torch.contiguous_format)
        part = full.new_zeros(self.layout.shard_shape)  # padded along dim 0 only
        part[: stop - start] = rows
        return part
