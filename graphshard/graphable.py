"""Whether a program's step can be a CUDA graph, and if not, why."""

from __future__ import annotations

import torch

from graphshard import ops
from graphshard.plan import ShardingPlan
from graphshard.program import Program

NOTE = "cuda graph"
"""Begins the remark of a program that tells."""


def why_no_graph(program: Program, plan: ShardingPlan) -> str | None:
    """What of `program` keeps it from being captured as CUDA graphs; None if nothing does.

    A graph repeats the same kernels at the same addresses, with the host out of the way.
    """
    planned = any(note.startswith("captured on cpu for cuda") for note in program.notes)
    if program.capture_device != "cuda" and not planned:
        return f"it runs on {program.capture_device}"
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


def said(program: Program, why_not: str | None) -> None:
    """Let `program` say whether it has graphs."""
    others = tuple(note for note in program.notes if not note.startswith(f"{NOTE}: "))
    has = "one for forward and one for backward" if program.grad else "one for forward"
    program.notes = (*others, f"{NOTE}: {has if why_not is None else f'none, since {why_not}'}")
