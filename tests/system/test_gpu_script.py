"""benchmarks/gpu.py, but for what a GPU does: its table, its processes, its stand-in group."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks

from examples.benchmarks import (
    gpu,
    gpu_checks,
    gpu_results,
    gpu_rivals,
    gpu_trace,
    stress,
)
from examples.benchmarks.gpu_cases import CASES
from examples.benchmarks.gpu_nothing import Counted, NoGroup, nothing_moves
from examples.benchmarks.gpu_rivals import TINY, layers_that_fit, load_for, load_with
from examples.benchmarks.gpu_table import Place, Row, Section, read_rows, run_apart, run_here, table
from examples.benchmarks.stand_in import Communicator, StandIn, modelled
from graphshard.errors import RuntimeStateError
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


def test_each_part_fits_into_one_call() -> None:
    assert gpu.BUDGET <= 560
    for part in gpu.PARTS.values():
        assert sum(section.limit for section in part) <= gpu.BUDGET
    names = [section.name for section in gpu.SECTIONS]
    assert len(names) == len(set(names)) == sum(map(len, gpu.PARTS.values()))
    assert [s.name for s in gpu.chosen("", "2")] == [s.name for s in gpu.PARTS["2"]]


def test_what_is_known_is_kept_after_each_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpu.json"
    kept: list[set[str]] = []

    def run(section: Section, command: list[str], out: Path, limit: float) -> list[Row]:
        kept.append(set(json.loads(file.read_text())["sections"]) if file.exists() else set())
        return [Row(section.name, "one | two", "<1>", ok=section.name != "graph")]

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
        return gpu.main()

    monkeypatch.setattr(gpu, "run_apart", run)
    assert call("--device", "cpu", "--only", "parity,graph", "--save", str(file)) == 1
    assert kept == [set(), {"parity"}]
    assert "1 failed" in capsys.readouterr().out
    assert call("--device", "cpu", "--only", "stress", "--save", str(file)) == 0
    results = json.loads(file.read_text())
    assert list(results["sections"]) == ["parity", "graph", "stress"], "earlier ones stay"
    assert Row(**results["sections"]["graph"]["rows"][0]).ok is False
    table_of = file.with_suffix(".md").read_text()
    assert table_of == gpu_results.markdown(results)
    assert f"torch {torch.__version__}" in table_of
    assert "1 of 3 checks failed" in table_of
    assert "| graph | one \\| two | &lt;1> |  | FAILED |" in table_of
    late = ["--device", "cpu", "--only", "trace", "--budget", "1", "--save", str(file)]
    assert call(*late) == 1
    assert "no time left" in file.read_text()
    changed = json.loads(file.read_text()) | {"machine": {"device": "another"}}
    file.write_text(json.dumps(changed))
    assert call("--device", "cpu", "--only", "stress", "--save", str(file)) == 0
    assert list(json.loads(file.read_text())["sections"]) == ["stress"], "of one machine"
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{gpu_results.BEGIN}\nold\n{gpu_results.END}\nbelow\n")
    with pytest.raises(ValueError, match="was not measured on a GPU"):
        call("--save", str(file), "--include", str(readme))
    results["machine"] |= {"device": "1 x a GPU", "driver": "580.1"}
    file.write_text(json.dumps(results))
    assert call("--save", str(file), "--include", str(readme)) == 0
    text = readme.read_text()
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert gpu_results.markdown(results) in text
    assert "1 x a GPU" in text
    assert "driver 580.1" in text
    with pytest.raises(SystemExit, match="--include needs the results"):
        call("--include", str(readme))
    with pytest.raises(ValueError, match="once each"):
        gpu_results.included("", file)


def test_the_readme_has_the_table_as_it_is_or_says_that_there_is_none() -> None:
    folder = Path(gpu.__file__).parent
    text, file = (folder / "README.md").read_text(), folder / "gpu.json"
    assert gpu_results.included(text, file) == text
    assert ("Not run on a GPU" in text) is not file.exists()


def test_the_driver_is_told_where_it_can_be(tmp_path: Path) -> None:
    assert gpu_results.driver("no-such-program") == "unknown"
    for said, expected in (("echo 580.65.06", "580.65.06"), ("exit 3", "unknown")):
        program = tmp_path / expected
        program.write_text(f"#!/bin/sh\n{said}\n")
        program.chmod(0o755)
        assert gpu_results.driver(str(program)) == expected


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


def test_the_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu_results, "driver", lambda: "580.65")
    said = gpu_results.heading(gpu_results.machine("cuda"))
    assert said.startswith("1 x NVIDIA H100, torch ")
    assert said.endswith("driver 580.65, CUDA 13.0, NCCL 2.28.9")


def test_rivals_are_compared_like_with_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(system: str, load: Any, place: Place) -> gpu_rivals.Measured:
        if system == "fsdp2 compile":
            raise RuntimeError("no compiler")
        assert load.config.layers == gpu_rivals.MOST_LAYERS
        ours = system.startswith("graphshard")
        peak, gathered = (9, 11) if ours else (10, 10)
        seconds = 0.9 if ours else 1.0
        return gpu_rivals.Measured(system, 2.0, seconds, peak, 1, int(ours), gathered, 10)

    memory = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(gpu_rivals, "layers_that_fit", lambda load, most: 30)
    monkeypatch.setattr(gpu_rivals, "_apart", measured)
    rows = list(gpu_rivals.rivals(Place(torch.device("cuda", 0), False, tmp_path)))
    told = [(row.check.strip(), row.ok) for row in rows]
    assert ("moved between ranks", None) in told
    assert ("fsdp2 compile", False) in told
    assert told.count(("peak, of fsdp2 eager", True)) == 2
    assert told.count(("step, of fsdp2 eager", True)) == 2
    assert told.count(("of fsdp2 eager's", False)) == 2, "it would move a tenth more"
    assert not any("fsdp2 compile" in check for check, ok in told if ok is not False)
    assert told.count(("num_alloc_retries", False)) == 3


def nothing_is_moved(rank: int) -> list[tuple[int, int]]:
    """Bytes that a step of `fully_shard` and one of ours would move."""
    torch.distributed.destroy_process_group()
    gpu_checks.fake_ranks(gpu_rivals.WORLD)
    load = load_for(small=True)
    found = []
    for system in ("fsdp2 eager", "graphshard eager"):
        one = gpu_rivals.measure(system, load, CPU, steps=1)
        found.append((one.gathered, one.reduced))
    return found


def test_both_sides_move_nothing_and_would_move_the_same() -> None:
    ((theirs, ours),) = run_ranks(nothing_is_moved, 1)
    assert ours == theirs
    assert min(ours) > 0
    counted = Counted()
    group = NoGroup(counted)
    whole = torch.full((4,), 7.0)
    assert group.allgather_into_tensor_coalesced([whole], [torch.ones(1)]).wait()
    group.reduce_scatter_tensor_coalesced([whole[:1]], [torch.ones(4)])
    group.allreduce([torch.ones(2)])
    assert whole.tolist() == [7, 7, 7, 7]
    assert (counted.gathered, counted.reduced) == (16, 24)
    with pytest.raises(AssertionError, match="neither"):
        nothing_moves(torch.nn.Linear(2, 2))


# -- all of it -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [section.name for section in gpu.SECTIONS])
def test_a_cpu_runs_every_section(name: str, tmp_path: Path) -> None:
    """So that on a GPU, which is rarely at hand, only what a GPU does can fail."""
    file = tmp_path / "gpu.json"
    command = [sys.executable, gpu.__file__, "--device", "cpu", "--small", "--only", name]
    ended = subprocess.run(
        [*command, "--save", str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
    rows = gpu_results.rows_of(json.loads(file.read_text()))
    assert {row.section for row in rows} == {name}
    assert len(rows) > 1
    if name == "ranks":
        assert set(CASES) <= {row.check.strip() for row in rows if row.ok}


class CudaPlace(Place):
    """A CPU that passes for a GPU: the lines for GPUs run, with `torch.cuda` made up."""

    cuda = True


class Recorded:
    """A recorder of graphs that does what it records."""

    def __init__(self, device: torch.device) -> None:
        pass

    def capture(self, run: Any, args: list[Any]) -> tuple[Any, Any]:
        result = run(args)
        if result is None:
            raise RuntimeStateError("nothing was captured")
        return SimpleNamespace(replay=lambda: result.copy_(run(args))), result


def as_on_cuda(rank: int) -> dict[str, list[Row]]:
    """The rows of each section of one process, as on a GPU."""
    cuda = torch.cuda
    asked = itertools.count(1)

    def memory_stats() -> dict[str, int]:
        now = next(asked) << 20
        of_all = {"requested_bytes.all.current": now, "requested_bytes.all.peak": 2 * now}
        return {**of_all, "num_alloc_retries": 0}

    entry = {"action": "alloc", "size": 512, "addr": 4096}
    made_up: dict[str, Any] = {
        "synchronize": lambda device=None: None,
        "memory_stats": memory_stats,
        "reset_peak_memory_stats": lambda: None,
        "memory_reserved": lambda: 3 << 20,
        "empty_cache": lambda: None,
        "set_sync_debug_mode": lambda mode: None,
        "device_count": lambda: 1,
        "is_available": lambda: False,  # which torch of CUDA would answer by the count
        "current_device": lambda: 0,
    }
    for name, function in made_up.items():
        setattr(cuda, name, function)
    cuda.memory._record_memory_history = lambda **given: None  # type: ignore[assignment]
    cuda.memory._snapshot = lambda: {"device_traces": [[entry]]}  # type: ignore[assignment]
    torch.autograd.profiler.emit_nvtx = nullcontext  # type: ignore[assignment, misc]
    gpu_checks.Recorder = Recorded  # type: ignore[assignment, misc]
    found: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = CudaPlace(CPU, True, Path(folder))
        for check in (gpu_checks.parity, gpu_checks.stress, gpu_checks.graph, gpu_trace.traced,
                      gpu_checks.calibrated, gpu_checks.predict, gpu_checks.overlap):  # fmt: skip
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            found[check.__name__] = list(check(place))
    return found


@pytest.mark.slow
def test_lines_for_gpus_run_on_a_cpu_that_passes_for_one() -> None:
    (found,) = run_ranks(as_on_cuda, 1, timeout=500)
    said = {row.check: row for rows in found.values() for row in rows}
    assert said["allocator, FULL_SHARD"].found == "the same addresses from step 1 on"
    assert said["a step in which the host waits is an error"].ok
    assert said["a capture of nothing"].ok
    assert said["a capture on cpu:0, with cuda:0 current"].ok
    assert said["kept by libraries, not counted below"].found.endswith(".0 MiB")
    assert said["num_alloc_retries"].ok
    assert said["kernels on the device"].ok is False, "there are none"
    assert said["overlap hides as much or more"].ok is None, "toys say nothing of time"
