"""The two sides of a case: the sharded module, and a reference that trains in eager mode.

A reference is the plain model on each rank's batch, whose gradients are averaged over the ranks; or
`fully_shard` where a policy has mixed precision.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from full_tensors import full
from fuzz_case import Case
from fuzz_model import DEVICE, batch, differentiable, loss_of, model_of
from fuzz_policies import dtypes_of, policy_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphshard
from graphshard import pipeline
from graphshard.policy import placement

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    # A large eps: rounding noise in place of a gradient that is zero must not become a step.
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}),
    "adamw_single": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "foreach": False}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "fused": True}),
    "adam_amsgrad": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.02, "eps": 1e-3}),
}

NO_DECAY = r"(norm|bias|scale)"
"""Parameters whose name has this get options of their own in an optimizer "..._groups"."""


class Side:
    """What the protocol needs of either side.

    module: what is called. optim: steps on its parameters.
    """

    module: nn.Module
    optim: torch.optim.Optimizer

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def unsynced(self) -> Any:
        """A context in which gradients are not reduced."""
        raise NotImplementedError

    def clip(self, bound: float, norm: float) -> Tensor:
        """Clip all gradients by their joint norm, which is returned."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool) -> None:
        self.optim.zero_grad(set_to_none)

    def save(self) -> Any:
        """The state of model and optimizer, for `load`."""
        raise NotImplementedError

    def load(self, state: Any) -> None:
        raise NotImplementedError

    def params(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def grads(self) -> dict[str, Tensor | None]:
        """Whole gradients by the names of parameters."""
        named = self.params().items()
        return {name: None if p.grad is None else full(p.grad) for name, p in named}


def options_of(name: str, param: nn.Parameter) -> dict[str, Any]:
    """Options of a parameter's own under an optimizer "..._groups"."""
    return {"weight_decay": 0.0, "lr": 0.02} if re.search(NO_DECAY, name) else {}


def optimizer_of(case: Case, side: Side) -> torch.optim.Optimizer:
    """The case's optimizer of a side's trainable parameters."""
    kind, options = OPTIMIZERS[case.optimizer.removesuffix("_groups")]
    if case.autocast and "eps" in options:
        options = {**options, "eps": 1.0}  # the noise is that of 16 bits
    rule = options_of if case.optimizer.endswith("_groups") else None
    groups: Any = [param for param in side.params().values() if param.requires_grad]
    if not groups:
        raise NothingToTrain("the model has no trainable parameter")
    if isinstance(side, Sharded) and (rule or "ignored" in case.policy):
        groups = side.module.parameter_groups(rule)  # which keeps tensors of a kind together
    elif rule:
        named = {name: p for name, p in side.params().items() if p.requires_grad}
        groups = [{"params": [param], **rule(name, param)} for name, param in named.items()]
    return kind(groups, **options)


class NothingToTrain(Exception):  # noqa: N818  # no error of the program's
    """An optimizer cannot be made."""


class Eager(Side):
    """A replica on every rank; `.grad` holds the mean over the ranks.

    The parameters that match `ignored` keep each rank's own gradient.
    """

    def __init__(self, case: Case) -> None:
        self.module = model_of(case)
        ignored = case.policy.get("ignored")
        self._ignored = {
            id(param)
            for name, param in self.module.named_parameters(remove_duplicate=False)
            if ignored and _is_ignored(ignored, name)
        }
        self._zeros = case.policy.get("gather_unused", False)
        self.optim = optimizer_of(case, self)
        self._waiting: dict[nn.Parameter, Tensor] = {}
        self._synced = True

    @contextlib.contextmanager
    def unsynced(self) -> Iterator[None]:
        self._synced = False
        yield
        self._synced = True

    def backward(self, loss: Tensor, **options: Any) -> None:
        params = list(self.module.parameters())
        before = [param.grad for param in params]
        for param in params:
            param.grad = None
        loss.backward(**options)
        for param, old in zip(params, before, strict=True):
            new, param.grad = param.grad, old
            if new is not None:
                self._take(param, new)
        if self._synced:
            self._reduce()

    def _take(self, param: nn.Parameter, new: Tensor) -> None:
        if id(param) in self._ignored:
            _add(param, new)
        else:
            waiting = self._waiting.get(param)
            self._waiting[param] = new if waiting is None else waiting + new

    def _reduce(self) -> None:
        for param in self.module.parameters():  # in one order on all ranks
            grad = self._waiting.pop(param, None)
            if grad is None and self._zeros and param.requires_grad:
                grad = None if id(param) in self._ignored else torch.zeros_like(param)
            if grad is not None:
                _add(param, _mean(grad))

    def clip(self, bound: float, norm: float) -> Tensor:
        params = [param for param in self.module.parameters() if param.grad is not None]
        own = [p.grad for p in params if id(p) in self._ignored]
        shared = [p.grad for p in params if id(p) not in self._ignored]
        power = _power(shared, norm)
        if self._ignored:
            power = power + _mean(_power(own, norm))
        total = power ** (1 / norm)
        for grad in (*own, *shared):
            grad.mul_((bound / (total + 1e-6)).clamp(max=1.0).to(grad.dtype))
        return total

    def save(self) -> Any:
        model = {name: value.clone() for name, value in self.module.state_dict().items()}
        optim = self.optim.state_dict()
        return model, torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, optim)

    def load(self, state: Any) -> None:
        self.module.load_state_dict(state[0])
        self.optim.load_state_dict(state[1])


class Sharded(Side):
    """graphshard's module."""

    def __init__(self, case: Case) -> None:
        mesh = None
        if case.mesh:
            names = ("replicate", "shard")[-len(case.mesh) :]
            mesh = init_device_mesh(DEVICE.type, case.mesh, mesh_dim_names=names)
        synced = case.policy.get("sync_module_states") and case.start != "meta"
        own_weights = dist.get_rank() if synced else 0
        real = model_of(case, weights=own_weights)
        if own_weights and case.policy.get("ignored"):  # parameters which nobody synchronizes
            ignored = dict(model_of(case).named_parameters(remove_duplicate=False))
            with torch.no_grad():
                for name, param in real.named_parameters(remove_duplicate=False):
                    if _is_ignored(case.policy["ignored"], name):
                        param.copy_(ignored[name])
        model = real
        if case.start == "meta":
            with torch.device("meta"):
                model = model_of(case)
        x, ids = batch(case, 0, dist.get_rank(), (2, 4))
        dynamic = {"x": {0: "batch", 1: "time"}, "ids": {0: "batch", 1: "time"}}
        with contextlib.ExitStack() as patches:
            if case.tight:
                patches.enter_context(
                    mock.patch.multiple(placement, MIN_PADDING=0, MAX_PADDING=0.0)
                )
            if case.far:
                host = {"NCCL_HOSTID": f"host{dist.get_rank()}"}
                patches.enter_context(mock.patch.dict(os.environ, host))
                patches.enter_context(mock.patch.object(pipeline, "APART", 0))
            self.module: Any = graphshard.compile(
                model,
                policy_of(case.policy),
                mesh=mesh,
                backend=case.backend,
                check=case.check,
                dynamic=dynamic if case.dynamic else None,
                example_inputs=(x, ids) if case.start == "example" else None,
            )
        if case.start == "meta":
            self.module.load_full_state_dict(real.state_dict())
        self._seed = case.seed
        self.optim = optimizer_of(case, self)
        if case.on_dtensors:
            kind: Any = type(self.optim)
            self.optim.__class__ = type(kind.__name__, (kind,), {})  # a class that nobody knows

    @contextlib.contextmanager
    def unsynced(self) -> Iterator[None]:
        """In a spelling that the seed draws."""
        if self._seed % 3 == 0:
            with self.module.no_sync():
                yield
        elif self._seed % 3 == 1:
            self.module.require_backward_grad_sync = False
            yield
            self.module.require_backward_grad_sync = True
        else:
            self.module.set_requires_gradient_sync(False)
            yield
            self.module.set_requires_gradient_sync(True)

    def clip(self, bound: float, norm: float) -> Tensor:
        return self.module.clip_grad_norm_(bound, norm)

    def zero_grad(self, set_to_none: bool) -> None:
        self.module.zero_grad(set_to_none)

    def save(self) -> Any:
        return (
            self.module.full_state_dict(rank0_only=False),
            self.module.optimizer_state_dict(self.optim, kind="full", rank0_only=False),
        )

    def load(self, state: Any) -> None:
        self.module.load_full_state_dict(state[0])
        self.module.load_optimizer_state_dict(self.optim, state[1])


class Fsdp2(Side):
    """`fully_shard` on the units of a plan, with the same precision."""

    def __init__(self, case: Case, units: list[str]) -> None:
        model = model_of(case)
        fields = dict(case.policy["mixed_precision"])
        kept = fields.pop("keep_low_precision_grads", False)
        buffers = fields.pop("buffer_dtype", None)
        self._kept = getattr(torch, fields["reduce_dtype"]) if kept else None
        if buffers is not None:  # which are only read
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(getattr(torch, buffers))
        dtypes = dtypes_of(fields)
        # Without a dtype of its own FSDP2 reduces in the parameters' from torch 2.15 on.
        policy = MixedPrecisionPolicy(**{"reduce_dtype": dtypes.get("param_dtype"), **dtypes})
        for fqn in sorted(units, key=lambda fqn: -fqn.count(".") - bool(fqn)):
            fully_shard(model.get_submodule(fqn), mp_policy=policy)
        self.module = model
        self.optim = optimizer_of(case, self)

    @contextlib.contextmanager
    def unsynced(self) -> Iterator[None]:
        self.module.set_requires_gradient_sync(False)
        yield
        self.module.set_requires_gradient_sync(True)

    def clip(self, bound: float, norm: float) -> Tensor:
        return full(torch.nn.utils.clip_grad_norm_(self.module.parameters(), bound, norm))

    def params(self) -> dict[str, nn.Parameter]:
        self.module.reshard()  # the root stays gathered behind a forward without a backward
        return super().params()

    def grads(self) -> dict[str, Tensor | None]:
        named = super().grads().items()
        return {name: g if g is None or not self._kept else g.to(self._kept) for name, g in named}


def reference(case: Case, sharded: Sharded) -> Side:
    """The side that `sharded` must equal."""
    if case.mixed:
        return Fsdp2(case, [unit.fqn for unit in sharded.module.plan.units])
    return Eager(case)


def zero_gradients(case: Case) -> dict[str, Tensor]:
    """By parameter, the elements whose true gradient is zero, so that a run has rounding alone.

    Examples are a bias in front of a BatchNorm and the bias of an attention's keys.
    """
    model = model_of(replace(case, dtype="float64", autocast=""))
    for number in range(2):
        outputs = model(*batch(replace(case, dtype="float64"), number, 0, (8, 8)))
        loss_of(differentiable(outputs)).backward()
    grads = {name: p.grad.abs() for name, p in model.named_parameters() if p.grad is not None}
    largest = max((float(g.max()) for g in grads.values() if g.numel()), default=0.0)
    return {name: grad < 1e-12 * largest for name, grad in grads.items()}


def perturbed(side: Eager, case: Case) -> Eager:
    """`side` with every parameter changed by a few units in its last place, up or down.

    Under autocast by half a unit in the last place of its dtype.
    """
    signs = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for param in side.module.parameters():
            if param.is_floating_point():
                up = (torch.rand(param.shape, generator=signs, device="cpu") < 0.5).to(DEVICE)
                step = 4 * torch.finfo(param.dtype).eps
                if case.autocast:
                    step = torch.finfo(getattr(torch, case.autocast)).eps / 2
                param.mul_(torch.full_like(param, 1 - step).masked_fill_(up, 1 + step))
    return side


def _is_ignored(pattern: str, name: str) -> bool:
    """Whether `pattern` matches the whole of a parameter's name or of a module's around it."""
    parts = name.split(".")
    return any(re.fullmatch(pattern, ".".join(parts[:end])) for end in range(1, len(parts) + 1))


def _mean(tensor: Tensor) -> Tensor:
    total = torch.view_as_real(tensor).clone() if tensor.is_complex() else tensor.clone()
    total = total.contiguous()
    dist.all_reduce(total)
    total /= dist.get_world_size()
    return torch.view_as_complex(total) if tensor.is_complex() else total


def _add(param: nn.Parameter, grad: Tensor) -> None:
    param.grad = grad if param.grad is None else param.grad + grad


def _power(grads: list[Tensor], norm: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for grad in grads:
        total = total + (grad.abs().double() ** norm).sum()
    return total
