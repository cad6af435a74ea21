"""The sections of benchmarks/gpu.py that start several ranks, but for what a GPU does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from examples.benchmarks import gpu_graph_ranks, gpu_ranks
from examples.benchmarks.gpu_cases import Told
from examples.benchmarks.gpu_table import Place

CPU = torch.device("cpu")


def test_numbers_apart_are_a_failed_line() -> None:
    near, far = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 2.1])}
    nan = {"w": torch.tensor([1.0, float("nan")])}
    assert gpu_ranks.gap(near, near) == 0
    assert gpu_ranks.gap(far, near) == pytest.approx(0.1 / 5**0.5)
    assert gpu_ranks.gap(nan, near) == gpu_ranks.gap({}, near) == float("inf")
    good, bad = Told(near, near, note="x", ok=True), Told(far, near, note="y", ok=False)
    assert [row.ok for row in gpu_ranks.rows_of("case", [good, good])] == [True, True]
    rows = list(gpu_ranks.rows_of("case", [good, bad]))
    assert [(row.found, row.ok) for row in rows] == [("within 4.5e-02", False), ("y", False)]
    (row,) = gpu_ranks.rows_of("case", [Told(note="no verdict")])
    assert row.ok is None


class Others:
    """Ranks over Gloo that told this."""

    def __init__(self, *results: tuple[str, list[Told] | str]) -> None:
        self.told, self.killed = results, False

    def results(self):
        yield from self.told

    def kill(self) -> None:
        self.killed = True


def test_nccl_is_held_against_gloo() -> None:
    near, far = Told({"w": torch.ones(3)}), Told({"w": torch.full((3,), 1.1)})
    gloo = Others(("a", [near, near]), ("b", [near, far]), ("c", [near]), ("d", "rank 1: gone"))
    found = {"a": [near, near], "b": [near, near], "d": [near]}
    rows = list(gpu_ranks.beside_gloo(found, gloo))
    assert [(row.check, row.ok) for row in rows] == [
        ("a, NCCL as Gloo", True),
        ("b, NCCL as Gloo", False),
        ("d, over Gloo", False),
    ]
    assert gloo.killed


def test_what_nccl_said_is_found(tmp_path: Path) -> None:
    (tmp_path / "ranks1").mkdir()
    (tmp_path / "ranks1" / "nccl.7").write_text("host:1 [0] NCCL WARN no\nNCCL INFO yes\n")
    assert gpu_ranks.nccl_said(tmp_path) == ["no"]


class Started(Others):
    """Ranks that a fake starts: over NCCL the first case fails, and others run the rest."""

    groups: ClassVar[list[tuple[str, list[str]]]] = []

    def __init__(self, place: Place, names: list[str]) -> None:
        self.groups.append((place.device.type, list(names)))
        told = Told({"w": torch.ones(3)}, {"w": torch.ones(3)})
        results: list[tuple[str, Any]] = [(name, [told, told]) for name in names]
        self.failed = place.cuda and names[0] == "FULL_SHARD"
        if self.failed:
            results = [("FULL_SHARD", "rank 1 ended with code 1")]
        super().__init__(*results)

    def end(self) -> str:
        return "code 0"


def test_on_gpus_gloo_runs_beside_and_failures_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_ranks, "Ranks", Started)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    Started.groups.clear()
    (tmp_path / "nccl.7").write_text("host:1 [0] NCCL WARN no route\n")
    place = Place(torch.device("cuda", 0), True, tmp_path)
    rows = {row.check: row for row in gpu_ranks.ranks(place)}
    assert [(kind, names[0]) for kind, names in Started.groups] == [
        ("cpu", "FULL_SHARD"),
        ("cuda", "FULL_SHARD"),
        ("cuda", "SHARD_GRAD_OP"),
    ]
    assert not set(gpu_ranks.ON_GPUS_ONLY) & set(Started.groups[0][1])
    assert rows["ranks"].found == "4 over NCCL on shared GPUs"
    assert rows["NCCL said"].found == "no route"
    assert rows["FULL_SHARD"].ok is False
    assert rows["SHARD_OPTIMIZER, NCCL as Gloo"].ok
    assert "FULL_SHARD, NCCL as Gloo" not in rows
    assert gpu_ranks.number_of_ranks(place) == (2, True)
    monkeypatch.setattr(gpu_ranks, "STARTS", 1)
    (*_, more) = (row for row in gpu_ranks.ranks(place) if row.check.endswith("more cases"))
    assert more.ok is False


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_ranks_of_nccl_share_gpus_as_if_each_had_a_host(
    devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[Any] = []
    monkeypatch.setattr(gpu_ranks.os, "environ", {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch, "empty", lambda *shape, device: None)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *args, **given: groups.append((args, given))
    )
    alone = devices < 4
    found = gpu_ranks.join(3, 4, str(tmp_path), "cuda", alone)
    assert found == torch.device("cuda", 3 % devices)
    environ = gpu_ranks.os.environ
    assert environ["LOCAL_RANK"] == str(3 % devices)
    assert environ.get("NCCL_HOSTID") == ("graphshard3" if alone else None)
    assert ("NCCL_IB_DISABLE" in environ) is alone
    (((backend,), given),) = groups
    assert backend == "cpu:gloo,cuda:nccl"
    assert given["timeout"].total_seconds() == gpu_ranks.EACH


def test_an_end_that_hangs_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    class Hanging:
        processes = (SimpleNamespace(kill=lambda: killed.append(1)),)

        def join(self, timeout: float) -> bool:
            return False

    monkeypatch.setattr(gpu_graph_ranks, "LIMIT", 0.0)
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda *args, **given: Hanging())
    (tmp_path / "graph_exit").mkdir()
    (tmp_path / "graph_exit" / "rank0").write_text("0\nnone\nnone\nnone")
    (tmp_path / "graph_exit" / "nccl.1").write_text("NCCL WARN stuck")
    rows = list(gpu_graph_ranks.graph_ranks(Place(CPU, True, tmp_path)))
    assert [(row.found, row.ok) for row in rows] == [
        ("training hangs", False),
        ("training hangs", False),
        ("stuck", None),
        ("it hangs", False),
    ]
    assert len(killed) == 3


def test_ranks_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ranks, "FIRST", 0.0)
    monkeypatch.setattr(gpu_ranks, "EACH", 0.0)
    monkeypatch.setattr(gpu_ranks, "END", 0.0)
    started = gpu_ranks.Ranks(Place(CPU, True, tmp_path), ["FULL_SHARD"])
    assert list(started.results()) == [("FULL_SHARD", "ranks [0, 1, 2, 3] hang")]
    assert started.failed
    assert started.end().startswith("codes [-9")


@pytest.mark.slow
def test_a_case_that_fails_does_not_end_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_ranks, "CASES", {"no such case": None, "another dim": None})
    rows = list(gpu_ranks.ranks(Place(CPU, True, tmp_path)))
    assert [(row.check, row.ok) for row in rows if row.ok is not None] == [
        ("no such case", False),
        ("another dim", True),
        ("  another dim", True),
        ("destroy_process_group, exit", True),
    ]
    assert rows[1].found.endswith(": KeyError: 'no such case'")
