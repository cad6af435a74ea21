"""One real rank of eight, of a GPT 4096 wide: graphshard and FSDP2 side by side.

Neither side moves anything: collectives are launched as ever, on their streams and behind their
copies, but only note the bytes that they would move. What is gathered is whatever was
in memory, so memory, compute and the host's work are one rank's, and losses mean nothing. Each
system runs in a process of its own. Like is compared with like: eager with eager, compiled with
compiled.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphshard
from examples.benchmarks.gpu_checks import BF16, step_of
from examples.benchmarks.gpu_table import Place, Row
from examples.benchmarks.harness import fake_ranks
from examples.benchmarks.stand_in import nothing_moves
from examples.gpt import GPT, Block, GPTConfig

WORLD = 8
TINY = GPTConfig(vocab=96, layers=2, heads=4, width=32, tied=False)
LARGE = GPTConfig(vocab=128_256, layers=16, heads=32, width=4096, tied=False)
"""4.3 B parameters. More layers tell nothing new, and each costs both sides seconds of their
limits."""

RIVALS = {
    "fsdp2 eager": None,
    "fsdp2 compile": None,
    "graphshard eager": "fsdp2 eager",
    "graphshard overlap": "fsdp2 eager",
    "graphshard inductor": "fsdp2 compile",
}
"""The systems, each with the one that it is compared with."""


@dataclass(frozen=True)
class Load:
    """The workload: a model and the tokens of a rank's batch."""

    config: GPTConfig
    batch: int
    length: int

    def tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.length + 1)
        ids = torch.randint(self.config.vocab, shape, generator=generator).to(device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# -- the systems -----------------------------------------------------------------------------------


def build(system: str, load: Load, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        model = GPT(load.config)
    if system.startswith("fsdp2"):
        return _fsdp2(model, device, compiled=system.endswith("compile"))
    schedule = "overlap" if system.endswith("overlap") else "fsdp"
    policy = graphshard.BlockPolicy({Block}, mixed_precision=BF16, schedule=schedule)
    backend = "inductor" if system.endswith("inductor") else "eager"
    sharded = graphshard.compile(model, policy, device=device, backend=backend)
    return _filled(sharded)


def _fsdp2(model: nn.Module, device: torch.device, *, compiled: bool) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    return _filled(model.to_empty(device=device))


def _filled(model: nn.Module) -> nn.Module:
    """Give this rank's shards values where they are; no rank computes whole parameters."""
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().normal_(std=0.02)
    return model


@dataclass(frozen=True)
class Measured:
    system: str
    first_seconds: float  # from the call to the end of the first step
    seconds: float  # the median step
    peak: int  # bytes
    between: int  # bytes between steps
    retries: int
    gathered: int  # bytes of full tensors a step, had they been moved
    reduced: int


def measure(system: str, load: Load, place: Place, out: Path) -> None:
    """Train, and write what was measured, or what failed; ends this process."""
    torch.set_num_threads(1)
    if place.cuda:
        torch.cuda.set_device(place.device)
    fake_ranks(WORLD)
    try:
        model = build(system, load, place.device)
        communicator, batch = nothing_moves(model), load.tokens(place.device)
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
        found = Measured(system, first, seconds, peak, between, retries, gathered, reduced)
        out.write_text(json.dumps(asdict(found)))
    except Exception as error:
        out.write_text(json.dumps(f"{type(error).__name__}: {error}"))
    os._exit(0)


# -- the section -----------------------------------------------------------------------------------


def rivals(place: Place) -> Iterator[Row]:
    load = Load(TINY, 2, 16) if place.small or not place.cuda else Load(LARGE, 1, 4096)
    config = load.config
    shape = f"{config.layers} layers of width {config.width}, {load.batch} x {load.length} tokens"
    yield Row("fsdp2", f"a GPT, a rank of {WORLD}", shape)
    yield Row("fsdp2", "moved between ranks", "nothing, on either side")
    found: dict[str, Measured] = {}
    for system, against in RIVALS.items():
        try:
            one = found[system] = _apart(system, load, place)
        except RuntimeError as error:
            yield Row("fsdp2", system, str(error)[:160], "no error", False)
            continue
        said = (
            f"{one.seconds * 1e3:.1f} ms, peak {one.peak / 2**30:.3f} GiB "
            f"(between steps {one.between / 2**30:.3f}), first step {one.first_seconds:.1f} s"
        )
        yield Row("fsdp2", system, said)
        would = f"{one.gathered / 2**30:.3f} GiB gathered, {one.reduced / 2**30:.3f} reduced"
        yield Row("fsdp2", "  would move a step", would, "some", min(one.gathered, one.reduced) > 0)
        rival = found.get(against or "")
        if rival is not None:
            more = max(one.gathered / rival.gathered, one.reduced / rival.reduced)
            yield Row("fsdp2", f"  of {rival.system}'s", f"{more:.3f}", "1.02", more <= 1.02)
            ratio = one.peak / rival.peak
            real = place.cuda and not place.small  # toys say nothing of memory and time
            ok = ratio <= 1 if real else None
            yield Row("fsdp2", f"  peak, of {rival.system}", f"{ratio:.3f}", "1.00", ok)
            ratio = one.seconds / rival.seconds
            ok = ratio <= 0.95 if real else None
            yield Row("fsdp2", f"  step, of {rival.system}", f"{ratio:.3f}", "0.95", ok)
        if place.cuda and against:
            yield Row("fsdp2", "  num_alloc_retries", str(one.retries), "0", not one.retries)


def _apart(system: str, load: Load, place: Place) -> Measured:
    """Measure a system in a process of its own; a RuntimeError if it fails or takes too long."""
    limit, out = 70.0 if place.cuda else 300.0, place.folder / f"{system}.json"
    # In the session of this section, with which it ends if that is stopped.
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=measure, args=(system, load, place, out), daemon=True)
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        raise RuntimeError(f"took more than {limit:.0f} s")
    if not out.exists():
        raise RuntimeError(f"ended with code {process.exitcode}")
    found = json.loads(out.read_text())
    if isinstance(found, str):
        raise RuntimeError(found)
    return Measured(**found)
