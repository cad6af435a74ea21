"""The examples run as their own texts say."""

from __future__ import annotations

import re
import shlex

import pytest
from example_runs import TORCHRUN, run

TINY = "--layers 2 --width 32 --batch 2 --context 16 --dropout 0.1"


def test_demo_shows_its_plan_and_the_losses_of_one_process(tmp_path):
    output = run(f"{TORCHRUN} examples/train_gpt.py --check --steps 4 {TINY} --dump {tmp_path}")
    assert "sharding plan of GPT" in output
    assert re.search(r"forward:\n.*all_gather +blocks\.0 .* with blocks\.1", output)
    assert "blocks.0, blocks.1 stay unsharded from forward to backward" in output
    assert re.search(r"reduce_scatter +blocks\.1 .* with blocks\.0", output)
    steps = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +(\S+)$", output, re.MULTILINE)
    assert [int(step) for step, *_ in steps] == [0, 1, 2, 3]
    assert all(sharded == single and gap == "0.0e+00" for _, sharded, single, gap in steps)
    assert "the losses are the same within 1e-04 nats" in output
    held_out = re.search(r"training loss [\d.]+, held-out loss ([\d.]+) nats", output)
    assert held_out is not None
    assert 4 < float(held_out[1]) < 6, "hardly trained: about the 5.5 nats of a uniform guess"
    assert (tmp_path / "schedule.txt").exists()


@pytest.mark.slow
def test_demo_trains_a_single_rank_by_size():
    output = run(f"examples/train_gpt.py --steps 40 {TINY} --policy size:5e3")
    lines = re.findall(r"step +(\d+)  loss ([\d.]+)  [\d,]+ tokens/s  process [\d,]+ MiB", output)
    assert [int(step) for step, _ in lines] == [20, 40]
    assert float(lines[1][1]) < float(lines[0][1])
    assert "SizePolicy" in output


@pytest.mark.slow
def test_check_fails_where_losses_differ():
    code = (
        "import sys; sys.path.insert(0, 'examples'); import train_gpt;"
        "train_gpt.TOLERANCE = -1.0; sys.exit(train_gpt.main())"
    )
    output = run(f"-c {shlex.quote(code)} --check --steps 4 {TINY}", code=1)
    assert "the losses are NOT the same" in output


@pytest.mark.slow
def test_inspect_plan_compares_policies(tmp_path):
    output = run(f"examples/inspect_plan.py --layers 2 --dump {tmp_path}")
    assert "sharding plan of GPT" in output
    rows = re.findall(r"^(\S.*?) +(\d+) +(\d+) +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    found = {name: (units, gathers, peak) for name, units, gathers, _, peak in rows}
    gathers = "7"  # the embedding and the head apart, the first block in 3 parts, the last once
    assert found["block:Block"][:2] == ("3", gathers)
    assert found["block:Block strategy=SHARD_GRAD_OP"][:2] == ("3", "6")
    assert found["block:Block strategy=NO_SHARD"][1] == "0"
    assert (
        found["block:Block backward_prefetch=None forward_prefetch=0"][2] < found["block:Block"][2]
    )
    assert (tmp_path / "program.txt").exists()


@pytest.mark.slow
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


TINY_GPT2 = "--layers 2 --width 32 --batch-size 2 --seq-length 16 --numel-to-wrap 5e3"
FINE_TUNE = f"{TORCHRUN} examples/finetune_causal_lm.py {TINY_GPT2} --log-freq 2"
LINE = r"step +(\d+)  loss ([\d.]+)  [\d,]+ tokens/s  valley [\d,]+ MiB  peak [\d,]+ MiB"


@pytest.mark.slow
def test_fine_tuning_with_every_option_goes_on_from_its_checkpoint(tmp_path):
    options = (
        "--cpu-offload on --offload-activations --checkpoint-activations --precision bf16 "
        f"--update-freq 2 --steps 2 --experiment {tmp_path / 'run'}"
    )
    first = run(f"{FINE_TUNE} {options}")
    assert "offload=" in first
    assert "recompute='units'" in first
    assert [int(step) for step, _ in re.findall(LINE, first)] == [2]
    second = run(f"{FINE_TUNE} {options} --export {tmp_path / 'out'}")
    assert "going on from step 2" in second
    assert [int(step) for step, _ in re.findall(LINE, second)] == [4]
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_fine_tuning_from_an_exported_model_in_half_precision(tmp_path):
    run(f"{FINE_TUNE} --steps 8 --export {tmp_path / 'out'}")
    output = run(
        f"{FINE_TUNE} --steps 2 --model {tmp_path / 'out'} --precision fp16 "
        "--no-reshard-after-forward"
    )
    assert "SHARD_GRAD_OP" in output
    assert float(re.findall(LINE, output)[0][1]) < 5.5, "it starts from what was learnt"


@pytest.mark.slow
def test_lightning_trains_on_two_devices():
    output = run("examples/lightning_gpt.py --devices 2 --windows 64")
    assert float(re.findall(r"^loss ([\d.]+)$", output, re.MULTILINE)[0]) < 5.6
