"""Planning's cost: what the collector looks at meanwhile, and the verdicts of scaling.py."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import toy_programs as toys

from examples.benchmarks import scaling
from graphshard.cost.op_cost import op_cost
from graphshard.hardware.hardware import Hardware
from graphshard.schedule.clusters import ComputeTimes
from graphshard.torch_private.gc_pause import collect_only_new, pause_collections


class Cycle:
    """Refers to itself; counts those that are alive."""

    alive = 0

    def __init__(self) -> None:
        self.itself = self
        Cycle.alive += 1

    def __del__(self) -> None:
        Cycle.alive -= 1


def test_what_was_there_is_not_walked_while_passes_run_and_is_afterwards() -> None:
    gc.collect()
    Cycle()
    with collect_only_new():
        assert gc.get_freeze_count() > 0
        Cycle()
        gc.collect()
        assert Cycle.alive == 1
        with collect_only_new():
            pass
        assert gc.get_freeze_count() > 0  # of the outer one
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert Cycle.alive == 0


def test_a_heap_that_somebody_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collect_only_new():
            assert gc.get_freeze_count() <= frozen
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_collections_go_on_after_an_error() -> None:
    for paused in (collect_only_new, pause_collections):
        with pytest.raises(ZeroDivisionError), paused():
            raise ZeroDivisionError
        assert gc.get_freeze_count() == 0
        assert gc.isenabled()
    with pause_collections():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize("unit", ["", "layers.0", "layers.2", "nowhere"])
def test_work_of_others_is_all_work_between_two_places_but_a_units_own(unit: str) -> None:
    program, _ = toys.rewritten(toys.blocks)
    hardware = Hardware.load("h100-sxm")
    work = ComputeTimes(program, hardware)
    nodes = list(program.graph.nodes)
    for start in range(0, len(nodes), 7):
        for stop in range(start, len(nodes), 5):
            others = [n for n in nodes[start:stop] if str(n.meta.get("unit", "")) != unit]
            expected = sum(op_cost(n).seconds(hardware) for n in others)
            assert work.outside_unit(unit, start, stop) == pytest.approx(expected, abs=1e-11)


def rows(power: float, scale: float = 1.0) -> list[dict[str, Any]]:
    return [
        {"nodes": nodes, "seconds": {"passes": scale * (nodes / 1000) ** power}}
        for nodes in (1000, 2000, 4000, 8000, 16000)
    ]


def test_the_exponent_is_the_slope_of_the_deeper_rows() -> None:
    assert scaling.exponent(rows(1.0), "passes") == pytest.approx(1.0)
    assert scaling.exponent(rows(2.0), "passes") == pytest.approx(2.0)
    assert scaling.exponent(rows(2.0, 1e-6), "passes") == 0.0  # too short to be told
    shallow = rows(1.0)
    shallow[0]["seconds"]["passes"] *= 100
    assert scaling.exponent(shallow, "passes") == pytest.approx(1.0)


def test_flat_looks_at_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    def of(*seconds: float) -> list[dict[str, Any]]:
        return [{"seconds": dict.fromkeys(scaling.STAGES, each)} for each in seconds]

    assert scaling.flat(of(1.0, 1.2, 0.5), "ranks")
    assert not scaling.flat(of(1.0, 1.4, 1.0), "ranks")
    assert scaling.flat(of(0.001, 0.04, 0.04), "ranks")
    assert "NOT FLAT in ranks" in capsys.readouterr().out


@pytest.mark.slow
def test_first_steps_of_two_depths_are_compared() -> None:
    script = Path(scaling.__file__).with_name("first_step.py")
    asked = ["--depths", "1", "2", "--width", "32", "--ranks", "1", "--rounds", "1"]
    ran = subprocess.run(
        [sys.executable, str(script), *asked], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    rows = [line.split() for line in ran.stdout.splitlines()]
    assert [row[:2] for row in rows[1:5]] == [
        [blocks, cache] for blocks in ("1", "2") for cache in ("empty", "filled")
    ]
    assert all(float(row[2]) > 0 and float(row[4]) > 0 for row in rows[1:5])
    assert ran.stdout.count("2 blocks of 1") == 2
