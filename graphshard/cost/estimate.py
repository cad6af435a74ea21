"""What a step will cost: `simulate` and the `Estimate` it returns."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphshard.cost.by_unit import UnitEstimate, units_of
from graphshard.cost.duration import COMPUTE
from graphshard.cost.hardware import Hardware
from graphshard.cost.memory import OPTIMIZERS, MemoryCurve, memory_of
from graphshard.cost.reasons import Reason, Reasons, told
from graphshard.cost.subject import Request, planned
from graphshard.cost.timeline import Timeline, Transfer, timeline_of
from graphshard.errors import CostError
from graphshard.plan import ShardingPlan
from graphshard.policy_base import Policy, is_int
from graphshard.program import Program

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Estimate:
    """Time and memory of one training step on one rank, as predicted.

    All times are seconds, all sizes bytes.
    """

    plan: ShardingPlan
    program: Program
    hardware: Hardware
    optimizer: str
    timeline: Timeline
    memory: MemoryCurve
    optimizer_seconds: float

    # -- time -------------------------------------------------------------------------------------

    @property
    def step_seconds(self) -> float:
        """Forward, backward and the optimizer's step."""
        return self.timeline.seconds + self.optimizer_seconds + self.hardware.step_overhead

    @property
    def compute_seconds(self) -> float:
        """Compute alone, the optimizer's step and the step's overhead included."""
        spans = self.timeline.spans
        own = sum(span.seconds for span in spans if span.stream == COMPUTE)
        return own + self.optimizer_seconds + self.hardware.step_overhead

    @property
    def communication_seconds(self) -> float:
        """All collectives and host copies, hidden or not."""
        return sum(transfer.span.seconds for transfer in self.timeline.transfers)

    @property
    def exposed_seconds(self) -> float:
        """Communication that compute waits for."""
        return self.step_seconds - self.compute_seconds

    @property
    def flops(self) -> int:
        """Of one rank's step, as the program computes it (recomputation included)."""
        return self.timeline.flops

    @property
    def tflops_per_gpu(self) -> float:
        """FLOPs a second on one device, in units of 1e12."""
        return self.flops / self.step_seconds / 1e12 if self.step_seconds else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: FLOPs a second, those of recomputation not counted, as a part of
        the hardware's peak in the dtype most FLOPs are in ("PaLM", arXiv:2204.02311, appendix B).
        """
        useful = self.flops - self.timeline.recomputed_flops
        peak = self.hardware.matmul_flops(self._main_dtype)
        return useful / self.step_seconds / peak if self.step_seconds else 0.0

    @cached_property
    def _main_dtype(self) -> torch.dtype:
        from graphshard.cost.op_cost import op_cost

        flops: dict[torch.dtype, int] = defaultdict(int)
        for node in self.program.nodes():
            cost = op_cost(node)
            flops[cost.dtype] += cost.flops
        return max(flops, key=flops.__getitem__) if flops else torch.float32

    # -- memory -----------------------------------------------------------------------------------

    @property
    def peak_bytes(self) -> int:
        """The most that is alive at once."""
        return self.memory.peak.bytes

    @property
    def valley_bytes(self) -> int:
        """What stays alive between steps, after gradients are set to None."""
        return self.memory.valley

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.peak_bytes <= self.hardware.memory_bytes

    # -- by unit ----------------------------------------------------------------------------------

    @cached_property
    def units(self) -> tuple[UnitEstimate, ...]:
        """The units in the plan's order."""
        return units_of(self.plan, self.timeline, self.memory, self.step_seconds)

    @property
    def transfers(self) -> Sequence[Transfer]:
        """Every collective and host copy, in the order compute waits for them."""
        return self.timeline.transfers

    def reasons(self, transfer: Transfer) -> tuple[Reason, ...]:
        """Why compute waits for `transfer`, with the seconds each cause is to blame for."""
        return self._reasons.of(transfer)

    def why(self, transfer: Transfer) -> str:
        """The reasons as text, "" if compute does not wait for `transfer`."""
        return told(self.reasons(transfer))

    @cached_property
    def _reasons(self) -> Reasons:
        return Reasons(self.program, self.plan, self.timeline)

    def with_hardware(
        self, hardware: Hardware | str | os.PathLike[str], *, backend: str | None = None
    ) -> Estimate:
        """The same step on other hardware."""
        return simulate(
            replace(self.plan, program=self.program),
            hardware=hardware,
            optimizer=self.optimizer,
            backend=backend,
        )

    # -- shown ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain data, ready for JSON."""
        from graphshard.inspect.estimate_text import estimate_dict

        return estimate_dict(self)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace that Perfetto and chrome://tracing open: streams and a memory counter."""
        from graphshard.inspect.trace import write_trace

        write_trace(self, path)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw streams and live memory over the step; needs the extra `plot` (matplotlib).

        Raises:
            CostError: matplotlib is missing.
        """
        from graphshard.inspect.plot import draw

        draw(self, path)

    def __str__(self) -> str:
        from graphshard.inspect.estimate_text import estimate_text

        return estimate_text(self)

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        return Text(str(self))


def simulate(
    what: nn.Module | Program | ShardingPlan,
    *,
    policy: Policy | None = None,
    hardware: Hardware | str | os.PathLike[str],
    world_size: int | None = None,
    mesh_shape: Sequence[int] | None = None,
    gpus_per_node: int | None = None,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    plan: ShardingPlan | None = None,
    optimizer: str = "adamw",
    backend: str | None = None,
    tf32: bool = False,
) -> Estimate:
    """Predict time and memory of a training step, with no process group and no cluster.

    Args:
        what: one of

            a model (on meta or not), with a policy or plan, a number of ranks and example inputs;
            a plan that has a program, or one that has none, with its `model` and example inputs;
            a sharded module: of its programs the one captured last that trains and reduces its
            gradients, or the one for the example inputs, captured if need be;
            a rewritten program, such as one of `ShardedModule.programs`: its own mesh, its shards
            as its placeholders show them. Parameters that no collective serves count as the
            root's; with its `plan` they count where they belong.
        policy: for a model. One with schedule="overlap" and no hardware is timed on `hardware`.
        hardware: a preset's name, a file of `graphshard calibrate`, or a `Hardware`.
        world_size: number of ranks, for a model.
        mesh_shape: their arrangement, for a model.
        gpus_per_node: ranks on a node. None: as `hardware` says; 8 in the presets of GPUs.
        example_inputs: positional arguments of a call.
        example_kwargs: keyword arguments of that call.
        model: of a plan that has no program.
        plan: of a program, or for a model.
        optimizer: "adamw" (foreach), "adamw-fused", "sgd", "sgd-momentum" or "none".
        backend: "nccl" or "gloo", which need different buffers. None: by the hardware's kind.
        tf32: float32 matrix products run as TF32.

    Raises:
        CostError: there is no program to simulate, or an argument is unknown or has no effect.
        PlanError, PolicyError, CaptureError: the model cannot be planned or captured.
    """
    described = Hardware.load(hardware)
    if gpus_per_node is not None:
        if not is_int(gpus_per_node) or gpus_per_node < 1:
            raise CostError(f"gpus_per_node must be 1 rank or more; got {gpus_per_node!r}")
        described = described.with_(gpus_per_node=gpus_per_node)
    if policy is not None and policy.schedule == "overlap" and policy.hardware is None:
        policy = replace(policy, hardware=described)
    request = Request(model, plan, policy, world_size, mesh_shape, example_inputs, example_kwargs)
    plan = planned(what, request)
    program = plan.program
    assert program is not None
    backend = backend or ("gloo" if described.is_host else "nccl")
    if backend not in ("nccl", "gloo"):
        raise CostError(f'backend must be "nccl" or "gloo"; got {backend!r}')
    memory = memory_of(program, plan, optimizer=optimizer, backend=backend)
    return Estimate(
        plan,
        program,
        described,
        optimizer,
        timeline_of(program, plan, described, tf32=tf32),
        memory,
        optimizer_seconds(plan, described, optimizer) if program.grad else 0.0,
    )


def optimizer_seconds(plan: ShardingPlan, hardware: Hardware, optimizer: str) -> float:
    """The update streams parameters, gradients and states once, and writes them again."""
    layouts = {id(layout): layout for layout in plan.layouts.values()}.values()
    sizes = [layout.shard_bytes for layout in layouts if layout.requires_grad]
    trained = sum(sizes)
    cost = OPTIMIZERS[optimizer]
    if optimizer == "none":
        return 0.0
    line = hardware.lines.get(optimizer)
    if line is not None and not plan.policy.offloads("params"):
        return line[0] + line[1] * len(sizes) + line[2] * trained
    moved = trained * (3 + 2 * cost.states + 3 * cost.temporary)
    bandwidth = hardware.memory_bandwidth * hardware.efficiency["bandwidth"]
    if plan.policy.offloads("params"):
        bandwidth = min(bandwidth, hardware.host_bandwidth)
    return moved / bandwidth + hardware.launch_floor
