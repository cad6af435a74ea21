"""Choose the passes for a policy, run them in order, each timed, and verify the program."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

import graphshard.passes
from graphshard.capture.questions import ASSUMES
from graphshard.errors import GraphshardError, PassError
from graphshard.hardware.hardware import Hardware
from graphshard.passes.accumulate import Accumulate
from graphshard.passes.check_finite import CheckFinite
from graphshard.passes.cuda_graph import CudaGraph
from graphshard.passes.form_regions import FormRegions
from graphshard.passes.gather_unused import GatherUnused
from graphshard.passes.insert_free import InsertFree
from graphshard.passes.merge_gathers import MergeGathers
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
from graphshard.passes.reduce_replicas import ReduceReplicas
from graphshard.passes.regather import Regather
from graphshard.passes.release_early import ReleaseEarly
from graphshard.passes.set_budget import SetBudget
from graphshard.passes.sink_waits import SinkWaits
from graphshard.passes.skip_reshard import SkipReshard
from graphshard.passes.split_ends import SplitEnds
from graphshard.passes.split_gathers import SplitGathers
from graphshard.passes.split_reduces import SplitReduces
from graphshard.passes.unshard import Unshard
from graphshard.passes.zero_missing_grads import ZeroMissingGrads
from graphshard.planning.plan import ShardingPlan
from graphshard.planning.planner import subject_of
from graphshard.policy.base import Policy, runs_beside_compute
from graphshard.policy.recompute import RecomputeChoice
from graphshard.program.collective import GRADIENT, Mode
from graphshard.program.pass_protocol import Pass, PassLike, Stage, apply_pass, stages_of
from graphshard.program.program import Program
from graphshard.program.spans import assign_units
from graphshard.progress import Stages
from graphshard.torch_private.gc_pause import collect_only_new, pause_collections
from graphshard.verify.facts import Reference
from graphshard.verify.numbering import Values
from graphshard.verify.rules import OF_EACH_PASS, RULES, verify


def with_capture_warnings(plan: ShardingPlan, program: Program) -> ShardingPlan:
    """Add warnings about parameters that the captured program does not use or train, and others.

    Args:
        plan: the plan of the captured model.
        program: the program as captured, before any pass.
    """
    unused, no_gradient = [], []
    for param, grad in zip(program.params, program.results().grads, strict=True):
        if not param.node.users:
            unused += [] if plan.policy.gather_unused else [param.fqn]
        elif program.grad and param.requires_grad and grad is None:
            no_gradient.append(param.fqn)
    warnings = []
    if unused:
        warnings.append(
            f"{subject_of('parameter', unused)} never used by the captured step, yet stored on the "
            "ranks; remove what you do not need"
        )
    if no_gradient:
        warnings.append(
            f"{subject_of('trainable parameter', no_gradient)} used but no gradient reaches "
            f"{'it' if len(no_gradient) == 1 else 'them'}; set requires_grad=False, or look for a "
            "detach() or no_grad in the model"
        )
    for note in program.notes:
        if note.startswith(ASSUMES):
            warnings.append(
                f"the captured step {note}; the example has no values to tell, and calls for which "
                "it is otherwise get a program of their own"
            )
    return replace(plan, warnings=(*plan.warnings, *warnings))


@dataclass(frozen=True)
class PassTiming:
    """Seconds that one pass and the check after it took."""

    name: str
    seconds: float
    verify_seconds: float


Watcher = Callable[[PassLike, Program], None]
"""Called after each pass with the pass and the program, which it must not edit."""


def default_passes(
    policy: Policy, process_group_backend: str = "nccl", hosts: int = 1
) -> tuple[Pass, ...]:
    """The passes that make a captured program a sharded one, in order.

    Args:
        policy: the user's policy.
        process_group_backend: as of a plan. Over "gloo" on one host a collective takes the cores
            that compute, so in FSDP's order no reduce is in flight while backward continues. With
            offloaded parameters one is: their gradients are copied meanwhile.
        hosts: of the ranks, as of a plan.
    """
    waits = process_group_backend == "gloo" and hosts == 1
    at_once = waits and policy.schedule == "fsdp" and not policy.offloads("params")
    choice = RecomputeChoice.of(policy.recompute)
    # A CUDA graph cannot set the state of a generator.
    keep = policy.cuda_graph
    first: Pass = Recompute(choice.units, bool(choice.classes), choice.selective, keep)
    if choice.budget:
        assert policy.memory_budget is not None
        first = RecomputeToBudget(policy.memory_budget, bool(choice.classes), keep)
    return (
        first,
        *((GatherUnused(),) if policy.gather_unused else ()),
        Unshard(),
        PartialReshard(),
        Regather(),
        ZeroMissingGrads(every=policy.gather_unused),
        ReduceGrads(),
        ReduceReplicas(),
        Precision(),
        Accumulate(),
        *((OffloadParams(),) if policy.offloads("params") else ()),
        *((OffloadActivations(),) if policy.offloads("activations") else ()),
        Prefetch(
            backward=policy.backward_prefetch,
            forward=policy.forward_units_ahead(process_group_backend, hosts),
        ),
        SinkWaits(0 if at_once else 1),
        *((PrefetchCopies(backward=policy.backward_prefetch),) if policy.offload else ()),
        InsertFree(),
        *_finer(policy, process_group_backend, hosts),
        *((CheckFinite(),) if policy.check_finite else ()),
        *((CudaGraph(),) if policy.cuda_graph else ()),
    )


def passes_of(plan: ShardingPlan) -> tuple[Pass, ...]:
    """The default passes for the policy of a plan, and for the ranks that it was made for."""
    return default_passes(plan.policy, plan.process_group_backend, plan.hosts)


def backend_passes(backend: str) -> tuple[Pass, ...]:
    """The passes that prepare a finished program for `backend`, after all others."""
    return (FormRegions(),) if backend == "inductor" else ()


def every_pass(plan: ShardingPlan, own: Sequence[PassLike]) -> tuple[PassLike, ...]:
    """The passes of a plan, then the user's `own`, then those of the plan's backend."""
    return (*passes_of(plan), *own, *backend_passes(plan.backend))


def passes_for(passes: Iterable[PassLike], mode: Mode) -> tuple[PassLike, ...]:
    """`passes`, with the passes for accumulation set to `mode`."""
    kind, gradients, shards = mode
    fqns = frozenset(gradients) | frozenset(shards)
    configured: list[PassLike] = []
    for step in passes:
        if isinstance(step, Accumulate):
            configured.append(Accumulate(kind, frozenset(gradients), frozenset(shards)))
        elif isinstance(step, ZeroMissingGrads):
            reduces = kind != GRADIENT
            params = fqns if reduces else frozenset()
            configured.append(replace(step, params=params, every=step.every and reduces))
        else:
            configured.append(step)
    return tuple(configured)


APART = 16 << 20
"""Bytes of full tensors from which parameters of a unit, or gradients, are moved apart."""


def _finer(policy: Policy, process_group_backend: str, hosts: int) -> tuple[Pass, ...]:
    """What moves apart or together and is released early; with "overlap" by simulation, too.

    Where collectives run beside compute, parameters of a unit between whose uses other units run
    are moved apart, but not with `gather_unused`, since ranks may use others. Small units that are
    neighbours move together. Both depend on no sizes of inputs and on no times, so ranks agree on
    them.
    """
    forward = policy.forward_units_ahead(process_group_backend, hosts)
    backward = 1 if policy.backward_prefetch == "pre" else 0
    apart: tuple[Pass, ...] = ()
    if runs_beside_compute(process_group_backend, hosts) and not policy.gather_unused:
        apart = (SplitGathers(APART, forward, backward), SplitReduces(APART))
    share = policy.bytes_merged(process_group_backend)
    kept = SkipReshard(together=share)
    together = (MergeGathers(share, forward, backward),) if share else ()
    ends = (SplitEnds(share),) if share and apart else ()
    if policy.schedule != "overlap":
        return (*apart, kept, *together, *ends, ReleaseEarly())
    hardware = None if policy.hardware is None else Hardware.load(policy.hardware)
    budget = SetBudget(hardware, forward, backward)
    by_cost = (MergeGathers(None, forward, backward),) if policy.merge_below != 0 else ()
    return (*apart, kept, budget, *by_cost, *ends, ReleaseEarly(), Overlap())


def run_passes(
    program: Program,
    plan: ShardingPlan,
    passes: Sequence[PassLike],
    *,
    watcher: Watcher | None = None,
    progress: Stages | None = None,
) -> list[PassTiming]:
    """Give the nodes of a captured `program` their units, then apply `passes`, and verify.

    Args:
        program: edited in place.
        plan: made for the same model.
        passes: applied in this order.
        watcher: called after each pass.
        progress: shows each stage.

    Returns:
        Seconds per pass.

    Raises:
        PassError: a pass failed or cannot rewrite the program; names the pass.
        VerifyError: the program breaks a rule before the first pass or after a pass; names both.
    """
    # Whoever plans may have set another default device, which the passes' own tensors are not for.
    with collect_only_new(), torch.device("cpu"):
        assign_units(program, plan)
        program.plan = replace(plan, program=None)
        again = program.copy()
        try:
            return _run(program, plan, passes, watcher, progress)
        except Exception as error:
            failed = error
        # The pass at fault may be an earlier one than the one behind which it was noticed.
        if again.sizes is not None:
            again.sizes.drop_later_guards()
        _run(again, plan, passes, None, progress, every=True)
        raise failed


def _run(
    program: Program,
    plan: ShardingPlan,
    passes: Sequence[PassLike],
    watcher: Watcher | None,
    progress: Stages | None,
    *,
    every: bool = False,
) -> list[PassTiming]:
    """Apply `passes`, and verify before the first, behind the last, and around the user's own.

    Behind one of ours that another follows, only the rules that ask about a single pass are
    checked. `every`: all rules are checked behind every pass.
    """
    timings: list[PassTiming] = []
    with _stage(progress, "verify"), pause_collections():
        checks = _Checks(program, plan)
    ours = [*map(_is_ours, passes), False]
    with _stage(progress, "passes", len(passes)):
        for place, step in enumerate(passes):
            start = time.perf_counter()
            with _stage(progress, step.name):
                _apply(step, program, plan, passes[place + 1 :])
            applied = time.perf_counter()
            with _stage(progress, "verify"), pause_collections():
                checks.after(step, fully=every or not (ours[place] and ours[place + 1]))
            timings.append(PassTiming(step.name, applied - start, time.perf_counter() - applied))
            if watcher is not None:
                watcher(step, program)
            if progress is not None:
                progress.advance()
    return timings


def _is_ours(step: PassLike) -> bool:
    return type(step).__module__.startswith(f"{graphshard.passes.__name__}.")


class _Checks:
    """Verifies a program before its first pass, and after each against the state before it."""

    def __init__(self, program: Program, plan: ShardingPlan) -> None:
        self.program, self.plan = program, plan
        self.stages = Stage.CAPTURED
        facts = verify(program, plan, after="capture", done=self.stages)
        self.captured = self.reference = Reference.of(program, facts=facts)

    def after(self, step: PassLike, *, fully: bool) -> None:
        """Verify the program after `step`: by all rules, or by those about a single pass."""
        stages = stages_of(step)
        self.stages |= stages
        changes_values = getattr(step, "changes_values", False)
        reference = replace(self.reference, values=None) if changes_values else self.reference
        if Stage.ACCUMULATED in stages:
            reference = replace(reference, added=None)
        facts = verify(
            self.program,
            self.plan,
            after=step.name,
            done=self.stages,
            reference=reference,
            rules=RULES if fully else OF_EACH_PASS,
        )
        if changes_values:
            self.captured = replace(self.captured, values=Values.of(self.program))
        if fully:
            self.reference = Reference.of(self.program, self.captured, facts)
        else:
            self.reference = self.reference.moved_to(self.program, facts)


def _apply(
    step: PassLike, program: Program, plan: ShardingPlan, following: Sequence[PassLike]
) -> None:
    try:
        apply_pass(step, program, plan, following)
        if program.sizes is not None:
            program.sizes.require_closed(step.name)
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
