"""SHARD_OPTIMIZER: parameters that every rank keeps whole, and updates its own rows of.

The DTensor that the optimizer sees is a view of this rank's rows of a buffer of
`W * ceil(d0/W)` rows. After an update the next program gathers the other rows. Writing through
`param.data` without clearing gradients afterwards goes unnoticed. See README.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.errors import PlanError
from graphshard.planning.layout import ParamLayout
from graphshard.runtime.group import Group
from graphshard.runtime.shards import Shard
from graphshard.torch_private import compat as torch_compat


class ResidentShard(Shard):
    """A parameter of which this rank stores all, and owns a part.

    full: the padded buffer; `storage` and `local` are views of this rank's rows of it.
    """

    def __init__(self, layout: ParamLayout, group: Group, model_param: nn.Parameter) -> None:
        self.full = torch.empty(0)
        self._current: tuple[int, ...] | None = None  # `_trace` when all rows were, if ever
        self._grad: weakref.ref[Tensor] | None = None  # that backward left
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
        self._current = self._trace()
        self._note_grad()

    def hand_out(self, value: DTensor) -> None:
        """Let writes into `value`, which a state dict holds, be seen.

        A detached DTensor has a local tensor with a version counter of its own. One that is
        detached from `local` shares its counter, as do all views of it, however long they live.
        """
        shown, local = self.local_of(value), self.local
        if shown is not local and shown.device == local.device and shown.is_set_to(local):
            torch_compat.set_local_tensor(value, self.local.detach())

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
        return (*self.changes(), self.local._version)

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
    """Let the resident ones of `shards`, by name, know what a `module.state_dict()` hands out.

    A checkpoint may be read straight into it, which leaves no trace on the parameter.
    """
    resident = {name: s for name, s in shards.items() if isinstance(s, ResidentShard)}
    if not resident:
        return

    def hand_out(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name, shard in resident.items():
            value = state.get(prefix + name)
            if isinstance(value, DTensor):
                shard.hand_out(value)

    module.register_state_dict_post_hook(hand_out)


class OwnParameter(Shard):
    """The model's own `nn.Parameter` object: not split, not moved, its gradients this rank's own.

    One on the meta device is replaced by a plain parameter on the device of the group, to be
    given values as the others are.

    Raises:
        PlanError: it lies on another device than the group computes on.
    """

    def __init__(self, layout: ParamLayout, group: Group, model_param: nn.Parameter) -> None:
        alone = Group(None, 0, 1, group.device, check=group.check)
        if model_param.device.type == "meta":
            super().__init__(layout, alone, model_param)
            return
        if model_param.device != group.device:
            raise PlanError(
                f"the ignored parameter {layout.fqn!r} lies on {model_param.device}, where the "
                f"policy leaves it, and the model runs on {group.device}; move it there first"
            )
        self.layout = layout
        self.group = alone
        self.device = group.device
        self.homes = []
        self.ready = True
        self.rows = (0, 0)
        self.whole = True
        self.param = model_param
        self.local = self.storage = model_param.detach()

    def accumulate(self, reduced: Tensor) -> None:
        """See `Shard.accumulate`; of a copy, as others may read what backward computed."""
        super().accumulate(reduced.clone(memory_format=torch.contiguous_format))


def make_shards(
    layouts: Mapping[str, ParamLayout],
    group: Group,
    model_params: Mapping[str, nn.Parameter],
    *,
    on_host: bool = False,
) -> dict[str, Shard]:
    """One `Shard` per parameter, under each of its names.

    Args:
        layouts: by name, all names of a tied parameter leading to one layout.
        group: all ranks.
        model_params: the model's parameters, by every name.
        on_host: see `Shard`; ignored parameters stay where they are.
    """
    by_fqn: dict[str, Shard] = {}
    for layout in layouts.values():
        if layout.fqn not in by_fqn:
            param = model_params[layout.fqn]
            if layout.ignored:
                by_fqn[layout.fqn] = OwnParameter(layout, group, param)
            elif layout.resident:
                by_fqn[layout.fqn] = ResidentShard(layout, group, param)
            else:
                by_fqn[layout.fqn] = Shard(layout, group, param, on_host=on_host)
    return {name: by_fqn[layout.fqn] for name, layout in layouts.items()}
