"""CUDA's fused attention, of which backward drops the weights that forward dropped."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.cuda


def heads(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, 10, 16).to(dtype) for _ in range(4)]


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
