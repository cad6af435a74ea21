"""graphshard beside every other system that shards: the same model, data and units, step by step.

    torchrun --nproc-per-node 2 examples/benchmarks/rivals.py              # Gloo, the CPU
    torchrun --nproc-per-node 8 examples/benchmarks/rivals.py --device cuda --scale 16
    python examples/benchmarks/rivals.py --fake 8       # memory of one rank of 8, in one process

`--replicas 2` shards over halves of the ranks: our HYBRID_SHARD, FSDP2's HSDP.

For each model and dtype all systems stand in one process group, with equal weights. Steps come in
rounds: one of each system, on the same batch, in an order that turns and reverses from round to
round, so that what disturbs the machine falls on all. A step's time is the slowest rank's, and a
ratio is the median over rounds of ours to theirs, with its quartiles.

Columns:

    first     seconds from the whole model to the end of its first step: sharding, capture, passes,
              compilation, the step itself
    step      median milliseconds (forward, backward, AdamW)
    eager/    our eager step as a part of this system's
    inductor/ our compiled step as a part of this system's
    peak      the most MiB of tensors alive at once in a step, on the worst rank; for compiled
              systems what stands and what torch's allocator gives out besides, in kernels too
    transient of those before the optimizer's part: unsharded parameters, gradients on their way,
              communication buffers (live_bytes.py says how they are known; not known in compiled
              code)
    loss      the largest difference from a single process's in the first steps, in float32 alone

Memory is counted in steps of their own, which are not timed. Before anything is timed every system
has trained a toy of a single linear layer in the same process: so none pays, in its first step, for
what a process needs once, such as imports. Compilers begin with an empty cache on disk each time.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from examples.benchmarks import harness
from examples.benchmarks.benchmark_models import (
    RIVALS,
    TINY,
    TOY,
    Data,
    Model,
    expected_losses,
    gpt,
    gpt_tokens,
    made,
)
from examples.benchmarks.live_bytes import StepWatch, most_allocated
from examples.benchmarks.rival_systems import (
    ALONE,
    FSDP2,
    FSDP2_BLOCKS,
    FSDP2_WHOLE,
    MESSAGES,
    OURS,
    OURS_COMPILED,
    OURS_OVERLAP,
    SYSTEMS,
    Setting,
    System,
    Trained,
    graphshard_step,
)

DTYPES = {"fp32": None, "bf16": torch.bfloat16}
WATCHED = 4  # steps of which memory is counted; the first does not count


def parse_args(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    names = [model.name for model in RIVALS]
    parser.add_argument("--models", nargs="+", choices=[*names, TINY.name], default=names)
    parser.add_argument("--dtypes", nargs="+", choices=[*DTYPES], default=[*DTYPES])
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="words in their names")
    parser.add_argument("--eager", action="store_true", help="no system that compiles")
    parser.add_argument("--scale", type=int, default=1, help="of batches")
    parser.add_argument("--hardware", metavar="FILE", help="what our overlap is timed on")
    parser.add_argument("--fake", type=int, metavar="RANKS", help="memory of one rank of so many")
    pairs_arguments(parser, warmup=2)
    parser.set_defaults(host=False)
    return parser.parse_args(given)


def pairs_arguments(parser: argparse.ArgumentParser, warmup: int) -> None:
    """The arguments that `Case` reads, but for those of the model."""
    parser.add_argument("--pairs", type=int, default=30, help="timed rounds")
    parser.add_argument("--warmup", type=int, default=warmup, help="rounds before them")
    parser.add_argument("--threads", type=int, default=1, help="per rank on a CPU")
    parser.add_argument("--replicas", type=int, default=1, help="over which HYBRID replicates")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")


@dataclass
class Result:
    """The measurements of one system; `why_not` says why there are no others."""

    system: str
    compiled: bool
    why_not: str = ""
    first: float = 0.0
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0
    transient: int | None = None
    gap: float = 0.0


# -- one model in one dtype ------------------------------------------------------------------------


@dataclass
class Case:
    """A model in a dtype, and how much to measure."""

    model: Model
    dtype: str
    args: argparse.Namespace
    device: torch.device
    folder: str  # for files of compilers

    def run(self, systems: Sequence[System]) -> list[Result]:
        rank = dist.get_rank()
        data, setting = self._setting()
        known = 0 if DTYPES[self.dtype] else 1 + self.args.warmup
        expected = expected_losses(data, known, rank)
        results = [Result(system.name, system.compiled) for system in systems]
        running: dict[str, Trained] = {}
        for system, result in zip(systems, results, strict=True):
            trained = self._started(system, setting, result)
            if trained is not None:
                running[system.name] = trained
        gc.collect()
        gc.freeze()  # so that collecting garbage before each step takes no time
        rounds = self.args.warmup + self.args.pairs
        batches = [data.batch(1 + index, rank) for index in range(rounds)]
        clock = time.thread_time if self.args.host else time.perf_counter
        times, losses = harness.alternate(
            {
                name: lambda index, of=trained: of.step(batches[index]).item()
                for name, trained in running.items()
            },
            self.args.warmup,
            self.args.pairs,
            partial(harness.seconds, device=self.device, clock=clock),
        )
        for result in results:
            if result.system in running:
                result.times = times[result.system]
                result.losses += losses[result.system]
                self._watch(result, running[result.system], setting)
                pairs = zip(result.losses, expected, strict=False)
                result.gap = max((abs(loss - there) for loss, there in pairs), default=math.nan)
                share(result, self.device)
        running.clear()
        gc.unfreeze()
        gc.collect()
        torch._dynamo.reset()
        return results

    def first_steps(self, systems: Sequence[System]) -> None:
        """Every system's first step, for nothing but that it was done."""
        _, setting = self._setting()
        for system in systems:
            self._started(system, setting, Result(system.name, system.compiled))
        gc.collect()
        torch._dynamo.reset()

    def _setting(self) -> tuple[Data, Setting]:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        replicas = self.args.replicas
        shape = (replicas, ranks // replicas)[replicas == 1 :]
        names = ("replicate", "shard")[replicas == 1 :]
        data = Data(self.model, ranks, self.args.scale, self.device)
        return data, Setting(
            mesh=init_device_mesh(self.device.type, shape, mesh_dim_names=names),
            device=self.device,
            units=self.model.blocks,
            dtype=DTYPES[self.dtype],
            batch=data.batch(0, rank),
            hardware=self.args.hardware,
        )

    def _started(self, system: System, setting: Setting, result: Result) -> Trained | None:
        """The system after its first step, or None with the reason in `result`."""
        model = made(self.model, self.device)
        trained: Trained | None = None

        def first() -> Tensor:
            nonlocal trained
            trained = system.build(setting, model)
            return trained.step(setting.batch)

        if system.compiled:
            fresh_caches(self.folder)
        try:
            result.first, loss = harness.seconds(first, self.device)
            result.losses.append(loss.item())
        except Exception as error:  # whatever another system raises is its reason
            said = str(error).strip().partition("\n")[0]
            result.why_not = f"{type(error).__name__}: {said}"[:160]
        reasons: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, result.why_not)
        result.why_not = next(filter(None, reasons), "")
        return None if result.why_not else trained

    def _watch(self, result: Result, trained: Trained, setting: Setting) -> None:
        watch = watched(result, trained, setting)
        if result.compiled and self.device.type == "cpu":
            peaks = []
            for _ in range(WATCHED):
                gc.collect()
                dist.barrier()
                standing = watch.current
                peaks.append(standing + most_allocated(lambda: trained.step(setting.batch)))
            result.peak = int(median(peaks[1:]))
        if result.compiled:
            result.transient = None


def watched(result: Result, trained: Trained, setting: Setting) -> StepWatch:
    """Count the memory of a few steps, of which `result` gets the median."""
    watch = StepWatch(setting.device.type)
    watch.add([trained.kept(), setting.batch])
    peaks, transients = [], []
    for _ in range(WATCHED):
        gc.collect()
        dist.barrier()
        base = cuda_bytes(setting.device, reset=True)
        with watch:
            trained.step(setting.batch, lambda: watch.end_of_backward(trained.module.parameters()))
        above = cuda_bytes(setting.device) - base
        peaks.append(watch.peak if setting.device.type == "cpu" else watch.current + above)
        transients.append(watch.transient)
    result.peak, result.transient = int(median(peaks[1:])), int(median(transients[1:]))
    return watch


def cuda_bytes(device: torch.device, reset: bool = False) -> int:
    """On CUDA the most bytes allocated since the last reset, or those now and a reset."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def fresh_caches(folder: str) -> None:
    """Let compilers keep what they make in a new folder under `folder`, the same on all ranks."""
    from torch._inductor.utils import clear_caches

    made = [tempfile.mkdtemp(dir=folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = made[0]
    clear_caches()


def share(result: Result, device: torch.device) -> None:
    """Every figure of `result` as that of the worst rank, on all ranks."""
    transient = -1 if result.transient is None else result.transient
    own = [result.first, result.peak, transient, result.gap, *result.times]
    result.first, peak, most, result.gap, *result.times = harness.worst_rank(own, device)
    result.peak, result.transient = int(peak), None if most < 0 else int(most)


# -- tables and verdicts ---------------------------------------------------------------------------

HEAD = (
    f"{'':23} {'first':>7} {'step':>9}  {'eager/ [quartiles]':>18}  {'inductor/':>18} "
    f"{'peak':>8} {'transient':>9} {'loss':>8}"
)


def table(results: Sequence[Result]) -> str:
    """A row per system; below it why those that are not in it are not."""
    by_name = {result.system: result for result in results if not result.why_not}
    lines = [HEAD]
    for result in by_name.values():
        transient = "-" if result.transient is None else f"{mib(result.transient):9.2f}"
        lines.append(
            f"{result.system:23} {result.first:5.1f} s {median(result.times) * 1e3:6.1f} ms  "
            f"{_against(by_name.get(OURS), result)}  "
            f"{_against(by_name.get(OURS_COMPILED), result)} "
            f"{mib(result.peak):8.2f} {transient:>9} {result.gap:8.1e}"
        )
    lines += [f"not here: {r.system}: {r.why_not}" for r in results if r.why_not]
    return "\n".join(lines)


def _against(ours: Result | None, theirs: Result) -> str:
    if ours is None or ours is theirs:
        return " " * 18
    found = harness.ratios(ours.times, theirs.times)
    low, high = found[0], found[0]
    if len(found) > 1:
        low, _, high = quantiles(found, n=4, method="inclusive")
    return f"{median(found):.3f} [{low:.2f} {high:.2f}]"


def mib(size: float) -> float:
    return size / 2**20


PAIRS = (
    (OURS, FSDP2),
    (OURS_OVERLAP, FSDP2),
    (OURS_COMPILED, FSDP2_BLOCKS),
    (OURS_COMPILED, FSDP2_WHOLE),
)


def ratios(results: Sequence[Result]) -> Iterator[str]:
    """A line for each of ours beside its rival: every figure as a part of the rival's."""
    at = {result.system: result for result in results if not result.why_not}
    for ours, theirs in ((at[a], at[b]) for a, b in PAIRS if a in at and b in at):
        step = median(harness.ratios(ours.times, theirs.times))
        first = ours.first / theirs.first
        yield f"step {step:.3f}, first {first:.3f}, {memory_ratio(ours, theirs)}"


def memory_ratio(ours: Result, theirs: Result) -> str:
    said = f"peak {ours.peak / theirs.peak:.3f}"
    if ours.transient is not None and theirs.transient is not None:
        said += f", transient {ours.transient / max(1, theirs.transient):.3f}"
    return f"{said}: {ours.system}, of {theirs.system}'s"


# -- memory of one rank of many --------------------------------------------------------------------

HEAVY = Model("gpt-heavy", gpt(6, 1024, 8, dropout=0.0), ("Block",), gpt_tokens(1, 32))
"""78 M parameters in blocks of 12.6 M, a root of 2 M, and 32 tokens: parameters outweigh
activations."""

BY_COST: dict[str, dict[str, Any]] = {
    "cpu-gloo": {"hardware": "cpu-gloo"},
    "h100-sxm": {"hardware": "h100-sxm"},
    "h100-sxm, in 140 MiB": {"hardware": "h100-sxm", "memory_budget": 140 << 20},
}
"""The hardware the cost-based order is made for; the fake group is neither kind."""


def on_one_of(ranks: int, model: Model) -> None:
    """Print the memory of one rank of `ranks`: what it allocates is real, what it computes not."""
    harness.fake_ranks(ranks)
    device = torch.device("cpu")
    batch = Data(model, ranks, 1, device).batch(0, 0)
    setting = Setting(init_device_mesh("cpu", (ranks,)), device, model.blocks, None, batch)
    systems = [system for system in SYSTEMS if system.name in (OURS, FSDP2)]
    for name, fields in BY_COST.items():
        step = partial(graphshard_step, schedule="overlap", **fields)
        systems.append(System(f"{OURS} overlap, {name}", step))
    print(f"{model.name}, one rank of {ranks}\n\n{'':40} {'peak MiB':>10} {'transient MiB':>14}")
    found: dict[str, Result] = {}
    for system in systems:
        trained = system.build(setting, made(model, device))
        trained.step(batch)
        result = found[system.name] = Result(system.name, compiled=False)
        watched(result, trained, setting)
        print(
            f"{system.name:40} {mib(result.peak):10.2f} {mib(result.transient):14.2f}", flush=True
        )
    theirs = found.pop(FSDP2)
    print("\n" + "\n".join(memory_ratio(result, theirs) for result in found.values()))
    dist.destroy_process_group()


# -- all of them -----------------------------------------------------------------------------------


def chosen(args: argparse.Namespace) -> list[System]:
    words = [word.lower() for word in args.systems or ()]
    asked = [s for s in SYSTEMS if any(word in s.name.lower() for word in words)]
    named = asked if words else [s for s in SYSTEMS if s.name not in (ALONE, MESSAGES)]
    return [s for s in named if not (args.eager and s.compiled)]


def run(args: argparse.Namespace, device: torch.device, folder: str) -> None:
    systems = chosen(args)
    torch._dynamo.config.recompile_limit = 64  # one function may be several systems'
    Case(TOY, args.dtypes[0], args, device, folder).first_steps(systems)
    begin = time.perf_counter()
    for model in [model for model in (*RIVALS, TINY) if model.name in args.models]:
        for dtype in args.dtypes:
            results = Case(model, dtype, args, device, folder).run(systems)
            if dist.get_rank() == 0:
                head = f"\n{model.name} {dtype}"
                print(head, table(results), *ratios(results), sep="\n", flush=True)
    if dist.get_rank() == 0:
        print(
            f"\n{dist.get_world_size()} ranks of {args.threads} thread(s), {dist.get_backend()}, "
            f"{args.pairs} pairs, torch {torch.__version__}, "
            f"{time.perf_counter() - begin:.0f} s in all"
        )


def main() -> None:
    args = parse_args()
    if args.fake:
        torch.set_num_threads(args.threads)
        on_one_of(args.fake, TINY if args.models == [TINY.name] else HEAVY)
        return
    with (
        harness.started_by_torchrun(args.device, args.threads) as device,
        tempfile.TemporaryDirectory(prefix="rivals") as folder,
    ):
        run(args, device, folder)


if __name__ == "__main__":
    main()
