"""A pass of one's own: free gathered parameters as soon as nothing reads them any more.

    python examples/custom_pass.py

graphshard frees a unit when its module ends, as FSDP does. `FreeEarly` moves each `free` up to
right behind the last node that reads the unit's parameters. It runs after graphshard's own passes
and is verified like them: had it moved a `free` too far, the error would name it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch
from gpt import GPT, Block, GPTConfig
from torch import fx

import graphshard
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import derived_values
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import Program


@dataclass(frozen=True)
class FreeEarly(Pass):
    """Move every `free` behind the last reader of what it frees."""

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`."""
        order = {node: index for index, node in enumerate(program.graph.nodes)}
        last: dict[fx.Node, fx.Node] = {}  # by the wait that ends a gather
        for value, source in derived_values(program, plan).items():  # full parameters, their views
            for reader in value.users:
                wait = source.node.args[0]
                if reader.op != "output" and order[reader] > order[last.get(wait, wait)]:
                    last[wait] = reader
        for free in [node for node in program.nodes() if node.target is ops.free]:
            last[free.args[0]].append(free)


def main() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=2))
        tokens = torch.zeros(4, 128, dtype=torch.int64)
    before, after = (
        graphshard.plan(
            model,
            graphshard.BlockPolicy({Block}, forward_prefetch=0, merge_below=0),
            world_size=2,
            example_inputs=(tokens, tokens),
            passes=passes,
        )
        for passes in ((), (FreeEarly(),))
    )
    texts = [str(plan.program).splitlines() for plan in (before, after)]
    print("\n".join(difflib.unified_diff(*texts, "before", "after", lineterm="", n=2)))


if __name__ == "__main__":
    main()
