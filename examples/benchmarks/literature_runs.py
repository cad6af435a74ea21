"""The published runs of `literature.json`, and their plans.

Each is captured whole on the meta device, for CUDA, as `literature_models.py` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphshard
from examples.benchmarks import literature_models as models
from graphshard.capture.entry import capture
from graphshard.hardware.hardware import Hardware
from graphshard.passes.accumulate import GRADIENT
from graphshard.pipeline import backend_passes, passes_of, run_passes
from graphshard.planning.plan import ShardingPlan
from graphshard.program.program import Program
from graphshard.runtime.accumulated import REDUCED, Mode, passes_for

DATA = Path(__file__).with_name("literature.json")
GIB = 1 << 30


@cache
def data() -> dict[str, Any]:
    """The contents of `literature.json`."""
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
    """What each block computes again in backward, by the field `recompute` of a run."""
    if how == "by operator":
        return ("op",) * blocks
    if how == "every 2nd block":
        return tuple("full" if block % 2 else "none" for block in range(blocks))
    if how.endswith(" of blocks"):
        return models.spread_evenly(float(Fraction(how.removesuffix(" of blocks"))), blocks)
    return ("full" if how == "blocks" else "none",) * blocks


def depth_of(run: Run) -> int:
    """The number of blocks of the model of `run`."""
    return int(data()["models"][run.model]["blocks"])


def model_of(run: Run, blocks: int) -> tuple[nn.Module, str]:
    """The model of `run` on the meta device with `blocks` blocks, and the class of its units."""
    sizes = {**data()["models"][run.model], "blocks": blocks}
    kind = sizes.pop("kind")
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
    """The policy of `run`, for a model whose units are of the class `block`."""
    gathers, reduces = (getattr(torch, name) for name in (run.gathers, run.reduces))
    return graphshard.BlockPolicy(
        [block],
        strategy=run.strategy,
        mixed_precision=graphshard.MixedPrecision(gathers, reduces),
        recompute="units" if run.recompute == "units" else None,
        offload=run.offload,
        forward_prefetch=1,
        reshard_root=run.reshard_root,
    )


def capture_key(run: Run) -> tuple[Any, ...]:
    """What tells captured micro-batches apart; the name of the model comes first."""
    return (run.model, run.batch, run.length, run.recompute, run.shards, run.gathers, run.reduces)


def capture_of(run: Run, blocks: int) -> Captured:
    """The captured micro-batch of `run`, of a model of `blocks` blocks."""
    model, block = model_of(run, blocks)
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
    passes = (*passes_of(plan), *backend_passes(backend))
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
