"""Say of a finished program whether its step will be captured as CUDA graphs, or why not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.annotations import CudaGraphs
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import Program


def why_no_graph(program: Program, plan: ShardingPlan) -> str | None:
    """What of `program` keeps it from being captured as CUDA graphs; None if nothing does.

    A graph repeats the same kernels at the same addresses, with the host out of the way.
    """
    planned = program.device != program.capture_device
    if program.device != "cuda":
        return f"it runs on {program.device}"
    if plan.policy.offload is not None:
        return "what is offloaded is copied to and from the host"
    if program.sizes is not None:
        return "its sizes are symbolic"
    for node in program.nodes():
        if node.target in (ops.keep, ops.add_kept):
            return "gradients are kept from one call to another (no_sync)"
        value = node.meta.get("val")
        if not planned and isinstance(value, torch.Tensor) and value.device.type == "cpu":
            return f"%{node.name} is computed on the CPU"
    return None


@dataclass(frozen=True)
class CudaGraph(Pass):
    """Notes on the program whether it can be captured, and changes nothing of its graph.

    Whether a graph can be captured is decided by the finished program alone, so it is known with
    the plan; `graphshard.runtime.cuda_graphs` captures it.
    """

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Note it."""
        program.cuda_graphs = CudaGraphs(why_no_graph(program, plan), 2 if program.grad else 1)
