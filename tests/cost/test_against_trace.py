"""A trace of torch.profiler beside the estimate of the program that was traced."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block, TiedGPT, tokens_of
from torch.profiler import ProfilerActivity, profile

import graphshard
from graphshard.cli.main import main
from graphshard.cost.against_trace import compare_trace, read_trace
from graphshard.errors import CostError
from graphshard.program import ops
from graphshard.program.program import BACKWARD, FORWARD, Program

# -- a trace of a small model ----------------------------------------------------------------------


POLICY = graphshard.BlockPolicy({Block}, forward_prefetch=1, merge_below=0)


FACTORY = """
from models import TiedGPT, tokens_of

def gpt():
    return TiedGPT(2), tokens_of(0, 0)
"""


def trace_steps(folder: Path) -> tuple[graphshard.ShardedModule, list[str]]:
    """Train three steps on one rank; write their trace and a factory into `folder`.

    Returns the module, and the arguments of a command on the factory under its policy. The trace is
    `trace.json.gz`.
    """
    (folder / "traced_factory.py").write_text(FACTORY)
    sharded = graphshard.compile(TiedGPT(2), POLICY)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            sharded(*tokens_of(0, 0)).backward()
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    arguments = ["traced_factory:gpt", "--policy", "block:Block", "--forward-prefetch", "1"]
    return sharded, [*arguments, "--hardware", "cpu-gloo"]


def estimate(layers: int = 2) -> graphshard.Estimate:
    """A step of the model on H100s, under that policy."""
    with torch.device("meta"):
        model = TiedGPT(layers)
    plan = graphshard.plan(model, POLICY, world_size=2, example_inputs=tokens_of(0, 0))
    return graphshard.simulate(plan, hardware="h100-sxm")


# -- tests -----------------------------------------------------------------------------------------


def us(name: str, category: str, begin: float, end: float, thread: int, **args: Any) -> Any:
    where = {"pid": 1, "tid": thread, "ts": begin, "dur": end - begin}
    return {"ph": "X", "name": name, "cat": category, "args": args} | where


class Device:
    """A trace as CUDA gives one: launches on the host's thread, kernels on two streams.

    Compute takes 30 us an event, a collective 100 us; the host takes 2 us an event.
    """

    def __init__(self, program: Program) -> None:
        self.events: list[Any] = []
        self.clock = 1000.0
        self.compute = self.network = 0.0
        self.exposed: dict[int, float] = {}
        self.ends: dict[Any, float] = {}
        timeline = list(program.timeline())
        for number, phase in enumerate((FORWARD, BACKWARD)):
            thread, begin = number + 1, self.clock
            self.clock += 1
            for place, (event, nodes) in enumerate(timeline):
                if event.phase == phase:
                    self.run(place, event.name, nodes, thread)
            self.events.append(us(f"graphshard {phase}", "cpu_op", begin, self.clock, thread))
            self.clock = self.compute = self.network = max(self.clock, self.compute) + 50

    def run(self, place: int, name: str, nodes: list[Any], thread: int) -> None:
        begin = self.clock
        self.clock += 2
        self.events.append(us(name, "cpu_op", begin, self.clock, thread))
        op = ops.op_name(nodes[0])
        if op is None:
            start = max(self.compute, begin + 1)
            self.compute = start + 30
            self.kernel("gemm", begin + 1, start, self.compute, 7, thread, place)
        elif ops.is_collective(nodes[0]):
            start = max(self.network, self.compute, begin + 1)
            self.network = self.ends[nodes[0]] = start + 100
            self.kernel("ncclDevKernel", begin + 1, start, self.network, 20, thread, place)
        elif op == "wait":
            end = self.ends[ops.collective_of(nodes[0])]
            self.exposed[place] = min(100.0, max(0.0, end - self.compute))
            self.compute = max(self.compute, end)

    def kernel(
        self, name: str, at: float, begin: float, end: float, stream: int, thread: int, number: int
    ) -> None:
        self.events.append(us("launch", "cuda_runtime", at, at + 0.5, thread, correlation=number))
        self.events.append(
            us(name, "kernel", begin, end, 99, correlation=number, stream=stream, device=0)
        )


def written(folder: Path, data: Any, name: str = "trace.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(data))
    return path


def test_kernels_belong_to_the_event_that_launched_them(tmp_path: Path) -> None:
    mine = estimate()
    device = Device(mine.program)
    trace = written(tmp_path, {"traceEvents": device.events, "distributedInfo": {"rank": 1}})
    comparison = compare_trace(mine, trace)
    assert comparison.run.on_device
    assert comparison.run.rank == 1
    for place, each in enumerate(comparison.events):
        expected = {"compute": 30.0, "communication": 100.0, "other": 0.0}.get(each.kind)
        if expected is None:
            expected = device.exposed[place]
        assert each.measured == pytest.approx(expected * 1e-6, abs=1e-9), each
    assert any(value > 0 for value in device.exposed.values())
    measured, predicted = comparison.sums("exposed")
    assert measured == pytest.approx(sum(device.exposed.values()) * 1e-6)
    assert predicted == pytest.approx(mine.timeline.seconds - comparison.sums("compute")[1])
    for kind, of_phase in (("compute", (FORWARD, BACKWARD)), ("communication", ())):
        spans = [span for span in comparison.last_step if span.on_compute == (kind == "compute")]
        assert sum(span.seconds for span in spans) == pytest.approx(comparison.sums(kind)[0])
        assert not of_phase or {span.kind for span in spans} == set(of_phase)
    text = comparison.text()
    assert "1 step of rank 1 in trace.json (kernels on the device), beside h100-sxm" in text
    assert "all communication" in text


def test_what_is_predicted_adds_up_to_the_step(tmp_path: Path) -> None:
    mine = estimate()
    trace = written(tmp_path, Device(mine.program).events)  # a bare list, as Chrome allows
    comparison = compare_trace(mine, trace)
    compute, exposed = (comparison.sums(kind)[1] for kind in ("compute", "exposed"))
    assert compute + exposed == pytest.approx(mine.timeline.seconds)
    by_unit = [comparison.sums("communication", u.fqn)[1] for u in mine.plan.units]
    assert by_unit == pytest.approx([u.communication for u in mine.units])
    data = json.loads(json.dumps(comparison.to_dict()))
    assert data["sums"]["exposed"]["predicted"] == exposed
    assert len(data["events"]) == len(mine.program.schedule())
    largest = comparison.largest[0]
    assert abs(largest.difference) == max(abs(e.difference) for e in comparison.events)


def test_a_trace_of_another_program(tmp_path: Path) -> None:
    trace = written(tmp_path, Device(estimate(layers=3).program).events)
    with pytest.raises(CostError, match=r"another program: its forward differs first at event \d+"):
        compare_trace(estimate(), trace)
    events = Device(estimate().program).events
    only_forward = [e for e in events if e["name"] != "graphshard backward"]
    with pytest.raises(CostError, match="shows no whole backward"):
        compare_trace(estimate(), written(tmp_path, only_forward))


RANGE = us("graphshard forward", "cpu_op", 0.0, 1.0, 1)

NO_TRACES: list[tuple[bytes, str]] = [
    (b"", "it is no JSON"),
    (b"\x1f\x8b\x08 cut off", "cannot be read"),
    (gzip.compress(b"{", mtime=0)[:-9], "cannot be read"),
    (b"\xff\xfe", "it is no JSON"),
    (b'{"traceEvents": [', "it is no JSON"),
    (b"[" * 100_000, "it is no JSON"),
    (b"3", "no list `traceEvents`"),
    (b'{"traceEvents": {}}', "no list `traceEvents`"),
    (b'{"traceEvents": [{"ph": "X", "name": [], "ts": {}, "dur": "x"}, 7, null]}', "shows no"),
    (json.dumps([RANGE | {"ts": "now"}]).encode(), "shows no forward or backward"),
    (json.dumps([RANGE | {"ts": float("nan")}]).encode(), "shows no forward or backward"),
    (json.dumps([RANGE | {"ts": 10**400}]).encode(), "shows no forward or backward"),
    (json.dumps([RANGE | {"args": [1], "cat": 3}]).encode(), "another program|no whole backward"),
    (json.dumps([RANGE, RANGE | {"cat": "kernel", "args": {"correlation": []}}]).encode(), "diff"),
]


@pytest.mark.parametrize(("raw", "said"), NO_TRACES)
def test_files_that_are_no_trace(raw: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(raw)
    with pytest.raises(CostError, match=said) as caught:
        compare_trace(estimate(), path)
    assert "trace.json" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CostError, match=r"none\.json cannot be read: .*No such file"):
        read_trace(tmp_path / "none.json")


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sharded, of_model = trace_steps(tmp_path)
    arguments = ["compare-trace", *of_model, "--trace", "trace.json.gz", "--world-size", "1"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "3 steps in trace.json.gz (the host's time, no device), beside cpu-gloo" in text
    for line in (
        "forward and backward",
        "exposed communication",
        "blocks.1",
        "largest differences",
    ):
        assert line in text
    assert main([*arguments, "--json", "--events"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["steps"] == 3
    names = [event["name"] for event in data["events"]]
    assert names == [event.name for event in sharded.program.schedule()]
    twice = [*arguments, "--events", "--trace", "trace.json.gz", "trace.json.gz"]
    assert main([*twice, "--json"]) == 0
    assert [each["steps"] for each in json.loads(capsys.readouterr().out)] == [3, 3]
    assert main([*twice, "--plot", "steps.svg"]) == 0
    assert capsys.readouterr().out.count("blocks.1 all_gather backward") == 2
    drawn = Path("steps.svg").read_text()
    for row in (
        "predicted: compute",
        "trace.json.gz: compute",
        "trace.json.gz: all_gather",
        "compute waits",
    ):
        assert row in drawn
    Path("trace.json.gz").write_text("no trace")
    assert main(arguments) == 2
    assert "is no trace of torch.profiler" in capsys.readouterr().err
