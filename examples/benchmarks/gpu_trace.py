"""Names of events under torch.profiler on a GPU, and what ranks over NCCL tell of parting ways."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import graphshard
from examples.benchmarks.gpu_checks import config, fake_ranks, tokens
from examples.benchmarks.gpu_table import Place, Row
from examples.gpt import GPT, Block
from graphshard.cost.against_trace import compare_trace
from graphshard.errors import FingerprintError
from graphshard.runtime.calls import Fingerprint

_STEPS = 3


def traced(place: Place) -> Iterator[Row]:
    """A rank of four under the profiler: names in the program's order, kernels tied to them."""
    fake_ranks(4)
    torch.manual_seed(0)
    policy = graphshard.BlockPolicy({Block}, forward_prefetch=1, offload="activations")
    sharded = graphshard.compile(GPT(config(place)), policy, device=place.device)

    def step() -> None:
        sharded(*tokens(place)).backward()
        sharded.zero_grad()
        place.synchronize()

    for _ in range(2):
        step()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * place.cuda
    with profile(activities=activities) as profiler:
        for _ in range(_STEPS):
            step()
    hardware = "h100-sxm" if place.cuda else "cpu-gloo"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json.gz")
        profiler.export_chrome_trace(str(file))
        comparison = compare_trace(graphshard.simulate(sharded, hardware=hardware), file)
    expected = [event.name for event in sharded.program.schedule()]
    halves = comparison.run.halves[:2]
    found = [event.name for half in halves for event in half.events if event.name in expected]
    said = f"{len(found)} of {len(expected)} events"
    yield Row("trace", "names in the program's order", said, "all", found == expected)
    yield Row("trace", "steps", f"{comparison.steps}", f"{_STEPS}", comparison.steps == _STEPS)
    compute = [e for e in comparison.events if e.event.op == "compute" and e.predicted > 0]
    silent = [e.event.name for e in compute if not e.measured]
    yield Row("trace", "compute without time", ", ".join(silent[:3]) or "none", "none", not silent)
    if place.cuda:
        moved = [e for e in comparison.events if e.kind == "communication" and e.predicted > 0]
        still = [e.event.name for e in moved if not e.measured]
        yield Row("trace", "kernels on the device", f"{comparison.run.on_device}", "True",
                  comparison.run.on_device)  # fmt: skip
        yield Row(
            "trace", "communication without time", ", ".join(still[:3]) or "none", "none", not still
        )
        total, parts = comparison.measured_seconds, comparison.sums("compute")[0]
        parts += comparison.sums("exposed")[0]
        yield Row("trace", "compute and exposed within the step", f"{parts / total:.3f}", "<= 1.01",
                  parts <= 1.01 * total)  # fmt: skip
        with torch.autograd.profiler.emit_nvtx():
            step()
        yield Row("trace", "a step inside emit_nvtx", "ran")


def parting_said(sharded: graphshard.ShardedModule, place: Place, rank: int) -> str:
    """The error of a rank once ranks went on with different programs that all know.

    No program runs, only the comparison of what ranks begin.
    """
    agreement = sharded._graphshard.bindings.agreement
    programs = [Fingerprint((f"forward of program {number}",)) for number in (0, 1)]
    for program in (*programs, *programs):
        agreement.require(program)
    try:
        agreement.require(programs[rank % 2])
        place.synchronize()  # the device knows by now
        agreement.require(programs[0])
    except FingerprintError as error:
        return str(error)
    return "nothing"
