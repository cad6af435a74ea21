"""The checks of `gpu.py` that hold predictions against measurements."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import graphshard
from examples.benchmarks.gpu_table import Place, Row
from examples.benchmarks.harness import fake_ranks
from examples.benchmarks.live_bytes import LiveBytes
from examples.benchmarks.stand_in import modelled, nothing_moves
from examples.gpt import GPT, Block, GPTConfig
from graphshard.hardware.hardware import Hardware

HARDWARE = "hardware.json"  # in the folder of the run
ASKED_FOR = "requested_bytes.all"  # in the allocator's statistics
BF16 = graphshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

FIRST = "FSDP's order"


def tokens(place: Place) -> tuple[Tensor, Tensor]:
    count, length, vocab = (2, 16, 67) if place.small else (4, 512, 8192)
    ids = torch.randint(vocab, (count, length + 1), device=place.device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def sharded_gpt(place: Place, **fields: Any) -> graphshard.ShardedModule:
    """A GPT under a policy with these fields."""
    config = GPTConfig(vocab=8192, layers=6, heads=8, width=1024)
    if place.small:
        config = GPTConfig(vocab=67, layers=2, heads=2, width=32)
    policy = graphshard.BlockPolicy({Block}, **fields)
    return graphshard.compile(GPT(config), policy, device=place.device)


def off_by(check: str, found: float, expected: float, bar: float, of: str, judged: bool) -> Row:
    """The row of a prediction: what was found, how far off it is, and whether within `bar`."""
    off = expected / found - 1
    ok = abs(off) <= bar if judged else None
    return Row("predict", check, f"{of}, predicted {off:+.1%}", f"{bar:.0%}", ok)


def mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


# -- predictions -------------------------------------------------------------------------------


def calibrated(place: Place) -> Iterator[Row]:
    """Measure the device, for the sections that follow."""
    from graphshard.calibrate.run import calibrate, nearest
    from graphshard.calibrate.steps import joined
    from graphshard.cli.calibrate import QUICK

    begin = time.perf_counter()
    dtypes = () if place.small else (torch.bfloat16,)
    with joined(place.device) as group:
        # A GPU is soon done with all sizes, and small ones do not tell what large ones take.
        share = 0.1 if place.small else 1.0 if place.cuda else 0.5
        found = calibrate(group, effort=QUICK, dtypes=dtypes, share=share)
    found.hardware.save(place.folder / HARDWARE)
    took = time.perf_counter() - begin
    measured = found.hardware
    yield Row("calibrate", measured.name, f"{len(found.rows)} measurements in {took:.0f} s")
    for note in found.notes:
        yield Row("calibrate", "  how", note[:160])
    datasheet = Hardware.load(nearest(place.device))
    for name, one, most in (
        ("memory, bytes/s", measured.memory_bandwidth, datasheet.memory_bandwidth),
        *((f"{d} products, FLOP/s", n, datasheet.flops[d]) for d, n in measured.flops.items()),
    ):
        # More than the datasheet has were cached or lost; far less, something else was timed.
        ok = 0.3 <= one / most <= 1.05 if place.cuda and not place.small else None
        said = f"{one:.3g}, {one / most:.2f} of the datasheet's"
        yield Row("calibrate", f"  {name}", said, "0.3 to 1.05", ok)


def hardware(place: Place) -> Hardware:
    file = place.folder / HARDWARE
    if file.exists():
        return Hardware.load(file)
    return Hardware.load("h100-sxm" if place.cuda else "cpu-gloo")


def predict(place: Place) -> Iterator[Row]:
    """Predicted bytes and seconds of a step against measured ones, on one rank and on one of 8."""
    where = hardware(place)
    yield Row("predict", "hardware", where.name)
    libraries = library_bytes(place)
    yield Row("predict", "kept by libraries, not counted below", mib(libraries))
    real = place.cuda and not place.small
    for world in (1, 8):
        if world > 1:
            fake_ranks(world)
        for name, fields in (
            ("fp32", {}),
            ("bf16", {"mixed_precision": BF16}),
            ("recompute", {"recompute": "units"}),
            ("offload activations", {"offload": "activations"}),
        ):
            sharded = sharded_gpt(place, **fields)
            if world > 1:
                nothing_moves(sharded, place.device)
            if place.cuda:
                torch.cuda.empty_cache()
            peak, between, seconds = step_of(sharded, place)
            peak, between = peak - libraries, between - libraries
            estimate = graphshard.simulate(sharded, hardware=where, optimizer="adamw")
            if place.cuda:
                taken, said = torch.cuda.max_memory_reserved(), f"reserved, rank of {world}, {name}"
                yield off_by(said, taken, estimate.reserved_bytes, 0.05, mib(taken), real)
            del sharded
            gc.collect()  # what refers to itself counts as well
            for check, found, expected, bar, of, judged in (
                # A CPU's host copies are its memory; at toy sizes what operators drop counts.
                ("peak", peak, estimate.peak_bytes, 0.05, mib(peak), real),
                ("between steps", between, estimate.valley_bytes, 0.05, mib(between), True),
                ("step", seconds, estimate.step_seconds, 0.15, f"{seconds * 1e3:.2f} ms", real),
            ):
                if check != "step" or world == 1:
                    label = f"{check}, rank of {world}, {name}"
                    yield off_by(label, found, expected, bar, of, judged)
    yield place.retries("predict")


def library_bytes(place: Place) -> int:
    """Bytes that libraries take of torch's allocator at their first use and keep: workspaces.

    To be asked for before anything else is allocated.
    """
    if not place.cuda:
        return 0
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 64, device=place.device, dtype=dtype)
        layer(torch.ones(64, 64, device=place.device, dtype=dtype)).sum().backward()
    del layer
    return int(torch.cuda.memory_stats()[f"{ASKED_FOR}.current"])


def step_of(
    model: nn.Module,
    place: Place,
    batch: tuple[Tensor, ...] = (),
    statistic: str = ASKED_FOR,
    steps: int = 5,
    **adamw: Any,
) -> tuple[int, int, float]:
    """(peak bytes, bytes between steps, median seconds) of a training step with AdamW.

    Bytes are by default those tensors ask for: the allocator rounds them up, and may leave a larger
    block whole.
    """
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-4, **adamw})
    batch = batch or tokens(place)

    def step() -> float:
        place.synchronize()
        begin = time.perf_counter()
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        place.synchronize()
        return time.perf_counter() - begin

    for _ in range(3):
        step()
    times = [step() for _ in range(steps)]
    if place.cuda:
        torch.cuda.reset_peak_memory_stats()
        between = torch.cuda.memory_stats()[f"{statistic}.current"]
        step()
        return torch.cuda.memory_stats()[f"{statistic}.peak"], between, median(times)
    live = LiveBytes()
    live.add([list(model.parameters()), list(model.buffers()), batch])
    live.add([list(state.values()) for state in optimizer.state.values()])
    between = live.current
    with live:
        step()
    return live.peak, between, median(times)


# -- overlap -----------------------------------------------------------------------------------


def overlap(place: Place) -> Iterator[Row]:
    """The exposed communication of one rank of 8, modelled and measured."""
    fake_ranks(8)
    where = hardware(place)
    seconds_of = modelled(where, 8)
    exposed: dict[str, float] = {}
    for name, fields in (
        (FIRST, {}),
        ("one gather ahead", {"forward_prefetch": 1}),
        ("overlap", {"schedule": "overlap", "hardware": where}),
    ):
        took = {}
        for with_time in (False, True):
            sharded = sharded_gpt(place, mixed_precision=BF16, **fields)
            communicator = nothing_moves(sharded, place.device, seconds_of if with_time else None)
            took[with_time] = step_of(sharded, place)[2]
        total = sum(seconds_of(op, size) for op, size in communicator.calls) / 9  # steps
        estimate = graphshard.simulate(sharded, hardware=where, optimizer="adamw")
        exposed[name] = max(0.0, took[True] - took[False])
        said = (
            f"{exposed[name] * 1e3:.2f} of {total * 1e3:.2f} ms exposed (step "
            f"{took[True] * 1e3:.2f} ms), predicted {estimate.exposed_seconds * 1e3:.2f}"
        )
        yield Row("overlap", name, said)
    real = place.cuda and not place.small
    better = exposed["overlap"] <= 1.05 * exposed[FIRST] if real else None
    said = f"{exposed['overlap'] * 1e3:.2f} ms against {exposed[FIRST] * 1e3:.2f}"
    yield Row("overlap", "overlap hides as much or more", said, "1.05", better)
    yield place.retries("overlap")
