"""Run a calibration from end to end: measure everything, and make a `Hardware` of it."""

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
from graphshard.calibrate.probes import SizedProbe, sized_probes
from graphshard.calibrate.ranks import (
    HostCopy,
    HostGroups,
    TimedCollective,
    TimedCompute,
    TimedOptimizer,
    host_groups,
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
"""Operators that move this many bytes do not fit in caches, by kind of device."""


_NUMELS = (1 << 8, 1 << 14, 1 << 18, 1 << 20)


_OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params),
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
}


@dataclass(frozen=True)
class Row:
    """One measurement.

    amount: FLOPs or bytes. seconds: median. spread: relative interquartile range.
    """

    group: str
    name: str
    amount: float
    seconds: float
    spread: float

    @property
    def rate(self) -> float:
        """FLOPs or bytes per second."""
        return self.amount / self.seconds


@dataclass(frozen=True)
class Calibration:
    """The hardware, and the measurements that it was made from."""

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
        group: the ranks; each of them must call this at the same point.
        effort: how long to measure.
        dtypes: dtypes besides float32 to measure products, attention and copies in.
        like: the preset for figures that cannot be measured here: other dtypes, and the network on
            a single rank. None: the preset most like the device.
        name: the name of the hardware. None: the device and the backend.
        share: the fraction of each operator's sizes to measure.
        progress: a progress bar.

    Returns:
        The same calibration on every rank.

    Raises:
        CostError: there is no preset `like`, or hosts have different numbers of ranks.
    """
    effort, progress = effort or Effort(), progress or Progress(visible=False)
    base = Hardware.load(like or _nearest(group.device))
    hosts = host_groups(group)
    watch = Watch(group.device)

    def timed(title: str, benchmarks: Sequence[Any]) -> list[Timing]:
        with progress.stage(title, total=len(benchmarks) * (1 + effort.least)):
            return measure(benchmarks, watch, group, effort, progress.advance)

    compute = list(sized_probes(group.device, tuple(dtypes), share=share))
    rows = _rows(compute, timed("operators", compute))
    del compute
    updates = list(_updates(group, share))
    rows += _rows(updates, timings := timed("optimizers", updates))
    lines = _lines(updates, timings, lambda benchmark: (1, benchmark.tensors, benchmark.size))
    del updates
    contention = 0.0
    for subgroup, ending in ((hosts.within, ""), (hosts.between, BETWEEN_NODES)):
        if subgroup is None:
            continue
        moves = [
            TimedCollective(op, subgroup, count, size)
            for op in _OPERATIONS
            for size in _COLLECTIVE_BYTES[: max(3, round(share * len(_COLLECTIVE_BYTES)))]
            for count in _TENSORS
        ]
        rows += _rows(moves, timings := timed(f"collectives{ending}", moves), ending)
        ring_lines = _lines(moves, timings, partial(_ring, subgroup.size))
        lines |= {f"{op}{ending}": line for op, line in ring_lines.items()}
        contention = max(contention, _contention(subgroup, timed))
    host_bandwidth: float | None = None
    if group.device.type == "cuda":
        copies = [HostCopy(group.device, 1 << 26)]
        timings = timed("host copies", copies)
        rows += _rows(copies, timings)
        host_bandwidth = 2 * copies[0].size / timings[0].seconds
    curves = _curves(rows)
    if group.device.type == "cpu":  # on an accelerator, views overlap compute
        (view,) = timed("views", [Calls(_VIEWS)])
        rows.append(Row("overhead", VIEW, 1.0, view.seconds, view.spread))
        curves[VIEW] = ((1.0, view.seconds),)
    hardware = _hardware(group, base, hosts, curves, lines, contention, name, host_bandwidth)
    tiny_step = TinyStep(group.device, wall=group.size > 1)
    (step,) = timed("overhead", [tiny_step])
    overhead = tiny_step.overhead(step.seconds, hardware)
    rows.append(Row("overhead", "step", 1.0, max(overhead, 1e-9), step.spread))
    hardware = group.everyones(_rounded(hardware.with_(step_overhead=overhead).to_dict()))[0]
    return Calibration(Hardware(**hardware), tuple(rows))


def _rounded(figures: Any) -> Any:
    """Round all numbers in `figures` to four digits, more than measurements are exact to."""
    if isinstance(figures, float):
        return float(f"{figures:.4g}")
    if isinstance(figures, (list, tuple)):
        return [_rounded(figure) for figure in figures]
    if isinstance(figures, dict):
        return {name: _rounded(figure) for name, figure in figures.items()}
    return figures


def _nearest(device: torch.device) -> str:
    """Return the name of the preset most like `device`."""
    if device.type != "cuda":
        return "cpu-gloo"
    device_name = torch.cuda.get_device_name(device).lower()
    presets = {"b200": "b200", "h200": "h200", "h100": "h100-sxm", "a100": "a100-80gb"}
    return next((preset for chip, preset in presets.items() if chip in device_name), "h100-sxm")


def _updates(group: Group, share: float) -> Iterator[TimedOptimizer]:
    for name, make in _OPTIMIZERS.items():
        for numel in _NUMELS[: max(2, round(share * len(_NUMELS)))]:
            for tensors in (2, 8):
                yield TimedOptimizer(name, make, tensors, numel, group)


def _ring(ranks: int, benchmark: TimedCollective) -> Sequence[float]:
    """Return the hops, the tensors and the bytes that pass a rank (see `collective_cost`)."""
    return ranks - 1, benchmark.tensors, (ranks - 1) / ranks * benchmark.size


def _rows(benchmarks: Sequence[Any], timings: Sequence[Timing], ending: str = "") -> list[Row]:
    return [
        Row(
            benchmark.group,
            f"{benchmark.curve if isinstance(benchmark, SizedProbe) else benchmark.name}{ending}",
            float(benchmark.amount if isinstance(benchmark, SizedProbe) else benchmark.size),
            timing.seconds,
            timing.spread,
        )
        for benchmark, timing in zip(benchmarks, timings, strict=True)
    ]


def _curves(rows: Sequence[Row]) -> dict[str, Points]:
    """Return each operator's curve: the mean seconds at each amount."""
    by_operator: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.group == "operators":
            by_operator[row.name][row.amount].append(row.seconds)
    return {
        name: ascending(
            [(amount, sum(seconds) / len(seconds)) for amount, seconds in points.items()]
        )
        for name, points in by_operator.items()
    }


def _lines(
    benchmarks: Sequence[Any], timings: Sequence[Timing], features: Callable[[Any], Sequence[float]]
) -> dict[str, tuple[float, ...]]:
    """Return the fitted line of each benchmark, by name."""
    points: dict[str, list[tuple[Sequence[float], float]]] = defaultdict(list)
    for benchmark, timing in zip(benchmarks, timings, strict=True):
        points[benchmark.name].append((features(benchmark), timing.seconds))
    return {
        name: fit_line([row for row, _ in measurements], [seconds for _, seconds in measurements])
        for name, measurements in points.items()
    }


def _contention(group: Group, timed: Callable[[str, Sequence[Any]], list[Timing]]) -> float:
    """Return the fraction of compute's speed that a gather under way takes from products."""
    gather = TimedCollective(ops.all_gather, group, 1, 8192 * _KIB)
    product = torch.ones(256, 256, device=group.device)
    products = TimedCompute(product, 20, None)
    gather_alone, products_alone = timed("contention", [gather, products])
    # Products that take about twice as long as the gather.
    count = max(20, round(40 * gather_alone.seconds / products_alone.seconds))
    count = max(group.everyones(count))
    without, during = timed(
        "contention", [TimedCompute(product, count, None), TimedCompute(product, count, gather)]
    )
    slowdown = (during.seconds - without.seconds) / gather_alone.seconds
    return min(1.0, max(0.0, slowdown))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU with {os.cpu_count()} cores"


def _memory(device: torch.device, per_host: int) -> int:
    """Return the memory in bytes of the device, or a rank's share of its host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_host


def _hardware(
    group: Group,
    base: Hardware,
    hosts: HostGroups,
    curves: Mapping[str, Points],
    lines: dict[str, tuple[float, ...]],
    contention: float,
    name: str | None,
    host_bandwidth: float | None,
) -> Hardware:
    """Return the calibrated hardware; `base` gives unmeasured figures, and `source` names them."""
    device_type = group.device.type
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
    if device_type == "cpu" and "intra_bandwidth" in figures and "inter_bandwidth" not in figures:
        figures["inter_bandwidth"] = figures["intra_bandwidth"]
        figures["inter_latency"] = figures["intra_latency"]
    # Sizes that fit in no cache, or else the largest size.
    streams = [curves["add"], curves["clone"]]
    large = [p for points in streams for p in points if p[0] >= _CACHED[device_type]]
    large = large or [points[-1] for points in streams]
    bandwidth = max(amount / seconds for amount, seconds in large)
    ranks = f"{group.size} ranks" if group.size > 1 else "one rank"
    on_hosts = "" if hosts.hosts == 1 else f" on {hosts.hosts} hosts"
    threads = f", {torch.get_num_threads()} thread(s) each" if device_type == "cpu" else ""
    device = _device_name(group.device)
    return Hardware(
        name=name or f"{device_type}-{'nccl' if device_type == 'cuda' else 'gloo'}",
        flops=flops,
        memory_bytes=_memory(group.device, hosts.per_host),
        memory_bandwidth=bandwidth,
        launch_floor=min(seconds for _, seconds in curves["add"]),
        gpus_per_node=hosts.per_host
        if device_type == "cuda" or hosts.hosts > 1
        else base.gpus_per_node,
        **{
            "intra_bandwidth": base.intra_bandwidth,
            "intra_latency": base.intra_latency,
            "inter_bandwidth": base.inter_bandwidth,
            "inter_latency": base.inter_latency,
        }
        | figures,
        host_bandwidth=host_bandwidth
        or bandwidth / 2,  # a CPU's copy reads and writes the same memory
        efficiency=dict.fromkeys(KINDS, 1.0),
        about=f"{device}, {ranks}{on_hosts}{threads}",
        source=f"graphshard calibrate, {ranks}{on_hosts}{threads}, torch {torch.__version__}"
        + (f"; of {base.name}, as not measured: {', '.join(unmeasured)}" if unmeasured else ""),
        contention=contention,
        curves=curves,
        lines=lines,
    )
