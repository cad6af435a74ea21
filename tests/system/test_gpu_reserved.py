"""The sections of benchmarks/gpu.py on reserved memory: what they say, and a run on a CPU."""

from __future__ import annotations

import json
import sys

import pytest

from examples.benchmarks import gpu, gpu_reserved
from examples.benchmarks.gpu_table import Row
from graphshard.cost.allocator_settings import MIB

TOP = 1 << 40


def history(segment: int) -> list[dict]:
    """One request of 30 MiB, for which torch made a segment of so many bytes."""
    return [
        {"action": "segment_alloc", "addr": TOP, "size": segment, "stream": 0},
        {"action": "alloc", "addr": TOP, "size": 30 * MIB, "stream": 0},
    ]


def rows(segment: int, held: int) -> dict[str, Row]:
    return {row.check: row for row in gpu_reserved.replayed("reserved", history(segment), "", held)}


def test_a_history_that_the_model_explains_passes():
    found = rows(30 * MIB, 30 * MIB)
    assert [row.ok for row in found.values()] == [None, True, True, True, True]
    assert found["history"].found == "1 requests, at most 30 MiB"


def test_an_allocator_with_other_rules_fails():
    found = rows(40 * MIB, 40 * MIB)
    said = found["the model reserves what torch did"]
    assert said.ok is False
    assert said.found.startswith("request 1 for 31,457,280 bytes on stream 0: torch has 41,943,040")
    assert found["most reserved"].ok is False


def test_a_history_that_lost_entries_fails():
    assert rows(30 * MIB, 50 * MIB)["the history is whole"].ok is False


@pytest.mark.slow
def test_the_sections_run_on_a_cpu(tmp_path, monkeypatch):
    saved = tmp_path / "rows.json"
    arguments = ["--only", "reserved,reserved_expandable", "--device", "cpu", "--small"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments, "--save", str(saved)])
    assert gpu.main() == 0
    text = json.dumps(json.loads(saved.read_text()))
    for case in gpu_reserved.CASES:
        assert f"{case}: live" in text
