"""The trace of a running program shows each event by its name, in the program's order."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block, ManyOutputs, TiedGPT, features_of, tokens_of
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import graphshard
from graphshard.cost.against_trace import compare_trace
from graphshard.errors import RuntimeStateError
from graphshard.runtime import gather
from graphshard.runtime.lowered import LoweredGraph, NamedRun


def trace_of(step: Callable[[], object], file: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    profiler.export_chrome_trace(str(file))


def names_in(file: Path) -> list[str]:
    """The ranges inside of those of a whole forward or backward, in the order of their begins."""
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("ph") == "X"]
    halves = [e for e in events if e["name"] in ("graphshard forward", "graphshard backward")]
    events.sort(key=lambda e: e["ts"])
    return [
        e["name"]
        for e in events
        if e["name"].endswith((" forward", " backward"))
        and any(
            h is not e and h["ts"] <= e["ts"] and e["ts"] + e["dur"] <= h["ts"] + h["dur"] + 1e-3
            for h in halves
        )
    ]


OFFLOADED = {"offload": ("params", "activations"), "recompute": "units"}


def require_names(**options: Any) -> list[str]:
    compiled = {k: options.pop(k) for k in ("backend", "check", "mesh") if k in options}
    sharded = graphshard.compile(
        TiedGPT(2), graphshard.BlockPolicy({Block}, merge_below=0, **options), **compiled
    )
    tokens = tokens_of(0, 0)
    sharded(*tokens).backward()
    sharded.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace_of(lambda: sharded(*tokens).backward(), file)
        names = names_in(file)
        comparison = compare_trace(graphshard.simulate(sharded, hardware="cpu-gloo"), file)
    assert names == [event.name for event in sharded.program.schedule()]
    assert comparison.steps == 1
    assert comparison.run.rank == torch.distributed.get_rank()
    measured = [e for e in comparison.events if e.measured is not None]
    assert all(e.measured > 0 for e in measured)
    assert {e.kind for e in comparison.events if e.measured is None} == {"communication"}
    spans = comparison.last_step
    ends = {round(s.start + s.seconds, 9) for s in spans if s.kind == "compute waits"}
    assert ends == {round(s.start + s.seconds, 9) for s in spans if not s.on_compute}
    assert {s.kind for s in spans if not s.on_compute} >= {"all_gather", "reduce_scatter"}
    return names


class Names:
    """A check that a module of these `options` shows its events, and among them those `shown`."""

    def __init__(self, name: str, *shown: str, **options: Any) -> None:
        self.__name__, self.shown, self.options = name, shown, options

    def __call__(self, rank: int) -> None:
        options = self.options
        if options.get("mesh"):
            mesh = init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicate", "shard"))
            options = options | {"mesh": mesh}
        names = require_names(**options)
        assert names[:2] == ["(root) all_gather forward", "(root) wait forward"] or self.options
        assert set(self.shown) <= set(names)


QUICK = [
    Names("plain", "blocks.0 free forward", "blocks.1 compute backward", "blocks.0 wait backward"),
    Names("offload", "blocks.1 to_device forward", "blocks.1 arrive backward", **OFFLOADED),
    Names("replicas", "blocks.0 all_reduce backward", strategy="HYBRID_SHARD", mesh=(2, 1)),
]
WIDE = [
    Names("regions", backend="inductor"),
    Names("offload in regions", backend="inductor", **OFFLOADED),
    Names("checking mode", check=True, forward_prefetch=1),
    Names("by cost", schedule="overlap"),
    Names("zero1", strategy="SHARD_OPTIMIZER"),
    Names("check_finite", check_finite="error"),
]


def names_of_micro_batches_and_of_some_outputs(rank: int) -> None:
    """Programs that accumulate, and a backward that is made when it is first needed."""
    sharded = graphshard.compile(TiedGPT(1), graphshard.BlockPolicy({Block}, merge_below=0))
    several = graphshard.compile(ManyOutputs(), graphshard.BlockPolicy({nn.Linear}, merge_below=0))

    def step() -> None:
        with sharded.no_sync():
            sharded(*tokens_of(rank, 0)).backward()
        sharded(*tokens_of(rank, 0)).backward()
        several(*features_of(0, 0, 6))["loss"].sum().backward()

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace_of(step, file)
        names = names_in(file)
    programs = [*sharded.programs]
    expected = [event.name for program in programs for event in program.schedule()]
    assert names[: len(expected)] == expected
    assert "blocks.0 accumulate_grad backward" in expected
    assert "left reduce_scatter backward" in names[len(expected) :]


def a_range_ends_where_a_half_fails(rank: int) -> None:
    sharded = graphshard.compile(TiedGPT(2), graphshard.BlockPolicy({Block}, merge_below=0))
    tokens = tokens_of(0, 0)
    sharded(*tokens)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder) / "trace.json"

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeStateError("on purpose")

        def step() -> None:
            with torch.profiler.record_function("after"):
                pass

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            patch.setattr(gather, "release_for", fail)
            with pytest.raises(RuntimeStateError, match="on purpose"):
                sharded(*tokens)
            step()
        profiler.export_chrome_trace(str(file))
        events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("ph") == "X"]
    after = next(e for e in events if e["name"] == "after")
    named = [e for e in events if e["name"].endswith(" forward")]
    assert any(e["name"] == "blocks.0 free forward" for e in named)
    assert all(e["ts"] + e["dur"] <= after["ts"] for e in named)


def without_a_profiler_there_are_no_names(rank: int) -> None:
    sharded = graphshard.compile(TiedGPT(1), graphshard.BlockPolicy({Block}, merge_below=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NamedRun, "__init__", None)  # fails if it is made
        sharded(*tokens_of(0, 0)).backward()
        patch.setattr(LoweredGraph, "_named_run", lambda graph, args: graph._run(args))
        with profile(activities=[ProfilerActivity.CPU]):
            sharded(*tokens_of(0, 0)).backward()


OTHERS = [
    names_of_micro_batches_and_of_some_outputs,
    a_range_ends_where_a_half_fails,
    without_a_profiler_there_are_no_names,
]

test_on_two_ranks = on_ranks([*QUICK, *OTHERS], 2)
test_more_on_two_ranks = pytest.mark.slow(on_ranks(WIDE, 2))
