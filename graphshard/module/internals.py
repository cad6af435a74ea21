"""The state of a sharded module besides its parameters and buffers, and its full parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphshard.state as states
from graphshard.capture.traced_module import EntryPoint
from graphshard.errors import PolicyError, RuntimeStateError
from graphshard.module.meta_model import initialize
from graphshard.module.programs import Programs
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.calls import require_names
from graphshard.runtime.lower import Bindings
from graphshard.runtime.shards import Shard, distinct
from graphshard.runtime.whole import Wanted, gather_each
from graphshard.torch_private import compat as torch_compat


class FullParameters(dict[str, nn.Parameter]):
    """The parameters that modules hold now, each under its first name.

    A tied parameter is met once by whoever walks over them, and found by its other names, too.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        super().__init__()
        self._first: dict[str, str] = {}
        for shard in shards:
            holder, name = shard.holders[0]
            self[shard.layout.fqn] = holder[name]
            self._first.update(dict.fromkeys(shard.layout.names, shard.layout.fqn))

    def __missing__(self, name: str) -> nn.Parameter:
        """The tied parameter of another name than its first."""
        if name not in self._first:
            raise KeyError(name)
        return self[self._first[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._first

    def get(self, name: str, default: Any = None) -> Any:
        """The parameter `name`, by any of its names; `default` if there is none."""
        return self[name] if name in self._first else default


class Unsharded:
    """The full twins of the distinct parameters `shards`, and their gathering and splitting.

    Code that needs whole matrices runs on them. Each parameter has one twin, the same
    `nn.Parameter` object every time, whose storage is there only inside the context. So an
    optimizer that was given the twins keeps its state from step to step.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        self.shards = list(shards)
        self.open: frozenset[str] = frozenset()  # FQNs of the parameters that are full now
        self.with_grads: frozenset[str] = frozenset()  # those of them whose gradients are, too
        self._twins: dict[str, nn.Parameter] = {}

    def twin(self, shard: Shard) -> nn.Parameter:
        """The full parameter, empty outside of the context; a plain parameter itself."""
        if not isinstance(shard.param, DTensor):
            return shard.param
        fqn = shard.layout.fqn
        if fqn not in self._twins:
            local = torch_compat.local_tensor(shard.param)
            full = torch.empty(shard.layout.shape, dtype=local.dtype, device=local.device)
            self._twins[fqn] = nn.Parameter(full, shard.param.requires_grad)
            vars(self._twins[fqn]).update(vars(shard.param))
            full.untyped_storage().resize_(0)
        self._twins[fqn].requires_grad_(shard.param.requires_grad)
        return self._twins[fqn]

    def select(self, modules: Any) -> list[Shard]:
        """The shards of the parameters in `modules` (an FQN or a list of them), or all."""
        fqns = require_names("unsharded: modules", modules, "the name of a module")
        if modules is None:
            return self.shards
        by_fqn = {}
        for module in fqns:
            inside = [s for s in self.shards if any(_inside(n, module) for n in s.layout.names)]
            if not inside:
                raise PolicyError(f"unsharded: no module or parameter of the model is {module!r}")
            by_fqn.update({shard.layout.fqn: shard for shard in inside})
        return list(by_fqn.values())

    def check(
        self, shards: list[Shard], *, writeback: bool, with_grads: bool, rank0_only: bool
    ) -> list[str]:
        """Check the arguments of `context`; return what it gathers, the same on all ranks."""
        if rank0_only and writeback:
            raise PolicyError(
                "unsharded(rank0_only=True) would leave what rank 0 writes on rank 0 alone; pass "
                "writeback=False, too"
            )
        names = {shard.layout.fqn for shard in shards}
        if self.open & names:
            raise RuntimeStateError(
                f"parameter {min(self.open & names)!r} is unsharded already; leave the inner "
                "context out"
            )
        gathered = []
        for shard in _sharded(shards):
            shard.current()  # takes over what the user did to the parameter
            gathered.append(f"parameter {shard.layout.fqn}")
            if with_grads and shard.param.grad is not None:
                gathered.append(f"gradient of {shard.layout.fqn}")
        return gathered

    def context(
        self,
        shards: list[Shard],
        agreement: Agreement,
        *,
        writeback: bool,
        with_grads: bool,
        rank0_only: bool,
    ) -> Iterator[dict[str, nn.Parameter]]:
        """Gather, yield the twins by name, and split again; see `ShardedModule.unsharded`.

        With `rank0_only` the other ranks gather, and keep nothing.
        """
        names = {shard.layout.fqn for shard in shards}
        sharded = _sharded(shards)
        opened: list[tuple[Shard, nn.Parameter, Any]] = []
        keep = False
        self.open |= names
        if with_grads:
            self.with_grads |= {shard.layout.fqn for shard in sharded}
        try:
            keeper = states.state_tensors.Keeper()
            for wanted, full in gather_each(_wanted(sharded, with_grads=with_grads)):
                if wanted.shard.group.rank == 0 or not rank0_only:
                    keeper.keep(partial(self._fill, wanted, full, opened))
            keeper.end(agreement)
            for shard, twin, _ in opened:
                for holder, name in shard.holders:
                    holder[name] = twin
            with agreement.part(keeps=True):
                yield FullParameters(shards)
            keep = True
        finally:
            for shard, twin, param in opened:
                self._split(shard, twin, param, writeback=writeback and keep, with_grads=with_grads)
            self.open -= names
            self.with_grads -= names

    def _fill(
        self, wanted: Wanted, full: Tensor, opened: list[tuple[Shard, nn.Parameter, Any]]
    ) -> None:
        shard, twin = wanted.shard, self.twin(wanted.shard)
        if wanted.grad is not None:
            _set_grad(twin, full.to(shard.local.device, copy=wanted.is_there))
            return
        opened.append((shard, twin, shard.param))
        with torch.no_grad():
            twin.untyped_storage().resize_(twin.nbytes)
            twin.copy_(full)

    def _split(
        self, shard: Shard, twin: nn.Parameter, param: Any, *, writeback: bool, with_grads: bool
    ) -> None:
        for holder, name in shard.holders:
            holder[name] = param
        if writeback:
            with torch.no_grad():
                # In place on the DTensor, so that a backward to come sees that it changed.
                param.copy_(shard.as_dtensor(shard.part_of(twin.detach()).contiguous()))
        if writeback and with_grads:
            if twin.grad is None:
                param.grad = None
            elif param.grad is None:
                grad_part = shard.part_of(twin.grad).to(shard.local.device)
                grad_part = grad_part.clone(memory_format=torch.contiguous_format)
                _set_grad(param, shard.as_dtensor(grad_part))
            else:
                torch_compat.local_tensor(param.grad).copy_(shard.part_of(twin.grad))
        twin.grad = None
        twin.untyped_storage().resize_(0)


def _sharded(shards: Iterable[Shard]) -> list[Shard]:
    return [shard for shard in shards if isinstance(shard.param, DTensor)]


def _set_grad(param: nn.Parameter, grad: Tensor) -> None:
    """Make `grad` the gradient of `param`, in whatever dtype mixed precision leaves it."""
    if grad.dtype != param.dtype:
        torch_compat.set_grad_dtype(param, grad.dtype)
    param.grad = grad


def _wanted(shards: Iterable[Shard], *, with_grads: bool) -> list[Wanted]:
    wanted = [Wanted(shard, shard.local.dtype) for shard in shards]
    if with_grads:
        for shard in shards:
            if shard.param.grad is not None:
                grad = torch_compat.local_tensor(shard.param.grad)
                wanted.append(Wanted(shard, grad.dtype, grad))
    return wanted


def _inside(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(module + ".")


class _State:
    """Shards, programs and flags, under one attribute so as not to clash with the model's names."""

    def __init__(
        self,
        bindings: Bindings,
        programs: Programs,
        on_meta: frozenset[str],
    ) -> None:
        self.bindings = bindings
        self.programs = programs
        self.shards = distinct(bindings.shards)
        named = programs.meta_model.named_parameters()
        self.in_model_order = [bindings.shards[name] for name, _ in named]
        self.unsharded = Unsharded(self.shards)
        self.on_meta = on_meta
        self.ready = False
        self.lent = False  # whole parameters, to the model's own code
        self.computing: set[EntryPoint] = set()  # methods that are programs, and set no state alone
        # Whoever loads a buffer writes it in place or replaces it.
        self.empty_buffers = {
            name: (bindings.buffer(name), bindings.buffer(name)._version)
            for name in on_meta
            if name in bindings.buffers
        }

    def fill_buffers(self) -> None:
        """Compute the buffers that a checkpoint left without values, as `init_weights` would."""
        empty = self.unfilled_buffers()
        if empty:
            # One that nothing computes is named when the module is called.
            with contextlib.suppress(RuntimeStateError):
                initialize(self.programs.meta_model, self.bindings, empty, seed=0)

    def unfilled_buffers(self) -> frozenset[str]:
        """The buffers that have no values yet; the same ones on every rank."""
        return frozenset(name for name in self.empty_buffers if self._is_empty(name))

    def _is_empty(self, name: str) -> bool:
        buffer, version = self.empty_buffers[name]
        return self.bindings.buffer(name) is buffer and buffer._version == version

    def refuse_lent(self) -> None:
        """Raise inside of `gathered()` and `run_eagerly()`."""
        if self.lent:
            raise RuntimeStateError(
                "the parameters are gathered for gathered() or run_eagerly(), so that the sharded "
                "module cannot be called; call the model that gathered() gives, or leave it first"
            )

    def require_values(self, module: nn.Module) -> None:
        """Check that every parameter and buffer got a value after the model left meta."""
        for shard in self.shards:
            if not shard.has_values():
                raise RuntimeStateError(
                    f"parameter {shard.layout.fqn!r} has no values yet, since the model was on the "
                    "meta device; call init_weights(), load_full_state_dict(...), or load a "
                    "checkpoint first"
                )
        for name in self.empty_buffers:
            if self._is_empty(name):
                raise RuntimeStateError(
                    f"buffer {name!r} has no values yet, since the model was on the meta device; "
                    "call init_weights() first (before loading, if it is in no checkpoint)"
                )
        self.ready = True
