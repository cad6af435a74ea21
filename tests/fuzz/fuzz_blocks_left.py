"""Kinds of blocks that leave tensors elsewhere than in their result."""

from __future__ import annotations

from typing import Any

from fuzz_blocks import Block, kind
from torch import Tensor, nn, zeros
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

DOORS = ("last", "kept", "named", "pool")
"""The attributes in which blocks leave tensors."""


def left_in(module: nn.Module) -> list[Tensor]:
    """The tensors that the last call of a `Fuzzed`, or of a sharded one, left."""
    blocks: Any = module.blocks
    values = [getattr(block, door, None) for block in blocks for door in DOORS]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


class Left(Block):
    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.fc = nn.Linear(dim, dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.fc(x)
        self.leave(y)
        return x + y.tanh()

    def leave(self, y: Tensor) -> None:
        raise NotImplementedError


@kind("left_on_attribute")
class OnAttribute(Left):
    def leave(self, y: Tensor) -> None:
        self.last = y.square().mean()


@kind("left_in_containers")
class InContainers(Left):
    """A list that each call empties, with a dict in it, and a list made anew."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.kept: list[Any] = []

    def leave(self, y: Tensor) -> None:
        self.kept.clear()
        self.kept.append(y.mean((0, 1)))
        self.kept.append({"std": y.std(), "n": 2})
        self.last = [y[0], y.detach()]


@kind("left_by_hook")
class ByHook(Left):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.named: dict[str, Tensor] = {}
        named = self.named
        self.fc.register_forward_hook(lambda module, args, out: named.update(fc=out, half=out / 2))

    def leave(self, y: Tensor) -> None:
        pass


@kind("left_in_buffer")
class InBuffer(Left):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.register_buffer("pool", zeros(dim))

    def leave(self, y: Tensor) -> None:
        self.pool = y.mean((0, 1)).to(self.pool.dtype)


@kind("left_in_checkpoint")
class InCheckpoint(Left):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, ids, use_reentrant=False)
        return out

    def leave(self, y: Tensor) -> None:
        self.last = (y * y).mean((0, 1))
