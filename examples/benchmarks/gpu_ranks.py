"""Several ranks, over NCCL where there are GPUs, against one process and against FSDP2."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import graphshard
from examples.benchmarks.gpu_checks import close, config, gap_of, grads_of, tokens, trained
from examples.benchmarks.gpu_table import Place, Row
from examples.gpt import GPT, Block


def ranks(place: Place) -> Iterator[Row]:
    """Ranks over NCCL, one on each GPU; on a single GPU two of them, each as if on its own host."""
    count = min(4, torch.cuda.device_count()) if place.cuda else 2
    alone = place.cuda and count == 1
    count = max(2, count)
    how = "on one GPU, a NCCL_HOSTID each" if alone else "over NCCL" if place.cuda else "over Gloo"
    given = (count, str(place.folder), place.device.type, place.small, alone)
    try:
        started = torch.multiprocessing.spawn(_rank, given, nprocs=count, join=False)
        deadline = time.monotonic() + (60.0 if place.cuda else 300.0)
        while not started.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise TimeoutError("the ranks did not come to an end")
    except Exception as error:
        for line in _nccl_said(place.folder):
            yield Row("ranks", "NCCL said", line[:160])
        said = str(error).strip().splitlines()[-1]
        yield Row("ranks", f"{count} ranks {how}", said[:160], "no error", False)
        return
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "overlap", "offload"):
        found = (place.folder / f"rank0.{name}").read_text()
        worst = float(found)
        said = "bit-equal" if worst == 0 else f"within {worst:.1e}"
        yield Row("ranks", f"{count} ranks {how}, {name}", said, "1e-4", worst <= 1e-4)
    worst = float((place.folder / "rank0.fsdp2").read_text())
    said = "bit-equal" if worst == 0 else f"within {worst:.1e}"
    yield Row("ranks", "losses against FSDP2's, 3 steps", said, "1e-4", worst <= 1e-4)
    for line in (place.folder / "rank0.seconds").read_text().splitlines():
        name, _, milliseconds = line.partition(": ")
        yield Row("ranks", f"step of the slowest rank, {name}", f"{milliseconds} ms")


def _nccl_said(folder: Path) -> list[str]:
    """The warnings that NCCL wrote, without their time and place."""
    lines = [line for file in folder.glob("nccl.*") for line in file.read_text().splitlines()]
    return sorted({line.split("NCCL WARN", 1)[1].strip() for line in lines if "NCCL WARN" in line})


def _rank(
    rank: int, count: int, folder: str, kind: str, small: bool, alone: bool
) -> None:  # pragma: no cover  # in processes of their own
    device = torch.device("cpu")
    if kind == "cuda":
        os.environ["NCCL_DEBUG"] = "WARN"
        os.environ["NCCL_DEBUG_FILE"] = f"{folder}/nccl.%p"
        if alone:
            os.environ["NCCL_HOSTID"] = f"graphshard{rank}"
            os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        device = torch.device("cuda", 0 if alone else rank)
        torch.cuda.set_device(device)
        torch.empty(1, device=device)  # meshes choose a device where none is in use yet
    else:
        torch.set_num_threads(1)
    own = str(0 if alone else rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=own)
    store = dist.FileStore(f"{folder}/store", count)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    place = Place(device, small, Path(folder))
    torch.manual_seed(0)
    plain = GPT(config(place)).to(device)
    reference = copy.deepcopy(plain)
    losses = [reference(*tokens(place, seed)) for seed in range(count)]
    (sum(losses[1:], losses[0]) / count).backward()
    wanted = grads_of(reference)
    ours: list[float] = []
    seconds: dict[str, float] = {}
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "overlap", "offload"):
        fields: dict[str, Any] = {"strategy": name} if name.isupper() else {}
        if name == "overlap":
            fields = {"schedule": "overlap"}
        elif name == "offload":
            fields = {"offload": ("params", "activations")}
        policy = graphshard.BlockPolicy({Block}, **fields)
        sharded = graphshard.compile(copy.deepcopy(plain), policy, device=device)
        for _ in range(2):
            sharded.zero_grad()
            loss = sharded(*tokens(place, rank))
            loss.backward()
        found = {
            n: p.grad.full_tensor().cpu()
            for n, p in sharded.named_parameters()
            if p.grad is not None
        }
        row = close("ranks", name, loss, losses[rank], found, wanted)
        worst = torch.tensor(0.0 if row.found == "bit-equal" else float(row.found.split()[1]))
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if rank == 0:
            Path(folder, f"rank0.{name}").write_text(f"{worst.item():.3e}")
        if name == "FULL_SHARD":
            sharded.zero_grad()
            ours = trained(sharded, place, 3, seed=rank)
        seconds[name] = _seconds(sharded, place, rank)
    seconds["FSDP2"] = _write_rival(plain, place, rank, ours, folder)
    if rank == 0:
        lines = [f"{name}: {each * 1e3:.2f}" for name, each in seconds.items()]
        Path(folder, "rank0.seconds").write_text("\n".join(lines))
    dist.barrier()
    os._exit(0)  # Gloo at times aborts a process that exits in order


def _write_rival(plain: nn.Module, place: Place, rank: int, ours: list[float], out: str) -> float:
    from torch.distributed.fsdp import fully_shard

    theirs = copy.deepcopy(plain)
    mesh = dist.init_device_mesh(place.device.type, (dist.get_world_size(),))
    for block in theirs.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    losses = trained(theirs, place, 3, seed=rank)
    gap = max(map(gap_of, torch.tensor(ours), torch.tensor(losses)))
    if rank == 0:
        Path(out, "rank0.fsdp2").write_text(f"{gap:.3e}")
    return _seconds(theirs, place, rank)


def _seconds(model: nn.Module, place: Place, rank: int, steps: int = 8) -> float:
    """The median step of the slowest rank, from a common start: with real collectives."""
    batch, times = tokens(place, rank), []
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        model(*batch).backward()
        place.synchronize()
        times.append(time.perf_counter() - begin)
        model.zero_grad()
    slowest = torch.tensor(median(times[steps // 2 :]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()
