"""Buffers of collectives in memory that NCCL has registered, on ranks over NCCL."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import graphshard
from examples.benchmarks.gpu_checks import config, tokens, trained
from examples.benchmarks.gpu_ranks import join, nccl_said, number_of_ranks
from examples.benchmarks.gpu_table import Place, Row
from examples.gpt import GPT, Block
from graphshard.errors import PolicyError
from graphshard.runtime.gather import AllGather

KINDS = ("default", "nccl", "symmetric")
SLACK = 8 << 20  # bytes of segments for small tensors
STEPS = 6
LIMIT = 60.0  # seconds for the ranks of one kind
NAME = "memory"


def collective_memory(place: Place) -> Iterator[Row]:
    """Each kind of memory: losses, what the pool holds, what NCCL says, time, and the end.

    Ranks that share a GPU are as on hosts of their own, between which there is no symmetric memory:
    there that kind may be refused, but not wrong.
    """
    count, alone = number_of_ranks(place)
    losses: dict[str, list[float]] = {}
    for kind in KINDS:
        folder = place.folder / f"memory_{kind}"
        folder.mkdir(exist_ok=True)
        given = (count, str(folder), place.device.type, place.small, alone, kind)
        failure = _run(given, LIMIT if place.cuda else 300.0)
        if failure:
            for line in nccl_said(folder):
                yield Row(NAME, "NCCL said", line[:160])
        yield Row(NAME, f"{count} ranks, {kind}", failure[:160] or "ended", "ended", not failure)
        if not (folder / "rank0.json").exists():
            continue
        said = json.loads((folder / "rank0.json").read_text())
        if said["refused"]:
            ok = None if place.cuda else "runs on cpu" in said["refused"]
            yield Row(NAME, f"{kind}, refused", said["refused"][:160], ok=ok)
            if place.cuda and kind == "nccl":
                yield Row(NAME, kind, "refused", "a pool", False)
            continue
        losses[kind] = said["losses"]
        yield Row(NAME, f"{kind}, step", f"{said['milliseconds']:.2f} ms")
        if kind != "default":
            yield from _rows(kind, said, losses, folder, alone)


def _rows(
    kind: str, said: dict[str, Any], losses: dict[str, list[float]], folder: Path, alone: bool
) -> Iterator[Row]:
    same = losses[kind] == losses.get("default")
    gaps = [abs(a - b) for a, b in zip(losses[kind], losses.get("default", []), strict=False)]
    found = "bit-equal" if same else f"within {max(gaps, default=float('inf')):.1e}"
    close = len(gaps) == STEPS and max(gaps) <= 1e-4
    yield Row(NAME, f"{kind}, losses of {STEPS} steps", found, "1e-4", close)
    may_fail = kind == "symmetric" and alone
    registered = not said["why_not"]
    text = said["why_not"] or "registered"
    yield Row(NAME, kind, text[:160], "registered", registered or (None if may_fail else False))
    planned, held = said["planned"], said["segments"]
    fits = planned <= held <= planned + SLACK
    yield Row(NAME, f"{kind}, bytes held", f"{held:,}", f"{planned:,} planned", fits)
    inside = f"{said['inside']} of {said['gathered']} gathered buffers"
    all_inside = 0 < said["gathered"] == said["inside"]
    yield Row(NAME, f"{kind}, inside the pool", inside, "all", all_inside)
    logs = [line for file in folder.glob("nccl.*") for line in file.read_text().splitlines()]
    lines = sum("regist" in line.lower() for line in logs)
    logged = (lines > 0) if registered else None
    yield Row(NAME, f"{kind}, lines of NCCL on registration", str(lines), "some", logged)


def _run(given: tuple[Any, ...], limit: float) -> str:
    """Run the ranks; what went wrong, "" if nothing did."""
    began = time.monotonic()
    started = torch.multiprocessing.spawn(_rank, given, nprocs=given[0], join=False)
    try:
        while not started.join(timeout=1.0):
            if time.monotonic() - began > limit:
                return f"no end after {limit:.0f} s"
    except Exception as error:
        return str(error).strip().splitlines()[-1]
    finally:
        for process in started.processes:
            process.kill()
    return ""


def _rank(
    rank: int, count: int, folder: str, kind: str, small: bool, alone: bool, memory: str
) -> None:  # pragma: no cover  # in processes of their own
    device = join(rank, count, folder, kind, alone)
    # Before the first communicator, which reads them.
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="REG")
    place = Place(device, small, Path(folder))
    torch.manual_seed(0)
    policy = graphshard.BlockPolicy({Block}, collective_memory=memory)
    said: dict[str, Any] = {"refused": ""}
    try:
        sharded = graphshard.compile(GPT(config(place)), policy, device=device)
    except PolicyError as error:
        said["refused"] = str(error)
    else:
        said |= _measured(sharded, place, rank)
    if rank == 0:
        Path(folder, "rank0.json").write_text(json.dumps(said))
    place.synchronize()
    dist.destroy_process_group()  # with the pool still registered
    os._exit(0)  # Gloo at times aborts a process that exits in order


def _measured(sharded: Any, place: Place, rank: int) -> dict[str, Any]:  # pragma: no cover
    """The losses of some steps, the time of one, and what the pool holds."""
    said: dict[str, Any] = {"losses": trained(sharded, place, STEPS, seed=rank)}
    batch, seconds = tokens(place, rank), []
    for _ in range(12):
        sharded.zero_grad()
        place.synchronize()
        began = time.perf_counter()
        sharded(*batch).backward()
        place.synchronize()
        seconds.append(time.perf_counter() - began)
    said["milliseconds"] = median(seconds[2:]) * 1e3
    memory = sharded._graphshard.bindings.group.shard.memory
    if memory is None:
        return said
    found: list[bool] = []
    results = AllGather.results

    def looked_at(self: AllGather, pending: Any) -> Any:
        spans = [(s["address"], s["total_size"]) for s in memory._pool._pool.snapshot()]
        found.extend(
            any(start <= buffer.data_ptr() < start + size for start, size in spans)
            for buffer in pending.buffers
        )
        return results(self, pending)

    AllGather.results = looked_at  # type: ignore[method-assign]
    try:
        sharded(*batch).backward()
    finally:
        AllGather.results = results  # type: ignore[method-assign]
    noted = sharded.program.collective_memory
    return said | {
        "why_not": noted.why_not,
        "planned": noted.bytes,
        "segments": sum(memory._pool.segments()),
        "inside": sum(found),
        "gathered": len(found),
    }
