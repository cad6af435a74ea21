"""Models to capture: a forward given as a function, and ones that ask for sizes."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import graphshard
from graphshard.capture.captured import Capture
from graphshard.capture.entry import capture
from graphshard.capture.structure import CALL, take_apart


class Net(nn.Module):
    """A forward given as a function, around whatever members it needs."""

    def __init__(self, forward, **members):
        super().__init__()
        self._forward = forward
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def linear(i=4, o=4, **kw):
    torch.manual_seed(1)
    return nn.Linear(i, o, **kw)


IDS = {0: "batch", 1: "seq"}


class Asks(nn.Module):
    """Decides by its input's sizes in three ways."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, scale=None):
        y = self.lin(x)
        if x.shape[1] % 2:
            y = y * 2
        if x.shape[0] > 5:
            y = y + 1
        places = torch.arange(x.shape[1])
        if (places * 3 < 20).all():  # a constant, but for its size
            y = y - places[:, None]
        return y.relu().sum(-1) if scale is None else y * scale


def asks(**options):
    torch.manual_seed(0)
    model = Asks()
    dynamic = {"x": IDS}
    return model, graphshard.compile(model, graphshard.SizePolicy(10), dynamic=dynamic, **options)


class Outputs(nn.Module):
    """Returns a size, and tensors of which some get no gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, batch):
        x = batch["x"]
        left, right = self.a(x), self.b(x).transpose(0, 1)
        both = torch.cat([left.flatten(0, 1), right.flatten(0, 1)])
        return {
            "left": left,
            "right": right,
            "both": both,
            "len": x.shape[1],
            "n": [x.shape[0] * 2],
        }


# -- classes of results that pytree knows without keys ---------------------------------------------


class KeylessOutput(OrderedDict):
    """A dict with attributes whose subclasses pytree knows without keys, as diffusers' outputs."""

    def __init_subclass__(cls) -> None:
        pytree.register_pytree_node(
            cls,
            lambda value: ([*value.values()], [*value.keys()]),
            lambda values, keys: cls(**dict(zip(keys, values, strict=True))),
        )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)


@dataclasses.dataclass
class Sample(KeylessOutput):
    sample: Tensor
    rest: Any = None


class Pair:
    """Known to pytree without keys; its constructor takes tensors alone."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left.contiguous(), right


pytree.register_pytree_node(
    Pair, lambda pair: ([pair.left, pair.right], None), lambda pair, _: Pair(*pair)
)


# -- a captured program as it stands, compared with the module itself ------------------------------


def run_captured(
    captured: Capture,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tangents: list[Tensor] | None = None,
) -> tuple[Any, dict[str, Tensor], dict[str, Tensor | None], list[Tensor | None]]:
    """(return value, new value per mutated name, gradient per parameter, input gradients)."""
    program = captured.program
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    values: list[Tensor] = [params[p.fqn].detach() for p in program.params]
    for buffer in program.buffers:
        value = buffer.value if buffer.constant else buffers[buffer.fqn].detach().clone()
        assert value is not None
        values.append(value)
    values += [t.detach() for t in take_apart((args, kwargs), name=CALL)[0]]
    expected = [o.tangent.meta["val"] for o in program.outputs if o.tangent is not None]
    if tangents is None:
        tangents = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).fill_(float(i == 0))
            for i, v in enumerate(expected)
        ]
    assert [t.shape for t in tangents] == [v.shape for v in expected]
    with torch.no_grad():
        outputs, mutations, grads, input_grads = fx.GraphModule(nn.Module(), program.graph)(
            *values, *tangents
        )
    mutated = {m.name: v for m, v in zip(program.mutations, mutations, strict=True)}
    by_name = {p.fqn: g for p, g in zip(program.params, grads, strict=True)}
    return captured.result.build(outputs), mutated, by_name, list(input_grads)


def assert_same_as_eager(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Capture:
    """Capture, run, and compare bit for bit with the module: first output, gradients, buffers."""
    kwargs = kwargs or {}
    captured = capture(model, args, kwargs)
    eager = copy.deepcopy(model)
    torch.manual_seed(0)
    expected = first_tensor(eager(*args, **kwargs))
    expected.backward(torch.ones_like(expected))
    torch.manual_seed(0)
    actual, mutated, grads, _ = run_captured(captured, model, args, kwargs)
    assert torch.equal(first_tensor(actual), expected)
    for name, param in eager.named_parameters():
        gradient = grads[name]
        if param.grad is None:
            assert gradient is None or not gradient.any(), name
        else:
            assert gradient is not None, name
            assert torch.equal(gradient, param.grad), name
    buffers = dict(eager.named_buffers(remove_duplicate=False))
    for name, value in mutated.items():
        if name in buffers:
            assert torch.equal(value, buffers[name]), name
    return captured


def first_tensor(value: Any) -> Tensor:
    """The first tensor in a nest of containers."""
    tensors = [v for v in torch.utils._pytree.tree_leaves(value) if isinstance(v, Tensor)]
    return tensors[0]
