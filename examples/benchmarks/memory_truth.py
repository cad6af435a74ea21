"""Is the predicted memory of a step what it takes? Predicted against counted, on real ranks.

    python examples/benchmarks/memory_truth.py                    # a sample, 2 Gloo ranks, the CPU
    python examples/benchmarks/memory_truth.py --all --ranks 4    # every case of 4 ranks
    python examples/benchmarks/memory_truth.py --device cuda      # one GPU as a rank of 8

Prints a row per case (the most over the ranks, and what was counted there), and ends with status 1
if a peak or a valley (what lives between steps) is off by more than 3 %, on CUDA 5 %.

On the CPU every live byte of tensor storage is counted (see live_bytes.py), after each operation
and each change of a storage's size. What an operator allocates and drops inside, such as the
workspace of a convolution, is not seen from Python, nor predicted. What is offloaded lies in memory
of the same kind there, and is counted apart, as the host's; so is the optimizer's step on it.

On CUDA the figure is `torch.cuda.max_memory_allocated`, whose blocks are multiples of 512 bytes and
which sees workspaces. The process group is torch's "fake" one: a rank of 8, whose collectives move
nothing, needs the memory of a real one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks.benchmark_models import WEIGHED
from examples.benchmarks.live_bytes import LiveBytes
from examples.benchmarks.truth_cases import Case, every, sample
from graphshard.errors import PolicyError, VerifyError
from graphshard.program.storages import storages_of
from graphshard.runtime import streams

BATCH = 4
TOLERANCE = {"cpu": 0.03, "cuda": 0.05}
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


def truth_of(case: Case, device: torch.device) -> Truth:
    """Build, train and count `case` on this rank of the default process group."""
    subject = WEIGHED[case.model]
    torch.manual_seed(0)
    model = subject.build().train(case.mode != "eval")
    batch = _on(subject.batch(BATCH, None), device)
    policy = _policy(case, model, batch)
    mesh = None
    if case.hybrid:
        names = ("replicate", "shard")
        mesh = dist.init_device_mesh(
            device.type, (2, dist.get_world_size() // 2), mesh_dim_names=names
        )
    dynamic = {name: {0: "batch"} for name, value in batch.items() if isinstance(value, Tensor)}
    sharded = graphshard.compile(
        model,
        policy,
        mesh=mesh,
        device=device,
        dynamic=dynamic if case.mode == "dynamic" else None,
    )
    del model
    run = _Run(sharded, case, batch)
    run.step()
    if case.mode == "dynamic":
        run.step(_on(subject.batch(BATCH // 2, None), device))  # by the same program
    counted = _counted(run, device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    curves = [
        graphshard.simulate(
            program,
            plan=sharded.plan,
            hardware="cpu-gloo",
            optimizer=case.optimizer,
            backend=backend,
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
                    _loss(output).backward()
                    del output
            output = self.sharded(**batch)  # held on to, as what a step returns counts throughout
            _loss(output).backward()
            del output
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def kept(self) -> list[Any]:
        """Bytes that live between steps, without the batch: shards, buffers, states."""
        states = self.optimizer.state.values() if self.optimizer else ()
        held = [list(state.values()) for state in states]
        return [list(self.sharded.parameters()), list(self.sharded.buffers()), held]


def _counted(run: _Run, device: torch.device) -> tuple[int, int, int]:
    """The bytes of a step: at its peak, between steps, and there on the host."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        valley = torch.cuda.memory_allocated()
        run.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), valley, 0
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

    streams.new_host = apart
    try:
        if run.offloads:
            run.step(before=live)
        else:
            with live:  # what the first of two steps leaves is there between steps
                run.step()
            valley = live.peak = live.current
            with live:
                run.step()
    finally:
        streams.new_host = new_host
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
        shape = {"world_size": dist.get_world_size()}
        if case.hybrid:
            shape = {"mesh_shape": (2, dist.get_world_size() // 2)}
        plan = graphshard.plan(model, plain, example_kwargs=batch, **shape)
        assert plan.program is not None
        options["memory_budget"] = int(0.9 * max(storages_of(plan.program).live()))
    return graphshard.BlockPolicy(units, **options)


def _on(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def _loss(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


# -- the table -------------------------------------------------------------------------------------


def row(truth: Truth, tolerance: float) -> str:
    """One line of the table."""
    case = truth.case
    peak, valley = truth.peak, truth.valley
    signed = f"{(peak[1] / peak[0] - 1):+7.2%}"
    wrong = "" if truth.error <= tolerance else "  WRONG"
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


def _rank(rank: int, ranks: int, folder: str, cases: list[Case], device: str) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    failed = 0
    if not rank:
        print(HEAD, flush=True)
    for case in cases:
        try:
            own = truth_of(case, torch.device(device))
        except (PolicyError, VerifyError) as error:  # on every rank: no such policy, no such budget
            if not rank:
                print(f"{case.model:8} {case.name:34} refused: {str(error)[:90]}", flush=True)
            continue
        truths: list[Any] = [None] * ranks
        dist.all_gather_object(truths, own)
        found = worst(truths)
        failed += found.error > TOLERANCE[device]
        if not rank:
            print(row(found, TOLERANCE[device]), flush=True)
    if not rank:
        print(f"{len(cases)} cases, {failed} off by more than {TOLERANCE[device]:.0%}", flush=True)
        Path(folder, "failed").write_text(str(failed))
    dist.barrier()
    os._exit(0)  # Gloo at times aborts a process that exits in order


def _on_gpu(cases: list[Case]) -> int:
    """One GPU as the first rank of 8, in a group whose collectives move nothing."""
    if not torch.cuda.is_available():
        print("--device cuda needs a GPU, and torch finds none on this machine", file=sys.stderr)
        return 2
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    failed = 0
    print(HEAD, flush=True)
    for case in cases:
        found = truth_of(case, torch.device("cuda", 0))
        failed += found.error > TOLERANCE["cuda"]
        print(row(found, TOLERANCE["cuda"]), flush=True)
    print(f"{len(cases)} cases, {failed} off by more than {TOLERANCE['cuda']:.0%}")
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, choices=[2, 4], default=2)
    parser.add_argument("--all", action="store_true", help="every case, not a sample")
    parser.add_argument("--step", type=int, default=1, help="of those cases take each n-th")
    parser.add_argument("--only", default="", help="words a case's model and step must contain")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    cases = list(every(args.ranks) if args.all or args.only else sample(args.ranks))
    words = args.only.split()
    cases = [c for c in cases if all(w in f"{c.model} {c.name}".split() for w in words)]
    cases = cases[:: args.step]
    if args.device == "cuda":
        return _on_gpu(cases)
    with tempfile.TemporaryDirectory() as folder:
        given = (args.ranks, folder, cases, args.device)
        torch.multiprocessing.spawn(_rank, given, nprocs=args.ranks)
        return int(Path(folder, "failed").read_text() != "0")


if __name__ == "__main__":
    sys.exit(main())
