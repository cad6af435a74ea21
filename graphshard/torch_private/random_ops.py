"""Which of torch's operators draw random numbers, from which generator, and its state's size."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

_TELL = frozenset({"aten", "prims", "graphshard"})
"""Libraries whose operators are tagged if they draw."""


def is_random(node: fx.Node) -> bool:
    """Whether `node` draws random numbers.

    Torch tags attention operators as random in any case; without dropout they are not.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            dropout = (
                node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p")
            )
            return bool(argument.default_value if dropout is None else dropout)
    return True


def may_draw(node: fx.Node) -> bool:
    """Whether results of `node` may be random.

    Operators of other libraries may draw without saying so.
    """
    return is_random(node) or _tells_nothing(node)


def may_move_generators(node: fx.Node) -> bool:
    """Whether a generator of random numbers may be in another state after `node`.

    Besides those that may draw, this is attention by cuDNN, which takes a seed in any case.
    """
    if may_draw(node):
        return True
    target: Any = node.target
    tagged = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return tagged and "cudnn" in str(target)


def _tells_nothing(node: fx.Node) -> bool:
    """Whether `node` is an untagged operator of a library that need not tag what draws."""
    target: Any = node.target
    namespace = getattr(target, "namespace", None)
    if not isinstance(namespace, str) or namespace in _TELL:
        return False
    return torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ())


def drawn_on(node: fx.Node) -> str:
    """The type of the device whose generator the random operator `node` draws from, or "numpy"."""
    if getattr(node.target, "namespace", "") == "graphshard":
        return "numpy"  # whose state is not replayed
    tensors = [val for val in tree_leaves(node.meta["val"]) if isinstance(val, Tensor)]
    return str(tensors[0].device.type) if tensors else "cpu"


@cache
def state_bytes(device: str) -> int | None:
    """Bytes of the state of a generator of the device type; None if it cannot be replayed.

    On CUDA it is the seed and the offset of Philox, 8 bytes each; on the CPU a Mersenne Twister.
    """
    if device == "cuda":
        return 16
    return torch.get_rng_state().numel() if device == "cpu" else None
