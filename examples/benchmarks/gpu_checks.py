"""The checks of `gpu.py` but the comparison with rivals: what is run, and what must come out."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphshard
from examples.benchmarks.gpu_table import Place, Row
from examples.benchmarks.live_bytes import LiveBytes
from examples.benchmarks.stand_in import Communicator, modelled, stand_in
from examples.benchmarks.stress import allocated, broken
from examples.gpt import GPT, Block, GPTConfig
from graphshard.errors import RuntimeStateError
from graphshard.hardware.hardware import Hardware
from graphshard.runtime.cuda_graphs import Recorder

HARDWARE = "hardware.json"  # in the folder of the run
ASKED_FOR = "requested_bytes.all"  # in the allocator's statistics
BF16 = graphshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

FIRST = "FSDP's order"

OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "recompute": {"recompute": "units"},
    "overlap": {"schedule": "overlap"},
    "offload activations": {"offload": "activations"},
    "offload both": {"offload": ("params", "activations")},
}


def config(place: Place, dropout: float = 0.0) -> GPTConfig:
    if place.small:
        return GPTConfig(vocab=67, layers=2, heads=2, width=32, dropout=dropout)
    return GPTConfig(vocab=8192, layers=6, heads=8, width=1024, dropout=dropout)


def tokens(place: Place, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count, length, vocab = (2, 16, 67) if place.small else (4, 512, 8192)
    ids = torch.randint(vocab, (count, length + 1), generator=generator).to(place.device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def fake_ranks(size: int, rank: int = 0) -> None:
    """Make this process one rank of `size` on torch's "fake" backend, which packs as NCCL does."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


# -- one rank ----------------------------------------------------------------------------------


def parity(place: Place) -> Iterator[Row]:
    """Loss and gradients of one rank against those of the plain model, each option."""
    torch.manual_seed(0)
    plain = GPT(config(place, dropout=0.1)).to(place.device)
    torch.manual_seed(5)
    expected = plain(*tokens(place))
    expected.backward()
    for name, fields in OPTIONS.items():
        policy = graphshard.BlockPolicy({Block}, **fields)
        sharded = graphshard.compile(plain, policy, device=place.device)
        for _ in range(2):  # the second time memory is what was given back
            sharded.zero_grad()
            torch.manual_seed(5)
            loss = sharded(*tokens(place))
            loss.backward()
        yield close(
            "parity", f"one rank, {name}", loss, expected, grads_of(sharded), grads_of(plain)
        )
    yield _drawn_again(place)
    yield place.retries("parity")


def _drawn_again(place: Place) -> Row:
    """Masks drawn again against masks kept: gradients, and to the bit what is drawn afterwards.

    Those kept belong to a program for a CUDA graph, whose first call runs without one.
    """
    torch.manual_seed(0)
    model = GPT(config(place, dropout=0.1)).to(place.device)
    grads, drawn, states = [], [], 0
    for keep in (True, False):
        policy = graphshard.BlockPolicy({Block}, recompute="units", cuda_graph=keep)
        sharded = graphshard.compile(model, policy, device=place.device)
        torch.manual_seed(5)
        sharded(*tokens(place)).backward()
        grads.append(grads_of(sharded))
        drawn.append(torch.rand(8, device=place.device).cpu())
        states = sum(event.op == "save_random_state" for event in sharded.program.schedule())
    worst = max(gap_of(grads[1][name], grad) for name, grad in grads[0].items())
    shifted = "" if torch.equal(*drawn) else ", the generator is not put back"
    ok = not shifted and worst <= 1e-4 and (states > 0 or place.small)
    said = f"within {worst:.1e} from {states} states{shifted}"
    return Row("parity", "masks drawn again", said, "0.0001, more than 0 states", ok)


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


def gap_of(found: Tensor, expected: Tensor, scale: float | None = None) -> float:
    """The norm of the difference by that of `expected`, or by `scale`; infinite if it is NaN."""
    whole = float(expected.norm()) if scale is None else scale
    gap = float((found - expected).norm()) / max(whole, 1e-30)
    return math.inf if math.isnan(gap) else gap


def close(
    section: str,
    check: str,
    loss: Tensor,
    expected: Tensor,
    grads: dict[str, Tensor],
    wanted: dict[str, Tensor],
    bar: float = 1e-4,
) -> Row:
    """Relative differences: of the loss, and of each gradient's norm."""
    gaps = [gap_of(loss.detach(), expected.detach())]
    largest = max(float(g.norm()) for g in wanted.values())
    for name, grad in wanted.items():
        scale = max(float(grad.norm()), 1e-3 * largest)
        gaps.append(gap_of(grads[name], grad, scale))
    worst = max(gaps)
    said = "bit-equal" if worst == 0 else f"within {worst:.1e}"
    return Row(section, check, said, f"{bar:g}", grads.keys() == wanted.keys() and worst <= bar)


# -- streams -----------------------------------------------------------------------------------


def stress(place: Place) -> Iterator[Row]:
    """Thousands of steps under delays and poison, on a rank of four."""
    fake_ranks(4, rank=1)
    runs: list[tuple[str, int, dict[str, Any]]] = [
        ("FULL_SHARD", 800, {}),
        ("overlap", 250, {"schedule": "overlap", "hardware": "h100-sxm"}),
        ("SHARD_GRAD_OP", 150, {"strategy": "SHARD_GRAD_OP"}),
        ("bf16, two gathers ahead", 200, {"mixed_precision": BF16, "forward_prefetch": 2}),
        ("offload both", 200, {"offload": ("params", "activations")}),
        ("offload params, bf16", 100, {"offload": "params", "mixed_precision": BF16}),
        ("NO_SHARD", 100, {"strategy": "NO_SHARD"}),
    ]
    for name, steps, fields in runs:
        steps = 4 if place.small else steps
        begin = time.perf_counter()
        wrong = broken(place.device, steps, seed=3, **fields)
        took = time.perf_counter() - begin
        said = wrong or f"bit-equal, {took:.0f} s"
        yield Row("stress", f"{steps} steps, {name}", said, "bit-equal", not wrong)
    if place.cuda:
        for name, _, fields in runs:
            *before, last = allocated(place.device, **fields)
            settled = 1 + max((n for n, trace in enumerate(before, 1) if trace != last), default=0)
            said = f"the same addresses from step {settled} on"
            yield Row("stress", f"allocator, {name}", said, "step 6", settled <= 6)
    yield _host_waits(place)
    yield place.retries("stress")


def _host_waits(place: Place) -> Row:
    """Whether the host waits for the device in a forward or backward, from the third one on."""
    check = "a step in which the host waits is an error"
    if not place.cuda:
        return Row("stress", check, "not watched on a CPU")
    policy = graphshard.BlockPolicy({Block}, mixed_precision=BF16, offload="activations")
    sharded = graphshard.compile(GPT(config(place)), policy, device=place.device)
    stand_in(sharded)
    batch = tokens(place)
    for _ in range(2):
        sharded(*batch).backward()
        sharded.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sharded(*batch).backward()
    except RuntimeError as error:
        return Row("stress", check, str(error).splitlines()[0][:160], "no wait", False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Row("stress", check, "it does not", "no wait", True)


def graph(place: Place) -> Iterator[Row]:
    """Whole-step CUDA graphs, on one rank and on a rank of four: the same losses, and the time."""
    for world in (1, 4):
        if world > 1:
            fake_ranks(world, rank=1)
        losses, seconds, reserved, said = {}, {}, {}, ""
        for graphs in (False, True):
            if place.cuda:
                torch.cuda.empty_cache()
            torch.manual_seed(0)
            policy = graphshard.BlockPolicy({Block}, cuda_graph=graphs)
            sharded = graphshard.compile(
                GPT(config(place, dropout=0.1)), policy, device=place.device
            )
            if world > 1:
                stand_in(sharded)
            losses[graphs] = trained(sharded, place, steps=8)
            _, _, seconds[graphs] = step_of(sharded, place)
            # Of a replay the allocator sees nothing: what counts is the pool a graph keeps.
            reserved[graphs] = torch.cuda.memory_reserved() if place.cuda else 0
            said = str(sharded.program.cuda_graphs)
            del sharded
            gc.collect()  # its memory, before the next one's is measured
        captured = said.startswith("one for") if place.cuda else None
        yield Row("graph", f"rank of {world}", said[:120], "captured", captured)
        gap = max(map(gap_of, *(torch.tensor(losses[graphs]) for graphs in (True, False))))
        same = "bit-equal" if gap == 0 else f"within {gap:.1e}"
        yield Row("graph", "  losses of 8 steps with dropout", same, "1e-4", gap <= 1e-4)
        took = f"{seconds[True] * 1e3:.2f} ms, {seconds[False] * 1e3:.2f} without"
        yield Row("graph", "  step", took)
        used = f"{reserved[True] / 2**20:.0f} MiB, {reserved[False] / 2**20:.0f} without"
        yield Row("graph", "  memory reserved", used)
    yield from _recorded(place)
    yield from _released(place)
    yield place.retries("graph")


def _recorded(place: Place) -> Iterator[Row]:
    """Captures on the last device while the first is current, and one of nothing."""
    if not place.cuda:
        yield Row("graph", "captures on a device that is not current", "not on a CPU")
        return
    device = torch.device(place.device.type, torch.cuda.device_count() - 1)
    recorder, x = Recorder(device), torch.ones(8, device=device)
    captured, y = recorder.capture(lambda args: args[0] * 2, [x])
    x.fill_(3)
    captured.replay()
    torch.cuda.synchronize(device)
    right = bool((y == 6).all()) and torch.cuda.current_device() == 0
    yield Row("graph", f"a capture on {device}, with cuda:0 current", str(y[0].item()), "6", right)
    try:
        recorder.capture(lambda args: None, [])
    except RuntimeStateError as error:
        yield Row("graph", "a capture of nothing", str(error)[:60], "an error", True)
    else:
        yield Row("graph", "a capture of nothing", "no error", "an error", False)


def _released(place: Place) -> Iterator[Row]:
    """What releasing graphs gives back, and that they are captured again."""
    policy = graphshard.BlockPolicy({Block}, cuda_graph=True)
    torch.manual_seed(0)
    sharded = graphshard.compile(GPT(config(place)), policy, device=place.device)
    stand_in(sharded)
    batch = tokens(place)
    short = tuple(ids[:, : ids.shape[1] // 2].contiguous() for ids in batch)

    def reserved(inputs: tuple[Tensor, ...]) -> float:
        for _ in range(4):
            sharded(*inputs).backward()
            sharded.zero_grad()
        if not place.cuda:
            return 0.0
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() / 2**20

    one, two = reserved(batch), reserved(short)
    sharded.release_graphs()
    gc.collect()
    if place.cuda:
        torch.cuda.empty_cache()
    none = torch.cuda.memory_reserved() / 2**20 if place.cuda else 0.0
    again = reserved(batch)
    said = f"{one:.0f} MiB reserved, {two:.0f} with a second program, {none:.0f} released"
    # The second program finds its activations' memory in the pool of the first.
    ok = none < one and two < one + 0.5 * (one - none) if place.cuda else None
    yield Row("graph", "  graphs of two programs", said, "share memory, and give it back", ok)
    yield Row("graph", "  captured again", f"{again:.0f} MiB", "1.05", _alike(again, one, place))


def _alike(found: float, expected: float, place: Place) -> bool | None:
    return abs(found / expected - 1) <= 0.05 if place.cuda else None


def trained(model: nn.Module, place: Place, steps: int, seed: int = 0) -> list[float]:
    """The losses of steps of SGD, each on a batch of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(*tokens(place, seed + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


# -- predictions -------------------------------------------------------------------------------


def calibrated(place: Place) -> Iterator[Row]:
    """Measure the device, for the sections that follow."""
    from graphshard.calibrate.ranks import joined
    from graphshard.calibrate.run import calibrate, nearest
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
    """The calibrated hardware, or else a preset."""
    file = place.folder / HARDWARE
    if file.exists():
        return Hardware.load(file)
    return Hardware.load("h100-sxm" if place.cuda else "cpu-gloo")


def predict(place: Place) -> Iterator[Row]:
    """Predicted bytes and seconds of a step against measured ones, on one rank and on one of 8."""
    where = hardware(place)
    yield Row("predict", "hardware", where.name)
    libraries = library_bytes(place)
    yield Row("predict", "kept by libraries, not counted below", f"{libraries / 2**20:.1f} MiB")
    for world in (1, 8):
        if world > 1:
            fake_ranks(world)
        for name, fields in (
            ("fp32", {}),
            ("bf16", {"mixed_precision": BF16}),
            ("recompute", {"recompute": "units"}),
            ("offload activations", {"offload": "activations"}),
        ):
            torch.manual_seed(0)
            policy = graphshard.BlockPolicy({Block}, **fields)
            sharded = graphshard.compile(GPT(config(place)), policy, device=place.device)
            if world > 1:
                stand_in(sharded)
            peak, between, seconds = step_of(sharded, place)
            peak, between = peak - libraries, between - libraries
            backend = "nccl" if place.cuda else "gloo"
            estimate = graphshard.simulate(
                sharded, hardware=where, optimizer="adamw", backend=backend
            )
            off = estimate.peak_bytes / peak - 1
            said = f"{peak / 2**20:.1f} MiB, predicted {off:+.1%}"
            # A CPU's host copies are its memory; at toy sizes what operators drop inside counts.
            ok = abs(off) <= 0.05 if place.cuda and not place.small else None
            del sharded
            gc.collect()  # what refers to itself counts as well
            yield Row("predict", f"peak, rank of {world}, {name}", said, "5%", ok)
            off = estimate.valley_bytes / between - 1
            said = f"{between / 2**20:.1f} MiB, predicted {off:+.1%}"
            yield Row(
                "predict", f"between steps, rank of {world}, {name}", said, "5%", abs(off) <= 0.05
            )
            if world == 1:
                off = estimate.step_seconds / seconds - 1
                said = f"{seconds * 1e3:.2f} ms, predicted {off:+.1%}"
                timed = abs(off) <= 0.15 if place.cuda and not place.small else None
                yield Row("predict", f"step, {name}", said, "15%", timed)
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


def step_of(sharded: nn.Module, place: Place, steps: int = 5) -> tuple[int, int, float]:
    """(peak bytes, bytes between steps, median seconds) of a training step with AdamW.

    Bytes are those tensors ask for: the allocator rounds them up, and may leave a larger block
    whole.
    """
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4)
    batch = tokens(place)

    def step() -> float:
        place.synchronize()
        begin = time.perf_counter()
        sharded(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        place.synchronize()
        return time.perf_counter() - begin

    for _ in range(3):
        step()
    times = [step() for _ in range(steps)]
    if place.cuda:
        torch.cuda.reset_peak_memory_stats()
        between = torch.cuda.memory_stats()[f"{ASKED_FOR}.current"]
        step()
        return torch.cuda.memory_stats()[f"{ASKED_FOR}.peak"], between, median(times)
    live = LiveBytes()
    live.add([list(sharded.parameters()), list(sharded.buffers()), batch])
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
        policy = graphshard.BlockPolicy({Block}, mixed_precision=BF16, **fields)
        took, total = {}, 0.0
        for with_time in (False, True):
            torch.manual_seed(0)
            sharded = graphshard.compile(GPT(config(place)), policy, device=place.device)
            communicator = stand_in(sharded, seconds_of if with_time else None)
            took[with_time] = step_of(sharded, place)[2]
            total = _step_seconds(communicator, seconds_of, steps=9)
        estimate = graphshard.simulate(sharded, hardware=where, optimizer="adamw", backend="nccl")
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


def _step_seconds(communicator: Communicator, seconds_of: Any, steps: int) -> float:
    """The modelled seconds of one step's collectives."""
    return sum(seconds_of(op, size) for op, size in communicator.calls) / steps
