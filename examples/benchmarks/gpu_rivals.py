"""graphshard beside other systems: on the GPUs there are, and as one real rank of eight.

The first are steps that take turns, as `rivals.py` has them, with losses beside a single process's.

Of eight ranks of a GPT 4096 wide one is there, and nothing moves on either side: collectives are
launched as ever, on their streams and behind their copies, but only note the bytes that they would
move. What is gathered is whatever was in memory, so memory, compute and the host's work are one
rank's, and losses mean nothing. Each system runs in a process of its own. Like is compared with
like: eager with eager, compiled with compiled.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from examples.benchmarks import benchmark_models
from examples.benchmarks.benchmark_models import gpt_tokens
from examples.benchmarks.gpu_checks import BF16, step_of
from examples.benchmarks.gpu_table import Place, Row
from examples.benchmarks.harness import fake_ranks, on_ranks
from examples.benchmarks.rival_systems import (
    FSDP2,
    FSDP2_BLOCKS,
    OURS,
    OURS_COMPILED,
    OURS_OVERLAP,
    SYSTEMS,
    Setting,
)
from examples.benchmarks.rivals import Case, Result, mib, parse_args, ratios
from examples.benchmarks.stand_in import nothing_moves
from examples.gpt import GPT, GPTConfig

# -- on the GPUs there are -------------------------------------------------------------------------

BESIDE = (OURS, FSDP2, OURS_OVERLAP, "DDP")


def side_by_side(place: Place) -> Iterator[Row]:
    """Losses, time and memory of systems that take turns, on a rank for each GPU."""
    count = torch.cuda.device_count() if place.cuda else 2
    yield Row("systems", "ranks", str(count))
    results = on_ranks(_in_turn, count, place, kind=place.device.type)
    for one in results:
        if one.why_not:
            yield Row("systems", one.system, one.why_not, "no error", False)
            continue
        said = (
            f"{median(one.times) * 1e3:.2f} ms, peak {mib(one.peak):.1f} MiB, "
            f"losses within {one.gap:.1e} of one process's"
        )
        yield Row("systems", one.system, said, "0.001", one.gap <= 1e-3)
    for line in ratios(results):
        yield Row("systems", "  ratios", line)


def _in_turn(rank: int, place: Place) -> list[Result]:
    device = torch.device("cuda", rank) if place.cuda else place.device
    model, scale, pairs = benchmark_models.RIVALS[0], 16, 20
    if place.small:
        model, scale, pairs = benchmark_models.TINY, 1, 2
    args = parse_args(f"--scale {scale} --warmup 2 --pairs {pairs}".split())
    case = Case(model, "fp32", args, device, str(place.folder))
    return case.run([system for system in SYSTEMS if system.name in BESIDE])


# -- one rank of eight -----------------------------------------------------------------------------

WORLD = 8
TINY = GPTConfig(vocab=96, layers=2, heads=4, width=32, tied=False)
LARGE = GPTConfig(vocab=128_256, layers=16, heads=32, width=4096, tied=False)
"""4.3 B parameters. More layers tell nothing new, and each costs both sides seconds of their
limits."""

RIVALS = {
    FSDP2: None,
    FSDP2_BLOCKS: None,
    OURS: FSDP2,
    OURS_OVERLAP: FSDP2,
    OURS_COMPILED: FSDP2_BLOCKS,
}
"""The systems, each with the one that it is compared with."""


@dataclass(frozen=True)
class Measured:
    first_seconds: float  # from the call to the end of the first step
    seconds: float  # the median step
    peak: int  # bytes
    between: int  # bytes between steps
    retries: int
    gathered: int  # bytes of full tensors a step, had they been moved
    reduced: int


def model_of(system: str, config: GPTConfig, device: torch.device) -> nn.Module:
    """The model on this rank; no rank computes whole parameters."""
    with torch.device("meta"):
        model = GPT(config)
    mesh = dist.init_device_mesh(device.type, (WORLD,))
    setting = Setting(mesh, device, ("Block",), BF16.param_dtype, None, BF16.reduce_dtype)
    (build,) = (each.build for each in SYSTEMS if each.name == system)
    module = build(setting, model).called
    if system.startswith(FSDP2):
        module.to_empty(device=device)
    with torch.no_grad():
        for param in module.parameters():
            param.to_local().normal_(std=0.02)
    return module


def measure(system: str, config: GPTConfig, length: int, place: Place) -> Measured:
    """Train on the device of this process."""
    torch.set_num_threads(1)
    if place.cuda:
        torch.cuda.set_device(place.device)
    fake_ranks(WORLD)
    model = model_of(system, config, place.device)
    drawn = gpt_tokens(1, length, config.vocab)(1, torch.Generator().manual_seed(0))
    batch = tuple(ids.to(place.device) for ids in drawn.values())
    communicator = nothing_moves(model, place.device)
    begin = time.perf_counter()
    model(*batch).backward()
    model.zero_grad()
    place.synchronize()
    first = time.perf_counter() - begin
    communicator.calls.clear()
    model(*batch).backward()
    gathered = communicator.moved("all_gather")
    reduced = communicator.moved("reduce_scatter", "all_reduce")
    peak, between, seconds = step_of(
        model, place, batch, "allocated_bytes.all", 8, lr=1e-5, fused=place.cuda
    )
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if place.cuda else 0
    return Measured(first, seconds, peak, between, retries, gathered, reduced)


def rivals(place: Place) -> Iterator[Row]:
    real = place.cuda and not place.small  # toys say nothing of memory and time
    config, length = (LARGE, 4096) if real else (TINY, 16)
    shape = f"{config.layers} layers of width {config.width}, {length} tokens"
    yield Row("fsdp2", f"a GPT, a rank of {WORLD}", shape)
    yield Row("fsdp2", "moved between ranks", "nothing, on either side")
    found: dict[str, Measured] = {}
    for system, against in RIVALS.items():
        limit = 70.0 if place.cuda else 300.0
        # In the session of this section, with which it ends if that is stopped.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            result = pool.apply_async(measure, (system, config, length, place))
            try:
                one = found[system] = result.get(limit)
            except Exception as error:
                said = f"{type(error).__name__} within {limit:.0f} s: {error}"[:160]
                yield Row("fsdp2", system, said, "no error", False)
                continue
        yield from rows_of(system, one, place)
        if against in found:
            yield from compared(one, found[against], against, real)


def rows_of(system: str, one: Measured, place: Place) -> Iterator[Row]:
    said = (
        f"{one.seconds * 1e3:.1f} ms, peak {one.peak / 2**30:.3f} GiB "
        f"(between steps {one.between / 2**30:.3f}), first step {one.first_seconds:.1f} s"
    )
    yield Row("fsdp2", system, said)
    would = f"{one.gathered / 2**30:.3f} GiB gathered, {one.reduced / 2**30:.3f} reduced"
    yield Row("fsdp2", "  would move a step", would, "some", min(one.gathered, one.reduced) > 0)
    if place.cuda and RIVALS[system]:
        yield Row("fsdp2", "  num_alloc_retries", str(one.retries), "0", not one.retries)


def compared(one: Measured, rival: Measured, name: str, real: bool) -> Iterator[Row]:
    more = max(one.gathered / rival.gathered, one.reduced / rival.reduced)
    yield Row("fsdp2", f"  of {name}'s", f"{more:.3f}", "1.02", more <= 1.02)
    for what, ratio, bar in (
        ("peak", one.peak / rival.peak, 1.0),
        ("step", one.seconds / rival.seconds, 0.95),
    ):
        ok = ratio <= bar if real else None
        yield Row("fsdp2", f"  {what}, of {name}", f"{ratio:.3f}", f"{bar:.2f}", ok)
