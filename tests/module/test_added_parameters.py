"""Parameters and buffers that are added to a sharded module, or removed, are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import graphshard
from graphshard.errors import RuntimeStateError


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


CHANGES: dict[str, Any] = {
    "old weight_norm": weight_norm,
    "weight_norm": parametrizations.weight_norm,
    "old spectral_norm": spectral_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "parametrization": lambda part: parametrize.register_parametrization(part, "weight", Doubled()),
    "prune": lambda part: prune.l1_unstructured(part, "weight", 0.5),
    "attribute": lambda part: setattr(part, "extra", nn.Parameter(torch.ones(2))),
    "registered": lambda part: part.register_parameter("extra", nn.Parameter(torch.ones(2))),
    "buffer": lambda part: part.register_buffer("extra", torch.ones(2)),
    "deleted": lambda part: delattr(part, "bias"),
    "none": lambda part: setattr(part, "bias", None),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_changes_of_parts_are_refused(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    said = r"'0\.\w+' cannot be added.* removed.*before graphshard\.compile"
    if name in ("weight_norm", "spectral_norm", "orthogonal", "parametrization"):
        said = rf"{said}|'0\.\w+' cannot be added, replaced or removed as a module"
    with pytest.raises(RuntimeStateError, match=said):
        CHANGES[name](sharded.get_submodule("0"))
    with pytest.raises(RuntimeStateError, match=r"'more' cannot be added"):
        sharded.register_parameter("more", nn.Parameter(torch.ones(2)))


def test_a_parameter_taken_from_its_table_is_missed() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    del sharded.get_submodule("0")._parameters["weight"]
    with pytest.raises(RuntimeStateError, match=r"parameter '0\.weight' was removed; weight_norm"):
        sharded(torch.randn(2, 4))


def test_parameters_and_buffers_can_be_replaced() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    for each in (model, sharded):
        torch.manual_seed(0)
        each.get_submodule("0").weight = nn.Parameter(torch.randn(4, 4))
        each.get_submodule("1").running_mean = torch.randn(4)
    x = torch.randn(2, 4)
    assert torch.equal(sharded(x), model(x))
