"""What the ranks of the section `ranks` do: each case trains, and tells the numbers it came to.

A case runs on any device: over NCCL on GPUs, over Gloo on CPUs. It tells the losses of this rank
and the whole parameters at the end, beside those of one process that trains on every rank's batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphshard
from examples.benchmarks.gpu_table import Place
from examples.benchmarks.gpu_trace import parting_said
from examples.gpt import GPT, Block, GPTConfig

Batch = tuple[Tensor, ...]
Numbers = dict[str, Tensor]

CLOSE = 1e-4
"""How far numbers may be apart, as a fraction of their norm."""


@dataclass
class Told:
    """What a rank tells of a case.

    numbers: on the CPU. expected: what they should be; empty if only another backend can say.
    bar: how far they may be apart. note: in words. ok: whether the words are as they should be.
    """

    numbers: Numbers = field(default_factory=dict)
    expected: Numbers = field(default_factory=dict)
    bar: float = CLOSE
    note: str = ""
    ok: bool | None = None


@dataclass(frozen=True)
class Run:
    """A rank at work."""

    place: Place
    rank: int
    count: int

    def model(self, seed: int = 0) -> GPT:
        """A GPT with the same weights on every device."""
        torch.manual_seed(seed)
        small = GPTConfig(vocab=67, layers=2, heads=2, width=32)
        config = small if self.place.small else GPTConfig(1024, layers=4, heads=4, width=256)
        return GPT(config).to(self.place.device)

    def batch(self, step: int, rank: int | None = None) -> Batch:
        """The tokens of a rank, this one by default, in a step."""
        seed = 100 * step + (self.rank if rank is None else rank)
        length, vocab = (16, 67) if self.place.small else (128, 1024)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocab, (2, length + 1), generator=generator).to(self.place.device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@dataclass(frozen=True)
class Protocol:
    """How to train. clip: the largest norm of gradients. micro: batches of one step."""

    steps: int = 3
    clip: float | None = None
    micro: int = 1


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, in float32 on the CPU."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().float().cpu().clone()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def numbers_of(model: nn.Module, losses: Sequence[Tensor], norms: Sequence[Tensor]) -> Numbers:
    found = {name: whole(param) for name, param in model.named_parameters()}
    found["the losses"] = torch.stack([loss.detach().float().cpu() for loss in losses])
    if norms:
        found["the norms"] = torch.stack([norm.float().cpu() for norm in norms])
    return found


def train(
    model: nn.Module,
    batch: Callable[[int], Batch],
    protocol: Protocol,
    optim: torch.optim.Optimizer | None = None,
    first: int = 0,
) -> Numbers:
    """Train a sharded model on batches `first` and on; its numbers."""
    optim, losses, norms = optim or optimizer_of(model), list[Tensor](), list[Tensor]()
    for step in range(protocol.steps):
        for part in range(protocol.micro):
            last = part + 1 == protocol.micro
            sync: Any = nullcontext() if last else model.no_sync()
            with sync:
                loss = model(*batch(first + step * protocol.micro + part))
                (loss / protocol.micro).backward()
            losses.append(loss)
        if protocol.clip is not None:
            norms.append(model.clip_grad_norm_(protocol.clip))  # type: ignore[operator]
        optim.step()
        optim.zero_grad()
    return numbers_of(model, losses, norms)


def train_alone(model: nn.Module, run: Run, batch: Callable[..., Batch], how: Protocol) -> Numbers:
    """Train the plain model on every rank's batches at once; the numbers this rank should have."""
    optim, losses, norms = optimizer_of(model), list[Tensor](), list[Tensor]()
    for step in range(how.steps):
        for part in range(how.micro):
            number = step * how.micro + part
            each = [model(*batch(number, rank)) for rank in range(run.count)]
            (torch.stack(each).mean() / how.micro).backward()
            losses.append(each[run.rank])
        if how.clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), how.clip))
        optim.step()
        optim.zero_grad()
    return numbers_of(model, losses, norms)


# -- the cases -------------------------------------------------------------------------------------


def trained(run: Run, how: Protocol = Protocol(), **fields: Any) -> Told:
    """A policy with these fields against one process."""
    policy = graphshard.BlockPolicy({Block}, **fields)
    sharded = graphshard.compile(run.model(), policy, device=run.place.device)
    found = train(sharded, run.batch, how)
    return Told(found, train_alone(run.model(), run, run.batch, how))


def compiled(run: Run) -> Told:
    """Compiled regions, none of which may run operator by operator instead."""
    policy, how = graphshard.BlockPolicy({Block}), Protocol()
    sharded = graphshard.compile(run.model(), policy, device=run.place.device, backend="inductor")
    found = train(sharded, run.batch, how)
    told = Told(found, train_alone(run.model(), run, run.batch, how))
    regions = sharded.program.regions
    told.note, told.ok = str(regions), bool(regions.forms) and not regions.fell_back
    return told


def hybrid(run: Run) -> Told:
    """Shards over half of the ranks, copies over the other dimension of the mesh."""
    shape = (2, run.count // 2)
    mesh = dist.init_device_mesh(run.place.device.type, shape, mesh_dim_names=("copy", "shard"))
    policy = graphshard.BlockPolicy({Block}, strategy="HYBRID_SHARD")
    sharded = graphshard.compile(run.model(), policy, mesh=mesh, device=run.place.device)
    found = train(sharded, run.batch, Protocol())
    told = Told(found, train_alone(run.model(), run, run.batch, Protocol()))
    ops = {event.op for event in sharded.program.schedule()}
    told.note, told.ok = f"mesh {shape}", {"reduce_scatter", "all_reduce"} <= ops
    return told


def resharded(run: Run) -> Told:
    """Backward gathers from half of the ranks, over a process group of its own."""
    return trained(run, reshard_after_forward=run.count // 2)


def graphs(run: Run) -> Told:
    """Whole-step CUDA graphs, and what plan and program say of them."""
    policy = graphshard.BlockPolicy({Block}, cuda_graph=True)
    sharded = graphshard.compile(run.model(), policy, device=run.place.device)
    how = Protocol(steps=6)
    found = train(sharded, run.batch, how)
    said = str(sharded.program.cuda_graphs)
    sharded.release_graphs()
    told = Told(found, train_alone(run.model(), run, run.batch, how), note=said)
    told.ok = said.startswith("one for") == run.place.cuda
    return told


def checkpointed(run: Run) -> Told:
    """Training that goes on from a checkpoint is bit-equal to training that never stopped."""
    path = run.place.folder / "checkpoint"
    policy = graphshard.BlockPolicy({Block})
    sharded = graphshard.compile(run.model(), policy, device=run.place.device)
    optim, how = optimizer_of(sharded), Protocol(steps=2)
    train(sharded, run.batch, how, optim)
    sharded.save_checkpoint(path, optim, extra={"step": 2})
    on = train(sharded, run.batch, how, optim, first=2)
    other = graphshard.compile(run.model(seed=9), policy, device=run.place.device)
    its, extra = optimizer_of(other), dict[str, Any]()
    other.load_checkpoint(path, its, extra=extra)
    found = train(other, run.batch, how, its, first=2)
    return Told(found, on, 0.0, f"step {extra['step']}", extra["step"] == 2)


class Experts(nn.Module):
    """Three experts, which no even number of ranks divides, and a layer behind them."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, width, width) * width**-0.5)
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.einsum("bd,edf->bf", x, self.experts).relu()).square().mean()


def other_dims(run: Run) -> Told:
    """A parameter that is split along another dim than its first."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Experts().to(run.place.device)

    def batch(step: int, rank: int | None = None) -> Batch:
        seed = 100 * step + (run.rank if rank is None else rank)
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(8, 192, generator=generator).to(run.place.device),)

    sharded = graphshard.compile(model(), graphshard.SizePolicy(1), device=run.place.device)
    found = train(sharded, batch, Protocol())
    told = Told(found, train_alone(model(), run, batch, Protocol()))
    dim = sharded.experts.placements[0].dim
    told.note, told.ok = f"shards of dim {dim}", dim != 0
    return told


def scaled(run: Run) -> Told:
    """fp16 under torch's GradScaler, overflows among its steps, against `fully_shard`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    kind = run.place.device.type

    def losses_and_scales(model: nn.Module) -> Numbers:
        optim = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**24, growth_interval=2)
        losses, scales = [], []
        for step in range(12):
            loss = model(*run.batch(step))
            scaler.scale(loss).backward()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            losses.append(loss.detach().float().cpu())
            scales.append(torch.tensor(scaler.get_scale()))
        return {"the losses": torch.stack(losses), "the scales": torch.stack(scales)}

    half = torch.float16
    precision = graphshard.MixedPrecision(param_dtype=half, reduce_dtype=half)
    policy = graphshard.BlockPolicy({Block}, mixed_precision=precision)
    sharded = graphshard.compile(run.model(), policy, device=run.place.device)
    found = losses_and_scales(sharded)
    rival = fully_sharded(run, MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half))
    least, end = found["the scales"].min().item(), found["the scales"][-1].item()
    note = f"scale {2.0**24:g}, at least {least:g}, {end:g} at the end"
    return Told(found, losses_and_scales(rival), 1e-2, note, least < 2.0**24)


def gathered(run: Run) -> Told:
    """Whole weights in pieces, and forwards of the model's own code, of its ranks equally many."""
    policy = graphshard.BlockPolicy({Block})
    model, batch = run.model(), run.batch(0)
    sharded = graphshard.compile(run.model(), policy, device=run.place.device)
    root, *blocks = sharded.plan.units
    least = root.unsharded_bytes + blocks[0].unsharded_bytes
    with torch.no_grad():
        found = {name: whole(tensor) for name, tensor in sharded.iter_full()}
        found |= {f"{n} packed": whole(t) for n, t in sharded.iter_full(max_bytes=1 << 28)}
        found["a loss"] = whole(sharded.run_eagerly("forward", *batch))
        with sharded.gathered(max_bytes=least) as lent:
            losses = [lent(*batch) for _ in range(3)]
        found["losses, unit by unit"] = whole(torch.stack(losses))
        loss = model(*batch)
    expected = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    expected |= {f"{name} packed": tensor for name, tensor in expected.items()}
    expected |= {"a loss": whole(loss), "losses, unit by unit": whole(loss.expand(3))}
    return Told(found, expected, 1e-6)


def fully_sharded(run: Run, precision: Any = None) -> nn.Module:
    """The model under torch's `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    model = run.model()
    mesh = dist.init_device_mesh(run.place.device.type, (run.count,))
    options: dict[str, Any] = {"mesh": mesh}
    if precision is not None:
        options["mp_policy"] = precision
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def against_fsdp2(run: Run) -> Told:
    """The same numbers as `fully_shard`, and the time of a step of both, with real collectives."""
    policy = graphshard.BlockPolicy({Block})
    sharded = graphshard.compile(run.model(), policy, device=run.place.device)
    rival = fully_sharded(run)
    told = Told(train(sharded, run.batch, Protocol()), train(rival, run.batch, Protocol()))
    ours, theirs = (slowest_step(model, run) * 1e3 for model in (sharded, rival))
    told.note = f"a step of the slowest rank {ours:.2f} ms, {theirs:.2f} of FSDP2"
    return told


def slowest_step(model: nn.Module, run: Run, steps: int = 8) -> float:
    """The median step of the slowest rank, from a common start."""
    batch, times = run.batch(0), []
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        model(*batch).backward()
        run.place.synchronize()
        times.append(time.perf_counter() - begin)
        model.zero_grad()
    slowest = torch.tensor(median(times[steps // 2 :]), device=run.place.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def calibrated(run: Run) -> Told:
    """A rough calibration of all ranks: on GPUs the one case of its events beside real gathers."""
    from graphshard.calibrate.bench import CudaBench, HostBench
    from graphshard.calibrate.ranks import joined
    from graphshard.calibrate.run import calibrate
    from graphshard.runtime.measure import Effort

    device = run.place.device
    rough = Effort(least=1, most=1, piece=0.0, budget=0.0)
    with joined(device) as group:
        sizes = {"product_size": 1024, "beside_size": 512, "large": (1 << 26,)}
        bench = CudaBench(device, **sizes) if run.place.cuda else HostBench(device)  # type: ignore[arg-type]
        found = calibrate(group, effort=rough, dtypes=(), share=0.1, bench=bench)
    lost, lines = found.hardware.contention, found.hardware.lines
    moved = {"all_gather", "reduce_scatter", "all_reduce"}
    ending = ".inter" if "all_gather.inter" in lines else ""
    ok = {f"{op}{ending}" for op in moved} <= set(lines) and 0 <= lost <= 1
    said = "; ".join(found.notes) or f"contention {lost:.3f}"
    return Told(note=f"{len(found.rows)} measurements; {said}", ok=ok)


def parted(run: Run) -> Told:
    """Ranks that part ways are told of it; the last case, since they do not meet again."""
    policy = graphshard.BlockPolicy({Block})
    sharded = graphshard.compile(run.model(), policy, device=run.place.device)
    sharded(*run.batch(0)).backward()
    said = parting_said(sharded, run.place, run.rank)
    return Told(note=said[:80], ok="different collectives" in said)


CASES: dict[str, Callable[[Run], Told]] = {
    "FULL_SHARD": trained,
    "SHARD_GRAD_OP": partial(trained, strategy="SHARD_GRAD_OP"),
    "NO_SHARD": partial(trained, strategy="NO_SHARD"),
    "SHARD_OPTIMIZER": partial(trained, strategy="SHARD_OPTIMIZER"),
    "HYBRID_SHARD": hybrid,
    "reshard_after_forward=k": resharded,
    "overlap": partial(trained, schedule="overlap"),
    "offload": partial(trained, offload=("params", "activations")),
    "clipping": partial(trained, how=Protocol(clip=0.1)),
    "no_sync": partial(trained, how=Protocol(steps=2, micro=3)),
    "checkpoint": checkpointed,
    "fp16, GradScaler": scaled,
    "another dim": other_dims,
    "gathered weights": gathered,
    "FSDP2": against_fsdp2,
    "cuda_graph": graphs,
    "inductor": compiled,
    "calibrate": calibrated,
    "parting ways": parted,
}
