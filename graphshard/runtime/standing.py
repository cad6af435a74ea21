"""SHARD_OPTIMIZER: parameters that every rank keeps whole, and updates its own rows of.

Each rank has one buffer per parameter, padded to W * ceil(d0/W) rows, which stays. The DTensor that
the optimizer sees is a view of this rank's rows of it, so it costs no memory. Once the optimizer
has written there, the rows of the other ranks are stale, and the next program gathers into the
buffer before it reads it; until then programs read the buffer as it is. Whether that is so must
come out alike on all ranks, so it is read off what every rank does alike, never off values:

    in-place changes of the parameter, of its local tensor, or of what `state_dict()` handed out,
    by their version counters; a parameter or local tensor put in place of ours; any way of loading
    steps of an optimizer (its foreach and fused forms leave the version of a DTensor as it was)
    another `.grad` than the one that backward left: whoever clears gradients has used them

What writes through `param.data` and does not clear gradients afterwards leaves no trace; write
under `torch.no_grad()` instead.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.planning.layout import ParamLayout
from graphshard.runtime.group import Group
from graphshard.runtime.shards import Shard


class StandingShard(Shard):
    """A parameter of which this rank stores all, and owns a part.

    full: the padded buffer; `storage` and `local` are views of this rank's rows of it.
    """

    def __init__(self, layout: ParamLayout, group: Group, model_param: nn.Parameter) -> None:
        self.full = torch.empty(0)
        self._current: tuple[int, ...] | None = None  # `_trace` when all rows were, if ever
        self._grad: weakref.ref[Tensor] | None = None  # that backward left
        self._handed: list[Tensor] = []
        super().__init__(layout, group, model_param)

    @property
    def stale(self) -> bool:
        """Whether other ranks may have changed their rows since this one gathered them."""
        if self.layout.world_size == 1:
            return False
        self.current()  # which finds out whether the parameter was replaced
        seen = None if self._grad is None else self._grad()
        return self._current != self._trace() or self.param.grad is not seen

    def entering(self, stale: Collection[str]) -> Tensor:
        """This rank's padded rows if it is `stale`, else the whole parameter."""
        rows = self.current()
        return rows if self.layout.fqn in stale else self.full.narrow(0, 0, self.layout.shape[0])

    def gathered(self) -> None:
        """Note that all rows are current now."""
        # What nobody else refers to any more: this list, the variable, and the argument do.
        self._handed = [tensor for tensor in self._handed if sys.getrefcount(tensor) > 3]
        self._current = self._trace()
        self._note_grad()

    def hand_out(self, tensor: Tensor) -> None:
        """Watch `tensor`, which shares the memory of the parameter's part: it may be written to."""
        if not any(tensor is known for known in (self.local, *self._handed)):
            was_current = self._current == self._trace()
            self._handed.append(tensor)
            if was_current:
                self._current = self._trace()

    def filled(self) -> None:
        """See `Shard.filled`; what other ranks were given for their rows is not known here."""
        super().filled()
        self._current = None

    def accumulate(self, reduced: Tensor) -> None:
        """See `Shard.accumulate`; a gradient alone changes no parameter."""
        seen = None if self._grad is None else self._grad()
        same = self.param.grad is seen
        super().accumulate(reduced)
        if same:
            self._note_grad()

    def _note_grad(self) -> None:
        grad = self.param.grad
        self._grad = None if grad is None else weakref.ref(grad)

    def _trace(self) -> tuple[int, ...]:
        return (*self.changes(), self.local._version, *(t._version for t in self._handed))

    # -- layout -------------------------------------------------------------------------------

    def _new_storage(self) -> Tensor:
        layout = self.layout
        self.full = torch.zeros(layout.gathered_shape, dtype=layout.dtype, device=self.group.device)
        rows = layout.padded_rows
        return self.full.narrow(0, self.group.shard.rank * rows, rows)

    def _serves(self, local: Tensor) -> bool:
        return False  # only a view of the buffer does

    def _adopt(self, param: nn.Parameter) -> None:
        super()._adopt(param)
        self._current = None


def watch_state_dicts(module: nn.Module, shards: Mapping[str, Shard]) -> None:
    """Let the standing ones of `shards`, by name, know what a `module.state_dict()` hands out.

    A checkpoint may be read straight into it, which leaves no trace on the parameter.
    """
    standing = {name: s for name, s in shards.items() if isinstance(s, StandingShard)}
    if not standing:
        return

    def hand_out(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name, shard in standing.items():
            value = state.get(prefix + name)
            if isinstance(value, DTensor):
                shard.hand_out(shard.local_of(value))

    module.register_state_dict_post_hook(hand_out)
