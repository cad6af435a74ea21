"""Run a calibration from end to end: measure everything, and make a `Hardware` of it."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphshard.calibrate.bench import HostBench, bench_for
from graphshard.calibrate.probes import SizedProbe, sized_probes
from graphshard.calibrate.steps import (
    LEAST,
    Calls,
    HostCopy,
    TimedOptimizer,
    tiny_step,
    transformer_step,
)
from graphshard.cost.collective_cost import BETWEEN_NODES
from graphshard.cost.op_cost import VIEW
from graphshard.errors import CostError
from graphshard.hardware.curves import Points, ascending
from graphshard.hardware.hardware import KINDS, Hardware, nearest
from graphshard.progress import Progress
from graphshard.runtime.group import Group, hosts_by_rank
from graphshard.runtime.links import (
    Effort,
    HostGroups,
    Stopwatch,
    Timing,
    Watch,
    fitted_lines,
    host_groups,
    link_figures,
    measure,
    ring_lines,
    timed_collectives,
)

_VIEWS = 8


_OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params),
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
}


def require_unmeasured(links: Iterable[str], measured: Collection[str]) -> None:
    """Raise CostError if one of the `measured` figures is among `links`, which are given."""
    for name in links:
        if name in measured:
            raise CostError(
                f"{name} is measured by these ranks; leave it out, or calibrate on fewer ranks"
            )


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
    """The hardware, the measurements that it was made from, and sentences on what else was seen."""

    hardware: Hardware
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def calibrate(
    group: Group,
    *,
    effort: Effort | None = None,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    like: str | None = None,
    name: str | None = None,
    share: float = 1.0,
    progress: Progress | None = None,
    bench: HostBench | None = None,
    links: Mapping[str, float] | None = None,
) -> Calibration:
    """Measure this rank's device and the network between the ranks of `group`, all ranks at once.

    Every rank must call this at the same point, and gets the same calibration. What cannot be
    measured here (other `dtypes` than float32 and the given ones, the network on a single rank) is
    that of the preset `like`, by default the one most like the device, or of `links`: figures by
    the name of their field in `Hardware`. A `share` below 1 takes that fraction of each operator's
    sizes.
    """
    effort, progress = effort or Effort(), progress or Progress(visible=False)
    base = Hardware.load(like or nearest(group.device)).with_(**(links or {}))
    hosts = host_groups(group, hosts_by_rank(group))
    require_unmeasured(links or (), _measured_links(group, hosts))
    bench = bench or bench_for(group.device)

    def timed(
        title: str, benchmarks: Sequence[Any], watch: Stopwatch | None = None
    ) -> list[Timing]:
        with progress.stage(title, total=len(benchmarks) * (1 + effort.least)):
            return measure(benchmarks, watch or bench.watch(), group, effort, progress.advance)

    rows: list[Row] = []
    with progress.stage("warming up"):
        product = bench.warm_up()
    if product is not None:
        rows.append(Row("warm-up", product.name, product.flops, product.seconds, product.spread))
    compute = list(sized_probes(group.device, tuple(dtypes), share=share, cold=bench.cold))
    rows += _rows(compute, timed("operators", compute))
    del compute
    updates = list(_updates(group, bench, share))
    rows += _rows(updates, timings := timed("optimizers", updates))
    lines = fitted_lines(updates, timings, lambda benchmark: (1, benchmark.tensors, benchmark.size))
    del updates
    contention: float | None = None
    for subgroup, ending in ((hosts.within, ""), (hosts.between, BETWEEN_NODES)):
        if subgroup is None:
            continue
        moves = timed_collectives(subgroup, bench.collective_bytes(group, share))
        rows += _rows(moves, timings := timed(f"collectives{ending}", moves), ending)
        lines |= ring_lines(moves, timings, subgroup.size, ending)
        del moves
        contention = bench.contention(subgroup, timed)  # between hosts, where there are several
    hosts.end()
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
    hardware = _hardware(group, base, hosts, curves, lines, contention, name, host_bandwidth, bench)
    tiny = tiny_step(group.device, wall=group.size > 1)
    (step,) = timed("overhead", [tiny], Watch(group.device))  # the host's work
    overhead = tiny.overhead(step.seconds, hardware)
    rows.append(Row("overhead", "step", 1.0, max(overhead, 1e-9), step.spread))
    hardware = hardware.with_(step_overhead=overhead)
    transformer = transformer_step(group, bench.step_size(dtypes, share))
    (step,) = timed("operators within a step", [transformer], Watch(group.device))
    rows.append(Row("overhead", "transformer", 1.0, step.seconds, step.spread))
    factor = transformer.factor(step.seconds, hardware)
    hardware = hardware.with_(in_step=max(factor, LEAST))
    figures = group.all_gather_object(_rounded(hardware.to_dict()))[0]
    return Calibration(Hardware(**figures), tuple(rows), (*bench.notes(), *_in_step_notes(factor)))


def _in_step_notes(factor: float) -> list[str]:
    if factor >= LEAST:
        return []
    return [
        f"a transformer's step took {factor:.2f} of the time of its operators, which cannot be: "
        f"in_step is held at {LEAST}; calibrate again on an idle machine"
    ]


_SPREAD = (0.93, 1.2)
"""Measured seconds over those predicted by a calibration, for seven models on CPUs.

From the tables of "Predicted time" in the README of examples/benchmarks, for 1 and 2 ranks.
"""


def _rounded(figures: Any) -> Any:
    """Round all numbers in `figures` to four digits, more than measurements are exact to."""
    if isinstance(figures, float):
        return float(f"{figures:.4g}")
    if isinstance(figures, (list, tuple)):
        return [_rounded(figure) for figure in figures]
    if isinstance(figures, dict):
        return {name: _rounded(figure) for name, figure in figures.items()}
    return figures


def _updates(group: Group, bench: HostBench, share: float) -> Iterator[TimedOptimizer]:
    sizes = bench.shard_sizes()
    for name, make in _OPTIMIZERS.items():
        for numel in sizes[: max(2, round(share * len(sizes)))]:
            for tensors in (2, 8):
                copies = bench.optimizer_copies(4 * 4 * tensors * numel)
                yield TimedOptimizer(name, make, tensors, numel, group.device, copies)


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


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU with {os.cpu_count()} cores"


def _memory(device: torch.device, per_host: int) -> int:
    """Return the memory in bytes of the device, or a rank's share of its host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_host


def overhead_of(device: torch.device, base: Hardware) -> dict[str, int]:
    """Return what takes memory beside tensors: as on `base`, but for the driver.

    What the driver keeps of a GPU is not in the memory that torch finds. Hosts have no overhead.
    """
    return {} if device.type == "cpu" else {**base.overhead, "driver": 0}


def _knows_nodes(group: Group, hosts: HostGroups) -> bool:
    """Whether the ranks show how many devices a node has."""
    return hosts.hosts > 1 or (group.device.type == "cuda" and group.size > 1)


def _measured_links(group: Group, hosts: HostGroups) -> set[str]:
    measured = {"gpus_per_node"} if _knows_nodes(group, hosts) else set()
    if hosts.within is not None:
        measured |= {"intra_bandwidth", "intra_latency"}
    if hosts.between is not None:
        measured |= {"inter_bandwidth", "inter_latency"}
    return measured


def _of_the_network(base: Hardware, ending: str) -> dict[str, float]:
    """The efficiencies of `base` for links that are not measured."""
    within = base.efficiency["network"]
    if ending:
        return {"network.inter": base.efficiency.get("network.inter", within)}
    more = base.efficiency.get("network.all_reduce")
    return {"network": within} | ({} if more is None else {"network.all_reduce": more})


def _hardware(
    group: Group,
    base: Hardware,
    hosts: HostGroups,
    curves: Mapping[str, Points],
    lines: dict[str, tuple[float, ...]],
    contention: float | None,
    name: str | None,
    host_bandwidth: float | None,
    bench: HostBench,
) -> Hardware:
    """Return the calibrated hardware; `base` gives unmeasured figures, and `source` names them."""
    device_type = group.device.type
    flops = dict(base.flops)
    for curve, points in curves.items():
        family, _, dtype = curve.partition(".")
        if family == "matmul":
            flops[dtype or "float32"] = max(amount / seconds for amount, seconds in points)
    figures = link_figures(lines)
    unmeasured = [d for d in flops if flops[d] == base.flops.get(d)]
    efficiency = dict.fromkeys(KINDS, 1.0)
    efficiency |= {f"matmul.{d}": base.efficiency_of("matmul", d) for d in unmeasured}
    for ending in ("", BETWEEN_NODES):
        if f"all_gather{ending}" not in lines:
            unmeasured.append(f"the network {'within' if not ending else 'between'} nodes")
            efficiency |= _of_the_network(base, ending)
    if device_type == "cpu" and "intra_bandwidth" in figures and "inter_bandwidth" not in figures:
        figures["inter_bandwidth"] = figures["intra_bandwidth"]
        figures["inter_latency"] = figures["intra_latency"]
    # Sizes that fit in no cache, or else the largest size.
    streams = [curves["add"], curves["clone"]]
    large = [p for points in streams for p in points if p[0] >= bench.uncached_bytes]
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
        gpus_per_node=hosts.per_host if _knows_nodes(group, hosts) else base.gpus_per_node,
        **{
            "intra_bandwidth": base.intra_bandwidth,
            "intra_latency": base.intra_latency,
            "inter_bandwidth": base.inter_bandwidth,
            "inter_latency": base.inter_latency,
        }
        | figures,
        host_bandwidth=host_bandwidth
        or bandwidth / 2,  # a CPU's copy reads and writes the same memory
        efficiency=efficiency,
        about=f"{device}, {ranks}{on_hosts}{threads}{bench.about}",
        source=f"graphshard calibrate, {ranks}{on_hosts}{threads}, torch {torch.__version__}"
        + (f"; of {base.name}, as not measured: {', '.join(unmeasured)}" if unmeasured else ""),
        contention=base.contention if contention is None else contention,
        contention_bytes=base.contention_bytes if contention is None else 0.0,
        slowest=base.slowest if group.size == 1 else 1.0,
        spread=_SPREAD,
        pair_spread=base.pair_spread,
        curves=curves,
        lines=lines,
        overhead=overhead_of(group.device, base),
        device="gpu" if device_type == "cuda" else "cpu",
    )
