"""`Policy`: the fields that all policies share, checked when a policy is made."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.errors import CostError, PolicyError
from graphshard.format import bytes_in
from graphshard.hardware.hardware import Hardware, preset_names
from graphshard.policy.fields import FLAG, Check, check_fields, is_int, said
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.recompute import RecomputeChoice, as_field
from graphshard.policy.strategy import Strategy
from graphshard.policy.tree import ModuleTree

OFFLOADS = ("params", "activations")


SCHEDULES = ("fsdp", "overlap")


ON_NON_FINITE = ("error", "warn")


_CHECKS: dict[str, Check] = {
    "reshard_after_forward": (
        lambda value: value is None or isinstance(value, bool) or (is_int(value) and value >= 1),
        "True, False, a number of ranks (1 or more) or None",
    ),
    "backward_prefetch": (
        lambda value: value in ("pre", "post", None),
        '"pre", "post" or None',
    ),
    "forward_prefetch": (
        lambda value: value is None or (is_int(value) and value >= 0),
        "an int, 0 or more, or None",
    ),
    "mixed_precision": (
        lambda value: isinstance(value, MixedPrecision | None),
        "a graphshard.MixedPrecision, as MixedPrecision(param_dtype=torch.bfloat16), or None",
    ),
    "merge_below": (
        lambda value: value is None or (is_int(value) and value >= 0),
        "a number of bytes, 0 or more, or None",
    ),
    "memory_budget": (
        lambda value: value is None or (is_int(value) and value > 0),
        'a positive int of bytes, a text such as "20GiB", or None',
    ),
    "schedule": (lambda value: value in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
    "notes": (
        lambda value: not isinstance(value, str) and all(isinstance(note, str) for note in value),
        "a tuple of strings",
    ),
    "check_finite": (
        lambda value: value is None or value in ON_NON_FINITE,
        f"{' or '.join(map(repr, ON_NON_FINITE))}, or None",
    ),
    "reshard_root": FLAG,
    "gather_unused": FLAG,
    "cuda_graph": FLAG,
    "sync_module_states": FLAG,
}


_PREFETCH = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post"}
"""By the names of torch's BackwardPrefetch, which may be given too."""


MERGE_BELOW = {"nccl": 1 << 20, "gloo": 1 << 19}
"""By backend, bytes of one rank up to which neighbouring units share a collective by default.

A link of a ring moves them in about the time that one hop takes to begin.
"""


def runs_beside_compute(process_group_backend: str, hosts: int) -> bool:
    """Whether a collective moves bytes while its rank computes.

    Over Gloo between ranks of one host it copies memory, which takes the cores that compute.
    """
    return process_group_backend not in ("gloo", "none") or hosts > 1


@dataclass(frozen=True, kw_only=True, repr=False)
class Policy:
    """The fields that all policies share.

    Derive your own policy from this class and define `select`, which names the units' modules.

    Args:
        strategy: a `Strategy`, its name, or another system's name for it ("ZERO3", "DDP").
        reshard_after_forward: the state of a unit's gathered parameters between forward and
            backward. True: freed and gathered again. False: kept unsharded. A number k of ranks:
            each group of k ranks keeps them sharded among itself, so that backward's gather stays
            inside the group. None: the strategy decides, but the unit with which backward begins
            stays unsharded (those of its first message, where units are merged), since it would be
            gathered again as soon as forward ends; not with another `backward_prefetch`, with
            `recompute` or within a `memory_budget`. The root's parameters are kept unless
            `reshard_root`.
        backward_prefetch: the place of a unit's gather in backward. "pre": before the compute of
            the unit that runs before it. "post": after that compute, before its gradients are
            reduced. None: when the unit itself needs it. torch's BackwardPrefetch is taken as well.
        forward_prefetch: how many units ahead of its use a gather is issued in forward. None: 1,
            so that compute hides it as in FSDP; but 0 where nothing could run beside it: over Gloo
            and on a single rank.
        reshard_root: free the root unit after forward and gather it again for backward.
        merge_below: units that run one after the other are gathered together, and their gradients
            reduced together, while each rank stores at most so many bytes of them: a collective of
            few bytes takes the latency of its hops. They are also freed together, so each gather
            and reduce holds up to `merge_below` times the number of ranks. Where collectives run
            beside compute, the first gather and the last reduce of a step go in parts of no fewer
            bytes. 0: neither is done. None: 1 MiB, or 512 KiB over Gloo, but 0 with a
            `memory_budget`.
        gather_unused: gather every unit in every program, in the order of the plan, and reduce
            zeros as gradients of parameters that a program does not use, so that ranks may use
            different units: one has images and another none. Each rank must run the units that it
            does use in that order. What no rank uses then has gradients of zeros, not None. Units
            are gathered whole, and the root's parameters together. Not with "overlap",
            `cuda_graph` or `check_finite`.
        recompute: the activations that backward computes again instead of saving. "units": those
            of every unit but the root, so that only units' inputs are saved. A class, a class name
            or several: those of every call of such a module. "selective": those of the units except
            the results of matrix products, convolutions and attention; or those of given classes,
            as in ("selective", Block). "budget": the cheapest choice with which the step fits in
            `memory_budget`. None: the model decides. Regions under `torch.utils.checkpoint` are
            always recomputed.
        mixed_precision: dtypes to compute, gather and reduce in. None: the parameters' own.
        offload: "params" keeps shards and reduced gradients in host memory, so the optimizer works
            on CPU tensors; gathered parameters stay on the device, and so does the largest unit's
            peak. Collectives on these tensors that the sharded module does not issue itself (such
            as those of torch.nn.utils.clip_grad_norm_ or full_tensor()) need a process group with
            a backend for CPU tensors ("cpu:gloo,cuda:nccl"); `sharded.clip_grad_norm_` does not.
            "activations" keeps the tensors saved for backward in host memory, each from the end of
            the last stretch of forward that uses it to the stretch of backward before its first
            use. A stretch reaches from one unit's start to the next one's, so a model in one unit
            offloads nothing. A collection of both offloads both. None: nothing.
        ignored: parameters and modules that are left alone (not sharded, not moved, gradients not
            reduced): a collection of them, or a regular expression (or several) that must match a
            parameter's or module's whole FQN.
        memory_budget: the most bytes, or a text such as "20GiB", that a step may need at once on a
            rank for unsharded parameters, activations (saved, recomputed or temporary), unreduced
            gradients and outputs. Memory held between steps (shards, their gradients, optimizer
            state, buffers) and the inputs do not count. A program that needs more raises
            `BudgetError`. None: no bound.
        schedule: "fsdp" issues gathers where the prefetch fields say and frees where units end.
            "overlap" places gathers, waits, frees and reduces where estimated times make the step
            shortest, within `memory_budget`, or if there is none within the memory that "fsdp"
            with the default prefetch needs. A program that does not get faster by 1 % in simulation
            keeps its "fsdp" order. Times depend on sizes, so ranks with inputs of different sizes,
            which "fsdp" allows, would issue different collectives and raise `FingerprintError`.
        hardware: the hardware that "overlap" estimates times for: a preset's name, a hardware file,
            or a `graphshard.Hardware`; the same on every rank. None: where ranks run, the preset
            most like their device on the links between them, which `compile` measures; without
            ranks "h100-sxm" for a program that runs on CUDA, "cpu-gloo" for one on the CPU.
        cuda_graph: capture the kernels of each program's forward, and of its backward, as a CUDA
            graph at its third call, and replay it from then on, without host work between kernels.
            Where this is impossible (on the CPU, with offload, symbolic sizes or no_sync()), the
            program runs uncaptured, and plan and dump say why. Ranks need inputs of equal shapes.
        check_finite: look for NaN and infinity in what units return and in gradients, before and
            after their reduce, and tell the first place at the end of the step: unit, phase, rank,
            operator and line. "error" raises `NonFiniteError` on every rank, "warn" warns. A
            forward without gradients reports at its own end. Checked steps are not captured as
            CUDA graphs, and keep their inputs until backward ends. None: no checks.
        sync_module_states: take rank 0's parameters and buffers on every rank; ignored parameters
            stay each rank's own. Without it `compile` refuses a model whose weights differ between
            ranks that hold copies of a parameter.
        notes: remarks the plan prints, such as settings of another system that do not apply.

    Raises:
        PolicyError: a field has an invalid value, or fields contradict each other.
    """

    strategy: Strategy | str = Strategy.FULL_SHARD
    reshard_after_forward: bool | int | None = None
    backward_prefetch: str | None = "pre"
    forward_prefetch: int | None = None
    reshard_root: bool = False
    merge_below: int | None = None
    gather_unused: bool = False
    mixed_precision: MixedPrecision | None = None
    offload: Collection[str] | str | None = None
    recompute: Collection[type | str] | type | str | None = None
    ignored: Iterable[nn.Module | Tensor | str] | nn.Module | Tensor | str | None = None
    memory_budget: int | None = None
    schedule: str = "fsdp"
    hardware: Hardware | str | os.PathLike[str] | None = None
    cuda_graph: bool = False
    check_finite: str | None = None
    sync_module_states: bool = False
    notes: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Add the fields that all policies share to the docstring of the policy `cls`."""
        super().__init_subclass__(**kwargs)
        own, shared = (inspect.cleandoc(kind.__doc__ or "") for kind in (cls, Policy))
        arguments = shared.partition("\nArgs:")[2].partition("\n\nRaises:")[0]
        before, raises, after = own.partition("\n\nRaises:")
        if "\nArgs:" in before and arguments:
            cls.__doc__ = f"{before}{arguments}{raises}{after}"

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
        if isinstance(self.memory_budget, str):
            try:
                object.__setattr__(self, "memory_budget", bytes_in(self.memory_budget))
            except ValueError as error:
                raise PolicyError(f"memory_budget: {error}") from None
        name = getattr(self.backward_prefetch, "name", "")
        object.__setattr__(self, "backward_prefetch", _PREFETCH.get(name, self.backward_prefetch))
        check_fields(self, _CHECKS)
        object.__setattr__(self, "notes", tuple(self.notes))
        object.__setattr__(self, "offload", _offload_set(self.offload))
        object.__setattr__(self, "ignored", _ignored_entries(self.ignored))
        choice = RecomputeChoice.of(self.recompute)
        object.__setattr__(self, "recompute", as_field(self.recompute))
        self._check_reshard()
        if choice.budget and self.memory_budget is None:
            raise PolicyError('recompute="budget" needs memory_budget, the bytes to fit in')
        if choice.budget and self.offloads("activations"):
            raise PolicyError(
                'recompute="budget" weighs what is saved on the device, where '
                'offload="activations" leaves little; give one, or recompute="selective" with it'
            )
        self._check_schedule()

    def _check_reshard(self) -> None:
        reshard, strategy = self.reshard_after_forward, Strategy(self.strategy)
        if reshard and not strategy.frees_after_forward:
            raise PolicyError(
                f"strategy {strategy.value} keeps parameters after forward, and "
                f"reshard_after_forward={reshard!r} does not; leave one of them out"
            )

    def _check_schedule(self) -> None:
        if self.gather_unused and (
            self.schedule == "overlap" or self.cuda_graph or self.check_finite
        ):
            raise PolicyError(
                "with gather_unused ranks may run different programs at once, and "
                'schedule="overlap", cuda_graph and check_finite need one on all: leave that out'
            )
        if self.schedule == "overlap":
            prefetch = [
                f"{name}={getattr(self, name)!r}"
                for name, default in (("backward_prefetch", "pre"), ("forward_prefetch", None))
                if getattr(self, name) != default
            ]
            if prefetch:
                raise PolicyError(
                    f'schedule="overlap" places gathers by their cost, so {" and ".join(prefetch)} '
                    "would have no effect; leave that out (memory_budget= bounds how much is "
                    'gathered ahead), or use schedule="fsdp"'
                )
        elif self.hardware is not None:
            raise PolicyError(
                f'hardware={text_of(self.hardware)} gives the times for schedule="overlap"; with '
                f"schedule={self.schedule!r} it has no effect, so leave it out"
            )
        if self.hardware is not None:
            try:
                Hardware.load(self.hardware)
            except (CostError, TypeError) as error:
                raise PolicyError(f"hardware: {error}") from error

    def __repr__(self) -> str:
        return policy_code(self)

    def forward_units_ahead(self, process_group_backend: str, hosts: int = 1) -> int:
        """`forward_prefetch`, or its default for ranks on `hosts` that this backend connects."""
        if self.forward_prefetch is not None:
            return self.forward_prefetch
        return 1 if runs_beside_compute(process_group_backend, hosts) else 0

    def bytes_merged(self, process_group_backend: str) -> int:
        """`merge_below`, or its default for ranks that this backend connects."""
        if self.merge_below is not None:
            return self.merge_below
        return MERGE_BELOW.get(process_group_backend, 0) if self.memory_budget is None else 0

    def offloads(self, what: str) -> bool:
        """Whether "params" or "activations" are kept on the host."""
        return self.offload is not None and what in self.offload

    def overrides(self, tree: ModuleTree) -> Mapping[str, Mapping[str, Any]]:
        """Fields that differ for some units: by the unit's FQN, then by field.

        The fields may be `strategy`, `reshard_after_forward`, `mixed_precision` and `placement`. A
        `placement` is a dim or "replicate" for all parameters of the unit that have the dim, or
        a mapping from their FQNs to a `graphshard.policy.placement.RequestedPlacement`.
        """
        return {}

    def select(self, tree: ModuleTree) -> list[str]:
        """FQNs of the modules that become units; the root, "", always is one as well.

        Raises:
            PolicyError: the policy names modules that the model does not have.
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
        """The shared fields (but `notes`) that differ from their defaults, as stable text."""
        defaults = {f.name: f.default for f in fields(Policy)}
        return {
            name: text_of(v)
            for name in _SHARED
            if name != "notes" and (v := getattr(self, name)) != defaults[name]
        }

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain data, ready for JSON: its class name as "kind", and every field."""
        values = {f.name: plain_of(getattr(self, f.name)) for f in fields(self)}
        return {"kind": type(self).__name__, **values}


def _entries(value: Mapping[Any, Any]) -> str:
    return ", ".join(f"{text_of(k)}: {text_of(v)}" for k, v in value.items())


def _pairs(options: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


_SHARED = tuple(f.name for f in fields(Policy))


def _offload_set(offload: Collection[str] | str | None) -> frozenset[str] | None:
    if offload is None:
        return None
    kinds: Any = offload
    if isinstance(kinds, str) or not isinstance(kinds, Collection):
        kinds = (kinds,)
    if not all(kind in OFFLOADS for kind in kinds):
        raise PolicyError(
            f"offload must be one of {', '.join(OFFLOADS)}, or several of them, or None; got "
            f"{said(offload)}; torch's CPUOffloadPolicy() and CPUOffload(True) are 'params'"
        )
    return frozenset(kinds) or None


def _ignored_entries(ignored: Any) -> tuple[nn.Module | Tensor | str, ...] | None:
    if ignored is None:
        return None
    entries = (ignored,) if isinstance(ignored, str | nn.Module | Tensor) else tuple(ignored)
    for entry in entries:
        if not isinstance(entry, str | nn.Module | Tensor):
            raise PolicyError(
                "ignored must hold modules, parameters or regular expressions on their FQNs; "
                f"got {entry!r}"
            )
    return entries or None


def require_units_only(policy: Policy, field: str, owner: str) -> None:
    """Check that `policy`, the field `field` of an `owner`, chooses units and sets nothing else."""
    options = [*policy.chosen_options(), *(["notes"] if policy.notes else [])]
    if options:
        raise PolicyError(
            f"{field} chooses units and nothing else, but it sets {', '.join(options)}; give that "
            f"to the {owner} itself"
        )


def as_set(name: str, value: Any) -> frozenset[Any]:
    """Return `value`, given for the field `name`, as a set."""
    try:
        return frozenset(value)
    except TypeError:
        got = repr(value)
        if isinstance(value, nn.Module):
            kind = type(value).__name__
            got = f"a module, an instance of {kind}; pass its class, {{{kind}}}"
        raise PolicyError(f"{name} must be a set of classes; got {got}") from None


def text_of(value: Any) -> str:
    """Return a text that is the same in every process: no addresses, no hash order."""
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
    """Return `value` as plain data, ready for JSON."""
    if isinstance(value, frozenset):
        return sorted(c if isinstance(c, str) else text_of(c) for c in value)
    if isinstance(value, tuple):
        return [plain_of(entry) for entry in value]
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else text_of(k): plain_of(v) for k, v in value.items()}
    if isinstance(value, Policy):
        own_fields = [f.name for f in fields(value) if f.name not in _SHARED]
        options = {name: plain_of(getattr(value, name)) for name in own_fields}
        return {"kind": type(value).__name__, **options}
    if value is None or type(value) in (bool, int, str):
        return value
    return text_of(value)


# -- a policy as code -----------------------------------------------------------------------------


_NAMED = ("classes", "recompute")
"""Fields in which a class may be given by its name."""


def policy_code(policy: Any, without: Collection[str] = ()) -> str:
    """Return an expression that `eval` turns into an equal policy after `import graphshard, torch`.

    Fields with default values are left out, and those that `without` names. A class is written as
    its name where the field takes names (a name matches no subclasses), else as its dotted import
    path. Functions, modules and tensors cannot be written as code: their name or type is shown
    instead.
    """
    arguments = []
    # In the order of `__init__`: the class's own by position, then the shared ones.
    ordered = sorted(fields(policy), key=lambda field: field.kw_only is True)
    for index, field in enumerate(ordered):
        value = getattr(policy, field.name)
        if value == field.default or field.name in without:
            continue
        text = value_code(value, field.name in _NAMED)
        by_place = index == 0 and isinstance(policy, Policy)
        arguments.append(text if by_place else f"{field.name}={text}")
    return f"{_prefix(type(policy))}{type(policy).__name__}({', '.join(arguments)})"


def value_code(value: Any, named: bool = False) -> str:
    """Return `value` as code, with classes written as their names if `named`."""
    if isinstance(value, type):
        return repr(value.__name__) if named else f"{_prefix(value)}{value.__qualname__}"
    if isinstance(value, frozenset):
        return "{" + ", ".join(sorted(value_code(entry, named) for entry in value)) + "}"
    for kinds, code in _CODES:
        if isinstance(value, kinds):
            return code(value)
    return repr(value)


def _hardware_code(value: Hardware) -> str:
    if value.name in preset_names() and Hardware.load(value.name) == value:
        return repr(value.name)
    return f"graphshard.Hardware(**{value.to_dict()})"


_CODES: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    ((Policy, MixedPrecision), policy_code),
    (Hardware, _hardware_code),
    (os.PathLike, lambda value: repr(os.fspath(value))),
    (tuple, lambda v: f"({', '.join(map(value_code, v))}{',' if len(v) == 1 else ''})"),
    (Mapping, lambda v: f"{{{', '.join(f'{value_code(k)}: {value_code(v[k])}' for k in v)}}}"),
    ((Tensor, nn.Module), lambda value: f"<{type(value).__name__}>"),
    (bool, repr),
    (int, lambda value: f"{value:_}"),
    (str, lambda value: repr(str(value))),  # a Strategy becomes its name
    (torch.dtype, repr),
    (Callable, lambda value: str(getattr(value, "__qualname__", type(value).__name__))),
)


def _prefix(kind: type) -> str:
    """The import path before the name of `kind`, with its dot; "" if it needs none."""
    module = kind.__module__
    if module.startswith("graphshard."):
        return "graphshard."
    if module.startswith("torch.nn.modules."):
        return "torch.nn."
    return "" if module in ("builtins", "__main__") else f"{module}."
