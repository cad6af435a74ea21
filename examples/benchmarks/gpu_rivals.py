"""One real rank of eight, of a Llama of the 8B model's shape: graphshard and FSDP2 side by side.

Neither side moves anything: collectives are launched as ever, on their streams and behind their
copies, but only count the bytes that they would move (`gpu_nothing.py`). What is gathered is
whatever was in memory, so memory, compute and the host's work are one rank's, and losses mean
nothing. Each system runs in a process of its own. Like is compared with like: eager with eager,
compiled with compiled.

    python examples/benchmarks/gpu_rivals.py --system "fsdp2 eager" --layers 8
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphshard
from examples.benchmarks.gpu_nothing import Counted, nothing_moves
from examples.benchmarks.gpu_table import Place, Row
from examples.benchmarks.live_bytes import LiveBytes
from examples.llama import Block, Llama, LlamaConfig

WORLD = 8
MOST_LAYERS = 16
"""More tell nothing new, and each costs both sides seconds of their limits."""
TINY = LlamaConfig(vocab=96, layers=2, heads=4, kv_heads=2, width=32, hidden=56)
SHARE = 0.7
"""Of the device's memory that what graphshard is predicted to take may fill: rivals take more."""


@dataclass(frozen=True)
class Load:
    """The workload: a model and the tokens of a rank's batch."""

    config: LlamaConfig
    batch: int
    length: int

    def tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.length + 1)
        ids = torch.randint(self.config.vocab, shape, generator=generator).to(device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def load_for(small: bool, layers: int | None = None) -> Load:
    load = Load(TINY, 2, 16) if small else Load(LlamaConfig(), 1, 4096)
    return load if layers is None else replace(load, config=replace(load.config, layers=layers))


def precision() -> graphshard.MixedPrecision:
    return graphshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# -- how many layers -------------------------------------------------------------------------------


def predicted_peak(load: Load, world: int = WORLD) -> int:
    """Bytes a rank of `world` takes for a step of `load` under AdamW, as graphshard predicts it."""
    with torch.device("meta"):
        model = Llama(load.config)
        idx = torch.empty(load.batch, load.length, dtype=torch.int64)
    policy = graphshard.BlockPolicy({Block}, mixed_precision=precision())
    estimate = graphshard.simulate(
        model,
        policy=policy,
        hardware="h100-sxm",
        world_size=world,
        example_inputs=(idx, idx),
        optimizer="adamw-fused",
    )
    return estimate.peak_bytes


def layers_that_fit(load: Load, memory: int) -> int:
    """The most layers, of at most those of `load`, that are predicted to fit in `memory` bytes.

    Each layer adds as much as the one before, so two small depths tell.
    """
    two, four = (predicted_peak(load_with(load, n)) for n in (2, 4))
    each = (four - two) / 2
    most = 2 + int((memory - two) // each)
    return max(1, min(load.config.layers, most))


def load_with(load: Load, layers: int) -> Load:
    return replace(load, config=replace(load.config, layers=layers))


# -- the systems -----------------------------------------------------------------------------------


def systems() -> list[str]:
    """The names of all there are here, rivals first."""
    ours = ["graphshard eager", "graphshard overlap", "graphshard inductor"]
    return ["fsdp2 eager", "fsdp2 compile", *ours]


def rival_of(system: str) -> str | None:
    """The system that `system` is compared with, like with like; None for a rival."""
    if not system.startswith("graphshard"):
        return None
    return "fsdp2 compile" if system.endswith("inductor") else "fsdp2 eager"


def build(system: str, load: Load, device: torch.device) -> nn.Module:
    """The sharded model, with values."""
    with torch.device("meta"):
        model = Llama(load.config)
    if system.startswith("fsdp2"):
        return _fsdp2(model, device, compiled=system.endswith("compile"))
    schedule = "overlap" if system.endswith("overlap") else "fsdp"
    policy = graphshard.BlockPolicy({Block}, mixed_precision=precision(), schedule=schedule)
    backend = "inductor" if system.endswith("inductor") else "eager"
    sharded = graphshard.compile(model, policy, device=device, backend=backend)
    return _filled(sharded)


def _fsdp2(model: nn.Module, device: torch.device, *, compiled: bool) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # type: ignore[union-attr]
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    return _filled(model.to_empty(device=device))


def _filled(model: nn.Module) -> nn.Module:
    """Give this rank's shards values where they are; no rank computes whole parameters."""
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().normal_(std=0.02)  # type: ignore[attr-defined]
    return model


@dataclass(frozen=True)
class Measured:
    """Time and memory of a step of a system."""

    system: str
    first_seconds: float  # from the call to the end of the first step
    seconds: float  # the median step
    peak: int  # bytes
    between: int  # bytes between steps
    retries: int
    gathered: int  # bytes of full tensors a step, had they been moved
    reduced: int


def measure(system: str, load: Load, device: torch.device, steps: int) -> Measured:
    """Train `steps` steps after three for warming up; on a "fake" group."""
    model = build(system, load, device)
    counted = nothing_moves(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    batch = load.tokens(device)
    cuda = device.type == "cuda"

    def step() -> float:
        begin = time.perf_counter()
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    first = step()
    for _ in range(2):
        counted.clear()
        step()
    each = Counted(counted.gathered, counted.reduced)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        between = torch.cuda.memory_allocated()
        times = [step() for _ in range(steps)]
        peak = torch.cuda.max_memory_allocated()
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    else:
        times = [step() for _ in range(steps)]
        live = LiveBytes()
        live.add([list(model.parameters()), list(optimizer.state.values()), batch])
        between = live.current
        with live:
            step()
        peak, retries = live.peak, 0
    return Measured(
        system, first, median(times), peak, between, retries, each.gathered, each.reduced
    )


# -- the section -----------------------------------------------------------------------------------


def rivals(place: Place) -> Iterator[Row]:
    """The rows of all systems."""
    load = load_for(place.small)
    if place.cuda and not place.small:
        memory = int(SHARE * torch.cuda.get_device_properties(place.device).total_memory)
        load = load_with(load, min(MOST_LAYERS, layers_that_fit(load, memory)))
    config = load.config
    shape = f"{config.layers} layers of width {config.width}, {load.batch} x {load.length} tokens"
    yield Row("fsdp2", f"Llama, a rank of {WORLD}", shape)
    yield Row("fsdp2", "moved between ranks", "nothing, on either side")
    found: dict[str, Measured] = {}
    for system in systems():
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
        rival = found.get(rival_of(system) or "")
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
        if place.cuda and rival_of(system):
            yield Row("fsdp2", "  num_alloc_retries", str(one.retries), "0", not one.retries)


def _apart(system: str, load: Load, place: Place) -> Measured:
    """Measure a system in a process of its own.

    Raises:
        RuntimeError: it failed or took too long.
    """
    limit = 70.0 if place.cuda else 300.0
    command = [sys.executable, __file__, "--system", system, "--device", str(place.device)]
    command += ["--layers", str(load.config.layers), *(["--small"] if place.small else [])]
    # In the session of this section, with which it ends if that is stopped.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise RuntimeError(f"took more than {limit:.0f} s") from None
    if process.returncode:
        sys.stderr.write(errors)
        raise RuntimeError(errors.strip().splitlines()[-1] if errors.strip() else "it failed")
    return Measured(**json.loads(output.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", required=True, choices=systems())
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    found = measure(args.system, load_for(args.small, args.layers), device, args.steps)
    print(json.dumps(asdict(found)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
