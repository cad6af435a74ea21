"""The scripts of examples/migrate: one device, FSDP2 and graphshard print the same numbers."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
import torch
from example_runs import TORCHRUN, run
from paths import ROOT

FOLDER = ROOT / "examples/migrate"
SCRIPTS = {"single": "", "fsdp2": TORCHRUN, "sharded": TORCHRUN}


def printed(name: str, folder: Path, steps: int) -> list[str]:
    options = f"--folder {folder} --steps {steps}"
    return run(f"{SCRIPTS[name]} {FOLDER / name}.py {options}", timeout=300.0).splitlines()


@pytest.mark.slow
def test_they_print_the_same_before_and_after_a_resume(tmp_path: Path) -> None:
    for steps, begin in ((2, 0), (4, 2)):
        lines = {name: printed(name, tmp_path / name, steps) for name in SCRIPTS}
        assert lines["single"] == lines["fsdp2"] == lines["sharded"]
        told = [line.split()[:2] for line in lines["sharded"]]
        assert told == [*(["step", str(n)] for n in range(begin, steps)), ["held-out", "loss"]]
    exports = {name: torch.load(tmp_path / name / "weights.pt") for name in SCRIPTS}
    for name in ("fsdp2", "sharded"):
        assert exports[name].keys() == exports["single"].keys()
        for key, value in exports["single"].items():
            torch.testing.assert_close(exports[name][key], value, rtol=1e-4, atol=1e-5)


def test_the_scripts_differ_in_few_lines() -> None:
    single, *others = (FOLDER.joinpath(f"{name}.py").read_text().splitlines() for name in SCRIPTS)
    for other in others:
        changed = [
            line for line in difflib.ndiff(single, other) if line[:2] in ("+ ", "- ") and line[2:]
        ]
        assert len(changed) <= 60
