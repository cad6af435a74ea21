"""A model whose every dim is odd, and its sharding along any dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import graphshard
from graphshard import BlockPolicy, ModulePolicy
from graphshard.passes import offload_activations
from graphshard.policy import placement

WIDTH, VOCAB = 13, 11


class Block(nn.Module):
    """Every dim is odd and some are smaller than the ranks; parameters of 1 and 0 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 29)
        self.experts = nn.Parameter(torch.randn(3, 29, WIDTH) / 5)
        self.thin = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.one = nn.Parameter(torch.ones(1))
        self.none = nn.Parameter(torch.ones(0, 5))
        self.frozen = nn.Parameter(torch.randn(5, WIDTH), requires_grad=False)

    def reset_parameters(self) -> None:
        for param in (self.experts, self.thin, self.one, self.none, self.frozen):
            nn.init.normal_(param)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(self.norm(x) + self.thin + self.frozen.sum(0)))
        each = torch.einsum("bti,eij->etbj", hidden, self.experts)
        return x + each.mean(0).transpose(0, 1) * self.one + self.none.sum()


class Fourier(nn.Module):
    """Mixes channels in each frequency by complex parameters, and has no others."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(3, WIDTH, WIDTH, dtype=torch.cfloat) / 50)
        self.shift = nn.Parameter(torch.randn(WIDTH, dtype=torch.cfloat) / 50)
        self.turn = nn.Parameter(torch.tensor(0.6 + 0.8j))

    def reset_parameters(self) -> None:
        for param in self.parameters():
            nn.init.normal_(param)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.fft.rfft(x.float(), dim=1)[:, :3]
        mixed = torch.einsum("bfi,fio->bfo", seen, self.mix) * self.turn.conj() + self.shift
        return x + torch.fft.irfft(mixed, n=x.shape[1], dim=1).to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().transpose(1, 2), ids)


def device() -> torch.device:
    """Where this rank computes."""
    nccl = "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def compiled(
    along: Any = None,
    mesh: tuple[int, ...] | None = None,
    *,
    modules: Mapping[Any, Any] | None = None,
    meta: bool = False,
    make: Callable[[], nn.Module] = net,
    blocks: tuple[type[nn.Module], ...] = (Block,),
    backend: str = "eager",
    dynamic: Any = None,
    passes: tuple[Any, ...] = (),
    **fields: Any,
) -> Any:
    """Sharded along the dim `along` where there is one; None leaves every choice to the planner.

    The planner is not to pad at all where another split can help.
    """
    if along is not None:
        modules = {"*": {"placement": along, "unit": False}}
    policy: Any = BlockPolicy(blocks, **fields)
    if modules is not None:
        policy = ModulePolicy(modules, base=BlockPolicy(blocks), **fields)
    on = None if mesh is None else init_device_mesh(device().type, mesh, mesh_dim_names=("r", "s"))
    if device().type == "cuda":
        offload_activations.ON_CUDA = offload_activations.ELSEWHERE  # this model is small
    options = {"mesh": on, "backend": backend, "dynamic": dynamic, "passes": passes}
    with mock.patch.multiple(placement, MIN_PADDING=0, MAX_PADDING=0.0):
        with torch.device("meta" if meta else "cpu"):
            model = make()
        return graphshard.compile(model, policy, **options, check=True)
