"""The models of the published runs, as far as time and memory of a step depend on them.

Written anew after the repositories that `literature.json` names: which operators a block runs, in
which dtype, what is computed again in backward, and how the loss is taken. Kernels that do several
operators in one are in `literature_py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_aten = torch.ops.aten


# -- kernels that do several operators in one ------------------------------------------------------

# Each stands for a kernel of flash-attn, xformers or Triton: an operator that reads its operands
# and writes its results once, which is what a simulation counts. Where they run at all, they
# compute the same in plain torch.

_NAME = "graphshard_literature"


@torch.library.custom_op(f"{_NAME}::cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(logits.float(), -1)
    picked = logits.float().gather(-1, labels[:, None])[:, 0]
    return lse - picked, lse


@_cross_entropy.register_fake
def _(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return rows, torch.empty_like(rows)


@torch.library.custom_op(f"{_NAME}::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor) -> Tensor:
    share = torch.exp(logits.float() - lse[:, None])
    hot = F.one_hot(labels, logits.shape[-1])
    return ((share - hot) * grad[:, None]).to(logits.dtype)


@_cross_entropy_backward.register_fake
def _(grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor) -> Tensor:
    return torch.empty_like(logits)


def _keep_logits(ctx: Any, inputs: Any, output: Any) -> None:
    logits, labels = inputs
    ctx.save_for_backward(logits, labels, output[1])
    ctx.mark_non_differentiable(output[1])


def _of_logits(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
    logits, labels, lse = ctx.saved_tensors
    return _cross_entropy_backward(grad, logits, labels, lse), None


_cross_entropy.register_autograd(_of_logits, setup_context=_keep_logits)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss; the kernel reads logits `(rows, classes)` in their own dtype."""
    losses: Tensor = _cross_entropy(logits, labels)[0]
    return losses.mean()


@torch.library.custom_op(f"{_NAME}::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op(f"{_NAME}::swiglu_backward", mutates_args=())
def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu


@_swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


_swiglu.register_autograd(
    lambda ctx, grad: _swiglu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, of the same shape."""
    out: Tensor = _swiglu(gate, up)
    return out


@torch.library.custom_op(f"{_NAME}::rotary", mutates_args=())
def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).to(x.dtype)


@_rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _turn_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    cos, sin = ctx.saved_tensors
    return _rotary(grad.contiguous(), cos, -sin), None, None


_rotary.register_autograd(
    _turn_back, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:])
)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads `(batch, length, heads, size)` turned by angles `(length, size / 2)`."""
    out: Tensor = _rotary(x, cos, sin)
    return out


# -- what a block computes again in backward -------------------------------------------------------


def every_second_mm() -> Any:
    """The contexts of torchtitan's policy by operator, for one checkpointed call.

    The results of attention are saved, and those of every first of two matrix products: in a
    Llama block those of the queries, the values, the gate and the last product.
    """
    seen: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is _aten.mm.default:
            seen[context.is_recompute] += 1
            saved = seen[context.is_recompute] % 2 == 1
        else:
            saved = op in _SAVED
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


_SAVED = {
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
}


def recomputed(block: Callable[..., Any], how: str, *args: Any) -> Any:
    """Call `block` and keep everything ("none"), its operands ("full"), or by operator ("op")."""
    if how == "none":
        return block(*args)
    more = {"context_fn": every_second_mm} if how == "op" else {}
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False, **more)


def spread_evenly(part: float, blocks: int) -> tuple[str, ...]:
    """Which of `blocks` recompute everything if a `part` of them does, as fms-fsdp spreads them."""
    marked, cut = [], 0.5
    for number in range(1, blocks + 1):
        marked.append("full" if number * part >= cut else "none")
        cut += marked[-1] == "full"
    return tuple(marked)


# -- norms and losses ------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """RMSNorm in steps: in float32, then times the weight in the dtype of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return wide.type_as(x) * self.weight


class OneKernelNorm(nn.Module):
    """A norm that is one kernel in each direction."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, None, 1e-5)


def _plain(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _in_float32(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers did in 2023: a copy of all logits but the last, in float32."""
    shifted = logits[:, :-1].contiguous()
    return F.cross_entropy(shifted.flatten(0, 1), labels[:, 1:].flatten())


def _one_kernel(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": _plain,
    "float32": _in_float32,
    "shifted": _shifted,
    "one kernel": _one_kernel,
}


class Loss(nn.Module):
    """A loss of `LOSSES`, as a module, so that its operators can be told from the model's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return LOSSES[self.kind](logits, labels)


# -- Llama -----------------------------------------------------------------------------------------


def _cos_sin(x: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
    return torch.view_as_real(angles).to(x.dtype).unbind(-1)


def _complex(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate heads `(batch, length, heads, size)` in float32, pairs as complex numbers."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turned = pairs * angles[None, : x.shape[1], None]
    return torch.view_as_real(turned).flatten(3).type_as(x)


def _matrices(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate by 2 x 2 matrices in float32, as the Foundation Model Stack does."""
    pairs = x.float().unflatten(-1, (-1, 2)).unsqueeze(-2)
    turns = torch.view_as_real(angles)
    matrices = torch.stack((turns, turns.flip(-1)), -2)[None, : x.shape[1], None]
    return matrices.mul(pairs).sum(-1).flatten(3).type_as(x)


def _halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate two halves of each head in the dtype of `x`."""
    cos, sin = _cos_sin(x, angles[None, :, None])
    one, two = x.chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def _transformers(x: Tensor, angles: Tensor) -> Tensor:
    """As transformers does: times cosines, plus the swapped halves times sines."""
    cos, sin = _cos_sin(x, angles[None, :, None].repeat(1, 1, 1, 2))
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat((-two, one), -1) * sin


def _one_rotary(x: Tensor, angles: Tensor) -> Tensor:
    return rotary(x, *_cos_sin(x, angles))


ROTARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "complex": _complex,
    "matrices": _matrices,
    "halves": _halves,
    "transformers": _transformers,
    "one kernel": _one_rotary,
}


@dataclass(frozen=True)
class LlamaSizes:
    """The sizes of a Llama and the way its code computes.

    norm: "steps" or "one kernel". rotary: a key of `ROTARY`. loss: a key of `LOSSES`. one_product:
    queries, keys and values are one matrix product. one_swiglu: `silu(gate) * up` is one kernel.
    autocast: forward runs under autocast to bf16, with parameters as they are gathered. cache: each
    block returns its keys and values, which live as long as the output. keeps_logits: the training
    loop's variable holds the logits during backward.
    """

    width: int
    blocks: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    norm: str = "steps"
    rotary: str = "complex"
    loss: str = "plain"
    one_product: bool = False
    one_swiglu: bool = False
    autocast: bool = False
    cache: bool = False
    keeps_logits: bool = False

    @property
    def head(self) -> int:
        return self.width // self.heads

    def norm_of(self) -> nn.Module:
        return RMSNorm(self.width) if self.norm == "steps" else OneKernelNorm(self.width)


class LlamaAttention(nn.Module):
    """Grouped-query attention over `(batch, length, width)`; returns keys and values, too."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, keys = sizes.width, sizes.kv_heads * sizes.head
        if sizes.one_product:
            self.qkv = nn.Linear(width, width + 2 * keys, bias=False)
        else:
            self.q = nn.Linear(width, width, bias=False)
            self.k = nn.Linear(width, keys, bias=False)
            self.v = nn.Linear(width, keys, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes, (batch, length, width) = self.sizes, x.shape
        heads = [head.view(batch, length, -1, sizes.head) for head in self._projected(x)]
        turn = ROTARY[sizes.rotary]
        q, k, v = turn(heads[0], angles), turn(heads[1], angles), heads[2]
        times = sizes.heads // sizes.kv_heads
        if times > 1 and not sizes.one_swiglu:  # flash-attn's own interface needs no copies
            k, v = (
                y[:, :, :, None]
                .expand(-1, -1, -1, times, -1)
                .reshape(batch, length, -1, sizes.head)
                for y in (k, v)
            )
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width)), k, v

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        if not self.sizes.one_product:
            return self.q(x), self.k(x), self.v(x)
        keys = self.sizes.kv_heads * self.sizes.head
        parts = self.qkv(x).split((self.sizes.width, keys, keys), -1)
        return tuple(parts)


class LlamaBlock(nn.Module):
    """One block; `recompute` says what it computes again in backward."""

    def __init__(self, sizes: LlamaSizes, recompute: str) -> None:
        super().__init__()
        self.sizes, self.recompute = sizes, recompute
        self.attention_norm, self.mlp_norm = sizes.norm_of(), sizes.norm_of()
        self.attention = LlamaAttention(sizes)
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = recomputed(self._once, self.recompute, x, angles)
        return out

    def _once(self, x: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
        mixed, *cache = self.attention(self.attention_norm(x), angles)
        x = x + mixed
        y = self.mlp_norm(x)
        gate, up = self.gate(y), self.up(y)
        mixed = swiglu(gate, up) if self.sizes.one_swiglu else F.silu(gate) * up
        return x + self.down(mixed), *(cache if self.sizes.cache else ())


class Llama(nn.Module):
    """A Llama with its loss; `recompute` holds one entry for each block."""

    def __init__(self, sizes: LlamaSizes, length: int, recompute: tuple[str, ...]) -> None:
        super().__init__()
        self.sizes = sizes
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(LlamaBlock(sizes, how) for how in recompute)
        self.norm = sizes.norm_of()
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.loss = Loss(sizes.loss)
        angles = torch.zeros(length, sizes.head // 2, dtype=torch.complex64)
        self.register_buffer("angles", angles)  # complex, so that mixed precision leaves it

    def forward(self, idx: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        caches: list[Tensor] = []
        with torch.autocast("cpu", torch.bfloat16, enabled=self.sizes.autocast):
            x = self.tokens(idx)
            for block in self.blocks:
                x, *cache = block(x, self.angles)
                caches += cache
            logits = self.head(self.norm(x))
            if self.sizes.loss == "shifted":
                logits = logits.float()
            kept = (logits.detach(),) if self.sizes.keeps_logits else ()
            return self.loss(logits, labels), *kept, *(cache.detach() for cache in caches)


# -- MPT and minGPT --------------------------------------------------------------------------------


class MPTBlock(nn.Module):
    """A block of MPT: one product for queries, keys and values, no biases, GELU."""

    def __init__(self, width: int, heads: int, recompute: str) -> None:
        super().__init__()
        self.heads, self.recompute = heads, recompute
        self.norm_1, self.norm_2 = OneKernelNorm(width), OneKernelNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return recomputed(self._once, self.recompute, x)

    def _once(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class MPT(nn.Module):
    """An MPT with learned positions, tied embeddings and the loss of flash-attn."""

    def __init__(
        self, width: int, heads: int, length: int, recompute: tuple[str, ...], vocabulary: int
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(MPTBlock(width, heads, how) for how in recompute)
        self.norm = OneKernelNorm(width)

    def forward(self, idx: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(idx) + self.positions.weight[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        return _one_kernel(F.linear(self.norm(x), self.tokens.weight), labels)


class MinGPTBlock(nn.Module):
    """A block of minGPT as it was in 2022: attention in full matrices, GELU, dropout of 0.1."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.key, self.query, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )
        self.attn_drop, self.resid_drop = nn.Dropout(0.1), nn.Dropout(0.1)
        mask = torch.tril(torch.ones(context, context)).view(1, 1, context, context)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln1(x))
        out: Tensor = x + self.mlp(self.ln2(x))
        return out

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, self.heads, -1).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        att = att.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = self.attn_drop(F.softmax(att, dim=-1)) @ v
        out: Tensor = self.resid_drop(self.proj(y.transpose(1, 2).reshape(batch, length, width)))
        return out


class MinGPT(nn.Module):
    """minGPT of 175 B parameters: 96 layers, 12,288 wide, 96 heads, a vocabulary of 50,000."""

    def __init__(self, context: int, layers: int = 96, width: int = 12288, heads: int = 96) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50_000, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(MinGPTBlock(width, heads, context) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50_000, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.drop(self.tokens(idx) + self.positions.weight[: idx.shape[1]])
        for block in self.blocks:
            x = block(x)
        return _plain(self.head(self.norm(x)), targets)
