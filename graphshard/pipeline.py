"""Running passes: in order, timed, each verified, each shown to whoever watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from graphshard.collector import collections_off, only_new_collected
from graphshard.cost.hardware import Hardware
from graphshard.errors import GraphshardError, PassError, PolicyError
from graphshard.passes.accumulate import Accumulate
from graphshard.passes.cuda_graph import CudaGraph
from graphshard.passes.form_regions import FormRegions
from graphshard.passes.gather_together import GatherTogether
from graphshard.passes.insert_free import InsertFree
from graphshard.passes.keep_if_better import KeepIfBetter
from graphshard.passes.keep_unsharded import KeepUnsharded
from graphshard.passes.offload_activations import OffloadActivations
from graphshard.passes.offload_params import OffloadParams
from graphshard.passes.overlap import Overlap
from graphshard.passes.partial_reshard import PartialReshard
from graphshard.passes.precision import Precision
from graphshard.passes.prefetch import Prefetch
from graphshard.passes.prefetch_copies import PrefetchCopies
from graphshard.passes.recompute import Recompute
from graphshard.passes.recompute_budget import RecomputeToBudget
from graphshard.passes.reduce_grads import ReduceGrads
from graphshard.passes.reduce_in_pieces import ReduceInPieces
from graphshard.passes.reduce_replicas import ReduceReplicas
from graphshard.passes.regather import Regather
from graphshard.passes.release_early import ReleaseEarly
from graphshard.passes.set_budget import SetBudget
from graphshard.passes.sink_waits import SinkWaits
from graphshard.passes.split_gathers import SplitGathers
from graphshard.passes.split_reduces import SplitReduces
from graphshard.passes.unshard import Unshard
from graphshard.passes.zeros_for_kept import ZerosForKept
from graphshard.plan import ShardingPlan
from graphshard.policy_base import Policy
from graphshard.program import Program
from graphshard.recompute_choice import RecomputeChoice
from graphshard.runs import assign_units
from graphshard.snapshot import equal, snapshot
from graphshard.verify import LATER_RULES, RULES, verify
from graphshard.verify_facts import Reference
from graphshard.verify_values import Values


class Pass(Protocol):
    """A rewrite: a frozen dataclass with a `name`, its arguments as fields, and `apply`.

    A pass must not change what the step computes: every value it returns is compared with the
    captured program's. One that changes it knowingly, say to round or to scale, has the attribute
    `changes_values = True` (a `ClassVar[bool]`); what it leaves is what later passes must keep.
    """

    @property
    def name(self) -> str:
        """Shown in timings, dumps and errors."""
        ...

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place; it is valid before and after."""
        ...


@dataclass(frozen=True)
class PassTiming:
    """How long one pass and the check after it took, in seconds."""

    name: str
    seconds: float
    verify_seconds: float


Watcher = Callable[[Pass, Program], None]
"""Called after each pass with it and the program, which must not be edited."""


class Stages(Protocol):
    """Whoever shows how far the work is; see `graphshard.inspect.progress.Progress`."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        """A stage of the work, of `total` steps where that is known."""
        ...

    def advance(self) -> None:
        """One step of the innermost stage is done."""
        ...


def default_passes(policy: Policy, *, waits_at_once: bool = False) -> tuple[Pass, ...]:
    """The passes that make a captured program a sharded one, in order.

    Args:
        policy: what the user asks for.
        waits_at_once: FSDP's order is the one it has where the host waits for every collective, as
            over Gloo: no reduce is under way while backward goes on. With parameters offloaded one
            is, as their gradients are copied to the host meanwhile.
    """
    at_once = waits_at_once and policy.schedule == "fsdp" and not policy.offloads("params")
    choice = RecomputeChoice.of(policy.recompute)
    then = (
        Unshard(),
        PartialReshard(),
        Regather(),
        ZerosForKept(),
        ReduceGrads(),
        ReduceReplicas(),
        Precision(),
        Accumulate(),
        *((OffloadParams(),) if policy.offloads("params") else ()),
        *((OffloadActivations(),) if policy.offloads("activations") else ()),
        Prefetch(backward=policy.backward_prefetch, forward=policy.forward_prefetch),
        SinkWaits(0 if at_once else 1),
        *((PrefetchCopies(backward=policy.backward_prefetch),) if policy.offload else ()),
        InsertFree(),
    )
    first: Pass = Recompute(choice.units, bool(choice.classes), choice.selective)
    if choice.budget:
        assert policy.memory_budget is not None
        first = RecomputeToBudget(policy.memory_budget, then, bool(choice.classes))
    last = (CudaGraph(),) if policy.cuda_graph else ()
    return (first, *then, *_by_cost(policy), *last)


BACKENDS = ("eager", "inductor")
"""What may run a program's compute."""


def backend_passes(backend: str) -> tuple[Pass, ...]:
    """The passes that make a finished program one for `backend`, after all others.

    Raises:
        PolicyError: there is no such backend.
    """
    if backend not in BACKENDS:
        raise PolicyError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    return (FormRegions(),) if backend == "inductor" else ()


def _by_cost(policy: Policy) -> tuple[Pass, ...]:
    """Releases, and the passes that improve a finished program by simulation, if that is wanted."""
    early: tuple[Pass, ...] = (ReleaseEarly(),)
    if policy.schedule != "overlap":
        return early
    hardware = None if policy.hardware is None else Hardware.load(policy.hardware)
    # Each is kept only where the step gains by it.
    finer: tuple[Pass, ...] = (
        SplitGathers(),
        SplitGathers(again=True),
        SplitReduces(),
        ReduceInPieces(),
    )
    return (
        SetBudget(hardware, early),
        *(KeepIfBetter(step, early) for step in finer),
        KeepUnsharded(then=early),
        GatherTogether(then=early),
        *early,
        Overlap(),
    )


def run_passes(
    program: Program,
    plan: ShardingPlan,
    passes: Sequence[Pass],
    *,
    watcher: Watcher | None = None,
    progress: Stages | None = None,
) -> list[PassTiming]:
    """Give the nodes of a captured `program` their units, then apply `passes`, each verified.

    Args:
        program: edited in place.
        plan: made for the same model.
        passes: applied in this order.
        watcher: called after each pass.
        progress: told of each stage.

    Returns:
        Seconds per pass.

    Raises:
        PassError: a pass met what it cannot rewrite, or failed; names the pass.
        VerifyError: the program broke a rule before the first pass or after one; names it.
    """
    with only_new_collected():
        return _run(program, plan, passes, watcher, progress)


def _run(
    program: Program,
    plan: ShardingPlan,
    passes: Sequence[Pass],
    watcher: Watcher | None,
    progress: Stages | None,
) -> list[PassTiming]:
    timings: list[PassTiming] = []
    assign_units(program, plan)
    with _stage(progress, "verify"), collections_off():
        checks = _Checks(program, plan)
    with _stage(progress, "passes", len(passes)):
        for step in passes:
            start = time.perf_counter()
            with _stage(progress, step.name):
                _apply(step, program, plan)
            applied = time.perf_counter()
            with _stage(progress, "verify"), collections_off():
                checks.after(step)
            timings.append(PassTiming(step.name, applied - start, time.perf_counter() - applied))
            if watcher is not None:
                watcher(step, program)
            if progress is not None:
                progress.advance()
    return timings


class _Checks:
    """Verifies a program before its first pass and after each, against what it was before."""

    def __init__(self, program: Program, plan: ShardingPlan) -> None:
        self.program, self.plan = program, plan
        self.done: set[type] = set()
        facts = verify(program, plan, after="capture", done=self.done)
        self.captured = self.reference = Reference.of(program, facts=facts)
        self.seen = snapshot(program)

    def after(self, step: Pass) -> None:
        """Verify what `step` left.

        Where it changed nothing every rule still holds, but for those that ask for more once it
        has run: it may have missed what it is there for.
        """
        before, self.seen = self.seen, snapshot(self.program)
        unchanged = equal(before, self.seen)
        self.done.add(type(step))
        rules = LATER_RULES.get(type(step), ()) if unchanged else RULES
        if not rules:
            return
        changes_values = getattr(step, "changes_values", False)
        reference = replace(self.reference, values=None) if changes_values else self.reference
        facts = verify(
            self.program,
            self.plan,
            after=step.name,
            done=self.done,
            reference=reference,
            rules=rules,
        )
        if unchanged:
            return
        if changes_values:
            self.captured = replace(self.captured, values=Values.of(self.program))
        self.reference = Reference.of(self.program, self.captured, facts)


def _apply(step: Pass, program: Program, plan: ShardingPlan) -> None:
    try:
        step.apply(program, plan)
        if program.sizes is not None:
            program.sizes.require_settled(step.name)
    except GraphshardError as error:
        if step.name in str(error):
            raise
        raise type(error)(f"pass {step.name}: {error}") from error
    except Exception as error:
        raise PassError(f"pass {step.name} failed: {type(error).__name__}: {error}") from error


def _stage(
    progress: Stages | None, name: str, total: int | None = None
) -> AbstractContextManager[None]:
    return nullcontext() if progress is None else progress.stage(name, total)
