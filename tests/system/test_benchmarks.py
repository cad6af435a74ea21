"""Every benchmark runs as it says, with so little that its figures mean nothing."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from example_runs import TORCHRUN, run
from paths import ROOT

from examples.benchmarks import gpu, gpu_table

FOLDER = "examples/benchmarks"

SMOKE = [
    (
        f"{TORCHRUN} {FOLDER}/compare_fsdp2.py --pairs 2 --warmup 1 --layers 2 --width 32 --heads 2"
        " --batch 1 --context 16",
        r"^ratio +[\d.]+ +[\d.]+\n(.*\n)*losses: bit-equal on every step",
    ),
    (
        f"{TORCHRUN} {FOLDER}/rivals.py --models tiny --pairs 2 --warmup 1 --dtypes fp32 --eager",
        r"^graphshard overlap +[\d.]+ s .*\n(.*\n)*step [\d.]+, .*: graphshard, of FSDP2's",
    ),
    (
        f"{TORCHRUN} {FOLDER}/rivals.py --models tiny --pairs 2 --warmup 1 --dtypes fp32"
        " --systems Simple",
        r"^SimpleFSDP ",
    ),
    (
        f"{TORCHRUN} {FOLDER}/rivals.py --models tiny --pairs 2 --warmup 1 --dtypes fp32"
        " --systems alone messages",
        r"^ranks alone +.*\nmessages +.*\n",
    ),
    (
        f"{TORCHRUN} {FOLDER}/rivals.py --models tiny --pairs 2 --warmup 1 --dtypes fp32 --eager"
        " --replicas 2 --systems graphshard FSDP2",
        r"^step [\d.]+, .*: graphshard, of FSDP2's",
    ),
    (f"{FOLDER}/rivals.py --fake 8 --models tiny", r"transient [\d.]+: graphshard, of FSDP2's"),
    (
        f"{FOLDER}/schedules.py --models gpt2 --worlds 8 --hardware h100-sxm",
        r"^gpt2 +8 +h100-sxm.*\n(.*\n)*never slower, never larger",
    ),
    (f"{FOLDER}/literature.py mpt-a100-40 ibm-a100-7b", "4 runs"),
    (
        f"{FOLDER}/first_step.py --depths 1 --width 32 --ranks 1 --rounds 1",
        r"^ +1 +empty +[\d.]+.*\n +1 +filled",
    ),
    (
        f"{TORCHRUN} {FOLDER}/compare_fsdp2.py --sweep --depths 2 --widths 32 --context 16"
        " --pairs 2 --warmup 1",
        r"llama 2 x 32 .* losses \S+ apart\n.*\nmedian of 3: ",
    ),
    (f"{TORCHRUN} {FOLDER}/sweep.py --only gpt2", r"\| gpt2 \| transformers \| equal \| equal \|"),
]


@pytest.mark.parametrize("file", sorted((ROOT / FOLDER).glob("*.py")), ids=lambda file: file.stem)
def test_a_benchmark_can_be_imported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(file.parent)
    importlib.import_module(f"examples.benchmarks.{file.stem}")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "printed"), SMOKE, ids=lambda text: text.split("/")[-1][:24])
def test_a_benchmark_runs(command: str, printed: str) -> None:
    output = run(command, timeout=540.0)
    assert re.search(printed, output, re.MULTILINE), output


@pytest.mark.slow
@pytest.mark.parametrize("name", [section.name for section in gpu.SECTIONS])
def test_a_cpu_runs_every_section_for_gpus(name: str) -> None:
    """So that on a GPU, which is rarely at hand, only what a GPU does can fail."""
    output = run(f"{FOLDER}/gpu.py --device cpu --small --only {name}", timeout=580.0)
    assert re.search(rf"^\| {name} \|.*\n\|  \|", output, re.MULTILINE), output


def test_the_readme_has_a_place_for_the_table_of_a_gpu() -> None:
    text = gpu_table.included((ROOT / FOLDER / "README.md").read_text(), "measured")
    assert "\nmeasured\n" in text
    assert "Not run on a GPU" not in text
