"""Names of DistributedDataParallel and FSDP2: each works on a sharded module, or says what does."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from full_tensors import full
from models import TiedGPT, tokens_of
from ranks import on_ranks
from state_checks import seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import graphshard
from graphshard.errors import ForeignNameError, PassError, RuntimeStateError
from graphshard.module.switches import ANSWERS

LARGE = graphshard.SizePolicy(10)

PUBLIC = sorted(
    name
    for name in {*dir(FSDPModule), *dir(DistributedDataParallel), *ANSWERS}
    if not name.startswith("_") and not hasattr(nn.Module, name)
)


def compiled(model: nn.Module | None = None) -> Any:
    model = model or nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return graphshard.compile(model, LARGE)


# -- on ranks -------------------------------------------------------------------------------------


@contextlib.contextmanager
def by_attribute(sharded: Any) -> Iterator[None]:
    sharded.require_backward_grad_sync = False
    assert sharded.require_backward_grad_sync is False
    yield
    sharded.require_backward_grad_sync = True


@contextlib.contextmanager
def by_method(sharded: Any) -> Iterator[None]:
    sharded.set_requires_gradient_sync(requires_gradient_sync=False)
    assert not sharded.require_backward_grad_sync
    yield
    sharded.set_requires_gradient_sync(True)


def accumulated(
    sharded: Any, off: Callable[[Any], Any], rank: int
) -> tuple[list[bool], dict[str, Tensor]]:
    """Whether there were gradients after the unsynchronised micro-steps, and them at the end."""
    sharded.zero_grad()
    with off(sharded):
        for micro in range(2):
            sharded(*tokens_of(rank, micro)).backward()
    between = [param.grad is not None for param in sharded.parameters()]
    sharded(*tokens_of(rank, 2)).backward()
    return between, {name: full(param.grad) for name, param in sharded.named_parameters()}


def switches_are_no_sync(rank: int) -> None:
    sharded = compiled(seeded(TiedGPT).eval())
    expected = accumulated(sharded, lambda m: m.no_sync(), rank)
    assert not any(expected[0])
    for off in (by_attribute, by_method):
        between, grads = accumulated(sharded, off, rank)
        assert between == expected[0]
        assert all(torch.equal(grads[name], grad) for name, grad in expected[1].items())
    reduced, _ = accumulated(sharded, lambda m: contextlib.nullcontext(), rank)
    assert all(reduced)


def switches_are_fully_shard_s(rank: int) -> None:
    """Both switches of FSDP2 on a mesh with replicas; then the loop is the same on both."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = seeded(TiedGPT).eval()
    theirs = fully_shard(copy.deepcopy(model), mesh=mesh)
    policy = graphshard.SizePolicy(10, strategy="HYBRID_SHARD")
    mine = graphshard.compile(model, policy, mesh=mesh)
    for name in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        for module in (theirs, mine):
            module.zero_grad()
            for micro in range(3):
                getattr(module, name)(micro == 2)
                module(*tokens_of(rank, micro)).backward()
        for param, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(full(param.grad), full(other.grad))
    mine.set_requires_gradient_sync(False)
    mine.set_requires_all_reduce(False)  # of what is not reduced at all
    mine.zero_grad()
    mine(*tokens_of(rank, 0)).backward()
    assert all(param.grad is None for param in mine.parameters())


test_on_two_ranks = on_ranks([switches_are_no_sync, switches_are_fully_shard_s], 2)


# -- on one ---------------------------------------------------------------------------------------

WORKS = {"module", "no_sync", "set_requires_gradient_sync", "set_requires_all_reduce"}
WORKS |= {"require_backward_grad_sync"}


def test_every_name_of_ddp_and_fsdp2_works_or_says_what_does() -> None:
    sharded = compiled()
    assert len(PUBLIC) > 40
    for name in PUBLIC:
        if name in WORKS:
            assert getattr(sharded, name) is not None
            continue
        for part in (sharded, sharded.get_submodule("0")):
            with pytest.raises(ForeignNameError, match=rf"^{name} of Dist.* FSDP2 (is|has) .+"):
                getattr(part, name)
            assert not hasattr(part, name)  # as libraries ask


def test_names_of_the_model_s_own_come_first() -> None:
    names = [name for name in PUBLIC if name != "no_sync"]  # which is any sharded module's
    model = nn.Sequential(nn.Linear(4, 4))
    for name in names:
        setattr(model, name, "attribute")
    sharded = compiled(model)
    for name in names:
        assert getattr(sharded, name) == "attribute"
        setattr(sharded, name, "other")
        assert getattr(sharded, name) == "other"
    own = type("Own", (nn.Sequential,), {name: lambda self: 1 for name in names})
    sharded = compiled(own(nn.Linear(4, 4)))
    assert all(getattr(sharded, name)() == 1 for name in names)
    assert sharded(torch.ones(1, 4)).requires_grad


def test_module_is_the_sharded_module_itself() -> None:
    sharded = compiled()
    inside = sharded
    while hasattr(inside, "module"):  # as code unwraps a model
        inside = inside.module
    assert [*map(id, inside.parameters())] == [*map(id, sharded.parameters())]
    inside.eval()
    assert not sharded.training
    out = inside(torch.randn(2, 4))
    assert out.shape == (2, 4)
    assert isinstance(inside, type(sharded))
    assert "module" not in dict(sharded.named_modules())
    assert list(sharded.module.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    inner = nn.Module()
    inner.module, inner.forward = nn.Linear(4, 4), lambda x: inner.module(x)
    assert compiled(inner).module.weight.shape == (4, 4)


@pytest.mark.parametrize("name", ["broadcast_buffers", "find_unused_parameters", "static_graph"])
def test_settings_that_would_do_nothing_are_refused(name: str) -> None:
    with pytest.raises(ForeignNameError, match=name):
        setattr(compiled(), name, True)


def test_switches_that_would_lose_gradients_are_refused() -> None:
    sharded = compiled()
    sharded.set_requires_gradient_sync(False)
    loss = sharded(torch.ones(1, 4)).sum()
    with pytest.raises(RuntimeStateError, match=r"between a forward and its backward"):
        sharded.set_requires_gradient_sync(True)
    loss.backward()
    sharded.set_requires_gradient_sync(True)
    sharded(torch.ones(1, 4)).sum().backward()
    assert all(param.grad is not None for param in sharded.parameters())
    with pytest.raises(RuntimeStateError, match=r"recurse=False\) switches a part"):
        sharded.set_requires_gradient_sync(False, recurse=False)
    sharded.set_requires_all_reduce(False)
    with pytest.raises(PassError, match=r"no gradient is all-reduced over replicas"):
        sharded(torch.ones(1, 4))


def test_names_of_neither_are_missed_as_always() -> None:
    for name in ("nothing", "_set_static_graph"):
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}'") as caught:
            getattr(compiled(), name)
        assert type(caught.value) is AttributeError
