"""Running the examples as commands, and a step of a benchmarked system under a counter."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
from paths import ROOT

from examples.benchmarks.live_bytes import StepWatch
from examples.benchmarks.rival_systems import Setting, Trained

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2"
TIMEOUT = 180.0


def run(command: str, code: int = 0, timeout: float = TIMEOUT) -> str:
    """What `python <command>` prints; it must end with exit code `code`."""
    process = subprocess.Popen(
        [sys.executable, *shlex.split(command)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks, which would outlive a kill
        try:
            output, errors = process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = "", ""
        pytest.fail(f"{command} was still running after {timeout} s\n{output}{errors}")
    assert process.returncode == code, output + errors
    return output


def watched(trained: Trained, setting: Setting) -> StepWatch:
    trained.step(setting.batch)
    watch = StepWatch()
    watch.add(trained.kept())
    with watch:
        trained.step(setting.batch, lambda: watch.end_of_backward(trained.module.parameters()))
    return watch
