"""The rules of NCCL that other tests rely on; on GPUs they hold as well."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ranks import Checks
from torch import Tensor

pytestmark = pytest.mark.cuda

TYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.uint8),
)


def here(rank: int, dtype: torch.dtype, count: int = 10) -> Tensor:
    return torch.arange(count, device="cuda").add(rank + 1).to(dtype)


def sums_of_every_type(rank: int) -> None:
    for dtype in TYPES:
        parts = [here(each, dtype) for each in range(2)]
        x = here(rank, dtype)
        dist.all_reduce(x)
        assert torch.equal(x, parts[0] + parts[1]), dtype
        x = here(rank, dtype)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        assert torch.equal(x, parts[1]), dtype
        out = torch.empty(5, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(out, here(rank, dtype))
        assert torch.equal(out, (parts[0] + parts[1])[rank * 5 :][:5]), dtype
        out = torch.empty(20, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(out, here(rank, dtype))
        assert torch.equal(out, torch.cat(parts)), dtype
        x = here(rank, dtype)
        dist.broadcast(x, 1)
        assert torch.equal(x, parts[1]), dtype


def an_abort_ends_a_wait(rank: int) -> None:
    group = dist.new_group([0, 1])
    dist.all_reduce(here(rank, torch.float32), group=group)
    torch.cuda.synchronize()
    if rank == 0:
        x = here(rank, torch.float32)
        dist.all_reduce(x, group=group, async_op=True)  # which the other rank never joins
        time.sleep(0.2)
        group._get_backend(torch.device("cuda")).abort()
        torch.cuda.synchronize()
    dist.barrier()


CHECKS = [
    sums_of_every_type,
    an_abort_ends_a_wait,
]
_started = Checks(CHECKS, 2, device="cuda")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_nccl(check: object) -> None:
    _started.require(check)
