"""What a GPU can show, or in part what stands in for one: benchmarks/gpu.py has these and more.

`pytest -m cuda` on a machine with a GPU, `make test-cuda` elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import EXAMPLES, ROOT
from ranks import is_made_up

from examples.benchmarks.gpu_cases import CASES
from examples.benchmarks.gpu_table import Row, patience, read_rows

pytestmark = pytest.mark.cuda
SCRIPT = EXAMPLES / "benchmarks" / "gpu.py"
NEED_GPUS = ("  inductor", "FSDP2 compile blocks", "graphshard inductor")
"""Rows of what needs Triton's kernels, or times that mean something."""


def section(name: str, folder: Path, *options: str) -> list[Row]:
    """The rows of a section, run in a process of its own, since each sets up its own ranks."""
    command = [sys.executable, str(SCRIPT), "--section", name, "--folder", str(folder)]
    ended = subprocess.run(
        [*command, "--device", "cuda", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240 * patience("cuda"),
    )
    rows = read_rows(folder / f"{name}.jsonl")
    assert ended.returncode == 0, ended.stderr
    assert rows, ended.stderr
    return rows


def require(rows: list[Row]) -> None:
    lacking = NEED_GPUS if is_made_up() else ()
    failed = [row for row in rows if row.ok is False and row.check not in lacking]
    assert not failed, json.dumps([vars(row) for row in failed], indent=1)


@pytest.mark.parametrize("name", ["parity", "stress", "graph"])
def test_small(name: str, tmp_path: Path) -> None:
    require(section(name, tmp_path, "--small"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["predict", "overlap", "rates", "fsdp2"])
def test_small_to_its_end(name: str, tmp_path: Path) -> None:
    """Not `calibrate`, which times."""
    require(section(name, tmp_path, "--small"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ranks_over_nccl(tmp_path: Path) -> None:
    rows = section("ranks", tmp_path, "--small")
    said = [row.found for row in rows if row.check == "NCCL said"]
    if said and not all(row.ok for row in rows if row.ok is not None):
        pytest.skip(f"NCCL does not run several ranks here: {said[0]}")
    expected = set(CASES) - ({*NEED_GPUS} if is_made_up() else set())
    assert expected <= {row.check.strip() for row in rows if row.ok}
    require(rows)
