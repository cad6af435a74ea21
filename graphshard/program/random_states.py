"""The generators of random numbers that a program draws from, and the states that it sets."""

from __future__ import annotations

import torch
from torch import fx

from graphshard.program import ops
from graphshard.program.program import Program
from graphshard.torch_private.random_ops import drawn_on


def generator_of(program: Program, draw: fx.Node) -> str:
    """The type of the device, "cpu" or "cuda", from whose generator `draw` draws when it runs."""
    traced = drawn_on(draw)
    if traced == torch.device(program.capture_device).type:
        return torch.device(program.device).type
    return traced


def device_of(node: fx.Node) -> str:
    """The type of the device whose generator a node saves or sets."""
    return str(node.kwargs.get("device"))


def begins_replay(node: fx.Node) -> bool:
    """Whether `node` sets a state that forward saved, so that what follows draws again."""
    if node.target is not ops.set_random_state or not node.args:
        return False
    state = node.args[0]
    return isinstance(state, fx.Node) and state.target is ops.save_random_state
