"""Optimizers that step on plain tensors instead of DTensors, with the same values.

An operator on a DTensor takes tens of microseconds on the host, one on a plain tensor a few, and an
optimizer may issue ten or more for each parameter. AdamW and SGD update each element from its own
value, gradient and state alone, so a rank can step on its local tensors instead. The optimizer's
groups hold the DTensors, so `zero_grad`, clipping, gradient scalers, schedulers, hooks and
checkpoints see them. Only inside `step` the groups hold plain parameters, which share the memory of
the local tensors, and so do their gradients. Foreach and fused kernels take them as they are.

The optimizer's state holds local tensors. `state_dict()` gives them as DTensors, laid out as their
parameters, and `load_state_dict` takes DTensors, so checkpoints are those of any other optimizer.
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
"""Classes of torch.optim that update each element independently of all others."""


NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Classes of torch.optim that use a whole tensor: its shape, its norm or its rows."""


_STEP = "step"


_LOCAL_TWIN = "_graphshard_lent"


AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def require_elementwise(kind: type[Optimizer], elementwise: bool | None) -> None:
    """Check that optimizers of this class may step on parts of tensors.

    `elementwise` is whether the user says so; None: it must be one of `ELEMENTWISE`.
    """
    if any(kind is getattr(torch.optim, name, None) for name in NOT_ELEMENTWISE):
        # With torch 2.13 LBFGS and Muon step on DTensors to the values of the plain model.
        made = (
            "(sharded.full_parameters().values()), with its step inside of `with "
            "sharded.unsharded(with_grads=True):`, since it fails on DTensors"
            if kind.__name__ == "Adafactor"
            else "(sharded.parameters())"
        )
        raise PolicyError(
            f"{kind.__name__} looks at whole tensors, and on a rank's part of them would compute "
            f"something else; make torch.optim.{kind.__name__}{made}"
        )
    is_known = any(kind is getattr(torch.optim, name, None) for name in ELEMENTWISE)
    if not (is_known if elementwise is None else elementwise):
        raise PolicyError(
            f"whether {kind.__module__}.{kind.__name__} updates every element by itself is not "
            f"known, as it is of {', '.join(ELEMENTWISE)} of torch.optim; if it does, say "
            "elementwise=True, else make it of sharded.parameters(), or, if it fails on DTensors, "
            "of sharded.full_parameters().values()"
        )


def step_locally(optimizer: AnyOptimizer, elementwise: bool | None = None) -> AnyOptimizer:
    """Let `optimizer`, made of DTensors, step on their local tensors from now on.

    Returns the same object. Takes no memory. An optimizer without DTensors stays as it is; one that
    has state already keeps it. See `require_elementwise` for `elementwise`.
    """
    kind: Any = type(optimizer)
    if issubclass(kind, _LocalStepping):
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
        dict, {param: _local_state(param, state) for param, state in optimizer.state.items()}
    )
    stepping: Any = _local_class(kind)
    patched_for_good(optimizer, "__class__", stepping)
    torch_compat.rewrap_step(optimizer)
    optimizer.register_state_dict_post_hook(_dtensor_state_dict)
    optimizer.register_load_state_dict_pre_hook(_local_state_dict)
    return optimizer


def state_of(optimizer: Optimizer, param: Tensor) -> Mapping[str, Any]:
    """The state of `param` in `optimizer`, as DTensors if `param` is one."""
    state = optimizer.state[param]
    return _dtensor_state(param, state) if isinstance(optimizer, _LocalStepping) else state


# -- stepping -------------------------------------------------------------------------------------


class _LocalStepping(Optimizer):
    """Base of the classes that `step_locally` gives to optimizers."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeStateError(
            "an optimizer that steps locally cannot be copied or pickled; make a new one and load "
            "this one's state_dict() into it"
        )


@cache
def _local_class(kind: type[Optimizer]) -> type[Optimizer]:
    """A class like `kind` whose `step` is on local tensors."""
    original_step: Any = kind.step
    # Optimizers run the hooks of a step in a wrapper around it; ours gets one of its own.
    if getattr(original_step, "hooked", False):
        original_step = getattr(original_step, "__wrapped__", original_step)

    def step(self: Optimizer, closure: Any = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:  # which computes gradients, and zeroes them, of the DTensors
            with torch.enable_grad():
                loss = closure()
        _step_on_local(self, original_step, kwargs)
        return loss

    step.__doc__ = original_step.__doc__
    return type(kind.__name__, (_LocalStepping, kind), {_STEP: step, "__module__": kind.__module__})


def _step_on_local(optimizer: Optimizer, original_step: Any, kwargs: dict[str, Any]) -> None:
    state, groups = optimizer.state, optimizer.param_groups
    dtensors = [group["params"] for group in groups]
    local_state: defaultdict[Tensor, Any] = defaultdict(dict)
    twins: list[tuple[Tensor, Tensor]] = []
    try:
        twins_by_group = [[_local_twin(param, twins) for param in params] for params in dtensors]
        for param, twin in twins:
            param_state = state.get(param)
            if param_state is not None:
                local_state[twin] = param_state
        for group, group_twins in zip(groups, twins_by_group, strict=True):
            group["params"] = group_twins
        optimizer.state = local_state
        original_step(optimizer, **kwargs)
    finally:
        for group, params in zip(groups, dtensors, strict=True):
            group["params"] = params
        optimizer.state = state
        for param, twin in twins:
            if twin is not param:
                twin.grad = None  # or it would outlive the DTensor's
            if twin in local_state:
                state[param] = local_state[twin]


def _local_twin(param: Tensor, twins: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The plain parameter to step on for `param`; adds (param, it) to `twins`."""
    if not isinstance(param, DTensor):
        twins.append((param, param))
        return param
    local = torch_compat.local_tensor(param)
    pair = getattr(param, _LOCAL_TWIN, None)
    if pair is None or pair[0] is not local:  # somebody may have put another in its place
        pair = (local, nn.Parameter(local, requires_grad=param.requires_grad))
        setattr(param, _LOCAL_TWIN, pair)
    twin: Tensor = pair[1]
    twins.append((param, twin))
    grad = param.grad
    if grad is not None:
        local_grad = _local_grad(param, grad)
        if local_grad.dtype != twin.dtype:
            torch_compat.set_grad_dtype(twin, local_grad.dtype)
        twin.grad = local_grad
    return twin


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


def _dtensor_state(param: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` of `param` with each tensor that is laid out like `param` as a DTensor."""
    if not isinstance(param, DTensor):
        return dict(state)
    shape = torch_compat.local_tensor(param).shape
    return {
        key: torch_compat.dtensor_like(param, value)
        if isinstance(value, Tensor) and key != _STEP and value.shape == shape
        else value
        for key, value in state.items()
    }


def _local_state(param: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` of `param` with each DTensor replaced by its local tensor."""
    if not isinstance(param, DTensor):
        return dict(state)
    local_state = {}
    for key, value in state.items():
        local_state[key] = value
        if isinstance(value, DTensor):
            alike = value.device_mesh == param.device_mesh and value.placements == param.placements
            if not alike or value.shape != param.shape:
                raise CheckpointError(
                    f"{key!r} of a parameter is a DTensor of shape {list(value.shape)}, placed "
                    f"{value.placements} on {value.device_mesh}; its parameter, of shape "
                    f"{list(param.shape)}, is placed {param.placements} on {param.device_mesh}; "
                    "load it with sharded.load_optimizer_state_dict"
                )
            local_state[key] = torch_compat.local_tensor(value)
        elif isinstance(value, Tensor) and key != _STEP and value.numel() > 1:
            local = torch_compat.local_tensor(param)
            if value.shape != local.shape:
                raise CheckpointError(
                    f"{key!r} of a parameter is a plain tensor of shape {list(value.shape)}, and "
                    f"this rank's part of it is {list(local.shape)}; load it with "
                    "sharded.load_optimizer_state_dict"
                )
    return local_state


def _dtensor_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _convert_state_dict(optimizer, state_dict, _dtensor_state)


def _local_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _convert_state_dict(optimizer, state_dict, _local_state)


def _convert_state_dict(
    optimizer: Optimizer, state_dict: dict[str, Any], convert: Any
) -> dict[str, Any]:
    """`state_dict` with the state of each parameter converted; parameters are numbers there."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = dict(zip(numbers, _params(optimizer), strict=False))
    state = {
        number: convert(params[number], entries) if number in params else entries
        for number, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
