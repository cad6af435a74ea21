"""The names of DistributedDataParallel and FSDP2 on a sharded module: they work, or say what does.

`ANSWERS` is the one table. A model's own attribute or method of such a name comes before it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from graphshard.errors import ForeignNameError, RuntimeStateError
from graphshard.program.collective import GRADIENT, SHARD
from graphshard.runtime.accumulated import AccumulatedGrads


def _of(root: Any) -> AccumulatedGrads:
    accumulated: AccumulatedGrads = root._graphshard.bindings.accumulated
    return accumulated


def _set_require_backward_grad_sync(root: nn.Module, on: Any) -> None:
    """DDP's: forwards from now on have backwards that reduce, or accumulate as in `no_sync()`."""
    _of(root).kind = None if on else GRADIENT


def _set_requires_gradient_sync(
    root: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True
) -> None:
    """FSDP2's switch of the reduce."""
    _switch(root, "set_requires_gradient_sync", GRADIENT, on=requires_gradient_sync, whole=recurse)


def _set_requires_all_reduce(
    root: nn.Module, requires_all_reduce: bool, *, recurse: bool = True
) -> None:
    """FSDP2's switch of the all_reduce over replicas."""
    _switch(root, "set_requires_all_reduce", SHARD, on=requires_all_reduce, whole=recurse)


def _switch(root: nn.Module, name: str, kind: str, *, on: bool, whole: bool) -> None:
    """Accumulate gradients of `kind` from the next forward on, or reduce them.

    In FSDP2 a backward looks at the switch, here a forward does. Both give the same gradients, but
    where the reduce is switched on between them: then nothing would be reduced any more.
    """
    accumulated = _of(root)
    if not whole:
        raise RuntimeStateError(
            f"{name}(recurse=False) switches a part of the gradients, and a sharded module has one "
            "switch for all; leave recurse out"
        )
    if on and accumulated.kind and accumulated.pending_calls():
        raise RuntimeStateError(
            f"{name}(True) comes between a forward and its backward, which accumulates its "
            "gradients, since it was off in the forward; switch it on before the forward"
        )
    if kind == GRADIENT or accumulated.kind != GRADIENT:  # which leaves nothing to all_reduce
        accumulated.kind = None if on else kind


def _inside_of(root: Any) -> Any:
    """DDP's `module`: the sharded module, by an object that has no `module` of its own.

    Code unwraps a model for as long as it has this attribute, so it must not be `root`.
    """
    if hasattr(type(root), _OUTSIDE):
        raise ForeignNameError("this is what .module of a sharded module gives, and has no other")
    kind: Any = type(root)
    inside = object.__new__(_kind_inside(kind))
    object.__setattr__(inside, "__dict__", vars(root))
    object.__setattr__(inside, _OUTSIDE, root)  # which holds what the two share by weak references
    return inside


_OUTSIDE = "_graphshard_outside"


@cache
def _kind_inside(kind: Any) -> Any:
    return type(kind.__name__, (kind,), {"__slots__": (_OUTSIDE,)})


_POLICY = "is an option of the policy here"
_PASS = "is a pass here; passes/README.md says how to add one of your own"
_BY_ITSELF = "has no counterpart, as none is needed"

Answer = str | Callable[[Any], Any]

_ANSWERS: Mapping[tuple[str, ...], Answer] = {
    ("module",): _inside_of,
    ("require_backward_grad_sync",): lambda root: _of(root).kind is None,
    ("set_requires_gradient_sync",): lambda root: partial(_set_requires_gradient_sync, root),
    ("set_requires_all_reduce",): lambda root: partial(_set_requires_all_reduce, root),
    ("unshard", "reshard"): (
        "is done by the programs, which gather and free by themselves; full parameters for code of "
        "your own are inside of `with sharded.unsharded():`"
    ),
    ("set_is_last_backward",): (
        f"{_BY_ITSELF}: each backward ends by itself; leave it out, and put micro-batches but the "
        "last in sharded.no_sync()"
    ),
    ("set_reshard_after_forward", "set_reshard_after_backward"): (
        f"{_POLICY}: reshard_after_forward=, or strategy="
    ),
    ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"): (
        f'{_POLICY}: forward_prefetch= and backward_prefetch=, or schedule="overlap"'
    ),
    ("set_unshard_in_backward", "set_post_optim_event", "reset_iter_state"): (
        f"{_BY_ITSELF}: programs gather in backward what it reads, wait for the current stream, "
        "and leave nothing behind when a call fails; leave it out"
    ),
    (
        "set_reduce_scatter_divide_factor", "set_gradient_divide_factor",
        "set_force_sum_reduction_for_comms",
    ): (
        "has no place here, where gradients are averaged; to scale them, multiply the loss"
    ),
    ("set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm"): (
        "has no counterpart: buffers of collectives are ordinary memory here; leave it out"
    ),
    ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"): _PASS,
    ("register_comm_hook",): (
        f"{_PASS}; gradients are reduced in mixed_precision=MixedPrecision(reduce_dtype=)"
    ),
    ("join", "join_hook", "join_device", "join_process_group"): (
        "has no counterpart: all ranks make equally many steps; drop or repeat the last batches of "
        "the ranks that have more"
    ),
    ("scatter", "gather", "to_kwargs"): (
        f"{_BY_ITSELF}: call the sharded module with this rank's own batch"
    ),
    (
        "broadcast_buffers", "will_sync_module_buffers", "forward_sync_buffers",
        "require_forward_param_sync",
    ): (
        "has no counterpart: buffers are each rank's own; sync_module_states=True of the policy "
        "takes rank 0's at the start, and sharded.check_replicas() compares them"
    ),
    ("find_unused_parameters", "static_graph", "skip_all_reduce_unused_params"): (
        f"{_BY_ITSELF}: a program knows which parameters a call uses; leave it out"
    ),
    ("gradient_as_bucket_view", "bucket_bytes_cap", "broadcast_bucket_size"): (
        f"{_BY_ITSELF}: gradients of a unit are reduced where they lie; the policy chooses the "
        "units, and merge_below="
    ),
    ("process_group",): "is chosen by mesh= of graphshard.compile",
    ("mixed_precision",): _POLICY + ": mixed_precision=, in sharded.plan.policy",
}  # fmt: skip

ANSWERS: Mapping[str, Answer] = {name: a for names, a in _ANSWERS.items() for name in names}
"""By name, what it gives on a sharded module, or what to use instead."""


def is_foreign(name: str) -> bool:
    """Whether `name` is a public one of DistributedDataParallel or FSDP2."""
    fsdp2 = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return name in ANSWERS or (
        not name.startswith("_") and any(hasattr(k, name) for k in (DistributedDataParallel, fsdp2))
    )


def answer(module: nn.Module, name: str, *, whole: bool) -> Any:
    """What `name`, a foreign one, is on a sharded module, or, if not `whole`, on a part of one."""
    found = ANSWERS.get(name, "has no counterpart here; README.md lists the options of a policy")
    if callable(found):
        if whole:
            return found(module)
        found = "is there on the whole sharded module, not on its parts"
    raise ForeignNameError(f"{name} of DistributedDataParallel or FSDP2 {found}")


def _refuse_to_set(name: str, root: nn.Module, value: Any) -> None:
    answer(root, name, whole=True)


SETTERS: Mapping[str, Callable[[Any, Any], None]] = {
    "require_backward_grad_sync": _set_require_backward_grad_sync,
    **{
        name: partial(_refuse_to_set, name)
        for name in (
            "broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view",
            "require_forward_param_sync", "static_graph",
        )
    },
}  # fmt: skip
"""What setting an attribute does that the model lacks: to set others would do nothing."""
