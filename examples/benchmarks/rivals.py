"""graphshard beside every other system that shards: the same model, data and units, step by step.

    torchrun --nproc-per-node 2 examples/benchmarks/rivals.py              # Gloo, the CPU
    torchrun --nproc-per-node 8 examples/benchmarks/rivals.py --device cuda --scale 16
    python examples/benchmarks/rivals.py --fake 8       # memory of one rank of 8, in one process

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
              communication buffers (step_watch.py says how they are known; not known in compiled
              code)
    issued    collectives in a step; MiB a rank receives for them
    loss      the largest difference from a single process's in the first steps

Memory is counted in steps of their own, which are not timed. Before anything is timed every system
has trained a toy of a single linear layer in the same process: so none pays, in its first step, for
what a process needs once (imports, torch's tables of decompositions and patterns, checks of the C++
compiler and its headers), whichever comes first. Compilers begin with an empty cache on disk each
time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from examples.benchmarks.benchmark_models import Model
from examples.benchmarks.live_bytes import most_allocated
from examples.benchmarks.rival_models import MODELS, TINY, TOY, Data, expected_losses, made
from examples.benchmarks.rival_systems import SYSTEMS, Setting, System, Trained
from examples.benchmarks.rival_table import bars, table
from examples.benchmarks.step_watch import StepWatch

DTYPES = {"fp32": None, "bf16": torch.bfloat16}
WATCHED = 4  # steps of which memory is counted; the first does not count


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=[*names, TINY.name], default=names)
    parser.add_argument("--dtypes", nargs="+", choices=[*DTYPES], default=[*DTYPES])
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="words in their names")
    parser.add_argument("--eager", action="store_true", help="no system that compiles")
    parser.add_argument("--pairs", type=int, default=30, help="timed rounds")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before, besides the first")
    parser.add_argument("--scale", type=int, default=1, help="of batches")
    parser.add_argument("--threads", type=int, default=1, help="per rank on a CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--hardware", metavar="FILE", help="what our overlap is timed on")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--errors", action="store_true", help="print whole tracebacks")
    parser.add_argument("--fake", type=int, metavar="RANKS", help="memory of one rank of so many")
    return parser.parse_args()


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
    collectives: int = 0
    moved: int = 0
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
        """All systems, side by side."""
        rank = dist.get_rank()
        data, setting = self._setting()
        checked = 1 + self.args.warmup
        expected = expected_losses(data, checked, rank, DTYPES[self.dtype])
        results = [Result(system.name, system.compiled) for system in systems]
        running: list[tuple[Result, Trained]] = []
        for system, result in zip(systems, results, strict=True):
            trained = self._started(system, setting, result)
            if trained is not None:
                running.append((result, trained))
        gc.collect()
        gc.freeze()  # so that collecting garbage before each step takes no time
        for index in range(self.args.warmup + self.args.pairs):
            batch = data.batch(1 + index, rank)
            for result, trained in in_turn(running, index):
                gc.collect()  # not in the middle of somebody's step
                took, loss = seconds(lambda t=trained, b=batch: t.step(b), self.device)
                result.losses.append(loss.item())
                if index >= self.args.warmup:
                    result.times.append(took)
        for result, trained in running:
            self._watch(result, trained, setting)
            pairs = zip(result.losses, expected, strict=False)
            result.gap = max(abs(loss - there) for loss, there in pairs)
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
        data = Data(self.model, ranks, self.args.scale, self.device)
        return data, Setting(
            mesh=init_device_mesh(self.device.type, (ranks,)),
            device=self.device,
            units=self.model.blocks,
            dtype=DTYPES[self.dtype],
            batch=data.batch(0, rank),
            hardware=self.args.hardware,
        )

    def _started(self, system: System, setting: Setting, result: Result) -> Trained | None:
        """The system after its first step, or None with the reason in `result`."""
        result.why_not = system.why_not(setting)
        if result.why_not:
            return None
        model = made(self.model, self.device)
        trained: Trained | None = None

        def first() -> Tensor:
            nonlocal trained
            trained = system.build(setting, model)
            return trained.step(setting.batch)

        if system.compiled:
            fresh_caches(self.folder)
        try:
            result.first, loss = seconds(first, self.device)
            result.losses.append(loss.item())
        except Exception as error:  # whatever another system raises is its reason
            result.why_not = brief(error)
            if self.args.errors and dist.get_rank() == 0:
                traceback.print_exc()
        reasons: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, result.why_not)
        result.why_not = next(filter(None, reasons), "")
        return None if result.why_not else trained

    def _watch(self, result: Result, trained: Trained, setting: Setting) -> None:
        """Count memory and communication of a few steps; of memory the median."""
        watch = StepWatch(dist.get_world_size(), self.device.type)
        watch.add([trained.kept(), setting.batch])
        peaks, transients = [], []
        for _ in range(WATCHED):
            gc.collect()
            dist.barrier()
            base = cuda_bytes(self.device, reset=True)
            with watch:
                trained.step(setting.batch, lambda: watch.end_of_backward(trained.parameters))
            above = cuda_bytes(self.device) - base
            peaks.append(watch.peak if self.device.type == "cpu" else watch.current + above)
            transients.append(watch.transient)
        if result.compiled and self.device.type == "cpu":
            peaks = []
            for _ in range(WATCHED):
                gc.collect()
                dist.barrier()
                standing = watch.current
                peaks.append(standing + most_allocated(lambda: trained.step(setting.batch)))
        result.peak = int(median(peaks[1:]))
        result.transient = None if result.compiled else int(median(transients[1:]))
        result.moved = watch.moved
        issued = trained.collectives  # on Gloo ours are messages between peers
        result.collectives = sum(watch.calls.values()) if issued is None else issued


def in_turn(running: Sequence[Any], index: int) -> list[Any]:
    """All of `running` in the order of round `index`: turned, and reversed each other time."""
    turn = index // 2 % max(1, len(running))
    turned = [*running[turn:], *running[:turn]]
    return turned[::-1] if index % 2 else turned


def seconds(work: Callable[[], Tensor], device: torch.device) -> tuple[float, Tensor]:
    """Seconds of `work` from a common start until this rank's device is done."""
    dist.barrier()
    begin = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


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


def brief(error: Exception) -> str:
    """The first line of what was raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def share(result: Result, device: torch.device) -> None:
    """Every figure of `result` as that of the worst rank, on all ranks."""
    transient = -1 if result.transient is None else result.transient
    own = [result.first, result.peak, transient, result.moved, result.gap, *result.times]
    tensor = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    first, peak, most, moved, gap, *result.times = tensor.tolist()
    result.first, result.gap = first, gap
    result.peak, result.moved = int(peak), int(moved)
    result.transient = None if most < 0 else int(most)


# -- all of them -----------------------------------------------------------------------------------


def chosen(args: argparse.Namespace) -> list[System]:
    """The systems asked for, in the order of the table."""
    words = args.systems
    named = [s for s in SYSTEMS if not words or any(w.lower() in s.name.lower() for w in words)]
    return [s for s in named if not (args.eager and s.compiled)]


def run(args: argparse.Namespace, device: torch.device, folder: str) -> None:
    systems = chosen(args)
    torch._dynamo.config.recompile_limit = 64  # one function may be several systems'
    Case(TOY, args.dtypes[0], args, device, folder).first_steps(systems)
    found: dict[str, list[Result]] = {}
    verdicts = []
    begin = time.perf_counter()
    for model in [model for model in (*MODELS, TINY) if model.name in args.models]:
        for dtype in args.dtypes:
            results = Case(model, dtype, args, device, folder).run(systems)
            if dist.get_rank() == 0:
                name = f"{model.name} {dtype}"
                found[name] = results
                print(f"\n{name}\n{table(results)}", flush=True)
                verdicts += [f"{name:16} {line}" for line in bars(results)]
    if dist.get_rank() == 0:
        print("\n" + "\n".join(verdicts))
        print(
            f"\n{dist.get_world_size()} ranks of {args.threads} thread(s), {dist.get_backend()}, "
            f"{args.pairs} pairs, torch {torch.__version__}, "
            f"{time.perf_counter() - begin:.0f} s in all"
        )
        if args.json is not None:
            plain = {name: [asdict(r) for r in results] for name, results in found.items()}
            args.json.write_text(json.dumps(plain))


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    if args.fake:
        from examples.benchmarks.rivals_fake import HEAVY, compare

        compare(args.fake, args.device, TINY if args.models == [TINY.name] else HEAVY)
        return
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    with tempfile.TemporaryDirectory(prefix="rivals") as folder:
        run(args, device, folder)
    gc.collect()  # nothing refers to the group any more: its threads end before the interpreter
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
