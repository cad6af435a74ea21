"""Memory of one rank of many, in one process: a model whose parameters outweigh its activations.

The process group is torch's "fake" one, whose collectives move nothing: what a rank allocates is
real, what it computes is not. `python rivals.py --fake 8` runs it.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from examples.benchmarks.benchmark_models import Model, gpt, gpt_tokens
from examples.benchmarks.rival_models import Data, made
from examples.benchmarks.rival_systems import FSDP2, OURS, SYSTEMS, Setting, System, graphshard_step
from examples.benchmarks.rival_table import (
    FAKE_PEAK,
    TRANSIENT,
    TRANSIENT_OVERLAP,
    mib,
    verdict,
)
from examples.benchmarks.step_watch import StepWatch

HEAVY = Model("gpt-heavy", gpt(6, 1024, 8, dropout=0.0), ("Block",), gpt_tokens(1, 32))
"""78 M parameters in blocks of 12.6 M, a root of 2 M, and 32 tokens."""

BY_COST: dict[str, dict[str, Any]] = {
    "cpu-gloo": {"hardware": "cpu-gloo"},
    "h100-sxm": {"hardware": "h100-sxm"},
    "h100-sxm, in 140 MiB": {"hardware": "h100-sxm", "memory_budget": 140 << 20},
}
"""The hardware the cost-based order is made for; the fake group is neither kind."""


def compare(ranks: int, device_type: str, model: Model) -> list[str]:
    """Print the table of one rank of `ranks`; returns the verdicts, printed too."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    device = torch.device(device_type)
    data = Data(model, ranks, 1, device)
    batch = data.batch(0, 0)
    mesh = init_device_mesh(device_type, (ranks,))
    setting = Setting(mesh, device, model.blocks, None, batch)
    by_name = {system.name: system for system in SYSTEMS}
    overlaps = {
        f"{OURS} overlap, {name}": System(
            name, partial(graphshard_step, schedule="overlap", **fields)
        )
        for name, fields in BY_COST.items()
    }
    systems = {OURS: by_name[OURS], FSDP2: by_name[FSDP2], **overlaps}
    print(f"{model.name}, one rank of {ranks}\n\n{'':40} {'peak MiB':>10} {'transient MiB':>14}")
    found = {}
    for name, system in systems.items():
        found[name] = held(system, setting, data)
        print(f"{name:40} {mib(found[name][0]):10.2f} {mib(found[name][1]):14.2f}", flush=True)
    theirs = found[FSDP2]
    lines = [
        verdict("peak, of FSDP2's", found[OURS][0] / theirs[0], FAKE_PEAK),
        verdict("transient, of FSDP2's", found[OURS][1] / theirs[1], TRANSIENT),
    ]
    for name in overlaps:
        what = name.removeprefix(f"{OURS} ")
        lines.append(verdict(f"peak, {what}", found[name][0] / theirs[0], FAKE_PEAK))
        lines.append(verdict(f"transient, {what}", found[name][1] / theirs[1], TRANSIENT_OVERLAP))
    print("\n" + "\n".join(lines))
    dist.destroy_process_group()
    return lines


def held(system: System, setting: Setting, data: Data, steps: int = 3) -> tuple[int, int]:
    """(peak, transient) bytes of a step, after the first."""
    trained = system.build(setting, made(data.model, setting.device))
    trained.step(setting.batch)
    watch = StepWatch(data.ranks, setting.device.type)
    watch.add([trained.kept(), setting.batch])
    peaks, transients = [], []
    for _ in range(steps):
        with watch:
            trained.step(setting.batch, lambda: watch.end_of_backward(trained.parameters))
        peaks.append(watch.peak)
        transients.append(watch.transient)
    return int(median(peaks)), int(median(transients))
