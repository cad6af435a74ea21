"""Calibration: fits, hardware files with what was measured, the command on one and two ranks."""

from __future__ import annotations

import argparse
import os
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from simulations import node_of

import graphshard
from graphshard.calibrate import run
from graphshard.calibrate.probes import sized_probes
from graphshard.calibrate.run import calibrate, overhead_of
from graphshard.calibrate.steps import StepSize, joined, transformer_step
from graphshard.cli import calibrate as command
from graphshard.cli.calibrate import report
from graphshard.cli.main import main
from graphshard.cost.collective_cost import GroupShape, collective_seconds, saturating_bytes
from graphshard.cost.op_cost import ELEMENTWISE, RELATIVES
from graphshard.errors import CostError
from graphshard.hardware.curves import ascending, fit_line, seconds_at
from graphshard.hardware.hardware import Hardware, preset_of
from graphshard.program import ops
from graphshard.runtime.links import Effort, Timing, Watch, measure, ring_lines

ROUGH = Effort(least=1, most=1, piece=0.0, budget=0.0)
CPU = torch.device("cpu")


# -- fits ------------------------------------------------------------------------------------------

SIZES = (2**14, 2**18, 2**21, 2**23, 2**25)


ROWS = [(1.0, count, size) for size in SIZES for count in (1, 8)]
FACTORS = st.lists(st.floats(0.98, 1.02), min_size=len(ROWS), max_size=len(ROWS))


def told(line, row):
    return sum(a * b for a, b in zip(line, row, strict=True))


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-4), st.floats(1e-11, 1e-8), FACTORS)
def test_a_line_is_found_under_noise(call, tensor, byte, noise):
    exact = [told((call, tensor, byte), row) for row in ROWS]
    found = fit_line(ROWS, [value * factor for value, factor in zip(exact, noise, strict=True)])
    assert min(found) >= 0
    for row, value in zip(ROWS, exact, strict=True):
        assert told(found, row) == pytest.approx(value, rel=0.05)


class Moved(NamedTuple):
    """What a timed collective says of itself."""

    tensors: int
    size: int
    name: str = "reduce_scatter"


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("late", [1e-3, 0.0])
def test_a_call_costs_no_less_than_a_tensor_more(ranks, late):
    call, tensor, byte = 2e-4, 1e-5, 1e-9
    moves = [Moved(tensors, size) for size in SIZES for tensors in (1, 8)]
    timings = [
        Timing([(ranks - 1) * call + m.tensors * tensor + (ranks - 1) / ranks * m.size * byte])
        for m in moves
    ]
    for move, timing in zip(moves, timings, strict=True):
        if move.tensors > 1:  # the host was busy
            timing.rounds[0] += late
    hop, tensor_found, byte_found = ring_lines(moves, timings, ranks, "")["reduce_scatter"]
    assert (ranks - 1) * hop >= tensor_found
    if not late:
        assert (hop, tensor_found, byte_found) == pytest.approx((call, tensor, byte), rel=1e-6)


@given(st.lists(st.tuples(st.floats(1, 1e12), st.floats(1e-7, 1e2)), min_size=1, max_size=8))
def test_more_never_takes_less_time_on_a_curve(points):
    curve = ascending(points)
    amounts = sorted([a for a, _ in curve] + [a * 1.7 for a, _ in curve] + [0.5])
    times = [seconds_at(curve, amount) for amount in amounts]
    for less, more in pairwise(times):
        assert less <= more * (1 + 1e-9)


def test_a_curve_passes_its_points_and_goes_on_in_proportion():
    curve = ascending([(10, 1.0), (1000, 4.0), (100, 2.0)])
    assert [seconds_at(curve, amount) for amount in (10, 100, 1000)] == [1.0, 2.0, 4.0]
    assert seconds_at(curve, 1) == 1.0
    assert seconds_at(curve, 3000) == 12.0
    assert seconds_at(curve, 31.6227766) == pytest.approx(2**0.5)


# -- hardware --------------------------------------------------------------------------------------

PLAIN = Hardware.load("h100-sxm").with_(in_step=1.0)


def test_a_curve_counts_before_the_roofline():
    from graphshard.cost.op_cost import op_cost

    product = op_cost(node_of(torch.ops.aten.mm.default, (3, 5), (5, 7)))
    measured = PLAIN.with_(curves={"matmul": [[1, 7.0]]})
    assert product.seconds(measured) == 7.0 * product.flops
    low = op_cost(node_of(torch.ops.aten.mm.default, (3, 5), (5, 7), dtype=torch.bfloat16))
    assert low.seconds(measured) == PLAIN.launch_floor, "another dtype has a curve of its own"
    gelu = op_cost(node_of(torch.ops.aten.gelu.default, (4, 6)))
    sigmoid = op_cost(node_of(torch.ops.aten.sigmoid.default, (4, 6)))
    assert gelu.seconds(measured) == PLAIN.launch_floor
    both = PLAIN.with_(curves={"gelu": [[1, 3.0], [1e9, 3.0]], "add": [[1, 2.0], [1e9, 2.0]]})
    assert gelu.seconds(both) == sigmoid.seconds(both) == 3.0
    assert op_cost(node_of(torch.ops.aten.relu.default, (4, 6))).seconds(both) == 2.0
    view = op_cost(node_of(torch.ops.aten.t.default, (3, 5)))
    assert view.seconds(both) == 0.0
    assert view.seconds(PLAIN.with_(curves={"view": [[1, 0.5]]})) == 0.5


def test_a_line_counts_before_the_ring():
    lines = {"all_gather": (1e-3, 1e-5, 1e-9), "all_gather.inter": (5e-3, 2e-5, 8e-9)}
    measured = PLAIN.with_(lines=lines)
    within = collective_seconds("all_gather", 8 * 10**9, GroupShape(8, 1), measured, tensors=3)
    assert within == pytest.approx(7e-3 + 3e-5 + 7.0)
    across = collective_seconds("all_gather", 16 * 10**9, GroupShape(16, 2), measured)
    assert across == pytest.approx(14e-3 + 5e-3 + 2e-5 + 15.0), "8 of them share the border"
    plain = collective_seconds("reduce_scatter", 10**9, GroupShape(8, 1), PLAIN)
    assert collective_seconds("reduce_scatter", 10**9, GroupShape(8, 1), measured) == plain
    enough = saturating_bytes(GroupShape(8, 1), measured, share=0.5)
    assert collective_seconds("all_gather", enough, GroupShape(8, 1), measured) > 2 * enough * 7e-10


def test_the_cpu_preset_is_a_calibration():
    hardware = Hardware.load("cpu-gloo")
    assert "graphshard calibrate" in hardware.source
    assert {"matmul", "add", "view", "attention", "convolution"} <= set(hardware.curves)
    assert {"all_gather", "reduce_scatter", "all_reduce", "adamw"} <= set(hardware.lines)
    assert hardware.contention > 0


def test_relatives_are_measured():
    measured = {probe.curve for probe in sized_probes(CPU, (), share=0.1)}
    assert set(RELATIVES.values()) | {ELEMENTWISE} <= measured


# -- measuring -------------------------------------------------------------------------------------


class Alone:
    """A single rank."""

    size = 1

    def all_gather_object(self, value):
        return [value]


class Counted:
    group, wall = "counted", True

    def __init__(self) -> None:
        self.times = 0

    def run(self, times):
        self.times += times


def test_rounds_end_when_times_agree_or_at_the_cap():
    works = [Counted(), Counted()]
    done = []
    effort = Effort(least=3, most=6, spread=1e9, piece=0.0)
    timings = measure(works, Watch(CPU), Alone(), effort, lambda: done.append(1))
    assert [len(t.rounds) for t in timings] == [3, 3]
    assert len(done) == 2 * (3 + 1)
    restless = Effort(least=3, most=6, spread=-1.0, piece=0.0)
    assert [len(t.rounds) for t in measure(works, Watch(CPU), Alone(), restless)] == [6, 6]
    late = Effort(least=3, most=6, spread=-1.0, piece=0.0, budget=0.0)
    assert [len(t.rounds) for t in measure(works, Watch(CPU), Alone(), late)] == [3, 3]


def test_what_is_timed_by_the_clock_is_timed_for_longer():
    class Stopwatch:
        most_runs = 1 << 20

        def __call__(self, benchmark, times):
            benchmark.run(times)
            return 1e-4

    by_clock, by_thread = Counted(), Counted()
    by_thread.wall = False
    effort = Effort(least=3, most=3, piece=1e-3)
    measure([by_clock, by_thread], Stopwatch(), Alone(), effort)
    assert by_thread.times == 2 + 3 * 10  # once to warm up and once to count
    assert by_clock.times == 2 + 3 * 400


def test_shots_count_as_op_cost_does():
    found = {(s.curve, s.amount) for s in sized_probes(CPU, (torch.bfloat16,), share=0.1)}
    assert ("matmul", 2 * 16**3) in found
    assert ("matmul.bfloat16", 2 * 64**3) in found
    assert ("add", 3 * 4 * 1024) in found
    assert ("grouped_mm", 2 * 64 * 256 * 512) in found
    # A grouped convolution's backward is twice its forward.
    forward = {a for c, a in found if c == "convolution.grouped"}
    assert {a for c, a in found if c == "convolution_backward.grouped"} == {2 * a for a in forward}


# -- the whole -------------------------------------------------------------------------------------


def test_the_factor_of_a_step_is_that_by_which_it_is_predicted():
    with joined(CPU) as group:
        step = transformer_step(group, StepSize(1, 64, 32, 1, 8, torch.float32))
        step.run(1)
        hardware = PLAIN.with_(device="cpu", step_overhead=1e-4)
        seconds = graphshard.simulate(step.module, hardware=hardware, optimizer="none").step_seconds
        assert step.factor(seconds, hardware) == pytest.approx(PLAIN.in_step)
        longer = step.factor(2 * seconds, hardware)
        found = graphshard.simulate(
            step.module, hardware=hardware.with_(in_step=longer), optimizer="none"
        )
    assert longer > 1.9 * PLAIN.in_step
    assert found.step_seconds == pytest.approx(2 * seconds)


def test_a_step_that_is_too_short_is_told():
    assert run._in_step_notes(0.5) == []
    (note,) = run._in_step_notes(0.3)
    assert "took 0.30 of the time of its operators" in note
    assert "in_step is held at 0.5" in note


def calibrated(rank):
    with joined(CPU) as group:
        found = calibrate(group, effort=ROUGH, dtypes=(), share=0.1)
        return found.hardware.to_dict(), report(found), [row.name for row in found.rows]


@pytest.mark.slow
def test_two_ranks_measure_their_collectives_and_agree():
    (first, text, names), (second, _, _) = run_ranks(calibrated, 2, timeout=200)
    assert first == second
    hardware = Hardware(**first)
    assert {"all_gather", "reduce_scatter", "all_reduce", "adamw", "sgd"} <= set(hardware.lines)
    assert hardware.inter_bandwidth == hardware.intra_bandwidth > 0
    assert "2 ranks" in hardware.source
    assert "the network between nodes" in hardware.source
    assert 0 <= hardware.contention <= 1
    assert hardware.in_step >= 0.5
    assert hardware.in_step != 1.0
    assert {"matmul", "all_gather", "adamw"} <= set(names)
    for said in (
        "matmul",
        "GFLOP/s",
        "all_gather",
        "a call +",
        "besides its operators",
        "one by one",
    ):
        assert said in text
    assert collective_seconds("all_gather", 2**20, GroupShape(2, 1), hardware) > 0


def test_the_command_writes_a_file_that_simulate_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "QUICK", ROUGH)
    monkeypatch.setattr(command, "_QUICK_SHARE", 0.1)
    out = tmp_path / "mine.json"
    threads = torch.get_num_threads()
    try:
        asked = ["--quick", "--device", "cpu", "--threads", "1", "--dtypes", "none"]
        links = ["--gpus-per-node", "4", "--intra-bandwidth", "300e9", "--inter-latency", "2e-5"]
        links += ["--like", "a100-80gb", "--name", "node7"]
        assert main(["calibrate", "--out", str(out), *asked, *links]) == 0
    finally:
        torch.set_num_threads(threads)
    text = capsys.readouterr().out
    assert "the network within nodes" in text
    like, mine = Hardware.load("a100-80gb"), Hardware.load(out)
    assert (mine.gpus_per_node, mine.intra_bandwidth, mine.inter_latency) == (4, 300e9, 2e-5)
    assert mine.inter_bandwidth == like.inter_bandwidth
    assert (mine.contention, mine.slowest) == (like.contention, like.slowest)
    for shape in (
        GroupShape(4, 1),
        GroupShape(4, 2),
    ):  # links reach the preset's part of their peak
        of_link = like.with_(gpus_per_node=4, intra_bandwidth=300e9, inter_latency=2e-5)
        of_link = of_link.with_(launch_floor=mine.launch_floor)
        expected = collective_seconds("all_gather", 1 << 30, shape, of_link)
        assert collective_seconds("all_gather", 1 << 30, shape, mine) == pytest.approx(expected)
    assert text.rstrip().endswith(str(out))
    hardware = Hardware.load(out)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    estimate = graphshard.simulate(
        model,
        policy=graphshard.SizePolicy(1),
        hardware=out,
        world_size=1,
        example_inputs=(torch.ones(2, 8),),
    )
    assert estimate.step_seconds > hardware.step_overhead
    # A CPU by any name: no allocator, no context, no communicators.
    assert (hardware.name, hardware.device, hardware.is_host) == ("node7", "cpu", True)
    assert (estimate.reserved, estimate.overheads) == (None, None)
    assert not hardware.overhead


def test_a_calibrated_gpu_has_the_overheads_of_its_preset_but_for_the_driver():
    base = Hardware.load("h100-sxm")
    found = overhead_of(torch.device("cuda"), base)
    assert found == {"workspace": 33_554_432, "driver": 0}  # torch finds memory without the latter
    assert overhead_of(CPU, base) == {}


def test_ranks_are_started_with_the_same_arguments(monkeypatch):
    started = []

    def start(command, env):
        started.append((command, env))
        return argparse.Namespace(returncode=0)

    monkeypatch.setattr(command.subprocess, "run", start)
    monkeypatch.delenv("RANK", raising=False)
    asked = ["calibrate", "--ranks", "2", "--device", "cpu", "--threads", "3", "--quick"]
    assert main([*asked, "--name", "mine"]) == 0
    ((line, env),) = started
    joined_line = " ".join(line)
    assert "--nproc-per-node=2 -m graphshard calibrate" in joined_line
    assert "--threads 3" in joined_line
    assert line[-3:] == ["--name", "mine", "--quick"]
    assert env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--dtypes", "int3"], "--dtypes takes bfloat16, float16, float64 or none; got 'int3'"),
        (["--like", "h1000"], "there is no hardware preset or file 'h1000'"),
        (["--ranks", "0"], "--ranks must be 1 or more"),
        (["--threads", "0", "--device", "cpu"], "--threads must be 1 or more"),
        (["--inter-bandwidth", "0"], "inter_bandwidth must be a positive number; got 0.0"),
        (["--ranks", "2", "--intra-latency", "1e-6"], "intra_latency is measured by these ranks"),
    ],
)
def test_wrong_arguments_are_named(asked, said, capsys):
    assert main(["calibrate", *asked]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path, capsys):
    assert main(["calibrate", "--out", str(tmp_path / "no" / "such.json")]) == 1
    assert "a file cannot be read or written" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(capsys):
    assert main(["calibrate", "--device", "cuda"]) == 2
    assert "there is no CUDA device here" in capsys.readouterr().err


def test_a_missing_backend_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: False)
    said = pytest.raises(CostError, match="talk over gloo, which this build of torch lacks")
    with said, joined(CPU):
        pass


def test_every_collective_takes_the_time_of_one_that_is_measured():
    from graphshard.runtime.links import OPERATIONS

    measured = {op.__name__ for op in OPERATIONS}
    assert measured == {ops.OPS[op].moves for op in ops.COLLECTIVES}


@pytest.mark.parametrize(
    ("device", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Some other GPU", "h100-sxm"),
    ],
)
def test_a_gpu_is_compared_with_the_nearest_preset(device, preset):
    assert preset_of(device) == preset
    assert Hardware.load(preset)
