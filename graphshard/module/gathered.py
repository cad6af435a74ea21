"""The model's own code on gathered parameters, operator by operator, for calls that are no graph.

The copy of the model that captures trace is lent whole parameters, and the buffers of the sharded
module. So it runs as the plain model would, with every attribute as the sharded module has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from graphshard.capture.casting import cast_at_units, dtype_of_buffer
from graphshard.capture.side_effects import ModuleTables
from graphshard.errors import PolicyError, RuntimeStateError
from graphshard.format import human_bytes, some_of
from graphshard.module.internals import _State
from graphshard.module.meta_model import set_flags
from graphshard.module.sharded_tree import training_flags
from graphshard.planning.layout import Unit
from graphshard.runtime.shards import Shard
from graphshard.runtime.whole import Wanted, gather_each

Part = Callable[..., AbstractContextManager[Any]]

Place = tuple[dict[str, Any], str]


class Gathered:
    """Lends whole parameters, of at most `max_bytes` at once, to the model that captures trace.

    lines: what is gathered, the same on all ranks.
    """

    def __init__(self, root: nn.Module, state: _State, max_bytes: int | None) -> None:
        self._root = root
        self._state = state
        self._model = state.programs.meta_model
        self._modules = dict(self._model.named_modules(remove_duplicate=False))
        self._lost: list[str] = []
        for shard in state.shards:
            shard.current()  # takes over what the user did to the parameter
        plan = state.bindings.plan
        shards = state.bindings.shards
        self._units = {
            unit.fqn: [_Loan(shards[fqn], self._modules) for fqn in unit.params]
            for unit in plan.units
        }
        self._ignored = [_Loan(shards[each.fqn], self._modules) for each in plan.ignored]
        self._streamed: list[str] = []
        if max_bytes is not None:
            sizes = {
                fqn: sum(loan.wanted.nbytes for loan in loans if not loan.wanted.is_there)
                for fqn, loans in self._units.items()
            }
            self._streamed = _streamed(plan.units, sizes, plan.is_nested, max_bytes)
        self.lines = [f"gathered for each forward: {', '.join(self._streamed) or 'nothing'}"]

    @contextmanager
    def lent(self, part: Part) -> Iterator[nn.Module]:
        """Yield the model with parameters and buffers in place; ranks meet after each `part`."""
        model, flags = self._model, training_flags(self._root)
        requires_grad = {n: s.param.requires_grad for n, s in self._state.bindings.shards.items()}
        with ExitStack() as stack:
            stack.enter_context(set_flags(model, flags, requires_grad))
            tables = ModuleTables(model)
            stack.callback(tables.restore)
            stack.enter_context(cast_at_units(model, self._state.bindings.plan.precisions))
            stack.callback(self._take_back)
            buffers = self._lend_buffers()
            kept = [each for fqn, each in self._units.items() if fqn not in self._streamed]
            _lend([loan for loans in (*kept, self._ignored) for loan in loans])
            for fqn in self._streamed:
                self._stream(fqn, part, stack)
            with part(keeps=True):
                try:
                    yield model
                except (RuntimeError, NotImplementedError) as error:
                    if self._streamed and "meta" in str(error):
                        error.add_note(
                            "With max_bytes=, the parameters of a unit are there inside of its "
                            "forward only, and on the meta device outside"
                        )
                    raise
                finally:
                    self._carry(buffers, flags)
                if different := tables.changed():
                    raise RuntimeStateError(
                        f"code on gathered parameters added, removed or replaced "
                        f"{some_of(different)}, which the sharded module cannot take over; do so "
                        "on the model before compiling it"
                    )
                self._take_back()
                if self._lost:
                    raise RuntimeStateError(
                        f"code on gathered parameters {self._lost[0]}, which would be lost: it "
                        "works on copies; change parameters inside of sharded.unsharded(), and "
                        "train by calling the sharded module"
                    )

    # -- parameters -----------------------------------------------------------------------------

    def _stream(self, fqn: str, part: Part, stack: ExitStack) -> None:
        """Gather the unit `fqn` before each forward of its module, and free it after."""
        module, loans = self._modules[fqn], self._units[fqn]
        running = 0

        def before(*_: Any) -> None:
            nonlocal running
            running += 1
            if running == 1:
                with part(waits=False) as mine:
                    mine.same.append(f"gathers {fqn}")
                _lend(loans)

        def after(*_: Any) -> None:
            nonlocal running
            running -= 1
            if running == 0:
                self._lost += [text for loan in loans if (text := loan.take_back())]

        hook = module.register_forward_pre_hook(before, prepend=True)
        stack.callback(hook.remove)
        stack.callback(module.register_forward_hook(after, always_call=True).remove)

    def _take_back(self) -> None:
        for loans in (*self._units.values(), self._ignored):
            self._lost += [text for loan in loans if (text := loan.take_back())]

    # -- buffers and flags ----------------------------------------------------------------------

    def _lend_buffers(self) -> list[tuple[str, Tensor, Tensor, int]]:
        """Put the buffers of the sharded module in place: name, its own, the lent, its version."""
        bindings, precisions = self._state.bindings, self._state.bindings.plan.precisions
        shown: dict[int, Tensor] = {}
        lent = []
        for name in bindings.buffers:
            buffer = bindings.buffer(name)
            path, _, leaf = name.rpartition(".")
            if id(buffer) not in shown:
                dtype = dtype_of_buffer(self._modules[path], path, buffer, precisions)
                with torch.no_grad(), torch.inference_mode(False):
                    shown[id(buffer)] = buffer.to(dtype)
                lent.append((name, buffer, shown[id(buffer)], shown[id(buffer)]._version))
            self._modules[path]._buffers[leaf] = shown[id(buffer)]
        return lent

    def _carry(
        self, buffers: Sequence[tuple[str, Tensor, Tensor, int]], flags: Sequence[bool]
    ) -> None:
        """Carry what the model's code set over to the sharded module."""
        self._state.programs.changes.attributes += 1  # so that the next call looks
        for part, twin, before in zip(
            self._root.modules(), self._model.modules(), flags, strict=False
        ):
            if twin.training != before:
                part.training = twin.training
        for name, own, lent, version in buffers:
            path, _, leaf = name.rpartition(".")
            now = self._modules[path]._buffers.get(leaf)
            if now is lent and (lent is own or lent._version == version):
                continue
            if now is None or now.shape != own.shape:
                raise RuntimeStateError(
                    f"code on gathered parameters put something of another shape into buffer "
                    f"{name!r}, which the sharded module cannot take over; set it on the model "
                    "before compiling it"
                )
            with torch.no_grad(), torch.inference_mode(False):
                own.copy_(now)


class _Loan:
    """A parameter that is lent to the model for a while."""

    def __init__(self, shard: Shard, modules: Mapping[str, nn.Module]) -> None:
        self.wanted = Wanted(shard, shard.layout.compute_dtype)
        self._places: list[Place] = []
        for name in shard.layout.names:
            path, _, leaf = name.rpartition(".")
            self._places.append((modules[path]._parameters, leaf))
        holder, leaf = self._places[0]
        self._meta = holder[leaf]
        self._param: nn.Parameter | None = None
        self._version = 0

    @property
    def name(self) -> str:
        return self.wanted.shard.layout.fqn

    def lend(self, full: Tensor) -> None:
        own = self.wanted.shard.param
        self._param = nn.Parameter(full, own.requires_grad)
        vars(self._param).update(vars(self._meta))
        if own.requires_grad:
            self._param.register_hook(partial(_refuse_gradient, self.name))
        self._version = self._param._version
        for holder, leaf in self._places:
            holder[leaf] = self._param

    def take_back(self) -> str | None:
        """Put the parameter on meta back; what would be lost, as text, if anything."""
        param, self._param = self._param, None
        if param is None:
            return None
        replaced = any(holder.get(leaf) is not param for holder, leaf in self._places)
        for holder, leaf in self._places:
            holder[leaf] = self._meta
        if replaced:
            return f"put another tensor in place of parameter {self.name!r}"
        if param._version != self._version:
            return f"wrote to parameter {self.name!r}"
        return f"left a gradient on parameter {self.name!r}" if param.grad is not None else None


def _lend(loans: Sequence[_Loan]) -> None:
    by_shard = {id(loan.wanted.shard): loan for loan in loans}
    with torch.no_grad(), torch.inference_mode(False):
        for wanted, full in gather_each([loan.wanted for loan in by_shard.values()]):
            by_shard[id(wanted.shard)].lend(full)


def _refuse_gradient(name: str, gradient: Tensor) -> NoReturn:
    raise RuntimeStateError(
        f"backward reached parameter {name!r} as it was gathered for a call outside of a program, "
        "and its gradient would be lost; make such calls under torch.no_grad(), and train by "
        "calling the sharded module"
    )


def _streamed(
    units: Sequence[Unit],
    sizes: Mapping[str, int],
    is_nested: Callable[[str, str], bool],
    max_bytes: int,
) -> list[str]:
    """The units to gather for each of their forwards; the first ones that fit are kept."""
    streamed = [unit.fqn for unit in units if unit.fqn]
    around = {
        fqn: [each for each in streamed if each != fqn and is_nested(fqn, each)] for fqn in streamed
    }

    def most(names: Sequence[str]) -> int:
        """Bytes of the unit whose forward needs most, with those around it, of `names`."""
        chosen = set(names)
        return max(
            (sizes[fqn] + sum(sizes[e] for e in around[fqn] if e in chosen) for fqn in names),
            default=0,
        )

    kept = sizes[""]
    if (least := kept + most(streamed)) > max_bytes:
        raise PolicyError(
            f"the root and the largest unit take {least} bytes ({human_bytes(least)}) gathered, "
            f"more than max_bytes={max_bytes}; pass at least that much, or choose smaller units"
        )
    for fqn in list(streamed):
        rest = [each for each in streamed if each != fqn]
        if kept + sizes[fqn] + most(rest) <= max_bytes:
            kept += sizes[fqn]
            streamed = rest
    return streamed
