"""Parameters and buffers that are more than dense values are refused or noted at compile."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

import graphshard
from graphshard.errors import PlanError

POLICY = graphshard.SizePolicy(10)


class Wrapped(Tensor):
    """A class made by `_make_wrapper_subclass`: values and a scale, as quantized weights are."""

    scale: float
    values_: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: Tensor) -> None:
        self.values_, self.scale = values, 2.0

    def __repr__(self, *_: Any, **__: Any) -> str:
        return "Wrapped"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values_)
        plain = pytree.tree_map_only(cls, lambda t: t.values_ * t.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class GathersItself(Wrapped):
    """Has the hooks by which FSDP2 gathers a parameter in another dtype, as float8 weights have."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.values_.to(torch.float8_e4m3fn),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, out: Any = None) -> Any:
        return Wrapped(outputs[0].to(dtype)), outputs


class Quantized(nn.Parameter):
    """Quantizes itself when it is moved, as bitsandbytes' parameters do."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return Quantized(super().to(*args, **kwargs).round(), requires_grad=False)


class Doubled(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is nn.functional.linear else result


class Marked(nn.Parameter):
    """Adds nothing to what torch computes."""

    def __repr__(self, *_: Any, **__: Any) -> str:
        return "Marked"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Marked, (self.data,)


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(1, 4)], layout=torch.jagged)


REFUSED: dict[str, tuple[Any, str]] = {
    "wrapped": (lambda t: Wrapped(t), r"Wrapped, and a program would not run its own __torch_disp"),
    "hooks": (lambda t: GathersItself(t), r"own fsdp_post.*, but gather the values as they are"),
    "function": (lambda t: t.as_subclass(Doubled), r"Doubled, and .* its own __torch_function__;"),
    "methods": (lambda t: Quantized(t, requires_grad=False), r"Quantized, and .* its own to;"),
    "sparse": (lambda t: t.to_sparse(), r"has the layout torch.sparse_coo.*here to_dense\(\)\)"),
    "compressed": (lambda t: t.to_sparse_csr(), r"has the layout torch.sparse_csr"),
    "nested": (lambda t: torch.nested.nested_tensor([t[0], t[1]]), r"is a nested tensor"),
    "jagged": (lambda t: jagged(), r"torch.NestedTensor, and a program would not run"),
    "integers": (
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        r"is quantized \(torch.qint8\).*dequantize\(\)",
    ),
    "masked": (lambda t: torch.masked.masked_tensor(t, t > 0), r"torch.MaskedTensor, and a pro"),
}


def model_with(kind: str, tensor: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if kind == "buffer":
        model[1].register_buffer("table", tensor)
    elif isinstance(tensor, nn.Parameter):
        model[1].weight = tensor
    else:
        model[1].weight = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
    return model


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_program_cannot_hold_is_refused(kind: str, name: str) -> None:
    make, said = REFUSED[name]
    model = model_with(kind, make(torch.randn(4, 4)))
    named = "'1.weight'" if kind == "parameter" else "'1.table'"
    for attempt in (graphshard.compile, lambda m, p: graphshard.plan(m, p, world_size=2)):
        with pytest.raises(PlanError, match=said) as raised:
            attempt(model, POLICY)
        assert str(raised.value).startswith(f"{kind} {named} ")


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_dtensor_is_refused_with_its_mesh(kind: str) -> None:
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor = distribute_tensor(torch.randn(4, 4), mesh, [Replicate(), Shard(0)])
        said = (
            "is a DTensor: Replicate() over mesh dim 'dp' of size 2, Shard(dim=0) over mesh dim "
            "'tp' of size 2; another system (tensor parallel, fully_shard) shards it"
        )
        with pytest.raises(PlanError, match=re.escape(said)):
            graphshard.plan(model_with(kind, tensor), POLICY, world_size=4)
    finally:
        dist.destroy_process_group()


def test_a_class_that_adds_nothing_is_noted_and_sharded() -> None:
    model = model_with("parameter", Marked(torch.randn(4, 4)))
    with pytest.warns(UserWarning, match=r"sees plain .* parameter '1\.weight' .*Marked"):
        sharded = graphshard.compile(model, POLICY)
    x = torch.randn(2, 4)
    for each in (model, sharded):
        each(x).square().sum().backward()
    assert torch.equal(sharded.get_submodule("1").weight.grad, model[1].weight.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphshard.plan(nn.Linear(4, 4), POLICY, world_size=2)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.fc.weight.multiplier = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * getattr(self.fc.weight, "multiplier", 1.0)


@pytest.mark.parametrize("changes", [False, True])
def test_attributes_of_parameters_are_seen_by_the_forward(changes: bool) -> None:
    class Writes(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            if changes:  # in another kind of trace
                x = x.clone().add_(1)
            return super().forward(x)

    model = Writes()
    sharded = graphshard.compile(model, POLICY)
    x = torch.randn(2, 4)
    assert torch.equal(sharded(x), model(x))
