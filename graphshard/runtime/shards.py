"""What each rank stores of the parameters.

A sharded parameter is a `DTensor(Shard(dim))`, and on a mesh of two dimensions a
`DTensor(Replicate(), Shard(dim))`, laid out as FSDP2 lays it out, so that optimizers, gradient
clipping and distributed checkpoints take it as it is. Along dim 0 rank r has rows
[r * ceil(d0/W), (r+1) * ceil(d0/W)) of it, fewer or none at the end. Its local tensor is the prefix
of a storage padded to ceil(d0/W) rows, and a gather sends that storage without a copy. Along
another dim, which W divides, it is a contiguous tensor of its own shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardDim
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from graphshard.errors import PlanError, RuntimeStateError
from graphshard.planning.layout import ParamLayout
from graphshard.runtime.group import Group, strides_of
from graphshard.torch_private import compat as torch_compat

_STEPS = "_graphshard_steps"


def count_steps(param: Tensor) -> None:
    """Count from now on, where nobody does, the steps of any optimizer that has `param`."""
    _watch()
    if not hasattr(param, _STEPS):
        setattr(param, _STEPS, 0)


def steps_of(param: Tensor) -> int:
    """The steps counted so far in which `param` had a gradient."""
    return getattr(param, _STEPS, 0)


@cache
def _watch() -> None:
    register_optimizer_step_post_hook(_count)


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            steps = getattr(param, _STEPS, None)
            if steps is not None and param.grad is not None:
                setattr(param, _STEPS, steps + 1)


Homes = list[tuple[dict[str, Any], str]]


class Shard:
    """One parameter as this rank stores it.

    Args:
        layout: how the parameter lies on the ranks.
        group: all ranks; a parameter is sharded over `group.shard`.
        model_param: the model's own parameter, of which the values are not read.
        on_host: store it in the host's memory (pinned if the ranks compute on CUDA devices), so
            that its gradient and the optimizer's work are there too.

    Raises:
        PlanError: the parameter is not contiguous.
    """

    def __init__(
        self,
        layout: ParamLayout,
        group: Group,
        model_param: nn.Parameter,
        *,
        on_host: bool = False,
    ) -> None:
        if not model_param.is_contiguous():
            raise PlanError(
                f"parameter {layout.fqn!r} is not contiguous (strides {model_param.stride()}) and "
                "cannot be split along dim 0 without a copy each step; make it contiguous first, "
                "e.g. model.to(memory_format=torch.contiguous_format)"
            )
        self.layout = layout
        self.group = group
        self.device = torch.device("cpu") if on_host else group.device
        self.homes: Homes = []  # the dicts that hold it, with its name there
        self.ready = False
        # The half-open range of the dim this rank owns, and whether that is all it stores.
        self.rows = layout.rows(group.shard.rank) if layout.sharded else (0, 0)
        self.whole = not layout.sharded or self.rows[1] - self.rows[0] == layout.padded_rows
        self.storage = self._new_storage()
        self.local = self._owned(self.storage)
        self.param = self._parameter(self.local)
        self._take_hooks(model_param)
        self.param.requires_grad_(layout.requires_grad)
        count_steps(self.param)
        for name, value in vars(model_param).items():
            setattr(self.param, name, value)
        if model_param.device.type == "meta" and layout.dtype.is_floating_point:
            self.local.fill_(float("nan"))  # see `written`

    def current(self) -> Tensor:
        """The padded storage to gather from, after whatever the user did to the parameter.

        Raises:
            RuntimeStateError: it was replaced by something of another layout, dtype or device.
        """
        holder, name = self.homes[0]
        param = holder[name]
        if param is not self.param or self._local_of(param) is not self.local:
            self._adopt(param)
        return self.storage

    def entering(self, stale: Collection[str]) -> Tensor:
        """What a program takes that is to gather the parameters `stale`."""
        return self.current()

    def changes(self) -> tuple[int, int]:
        """Counts of what changes the parameter in place: its version, and optimizers' steps."""
        param = self.param
        return param._version, steps_of(param)

    def set_full(self, full: Tensor) -> None:
        """Take this rank's part of `full`, the whole parameter on any device, in place."""
        with torch.no_grad():
            self.local.copy_(self.part_of(full))
        self.filled()

    def filled(self) -> None:
        """Note that it has been given values, on every rank alike."""
        self.ready = True

    def part_of(self, full: Tensor) -> Tensor:
        """This rank's part of `full`, the whole parameter, as a view."""
        if not self.layout.sharded:
            return full
        start, stop = self.rows
        return full.narrow(self.layout.dim, start, stop - start)

    def as_dtensor(self, local: Tensor) -> Tensor:
        """`local`, of this rank's shape, in the parameter's layout."""
        if self.group.mesh is None:
            return local
        return torch_compat.dtensor_like(self.param, local)

    def accumulate(self, reduced: Tensor) -> None:
        """Add a reduced gradient, padding included, to `.grad`.

        Runs the parameter's hooks as autograd would: those of `register_hook` before, those of
        `register_post_accumulate_grad_hook` after.
        """
        grad = reduced if self.whole else self._owned(reduced)
        param = self.param
        for tensor_hook in torch_compat.tensor_hooks(param):
            changed = tensor_hook(self.as_dtensor(grad))
            grad = grad if changed is None else self.local_of(changed)
        before = param.grad
        if before is None:
            if grad.dtype is not self.layout.dtype:
                torch_compat.set_grad_dtype(param, grad.dtype)
            param.grad = self.as_dtensor(grad)
        else:
            self.local_of(before).add_(grad)
        for hook in torch_compat.post_accumulate_hooks(param):
            hook(param)

    def local_of(self, tensor: Tensor) -> Tensor:
        """This rank's part of `tensor`, laid out as the parameter."""
        return tensor if self.group.mesh is None else torch_compat.local_tensor(tensor)

    def written(self) -> bool:
        """Whether the parameter has values: set here, or written in place by whoever loads it."""
        if not self.ready:
            self.current()  # which finds out whether the parameter was replaced
            # A checkpoint is read into detached tensors, which leaves no other trace than values.
            self.ready |= not bool(self.local.isnan().all()) or self.local.numel() == 0
        return self.ready

    def _take_hooks(self, model_param: nn.Parameter) -> None:
        before = torch_compat.tensor_hooks(model_param)
        after = torch_compat.post_accumulate_hooks(model_param)
        if before or after:
            self.param.requires_grad_()  # else none may be registered, though frozen ones keep them
        for hook in before:
            self.param.register_hook(hook)
        for hook in after:
            self.param.register_post_accumulate_grad_hook(hook)

    # -- layout -------------------------------------------------------------------------------

    def _new_storage(self) -> Tensor:
        shape, dtype = self.layout.shard_shape, self.layout.dtype
        new = torch.empty if self.whole else torch.zeros
        pinned = self.device.type == "cpu" and self.group.device.type == "cuda"
        return new(shape, dtype=dtype, device=self.device, pin_memory=pinned)

    def _owned(self, padded: Tensor) -> Tensor:
        return padded if self.whole else padded[: self.rows[1] - self.rows[0]]

    def _parameter(self, local: Tensor) -> nn.Parameter:
        if self.group.mesh is None:
            return nn.Parameter(local, requires_grad=False)
        placement: Placement = ShardDim(self.layout.dim) if self.layout.sharded else Replicate()
        placements = (*[Replicate()] * (self.group.mesh.ndim - 1), placement)
        shape = torch.Size(self.layout.shape)
        # Made from a tensor elsewhere than its mesh, a DTensor would be moved there.
        away = local.device.type != self.group.mesh.device_type
        dtensor = DTensor.from_local(
            local.to("meta") if away else local,
            self.group.mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=strides_of(shape),
        )
        if away:
            dtensor = torch_compat.dtensor_like(dtensor, local)
        param = nn.Parameter(dtensor, requires_grad=False)  # holds a view of local
        torch_compat.set_local_tensor(param, local)
        return param

    def _local_of(self, param: nn.Parameter) -> Tensor:
        if self.group.mesh is not None:
            return torch_compat.local_tensor(param)
        # A plain parameter shares its storage with what was cut from it, unless it got another.
        return self.local if param.data_ptr() == self.local.data_ptr() else param.detach()

    def _adopt(self, param: nn.Parameter) -> None:
        """Go on with a parameter or local tensor that the user put in place of ours."""
        local = self._checked(param)
        if self._serves(local):
            self.storage = local
        else:
            self.storage = self._new_storage()
            with torch.no_grad():
                self._owned(self.storage).copy_(local)
            local = self._owned(self.storage)
            if self.group.mesh is None:
                param.data = local
            else:
                torch_compat.set_local_tensor(param, local)
        self.local = local
        self.param = param
        count_steps(param)
        self.ready = True
        for holder, name in self.homes:
            holder[name] = param

    def _serves(self, local: Tensor) -> bool:
        """Whether a gather can send `local` as it is."""
        return local.is_contiguous() and local.shape == self.layout.shard_shape

    def _checked(self, param: nn.Parameter) -> Tensor:
        kept = "keep its shape, dtype, device and placement, or compile the model again"
        name = self.layout.fqn
        if self.group.mesh is not None:
            if not isinstance(param, DTensor):
                raise RuntimeStateError(
                    f"parameter {name!r} was replaced by a plain tensor; {kept}"
                )
            if param.placements != self.param.placements:  # type: ignore[attr-defined]
                raise RuntimeStateError(
                    f"parameter {name!r} is now placed {param.placements}; {kept}"
                )
        local = self._local_of(param).detach()
        expected = (self.layout.shape, self.layout.dtype, self.device)
        found = (tuple(param.shape), local.dtype, local.device)
        if found != expected:
            raise RuntimeStateError(
                f"parameter {name!r} is now (shape, dtype, device) {found}, it was compiled as "
                f"{expected}; {kept}"
            )
        return local


def distinct(shards: Mapping[str, Shard]) -> list[Shard]:
    """Each of `shards` once, a tied parameter's too, in order."""
    return list({id(shard): shard for shard in shards.values()}.values())
