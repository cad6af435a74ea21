"""cuda_graph: note whether a finished program can be captured as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.annotations import CudaGraphs
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import Program


def why_no_graph(program: Program, plan: ShardingPlan) -> str | None:
    """The reason why `program` cannot be captured as CUDA graphs; None if it can.

    A graph replays the same kernels at the same addresses, without work on the host.
    """
    planned = program.device != program.capture_device
    if program.device != "cuda":
        return f"it runs on {program.device}"
    if plan.policy.offload is not None:
        return "what is offloaded is copied to and from the host"
    if program.sizes is not None:
        return "its sizes are symbolic"
    for node in program.nodes():
        if node.target in (ops.accumulate_grad, ops.add_accumulated):
            return "gradients are kept from one call to another (no_sync)"
        if node.target is ops.report_finite:
            return "the host waits for its checks (check_finite)"
        value = node.meta.get("val")
        if not planned and isinstance(value, torch.Tensor) and value.device.type == "cpu":
            return f"%{node.name} is computed on the CPU"
    return None


@dataclass(frozen=True)
class CudaGraph(Pass):
    """Note on the program whether its step can be captured as CUDA graphs, or why not.

    The graph does not change. The finished program alone decides, so the plan shows the answer
    before any step runs. `graphshard.runtime.cuda_graphs` does the capture.
    """

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Set `program.cuda_graphs`."""
        program.cuda_graphs = CudaGraphs(why_no_graph(program, plan), 2 if program.grad else 1)
