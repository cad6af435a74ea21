"""A calibration from end to end: what is measured, and the hardware it makes."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from graphshard.calibrate.measure import Effort, Timing, Watch, measure
from graphshard.calibrate.overhead import Calls, TinyStep
from graphshard.calibrate.probes import Shot, shots
from graphshard.calibrate.ranks import (
    HostCopy,
    Places,
    TimedCollective,
    TimedCompute,
    TimedOptimizer,
    places,
)
from graphshard.cost.collective_cost import BETWEEN_NODES
from graphshard.cost.op_cost import VIEW
from graphshard.hardware.curves import Points, ascending, fit_line
from graphshard.hardware.hardware import KINDS, Hardware
from graphshard.program import ops
from graphshard.progress import Progress
from graphshard.runtime.group import Group

_KIB = 1024


_COLLECTIVE_BYTES = (16 * _KIB, 256 * _KIB, 2048 * _KIB, 8192 * _KIB, 32768 * _KIB)


_TENSORS = (1, 8)


_OPERATIONS = (ops.all_gather, ops.reduce_scatter, ops.all_reduce)


_VIEWS = 8


_CACHED = {"cpu": 2**20, "cuda": 2**27}
"""Bytes moved beyond which caches hold too little of it to matter, by kind of device."""


_NUMELS = (1 << 8, 1 << 14, 1 << 18, 1 << 20)


_OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params),
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
}


@dataclass(frozen=True)
class Row:
    """One line of what was measured.

    amount: FLOPs or bytes. spread: relative interquartile range. rate: amount per second.
    """

    group: str
    name: str
    amount: float
    seconds: float
    spread: float

    @property
    def rate(self) -> float:
        """FLOPs or bytes a second."""
        return self.amount / self.seconds


@dataclass(frozen=True)
class Calibration:
    """The hardware, and the measurements it was made from."""

    hardware: Hardware
    rows: tuple[Row, ...]


def calibrate(
    group: Group,
    *,
    effort: Effort | None = None,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    like: str | None = None,
    name: str | None = None,
    share: float = 1.0,
    progress: Progress | None = None,
) -> Calibration:
    """Measure this rank's device and the network between the ranks of `group`, all ranks at once.

    Args:
        group: the ranks; every one of them calls this at the same point.
        effort: how long to measure.
        dtypes: to measure products, attention and copies in, besides float32.
        like: the preset whose figures stand for what cannot be measured here: other dtypes, and
            the network on a single rank. None: the one that is most like the device.
        name: of the hardware. None: the device and the backend.
        share: of the sizes of each operator to measure.
        progress: a bar.

    Returns:
        The same on every rank.

    Raises:
        CostError: there is no preset `like`, or hosts have different numbers of ranks.
    """
    effort, progress = effort or Effort(), progress or Progress(visible=False)
    base = Hardware.load(like or _nearest(group.device))
    where = places(group)
    watch = Watch(group.device)

    def timed(title: str, works: Sequence[Any]) -> list[Timing]:
        with progress.stage(title, total=len(works) * (1 + effort.least)):
            return measure(works, watch, group, effort, progress.advance)

    compute = list(shots(group.device, tuple(dtypes), share=share))
    rows = _rows(compute, timed("operators", compute))
    del compute
    updates = list(_updates(group, share))
    rows += _rows(updates, took := timed("optimizers", updates))
    lines = _lines(updates, took, lambda work: (1, work.tensors, work.size))
    del updates
    contention = 0.0
    for part, ending in ((where.within, ""), (where.between, BETWEEN_NODES)):
        if part is None:
            continue
        moves = [
            TimedCollective(op, part, count, size)
            for op in _OPERATIONS
            for size in _COLLECTIVE_BYTES[: max(3, round(share * len(_COLLECTIVE_BYTES)))]
            for count in _TENSORS
        ]
        rows += _rows(moves, took := timed(f"collectives{ending}", moves), ending)
        found = _lines(moves, took, partial(_ring, part.size))
        lines |= {f"{op}{ending}": line for op, line in found.items()}
        contention = max(contention, _contention(part, timed))
    host: float | None = None
    if group.device.type == "cuda":
        copies = [HostCopy(group.device, 1 << 26)]
        took = timed("host copies", copies)
        rows += _rows(copies, took)
        host = 2 * copies[0].size / took[0].seconds
    curves = _curves(rows)
    if group.device.type == "cpu":  # an accelerator goes on computing while the host takes views
        (view,) = timed("views", [Calls(_VIEWS)])
        rows.append(Row("overhead", VIEW, 1.0, view.seconds, view.spread))
        curves[VIEW] = ((1.0, view.seconds),)
    hardware = _hardware(group, base, where, curves, lines, contention, name, host)
    tiny = TinyStep(group.device, wall=group.size > 1)
    (step,) = timed("overhead", [tiny])
    overhead = tiny.beyond(step.seconds, hardware)
    rows.append(Row("overhead", "step", 1.0, max(overhead, 1e-9), step.spread))
    hardware = group.everyones(_rounded(hardware.with_(step_overhead=overhead).to_dict()))[0]
    return Calibration(Hardware(**hardware), tuple(rows))


def _rounded(figures: Any) -> Any:
    """`figures` to four digits, which is more than a measurement is worth."""
    if isinstance(figures, float):
        return float(f"{figures:.4g}")
    if isinstance(figures, (list, tuple)):
        return [_rounded(figure) for figure in figures]
    if isinstance(figures, dict):
        return {name: _rounded(figure) for name, figure in figures.items()}
    return figures


def _nearest(device: torch.device) -> str:
    """The preset that is most like `device`."""
    if device.type != "cuda":
        return "cpu-gloo"
    described = torch.cuda.get_device_name(device).lower()
    kinds = {"b200": "b200", "h200": "h200", "h100": "h100-sxm", "a100": "a100-80gb"}
    return next((preset for part, preset in kinds.items() if part in described), "h100-sxm")


def _updates(group: Group, share: float) -> Iterator[TimedOptimizer]:
    for name, make in _OPTIMIZERS.items():
        for numel in _NUMELS[: max(2, round(share * len(_NUMELS)))]:
            for tensors in (2, 8):
                yield TimedOptimizer(name, make, tensors, numel, group)


def _ring(ranks: int, work: TimedCollective) -> Sequence[float]:
    """Hops, tensors, and bytes that pass a rank (see `collective_cost`)."""
    return ranks - 1, work.tensors, (ranks - 1) / ranks * work.size


def _rows(works: Sequence[Any], timings: Sequence[Timing], ending: str = "") -> list[Row]:
    return [
        Row(
            work.group,
            f"{work.curve if isinstance(work, Shot) else work.name}{ending}",
            float(work.amount if isinstance(work, Shot) else work.size),
            timing.seconds,
            timing.spread,
        )
        for work, timing in zip(works, timings, strict=True)
    ]


def _curves(rows: Sequence[Row]) -> dict[str, Points]:
    """By operator: the mean of what was measured at an amount, over amounts."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.group == "operators":
            found[row.name][row.amount].append(row.seconds)
    return {
        name: ascending([(amount, sum(took) / len(took)) for amount, took in points.items()])
        for name, points in found.items()
    }


def _lines(
    works: Sequence[Any], timings: Sequence[Timing], features: Callable[[Any], Sequence[float]]
) -> dict[str, tuple[float, ...]]:
    """By name: the line through what was measured."""
    points: dict[str, list[tuple[Sequence[float], float]]] = defaultdict(list)
    for work, timing in zip(works, timings, strict=True):
        points[work.name].append((features(work), timing.seconds))
    return {
        name: fit_line([row for row, _ in found], [seconds for _, seconds in found])
        for name, found in points.items()
    }


def _contention(group: Group, timed: Callable[[str, Sequence[Any]], list[Timing]]) -> float:
    """The part of compute's speed that a gather takes: what it adds to products it runs under."""
    gather = TimedCollective(ops.all_gather, group, 1, 8192 * _KIB)
    product = torch.ones(256, 256, device=group.device)
    one = TimedCompute(product, 20, None)
    alone, once = timed("contention", [gather, one])
    # About twice as many products as the gather lasts.
    count = max(20, round(40 * alone.seconds / once.seconds))
    count = max(group.everyones(count))
    by_itself, together = timed(
        "contention", [TimedCompute(product, count, None), TimedCompute(product, count, gather)]
    )
    taken = (together.seconds - by_itself.seconds) / alone.seconds
    return min(1.0, max(0.0, taken))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU with {os.cpu_count()} cores"


def _memory(device: torch.device, per_host: int) -> int:
    """Bytes of the device, or a rank's part of its host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_host


def _hardware(
    group: Group,
    base: Hardware,
    where: Places,
    curves: Mapping[str, Points],
    lines: dict[str, tuple[float, ...]],
    contention: float,
    name: str | None,
    host: float | None,
) -> Hardware:
    """The figures of a calibration; what was not measured is `base`'s, and `source` says so."""
    kind = group.device.type
    flops = dict(base.flops)
    for curve, points in curves.items():
        family, _, dtype = curve.partition(".")
        if family == "matmul":
            flops[dtype or "float32"] = max(amount / seconds for amount, seconds in points)
    figures: dict[str, Any] = {}
    unmeasured = [d for d in flops if flops[d] == base.flops.get(d)]
    for ending, figure in (("", "intra"), (BETWEEN_NODES, "inter")):
        line = lines.get(f"all_gather{ending}")
        if line is not None:
            figures[f"{figure}_bandwidth"] = 1 / max(line[2], 1e-15)
            figures[f"{figure}_latency"] = max(line[0], 1e-9)
        else:
            unmeasured.append(f"the network {'within' if not ending else 'between'} nodes")
    if kind == "cpu" and "intra_bandwidth" in figures and "inter_bandwidth" not in figures:
        figures["inter_bandwidth"] = figures["intra_bandwidth"]
        figures["inter_latency"] = figures["intra_latency"]
    # What lies in no cache; of sizes that would, the largest.
    streams = [curves["add"], curves["clone"]]
    large = [p for points in streams for p in points if p[0] >= _CACHED[kind]]
    large = large or [points[-1] for points in streams]
    bandwidth = max(amount / seconds for amount, seconds in large)
    ranks = f"{group.size} ranks" if group.size > 1 else "one rank"
    hosts = "" if where.hosts == 1 else f" on {where.hosts} hosts"
    threads = f", {torch.get_num_threads()} thread(s) each" if kind == "cpu" else ""
    device = _device_name(group.device)
    return Hardware(
        name=name or f"{kind}-{'nccl' if kind == 'cuda' else 'gloo'}",
        flops=flops,
        memory_bytes=_memory(group.device, where.per_host),
        memory_bandwidth=bandwidth,
        launch_floor=min(seconds for _, seconds in curves["add"]),
        gpus_per_node=where.per_host if kind == "cuda" or where.hosts > 1 else base.gpus_per_node,
        **{
            "intra_bandwidth": base.intra_bandwidth,
            "intra_latency": base.intra_latency,
            "inter_bandwidth": base.inter_bandwidth,
            "inter_latency": base.inter_latency,
        }
        | figures,
        host_bandwidth=host or bandwidth / 2,  # a CPU's copy reads and writes the same memory
        efficiency=dict.fromkeys(KINDS, 1.0),
        about=f"{device}, {ranks}{hosts}{threads}",
        source=f"graphshard calibrate, {ranks}{hosts}{threads}, torch {torch.__version__}"
        + (f"; of {base.name}, as not measured: {', '.join(unmeasured)}" if unmeasured else ""),
        contention=contention,
        curves=curves,
        lines=lines,
    )
