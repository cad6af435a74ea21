"""`graphshard doctor`: versions and devices, and what works is tried."""

from __future__ import annotations

from typing import Any

import pytest

from graphshard.cli import doctor, main


def test_works_and_failures_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trains = doctor._trains

    def without_compiler(device: str, backend: Any) -> str:
        if backend == "inductor":
            raise RuntimeError("no C++ compiler\nand more lines")
        return trains(device, backend)

    monkeypatch.setattr(doctor, "_trains", without_compiler)
    assert main(["doctor"]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "Versions" in rows
    assert "plan, dump, simulate works 3 units on 8 ranks" in rows
    assert "training on a CPU rank works a step on cpu equals the model's own" in rows
    assert 'backend="inductor" on a CPU rank FAILS RuntimeError: no C++ compiler' in rows
    assert any(row.startswith("Gloo yes") for row in rows)
