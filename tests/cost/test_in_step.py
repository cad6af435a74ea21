"""Operators as long as in a trace of real steps."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from traces import estimate, trace_steps

import graphshard
from graphshard import Hardware
from graphshard.cli.main import main
from graphshard.cost.against_trace import is_compute
from graphshard.cost.estimate import Estimate
from graphshard.errors import CostError
from graphshard.program.program import BACKWARD, FORWARD


def trace_of(estimate: Estimate, times: float, folder: Path, steps: int = 3) -> Path:
    """A trace whose kernels take `times` as long as predicted, and twice that in its first step."""
    at, program = estimate.timeline.at, estimate.program
    place_of = {node: place for place, node in enumerate(program.graph.nodes)}
    events: list[Any] = []
    clock = 0.0

    def add(name: str, category: str, begin: float, end: float, thread: int, **args: Any) -> None:
        place = {"pid": 1, "tid": thread, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
        events.append({"ph": "X", "name": name, "cat": category, "args": args} | place)

    for step in range(steps):
        slower = times * (2 if step == 0 else 1)
        for thread, phase in enumerate((FORWARD, BACKWARD), 1):
            begin = clock
            clock += 1e-6
            for event, nodes in program.timeline():
                if event.phase != phase:
                    continue
                start = clock
                clock += 2e-6
                add(event.name, "cpu_op", start, clock, thread)
                places = [place_of[node] for node in nodes]
                took = sum(at[place] - (at[place - 1] if place else 0.0) for place in places)
                if is_compute(event.name) and took:
                    number = len(events)
                    launched = start + 1e-6
                    add("launch", "cuda_runtime", launched, launched, thread, correlation=number)
                    where = {"correlation": number, "stream": 7, "device": 0}
                    add("gemm", "kernel", launched, launched + slower * took, 99, **where)
            add(f"graphshard {phase}", "cpu_op", begin, clock, thread)
            clock += 1e-3
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def without_device(path: Path) -> Path:
    """The same trace without its kernels, as of a CPU."""
    data = json.loads(path.read_text())
    on_host = [event for event in data["traceEvents"] if event["cat"] == "cpu_op"]
    path.write_text(json.dumps({"traceEvents": on_host}))
    return path


@pytest.mark.parametrize("times", [0.9, 1.0, 1.25])
def test_compute_takes_as_long_as_in_the_trace(times: float, tmp_path: Path) -> None:
    mine = estimate()
    like = graphshard.like_trace(mine, trace_of(mine, times, tmp_path))
    # What collectives take from operators beside them is in the trace, and does not grow.
    assert like.factor == pytest.approx(times, rel=0.01)
    assert like.estimate.hardware.in_step == mine.hardware.in_step * like.factor
    assert like.steps == 3
    assert like.before is mine
    assert like.measured == pytest.approx(times * like.predicted, rel=1e-6)
    again = graphshard.like_trace(like.estimate, tmp_path / "trace.json")
    assert again.factor == pytest.approx(1.0, rel=1e-3)
    assert again.estimate.hardware.in_step == pytest.approx(
        like.estimate.hardware.in_step, rel=1e-3
    )
    assert like.estimate.communication_seconds == pytest.approx(mine.communication_seconds)
    assert f"operators take {like.factor:.3f} times as long as predicted: in 3 steps" in str(like)


def test_a_step_as_in_a_trace_is_expected_about_its_prediction(tmp_path: Path) -> None:
    mine = estimate()
    like = graphshard.like_trace(mine, trace_of(mine, 1.1, tmp_path)).estimate
    pair, (least, most) = 1 + mine.hardware.pair_spread, mine.hardware.spread
    measured = graphshard.like_trace(mine, tmp_path / "trace.json").measured
    rest = like.step_seconds - measured  # collectives and the optimizer, which it says nothing of
    low, high = like.step_range
    assert 0 < rest < like.step_seconds
    assert low == pytest.approx(measured / pair + least * rest, rel=1e-3)
    assert high == pytest.approx(measured * pair + most * rest, rel=1e-3)
    assert low < like.step_seconds < high
    exact = mine.with_hardware(mine.hardware.with_(spread=(1.0, 1.0)))  # a machine without errors
    again = graphshard.like_trace(exact, tmp_path / "trace.json").estimate
    assert again.hardware.spread == (1.0, 1.0)


def test_a_trace_of_the_host_says_nothing_of_a_gpu(tmp_path: Path) -> None:
    path = without_device(trace_of(estimate(), 1.0, tmp_path))
    with pytest.raises(CostError, match="shows no kernels of a device, and h100-sxm is a GPU"):
        graphshard.like_trace(estimate(), path)


def test_a_trace_of_a_gpu_says_nothing_of_a_host(tmp_path: Path) -> None:
    path = trace_of(estimate(), 1.0, tmp_path)
    with pytest.raises(CostError, match="shows kernels of a device, and cpu-gloo is a CPU"):
        graphshard.like_trace(estimate().with_hardware("cpu-gloo"), path)


@pytest.mark.parametrize("times", [0.3, 5.0])
def test_a_factor_that_is_hardly_of_operators_alone_is_doubted(
    times: float, tmp_path: Path
) -> None:
    like = graphshard.like_trace(estimate(), trace_of(estimate(), times, tmp_path))
    assert like.doubt
    assert like.doubt in str(like)
    assert like.to_dict()["doubt"] == like.doubt
    for said in ("recompute", "inputs", "busy"):
        assert said in like.doubt
    usual = graphshard.like_trace(estimate(), trace_of(estimate(), 1.2, tmp_path))
    assert usual.doubt == usual.to_dict()["doubt"] == ""


def test_a_trace_of_few_ranks_serves_many(tmp_path: Path) -> None:
    path = trace_of(estimate(2), 1.5, tmp_path)
    many = estimate(64, backward_prefetch="post")
    assert graphshard.like_trace(many, path).factor == pytest.approx(1.5, rel=0.05)


def test_other_units_are_refused(tmp_path: Path) -> None:
    path = trace_of(estimate(layers=2), 1.0, tmp_path)
    with pytest.raises(CostError, match=r"it has no blocks\.2 compute forward; give the model"):
        graphshard.like_trace(estimate(layers=3), path)
    with pytest.raises(CostError, match=r"the program has no blocks\.1 compute forward"):
        graphshard.like_trace(estimate(layers=1), path)


def test_longer_operators_never_make_a_shorter_step() -> None:
    mine = estimate()
    seconds = [
        mine.with_hardware(mine.hardware.with_(in_step=times)).step_seconds
        for times in (0.5, 1.0, 1.1, 2.0)
    ]
    assert all(before < after for before, after in pairwise(seconds))


@pytest.mark.parametrize("wrong", [0, -1.0, "2", None])
def test_a_wrong_factor_is_named(wrong: Any) -> None:
    with pytest.raises(CostError, match="in_step must be a positive number"):
        Hardware.load("h100-sxm").with_(in_step=wrong)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _, of_model = trace_steps(tmp_path)
    arguments = ["simulate", *of_model, "--world-size", "4"]
    assert main([*arguments, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--like", "trace.json.gz", "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    factor = after["like"]["factor"]
    assert after["hardware"]["in_step"] == pytest.approx(factor)
    assert (after["step_seconds"] > before["step_seconds"]) == (factor > 1)
    assert main([*arguments, "--like", "trace.json.gz"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("operators take ")
    assert "in 3 steps of trace.json.gz" in text
    assert main([*arguments, "--like", "none.json"]) == 2
    assert "none.json" in capsys.readouterr().err
