"""Classes of results that pytree knows without keys."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


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
