"""A parameter that a policy ignores: the user's own, in a module whose others are sharded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from graphshard.errors import PlanError
from graphshard.planning.layout import ParamLayout
from graphshard.runtime.group import Group
from graphshard.runtime.shards import Shard
from graphshard.runtime.standing import StandingShard


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
            elif layout.standing:
                by_fqn[layout.fqn] = StandingShard(layout, group, param)
            else:
                by_fqn[layout.fqn] = Shard(layout, group, param, on_host=on_host)
    return {name: by_fqn[layout.fqn] for name, layout in layouts.items()}
