"""What every policy asks for: fields that check themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from torch import Tensor, nn

from graphshard.errors import CostError, PolicyError
from graphshard.hardware.hardware import Hardware
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.recompute import RecomputeChoice, as_field
from graphshard.policy.strategy import Strategy
from graphshard.policy.tree import ModuleTree

OFFLOADS = ("params", "activations")


SCHEDULES = ("fsdp", "overlap")


@dataclass(frozen=True, kw_only=True, repr=False)
class Policy:
    """The fields all policies share.

    A policy of your own derives from this and says in `select` which modules become units.

    Args:
        strategy: a `Strategy`, its name, or another system's name for it ("ZERO3", "DDP").
        reshard_after_forward: what becomes of a unit's gathered parameters after its forward: True,
            they are freed and gathered again for backward; False, they are kept; a number k of
            ranks, each group of k ranks keeps them sharded among itself, so that backward's gather
            stays inside the group. None: as the strategy says. The root's are kept unless
            `reshard_root`.
        backward_prefetch: where a unit's gather in backward is issued: "pre", before the compute of
            the unit that runs before it; "post", after that compute and before its gradients are
            reduced; None, only when the unit itself needs it.
        forward_prefetch: how many units ahead of its use a gather is issued in forward.
        reshard_root: free the root unit after forward and gather it again for backward.
        recompute: what of forward is computed again in backward instead of saved. "units": every
            unit but the root, so that only its inputs are saved; a class, a class name or several:
            every call of a module of them; "selective": all of the units but matrix products,
            convolutions and attention, or of given classes, as in ("selective", Block);
            "budget": the cheapest part by which the step fits in `memory_budget`. None leaves it to
            the model. Regions under `torch.utils.checkpoint` are recomputed either way.
        mixed_precision: dtypes to compute, gather and reduce in. None: the parameters' own.
        offload: "params" keeps shards and reduced gradients in the host's memory, so the optimizer
            works there, on CPU tensors; what is gathered still is on the device, so the largest
            unit's peak stays. Collectives on these tensors by others than the sharded module (as
            torch.nn.utils.clip_grad_norm_ or full_tensor() issue them) need a process group with a
            backend for CPU tensors ("cpu:gloo,cuda:nccl"); `sharded.clip_grad_norm_` does not.
            "activations" keeps there what forward saves for backward, each tensor from the end of
            the step of forward that last uses it to the step of backward before its first use; a
            step is from one unit's start to the next one's, so a model in one unit saves nothing.
            A collection of both is both. None: nothing.
        ignored: parameters and modules that are left alone (not sharded, not moved, gradients not
            reduced): a collection of them, or a regular expression (or several) that must match a
            parameter's or module's whole FQN.
        memory_budget: the most bytes a step may need at once on a rank, besides what the rank holds
            between steps (shards, their gradients, optimizer state, buffers) and its inputs:
            unsharded parameters, activations (saved for backward, recomputed, or at work),
            gradients not reduced yet, and outputs. A program that passes it is a `VerifyError`.
            None: no bound.
        schedule: "fsdp", where the fields above say gathers are issued and units end; or "overlap":
            by estimated times, gathers, waits, frees and reduces stand where the step is shortest,
            within `memory_budget`, or without one within what "fsdp" with the default prefetch
            needs. A program that simulation does not find better so stays as "fsdp" makes it. Times
            depend on sizes: ranks called with inputs of different ones, which "fsdp" allows, would
            issue other collectives, and get a `FingerprintError` instead.
        hardware: what "overlap" is timed on: a preset's name, a hardware file, or a
            `graphshard.Hardware`; the same on every rank. None: "h100-sxm" for a program that runs
            on CUDA, "cpu-gloo" for one on the CPU.
        cuda_graph: capture the kernels of each program's forward, and of its backward, as a CUDA
            graph at its third call, and replay it from then on, without the host's work between
            kernels. Where that cannot be (on the CPU, with offload, symbolic sizes or no_sync()),
            the program runs as it is; plan and dump say why.
        sync_module_states: take rank 0's parameters and buffers on every rank.
        notes: remarks the plan prints, such as settings of another system that do not apply.

    Raises:
        PolicyError: a field has a value outside its range.
    """

    strategy: Strategy | str = Strategy.FULL_SHARD
    reshard_after_forward: bool | int | None = None
    backward_prefetch: str | None = "pre"
    forward_prefetch: int = 0
    reshard_root: bool = False
    mixed_precision: MixedPrecision | None = None
    offload: Collection[str] | str | None = None
    recompute: Collection[type | str] | type | str | None = None
    ignored: Iterable[nn.Module | Tensor | str] | nn.Module | Tensor | str | None = None
    memory_budget: int | None = None
    schedule: str = "fsdp"
    hardware: Hardware | str | os.PathLike[str] | None = None
    cuda_graph: bool = False
    sync_module_states: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "strategy", Strategy(self.strategy))
        except ValueError:
            names = ", ".join(s.value for s in Strategy)
            numbers = (
                "; numbers mean one thing to Accelerate and another to DeepSpeed, so give the name"
                if is_int(self.strategy)
                else ""
            )
            raise PolicyError(
                f"strategy must be one of {names}; got {self.strategy!r}{numbers}"
            ) from None
        self._check_reshard()
        self._check_groups()
        self._check_notes()
        if self.backward_prefetch not in ("pre", "post", None):
            raise PolicyError(
                f'backward_prefetch must be "pre", "post" or None; got {self.backward_prefetch!r}'
            )
        if not is_int(self.forward_prefetch) or self.forward_prefetch < 0:
            raise PolicyError(
                f"forward_prefetch must be an int, 0 or more; got {self.forward_prefetch!r}"
            )
        choice = RecomputeChoice.of(self.recompute)
        object.__setattr__(self, "recompute", as_field(self.recompute))
        if self.memory_budget is not None and (
            not is_int(self.memory_budget) or self.memory_budget <= 0
        ):
            raise PolicyError(
                f"memory_budget must be a positive int of bytes or None; got {self.memory_budget!r}"
            )
        if choice.budget and self.memory_budget is None:
            raise PolicyError('recompute="budget" needs memory_budget, the bytes to fit in')
        if choice.budget and self.offloads("activations"):
            raise PolicyError(
                'recompute="budget" weighs what is saved on the device, where '
                'offload="activations" leaves little; give one, or recompute="selective" with it'
            )
        self._check_schedule()
        for name in ("reshard_root", "cuda_graph", "sync_module_states"):
            if not isinstance(getattr(self, name), bool):
                raise PolicyError(f"{name} must be True or False; got {getattr(self, name)!r}")

    def _check_reshard(self) -> None:
        reshard, strategy = self.reshard_after_forward, Strategy(self.strategy)
        if reshard is not None and not isinstance(reshard, int):
            raise PolicyError(
                "reshard_after_forward must be True, False, a number of ranks or None; "
                f"got {reshard!r}"
            )
        if is_int(reshard) and reshard < 1:  # type: ignore[operator]
            raise PolicyError(f"reshard_after_forward must be 1 rank or more; got {reshard!r}")
        if reshard and not strategy.frees_after_forward:
            raise PolicyError(
                f"strategy {strategy.value} keeps parameters after forward, and "
                f"reshard_after_forward={reshard!r} does not; leave one of them out"
            )

    def _check_schedule(self) -> None:
        if self.schedule not in SCHEDULES:
            raise PolicyError(
                f"schedule must be one of {', '.join(SCHEDULES)}; got {self.schedule!r}"
            )
        if self.schedule == "overlap":
            given = [
                f"{name}={getattr(self, name)!r}"
                for name, default in (("backward_prefetch", "pre"), ("forward_prefetch", 0))
                if getattr(self, name) != default
            ]
            if given:
                raise PolicyError(
                    f'schedule="overlap" places gathers by their cost, so {" and ".join(given)} '
                    "would have no effect; leave that out (memory_budget= bounds what is gathered "
                    'ahead), or schedule="fsdp"'
                )
        elif self.hardware is not None:
            raise PolicyError(
                f'hardware={text_of(self.hardware)} is what schedule="overlap" is timed on; with '
                f"schedule={self.schedule!r} it has no effect, so leave it out"
            )
        if self.hardware is not None:
            try:
                Hardware.load(self.hardware)
            except (CostError, TypeError) as error:
                raise PolicyError(f"hardware: {error}") from error

    def _check_notes(self) -> None:
        notes: Any = self.notes
        if isinstance(notes, str) or not all(isinstance(note, str) for note in notes):
            raise PolicyError(f"notes must be a tuple of strings; got {notes!r}")
        object.__setattr__(self, "notes", tuple(notes))

    def _check_groups(self) -> None:
        if not isinstance(self.mixed_precision, MixedPrecision | None):
            raise PolicyError(
                "mixed_precision must be a graphshard.MixedPrecision or None; "
                f"got {self.mixed_precision!r}"
            )
        offload = self.offload
        if offload is not None:
            wanted = (offload,) if isinstance(offload, str) else tuple(offload)
            if not all(what in OFFLOADS for what in wanted):
                raise PolicyError(
                    f"offload must be one of {', '.join(OFFLOADS)}, or several of them; "
                    f"got {offload!r}"
                )
            object.__setattr__(self, "offload", frozenset(wanted) or None)
        ignored = self.ignored
        if ignored is not None:
            single = isinstance(ignored, str | nn.Module | Tensor)
            entries: tuple[Any, ...] = (ignored,) if single else tuple(ignored)  # type: ignore
            for entry in entries:
                if not isinstance(entry, str | nn.Module | Tensor):
                    raise PolicyError(
                        "ignored must hold modules, parameters or regular expressions on their "
                        f"FQNs; got {entry!r}"
                    )
            object.__setattr__(self, "ignored", entries or None)

    def offloads(self, what: str) -> bool:
        """Whether "params" or "activations" are kept on the host."""
        return self.offload is not None and what in self.offload

    def overrides(self, tree: ModuleTree) -> Mapping[str, Mapping[str, Any]]:
        """Fields of the policy that are other for some units: by FQN, then by field.

        `strategy`, `reshard_after_forward` and `mixed_precision` may be, and `placement`: a dim or
        "replicate" for all parameters of the unit that can be placed so, or a mapping from their
        FQNs to a `graphshard.placement.RequestedPlacement`.
        """
        return {}

    def select(self, tree: ModuleTree) -> list[str]:
        """FQNs of the modules that become units besides the root, which always is one.

        Raises:
            PolicyError: the policy asks for what the model does not have.
        """
        raise PolicyError(
            f"{type(self).__name__} does not say which modules become units; use SizePolicy, "
            "BlockPolicy or LambdaPolicy, or define select(self, tree) in a subclass"
        )

    def own_options(self) -> dict[str, str]:
        """The fields that only this kind of policy has, as stable text."""
        return {
            f.name: text_of(getattr(self, f.name)) for f in fields(self) if f.name not in _SHARED
        }

    def shared_options(self) -> dict[str, str]:
        """The fields every policy has, as stable text."""
        return {name: text_of(getattr(self, name)) for name in _SHARED}

    def chosen_options(self) -> dict[str, str]:
        """The shared fields that are not as they are by default, as stable text."""
        defaults = {f.name: f.default for f in fields(Policy)}
        return {
            name: text_of(v)
            for name in _SHARED
            if name != "notes" and (v := getattr(self, name)) != defaults[name]
        }

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain data, ready for JSON: its kind, and every field."""
        values = {f.name: plain_of(getattr(self, f.name)) for f in fields(self)}
        return {"kind": type(self).__name__, **values}

    def __repr__(self) -> str:
        """The policy as code (see `graphshard.policy_code`)."""
        from graphshard.policy.code import policy_code

        return policy_code(self)


def _entries(value: Mapping[Any, Any]) -> str:
    return ", ".join(f"{text_of(k)}: {text_of(v)}" for k, v in value.items())


def _pairs(options: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


_SHARED = tuple(f.name for f in fields(Policy))


def is_int(value: object) -> bool:
    """Whether `value` is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_set(name: str, value: Any) -> frozenset[Any]:
    """`value`, given for the field `name`, as a set."""
    try:
        return frozenset(value)
    except TypeError:
        raise PolicyError(f"{name} must be a set of classes; got {value!r}") from None


def text_of(value: Any) -> str:
    """Text that is the same in every process: no addresses, no hash order."""
    for kinds, text in _TEXTS:
        if isinstance(value, kinds):
            return text(value)
    if is_int(value):
        return f"{value:_}"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return repr(value)


_TEXTS: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    (frozenset, lambda value: "{" + ", ".join(sorted(map(text_of, value))) + "}"),
    (Mapping, lambda value: f"{{{_entries(value)}}}"),
    (tuple, lambda value: "[" + ", ".join(map(text_of, value)) + "]"),
    (Policy, lambda value: f"{type(value).__name__}({_pairs(value.own_options())})"),
    (MixedPrecision, str),
    (Hardware, lambda value: value.name),
    (os.PathLike, lambda value: repr(str(value))),
    (Enum, lambda value: str(value.value)),
    (type, lambda value: value.__name__),
    (Tensor, lambda value: f"Tensor{list(value.shape)}"),
    (nn.Module, lambda value: type(value).__name__),
)


def plain_of(value: Any) -> Any:
    """`value` as plain data, ready for JSON."""
    if isinstance(value, frozenset):
        return sorted(c if isinstance(c, str) else text_of(c) for c in value)
    if isinstance(value, tuple):
        return [plain_of(entry) for entry in value]
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else text_of(k): plain_of(v) for k, v in value.items()}
    if isinstance(value, Policy):
        own = {f.name: plain_of(getattr(value, f.name)) for f in fields(value)}
        return {"kind": type(value).__name__, **{k: v for k, v in own.items() if k not in _SHARED}}
    if value is None or type(value) in (bool, int, str):
        return value
    return text_of(value)
