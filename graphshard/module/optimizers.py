"""What torch's optimizers and its GradScaler have to know of shards.

An operator on a DTensor takes tens of microseconds on the host, one on a plain tensor a few, and an
optimizer may issue ten or more for each parameter. AdamW and SGD update each element from its own
value, gradient and state alone, so a rank can step on its local tensors instead. A hook of all
optimizers' steps gives those of shards a `self` whose groups and state hold plain parameters, which
share the memory of the local tensors, as do their gradients and states. The optimizer itself holds
DTensors throughout, so `zero_grad`, clipping, gradient scalers, schedulers, hooks and checkpoints
see no others, and a step that fails leaves none behind.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from graphshard.errors import PolicyError, RuntimeStateError
from graphshard.runtime.shards import is_shard
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.compat import private
from graphshard.torch_private.patches import (
    dtensor_handlers,
    patched_for_good,
    replace_dtensor_handler,
)

_INSTEAD = "make it of sharded.parameters(), after graphshard.compile"


@dataclass(frozen=True)
class _Origin:
    """The name of an original parameter, and the sharded parameter that was made from it."""

    name: str
    shard: weakref.ref[nn.Parameter]


_origins: Any = WeakTensorKeyDictionary()  # of original parameters
_looked_at: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Sharded modules."""


def watch_originals(model: nn.Module, sharded: nn.Module) -> None:
    """Let a step of an optimizer that holds `model`'s parameters instead of `sharded`'s raise.

    The original model stays as it is, so such a step changes nothing that a sharded module computes
    with, and the loss stands still without a word.
    """
    shards = dict(sharded.named_parameters())
    for name, param in model.named_parameters():
        shard = shards.get(name)
        if shard is not None and shard is not param:  # as an ignored one is
            _origins[param] = _Origin(name, weakref.ref(shard))
    _modules.add(sharded)
    _watch_steps()


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_pre_hook(_lend)
    register_optimizer_step_post_hook(_take_back)


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step that would change nothing, where the shards have the gradients.

    Each optimizer is looked at until it is known to be right. One of an original that has gradients
    of its own, as a reference has, is.
    """
    for module in _modules:
        _require_reduced(optimizer, module)
    if optimizer in _looked_at:
        return
    originals: list[tuple[Tensor, _Origin]] = [
        (param, origin)
        for param in _params_of(optimizer)
        if (origin := _origins.get(param)) is not None and origin.shard() is not None
    ]
    if not originals or any(param.grad is not None for param, _ in originals):
        _looked_at.add(optimizer)
        return
    for _, origin in originals:
        shard = origin.shard()
        if shard is not None and shard.grad is not None:
            raise RuntimeStateError(
                f"the optimizer holds {origin.name!r} of the model that was given to "
                "graphshard.compile, and the gradient is the sharded module's, so that this step "
                f"would change nothing; {_INSTEAD}"
            )


def _require_reduced(optimizer: Optimizer, sharded: Any) -> None:
    """Refuse a step without gradients, where `no_sync()` has accumulated those of its shards."""
    state = sharded._graphshard
    accumulated = {fqn for _, fqn in state.bindings.accumulated.tensors}
    if not accumulated:
        return
    params = _params_of(optimizer)
    if any(param.grad is not None for param in params):
        return
    ids = set(map(id, params))
    waiting = [
        s.layout.fqn for s in state.shards if s.layout.fqn in accumulated and id(s.param) in ids
    ]
    if waiting:
        raise RuntimeStateError(
            f"this step would change nothing: the gradient of {waiting[0]!r} is accumulated by "
            "no_sync() and not reduced yet; let the last backward before a step be of a forward "
            "outside of no_sync(), also where an epoch ends early, or drop it by "
            "sharded.zero_grad()"
        )


@cache
def let_scales_arrive() -> None:
    """Make a scaler's copies of its scale on the host complete before it reads them.

    torch copies the scale to each gradient's device without waiting for the copy, which on the host
    is read at once: gradients of offloaded parameters would be multiplied by what lay there before.
    A fused optimizer does the same with the scale, and with whether there are infinities, which it
    subtracts from its counts of steps.
    """
    replicator = private("torch.amp.grad_scaler", "_MultiDeviceReplicator")
    get = replicator.get

    def complete(self: Any, device: torch.device) -> Tensor:
        copied: Tensor = get(self, device)
        if copied.device.type == "cpu" and self.master.is_cuda:
            torch.cuda.current_stream(self.master.device).synchronize()
        return copied

    patched_for_good(replicator, "get", complete)
    register_optimizer_step_pre_hook(_bring_to_host)


def _bring_to_host(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Copy what a scaler gave a fused `optimizer` to the host, if a parameter lies there."""
    for name in ("grad_scale", "found_inf"):
        value = getattr(optimizer, name, None)
        if isinstance(value, Tensor) and value.is_cuda:
            params = (p.to_local() if isinstance(p, DTensor) else p for p in _params_of(optimizer))
            if any(param.device.type == "cpu" for param in params):
                setattr(optimizer, name, value.cpu())


@cache
def let_scalers_agree() -> None:
    """Replace the search for infinities in DTensors in this process, once.

    An infinity in one rank's part has to make all ranks skip the step. A scaler looks for them in
    all gradients of an optimizer in one call. For DTensors torch then takes the maximum of what the
    ranks found, but over the dimensions in which the first gradient of the list is sharded: with a
    replicated one first (a parameter without dimensions) the ranks would disagree, step apart, and
    never come together again. And it refuses lists in which plain tensors (ignored parameters)
    stand beside DTensors; theirs are each rank's own, so what is found in them has to reach every
    rank of the mesh, over dimensions too in which nothing is sharded.
    """
    op = torch_compat.find_infinities()
    replace_dtensor_handler(op, partial(_find_infinities, dtensor_handlers().get(op)))


def _find_infinities(
    torch_handler: Any, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """`op(grads, found, inverse_scale)` with `found` the maximum over all ranks and gradients."""
    grads: list[Tensor] = [torch.view_as_real(g) if g.is_complex() else g for g in args[0]]
    plain = [grad for grad in grads if not isinstance(grad, DTensor)]
    if plain:
        op(plain, *args[1:], **kwargs)
    by_mesh: dict[Any, list[DTensor]] = {}
    for grad in grads:
        if isinstance(grad, DTensor):
            by_mesh.setdefault(grad.device_mesh, []).append(grad)
    for mesh, dtensors in by_mesh.items():
        if any(grad.to_local().device.type != mesh.device_type for grad in dtensors):
            _find_in_offloaded(op, mesh, dtensors, args, kwargs)
            continue
        # Those sharded over the most dimensions first, since only the first one counts.
        dtensors.sort(key=lambda grad: sum(isinstance(p, Replicate) for p in grad.placements))
        torch_handler(op, (dtensors, *args[1:]), kwargs)
        first = dtensors[0]
        for dim, placement in enumerate(first.placements):
            # Of replicated gradients alike on all ranks; whether plain ones are among those of
            # another rank this one cannot know.
            if placement.is_replicate() and first.device_mesh.size(dim) > 1:
                dist.all_reduce(args[1], dist.ReduceOp.MAX, first.device_mesh.get_group(dim))


def _find_in_offloaded(
    op: Any, mesh: Any, grads: Sequence[DTensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """`_find_infinities` in gradients on the host, where the groups of `mesh` may not reduce."""
    op([grad.to_local() for grad in grads], *args[1:], **kwargs)
    found = args[1].to(mesh.device_type)
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, mesh.get_group(dim))
    args[1].copy_(found)


# -- steps on plain tensors ------------------------------------------------------------------------


ELEMENTWISE = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip
"""Classes of torch.optim that update each element independently of all others."""


NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Classes of torch.optim that use a whole tensor: its shape, its norm or its rows."""


_STEP = "step"


_declared: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers of other classes whose users say that they are elementwise."""


def require_elementwise(kind: Any, elementwise: bool | None) -> None:
    """Check that optimizers of this class may step on parts of tensors.

    `elementwise` is whether the user says so; None: it must be one of `ELEMENTWISE`.
    """
    if any(kind is getattr(torch.optim, name, None) for name in NOT_ELEMENTWISE):
        # With torch 2.13 LBFGS and Muon step on DTensors to the values of the plain model.
        instead = {
            "Adafactor": "make torch.optim.Adafactor(sharded.full_parameters().values()), with its "
            "step inside of `with sharded.unsharded(with_grads=True):`, since it fails on DTensors",
            "LBFGS": "make torch.optim.LBFGS(sharded.parameters())",
            "Muon": "make torch.optim.Muon of those of sharded.parameters() with two dimensions",
            "SparseAdam": "take Adam, since gradients are dense here, which it does not take",
        }
        raise PolicyError(
            f"{kind.__name__} looks at whole tensors, and on a rank's part of them would compute "
            f"something else; {instead[kind.__name__]}"
        )
    if not (_is_known(kind) if elementwise is None else elementwise):
        raise PolicyError(
            f"whether {kind.__module__}.{kind.__name__} updates every element by itself is not "
            f"known, as it is of {', '.join(ELEMENTWISE)} of torch.optim; if it does, say "
            "elementwise=True, else make it of sharded.parameters(), or, if it fails on DTensors, "
            "of sharded.full_parameters().values()"
        )


def declare_elementwise(optimizer: Optimizer) -> None:
    """Let steps of `optimizer`, whatever its class is, be on plain tensors."""
    _declared.add(optimizer)


@cache
def _is_known(kind: type[Optimizer]) -> bool:
    return any(kind is getattr(torch.optim, name, None) for name in ELEMENTWISE)


# -- stepping -------------------------------------------------------------------------------------


@dataclass
class _Parts:
    """Groups and state with plain parameters.

    given: the groups as they were lent. twins: a parameter of the groups and what stands for it.
    """

    given: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    state: Any
    twins: list[tuple[Tensor, Tensor]]


class _Borrower:
    """The `self` of a step: the optimizer `lender` in all respects but for its tensors.

    What it holds is made when it is asked for, after all hooks of the step have run.
    """

    lender: Optimizer

    def __init__(self, lender: Optimizer) -> None:
        vars(self).update(lender=lender, parts=None)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return _parts_of(self).groups

    @property
    def state(self) -> Any:
        return _parts_of(self).state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lender, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.lender, name, value)


@cache
def _borrower_of(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    return type(kind.__name__, (_Borrower, kind), {"__module__": kind.__module__})


def _lend(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Replace the optimizer among the arguments of its step, if that may be on plain tensors."""
    if torch.compiler.is_compiling() or isinstance(optimizer, _Borrower):
        return None
    kind: Any = type(optimizer)
    if not (_is_known(kind) or optimizer in _declared) or not args or args[0] is not optimizer:
        return None
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return None
    if not any(isinstance(p, DTensor) and is_shard(p) for p in _params_of(optimizer)):
        return None
    borrower = _borrower_of(kind)(optimizer)

    def with_new_gradients(given: Any) -> Any:
        """A closure that lends the gradients it computed, which are those of the DTensors."""
        if not callable(given):
            return given

        def closure() -> Any:
            loss = given()
            parts: _Parts | None = vars(borrower)["parts"]
            if parts is not None and not all(_lend_gradient(*pair) for pair in parts.twins):
                vars(borrower).update(parts=None)
            return loss

        return closure

    closures = {name: with_new_gradients(value) for name, value in kwargs.items()}
    return (borrower, *map(with_new_gradients, args[1:])), closures


def _take_back(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Keep the states that a step made for plain tensors, as DTensors, and what else it set."""
    borrower = args[0] if args else None
    if not isinstance(borrower, _Borrower) or (parts := vars(borrower)["parts"]) is None:
        return
    for group, given, lent in zip(optimizer.param_groups, parts.given, parts.groups, strict=False):
        group.update({key: lent[key] for key in lent if lent[key] is not given.get(key)})
    for param, twin in parts.twins:
        if twin in parts.state:
            _keep_state(optimizer.state[param], parts.state[twin], param)
    optimizer.state.update(_of_no_parameter(parts.state))


def _of_no_parameter(state: Any) -> dict[Any, Any]:
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def _parts_of(borrower: _Borrower) -> _Parts:
    """The groups and state of a step, of the DTensors if some of them cannot be taken apart."""
    parts: _Parts | None = vars(borrower)["parts"]
    if parts is None:
        groups = borrower.lender.param_groups
        parts = _plain_parts(borrower.lender)
        parts = parts or _Parts(groups, groups, borrower.lender.state, [])
        vars(borrower).update(parts=parts)
    return parts


def _plain_parts(optimizer: Optimizer) -> _Parts | None:
    """Groups and state in which all is plain; None if a gradient or state is laid out otherwise."""
    twins: list[tuple[Tensor, Tensor]] = []
    given, groups = [], []
    state: defaultdict[Any, Any] = defaultdict(dict, _of_no_parameter(optimizer.state))
    for group in optimizer.param_groups:
        params = []
        for param in group["params"]:
            twin = param
            if isinstance(param, DTensor):
                local = torch_compat.local_tensor(param)
                twin = nn.Parameter(local, requires_grad=param.requires_grad)
            local_state = _local_state(param, optimizer.state.get(param))
            if local_state is None or not _lend_gradient(param, twin):
                return None
            params.append(twin)
            twins.append((param, twin))
            if local_state:
                state[twin] = local_state
        groups.append({**group, "params": params})
        given.append(dict(groups[-1]))
    return _Parts(given, groups, state, twins)


def _lend_gradient(param: Tensor, twin: Tensor) -> bool:
    """Give `twin` this rank's part of `param.grad`; False if that is laid out otherwise."""
    if not isinstance(param, DTensor):
        return True
    grad: Any = param.grad
    if grad is not None:
        if not isinstance(grad, DTensor) or grad.placements != param.placements:
            return False
        own = torch_compat.local_tensor(grad)
        grad = own if type(own) is Tensor else grad.to_local()
        if grad.dtype != twin.dtype:
            torch_compat.set_grad_dtype(twin, grad.dtype)
    twin.grad = grad
    return True


def _local_state(param: Tensor, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """`state` of `param` with local tensors for DTensors; None if one is laid out otherwise."""
    if state is None or not isinstance(param, DTensor):
        return state or {}
    local_state = {}
    local = torch_compat.local_tensor(param)
    for key, value in state.items():
        local_state[key] = value
        if isinstance(value, DTensor):
            alike = value.device_mesh == param.device_mesh and value.placements == param.placements
            if not alike or value.shape != param.shape:
                return None
            local_state[key] = torch_compat.local_tensor(value)
        elif isinstance(value, Tensor) and value.shape == param.shape != local.shape:
            return None  # whole, as somebody put it there
    return local_state


def _keep_state(state: dict[str, Any], local_state: dict[str, Any], param: Tensor) -> None:
    """Let `state` of `param` hold what a step left in `local_state`."""
    if not isinstance(param, DTensor):
        state.update(local_state)
        return
    shape = torch_compat.local_tensor(param).shape
    for key, value in local_state.items():
        held = state.get(key)
        same = torch_compat.local_tensor(held) if isinstance(held, DTensor) else held
        if same is value and held is not None:
            continue
        alike = isinstance(value, Tensor) and key != _STEP and value.shape == shape
        state[key] = torch_compat.dtensor_like(param, value) if alike else value
