"""CUDA's fused attention, of which backward drops the weights that forward dropped."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ranks import is_made_up
from torch import Tensor

pytestmark = pytest.mark.cuda


def heads(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, 10, 16).to(dtype) for _ in range(4)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients(dtype: torch.dtype, causal: bool, masked: bool) -> None:
    if causal and masked:
        pytest.skip("a call has one or the other")
    *given, grad = heads(dtype)
    bias = torch.randn(2, 3, 10, 10).to(dtype) if masked else None
    results = []
    for device in ("cpu", "cuda"):
        q, k, v = (x.detach().to(device).requires_grad_() for x in given)
        mask = None if bias is None else bias.to(device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        out.backward(grad.to(device))
        results.append([x.detach().cpu() for x in (out, q.grad, k.grad, v.grad)])
    for expected, found in zip(*results, strict=True):
        bar = 0.0 if is_made_up() else 2e-2
        assert float((found - expected).abs().max()) <= bar


@pytest.mark.parametrize("causal", [False, True])
def test_dropped_weights_are_those_of_the_generator(causal: bool) -> None:
    q, k, v, grad = (x.double().float().cuda() for x in heads(torch.float32))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.cuda.manual_seed(1)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=causal)
        return (out * grad).double().sum()

    given = [x.requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(loss(*given), given)
    with torch.no_grad():
        assert torch.equal(loss(q, k, v), loss(q, k, v))
        for n, found in enumerate(grads):
            along = torch.randn_like(found)
            more, less = ([x + (i == n) * step * along for i, x in enumerate(given)]
                          for step in (1e-2, -1e-2))  # fmt: skip
            expected = (loss(*more) - loss(*less)) / 2e-2
            assert abs(float(expected - (found * along).sum())) < 2e-2
