"""Optimizers that step on plain tensors instead of DTensors, with the same values.

An operator on a DTensor takes tens of microseconds on the host where one on a plain tensor takes a
few, and an optimizer may issue ten or more for each parameter. But what AdamW or SGD make of an
element depends on that element, its gradient and its state alone, so a rank may as well step on the
local tensors. Here an optimizer made of DTensors stays one: its groups hold them, `zero_grad`,
clipping, gradient scalers, schedulers, hooks and checkpoints see them. Only inside of `step` its
groups hold plain parameters that share the memory of the local tensors, their gradients that of the
gradients' local tensors; nothing is copied. Foreach and fused kernels take them as they are.

Its state is kept as local tensors. `state_dict()` gives them as DTensors, laid out as their
parameters are, and `load_state_dict` takes such: so checkpoints are those of an ordinary optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from graphshard.errors import CheckpointError, PolicyError, RuntimeStateError
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.patches import patched_for_good

ELEMENTWISE = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip
"""Classes of torch.optim that update each element by itself."""


NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Those that look at a whole tensor: its shape, its norm, its rows."""


_STEP = "step"


_LENT = "_graphshard_lent"


Made = TypeVar("Made", bound=Optimizer)


def require_elementwise(kind: type[Optimizer], elementwise: bool | None) -> None:
    """Check that optimizers of this class may step on parts of tensors.

    Args:
        kind: the class.
        elementwise: what the user says of it; None: it must be one of `ELEMENTWISE`.

    Raises:
        PolicyError: they may not, or nobody says that they may.
    """
    if any(kind is getattr(torch.optim, name, None) for name in NOT_ELEMENTWISE):
        raise PolicyError(
            f"{kind.__name__} looks at whole tensors, and on a rank's part of them would compute "
            f"something else; make it of the DTensors, torch.optim.{kind.__name__}("
            "sharded.parameters()), or step on full ones: see sharded.full_parameters()"
        )
    known = any(kind is getattr(torch.optim, name, None) for name in ELEMENTWISE)
    if not (known if elementwise is None else elementwise):
        raise PolicyError(
            f"whether {kind.__module__}.{kind.__name__} updates every element by itself is not "
            f"known, as it is of {', '.join(ELEMENTWISE)} of torch.optim; if it does, say "
            "elementwise=True, else make it of sharded.parameters()"
        )


def step_locally(optimizer: Made, elementwise: bool | None = None) -> Made:
    """Let `optimizer`, made of DTensors, step on their local tensors from now on.

    The same object is returned. Costs no memory. Of an optimizer without DTensors nothing changes.

    Args:
        optimizer: of a class that updates each element by itself; it may have state already.
        elementwise: whether it does, for a class of which this is not known.

    Raises:
        PolicyError: it does not, or this is not known; or its `step` is wrapped, by a learning rate
            scheduler say, which must come after.
    """
    kind: Any = type(optimizer)
    if issubclass(kind, _Stepping):
        return optimizer
    require_elementwise(kind, elementwise)
    if _STEP in vars(optimizer):
        raise PolicyError(
            "the optimizer's step is wrapped already (by a learning rate scheduler, say), which "
            "would not be seen any more; call step_locally before making the scheduler"
        )
    if not any(isinstance(param, DTensor) for param in _params(optimizer)):
        return optimizer
    optimizer.state = defaultdict(
        dict, {param: _kept(param, state) for param, state in optimizer.state.items()}
    )
    stepping: Any = _stepping(kind)
    patched_for_good(optimizer, "__class__", stepping)
    torch_compat.rewrap_step(optimizer)
    optimizer.register_state_dict_post_hook(_shown_state_dict)
    optimizer.register_load_state_dict_pre_hook(_kept_state_dict)
    return optimizer


def state_of(optimizer: Optimizer, param: Tensor) -> Mapping[str, Any]:
    """The state that `optimizer` has of `param`, with DTensors if that is one."""
    state = optimizer.state[param]
    return _shown(param, state) if isinstance(optimizer, _Stepping) else state


# -- stepping -------------------------------------------------------------------------------------


class _Stepping(Optimizer):
    """What `step_locally` makes of an optimizer's class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeStateError(
            "an optimizer that steps locally cannot be copied or pickled; make a new one and load "
            "this one's state_dict() into it"
        )


@cache
def _stepping(kind: type[Optimizer]) -> type[Optimizer]:
    """A class like `kind` whose `step` is on local tensors."""
    own = kind.step
    # Optimizers run the hooks of a step in a wrapper around it; ours gets one of its own.
    own = getattr(own, "__wrapped__", own) if getattr(own, "hooked", False) else own

    def step(self: Optimizer, closure: Any = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:  # which computes gradients, and zeroes them, of the DTensors
            with torch.enable_grad():
                loss = closure()
        _step_on_local(self, own, kwargs)
        return loss

    step.__doc__ = own.__doc__
    return type(kind.__name__, (_Stepping, kind), {_STEP: step, "__module__": kind.__module__})


def _step_on_local(optimizer: Optimizer, own: Any, kwargs: dict[str, Any]) -> None:
    state, groups = optimizer.state, optimizer.param_groups
    shown = [group["params"] for group in groups]
    local_state: defaultdict[Tensor, Any] = defaultdict(dict)
    lent: list[tuple[Tensor, Tensor]] = []
    try:
        local = [[_lent(param, lent) for param in params] for params in shown]
        for param, part in lent:
            known = state.get(param)
            if known is not None:
                local_state[part] = known
        for group, parts in zip(groups, local, strict=True):
            group["params"] = parts
        optimizer.state = local_state
        own(optimizer, **kwargs)
    finally:
        for group, params in zip(groups, shown, strict=True):
            group["params"] = params
        optimizer.state = state
        for param, part in lent:
            if part is not param:
                part.grad = None  # or it would outlive the DTensor's
            if part in local_state:
                state[param] = local_state[part]


def _lent(param: Tensor, lent: list[tuple[Tensor, Tensor]]) -> Tensor:
    """What is stepped on for `param`; adds the pair to `lent`."""
    if not isinstance(param, DTensor):
        lent.append((param, param))
        return param
    local = torch_compat.local_tensor(param)
    known = getattr(param, _LENT, None)
    if known is None or known[0] is not local:  # somebody may have put another in its place
        known = (local, nn.Parameter(local, requires_grad=param.requires_grad))
        setattr(param, _LENT, known)
    part: Tensor = known[1]
    lent.append((param, part))
    grad = param.grad
    if grad is not None:
        own = _local_grad(param, grad)
        if own.dtype != part.dtype:
            torch_compat.set_grad_dtype(part, own.dtype)
        part.grad = own
    return part


def _local_grad(param: DTensor, grad: Tensor) -> Tensor:
    if not isinstance(grad, DTensor) or grad.placements != param.placements:
        placed = f"placed {grad.placements}" if isinstance(grad, DTensor) else "a plain tensor"
        raise RuntimeStateError(
            f"the gradient of a parameter of shape {list(param.shape)}, placed {param.placements}, "
            f"is {placed}; lay it out as the parameter, param.grad = grad.redistribute("
            "placements=param.placements)"
        )
    local: Tensor = torch_compat.local_tensor(grad)
    return local if type(local) is Tensor else grad.to_local()


# -- state ----------------------------------------------------------------------------------------


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _shown(param: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """The local `state` of `param` with a DTensor for what is laid out as it."""
    if not isinstance(param, DTensor):
        return dict(state)
    shape = torch_compat.local_tensor(param).shape
    return {
        key: torch_compat.dtensor_like(param, value)
        if isinstance(value, Tensor) and key != _STEP and value.shape == shape
        else value
        for key, value in state.items()
    }


def _kept(param: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """The `state` of `param` with local tensors for its DTensors.

    Raises:
        CheckpointError: a tensor is laid out otherwise than the parameter.
    """
    if not isinstance(param, DTensor):
        return dict(state)
    kept = {}
    for key, value in state.items():
        kept[key] = value
        if isinstance(value, DTensor):
            alike = value.device_mesh == param.device_mesh and value.placements == param.placements
            if not alike or value.shape != param.shape:
                raise CheckpointError(
                    f"{key!r} of a parameter is a DTensor of shape {list(value.shape)}, placed "
                    f"{value.placements} on {value.device_mesh}; its parameter, of shape "
                    f"{list(param.shape)}, is placed {param.placements} on {param.device_mesh}; "
                    "load it with sharded.load_optimizer_state_dict"
                )
            kept[key] = torch_compat.local_tensor(value)
        elif isinstance(value, Tensor) and key != _STEP and value.numel() > 1:
            local = torch_compat.local_tensor(param)
            if value.shape != local.shape:
                raise CheckpointError(
                    f"{key!r} of a parameter is a plain tensor of shape {list(value.shape)}, and "
                    f"this rank's part of it is {list(local.shape)}; load it with "
                    "sharded.load_optimizer_state_dict"
                )
    return kept


def _shown_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _converted(optimizer, state_dict, _shown)


def _kept_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _converted(optimizer, state_dict, _kept)


def _converted(optimizer: Optimizer, state_dict: dict[str, Any], convert: Any) -> dict[str, Any]:
    """`state_dict` with the state of each parameter converted; parameters are numbers there."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = dict(zip(numbers, _params(optimizer), strict=False))
    state = {
        number: convert(params[number], entries) if number in params else entries
        for number, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
