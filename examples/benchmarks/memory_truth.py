"""Is the predicted memory of a step what it takes? Predicted against counted, on real ranks.

    python examples/benchmarks/memory_truth.py                    # a sample, 2 Gloo ranks, the CPU
    python examples/benchmarks/memory_truth.py --all --ranks 4    # every case of 4 ranks

Prints a row per case (the most over the ranks, and what was counted there), and ends with status 1
if a peak or a valley (what lives between steps) is off by more than 3 %.

Every live byte of tensor storage is counted (see live_bytes.py), after each operation
and each change of a storage's size. What an operator allocates and drops inside, such as the
workspace of a convolution, is not seen from Python, nor predicted. What is offloaded lies in memory
of the same kind, and is counted apart, as the host's; so is the optimizer's step on it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks import harness
from examples.benchmarks.benchmark_models import WEIGHED, loss_of
from examples.benchmarks.live_bytes import LiveBytes
from graphshard.errors import PolicyError, VerifyError
from graphshard.program.storages import storages_of
from graphshard.runtime import streams

# -- the steps: models x strategies x recompute x offload, and more --------------------------------

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "full+root": {"reshard_root": True},
    "grad_op": {"strategy": "SHARD_GRAD_OP"},
    "zero1": {"strategy": "SHARD_OPTIMIZER"},
    "no_shard": {"strategy": "NO_SHARD"},
}
OF_FOUR: Mapping[str, Mapping[str, Any]] = {
    "hybrid": {"strategy": "HYBRID_SHARD"},
    "hybrid_zero2": {"strategy": "HYBRID_SHARD_ZERO2"},
    "parts": {"reshard_after_forward": 2},
}
RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "units": {"recompute": "units"},
    "classes": {"recompute": "classes"},  # the units' class names, filled in by model
    "selective": {"recompute": "selective"},
    "budget": {"recompute": "budget"},  # with a budget of nine tenths, filled in by model
}
OFFLOAD: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "params": {"offload": ["params"]},
    "activations": {"offload": ["activations"]},
    "both": {"offload": ["params", "activations"]},
}
LOW = graphshard.MixedPrecision(torch.bfloat16)
LOW_FULL = graphshard.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    """One kind of step.

    mode: "step"; "accumulate" (two micro-batches, one of them inside no_sync()); "eval" (forward
    alone, without gradients); "dynamic" (of any batch size; predicted for the one captured).
    """

    model: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    mode: str = "step"

    @property
    def hybrid(self) -> bool:
        return str(self.options.get("strategy", "")).startswith("HYBRID")


def every(ranks: int) -> Iterator[Case]:
    """All of them for a number of ranks, 2 or 4."""
    strategies = OF_FOUR if ranks == 4 else STRATEGIES
    for model in WEIGHED:
        for parts in product(strategies.items(), RECOMPUTE.items(), OFFLOAD.items()):
            options = {key: value for _, some in parts for key, value in some.items()}
            if options.get("recompute") == "budget" and "activations" in options.get("offload", ()):
                continue  # which a policy refuses
            yield Case(model, " ".join(name for name, _ in parts if name), options)
        for strategy, options in strategies.items():
            yield from _more(model, strategy, options)


def _more(model: str, strategy: str, options: Mapping[str, Any]) -> Iterator[Case]:
    yield Case(model, f"{strategy} bf16", {**options, "mixed_precision": LOW})
    yield Case(model, f"{strategy} bf16, fp32 reduce", {**options, "mixed_precision": LOW_FULL})
    for optimizer in ("adamw-fused", "sgd-momentum"):
        yield Case(model, f"{strategy} {optimizer}", options, optimizer)
    for mode in ("accumulate", "eval", "dynamic"):
        if model != "mixtral" or mode != "dynamic":  # whose sizes depend on its data
            yield Case(model, f"{strategy} {mode}", options, mode=mode)


def sample(ranks: int) -> list[Case]:
    """A few, in which every option and every model occurs."""
    if ranks == 4:
        return [Case("gpt", name, options) for name, options in OF_FOUR.items()]
    return [
        Case("gpt", "full"),
        Case("gpt", "full accumulate", mode="accumulate"),
        Case("gpt", "zero1", {"strategy": "SHARD_OPTIMIZER"}),
        Case("gpt", "full both", {"offload": ["params", "activations"]}),
        Case("llama", "grad_op units", {"strategy": "SHARD_GRAD_OP", "recompute": "units"}),
        Case("llama", "full eval", mode="eval"),
        Case("bert", "full selective", {"recompute": "selective"}, "sgd-momentum"),
        Case("t5", "full budget", {"recompute": "budget"}, "adamw-fused"),
        Case("regnet", "no_shard", {"strategy": "NO_SHARD"}),
        Case("mixtral", "full+root", {"reshard_root": True}),
        Case("lora", "full bf16", {"mixed_precision": LOW}),
    ]


# -- predicted and counted -------------------------------------------------------------------------

BATCH = 4
TOLERANCE = 0.03
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "sgd-momentum": lambda params: torch.optim.SGD(params, 0.01, momentum=0.9, foreach=True),
}


@dataclass(frozen=True)
class Truth:
    """Bytes on one rank: (counted, predicted) at the peak, between steps, and on the host there."""

    case: Case
    peak: tuple[int, int]
    valley: tuple[int, int]
    host: tuple[int, int]

    @property
    def error(self) -> float:
        """The largest difference, as a part of what was counted."""
        pairs = (self.peak, self.valley, self.host)
        return max(
            (abs(there - said) / max(there, 1) for there, said in pairs if there or said),
            default=0.0,
        )


def truth_of(case: Case) -> Truth:
    """Build, train and count `case` on this rank of the default process group."""
    subject = WEIGHED[case.model]
    torch.manual_seed(0)
    model = subject.build().train(case.mode != "eval")
    batch = subject.batch(BATCH, None)
    policy = _policy(case, model, batch)
    mesh = None
    if case.hybrid:
        names = ("replicate", "shard")
        mesh = dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)
    dynamic = {name: {0: "batch"} for name in batch} if case.mode == "dynamic" else None
    sharded = graphshard.compile(model, policy, mesh=mesh, dynamic=dynamic)
    del model
    run = _Run(sharded, case, batch)
    run.step()
    if case.mode == "dynamic":
        run.step(subject.batch(BATCH // 2, None))  # by the same program
    counted = _counted(run)
    curves = [
        graphshard.simulate(
            program,
            plan=sharded.plan,
            hardware="cpu-gloo",
            optimizer=case.optimizer,
        ).memory
        for program in sharded.programs[-2 if case.mode == "accumulate" else -1 :]
    ]
    last = curves[-1]
    return Truth(
        case,
        (counted[0], max(curve.peak.bytes for curve in curves)),
        (counted[1], last.valley),
        (counted[2], last.host),
    )


class _Run:
    """A sharded model with its optimizer and batch."""

    def __init__(self, sharded: graphshard.ShardedModule, case: Case, batch: Any) -> None:
        self.sharded, self.case, self.batch = sharded, case, batch
        self.offloads = sharded.plan.policy.offloads("params")
        self.optimizer: Any = None
        if case.mode != "eval":
            trained = [p for p in sharded.parameters() if p.requires_grad]
            self.optimizer = OPTIMIZERS[case.optimizer](trained)

    def step(self, batch: Any = None, before: AbstractContextManager[Any] | None = None) -> None:
        """A whole step; inside of `before` only what comes before the optimizer's."""
        batch = self.batch if batch is None else batch
        with before or nullcontext():
            if self.case.mode == "eval":
                with torch.no_grad():
                    self.sharded(**batch)
                return
            if self.case.mode == "accumulate":
                with self.sharded.no_sync():
                    output = self.sharded(**batch)
                    loss_of(output).backward()
                    del output
            output = self.sharded(**batch)  # held on to, as what a step returns counts throughout
            loss_of(output).backward()
            del output
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def kept(self) -> list[Any]:
        """Bytes that live between steps, without the batch: shards, buffers, states."""
        states = self.optimizer.state.values() if self.optimizer else ()
        held = [list(state.values()) for state in states]
        return [list(self.sharded.parameters()), list(self.sharded.buffers()), held]


def _counted(run: _Run) -> tuple[int, int, int]:
    """The bytes of a step: at its peak, between steps, and there on the host."""
    live = LiveBytes()
    if run.offloads:
        live.set_apart([run.kept[0], run.kept[2]])
        live.add(run.kept[1])
    else:
        live.add(run.kept)
    live.add(run.batch)
    valley, host = live.current, live.apart
    new_host = streams.new_host

    def apart(like: Tensor) -> Tensor:
        new = new_host(like)
        live.set_apart(new)
        return new

    with patch.object(streams, "new_host", apart):
        if run.offloads:
            run.step(before=live)
        else:
            with live:  # what the first of two steps leaves is there between steps
                run.step()
            valley = live.peak = live.current
            with live:
                run.step()
    return live.peak, valley, host


def _policy(case: Case, model: nn.Module, batch: Any) -> graphshard.Policy:
    present = {type(module).__name__ for module in model.modules()}
    units = [name for name in WEIGHED[case.model].blocks if name in present]
    options = dict(case.options)
    if options.get("recompute") == "classes":
        options["recompute"] = units
    if options.get("recompute") == "budget":
        # Nine tenths of what the step takes without.
        plain = graphshard.BlockPolicy(
            units, **{k: v for k, v in options.items() if k != "recompute"}
        )
        shape: dict[str, Any] = {"world_size": dist.get_world_size()}
        if case.hybrid:
            shape = {"mesh_shape": (2, dist.get_world_size() // 2)}
        shape["process_group_backend"] = "gloo"
        plan = graphshard.plan(model, plain, example_kwargs=batch, **shape)
        assert plan.program is not None
        options["memory_budget"] = int(0.9 * max(storages_of(plan.program).live()))
    return graphshard.BlockPolicy(units, **options)


# -- the table -------------------------------------------------------------------------------------


def row(truth: Truth) -> str:
    case = truth.case
    peak, valley = truth.peak, truth.valley
    signed = f"{(peak[1] / peak[0] - 1):+7.2%}"
    wrong = "" if truth.error <= TOLERANCE else "  WRONG"
    host = f" {truth.host[0]:>10,} {truth.host[1]:>10,}" if any(truth.host) else ""
    return (
        f"{case.model:8} {case.name:34} {peak[0]:>11,} {peak[1]:>11,} {signed} "
        f"{valley[0]:>11,} {valley[1]:>11,} {(valley[1] / valley[0] - 1):+7.2%}{host}{wrong}"
    )


HEAD = (
    f"{'model':8} {'step':34} {'peak':>11} {'predicted':>11} {'':7} "
    f"{'valley':>11} {'predicted':>11} {'':7} host"
)


def worst(truths: Iterable[Truth]) -> Truth:
    """Of one case's truths by rank the one whose peak is highest, or else that is wrong most."""
    return max(truths, key=lambda truth: (round(truth.error, 2), truth.peak[0]))


def _rank(rank: int, cases: list[Case]) -> int:
    """Print the table on rank 0; how many cases are off."""
    ranks, failed = dist.get_world_size(), 0
    if not rank:
        print(HEAD, flush=True)
    for case in cases:
        try:
            own = truth_of(case)
        except (PolicyError, VerifyError) as error:  # on every rank: no such policy, no such budget
            if not rank:
                print(f"{case.model:8} {case.name:34} refused: {str(error)[:90]}", flush=True)
            continue
        truths: list[Any] = [None] * ranks
        dist.all_gather_object(truths, own)
        found = worst(truths)
        failed += found.error > TOLERANCE
        if not rank:
            print(row(found), flush=True)
    return failed


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, choices=[2, 4], default=2)
    parser.add_argument("--all", action="store_true", help="every case, not a sample")
    parser.add_argument("--step", type=int, default=1, help="of those cases take each n-th")
    parser.add_argument("--only", default="", help="words a case's model and step must contain")
    args = parser.parse_args()
    cases = list(every(args.ranks) if args.all or args.only else sample(args.ranks))
    words = args.only.split()
    cases = [c for c in cases if all(w in f"{c.model} {c.name}".split() for w in words)]
    cases = cases[:: args.step]
    failed = harness.on_ranks(_rank, args.ranks, cases)
    print(f"{len(cases)} cases, {failed} off by more than {TOLERANCE:.0%}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
