"""The programs of a module: one for each signature of its calls, captured at the first of them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.capture.dynamic import (
    Dynamic,
    Names,
    dims_above_one,
    drop_names,
    enlarge_small_dims,
)
from graphshard.capture.entry import Capture, capture, signature_of_parts
from graphshard.capture.structure import CALL, Structure, take_apart
from graphshard.capture.traced_module import MAIN_ENTRY, EntryPoint
from graphshard.errors import FixedSizeError
from graphshard.format import some_of
from graphshard.module.meta_model import set_flags
from graphshard.module.sharded_tree import Modes, training_flags
from graphshard.pipeline import run_passes, with_capture_warnings
from graphshard.program.pass_protocol import PassLike
from graphshard.progress import Progress, Stages
from graphshard.runtime.accumulated import REDUCED, Mode, passes_for
from graphshard.runtime.lowered import Bindings
from graphshard.runtime.resident import ResidentShard
from graphshard.runtime.shards import distinct
from graphshard.runtime.step import Step
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.gc_pause import collect_only_new

_TENSORS = (Tensor, nn.Parameter)


_PLAIN = frozenset({type(None), bool, int, float, str})


class FlatCalls:
    """A cache of the structures of calls without nested arguments."""

    def __init__(self) -> None:
        self._by_form: dict[tuple[Any, ...], Structure] = {}

    def take_apart(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], Structure]:
        """Flatten a call as `graphshard.capture.structure.take_apart` does, faster for known forms.

        Raises:
            CaptureError: an argument cannot be taken apart.
        """
        tensors: list[Tensor] = []
        form: list[Any] = [len(args), *kwargs]
        for value in (*args, *kwargs.values()):
            kind = type(value)
            if kind in _TENSORS:
                form.append(Tensor)
                tensors.append(value)
            elif kind in _PLAIN:
                form += (kind, value)  # with the type: True is not 1
            else:
                return take_apart((args, kwargs), name=CALL)
        structure = self._by_form.get(tuple(form))
        if structure is None:
            tensors, structure = take_apart((args, kwargs), name=CALL)
            self._by_form[tuple(form)] = structure
        return tensors, structure


logger = logging.getLogger("graphshard")


MANY = 8


RECENT = 4
"""The number of recent signatures that a call is compared with first."""


_OTHERS = "arguments that are no tensors"


_SIZES = "sizes"


_STALE = "parameters changed since they were gathered"


_TRAINED = "trainable parameters"


class Programs:
    """Captures, rewrites and keeps a program for each signature.

    Args:
        meta_model: the model, whose forward is traced.
        root: the sharded module, whose flags count.
        modes: tells when a `training` flag below `root` may have changed.
        bindings: what programs run on.
        passes: applied to each captured program, in order.
        dynamic: the sizes that are symbols. One signature then has a further program for calls
            whose sizes the first ones were not right for.
    """

    def __init__(
        self,
        meta_model: nn.Module,
        root: nn.Module,
        modes: Modes,
        bindings: Bindings,
        passes: Sequence[PassLike],
        dynamic: Dynamic | None = None,
    ) -> None:
        self.meta_model = meta_model
        self.root = root
        self.modes = modes
        self.bindings = bindings
        self.passes = tuple(passes)
        self.dynamic = dynamic
        self.plan = bindings.plan
        self.steps: dict[Any, Step] = {}
        self._recent: list[tuple[Any, Step]] = []  # by signature, of fixed sizes, the latest first
        self._calls = FlatCalls()
        self._captures: dict[Any, list[Capture]] = {}  # several for symbolic sizes that differ
        self._fixed: dict[Any, set[str]] = {}  # names of sizes that were fixed for some calls
        self._entry = MAIN_ENTRY  # of the call at hand
        self._described: list[dict[str, str]] = []
        self._training: tuple[int, tuple[bool, ...]] = (-1, ())
        self._shards = distinct(bindings.shards)
        self._resident = [s for s in self._shards if isinstance(s, ResidentShard)]

    def step_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], entry: EntryPoint = MAIN_ENTRY
    ) -> tuple[Step, list[Tensor]]:
        """The program for a call of `entry`, captured if new, and the call's tensors.

        Raises:
            CaptureError: the call cannot be captured.
            PolicyError: the call's tensors are not what `dynamic` says.
            PassError, VerifyError: its program cannot be rewritten.
        """
        tensors, structure = self._calls.take_apart(args, kwargs)
        device = self.bindings.group.device
        if device.type != "cpu":  # as on cpu, an input that lies elsewhere would be an error
            tensors = [t.to(device, non_blocking=True) for t in tensors]
        names = None
        if self.dynamic is not None and entry == MAIN_ENTRY:
            names = dims_above_one(tensors, self.dynamic.names(tensors, structure))
        self._entry = entry
        try:
            return self._step(tensors, structure, names), tensors
        finally:
            self._entry = MAIN_ENTRY

    def capture_example(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], progress: Stages | None = None
    ) -> Step:
        """The program for calls like this one, whose tensors may be real, meta or fake."""
        tensors, structure = take_apart((args, kwargs), name=CALL)
        tensors = [self._real(t) for t in tensors]
        names = None
        if self.dynamic is not None:
            names = self.dynamic.names(tensors, structure)
            tensors = enlarge_small_dims(tensors, names)
        return self._step(tensors, structure, names, progress)

    def _step(
        self,
        tensors: Sequence[Tensor],
        structure: Structure,
        names: Sequence[Names] | None,
        progress: Stages | None = None,
    ) -> Step:
        key = self._key(tensors, structure, names)
        if names is None:
            for signature, recent in self._recent:  # comparing takes less time than hashing
                if signature == key:
                    return recent
        key, index = self._find(key, tensors, structure, names)
        step = self.steps.get((key, index))
        if step is None:
            described = _description(tensors, structure, key)
            trainable = (s.layout.fqn for s in self._shards if s.param.requires_grad)
            described[_TRAINED] = "\n".join(trainable)
            with collect_only_new():
                if index is None:
                    key, index = self._trace(tensors, structure, names, described, progress)
                step = self._rewrite(key, index, progress)
            self._say(described)
        if names is None:
            self._recent = [(key, step), *self._recent[: RECENT - 1]]
        return step

    def _find(
        self,
        key: tuple[Any, ...],
        tensors: Sequence[Tensor],
        structure: Structure,
        names: Sequence[Names] | None,
    ) -> tuple[tuple[Any, ...], int | None]:
        """The signature of a call, and the index of the capture that fits its sizes, if any.

        The signature differs from `key` if some of the sizes in `names` are fixed for this call.
        """
        for index, captured in enumerate(self._captures.get(key[:-1], ())):
            sizes = captured.program.sizes
            if sizes is None or sizes.admits(sizes.values(tensors)):
                return key, index
        if names is not None and key[:-1] in self._fixed:
            fewer = drop_names(names, self._fixed[key[:-1]])
            other = self._key(tensors, structure, fewer)
            other, other_index = self._find(other, tensors, structure, fewer)
            if other_index is not None:
                return other, other_index
        return key, None

    def _real(self, tensor: Tensor) -> Tensor:
        device = self.bindings.group.device
        if tensor.device.type != "meta" and not isinstance(tensor, torch_compat.fake_tensor()):
            return tensor.to(device)
        empty = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )
        return empty.requires_grad_(tensor.requires_grad)

    def _key(
        self, tensors: Sequence[Tensor], structure: Structure, names: Sequence[Names] | None
    ) -> tuple[Any, ...]:
        if self._training[0] != self.modes.version:
            self._training = (self.modes.version, training_flags(self.root))
        device = self.bindings.group.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return (
            signature_of_parts(tensors, structure, names),
            self._training[1],
            torch.is_grad_enabled(),
            autocast,
            _settings(),
            tuple([shard.param.requires_grad for shard in self._shards]),
            self._entry,
            # The last entry tells apart programs of one capture.
            (
                tuple([shard.stale for shard in self._resident]),
                self.bindings.accumulated.mode() if torch.is_grad_enabled() else REDUCED,
            ),
        )

    def _trace(
        self,
        tensors: Sequence[Tensor],
        structure: Structure,
        names: Sequence[Names] | None,
        described: dict[str, str],
        progress: Stages | None,
    ) -> tuple[tuple[Any, ...], int]:
        """Capture a call; returns the same as `_find`."""
        key = self._key(tensors, structure, names)
        captures = self._captures.get(key[:-1], [])
        for captured in captures[-1:]:
            sizes = captured.program.sizes
            if sizes is not None:
                described[_SIZES] = sizes.broken(sizes.values(tensors))
        args, kwargs = structure.build(tensors)
        try:
            captured = self._capture(args, kwargs, names, progress or Progress())
        except FixedSizeError as error:
            if names is None or not captures:
                raise
            # The model takes any size in general, but handles this one in another way.
            self._fixed.setdefault(key[:-1], set()).add(error.size)
            fewer = drop_names(names, {error.size})
            return self._trace(tensors, structure, fewer, described, progress)
        self._captures[key[:-1]] = [*captures, captured]
        return key, len(captures)

    def _capture(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: Sequence[Names] | None,
        progress: Stages,
    ) -> Capture:
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
                names=names,
                entry=self._entry,
                precisions=bindings.plan.precisions,
            )

    def _rewrite(self, key: tuple[Any, ...], index: int, progress: Stages | None) -> Step:
        """Rewrite a copy of a capture for the parameters to gather and gradients to reduce now."""
        bindings = self.bindings
        are_stale: tuple[bool, ...]
        mode: Mode
        are_stale, mode = key[-1]
        captured = self._captures[key[:-1]][index]
        captured = replace(captured, program=captured.program.copy())
        stale = [
            shard for shard, is_stale in zip(self._resident, are_stale, strict=True) if is_stale
        ]
        captured.program.stale = frozenset(shard.layout.fqn for shard in stale)
        if self.plan.program is None and self._entry == MAIN_ENTRY:
            plan = with_capture_warnings(bindings.plan, captured.program)
            self.plan = replace(plan, program=captured.program)
        passes = passes_for(self.passes, mode)
        run_passes(captured.program, bindings.plan, passes, progress=progress or Progress())
        step = Step(captured, captured.program, bindings)
        step.compile(progress)
        self.steps[key, index] = step
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
        changes = [
            _change(what, last.get(what), described.get(what))
            for what in {**last, **described}
            if last.get(what) != described.get(what) and described.get(what, what != _SIZES)
        ]
        say = logger.warning if self.bindings.group.rank == 0 else logger.info
        say(
            "graphshard captured program %d, since the call differs from the last one: %s",
            len(self._described),
            "; ".join(changes),
        )
        if len(self._described) == MANY + 1:
            values: dict[str, set[str]] = {}
            for one in self._described:
                for what, value in one.items():
                    values.setdefault(what, set()).add(value)
            varying = sorted(what for what, seen in values.items() if len(seen) > 1)
            warnings.warn(
                f"more than {MANY} programs were captured for one module, each taking time and "
                f"memory; what keeps changing: {', '.join(varying)}; name "
                "sizes that vary in dynamic=, pad inputs to few sizes, or pass numbers as tensors",
                stacklevel=5,
            )


def _change(what: str, was: str | None, now: str | None) -> str:
    """The difference between a call and the last one, for the log."""
    if what == _OTHERS:
        return what
    if what == _SIZES:
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
    )


def _description(
    tensors: Sequence[Tensor], structure: Structure, key: tuple[Any, ...]
) -> dict[str, str]:
    signature, training, grad, autocast, settings, _, entry, (stale, mode) = key
    accumulates, *accumulated = mode
    paths = structure.paths
    described = {
        path: f"[{', '.join(map(str, shape))}] {str(t.dtype)[6:]}"
        + (" with grad" if t.requires_grad else "")
        for path, t, (shape, *_) in zip(paths, tensors, signature[0], strict=True)
    }
    modes = "train" if all(training) else "partly train" if any(training) else "eval"
    described["called"] = str(entry)
    described["mode"] = modes
    described["gradients"] = "on" if grad else "off"
    described["autocast"] = str(autocast)
    described["torch's settings"] = str(settings)
    described["gradients of parameters"] = (
        f"accumulated as {accumulates}s"
        if accumulates
        else "reduced with accumulated ones"
        if any(accumulated)
        else "reduced"
    )
    if stale:
        described[_STALE] = str(sum(stale))
    described[_OTHERS] = str(hash(signature[1]))
    return described
