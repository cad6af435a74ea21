"""The part of each parameter that a rank stores.

A sharded parameter is a `DTensor(Shard(dim))`, and on a mesh of two dimensions a
`DTensor(Replicate(), Shard(dim))`, laid out as in FSDP2, so that optimizers, gradient clipping and
distributed checkpoints accept it unchanged. One split along two dims is a
`DTensor(Shard(dim), Shard(other))` on the same ranks as a grid. The local tensor is the prefix of a
storage that has room for a full part (parts at the end of a dim may be smaller), and a gather sends
that storage without a copy. Behind one another the storages of all ranks are the buffer of a
gather, of which a parameter split along dim 0 is a prefix; others are copied between the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, wraps
from itertools import product
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardDim
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from graphshard.errors import PlanError, RuntimeStateError
from graphshard.planning.layout import ParamLayout
from graphshard.program.sizes import contiguous_strides
from graphshard.runtime.group import Group
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.dtensors import let_reals_be_views
from graphshard.torch_private.patches import patched_for_good


def part_of(whole: Tensor, layout: ParamLayout, rank: int) -> Tensor:
    """The part of the parameter `whole` that `rank` owns, as a view."""
    for dim, start, stop in layout.part(rank):
        whole = whole.narrow(dim, start, stop - start)
    return whole


def without_padding(stored: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The part of `shape` in the contiguous `stored`, which has room for a full one, as a view."""
    return stored.as_strided(shape, contiguous_strides(shape))


def put_together(by_rank: Tensor, whole: Tensor, layout: ParamLayout) -> Tensor:
    """Copy the memories of all ranks, `(ranks, elements)`, into the parameter `whole`."""
    for parts, place in _pairs(by_rank, whole, layout):
        place.copy_(parts)
    return whole


def take_apart(whole: Tensor, layout: ParamLayout) -> Tensor:
    """A copy of the parameter `whole` as the memories of all ranks, `(ranks, elements)`."""
    by_rank = whole.new_empty(layout.world_size, layout.shard_numel)
    grid = by_rank.view(*(ranks for _, ranks in layout.cuts), -1)
    for axis, (dim, ranks) in enumerate(layout.cuts):
        full = layout.shape[dim] // max(layout.shard_shape[dim], 1)
        grid.narrow(axis, full, ranks - full).zero_()  # padding is in these parts alone
    for parts, place in _pairs(by_rank, whole, layout):
        parts.copy_(place)
    return by_rank


def _pairs(by_rank: Tensor, whole: Tensor, layout: ParamLayout) -> list[tuple[Tensor, Tensor]]:
    """Views of both that hold the same elements: a pair for all ranks with parts of one shape."""
    cuts = layout.cuts
    grid = by_rank.view(*(ranks for _, ranks in cuts), -1)
    runs = [_runs(layout.shape[dim], layout.shard_shape[dim]) for dim, _ in cuts]
    pairs = []
    for run in product(*runs):
        parts, place, shape = grid, whole, list(layout.shape)
        for axis, ((dim, _), (first, count, size)) in enumerate(zip(cuts, run, strict=True)):
            parts = parts.narrow(axis, first, count)
            place = place.narrow(dim, first * layout.shard_shape[dim], count * size)
            shape[dim] = size
        for (dim, _), (_, count, size) in reversed(list(zip(cuts, run, strict=True))):
            place = place.unflatten(dim, (count, size))
        # The first cut is along the lower dim, so each before it has moved a dim on.
        axes = [dim + axis for axis, (dim, _) in enumerate(cuts)]
        place = place.movedim(axes, list(range(len(axes))))
        pairs.append((parts[..., : prod(shape)].unflatten(-1, shape), place))
    return pairs


def _runs(size: int, step: int) -> list[tuple[int, int, int]]:
    """(first part, number of parts, size of each) for the full parts of a dim, and the last."""
    if not size:
        return []
    full, rest = divmod(size, step)
    return [(0, full, step), *([(full, 1, rest)] if rest else [])]


_STEPS = "_graphshard_steps"
_OWNER = "_graphshard_owner"  # of a parameter: the first name of the one it is, or was, here


def is_shard(param: Tensor) -> bool:
    """Whether `param` is one that a sharded module stores."""
    return hasattr(param, _STEPS)


@cache
def _watch() -> None:
    register_optimizer_step_post_hook(_count)


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            steps = getattr(param, _STEPS, None)
            if steps is not None and param.grad is not None:
                setattr(param, _STEPS, steps + 1)


@cache
def refuse_parameters(call: type) -> None:
    """From now on refuse to name parameters in a backward through a forward of a sharded module.

    They are no leaves of its graph, so autograd would not run its backward, without a word. A node
    of autograd that stands for such a forward has a `call` of the given class.
    """
    backward = torch.autograd.backward

    @wraps(backward)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("inputs") is not None:
            inputs = kwargs["inputs"]
            if not isinstance(inputs, Tensor | Sequence):
                kwargs["inputs"] = inputs = tuple(inputs)
            each = (inputs,) if isinstance(inputs, Tensor) else inputs
            named = [param for param in each if isinstance(param, Tensor) and is_shard(param)]
            outputs = tensors if isinstance(tensors, Sequence) else [tensors]
            if named and any(isinstance(getattr(n, "call", None), call) for n in _nodes(outputs)):
                name = getattr(named[0], _OWNER)
                raise RuntimeStateError(
                    f"backward(inputs=...) names parameter {name!r} of a sharded module, whose "
                    "parameters get their gradients all at once, from a plain backward(), and "
                    "would get none here; leave inputs out, and before the forward call "
                    "requires_grad_(False) on parameters that need no gradient"
                )
        backward(tensors, *args, **kwargs)

    patched_for_good(torch.autograd, "backward", checked)


def _nodes(outputs: Iterable[Any]) -> Iterable[Any]:
    waiting = [
        getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs
    ]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]


Holders = list[tuple[dict[str, Any], str]]
"""The `_parameters` dicts that hold a parameter, with its key in each."""


class Shard:
    """One parameter as this rank stores it.

    holders: where modules hold the parameter; the first one counts.
    ready: it is known to have values.
    rank: this rank among those that share the parameter.
    part_shape: the shape of `local`.
    whole: `local` is all of `storage`, without padding.
    storage: this rank's part and its padding, of `layout.shard_shape`, in the parameter's dtype.
    local: this rank's part, a prefix of `storage`.
    param: the `nn.Parameter` that the user sees; the values of the model's own are not read.
    _outer: the storage of the DTensor around the local tensor, empty; `.data = ...` replaces it.
    host_memory: store it there, uint8 `(bytes,)` on the host (pinned if the ranks compute on CUDA
        devices), so that its gradient and the optimizer's work are there too.
    """

    _outer: torch.UntypedStorage | None = None

    def __init__(
        self,
        layout: ParamLayout,
        group: Group,
        model_param: nn.Parameter,
        *,
        host_memory: Tensor | None = None,
    ) -> None:
        if not model_param.is_contiguous():
            raise PlanError(
                f"parameter {layout.fqn!r} is not contiguous (strides {model_param.stride()}) and "
                "cannot be split without a copy each step; before graphshard.compile "
                "run `for p in model.parameters(): p.data = p.data.contiguous()`"
            )
        self.layout = layout
        self.group = group
        self.device = group.device if host_memory is None else host_memory.device
        self.holders: Holders = []
        self.ready = False
        self.rank = group.shard.rank
        self.part_shape = layout.part_shape(self.rank)
        self.whole = self.part_shape == layout.shard_shape
        self.storage = self._new_storage(host_memory)
        self.local = self._without_padding(self.storage)
        self._take(self._parameter(self.local))
        self._take_hooks(model_param)
        self.param.requires_grad_(layout.requires_grad)
        for name, value in vars(model_param).items():
            setattr(self.param, name, value)
        setattr(self.param, _OWNER, layout.fqn)
        has_nan = layout.dtype.is_floating_point or layout.dtype.is_complex
        if model_param.device.type == "meta" and has_nan:
            self.local.fill_(float("nan"))  # see `has_values`

    def current(self) -> Tensor:
        """The padded storage; adopts a parameter that the user put in place."""
        holder, name = self.holders[0]
        param = holder.get(name)
        for other, other_name in self.holders[1:]:
            if param is not None and other.get(other_name) is not param:
                self._refuse_untied()
        if param is not self.param or self._local_of(param) is not self.local:
            if param is None:
                raise RuntimeStateError(
                    f"parameter {self.layout.fqn!r} was removed; weight_norm, prune and the like "
                    "are captured if they are applied before graphshard.compile, so compile the "
                    "model again"
                )
            self._adopt(param)
        elif self._outer is not None and param.untyped_storage() is not self._outer:
            raise RuntimeStateError(
                f"parameter {self.layout.fqn!r} was given other data by `.data = ...`, which does "
                "not reach the part of a DTensor that this rank stores, so the value was lost; "
                "write into the parameter (`with torch.no_grad(): param.copy_(value)`), or load "
                "whole values by sharded.load_full_state_dict(...)"
            )
        return self.storage

    def tie(self) -> None:
        """Give all names of a tied parameter the one that its last name has."""
        last, last_name = self.holders[-1]
        for holder, name in self.holders:
            holder[name] = last[last_name]

    def program_input(self, stale: Collection[str]) -> Tensor:
        """The tensor that a program which gathers the parameters `stale` takes as its input."""
        return self.current()

    def changes(self) -> tuple[int, int]:
        """(the parameter's version, the optimizer steps so far): both count changes in place."""
        param = self.param
        return param._version, getattr(param, _STEPS, 0)

    def set_full(self, full: Tensor) -> None:
        """Copy this rank's part of `full`, the whole parameter `(d0, ...)` on any device."""
        with torch.no_grad():
            self.local.copy_(part_of(full, self.layout, self.rank))
        self.note_values()

    def note_values(self) -> None:
        """Note that the parameter got values on every rank."""
        self.ready = True

    def part_of(self, full: Tensor) -> Tensor:
        """This rank's part of `full`, the whole parameter `(d0, ...)`, as a view."""
        return part_of(full, self.layout, self.rank)

    def as_dtensor(self, local: Tensor) -> Tensor:
        """`local`, of the shape of this rank's part, as a DTensor like the parameter.

        Without a mesh the parameter is a plain tensor, and `local` is returned.
        """
        if self.group.mesh is None:
            return local
        return torch_compat.dtensor_like(self.param, local)

    def add_to_grad(self, reduced: Tensor) -> None:
        """Add a reduced gradient, of the shape of `storage`, to `.grad`.

        Runs the parameter's hooks as autograd would: those of `register_hook` before, those of
        `register_post_accumulate_grad_hook` after.
        """
        grad = reduced if self.whole else self._without_padding(reduced)
        param = self.param
        for tensor_hook in torch_compat.tensor_hooks(param):
            replacement = tensor_hook(self.as_dtensor(grad))
            grad = grad if replacement is None else self.local_of(replacement)
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
        """The local tensor of `tensor`, which is laid out as the parameter."""
        return tensor if self.group.mesh is None else torch_compat.local_tensor(tensor)

    def has_values(self) -> bool:
        """Whether the parameter got values since it left the meta device, in whatever way."""
        if not self.ready:
            self.current()  # adopts a parameter that the user put in place of ours
            # A checkpoint is read into detached tensors: only the values tell of it.
            self.ready |= not bool(self.local.isnan().all()) or self.local.numel() == 0
        return self.ready

    def _take_hooks(self, model_param: nn.Parameter) -> None:
        before = torch_compat.tensor_hooks(model_param)
        after = torch_compat.post_accumulate_hooks(model_param)
        if before or after:
            self.param.requires_grad_()  # torch registers hooks on no other, but keeps them
        for hook in before:
            self.param.register_hook(hook)
        for hook in after:
            self.param.register_post_accumulate_grad_hook(hook)

    # -- layout -------------------------------------------------------------------------------

    def _new_storage(self, memory: Tensor | None = None) -> Tensor:
        shape, dtype = self.layout.shard_shape, self.layout.dtype
        if memory is not None:
            storage = memory.view(dtype).view(shape)
            return storage if self.whole else storage.zero_()
        new = torch.empty if self.whole else torch.zeros
        pinned = self.device.type == "cpu" and self.group.device.type == "cuda"
        return new(shape, dtype=dtype, device=self.device, pin_memory=pinned)

    def with_padding(self, local: Tensor) -> Tensor:
        """`local`, of the shape of this rank's part, in the shape of `storage`."""
        if self.whole:
            return local
        padded = local.new_zeros(self.layout.shard_shape)
        self._without_padding(padded).copy_(local)
        return padded

    def _without_padding(self, padded: Tensor) -> Tensor:
        return padded if self.whole else without_padding(padded, self.part_shape)

    def _parameter(self, local: Tensor) -> nn.Parameter:
        if self.group.mesh is None:
            return nn.Parameter(local, requires_grad=False)
        if local.is_complex():
            let_reals_be_views()
        cuts = self.layout.cuts
        mesh = self.group.grid(tuple(parts for _, parts in cuts))
        split: list[Placement] = [ShardDim(dim) for dim, _ in cuts] or [Replicate()]
        placements = (*[Replicate()] * (mesh.ndim - len(split)), *split)
        shape = torch.Size(self.layout.shape)
        # `from_local` would move a tensor to the device of the mesh.
        on_other_device = local.device.type != self.group.mesh.device_type
        dtensor = DTensor.from_local(
            local.to("meta") if on_other_device else local,
            mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=tuple(contiguous_strides(shape)),
        )
        if on_other_device:
            dtensor = torch_compat.dtensor_like(dtensor, local)
        param = nn.Parameter(dtensor, requires_grad=False)  # holds a view of local
        torch_compat.set_local_tensor(param, local)
        return param

    def _local_of(self, param: nn.Parameter) -> Tensor:
        if self.group.mesh is not None:
            return torch_compat.local_tensor(param)
        # A plain parameter has the storage of `local`, unless the user gave it another.
        return self.local if param.data_ptr() == self.local.data_ptr() else param.detach()

    def _adopt(self, param: nn.Parameter) -> None:
        """Use a parameter or local tensor that the user put in place of ours from now on."""
        local = self._checked_local(param)
        if self._is_storage(local):
            self.storage = local
        else:
            self.storage = self._new_storage()
            with torch.no_grad():
                self._without_padding(self.storage).copy_(local)
            local = self._without_padding(self.storage)
            if self.group.mesh is None:
                param.data = local
            else:
                torch_compat.set_local_tensor(param, local)
        self.local = local
        self._take(param)
        setattr(param, _OWNER, self.layout.fqn)
        self.ready = True

    def _take(self, param: nn.Parameter) -> None:
        self.param = param
        self._outer = None if self.group.mesh is None else param.untyped_storage()
        _watch()
        if not hasattr(param, _STEPS):
            setattr(param, _STEPS, 0)

    def _refuse_untied(self) -> NoReturn:
        names = self.layout.names
        raise RuntimeStateError(
            f"{' and '.join(map(repr, names))} are one tied parameter, and not all of them have "
            "the same one now, which would untie them; give every name the same nn.Parameter, or "
            "untie the model before graphshard.compile and compile it again"
        )

    def _is_storage(self, local: Tensor) -> bool:
        """Whether `local` can be the storage that a gather sends."""
        return local.is_contiguous() and local.shape == self.layout.shard_shape

    def _checked_local(self, param: nn.Parameter) -> Tensor:
        """The local tensor of `param`, if that has the layout of the parameter it replaces."""
        advice = "keep its shape, dtype, device and placement, or compile the model again"
        name = self.layout.fqn
        if (owner := getattr(param, _OWNER, name)) != name:
            raise RuntimeStateError(
                f"parameter {name!r} was replaced by parameter {owner!r}, which would tie them; "
                "tie them before graphshard.compile, and compile the model again"
            )
        if self.group.mesh is not None:
            if not isinstance(param, DTensor):
                raise RuntimeStateError(
                    f"parameter {name!r} was replaced by a plain tensor; {advice}"
                )
            if param.placements != self.param.placements:  # type: ignore[attr-defined]
                raise RuntimeStateError(
                    f"parameter {name!r} is now placed {param.placements}; {advice}"
                )
        local = self._local_of(param).detach()
        expected = (self.layout.shape, self.layout.dtype, self.device)
        actual = (tuple(param.shape), local.dtype, local.device)
        if actual != expected:
            raise RuntimeStateError(
                f"parameter {name!r} is now (shape, dtype, device) {actual}, it was compiled as "
                f"{expected}; {advice}"
            )
        return local


def distinct(shards: Mapping[str, Shard]) -> list[Shard]:
    """The shards of all parameters in order, that of a tied parameter once."""
    return list({id(shard): shard for shard in shards.values()}.values())
