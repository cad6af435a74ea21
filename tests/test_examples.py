"""The examples run as their own texts say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2"
TINY = "--layers 2 --width 32 --batch 2 --context 16 --dropout 0.1"


def run(command: str, code: int = 0) -> str:
    """What `python <command>` prints; it must end with exit code `code`."""
    process = subprocess.run(
        [sys.executable, *shlex.split(command)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert process.returncode == code, process.stdout + process.stderr
    return process.stdout


def test_demo_shows_its_plan_and_the_losses_of_one_process(tmp_path):
    output = run(f"{TORCHRUN} examples/train_gpt.py --check --steps 4 {TINY} --dump {tmp_path}")
    assert "sharding plan of GPT" in output
    assert re.search(r"backward:\n.*all_gather +blocks\.0", output)
    assert re.search(r"reduce_scatter +blocks\.0", output)
    steps = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +(\S+)$", output, re.MULTILINE)
    assert [int(step) for step, *_ in steps] == [0, 1, 2, 3]
    assert all(sharded == single and gap == "0.0e+00" for _, sharded, single, gap in steps)
    assert "the losses are the same within 1e-04 nats" in output
    held_out = re.search(r"training loss [\d.]+, held-out loss ([\d.]+) nats", output)
    assert held_out is not None
    assert 4 < float(held_out[1]) < 6, "hardly trained: about the 5.5 nats of a uniform guess"
    assert (tmp_path / "schedule.txt").exists()


def test_demo_trains_a_single_rank_by_size():
    output = run(f"examples/train_gpt.py --steps 40 {TINY} --policy size:5e3")
    lines = re.findall(r"step +(\d+)  loss ([\d.]+)  [\d,]+ tokens/s  peak [\d,]+ MiB", output)
    assert [int(step) for step, _ in lines] == [20, 40]
    assert float(lines[1][1]) < float(lines[0][1])
    assert "SizePolicy" in output


def test_check_fails_where_losses_differ():
    code = (
        "import sys; sys.path.insert(0, 'examples'); import train_gpt;"
        "train_gpt.TOLERANCE = -1.0; sys.exit(train_gpt.main())"
    )
    output = run(f"-c {shlex.quote(code)} --check --steps 4 {TINY}", code=1)
    assert "the losses are NOT the same" in output


def test_inspect_plan_compares_policies(tmp_path):
    output = run(f"examples/inspect_plan.py --layers 2 --dump {tmp_path}")
    assert "sharding plan of GPT" in output
    rows = re.findall(r"^(\S.*?) +(\d+) +(\d+) +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    found = {name: (units, gathers, peak) for name, units, gathers, _, peak in rows}
    assert found["block:Block"][:2] == ("3", "5")
    assert found["block:Block strategy=SHARD_GRAD_OP"][:2] == ("3", "3")
    assert found["block:Block strategy=NO_SHARD"][1] == "0"
    assert found["block:Block backward_prefetch=None"][2] < found["block:Block"][2]
    assert (tmp_path / "program.txt").exists()


def test_custom_pass_frees_earlier():
    output = run("examples/custom_pass.py")
    freed = [line for line in output.splitlines() if re.search(r"free +blocks\.1", line)]
    assert len(freed) >= 2, "in forward and in backward"
    added = [line for line in output.splitlines() if line.startswith("+")]
    assert any("free" in line for line in added)
    live = {
        sign: max(
            int(number.replace(",", ""))
            for number in re.findall(rf"^\{sign} +([\d,]+) ", output, re.MULTILINE)
        )
        for sign in "+-"
    }
    assert live["+"] < live["-"], "fewer bytes are alive at the peak"


def test_comparison_with_fully_shard_reports_both():
    tiny = "--pairs 2 --warmup 1 --layers 2 --width 32 --heads 2 --batch 1 --context 16"
    output = run(f"{TORCHRUN} examples/benchmarks/compare_fsdp2.py {tiny}")
    for name in ("graphshard", "fully_shard"):
        assert re.search(rf"^{name} +[\d.]+ ms +[\d,]+$", output, re.MULTILINE)
    assert re.search(r"^ratio +[\d.]+ +[\d.]+$", output, re.MULTILINE)
    assert "losses: bit-equal on every step" in output
