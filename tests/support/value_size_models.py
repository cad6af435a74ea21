"""Models whose sizes depend on the values of their inputs, with batches of any such values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

ROWS, WIDTH, CLASSES = 12, 16, 4

Batch = tuple[Tensor, Tensor, Tensor]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Experts(nn.Module):
    """A mixture of experts that computes, for each expert, the rows that chose it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.how != "mask":
                rows, slot = (chosen == number).nonzero(as_tuple=True)
                if self.how == "skip" and rows.numel() == 0:
                    continue
                update = expert(x[rows]) * weights[rows, slot, None]
                result = result.index_add(0, rows, update)
            else:
                mask = (chosen == number).any(-1)
                weight = (weights * (chosen == number)).sum(-1)
                result[mask] = result[mask] + expert(x[mask]) * weight[mask, None]
        return x + result


class Net(nn.Module):
    """Two blocks, a head, and a loss that `of` computes from (module, x, target, mask)."""

    def __init__(self, of: Callable[..., object], block: Callable[[], nn.Module] = Mlp) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.of = of

    def logits(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, x: Tensor, target: Tensor, mask: Tensor) -> object:
        return self.of(self, x, target, mask)


def mask_loss(m: Net, x: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return F.mse_loss(m.logits(x)[mask], target[mask], reduction="sum")


def masked_select(m: Net, x: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    difference = (m.logits(x) - target).masked_select(mask[:, None])
    return difference.abs().sum()


def by_number_of_positives(m: Net, x: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum().item()
    return (m.logits(x) - target).pow(2).sum() / (count + 1) * target.max().item()


def first_rows(m: Net, x: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum().item()
    torch._check(count <= ROWS)
    return (m.logits(x[:count]) - target[:count]).pow(2).sum()


def repeated(m: Net, x: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    durations = (target[:, 0].abs() * 3).long()
    return m.logits(x).repeat_interleave(durations, 0).pow(2).sum()


def unique(m: Net, x: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    keys, where, counts = torch.unique(
        (target[:, 0] * 2).long(), return_inverse=True, return_counts=True
    )
    means = torch.zeros(keys.shape[0], CLASSES).index_add(0, where, m.logits(x)) / counts[:, None]
    return means.pow(2).sum()


def split(m: Net, x: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    lengths = torch.stack([mask.sum(), (~mask).sum()]).tolist()
    one, other = torch.split(m.logits(x), lengths)
    return one.pow(2).sum() + other.sin().sum()


def two_results(m: Net, x: Tensor, target: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    logits = m.logits(x)
    return logits[mask], logits.t()[:, mask] * 2, logits.sum()


def detection(m: Net, x: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Classes on the rows of the mask and three others, boxes on the rows, by their number."""
    logits = m.logits(x)
    rows, others = mask.nonzero(as_tuple=True)[0], (~mask).nonzero(as_tuple=True)[0]
    chosen = torch.cat([rows, others[:3]])
    classes = F.cross_entropy(logits[chosen], target[chosen].argmax(-1), reduction="sum")
    boxes = F.smooth_l1_loss(logits[rows], target[rows], reduction="sum")
    weights = torch.ones(ROWS)
    weights[mask] = 2.0
    return (classes + boxes) / max(rows.numel(), 1) + (logits.sum(1) * weights).sum()


LOSSES: dict[str, Callable[..., object]] = {
    of.__name__: of
    for of in (
        mask_loss,
        masked_select,
        by_number_of_positives,
        first_rows,
        repeated,
        unique,
        split,
        two_results,
        detection,
    )
}

MODELS: dict[str, Callable[[], Net]] = {
    **{name: (lambda of=of: Net(of)) for name, of in LOSSES.items()},
    "experts_by_nonzero": lambda: Net(mask_loss, lambda: Experts("nonzero")),
    "experts_that_skip": lambda: Net(mask_loss, lambda: Experts("skip")),
    "experts_by_mask": lambda: Net(mask_loss, lambda: Experts("mask")),
}


def draw() -> Batch:
    """A batch; a fifth of them have no row in the mask, and a fifth all rows."""
    x, target, mask = torch.randn(ROWS, WIDTH), torch.randn(ROWS, CLASSES), torch.rand(ROWS) > 0.5
    which = int(torch.randint(5, ()))
    if which < 2:
        mask[:] = which == 1
    return x, target, mask


def batch(seed: int) -> Batch:
    """The batch that `draw` gives from this seed."""
    torch.manual_seed(seed)
    return draw()


def loss_of(result: object) -> Tensor:
    """A scalar of all results, each with a gradient that differs from row to row."""
    if isinstance(result, Tensor):
        return result
    return sum((value.pow(2).sum() for value in result), torch.zeros(()))  # type: ignore


STEPS, WORDS = 7, 20


class Tagger(nn.Module):
    """Embeds words, runs a recurrent layer over packed sequences, and tags each word."""

    def __init__(
        self,
        kind: Callable[..., nn.Module],
        *,
        enforce_sorted: bool = True,
        total_length: int | None = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.layer = kind(8, 12, batch_first=True, **fields)
        width = fields.get("proj_size", 12) * (1 + fields.get("bidirectional", False))
        self.head = nn.Linear(width, 5)
        self.enforce_sorted, self.total_length = enforce_sorted, total_length

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embedding(words), lengths, batch_first=True, enforce_sorted=self.enforce_sorted
        )
        packed, hidden = self.layer(packed)
        last = hidden[0] if isinstance(hidden, tuple) else hidden
        padded, _ = pad_packed_sequence(packed, batch_first=True, total_length=self.total_length)
        return self.head(padded).pow(2).sum() + last.sin().sum()
