"""Models to capture: a forward given as a function, and ones that ask for sizes."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphshard


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
