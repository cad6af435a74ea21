"""The predicted time and memory of a training step."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from graphshard.cost.allocations import fsdp2_lives, lives_of, requests_of
from graphshard.cost.caching_allocator import NO_CACHE, SEGMENTS
from graphshard.cost.kernel_rates import Attention
from graphshard.cost.memory import OPTIMIZERS, MemoryCurve, distinct, memory_of
from graphshard.cost.op_cost import op_cost
from graphshard.cost.reasons import Reason, Reasons, reasons_text
from graphshard.cost.reserved import Overheads, ReservedMemory, reserved_memory
from graphshard.cost.runner import OWN, Runner
from graphshard.cost.streams import COMPUTE
from graphshard.cost.timeline import Timeline, Transfer, timeline_of
from graphshard.errors import CostError
from graphshard.hardware.hardware import Hardware
from graphshard.planning.plan import ShardingPlan
from graphshard.program.program import Program
from graphshard.program.storages import END, Storage, changes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from graphshard.tune.tuning import Tuning


class Range(NamedTuple):
    """The least and the most seconds that are expected."""

    low: float
    high: float


@dataclass(frozen=True)
class HoldingPeriod:
    """A period over which a unit holds bytes of one category without a pause.

    `bytes` is the maximum held at once in it. `start` and `end` are seconds after the step began;
    a period of storages that outlive the step ends with the step.
    """

    category: str
    bytes: int
    start: float
    end: float


@dataclass(frozen=True)
class UnitEstimate:
    """The cost of one unit in a step.

    fqn: the unit's module, "" for the root. compute, communication: seconds of its compute nodes,
    and of its collectives and host copies. exposed: seconds compute waits for them. transfers: its
    collectives and host copies, in order. at_peak: bytes it holds at the step's peak, by category.
    held: the periods over which it holds storages that the step allocates.
    """

    fqn: str
    compute: float
    communication: float
    exposed: float
    transfers: tuple[Transfer, ...]
    at_peak: Mapping[str, int]
    held: tuple[HoldingPeriod, ...]

    def most(self, category: str) -> int:
        """The maximum bytes of `category` that it holds at once."""
        periods = (period for period in self.held if period.category == category)
        return max((period.bytes for period in periods), default=0)

    def seconds_held(self, category: str) -> float:
        """Seconds for which it holds any bytes of `category`."""
        periods = (period for period in self.held if period.category == category)
        return sum(period.end - period.start for period in periods)


@dataclass(frozen=True)
class Estimate:
    """Predicted time and memory of one training step on one rank, in seconds and bytes.

    plan, program: the plan and its rewritten program. hardware: the machine. optimizer: a name of
    `graphshard.cost.memory.OPTIMIZERS`. timeline: when each stream is busy. memory: bytes alive
    over the step. optimizer_seconds: the optimizer's update. allocator: the settings of torch's
    allocator on GPUs; "none" if it caches nothing. runner: the runtime that executes it. tf32:
    whether float32 products run in TF32.
    """

    plan: ShardingPlan
    program: Program
    hardware: Hardware
    optimizer: str
    timeline: Timeline
    memory: MemoryCurve
    optimizer_seconds: float
    allocator: str = SEGMENTS
    runner: Runner = OWN
    tf32: bool = False

    # -- time -------------------------------------------------------------------------------------

    @property
    def step_seconds(self) -> float:
        """Seconds of forward, backward, the optimizer's update and the overhead of a step."""
        return self.timeline.seconds + self.optimizer_seconds + self.hardware.step_overhead

    @property
    def step_range(self) -> Range:
        """The least and the most seconds in which a step is expected (see `Hardware.spread`)."""
        low, high = self.hardware.spread
        return Range(self.step_seconds * low, self.step_seconds * high)

    @property
    def compute_seconds(self) -> float:
        """Seconds of compute, with the optimizer's update and the overhead of a step."""
        spans = self.timeline.spans
        seconds = sum(span.seconds for span in spans if span.stream == COMPUTE)
        return seconds + self.optimizer_seconds + self.hardware.step_overhead

    @property
    def communication_seconds(self) -> float:
        """Seconds of all collectives and host copies, hidden or exposed."""
        return sum(transfer.span.seconds for transfer in self.timeline.transfers)

    @property
    def exposed_seconds(self) -> float:
        """Seconds for which compute waits for communication."""
        return self.step_seconds - self.compute_seconds

    @property
    def flops(self) -> int:
        """FLOPs of one step on one rank, recomputation included."""
        return self.timeline.flops

    @property
    def tflops_per_gpu(self) -> float:
        """TFLOP/s on one device, recomputation included."""
        return self.flops / self.step_seconds / 1e12 if self.step_seconds else 0.0

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs utilisation: FLOP/s without recomputation, as a fraction of the peak.

        The peak is that of the dtype with the most FLOPs ("PaLM", arXiv:2204.02311, appendix B);
        of float32, that of TF32 if products run in it.
        """
        flops: dict[torch.dtype, int] = defaultdict(int)
        for cost in map(op_cost, self.program.nodes()):
            flops[cost.dtype] += cost.flops
        main_dtype = max(flops, key=flops.__getitem__, default=torch.float32)
        useful = self.flops - self.timeline.recomputed_flops
        peak = self.hardware.matmul_flops(main_dtype, tf32=self.tf32)
        return useful / self.step_seconds / peak if self.step_seconds else 0.0

    @cached_property
    def attention_kernels(self) -> tuple[str, ...]:
        """The attention kernels by whose rates the step is priced, by name."""
        return tuple(sorted({kernel for kernel, _ in self.attention_calls}))

    @cached_property
    def attention_calls(self) -> frozenset[tuple[str, bool]]:
        """The attention kernels of the step, each with whether it is called with a mask."""
        calls = set()
        for cost in map(op_cost, self.program.nodes()):
            if kernel := cost.kernel(self.hardware, tf32=self.tf32):
                calls.add((kernel, isinstance(cost.work, Attention) and cost.work.masked))
        return frozenset(calls)

    # -- memory -----------------------------------------------------------------------------------

    @property
    def peak_bytes(self) -> int:
        """The maximum bytes alive at once."""
        return self.memory.peak.bytes

    @property
    def valley_bytes(self) -> int:
        """Bytes alive between steps, after gradients are set to None."""
        return self.memory.valley

    @cached_property
    def reserved(self) -> ReservedMemory | None:
        """What torch's allocator reserves; None on hosts and without a cache."""
        if self.allocator == NO_CACHE or self.overheads is None:
            return None
        copies = self.runner.copies_gathers
        own = lives_of(self.program, self.memory.storages)
        lives = fsdp2_lives(self.program, self.runner) if copies else own
        requests = requests_of(self.program, self.plan, self.optimizer, lives)
        overheads = self.overheads
        capacity = self.hardware.memory_bytes - overheads.driver - overheads.outside
        return reserved_memory(
            requests, overheads.workspaces, capacity=capacity, settings=self.allocator
        )

    @cached_property
    def overheads(self) -> Overheads | None:
        """What a process takes of a GPU beside tensors; None on hosts."""
        return None if self.hardware.is_host else Overheads.of(self.program, self.hardware)

    @property
    def reserved_bytes(self) -> int:
        """The most that torch's allocator reserves; on hosts, and without a cache, `peak_bytes`."""
        return self.peak_bytes if self.reserved is None else self.reserved.bytes

    @property
    def device_bytes(self) -> int:
        """Bytes that the rank takes of its device: reserved, by CUDA, by NCCL, by the driver."""
        overheads = self.overheads
        if overheads is None:
            return self.peak_bytes
        kept = 0 if self.reserved is not None else sum(overheads.workspaces)
        return self.reserved_bytes + kept + overheads.outside + overheads.driver

    @property
    def fits(self) -> bool:
        """Whether the device's memory is enough for what the rank takes of it."""
        if self.reserved is not None:
            return not self.reserved.failed
        return self.device_bytes <= self.hardware.memory_bytes

    # -- by unit ----------------------------------------------------------------------------------

    @cached_property
    def units(self) -> tuple[UnitEstimate, ...]:
        """The estimate of each unit, in the plan's order."""
        return _units_of(self.plan, self.timeline, self.memory, self.step_seconds)

    @property
    def transfers(self) -> Sequence[Transfer]:
        """All collectives and host copies, in the order compute waits for them."""
        return self.timeline.transfers

    def reasons(self, transfer: Transfer) -> tuple[Reason, ...]:
        """The reasons why compute waits for `transfer`, each with its seconds."""
        return self._reasons.of(transfer)

    def why(self, transfer: Transfer) -> str:
        """The reasons as text; "" if compute does not wait for `transfer`."""
        return reasons_text(self.reasons(transfer))

    @cached_property
    def _reasons(self) -> Reasons:
        return Reasons(self.program, self.plan, self.timeline)

    def with_hardware(self, hardware: Hardware | str | os.PathLike[str]) -> Estimate:
        """Estimate the same step on other hardware.

        Args:
            hardware: a machine, the name of a preset, or the path of a file.

        Raises:
            CostError: the hardware is unknown, or the program is for another kind of device.
        """
        machine = Hardware.load(hardware)
        require_device(self.program, machine)
        return estimate_of(
            replace(self.plan, program=self.program),
            machine,
            optimizer=self.optimizer,
            allocator=self.allocator,
            tf32=self.tf32,
            runner=self.runner,
        )

    # -- shown ------------------------------------------------------------------------------------

    def to_dict(self, *, details: bool = False) -> dict[str, Any]:
        """The estimate as plain data, ready for JSON; times in seconds, sizes in bytes.

        Args:
            details: add the plan, the dump, and tables of all nodes, spans and storages and of live
                memory (see `graphshard.cost.details`); megabytes for a large model.
        """
        from graphshard.cost.details import details_dict, estimate_dict

        return estimate_dict(self) | (details_dict(self) if details else {})

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        what_if: Mapping[str, Estimate] | None = None,
        tuning: Tuning | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write a page to look at: plan, timeline, memory and dump in one HTML file.

        It needs the extra `report` (bokeh) to be written, and a browser without network to be read.

        Args:
            path: the file to write.
            what_if: estimates of other policies, by a name for each; any two can be compared.
            tuning: a search, whose simulated policies are shown as points beside these.
            trace: what torch.profiler wrote of one rank, to set measured beside predicted times.

        Raises:
            CostError: bokeh is missing, or `trace` is of another program.
        """
        from graphshard.report.page import write_report

        write_report(self, path, what_if=what_if, tuning=tuning, trace=trace)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace of streams and memory for Perfetto or chrome://tracing."""
        from graphshard.cost.details import write_trace

        write_trace(self, path)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw streams and live memory over the step; needs the extra `plot` (matplotlib).

        Args:
            path: the file to write; its suffix names the format (svg, png, pdf).

        Raises:
            CostError: matplotlib is missing.
        """
        from graphshard.cost.plot import draw

        draw(self, path)

    def __str__(self) -> str:
        from graphshard.cost.text import estimate_text

        return estimate_text(self)

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        return Text(str(self))


def require_device(program: Program, hardware: Hardware) -> None:
    """Raise CostError if `program` is for another kind of device than `hardware`."""
    if program.device != hardware.program_device:
        raise CostError(
            f"the program is for {program.device}, and {hardware.name} runs programs for "
            f"{hardware.program_device}, which may have other operators; simulate the model, or a "
            f'plan made with device="{hardware.program_device}"'
        )


def estimate_of(
    plan: ShardingPlan,
    hardware: Hardware,
    *,
    optimizer: str = "adamw",
    tf32: bool = False,
    allocator: str = SEGMENTS,
    runner: Runner = OWN,
) -> Estimate:
    """Estimate a step of the program of `plan` on `hardware`; see `graphshard.simulate`."""
    program = plan.program
    if program is None:
        raise CostError(
            "the plan has no program to estimate; give example_inputs to graphshard.plan"
        )
    backend = hardware.process_group_backend
    runner.check(program)
    return Estimate(
        plan,
        program,
        hardware,
        optimizer,
        timeline_of(program, plan, hardware, tf32=tf32, runner=runner),
        memory_of(program, plan, optimizer=optimizer, backend=backend, runner=runner),
        optimizer_seconds(plan, hardware, optimizer) if program.grad else 0.0,
        allocator,
        runner,
        tf32,
    )


def optimizer_seconds(plan: ShardingPlan, hardware: Hardware, optimizer: str) -> float:
    """Seconds of the update, whose operators stream parameters, gradients and states."""
    sizes = [layout.shard_bytes for layout in distinct(plan) if layout.requires_grad]
    trained = sum(sizes)
    if optimizer == "none":
        return 0.0
    line = hardware.lines.get(optimizer)
    if line is not None and not plan.policy.offloads("params"):
        return line[0] + line[1] * len(sizes) + line[2] * trained
    moved = trained * OPTIMIZERS[optimizer].moved
    bandwidth = hardware.memory_bandwidth * hardware.efficiency["bandwidth"]
    if plan.policy.offloads("params"):
        bandwidth = min(bandwidth, hardware.host_bandwidth)
    return moved / bandwidth + hardware.launch_floor


# -- by unit --------------------------------------------------------------------------------------


def _units_of(
    plan: ShardingPlan, timeline: Timeline, memory: MemoryCurve, step_seconds: float
) -> tuple[UnitEstimate, ...]:
    """Estimate each unit of `plan`; `step_seconds` is the whole step, the optimizer included."""
    compute: dict[str, float] = defaultdict(float)
    for span in timeline.spans:
        if span.stream == COMPUTE:
            compute[span.unit] += span.seconds
    transfers: dict[str, list[Transfer]] = defaultdict(list)
    for transfer in timeline.transfers:
        transfers[transfer.span.unit].append(transfer)
    storages: dict[str, dict[str, list[Storage]]] = defaultdict(lambda: defaultdict(list))
    for storage in memory.storages:
        if storage.size:
            storages[storage.unit][storage.kind].append(storage)
    return tuple(
        UnitEstimate(
            unit.fqn,
            compute[unit.fqn],
            sum(transfer.span.seconds for transfer in transfers[unit.fqn]),
            sum(transfer.exposed for transfer in transfers[unit.fqn]),
            tuple(transfers[unit.fqn]),
            memory.by_unit.get(unit.fqn, {}),
            tuple(
                period
                for category, same_kind in storages[unit.fqn].items()
                for period in _periods(category, same_kind, timeline.at, step_seconds)
            ),
        )
        for unit in plan.units
    )


def _periods(
    category: str, storages: Iterable[Storage], at: Sequence[float], step_end: float
) -> list[HoldingPeriod]:
    """The periods over which any of `storages` is alive; `at`: seconds by place."""
    periods: list[HoldingPeriod] = []
    live = most = start = 0
    for place, freed, new in changes(storages):
        before, live = live, live - sum(storage.size for storage in freed)
        if before and not live and not new:
            periods.append(_period(category, most, start, place, at, step_end))
        if new and not before:
            start, most = place, 0
        live += sum(storage.size for storage in new)
        most = max(most, live)
    if live:  # storages that outlive the step
        periods.append(_period(category, most, start, END, at, step_end))
    return periods


def _period(
    category: str, most: int, born: int, freed: int, at: Sequence[float], step_end: float
) -> HoldingPeriod:
    start = at[born - 1] if born else 0.0
    return HoldingPeriod(category, most, start, at[freed - 1] if freed <= len(at) else step_end)
