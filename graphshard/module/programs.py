"""The programs of a module: one for each signature of its calls, captured at the first of them."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from graphshard.capture.captured import Capture, Met, refuse_more_programs, refuse_uncounted
from graphshard.capture.code_walk import CodeWalk
from graphshard.capture.dynamic import Dynamic, dims_above_one, enlarge_small_dims
from graphshard.capture.guards import Watch
from graphshard.capture.host_draws import random_states_kept
from graphshard.capture.input_checks import as_plain, require_values_of, signature_of
from graphshard.capture.places import Buffer
from graphshard.capture.structure import CALL, FlatCalls, take_apart
from graphshard.capture.traced_module import MAIN_ENTRY, EntryPoint
from graphshard.errors import CaptureError, PassError, RuntimeStateError, VerifyError, warn_user
from graphshard.format import some_of
from graphshard.module.call_sizes import Call, CallSizes
from graphshard.module.meta_model import set_flags
from graphshard.module.sharded_tree import Changes, training_flags
from graphshard.program.collective import REDUCED, Mode
from graphshard.program.pass_protocol import PassLike
from graphshard.progress import Progress, Stages
from graphshard.runtime.lower import Bindings
from graphshard.runtime.resident import ResidentRows
from graphshard.runtime.shards import distinct
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private.gc_pause import collect_only_new

if TYPE_CHECKING:
    from graphshard.runtime.step import Step

logger = logging.getLogger("graphshard")


MANY = 8

RECENT = 4
"""The number of recent signatures that a call is compared with first."""

_OTHERS = "arguments that are no tensors"

_SIZES = "sizes"

_STATE = "Python state"

_ANSWERS = "answers of values"


_EXPECTED = frozenset({"mode", "gradients", "gradients of parameters"})
"""The differences between calls that every training loop with an evaluation, or no_sync(), has.

The first call of an evaluation may differ in more: other sizes, no targets.
"""


_STALE = "parameters changed since they were gathered"


_TRAINED = "trainable parameters"


class CaptureKey(NamedTuple):
    """What a capture of a call depends on.

    signature: the shapes, dtypes and flags of its tensors, and its other arguments.
    training: the `training` flag of every module.
    grad: whether gradients are on.
    autocast: the dtype of `torch.autocast`, if it is on.
    settings: see `_settings`.
    trained: of each parameter, whether it requires gradients.
    entry: the method called.
    """

    signature: tuple[Any, ...]
    training: tuple[bool, ...]
    grad: bool
    autocast: torch.dtype | None
    settings: tuple[Any, ...]
    trained: tuple[bool, ...]
    entry: EntryPoint


class CallKey(NamedTuple):
    """What the program of a call is found by; the programs of one capture differ in the rest.

    capture: what its capture is found by.
    stale: of each parameter that is kept whole, whether it changed since it was gathered.
    mode: which gradients are accumulated, and which reduced.
    """

    capture: CaptureKey
    stale: tuple[bool, ...]
    mode: Mode


class Programs:
    """Captures, rewrites and keeps a program for each signature.

    With symbolic sizes a signature has a further program for calls whose sizes the first ones were
    not right for.
    """

    def __init__(
        self,
        meta_model: nn.Module,
        root: nn.Module,
        changes: Changes,
        bindings: Bindings,
        passes: Sequence[PassLike],
        dynamic: Dynamic | Literal["auto"] | None,
    ) -> None:
        self.meta_model = meta_model
        self._root = weakref.ref(root)  # which holds this, so that dropping it frees all at once
        self.changes = changes
        self.bindings = bindings
        self.passes = tuple(passes)
        self.plan = bindings.plan
        self.sizes = CallSizes(meta_model, dynamic, self.plan.policy)
        self.steps: dict[tuple[CallKey, int], Step] = {}  # the number is that of the capture
        self._recent: list[tuple[CallKey, Step]] = []  # the latest made or looked up first
        self._calls = FlatCalls()
        # Several for symbolic sizes that differ.
        self._captures: dict[CaptureKey, list[Capture]] = {}
        # Names of sizes that were fixed for some calls.
        self._fixed: dict[CaptureKey, set[str]] = {}
        self._described: list[dict[str, str]] = []
        self._noted: set[type] = set()  # classes of inputs that a warning told of
        self._training: tuple[int, tuple[bool, ...]] = (-1, ())
        self._shards = distinct(bindings.shards)
        self._by_identity: dict[str, bool] = {}  # of methods: whether their code compares by `is`
        self._watch = Watch()
        self._holding: set[int] = set()  # captures, by identity, whose state is as it was
        self._again: Met | None = None  # this call, which ran already and guessed wrong
        self._put_back: Callable[[], None] | None = None  # the states of what it drew from
        self._served: set[Step] = set()
        self._resident = ResidentRows(self._shards, bindings.agreement)

    def written_buffers(self) -> frozenset[str]:
        """The names of the buffers that captured programs write."""
        names: set[str] = set()
        for step in self.steps.values():
            written = {m.name for m in step.program.mutations if m.kind == "buffer"}
            written |= {each.path for each, _ in step.capture.left if isinstance(each, Buffer)}
            names.update(n for b in step.program.buffers if b.fqn in written for n in b.names)
        return frozenset(names)

    def step_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], entry: EntryPoint = MAIN_ENTRY
    ) -> tuple[Step, list[Tensor]]:
        """The program for a call of `entry`, captured if new, and the call's tensors."""
        tensors, structure = self._calls.take_apart(args, kwargs)
        if not {Tensor, nn.Parameter}.issuperset(map(type, tensors)):
            tensors = as_plain(tensors, structure, self._noted)
        device = self.bindings.group.device
        if device.type != "cpu":  # as on cpu, an input that lies elsewhere would be an error
            try:
                tensors = [t.to(device, non_blocking=True) for t in tensors]
            except NotImplementedError:
                require_values_of(tensors, structure)
                raise
        if self._resident.shards and self._again is None:  # the others may not run again
            self._resident.compare()
        step = self._step(Call(tensors, structure, entry))
        self._put_back = random_states_kept() if step.capture.draws else None
        return step, [*tensors, *(draw.make() for draw in step.capture.draws)]

    def assign(self, step: Step) -> None:
        """Assign what the forward that `step` ran assigns."""
        if step not in self._served:
            self._served.add(step)
            refuse_uncounted([served.capture for served in self._served])
        if step.capture.assigned and step.capture.assign():
            self.changes.attributes += 1  # so that the next call looks

    def learn_answer(self, step: Step, wrong: int | None) -> None:
        """Let this call be looked up again, after `step` guessed so; see `WrongGuessError`.

        Raises:
            CaptureError: the answer was another one a moment ago.
        """
        self._again = step.capture.again(wrong, self._again)
        if self._put_back is not None:
            self._put_back()

    def end_call(self) -> None:
        """Note that the next call is another one."""
        self._again = None

    def capture_example(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], progress: Stages | None = None
    ) -> Step:
        """The program for calls like this one, whose tensors may be real, meta or fake."""
        tensors, structure = take_apart((args, kwargs), name=CALL)
        tensors = as_plain(tensors, structure, self._noted)
        on_device = {id(t): self._on_device(t) for t in tensors}
        tensors = [on_device[id(t)] for t in tensors]
        names = self.sizes.names(Call(tensors, structure, MAIN_ENTRY))
        if names is not None:
            tensors = enlarge_small_dims(tensors, names)
        self._resident.look_for_signs()
        return self._step(Call(tensors, structure, MAIN_ENTRY, names), progress)

    def _forms(self, call: Call) -> Iterator[tuple[Call, CallKey]]:
        """`call` with its sizes, and with symbols for those that vary, and the keys of both.

        A shape that has a program of its own, as the first one met, keeps to that.
        """
        first = call if self.sizes.learns else self._named(call)
        key = self._key(first)
        yield first, key
        named = self._named(first)
        if named is not first:
            capture = key.capture._replace(signature=self._signature(named))
            yield named, key._replace(capture=capture)

    def _named(self, call: Call) -> Call:
        """`call` with the dimensions that are symbols now."""
        names = self.sizes.names(call) if call.names is None else None
        return call if names is None else call._replace(names=dims_above_one(call.tensors, names))

    def _step(self, call: Call, progress: Stages | None = None) -> Step:
        if self._watch.changed(self.changes.attributes):
            self._recent = []
            self._holding.clear()
        given = call
        for call, called in self._forms(given):
            recent = self._recent_step(called, call)
            if recent is not None:
                return recent
            key, index = self._find(called, call)
            if index is not None:
                break
        if index is None and self.sizes.learns:
            self.sizes.meet(given)
            *_, (call, called) = self._forms(given)
            key, index = self._find(called, call)
        step = None
        if index is not None:
            key = self._without_unread(key, index)
            step = self.steps.get((key, index))
        if step is None:
            require_values_of(call.tensors, call.structure)
            described = _description(call, key)
            trainable = (s.layout.fqn for s in self._shards if s.param.requires_grad)
            described[_TRAINED] = "\n".join(trainable)
            progress = progress or Progress()
            with collect_only_new():
                if index is None:
                    key, index = self._trace(call, described, progress)
                step = self._made(key, index, progress)
            self._say(described)
        if key.capture == called.capture:  # as it is not if some of the symbols are fixed
            self._recent = [(called, step), *self._recent[: RECENT - 1]]
        return step

    def _recent_step(self, called: CallKey, call: Call) -> Step | None:
        """The program of a recent call with the key `called`, if it is right for this one."""
        for key, recent in self._recent:  # comparing takes less time than hashing
            if key == called and self._admits(recent.capture, call):
                return recent
        return None

    def _find(self, key: CallKey, call: Call) -> tuple[CallKey, int | None]:
        """The key of a call, and the index of the capture that fits its sizes, if any.

        The key differs from `key` if some of the symbols are fixed for this call.
        """
        for index, captured in enumerate(self._captures.get(key.capture, ())):
            if self._holds(captured) and self._admits(captured, call):
                return key, index
        if call.names is not None and key.capture in self._fixed:
            fewer = call.without(self._fixed[key.capture])
            other, other_index = self._find(self._key(fewer), fewer)
            if other_index is not None:
                return other, other_index
        return key, None

    def _holds(self, captured: Capture) -> bool:
        """Whether the Python state that a capture read is as it was."""
        if id(captured) not in self._holding:
            if not captured.guards.hold():
                return False
            self._holding.add(id(captured))
        return True

    def _admits(self, captured: Capture, call: Call) -> bool:
        """Whether a capture is valid for the sizes of a call, whose values answer its questions."""
        sizes = captured.program.sizes
        if sizes is not None and not sizes.admits(sizes.values(call.tensors)):
            return False
        if self._again is not None and not captured.answers_as(self._again):
            return False
        if not captured.questions:
            return True
        return captured.answered_otherwise(call.tensors, self.bindings.buffer) is None

    def _without_unread(self, key: CallKey, index: int) -> CallKey:
        """`key` without the stale parameters that capture `index` of it does not read."""
        if not any(key.stale) or self.plan.policy.gather_unused:
            return key
        params = self._captures[key.capture][index].program.params
        read = {param.fqn for param in params if param.node.users}
        pairs = zip(self._resident.shards, key.stale, strict=True)
        return key._replace(stale=tuple([stale and s.layout.fqn in read for s, stale in pairs]))

    def _on_device(self, tensor: Tensor) -> Tensor:
        device = self.bindings.group.device
        if tensor.device.type != "meta" and not isinstance(tensor, torch_compat.fake_tensor()):
            return tensor.to(device)
        with torch_compat.fake_tensor_mode()():
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
        return fake.requires_grad_(tensor.requires_grad)

    def _key(self, call: Call) -> CallKey:
        if self._training[0] != self.changes.version:
            root = self._root()
            assert root is not None  # it makes this call
            self._training = (self.changes.version, training_flags(root))
        device = self.bindings.group.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        grad = torch.is_grad_enabled()
        return CallKey(
            CaptureKey(
                self._signature(call),
                self._training[1],
                grad,
                autocast,
                _settings(),
                tuple([shard.param.requires_grad for shard in self._shards]),
                call.entry,
            ),
            self._resident.stale,
            self.bindings.accumulated.mode() if grad else REDUCED,
        )

    def _signature(self, call: Call) -> tuple[Any, ...]:
        method = call.entry.method
        if method not in self._by_identity:
            self._by_identity[method] = CodeWalk.of(self.meta_model, method).compares_identity
        by_identity = self._by_identity[method]
        return signature_of(call.tensors, call.structure, call.names, by_identity=by_identity)

    def _trace(
        self, call: Call, described: dict[str, str], progress: Stages, notes: tuple[str, ...] = ()
    ) -> tuple[CallKey, int]:
        """Capture a call; returns the same as `_find`."""
        if torch_trace.inside_compiled_function():
            raise RuntimeStateError(
                "a sharded module captures programs by itself, which it cannot inside "
                "torch.compile; call it outside, and compile its compute by "
                'graphshard.compile(..., backend="inductor")'
            )
        key = self._key(call)
        captures = self._captures.get(key.capture, [])
        for captured in captures[-1:]:
            described |= self._differences(captured, call)
        refuse_more_programs(captures, described.get(_ANSWERS, ""), described.get(_STATE, ""))
        try:
            captured = self._capture(call, progress, self._again)
            if captured.assigned:
                captured = self._assigning(captured, call, progress)
            captured.program.notes += notes
            self._captures[key.capture] = [*captures, captured]
            self._made(key, len(captures), progress)
        except (CaptureError, PassError, VerifyError) as error:
            self._captures[key.capture] = captures
            if call.names is None:
                raise
            unwanted = self.sizes.fix(error, call, captured=bool(captures))
            if not unwanted:
                raise
            self._fixed.setdefault(key.capture, set()).update(unwanted)
            if self.sizes.learns:
                notes += (f"sizes that stay fixed: {', '.join(sorted(unwanted))}; {error}",)
                self._log(notes[-1], expected=True)
            fewer = call.without(unwanted)
            other, index = self._find(self._key(fewer), fewer)
            if index is not None:
                return other, index
            return self._trace(fewer, described, progress, notes)
        self._watch.add(captured.guards, [place for place, _ in captured.left])
        self.changes.reads |= {each.identity for each in captured.guards.places}
        return key, len(captures)

    def _differences(self, captured: Capture, call: Call) -> dict[str, str]:
        """Why a capture for the same key is not right for a call."""
        described = {_STATE: captured.guards.broken()}
        sizes = captured.program.sizes
        if sizes is not None and not sizes.admits(sizes.values(call.tensors)):
            described[_SIZES] = sizes.broken(sizes.values(call.tensors))
        if other := captured.answered_otherwise(call.tensors, self.bindings.buffer):
            question, answer = other
            described[_ANSWERS] = question.statement(answer)
        if self._again is not None and (guess := captured.guessed_otherwise(self._again)):
            described[_ANSWERS] = guess.statement(not guess.answer)
        return described

    def _assigning(self, captured: Capture, call: Call, progress: Stages) -> Capture:
        """`captured` with what its calls assign and the state that it serves.

        If it reads what it assigns, it is captured once more as the next call would be.
        """
        read = {place.identity for place in captured.guards.places}
        if read.isdisjoint(each.place.identity for each in captured.assigned):
            return captured
        before = [each.place.read() for each in captured.assigned]
        captured.assign()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                after = self._capture(call, progress, captured.again(None, None))
        except CaptureError:  # as the second call will be
            return captured
        finally:
            for each, value in zip(captured.assigned, before, strict=True):
                each.place.write(value)
        return captured.followed_by(after)

    def _capture(self, call: Call, progress: Stages, again: Met | None) -> Capture:
        from graphshard.capture.entry import capture  # with all that a trace needs

        args, kwargs = call.structure.build(call.tensors)
        bindings = self.bindings
        requires_grad = {name: s.param.requires_grad for name, s in bindings.shards.items()}
        state = set_flags(self.meta_model, self._training[1], requires_grad)
        with progress.stage("capture"), state:
            return capture(
                self.meta_model,
                args,
                kwargs,
                device=bindings.group.device,
                grad=torch.is_grad_enabled(),
                names=call.names,
                entry=call.entry,
                precisions=bindings.plan.precisions,
                buffer=bindings.buffer,
                progress=progress,
                again=again,
            )

    @cached_property
    def _every_pass(self) -> tuple[PassLike, ...]:
        """The passes of all programs, made once: a hardware file may change, and ranks agree."""
        from graphshard.pipeline import every_pass

        return every_pass(self.bindings.plan, self.passes)

    def _made(self, key: CallKey, index: int, progress: Stages) -> Step:
        """The program of a capture for the parameters to gather and gradients to reduce now."""
        key = self._without_unread(key, index)
        if (key, index) not in self.steps:
            self.steps[key, index] = self._rewrite(key, index, progress)
        return self.steps[key, index]

    def _rewrite(self, key: CallKey, index: int, progress: Stages) -> Step:
        # All passes and rules are loaded with the first program: many modules load before.
        from graphshard.pipeline import passes_for, run_passes, with_capture_warnings
        from graphshard.runtime.step import Step

        bindings = self.bindings
        captured = self._captures[key.capture][index]
        captured = replace(captured, program=captured.program.copy())
        pairs = zip(self._resident.shards, key.stale, strict=True)
        captured.program.stale = frozenset(s.layout.fqn for s, stale in pairs if stale)
        if self.plan.program is None and key.capture.entry == MAIN_ENTRY:
            plan = with_capture_warnings(bindings.plan, captured.program)
            self.plan = replace(plan, program=captured.program)
        passes = passes_for(self._every_pass, key.mode)
        run_passes(captured.program, bindings.plan, passes, progress=progress)
        step = Step(captured, bindings)
        step.compile(progress)
        return step

    # -- telling the user -----------------------------------------------------------------------

    def _say(self, described: dict[str, str]) -> None:
        """Log the reason of a further capture once; warn if there are more than `MANY`."""
        stale = described.pop(_STALE, None)
        if self._described and described == self._described[-1]:
            # The same call, before or after the parameters changed: nothing to do about it.
            logger.info("graphshard made a program that gathers %s changed parameters", stale)
            return
        self._described.append(described)
        if len(self._described) == 1:
            return
        last = self._described[-2]
        changed = [
            what
            for what in {**last, **described}
            if last.get(what) != described.get(what)
            and described.get(what, what not in (_SIZES, _STATE, _ANSWERS))
        ]
        changes = [_change(what, last.get(what), described.get(what)) for what in changed]
        modes = [(one["mode"], one["gradients"]) for one in self._described]
        expected = _EXPECTED.issuperset(changed) or modes[-1] not in modes[:-1]
        self._log(
            f"graphshard captured program {len(self._described)}, since the call differs from the "
            f"last one: {'; '.join(changes)}",
            expected=expected,
        )
        if len(self._described) == MANY + 1:
            values: dict[str, set[str]] = {}
            for one in self._described:
                for what, value in one.items():
                    values.setdefault(what, set()).add(value)
            varying = sorted(what for what, seen in values.items() if len(seen) > 1)
            warn_user(
                f"more than {MANY} programs were captured for one module, each taking time and "
                f"memory; what keeps changing: {', '.join(varying)}; name sizes that vary in "
                "dynamic=, pad inputs to few sizes, or pass numbers as tensors",
            )

    def _log(self, text: str, *, expected: bool = False) -> None:
        """Warn on rank 0, unless it is `expected`; inform on the others."""
        warns = self.bindings.group.rank == 0 and not expected
        level = logging.WARNING if warns else logging.INFO
        logger.log(level, "%s", text)


def _change(what: str, was: str | None, now: str | None) -> str:
    """The difference between a call and the last one, for the log."""
    if what == _OTHERS:
        return what
    if what in (_SIZES, _STATE, _ANSWERS):
        return f"{what}: {now}"
    if what != _TRAINED:
        return f"{what}: {was} -> {now}"
    before, after = (dict.fromkeys((each or "").splitlines()) for each in (was, now))
    changes = {
        "now trained": [name for name in after if name not in before],
        "now frozen": [name for name in before if name not in after],
    }
    return "; ".join(f"{how}: {some_of(names)}" for how, names in changes.items() if names)


def _settings() -> tuple[Any, ...]:
    """Global settings of torch that decide which operators a forward runs."""
    cuda = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )


def _description(call: Call, key: CallKey) -> dict[str, str]:
    signature, training, grad, autocast, settings, _, entry = key.capture
    accumulates, *accumulated = key.mode
    paths = call.structure.paths
    described = {
        path: f"[{', '.join(map(str, shape))}] {str(t.dtype)[6:]}"
        + (" with grad" if t.requires_grad else "")
        for path, t, (shape, *_) in zip(paths, call.tensors, signature[0], strict=True)
    }
    modes = "train" if all(training) else "partly train" if any(training) else "eval"
    if signature[2]:
        described["inputs that are one tensor"] = " ".join(
            path for place, path in enumerate(paths) if signature[2].count(signature[2][place]) > 1
        )
    described["called"] = str(entry)
    described["mode"] = modes
    described["gradients"] = "on" if grad else "off"
    described["autocast"] = str(autocast)
    described["torch's settings"] = str(settings)
    described["gradients of parameters"] = (
        f"accumulated as {accumulates}s"
        if accumulates
        else "reduced, after those of no_sync() are added"
        if any(accumulated)
        else "reduced"
    )
    if key.stale:
        described[_STALE] = str(sum(key.stale))
    described[_OTHERS] = str(hash(signature[1]))
    return described
