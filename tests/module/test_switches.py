"""Names of DistributedDataParallel and FSDP2: each works on a sharded module, or says what does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
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
    sharded.set_requires_gradient_sync(requires_gradient_sync=False)
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
