"""The sections of benchmarks/gpu.py run to their end, on a GPU or on what stands in for one.

`pytest -m cuda` on a machine with a GPU, `make test-cuda` elsewhere.
"""

from __future__ import annotations

import pytest
from example_runs import run
from ranks import is_made_up

pytestmark = pytest.mark.cuda
NEED_TRITON = ("FSDP2 compile blocks", "graphshard inductor")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["systems", "predict", "overlap", "fsdp2"])
def test_small_to_its_end(name: str) -> None:
    """Not `calibrate`, which times."""
    lacking = NEED_TRITON if name == "fsdp2" and is_made_up() else ()
    command = f"examples/benchmarks/gpu.py --small --only {name}"
    output = run(command, code=int(bool(lacking)), timeout=1000.0)
    failed = {line for line in output.splitlines() if line.endswith("FAILED |")}
    assert all(any(system in line for system in lacking) for line in failed), output
