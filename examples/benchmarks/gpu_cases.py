"""What the ranks of the section `ranks` do: each case trains, and tells what is wrong.

A case runs on any device: over NCCL on GPUs, over Gloo on CPUs. It compares the losses of this rank
and the whole parameters at the end with those of one process that trains on every rank's batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphshard
from examples.benchmarks.gpu_checks import gap
from examples.benchmarks.gpu_table import Place
from examples.benchmarks.harness import worst_rank
from examples.gpt import GPT, Block, GPTConfig
from graphshard.errors import FingerprintError
from graphshard.runtime.calls import Fingerprint

Batch = tuple[Tensor, ...]
Numbers = dict[str, Tensor]


@dataclass
class Told:
    """What a rank tells of a case.

    worst: how far its numbers are from what they should be, as a fraction of their norm; None if
    none were compared. bar: how far they may be. note: in words. ok: whether the words are as they
    should be.
    """

    worst: float | None = None
    bar: float = 1e-4
    note: str = ""
    ok: bool | None = None


@dataclass(frozen=True)
class Run:
    """A rank at work."""

    place: Place
    rank: int
    count: int

    def model(self, seed: int = 0) -> nn.Module:
        """A GPT with the same weights on every device."""
        torch.manual_seed(seed)
        small = GPTConfig(vocab=67, layers=2, heads=2, width=32)
        config = small if self.place.small else GPTConfig(1024, layers=4, heads=4, width=256)
        return GPT(config).to(self.place.device)

    def batch(self, step: int, rank: int) -> Batch:
        """The tokens of a rank in a step."""
        length, vocab = (16, 67) if self.place.small else (128, 1024)
        generator = torch.Generator().manual_seed(100 * step + rank)
        ids = torch.randint(vocab, (2, length + 1), generator=generator).to(self.place.device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def sharded(self, policy: Any = None, seed: int = 0, **options: Any) -> Any:
        """The model, compiled under a policy; one unit for each block by default."""
        policy = policy or graphshard.BlockPolicy({Block})
        return graphshard.compile(self.model(seed), policy, device=self.place.device, **options)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, in float32 on the CPU."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().float().cpu().clone()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(
    run: Run,
    model: Any,
    steps: int = 3,
    optim: torch.optim.Optimizer | None = None,
    first: int = 0,
    clip: float | None = None,
    micro: int = 1,
    alone: bool = False,
) -> Numbers:
    """Train on batches `first` and on, a model that is not sharded (`alone`) on every rank's.

    clip: the largest norm of gradients. micro: batches of one step. Returns the parameters at the
    end, the losses of this rank and, where they are clipped, norms.
    """
    optim, losses, norms = optim or optimizer_of(model), list[Tensor](), list[Tensor]()
    ranks = range(run.count) if alone else [run.rank]
    clip_plain = partial(nn.utils.clip_grad_norm_, [*model.parameters()])
    for step in range(steps):
        for part in range(micro):
            number = first + step * micro + part
            with nullcontext() if alone or part + 1 == micro else model.no_sync():
                each = {rank: model(*run.batch(number, rank)) for rank in ranks}
                (torch.stack([*each.values()]).mean() / micro).backward()
            losses.append(each[run.rank])
        if clip is not None:
            norms.append((clip_plain if alone else model.clip_grad_norm_)(clip))
        optim.step()
        optim.zero_grad()
    found = {name: whole(param) for name, param in model.named_parameters()}
    found["the losses"] = whole(torch.stack(losses))
    return found | ({"the norms": whole(torch.stack(norms))} if norms else {})


# -- the cases -------------------------------------------------------------------------------------

Words = Callable[[Any], tuple[str, bool]]
"""What to tell of a sharded module, and whether it is as it should be."""


def compared(run: Run, sharded: Any, words: Words = lambda _: ("", True), **how: Any) -> Told:
    """A sharded module against one process; `how`: to train."""
    found = train(run, sharded, **how)
    note, ok = words(sharded)
    return Told(gap(found, train(run, run.model(), alone=True, **how)), note=note, ok=ok)


def trained(run: Run, how: dict[str, Any] | None = None, **fields: Any) -> Told:
    """A policy with these fields against one process."""
    policy = graphshard.BlockPolicy({Block}, **fields)
    return compared(run, run.sharded(policy), **(how or {}))


def compiled(run: Run) -> Told:
    """Compiled regions, none of which may run operator by operator instead."""

    def regions(sharded: Any) -> tuple[str, bool]:
        found = sharded.program.regions
        return str(found), bool(found.forms) and not found.fell_back

    return compared(run, run.sharded(backend="inductor"), words=regions)


def hybrid(run: Run) -> Told:
    """Shards over half of the ranks, copies over the other dimension of the mesh."""
    shape = (2, run.count // 2)
    mesh = dist.init_device_mesh(run.place.device.type, shape, mesh_dim_names=("copy", "shard"))
    policy = graphshard.BlockPolicy({Block}, strategy="HYBRID_SHARD")

    def reduces(sharded: Any) -> tuple[str, bool]:
        ops = {event.op for event in sharded.program.schedule()}
        return f"mesh {shape}", {"reduce_scatter", "all_reduce"} <= ops

    return compared(run, run.sharded(policy, mesh=mesh), words=reduces)


def resharded(run: Run) -> Told:
    """Backward gathers from half of the ranks, over a process group of its own."""
    return trained(run, reshard_after_forward=run.count // 2)


def checkpointed(run: Run) -> Told:
    """Training that goes on from a checkpoint is bit-equal to training that never stopped."""
    path = run.place.folder / "checkpoint"
    sharded = run.sharded()
    optim = optimizer_of(sharded)
    train(run, sharded, 2, optim)
    sharded.save_checkpoint(path, optim, extra={"step": 2})
    on = train(run, sharded, 2, optim, first=2)
    other = run.sharded(seed=9)
    its, extra = optimizer_of(other), dict[str, Any]()
    other.load_checkpoint(path, its, extra=extra)
    found = train(run, other, 2, its, first=2)
    return Told(gap(found, on), 0.0, f"step {extra['step']}", extra["step"] == 2)


def scaled(run: Run) -> Told:
    """fp16 under torch's GradScaler, overflows among its steps, against `fully_shard`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def losses_and_scales(model: nn.Module) -> Numbers:
        optim = torch.optim.SGD(model.parameters(), lr=0.05)
        kind = run.place.device.type
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**24, growth_interval=2)
        losses, scales = [], []
        for step in range(12):
            loss = model(*run.batch(step, run.rank))
            scaler.scale(loss).backward()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            losses.append(loss)
            scales.append(torch.tensor(scaler.get_scale()))
        return {"the losses": whole(torch.stack(losses)), "the scales": torch.stack(scales)}

    half = torch.float16
    precision = graphshard.MixedPrecision(param_dtype=half, reduce_dtype=half)
    sharded = run.sharded(graphshard.BlockPolicy({Block}, mixed_precision=precision))
    found = losses_and_scales(sharded)
    mixed = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
    rival = fully_sharded(run, mp_policy=mixed)
    least, end = found["the scales"].min().item(), found["the scales"][-1].item()
    note = f"scale {2.0**24:g}, at least {least:g}, {end:g} at the end"
    return Told(gap(found, losses_and_scales(rival)), 1e-2, note, least < 2.0**24)


def fully_sharded(run: Run, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = run.model()
    options["mesh"] = dist.init_device_mesh(run.place.device.type, (run.count,))
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def against_fsdp2(run: Run) -> Told:
    """The same numbers as `fully_shard`, and the time of a step of both, with real collectives."""
    sharded, rival = run.sharded(), fully_sharded(run)
    told = Told(gap(train(run, sharded), train(run, rival)))
    ours, theirs = (slowest_step(model, run) * 1e3 for model in (sharded, rival))
    told.note = f"a step of the slowest rank {ours:.2f} ms, {theirs:.2f} of FSDP2"
    return told


def slowest_step(model: nn.Module, run: Run, steps: int = 8) -> float:
    """The median step of the slowest rank, from a common start."""
    batch, times = run.batch(0, run.rank), []
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        model(*batch).backward()
        run.place.synchronize()
        times.append(time.perf_counter() - begin)
        model.zero_grad()
    return worst_rank([median(times[steps // 2 :])], run.place.device)[0]


def parted(run: Run) -> Told:
    """Ranks that go on with different programs are told; the last case, as they do not meet again.

    No program runs then, only the comparison of what ranks begin.
    """
    sharded = run.sharded()
    sharded(*run.batch(0, run.rank)).backward()
    agreement = sharded._graphshard.bindings.agreement
    programs = [Fingerprint((f"forward of program {number}",)) for number in (0, 1)]
    for program in (*programs, *programs):
        agreement.require(program)
    said = "nothing"
    try:
        agreement.require(programs[run.rank % 2])
        run.place.synchronize()  # the device knows by now
        agreement.require(programs[0])
    except FingerprintError as error:
        said = str(error)
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
    "clipping": partial(trained, how={"clip": 0.1}),
    "no_sync": partial(trained, how={"steps": 2, "micro": 3}),
    "checkpoint": checkpointed,
    "fp16, GradScaler": scaled,
    "FSDP2": against_fsdp2,
    "inductor": compiled,
    "parting ways": parted,
}
