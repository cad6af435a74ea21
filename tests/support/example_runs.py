"""Running the examples as commands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
from paths import ROOT

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
