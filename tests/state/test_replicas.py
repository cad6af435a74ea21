"""Copies of one tensor on several ranks that differ: named, with the ranks, on every rank."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, Normed
from ranks import checks_of, error_of, on_ranks
from state_checks import shared_folder
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard import ReplicaError, ReplicaWarning, SizePolicy
from graphshard.state.replicas import checksum


def compiled(model: nn.Module | None = None, mesh: Any = None, **fields: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()) if model is None else model
    return graphshard.compile(model, SizePolicy(100, **fields), mesh=mesh)


def flip(tensor: Tensor, index: int = 0) -> None:
    """Change the last bit of one element."""
    local = getattr(tensor, "_local_tensor", tensor).detach()
    local.view(-1)[index : index + 1].view(torch.int32).bitwise_xor_(1)


def whole_parameters(rank: int) -> None:
    sharded = compiled(strategy="NO_SHARD")
    sharded.check_replicas()
    last = dist.get_world_size() - 1
    if rank == last:
        flip(sharded.get_parameter("1.up.weight"), 100)
    message = error_of(sharded.check_replicas, ReplicaError)
    assert f"parameter '1.up.weight' on rank {last} and on rank" in message
    with pytest.raises(ReplicaError) as caught:
        sharded.check_replicas()
    assert caught.value.ranks == {"1.up.weight": (last,)}
    sharded.check_replicas(leave_out=r"1\.up\..*")


def shards_of_replicas(rank: int) -> None:
    """Ranks 0 and 2 have one shard, 1 and 3 the other."""
    mesh = init_device_mesh("cpu", (2, 2))
    sharded = compiled(mesh=mesh, strategy="HYBRID_SHARD")
    sharded.check_replicas()
    if rank == 3:
        flip(sharded.get_parameter("0.down.weight"))
    message = error_of(sharded.check_replicas, ReplicaError)
    assert "parameter '0.down.weight' on rank 3 and on rank 1" in message


def resident_copies(rank: int) -> None:
    """Rows that the next call gathers are no copies; gathered ones are."""
    sharded = compiled(strategy="SHARD_OPTIMIZER")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for _ in range(2):
        torch.manual_seed(rank)
        sharded(torch.randn(3, 16)).sum().backward()
        sharded.check_replicas()
        optimizer.step()
        optimizer.zero_grad()
        sharded.check_replicas()
    with torch.no_grad():
        sharded(torch.randn(3, 16))
    shard = sharded._graphshard.bindings.shards["0.up.weight"]
    other = (rank + 1) % 4 * shard.layout.shard_shape[0]
    if rank == 1:  # in the rows of another rank, behind torch's back
        shard.full.detach().numpy()[other, 0] += 1
    assert "'0.up.weight' on rank 1" in error_of(sharded.check_replicas, ReplicaError)


def ignored_parameters(rank: int) -> None:
    sharded = compiled(ignored=r".*norm\.weight")
    sharded.check_replicas()
    with torch.no_grad():
        sharded.get_parameter("0.norm.weight").add_(rank // 2)
    message = error_of(sharded.check_replicas, ReplicaError)
    assert "ignored parameter '0.norm.weight' on ranks 2, 3 and on ranks 0, 1" in message


def saves_with_statistics(rank: int) -> None:
    """BatchNorm's statistics may differ in a save; copies of another buffer may not."""
    model = Normed()
    model.register_buffer("scale", torch.ones(3))
    sharded = compiled(model)
    torch.manual_seed(rank)
    sharded(torch.randn(6, 8)).backward()
    folder = shared_folder()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicaWarning)
        sharded.save_checkpoint(folder)
        sharded.save_checkpoint(folder, replicas="error")
    message = error_of(sharded.check_replicas, ReplicaError)
    assert "buffer 'body.1.running_mean'" in message
    sharded.check_replicas(leave_out=r".*running_(mean|var)")
    last = dist.get_world_size() - 1
    if rank == last:
        sharded.scale[1] = 2.0
    with pytest.warns(ReplicaWarning, match=f"buffer 'scale' on rank {last} and on rank"):
        sharded.save_checkpoint(folder)
    before = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    error_of(lambda: sharded.save_checkpoint(folder, replicas="error"), ReplicaError)
    assert sorted(path.name for path in folder.iterdir()) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicaWarning)
        sharded.save_checkpoint(folder, replicas=None)


def model_of(seed: int, device: str = "cpu") -> nn.Module:
    torch.manual_seed(seed)
    with torch.device(device):
        return nn.Sequential(Block(), Block())


def models_with_other_weights(rank: int) -> None:
    """Refused under every strategy; taken from rank 0 if the policy says so."""
    own, first = model_of(rank), model_of(0).state_dict()
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD"):
        policy = SizePolicy(100, strategy=strategy)
        message = error_of(lambda p=policy: graphshard.compile(own, p), ReplicaError)
        assert "came with different weights: parameter '0.up.weight' on rank" in message
        assert "sync_module_states=True" in message
        with pytest.raises(ReplicaError) as caught:
            graphshard.compile(model_of(7 if rank == 1 else 3), policy)
        assert caught.value.ranks["0.up.weight"][:1] == (1,)
        graphshard.compile(model_of(0), policy)
        late = graphshard.compile(model_of(0, "cpu" if rank == 0 else "meta"), policy)
        late.load_full_state_dict(first if rank == 0 else None)
        late.check_replicas()
    synced = graphshard.compile(own, replace(policy, sync_module_states=True))
    full = synced.full_state_dict(rank0_only=False)
    assert all(torch.equal(full[name], value) for name, value in first.items())
    graphshard.compile(own, replace(policy, ignored=r".*"))  # by intent


def buffers_of_other_values(rank: int) -> None:
    """Refused as weights are, to the bit; equal NaNs are equal, and later writes are a rank's."""

    def model(values: Tensor) -> nn.Module:
        torch.manual_seed(0)
        block = Block()
        block.register_buffer("table", values)
        return block

    nan = torch.tensor([float("nan"), 0.0])
    sharded = graphshard.compile(model(nan.clone()), SizePolicy(100))
    sharded.table[1] = rank
    last = dist.get_world_size() - 1
    own = model(nan * -1 if rank == last else nan)
    message = error_of(lambda: graphshard.compile(own, SizePolicy(100)), ReplicaError)
    assert f"different weights: buffer 'table' on rank {last} and on rank" in message
    assert "write buffers that shall differ after graphshard.compile" in message


def state_dicts_of_other_weights(rank: int) -> None:
    """Of which each rank would keep its own rows; nothing is loaded."""
    sharded, own = compiled(), model_of(rank).state_dict()
    before = sharded.full_state_dict(rank0_only=False)
    for load in (sharded.load_state_dict, sharded.load_full_state_dict):
        message = error_of(lambda load=load: load(own), ReplicaError)
        assert "the ranks load different weights: parameter '0.up.weight' on rank" in message
    some = {} if rank else {"1.norm.weight": torch.zeros(16)}
    message = error_of(lambda: sharded.load_state_dict(some, strict=False), ReplicaError)
    assert "parameter '1.norm.weight' on rank" in message
    after = sharded.full_state_dict(rank0_only=False)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    sharded.load_full_state_dict(own if rank == 0 else None)
    sharded.load_state_dict(sharded.state_dict())  # each rank's own shards
    sharded.load_state_dict(model_of(0).state_dict())


ONLY_ON_FOUR = [shards_of_replicas, resident_copies, ignored_parameters]

test_on_two_ranks = on_ranks(checks_of(globals(), but=ONLY_ON_FOUR), 2)
test_on_four_ranks = pytest.mark.slow(on_ranks(checks_of(globals()), 4))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex64]
)
def test_a_checksum_tells_bits_order_shape_and_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(3, 1_000_003 // 3).clamp_min(0).to(dtype)
    total = checksum(tensor)
    assert torch.equal(total, checksum(tensor.clone()))
    changed = tensor.clone()
    changed[2, 7] = ~changed[2, 7] if dtype is torch.bool else changed[2, 7] + 1
    assert not torch.equal(total, checksum(changed))
    assert not torch.equal(total, checksum(tensor.flip(1)))
    assert not torch.equal(total, checksum(tensor.view(-1)))
    zeros = torch.zeros(4)
    assert not torch.equal(checksum(zeros), checksum(-zeros))
    assert not torch.equal(checksum(zeros), checksum(zeros.to(torch.int32)))
    assert torch.equal(checksum(torch.empty(0)), checksum(torch.empty(0)))
