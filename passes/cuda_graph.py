"""Say of a finished program whether its step will be captured as CUDA graphs, or why not."""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.graphable import said, why_no_graph
from graphshard.plan import ShardingPlan
from graphshard.program import Program


@dataclass(frozen=True)
class CudaGraph:
    """Adds a remark to the program, and changes nothing of its graph.

    Whether a graph can be captured is decided by the finished program alone, so it is known with
    the plan; `graphshard.runtime.cuda_graphs` captures it.
    """

    name: str = "cuda_graph"

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Add the remark."""
        said(program, why_no_graph(program, plan))
