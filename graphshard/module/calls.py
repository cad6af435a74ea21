"""The methods of a sharded module that run the model's code: as programs, or as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from graphshard.capture.casting import cast_at_units, dtype_of_buffer
from graphshard.capture.side_effects import NO_COMPUTE, PLANNED, ModuleTables
from graphshard.capture.traced_module import MAIN_ENTRY, EntryPoint
from graphshard.errors import (
    CaptureError,
    FingerprintError,
    ModelChangeError,
    PolicyError,
    RuntimeStateError,
)
from graphshard.format import human_bytes, some_of
from graphshard.module.internals import _State
from graphshard.module.meta_model import set_flags
from graphshard.module.on_all_ranks import on_all_ranks
from graphshard.module.sharded_tree import TreeModule, training_flags
from graphshard.planning.layout import Unit
from graphshard.policy.fields import is_int
from graphshard.policy.strategy import Strategy
from graphshard.program.sizes import WrongGuessError
from graphshard.runtime.shards import Shard
from graphshard.runtime.whole import Wanted, gather_each

_GENERATES = "prepare_inputs_for_generation"
"""A class with this method has `generate` from transformers, or from peft over such a model: a loop
that values end, and never one graph."""


class CallMethods(TreeModule):
    """Calls of the model, of its parts and of its methods."""

    _graphshard: _State

    def submodule_forward(self, fqn: str, *args: Any, **kwargs: Any) -> Any:
        """Call the module `fqn` of the model by itself, as a program of its own.

        Only the parameters it reads are gathered, and its backward reduces their gradients.

        Raises:
            PolicyError: the model has no such module.
            CaptureError, RuntimeStateError, CollectiveError: as when calling the whole module.
        """
        meta_model = self._graphshard.programs.meta_model
        if fqn not in dict(meta_model.named_modules(remove_duplicate=False)):
            raise PolicyError(f"submodule_forward: the model has no module {fqn!r}")
        return self._run(EntryPoint(fqn), args, kwargs)

    def call_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model other than forward, as a program of its own.

        A method that calls no torch function is run as it is: it reads and sets the attributes of
        this module. `sharded.encode(x)` and `sharded.encoder.embed(x)` do the same.

        Args:
            name: the method, with the FQN of its module before it if that is not the model itself:
                "encode", "encoder.embed".
            args: of the call.
            kwargs: of the call.

        Raises:
            PolicyError: the model has no such method.
            CaptureError: it cannot be one graph. `run_eagerly` runs such methods, and does so by
                itself for `generate` of transformers and peft.
            ModelChangeError: it adds, removes or writes modules or parameters.
            RuntimeStateError, CollectiveError: as when calling the whole module.
        """
        entry = EntryPoint.of_method(name)
        modules = dict(self._graphshard.programs.meta_model.named_modules(remove_duplicate=False))
        if not callable(getattr(modules.get(entry.module), entry.method, None)):
            raise PolicyError(f"call_method: the model has no method {name!r}")
        kind = type(modules[entry.module])
        if entry.method == "generate" and hasattr(kind, _GENERATES):
            return self.run_eagerly(name, *args, **kwargs)
        method = getattr(kind, entry.method, None)
        if isinstance(method, FunctionType) and entry not in self._graphshard.computing:
            part: Any = self.get_submodule(entry.module)
            ran, result = run_setter(self, modules[""], part._as_model(method), args, kwargs)
            if ran:
                return result
            computed = self._run(entry, args, kwargs, changes=result)
            if not result:
                self._graphshard.computing.add(entry)
            return computed
        return self._run(entry, args, kwargs)

    def _run(
        self, entry: EntryPoint, args: tuple[Any, ...], kwargs: dict[str, Any], changes: str = ""
    ) -> Any:
        state = self._graphshard
        try:
            if not state.ready:
                self._refuse_unsharded()
                state.require_values(self)
            while True:
                step, tensors = state.programs.step_for(args, kwargs, entry)
                try:
                    result = step.run(tensors, (args, kwargs))
                    state.programs.assign(step)
                    return result
                except WrongGuessError as error:
                    state.programs.learn_answer(step, error.number)
        except Exception as error:
            is_capture = type(error) is not ModelChangeError and isinstance(error, CaptureError)
            if is_capture and changes:
                change = ModelChangeError(changes)
                self._tell_of_failure(change)
                raise change from error
            fails = is_capture or isinstance(error, FingerprintError)
            if fails and (entry != MAIN_ENTRY or not torch.is_grad_enabled()):
                error.add_note(
                    f"Without gradients, sharded.run_eagerly({entry.path!r}, ...) runs such "
                    "code as it is, on gathered parameters"
                )
            self._tell_of_failure(error)
            raise
        finally:
            state.programs.end_call()

    def _tell_of_failure(self, error: Exception) -> None:
        """Let the other ranks, which may be about to run a program, raise the error of this one."""
        bindings = self._graphshard.bindings
        strategies = {unit.options.strategy for unit in bindings.plan.units}
        if torch.is_grad_enabled() or strategies != {Strategy.NO_SHARD}:  # else they never meet
            try:
                bindings.agreement.give_up(error)
            finally:
                del error  # which would refer to itself by this function, and keep the module

    @on_all_ranks("name")
    def run_eagerly(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model as it is, operator by operator, on gathered parameters.

        For what cannot be one graph, such as a loop that values end. All parameters are gathered
        first and freed after; `gathered` bounds their memory, or serves several calls. Every rank
        must call this, with arguments of its own: between the ranks nothing is sent while the
        method runs. Training mode, random numbers, autocast and attributes are as in other calls,
        and buffers keep what the method writes.

        Args:
            name: the method, with the FQN of its module before it if that is not the model itself:
                "generate", "encoder.embed", "forward".
            args: of the call; tensors are taken to the device of the module.
            kwargs: of the call.

        Returns:
            What the method returns.

        Raises:
            PolicyError: the model has no such method.
            RuntimeStateError: the result requires gradients, which would be lost; the method wrote
                to a parameter, or changed the modules of the model; parameters have no values.
            CollectiveError: a rank makes another call, or the method failed on another rank.
        """
        entry = EntryPoint.of_method(name)
        with self._gathered(None) as model:
            try:
                method = getattr(model.get_submodule(entry.module), entry.method)
            except AttributeError:
                raise PolicyError(f"run_eagerly: the model has no method {name!r}") from None
            if entry.method == "forward":
                method = model.get_submodule(entry.module)  # whose call runs its hooks, too
            device = self._graphshard.bindings.group.device
            move = partial(tree_map_only, Tensor, lambda tensor: tensor.to(device))
            result = method(*move(args), **move(kwargs))
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    raise RuntimeStateError(
                        f"the result of run_eagerly({name!r}) requires gradients, which would be "
                        "lost, since they would reach copies of the parameters; call it under "
                        "torch.no_grad(), and train by calling the sharded module"
                    )
        return result

    @contextmanager
    @on_all_ranks("max_bytes")
    def gathered(self, *, max_bytes: int | None = None) -> Iterator[nn.Module]:
        """The plain model on gathered parameters, for any number of calls as they are.

            with sharded.gathered() as model, torch.no_grad():
                tokens = model.generate(ids, max_new_tokens=20)

        It is an instance of the model's own class, runs operator by operator, and must not be used
        after the context. The sharded module cannot be called inside. Every rank must enter and
        leave; in between, ranks run by themselves. What would be lost is an error: gradients,
        writes to parameters, modules added or removed. What buffers, attributes and `training`
        flags hold at the end, the sharded module has from then on.

        Args:
            max_bytes: the most bytes of gathered parameters at once, besides a few MiB of messages.
                The root's stay gathered, and as many units as fit; each other unit is gathered
                before a forward of its module and freed after. Then all ranks must run equally
                many forwards (`generate(..., synced_gpus=True)` does); ranks that part get a
                `FingerprintError`. None: all parameters are gathered at once.

        Raises:
            PolicyError: `max_bytes` is less than the root and the largest unit take.
            RuntimeStateError: parameters have no values, or are gathered already; or something
                would be lost.
            CollectiveError: a rank makes another call, or failed inside.
        """
        with self._gathered(max_bytes) as model:
            yield model

    @contextmanager
    def _gathered(self, max_bytes: int | None) -> Iterator[nn.Module]:
        state = self._graphshard
        agreement = state.bindings.agreement
        with agreement.part() as part:
            if max_bytes is not None and not is_int(max_bytes):
                raise PolicyError(
                    f"gathered: max_bytes must be a number of bytes or None; got {max_bytes!r}"
                )
            self._refuse_unsharded()
            state.require_values(self)
            loans = Gathered(self, state, max_bytes)
            part.same += loans.lines
        state.ready, state.lent = False, True
        try:
            with loans.lent() as model:
                yield model
        finally:
            state.ready, state.lent = True, False

    def _refuse_unsharded(self) -> None:
        self._graphshard.refuse_lent()
        if self._graphshard.unsharded.open:
            name = min(self._graphshard.unsharded.open)
            raise RuntimeStateError(
                f"parameter {name!r} is unsharded, so the module has no shards to run on; leave "
                "the unsharded() context before calling it"
            )


class _ComputesError(Exception):
    """A method called a function of torch."""


class _RefuseComputing(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in NO_COMPUTE:
            raise _ComputesError
        return func(*args, **(kwargs or {}))


def run_setter(
    sharded: nn.Module,
    model: nn.Module,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[bool, Any]:
    """Call `method`; (True, its result), or (False, why) if it has to be captured.

    It has to be if it computes with tensors, gives one, or is given one and sets an attribute. What
    it had set until then of the attributes of `model` and the modules below is taken back. It also
    has to be, to see what it leaves, if it changes parameters or modules of `sharded` on its way;
    `why` then says so, and is "" otherwise.
    """
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    tables = ModuleTables(sharded, PLANNED, PLANNED)
    why = ""
    # A part refuses to be called: so does a method that computes by parts alone.
    try:
        with _RefuseComputing():
            result = method(*args, **kwargs)
        keeps = _has_tensors((args, kwargs)) and any(
            attributes.keys() != content.keys()
            or any(attributes[name] is not content[name] for name in content)
            for attributes, content in before
        )
        if changed := tables.changed():
            what = f"it adds, removes or replaces {some_of(changed)}"
            why = str(ModelChangeError.by(method.__name__, what))
        if not why and not keeps and not _has_tensors(result):
            return True, result
    except (_ComputesError, RuntimeStateError) as error:
        why = str(error) if isinstance(error, ModelChangeError) else ""
    tables.restore()
    for attributes, content in before:
        attributes.clear()
        attributes.update(content)
    return False, why


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


# -- on gathered parameters ------------------------------------------------------------------------


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
    def lent(self) -> Iterator[nn.Module]:
        """Yield the model with parameters and buffers in place; ranks meet at the end."""
        model, flags = self._model, training_flags(self._root)
        requires_grad = {n: s.param.requires_grad for n, s in self._state.bindings.shards.items()}
        with ExitStack() as stack:
            stack.enter_context(set_flags(model, flags, requires_grad))
            tables = ModuleTables(model)
            stack.callback(tables.restore)
            stack.enter_context(cast_at_units(model, self._state.bindings.plan.precisions))
            loans = [loan for each in (*self._units.values(), self._ignored) for loan in each]
            stack.callback(self._take_back, loans)
            buffers = self._lend_buffers()
            kept = [each for fqn, each in self._units.items() if fqn not in self._streamed]
            _lend([loan for loans in (*kept, self._ignored) for loan in loans])
            for fqn in self._streamed:
                self._stream(fqn, stack)
            with self._state.bindings.agreement.part(keeps=True):
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
                self._take_back(loans)
                if self._lost:
                    raise RuntimeStateError(
                        f"code on gathered parameters {self._lost[0]}, which would be lost: it "
                        "works on copies; change parameters inside of sharded.unsharded(), and "
                        "train by calling the sharded module"
                    )

    # -- parameters -----------------------------------------------------------------------------

    def _stream(self, fqn: str, stack: ExitStack) -> None:
        """Gather the unit `fqn` before each forward of its module, and free it after."""
        module, loans = self._modules[fqn], self._units[fqn]
        running = 0

        def before(*_: Any) -> None:
            nonlocal running
            running += 1
            if running == 1:
                with self._state.bindings.agreement.part(waits=False) as mine:
                    mine.same.append(f"gathers {fqn}")
                _lend(loans)

        def after(*_: Any) -> None:
            nonlocal running
            running -= 1
            if running == 0:
                self._take_back(loans)

        hook = module.register_forward_pre_hook(before, prepend=True)
        stack.callback(hook.remove)
        stack.callback(module.register_forward_hook(after, always_call=True).remove)

    def _take_back(self, loans: Sequence[_Loan]) -> None:
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
