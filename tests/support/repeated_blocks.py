"""Models of blocks that look alike: some are repetitions, and some are not."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

DEPTH, WIDTH = 6, 8


class Block(nn.Module):
    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * F.gelu(self.up(self.norm(x)))


class Stack(nn.Module):
    def __init__(
        self, make: Callable[[int], nn.Module] = lambda index: Block(), depth: int = DEPTH
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make(index) for index in range(depth)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class ByIndex(Block):
    """Computes with its number in the model, and holds another that it does not read."""

    def __init__(self, index: int, read: int = 0) -> None:
        super().__init__()
        self.index, self.read = index, read

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.read)


class Returning(Block):
    """Returns what it was given as well, and a number."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return {"x": super().forward(x) * mask, "mask": mask, "parts": (x.detach(), 3)}


class StackOfReturning(Stack):
    def forward(self, x: Tensor) -> Any:
        mask = torch.ones(WIDTH, device=x.device)
        for block in self.blocks:
            out = block(x, mask=mask)
            x, mask = out["x"] + out["parts"][1], out["mask"]
        return self.head(x).sum()


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3)


class Writing(Block):
    def __init__(self, into: str) -> None:
        super().__init__()
        self.into = into
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.into == "input":
            x = x.mul_(2) if not x.requires_grad or x.grad_fn is not None else x * 2
        if self.into == "buffer":
            self.seen.add_(1)
        y = super().forward(x)
        return y.mul_(0.5) if self.into == "own" else y


class View(Block):
    """Returns a view of its input, which the model writes into."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, WIDTH)


class StackThatWritesViews(Stack):
    def forward(self, x: Tensor) -> Any:
        x = x * 2
        for block in self.blocks:
            y = block(x)
            y.add_(1)
            x = x * 2
        return self.head(x).sum()


class Noting(Block):
    """Leaves something in Python state."""

    def __init__(self, where: list[Any]) -> None:
        super().__init__()
        self.where, self.calls, self.last = where, 0, None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.where == ["self"]:
            self.last = x.mean()
        elif self.where == ["count"]:
            self.calls += 1
        else:
            self.where.append(x.mean())
        return x


_SEEN: list[Any] = []


class NotingInGlobal(Block):
    def forward(self, x: Tensor) -> Tensor:
        _SEEN.append(x.mean())
        return super().forward(x)


class StackOfSeen(Stack):
    def forward(self, x: Tensor) -> Any:
        _SEEN.clear()
        loss = super().forward(x)
        return loss + torch.stack(_SEEN).sum()


class Collecting(Block):
    """Adds to a list that it is given."""

    def forward(self, x: Tensor, into: list[Tensor]) -> Tensor:
        x = super().forward(x)
        into.append(x)
        return x


class StackOfCollecting(Stack):
    def forward(self, x: Tensor) -> Any:
        found: list[Tensor] = []
        for block in self.blocks:
            x = block(x, found)
        return self.head(torch.stack(found).sum(0)).sum()


class EachUsed(Stack):
    """Uses what each block returns, or what all are given, outside of the blocks as well."""

    def __init__(
        self, make: Callable[[int], nn.Module] = lambda index: Block(), *, at: str
    ) -> None:
        super().__init__(make)
        self.at = at

    def forward(self, x: Tensor) -> Any:
        first, loss = self.head(x), torch.zeros((), device=x.device)
        x = first
        for block in self.blocks:
            x = block(x + first if self.at == "first" else x)
            if self.at == "each":
                loss = loss + x.square().mean()
        return self.head(x).square().mean() + loss


class Cross(Block):
    """Uses another input twice, as the attention of decoders does."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x) + self.up(memory).sigmoid() * self.norm(memory)


class StackOfCross(Stack):
    def forward(self, x: Tensor) -> Any:
        memory = self.head(x)
        for block in self.blocks:
            x = block(x, memory)
        return x.square().mean()


class Twice(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x).square().mean()


class Skipping(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            if random.random() < 0.5:
                x = block(x)
        return self.head(x).square().mean()


class DrawingInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Asking(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        assert not torch.isnan(x).any()
        return x


class WithConstant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(0.25)


class Autocast(Stack):
    def forward(self, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            with torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 0):
                x = block(x)
        return self.head(x).square().mean()


class WithoutGrad(Stack):
    def forward(self, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            with torch.set_grad_enabled(index > 0):
                x = block(x)
        return self.head(x).square().mean()


class Settings:
    def __init__(self) -> None:
        self.scale = 1.0


_MODE = {"scale": 1.0}


class Following(Block):
    """Computes by settings that it shares with the others, and by a global."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.settings.scale * _MODE["scale"]


class Leading(Stack):
    """Changes what the blocks follow, and puts it back."""

    def __init__(self, changes: str) -> None:
        settings = Settings()
        super().__init__(lambda index: Following(settings))
        self.settings, self.changes = settings, changes

    def forward(self, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            if self.changes == "object":
                self.settings.scale = 2.0 if index % 3 else 1.0
            elif self.changes == "global":
                _MODE["scale"] = 2.0 if index % 3 else 1.0
            else:
                self.blocks[0].alpha = block.alpha = 2.0 if index == 5 else 1.0
            x = block(x)
        self.settings.scale = _MODE["scale"] = 1.0
        return self.head(x).square().mean()


class Marking(Block):
    """Hangs a tensor on what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.mean_of_it = x.mean()
        return y


class StackOfMarking(Stack):
    def forward(self, x: Tensor) -> Any:
        loss = torch.zeros((), device=x.device)
        for block in self.blocks:
            x = block(x)
            loss = loss + getattr(x, "mean_of_it", 0.0)
        return self.head(x).square().mean() + loss


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any) -> Tensor:
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.block.scale, None


class Attributed(dict[str, float]):
    scale = 1.0


class Hiding(Block):
    """Block 3 has another number than the others, where it is not seen at once."""

    def __init__(self, index: int, place: str) -> None:
        super().__init__()
        self.place = place
        self.scale = self.type = 2.0 if index == 3 else 1.0
        self.table = [self.scale] * 2000
        self.items = Attributed()
        self.items.scale = self.scale

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.place == "vars":
            return y * vars(self)["scale"]
        if self.place == "hook":
            if y.requires_grad:
                y.register_hook(lambda grad: grad * self.scale)
            return y
        if self.place == "Function":
            return Scale.apply(y, self)
        if self.place == "list":
            return y * self.table[7]
        return y * (self.type if self.place == "type" else self.items.scale)


class Slotted(Block):
    __slots__ = ("scale",)

    def __init__(self, index: int) -> None:
        super().__init__()
        self.scale = 2.0 if index == 3 else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Cached(Block):
    """Has its number from a cache that earlier calls have filled."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.scale()

    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033
    def scale(self) -> int:
        return self.index

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale()


class Assigning(Block):
    """Assigns its buffer, and multiplies by its number."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.lerp(self.seen, x.detach().mean(), 0.1)
        return super().forward(x) * self.index


class ByData(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.data.add_(x.detach().mean())
        return super().forward(x)


class Replacing(Block):
    """Replaces a tensor in a dict that it is given."""

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        y = super().forward(x) + state["h"]
        state["h"] = state["h"] * 0.5
        return y


class StackOfReplacing(Stack):
    def forward(self, x: Tensor) -> Any:
        state = {"h": torch.ones(WIDTH, device=x.device)}
        for block in self.blocks:
            x = block(x, state)
        return self.head(x).sum() + state["h"].sum()


class Around(Stack):
    """Does something else around one block than around the others."""

    def __init__(self, what: str) -> None:
        super().__init__(lambda index: Dropping())
        self.what = what

    def forward(self, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            if self.what == "checkpoint":
                x = block(x) if index % 2 else checkpoint(block, x, use_reentrant=False)
            elif self.what == "eval":
                x = block.train(index != 3)(x)
            elif self.what == "swap":
                block.up, kept = nn.Linear(WIDTH, WIDTH, device=x.device), block.up
                x = block(x) if index != 3 else x
                block.up = kept
            elif self.what == "forward":
                x = block(x) if index != 3 else block.forward(x)
            else:
                hook = block.up.weight.register_hook(lambda grad: grad * 2)
                x = block(x)
                hook.remove()
        return self.head(x.float()).square().mean()


class Looking(Block):
    """Computes by where its tensors are from."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.up.weight.is_leaf) * (1 + x._is_view())


class WithCache(Stack):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
            return super().forward(x)


class Conjugate(Stack):
    def forward(self, x: Tensor) -> Any:
        y = torch.complex(x, x)
        for block in self.blocks:
            y = torch.complex(block(y.conj()), x)
        return y.abs().mean()


class OfComplex(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.view_as_real(x.resolve_conj()).sum(-1))


def _sharing() -> Stack:
    stack = Stack()
    shared = stack.blocks[0].up.requires_grad_(False)
    for block in stack.blocks:
        block.up.requires_grad_(False)
    stack.blocks[3].up = shared
    return stack


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, DEPTH).eval()


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(Block):
    def __init__(self, selective: bool) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"use_reentrant": False}
        if selective:
            contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
            self.options["context_fn"] = contexts

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, **self.options)


class CheckpointedOutside(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x).square().mean()


def _with_hook(index: int) -> nn.Module:
    block = Block()
    if index == 3:
        block.up.register_forward_hook(lambda module, args, out: out * 2)
    return block


def _with_outer_hook(index: int) -> nn.Module:
    block = Block()
    block.register_forward_hook(lambda module, args, out: out * (index + 1))
    return block


def _tied() -> Stack:
    stack = Stack()
    for block in stack.blocks[1::2]:
        block.up = stack.blocks[0].up
    return stack


def _replaced_forward() -> Stack:
    stack = Stack()
    block: Any = stack.blocks[2]
    block.forward = functools.partial(lambda own, x: Block.forward(own, x) * 3, block)
    return stack


def _replaced_inside() -> Stack:
    stack = Stack()
    inner: Any = stack.blocks[2].up
    inner.forward = functools.partial(lambda own, x: nn.Linear.forward(own, x) * 3, inner)
    return stack


REPEATED: dict[str, Callable[[], nn.Module]] = {
    "plain": Stack,
    "sequential": lambda: nn.Sequential(*(Block() for _ in range(DEPTH))),
    "a number that is not read": lambda: Stack(lambda index: ByIndex(index)),
    "two kinds in turn": lambda: Stack(lambda index: ByIndex(index, read=index % 2), depth=8),
    "structures": lambda: StackOfReturning(lambda index: Returning()),
    "dropout": lambda: Stack(lambda index: Dropping()),
    "constants": lambda: Stack(lambda index: WithConstant()),
    "checkpoints inside": lambda: Stack(lambda index: Checkpointed(False)),
    "selective checkpoints inside": lambda: Stack(lambda index: Checkpointed(True)),
    "checkpoints outside": CheckpointedOutside,
    "hooks of the blocks": lambda: Stack(_with_outer_hook),
    "a block without gradients": WithoutGrad,
    "autocast in turn": lambda: Autocast(depth=8),
    "writes of its own": lambda: Stack(lambda index: Writing("own")),
    "a global that changes": lambda: Leading("global"),
    "a hook inside of one": lambda: Stack(_with_hook),
    "one in eval mode": lambda: Stack(lambda index: Dropping().train(index != 2)),
    "a replaced forward": _replaced_forward,
    "a replaced forward inside": _replaced_inside,
    "frozen blocks": lambda: Stack(lambda index: Block().requires_grad_(index >= 4), depth=8),
}
"""Models with at least 4 blocks of a kind, some of which are left out of the trace."""

WHOLE: dict[str, Callable[[], nn.Module]] = {
    "each by its number": lambda: Stack(lambda index: ByIndex(index, read=index)),
    "writes into inputs": lambda: Stack(lambda index: Writing("input")),
    "writes into buffers": lambda: Stack(lambda index: Writing("buffer")),
    "views that are written": lambda: StackThatWritesViews(lambda index: View()),
    "tensors left in attributes": lambda: Stack(lambda index: Noting(["self"])),
    "numbers left in attributes": lambda: Stack(lambda index: Noting(["count"])),
    "tensors left in a global": lambda: StackOfSeen(lambda index: NotingInGlobal()),
    "an argument that grows": lambda: StackOfCollecting(lambda index: Collecting()),
    "results used outside": lambda: EachUsed(at="each"),
    "inputs of two uses": lambda: StackOfCross(lambda index: Cross()),
    "each block called twice": Twice,
    "settings that change": lambda: Leading("object"),
    "attributes that change": lambda: Leading("module"),
    "attributes of tensors": lambda: StackOfMarking(lambda index: Marking()),
    "a draw that skips": lambda: Skipping(),
    "a draw inside": lambda: Stack(lambda index: DrawingInside()),
    "a question": lambda: Stack(lambda index: Asking()),
    "weights of several blocks": _tied,
}
"""Models whose blocks are no repetitions, though they look alike."""


HIDING: dict[str, Callable[[], nn.Module]] = {
    "assigned buffers": lambda: Stack(lambda index: Assigning(index)),
    "buffers written by data": lambda: Stack(lambda index: ByData()),
    "items replaced": lambda: StackOfReplacing(lambda index: Replacing()),
    **{
        f"{what} around": lambda what=what: Around(what)
        for what in ("checkpoint", "eval", "swap", "forward", "hook")
    },
    "where tensors are from": lambda: Stack(lambda index: Looking()),
    "a cache of autocast": WithCache,
    "conjugate views": lambda: Conjugate(lambda index: OfComplex()),
    "a module of two blocks": _sharing,
    "a cached method": lambda: Stack(lambda index: Cached(index)),
    "slots": lambda: Stack(lambda index: Slotted(index)),
    **{
        place: lambda place=place: Stack(lambda index: Hiding(index, place))
        for place in ("vars", "hook", "Function", "list", "type", "dict")
    },
}
