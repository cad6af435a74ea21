"""Predicted against published training runs, from presets and what is known of each run alone.

    python examples/benchmarks/literature.py                 # all runs: minutes
    python examples/benchmarks/literature.py tt- ibm-h100    # those whose name begins so
    python examples/benchmarks/literature.py --processes 2

`literature.json` has the runs. Each is captured on the meta device, as `literature_models.py` has
it, and simulated on a preset with the bandwidths and the power that its source names. No constant
is set for a single run; what the frameworks do besides a step's program (`beside`) follows from
their sources. TFLOP/s count recomputation as work: at 159 TFLOP/s counted so, 300 G tokens take 128
GPUs 240 days, which is what their authors say. The README says the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks import harness
from examples.benchmarks import literature_models as models
from examples.benchmarks.benchmark_models import t5
from graphshard.capture.entry import capture
from graphshard.cost.estimate import Estimate
from graphshard.hardware.hardware import Hardware
from graphshard.passes.accumulate import GRADIENT
from graphshard.passes.split_gathers import SplitGathers
from graphshard.passes.split_reduces import SplitReduces
from graphshard.pipeline import backend_passes, passes_for, passes_of, run_passes
from graphshard.planning.plan import ShardingPlan
from graphshard.program.collective import REDUCED, Mode
from graphshard.program.program import Program

DATA = Path(__file__).with_name("literature.json")
GIB = 1 << 30


@cache
def data() -> dict[str, Any]:
    contents: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return contents


@dataclass(frozen=True)
class Run:
    """One published run; the names of `model` and `machine` are those of `literature.json`.

    batch: sequences of a GPU and micro-batch. length: tokens of a sequence. accumulation:
    micro-batches of a step; with `no_sync` all but the last keep their full gradients. recompute:
    "none", "blocks", "every 2nd block", "1/3 of blocks", "by operator" (torchtitan's policy), or
    "units". compiled: by torch.compile: "nothing", "blocks", "model" (without the loss), or
    "blocks and loss". allocator: PYTORCH_CUDA_ALLOC_CONF, where it was set. clips: gradients are
    clipped by their norm. reshard_root: the root's parameters are freed after forward, too.
    metrics: Composer takes cross entropy and perplexity of each micro-batch. holds_outputs: the
    loop's variable holds what the model returned, its loss included, during the next forward.
    """

    id: str
    model: str
    machine: str
    gpus: int
    batch: int
    length: int
    accumulation: int
    strategy: str
    shards: str
    gathers: str
    reduces: str
    recompute: str
    attention: str
    optimizer: str
    framework: str
    published: dict[str, Any]
    source: str
    allocator: str = ""
    clips: bool = False
    compiled: str = "nothing"
    offload: str | None = None
    metrics: bool = False
    no_sync: bool = False
    holds_outputs: bool = False
    reshard_root: bool = False
    notes: str = ""

    @property
    def mesh(self) -> tuple[int, ...]:
        """The ranks, or for the HYBRID strategies the nodes of 8 and their ranks."""
        return (self.gpus // 8, 8) if self.strategy.startswith("HYBRID") else (self.gpus,)


def runs(names: Sequence[str] = ("",)) -> list[Run]:
    """The published runs whose names begin with one of `names`."""
    every = (Run(**entry) for entry in data()["runs"])
    return [run for run in every if run.id.startswith(tuple(names))]


# -- from a run to a plan --------------------------------------------------------------------------


def machine(run: Run) -> Hardware:
    """The hardware of `run`: a preset, with what its source says of the machine."""
    entry = dict(data()["machines"][run.machine])
    preset = Hardware.load(entry.pop("preset"))
    entry.pop("source")
    if "memory_gib" in entry:
        entry["memory_bytes"] = int(entry.pop("memory_gib") * GIB)
    if run.attention != "math":
        entry["attention_kernel"] = run.attention
    known = {field.name for field in fields(Hardware)}
    return preset.with_(**{name: value for name, value in entry.items() if name in known})


def recomputed_blocks(how: str, blocks: int) -> tuple[str, ...]:
    if how == "by operator":
        return ("op",) * blocks
    if how == "every 2nd block":
        return tuple("full" if block % 2 else "none" for block in range(blocks))
    if how.endswith(" of blocks"):
        return models.spread_evenly(float(Fraction(how.removesuffix(" of blocks"))), blocks)
    return ("full" if how == "blocks" else "none",) * blocks


def model_of(run: Run) -> tuple[nn.Module, str]:
    """The model of `run` on the meta device, and the class of its units."""
    sizes = dict(data()["models"][run.model])
    kind, blocks = sizes.pop("kind"), int(sizes["blocks"])
    recompute = recomputed_blocks(run.recompute, blocks)
    with torch.device("meta"):
        if kind == "llama":
            model: nn.Module = models.Llama(models.LlamaSizes(**sizes), run.length, recompute)
            block = "LlamaBlock"
        elif kind == "mpt":
            width, heads, words = (sizes[name] for name in ("width", "heads", "vocabulary"))
            model = models.MPT(width, heads, run.length, recompute, words)
            block = "MPTBlock"
        else:
            model = models.MinGPT(run.length, blocks, sizes["width"], sizes["heads"])
            block = "MinGPTBlock"
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, run.shards))
        return model, block


@dataclass(frozen=True)
class Captured:
    """The model of a run and its micro-batch as captured, which several runs may share."""

    model: nn.Module
    block: str
    program: Program


def policy_of(run: Run, block: str) -> graphshard.BlockPolicy:
    gathers, reduces = (getattr(torch, name) for name in (run.gathers, run.reduces))
    return graphshard.BlockPolicy(
        [block],
        strategy=run.strategy,
        mixed_precision=graphshard.MixedPrecision(gathers, reduces),
        recompute="units" if run.recompute == "units" else None,
        offload=run.offload,
        forward_prefetch=1,
        merge_below=0,
        reshard_root=run.reshard_root,
    )


def capture_key(run: Run) -> tuple[Any, ...]:
    """What tells captured micro-batches apart; the name of the model comes first."""
    return (run.model, run.batch, run.length, run.recompute, run.shards, run.gathers, run.reduces)


def capture_of(run: Run) -> Captured:
    model, block = model_of(run)
    precisions = graphshard.plan(model, policy_of(run, block), mesh_shape=run.mesh).precisions
    tokens = torch.zeros(run.batch, run.length, dtype=torch.int64, device="meta")
    program = capture(model, (tokens, tokens), device="cuda", precisions=precisions).program
    return Captured(model, block, program)


def plans_of(run: Run, captured: Captured) -> list[tuple[int, ShardingPlan]]:
    """The plans with programs of the micro-batches of a step, and how often each runs."""
    backend = "eager" if run.compiled == "nothing" else "inductor"
    plan = graphshard.plan(
        captured.model,
        policy_of(run, captured.block),
        world_size=run.gpus,
        mesh_shape=run.mesh,
        backend=backend,
    )
    finer = (SplitGathers, SplitReduces)  # the published runs moved whole units
    passes = [each for each in passes_of(plan) if not isinstance(each, finer)]
    passes += backend_passes(backend)
    modes: list[tuple[int, Mode]] = [(run.accumulation, REDUCED)]
    if run.no_sync:
        names = tuple(param.fqn for param in captured.program.params)
        modes = [(run.accumulation - 1, (GRADIENT, (), ())), (1, (None, names, ()))]
    plans = []
    for times, mode in modes:
        program = captured.program.copy()
        program.stale = plan.stale_after_step
        run_passes(program, plan, passes_for(passes, mode))
        plans.append((times, replace(plan, program=program)))
    return plans


# -- prediction ------------------------------------------------------------------------------------


def beside(run: Run, plan: ShardingPlan, hardware: Hardware) -> float:
    """Seconds of a step that the run's framework took for work besides the program.

    All of it streams memory. FSDP2 copies gradients into one buffer (where they are reduced in
    another dtype, that cast is in the program; copies of what it gathers are in the estimate).
    FSDP1 concatenates the gradients of a unit, in the backward of the split that made its
    parameters views. Clipping reads gradients for their norm, and reads and writes them to scale
    them. Composer's metrics cast logits to float32 and take log-softmax of them, twice.
    """
    layouts = {id(layout): layout for layout in plan.layouts.values()}.values()
    gathered = getattr(torch, run.gathers).itemsize * sum(layout.numel for layout in layouts)
    moved = 0.0
    if run.framework == "FSDP1":
        moved += 2 * gathered * run.accumulation
    elif run.gathers == run.reduces:
        moved += 2 * gathered
    if run.clips:
        moved += 3 * sum(layout.shard_bytes for layout in layouts)
    if run.metrics:
        logits = run.batch * run.length * data()["models"][run.model]["vocabulary"]
        moved += 2 * (2 + 4 + 4 + 4) * logits * run.accumulation
    return moved / (hardware.memory_bandwidth * hardware.efficiency["bandwidth"])


@dataclass(frozen=True)
class Found:
    """What was predicted of a step: seconds, FLOPs of a GPU, and bytes.

    alone: seconds if operators took as long within the step as one by one (an `in_step` of 1).
    in_step: `Hardware.in_step` of the machine. allocated, reserved: the most that torch's allocator
    has in use and takes from the device. device: all that is taken of it.
    """

    seconds: float
    alone: float
    in_step: float
    flops: float
    allocated: float
    reserved: float
    device: float


def found_of(run: Run, captured: Captured) -> Found:
    hardware = machine(run)
    plans = plans_of(run, captured)
    estimates: list[tuple[int, Estimate]] = [
        (
            times,
            graphshard.simulate(
                plan,
                hardware=hardware,
                optimizer=run.optimizer,
                allocator=run.allocator,
                runtime="fsdp2" if run.framework == "FSDP2" else "graphshard",
                leave_eager={"blocks": [""], "model": ["loss"]}.get(run.compiled, []),
                holds_outputs=run.holds_outputs,
            ),
        )
        for times, plan in plans
    ]
    besides = beside(run, plans[-1][1], hardware) + hardware.step_overhead

    def seconds(each: list[tuple[int, Estimate]]) -> float:
        steps = sum(times * estimate.timeline.seconds for times, estimate in each)
        return steps + each[-1][1].optimizer_seconds + besides

    one_by_one = hardware.with_(in_step=1.0)
    every = [estimate for _, estimate in estimates]
    return Found(
        seconds(estimates),
        seconds([(times, estimate.with_hardware(one_by_one)) for times, estimate in estimates]),
        hardware.in_step,
        sum(times * estimate.flops for times, estimate in estimates),
        max(estimate.reserved.allocated for estimate in every),
        max(estimate.reserved.bytes for estimate in every),
        max(estimate.device_bytes for estimate in every),
    )


@dataclass(frozen=True)
class Row:
    """A run and its prediction: tokens a second of a GPU, or its TFLOP/s."""

    run: Run
    found: Found

    @property
    def published(self) -> float:
        return self.run.published.get("tokens_per_s") or self.run.published["tflops"]

    @property
    def predicted(self) -> float:
        run, work = self.run, self.found.flops / 1e12
        if "tokens_per_s" in run.published:
            work = run.batch * run.length * run.accumulation
        return work / self.found.seconds

    @property
    def error(self) -> float:
        """The error of the speed, as a fraction of the published one."""
        return self.predicted / self.published - 1

    @property
    def origin(self) -> str:
        """Who published it: runs of one origin may be off for one reason."""
        return self.run.id.partition("-")[0]

    @property
    def fits(self) -> bool:
        return self.found.device <= machine(self.run).memory_bytes

    def error_at(self, in_step: float) -> float:
        """The error with another `Hardware.in_step`, as seconds grow with it in proportion."""
        seconds, alone = self.found.seconds, self.found.alone
        if self.found.in_step == 1.0:
            return self.error
        more = (seconds - alone) / (self.found.in_step - 1)
        return (self.error + 1) * seconds / (alone + (in_step - 1) * more) - 1

    @property
    def memory_error(self) -> float | None:
        """The error of the memory, as a fraction of the published one, if there is any."""
        known = self.run.published
        if "memory_gib" not in known:
            return None
        return getattr(self.found, known["memory_is"]) / GIB / known["memory_gib"] - 1

    def __str__(self) -> str:
        known, found = self.run.published, self.found
        memory = f"{found.allocated / GIB:.1f} allocated, {found.reserved / GIB:.1f} reserved"
        if self.memory_error is not None:
            memory += f"; published: {known['memory_gib']:.1f} {known['memory_is']}"
            memory += f" ({self.memory_error:+.0%})"
        memory += "" if self.fits else "; **does not fit**"
        unit = "" if "tokens_per_s" in known else " TFLOP/s"
        return (
            f"| {setting(self.run)} | {self.published:,.0f}{unit} | {self.predicted:,.0f} | "
            f"{self.error:+.1%} | {memory} |"
        )


def setting(run: Run) -> str:
    micro = f" x {run.accumulation}" if run.accumulation > 1 else ""
    words = [
        f"{run.model}, {run.gpus} x {run.machine}: {run.batch} x {run.length}{micro}",
        *([] if run.strategy == "FULL_SHARD" else [run.strategy]),
        *([] if run.recompute == "none" else [f"recompute {run.recompute}"]),
        *([] if run.compiled == "nothing" else [f"compiled {run.compiled}"]),
        *([] if run.offload is None else [f"offload {run.offload}"]),
        run.attention,
    ]
    return "; ".join(words)


def predicted(chosen: Sequence[Run]) -> list[Row]:
    """The rows of runs that share a capture."""
    torch.set_num_threads(1)
    captured = capture_of(chosen[0])
    return [Row(run, found_of(run, captured)) for run in chosen]


def t5_scaling() -> tuple[float, float]:
    """How much less a GPU does at 512 than at 8, for T5-11B: as published, and as predicted."""
    with torch.device("meta"):
        model = t5(1024, 128, 65_536, 24, 128)()
    tokens = torch.zeros(8, 512, dtype=torch.int64)
    bf16 = graphshard.MixedPrecision(torch.bfloat16, torch.bfloat16)
    policy = graphshard.BlockPolicy(
        ["T5Block"], mixed_precision=bf16, recompute="units", forward_prefetch=1, merge_below=0
    )
    few, many = (
        graphshard.simulate(
            model,
            policy=policy,
            hardware="a100-80gb",
            world_size=ranks,
            example_kwargs={"input_ids": tokens, "labels": tokens},
        ).step_seconds
        for ranks in (8, 512)
    )
    return -0.07, few / many - 1


# -- shown -----------------------------------------------------------------------------------------


def all_rows(chosen: Sequence[Run], processes: int) -> list[Row]:
    """The rows of runs, in their order; those that share a capture are predicted together."""
    together: dict[tuple[Any, ...], list[Run]] = {}
    for run in chosen:
        together.setdefault(capture_key(run), []).append(run)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        rows = [row for found in pool.map(predicted, together.values()) for row in found]
    return sorted(rows, key=lambda row: chosen.index(row.run))


def fitted_in_step(rows: Sequence[Row]) -> float:
    """The `Hardware.in_step` by which the median error of `rows` is none, to two digits."""
    steps = [1 + step / 100 for step in range(31)]
    return min(steps, key=lambda each: abs(median(row.error_at(each) for row in rows)))


def held_out(rows: Sequence[Row]) -> list[float]:
    """The error of each row with the `in_step` fitted to the rows of all other origins."""
    factors = {
        origin: fitted_in_step([row for row in rows if row.origin != origin])
        for origin in {row.origin for row in rows}
    }
    return [row.error_at(factors[row.origin]) for row in rows]


def spread(errors: Sequence[float]) -> str:
    within = (sum(abs(error) <= part for error in errors) for part in (0.15, 0.20))
    return "median |error| {:.1%}, bias {:+.1%}, {} within 15 %, {} within 20 %".format(
        median(map(abs, errors)), mean(errors), *within
    )


def summary(rows: Sequence[Row]) -> Iterator[str]:
    fit = sum(row.fits for row in rows)
    errors = spread([row.error for row in rows])
    yield f"{len(rows)} runs: {errors}; {fit} predicted to fit; all did"
    yield f"operators as fast as one by one: {spread([row.error_at(1.0) for row in rows])}"
    yield f"in_step by which the median error is none: {fitted_in_step(rows):.2f}"
    if len({row.origin for row in rows}) > 1:
        yield f"with that of all other origins: {spread(held_out(rows))}"
    for kind in ("allocated", "reserved"):
        found = [row.memory_error for row in rows if row.run.published.get("memory_is") == kind]
        if found:
            yield f"memory {kind}: " + ", ".join(f"{error:+.0%}" for error in found)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("names", nargs="*", help="how the names of runs begin; all if none")
    parser.add_argument("--processes", type=int, default=1, help="that share the runs (1)")
    args = parser.parse_args()
    names = tuple(args.names) or ("",)
    rows = all_rows(runs(names), args.processes)
    print("| run | published | predicted | error | memory, GiB |\n|---|---|---|---|---|")
    print(*rows, sep="\n")
    if rows:
        print(*summary(rows), sep="\n")
    if "t5-11b".startswith(names):
        published, predicted = t5_scaling()
        print(
            f"T5-11B, 8 to 512 x a100-80gb, bf16, recompute, 8 x 512 (not published): "
            f"{published:+.0%} published, {predicted:+.1%} predicted"
        )


if __name__ == "__main__":
    main()
