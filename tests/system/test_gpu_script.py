"""benchmarks/gpu.py, but for what a GPU does: its table, its processes, its stand-in group."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from examples.benchmarks import gpu, gpu_checks, gpu_rivals, stress
from examples.benchmarks.gpu_rivals import TINY, layers_that_fit, load_for, load_with
from examples.benchmarks.gpu_table import Place, Row, Section, read_rows, run_apart, run_here, table
from examples.benchmarks.stand_in import Communicator, StandIn, modelled
from graphshard.hardware.hardware import Hardware
from graphshard.runtime.gather import AllGather, Gathered

CPU = torch.device("cpu")


def test_list_names_every_section(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--list"])
    assert gpu.main() == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [s.name for s in gpu.SECTIONS]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", "parity"])
    assert gpu.main() == 2
    assert "torch finds no GPU here" in capsys.readouterr().err


def test_a_section_that_is_not_there() -> None:
    assert [section.name for section in gpu.chosen("stress,parity")] == ["parity", "stress"]
    with pytest.raises(SystemExit, match="there is no section graphs"):
        gpu.chosen("parity,graphs")


def test_table_names_each_section_once() -> None:
    rows = [Row("a", "one", "1", "2", True), Row("a", "two", "3", ok=False), Row("b", "c", "d")]
    lines = table(rows).splitlines()
    assert lines[2].split() == ["a", "one", "1", "2", "ok"]
    assert lines[3].split() == ["two", "3", "FAILED"]
    assert lines[4].split() == ["b", "c", "d"]


def test_numbers_that_are_none_fail() -> None:
    nan = torch.tensor(float("nan"))
    good = {"w": torch.ones(3), "v": torch.ones(2)}
    bad = {**good, "v": torch.full((2,), float("nan"))}
    one = torch.tensor(1.0)
    assert gpu_checks.close("x", "", one, one, good, good).found == "bit-equal"
    assert gpu_checks.close("x", "", nan, one, good, good).ok is False
    assert gpu_checks.close("x", "", one, one, bad, good).ok is False
    assert gpu_checks.close("x", "", one, one, good, bad).ok is False
    assert gpu_checks.gap_of(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == 0.1


def test_what_is_known_is_kept_after_each_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "table.txt"
    kept: list[str] = []

    def run(section: Section, command: list[str], out: Path, limit: float) -> list[Row]:
        kept.append(file.read_text() if file.exists() else "")
        return [Row(section.name, "one", "1", ok=section.name != "graph")]

    monkeypatch.setattr(gpu, "run_apart", run)
    arguments = ["gpu.py", "--device", "cpu", "--only", "parity,graph", "--save", str(file)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert gpu.main() == 1
    assert kept[0] == ""
    assert "parity" in kept[1]
    assert "1 failed" in file.read_text()
    assert capsys.readouterr().out.endswith(file.read_text())
    lines = (tmp_path / "table.txt.jsonl").read_text().splitlines()
    assert [Row(**json.loads(line)).section for line in lines] == ["parity", "graph"]


def apart(code: str, folder: Path, limit: float = 60.0) -> list[Row]:
    section = Section("x", "", limit, lambda place: iter(()))
    return run_apart(section, [sys.executable, "-c", code], folder / "x.jsonl", limit)


def test_a_section_that_fails_is_a_line(tmp_path: Path) -> None:
    def check(place: Place):
        yield Row("x", "first", "done")
        raise ValueError("no such thing\nmore of it")

    out = tmp_path / "x.jsonl"
    run_here(Section("x", "", 1, check), Place(CPU, True, tmp_path), out)
    assert [(row.check, row.found, row.ok) for row in read_rows(out)] == [
        ("first", "done", None),
        ("the whole section", "ValueError: no such thing", False),
    ]


def test_a_section_that_hangs_dies_or_says_nothing_is_a_line(tmp_path: Path) -> None:
    (hung, _) = apart("import time; time.sleep(600)", tmp_path, limit=1.0)
    assert (hung.found, hung.ok) == ("stopped after 1 s", False)
    (died, _) = apart("import os; os._exit(3)", tmp_path)
    assert (died.found, died.ok) == ("ended with code 3", False)
    (silent, took) = apart("", tmp_path)
    assert (silent.found, silent.ok) == ("no result", False)
    assert took.check == "took"


def test_layers_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    load = load_with(load_for(small=True), 6)
    assert gpu_rivals.predicted_peak(load_with(load, 1)) > 4 * 2 * 96 * 32 / 8
    monkeypatch.setattr(gpu_rivals, "predicted_peak", lambda load: 100 + 10 * load.config.layers)
    assert layers_that_fit(load, 155) == 5
    assert layers_that_fit(load, 1 << 40) == 6
    assert layers_that_fit(load, 1) == 1
    assert load_for(small=False).config.layers == 32


def test_llama_of_8b_has_its_parameters() -> None:
    from examples.llama import Llama, LlamaConfig

    with torch.device("meta"):
        model = Llama(replace(LlamaConfig(), layers=32))
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert TINY.width < 64


def test_a_stand_in_moves_what_it_can_and_takes_its_time() -> None:
    seconds = []
    communicator = Communicator(CPU, lambda op, size: 0.0)
    communicator.delay = seconds.append  # type: ignore[assignment]
    communicator.seconds_of = lambda op, size: size / 10
    group = StandIn(1, 2, communicator)
    whole, shard = torch.zeros(4), torch.tensor([1.0, 2.0])
    assert group.allgather_into_tensor_coalesced([whole], [shard]).wait()
    assert whole.tolist() == [1, 2, 1, 2]
    standing = torch.tensor([0.0, 0.0, 5.0, 6.0])
    group.allgather_into_tensor_coalesced([standing], [standing[2:]])
    assert standing.tolist() == [5, 6, 5, 6]
    part = torch.zeros(2)
    group.reduce_scatter_tensor_coalesced([part], [torch.arange(4.0)])
    assert part.tolist() == [2, 3]
    group.allreduce([part])
    assert communicator.calls[-2:] == [("reduce_scatter", 16), ("all_reduce", 8)]
    assert seconds == [1.6, 1.6, 1.6, 0.8]
    gather = modelled(Hardware.load("h100-sxm"), 8)("all_gather", 1 << 30)
    assert 1e-3 < gather < 1e-2


def stress_finds(rank: int) -> tuple[str, int, bool]:
    """What differs under stress; how many tensors were freed, and whether all were poisoned."""
    torch.distributed.destroy_process_group()
    gpu_checks.fake_ranks(4, rank=1)
    seen: list[list[bool]] = []  # by gather
    free = AllGather.free

    def watched(self: AllGather, gathered: Gathered) -> None:
        there = [tensor for tensor in gathered if tensor.untyped_storage().nbytes()]  # not released
        seen.append([bool(tensor.isnan().all()) for tensor in there])
        free(self, gathered)

    AllGather.free = watched  # type: ignore[method-assign]
    found = stress.broken(CPU, 3, seed=0, most=0.0)
    halves = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    undisturbed, disturbed = ([one for gather in half for one in gather] for half in halves)
    return found, len(disturbed), all(disturbed) and not any(undisturbed)


@pytest.mark.slow
def test_stress_on_a_cpu() -> None:
    ((found, freed, poisoned),) = run_ranks(stress_finds, 1)
    assert (found, poisoned) == ("", True)
    assert freed > 20
