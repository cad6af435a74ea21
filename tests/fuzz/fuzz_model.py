"""The model of a case, its inputs, and the loss over its outputs."""

from __future__ import annotations

import os
from typing import Any

import fuzz_blocks_code  # noqa: F401  # adds its kinds
import torch
import torch.nn.functional as F
from fuzz_blocks import AGAIN, KINDS, VOCAB
from fuzz_case import Case
from torch import Tensor, nn
from torch.utils import _pytree as pytree

ROOTS = ("plain", "head", "tied", "norm", "frozen_head")
DEVICE = torch.device(os.environ.get("FUZZ_DEVICE", "cpu"))

OUTPUTS = ("loss", "tensor", "tuple", "dict", "views")


class Fuzzed(nn.Module):
    """Blocks in a row between parts of the root."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.kind, self.output = case.root, case.output
        dim = case.dim
        if case.root == "tied":
            self.embed = nn.Embedding(VOCAB, dim)
        if case.root == "norm":
            self.scale = nn.Parameter(torch.ones(()))
            self.norm = nn.LayerNorm(dim)
        blocks: list[nn.Module] = []
        for name in case.blocks:
            blocks.append(blocks[-1] if name == AGAIN and blocks else _block(name, dim))
        self.blocks = nn.ModuleList(blocks)
        if case.root in ("head", "tied", "frozen_head"):
            self.head = nn.Linear(dim, VOCAB, bias=case.root != "tied")
        if case.root == "tied":
            self.head.weight = self.embed.weight
        if case.root == "frozen_head":
            self.head.requires_grad_(False)

    def forward(self, x: Tensor, ids: Tensor, *, factor: float = 1.0) -> Any:
        if self.kind == "tied":
            x = x + self.embed(ids)
        if self.kind == "norm":
            x = self.norm(x) * self.scale
        aux: list[Tensor] = []
        for block in self.blocks:
            result = block(x, ids)
            x, *more = result if isinstance(result, tuple) else (result,)
            aux += more
        y = self.head(x) if hasattr(self, "head") else x
        return self._output(y * factor, x, ids, aux)

    def _output(self, y: Tensor, x: Tensor, ids: Tensor, aux: list[Tensor]) -> Any:
        if self.output == "tensor":
            return y
        if self.output == "views":
            return y, y[:, 0], y.flatten(0, 1)
        loss = loss_of([y, *aux])
        if y.shape[-1] == VOCAB:
            loss = loss + F.cross_entropy(y.flatten(0, 1), ids.flatten())
        if self.output == "loss":
            return loss
        if self.output == "tuple":
            return (loss, x, *aux)
        return {"loss": loss, "aux": aux, "hidden": {"x": x, "ids": ids + 1}, "none": None, "n": 3}


def _block(name: str, dim: int) -> nn.Module:
    return KINDS["linear" if name == AGAIN else name](dim)


def model_of(case: Case, *, weights: int = 0) -> Fuzzed:
    """The model; `weights` chooses other initial values."""
    torch.manual_seed(1000 * case.seed + weights)
    return Fuzzed(case).to(getattr(torch, case.dtype))


def batch(case: Case, number: int, rank: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Inputs of a rank's call: `(B, T, D)` and ids `(B, T)`."""
    generator = torch.Generator("cpu").manual_seed(97 * case.seed + 13 * number + rank)
    x = torch.randn(*shape, case.dim, generator=generator, dtype=torch.float64, device="cpu")
    ids = torch.randint(VOCAB, shape, generator=generator, device="cpu")
    return x.to(DEVICE, getattr(torch, case.dtype)), ids.to(DEVICE)


def random_states() -> list[Tensor]:
    """The states of the generators that a model draws from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if DEVICE.type == "cuda" else states


def set_random_states(states: list[Tensor]) -> None:
    """Put back what `random_states` gave."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def differentiable(outputs: Any) -> list[Tensor]:
    """The tensors of a call's outputs that have a gradient function, in order."""
    leaves = pytree.tree_leaves(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def loss_of(tensors: list[Tensor]) -> Tensor:
    """One number of all floating point tensors, each with a weight of its own."""
    terms = []
    for index, tensor in enumerate(t for t in tensors if t.is_floating_point()):
        value = tensor if tensor.dim() == 0 else (tensor + 0.1).square().mean()
        terms.append(value * (1 + 0.25 * index))
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
