"""Blocks that fill a cache of keys and values, each a layer, and some do more with it."""

from __future__ import annotations

from typing import Any

from repeated_blocks import DEPTH, WIDTH
from torch import Tensor, nn


class Filling(nn.Module):
    """A block that fills a layer of a cache, and is `odd` with its number or the cache."""

    def __init__(self, number: int, odd: str, cache: type) -> None:
        super().__init__()
        self.layer_idx, self.odd, self.cache = number, odd, cache
        self.keys, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys.layer_idx = None

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        number = self.layer_idx
        of_none = self.odd == "has other modules without" and self.keys.layer_idx is None
        if of_none or self._is_odd(number, cache):
            x = x * 3
        if self.odd == "scales by the number":
            x = x * (number + 1)
        if self.odd == "takes an item by the number":
            x = x * [*range(DEPTH)][number]
        if self.odd == "reads another layer" and number:
            x = x + cache.layers[number - 1].keys[0]
        if self.odd == "gives the number otherwise":
            number = number + 0
        if self.odd == "assigns it":
            self.layer_idx = int(number)
        keys, values = self.keys(x)[None], self.values(x)[None]
        if self.odd == "fills by keyword":
            keys, values = cache.update(key_states=keys, value_states=values, layer_idx=number)
        else:
            keys, values = cache.update(keys, values, number)
        if self.odd == "fills twice":
            keys, values = cache.update(keys, values, number)
        return x + keys[0, : len(x)].sigmoid() * values[0, : len(x)]

    def _is_odd(self, number: Any, cache: Any) -> bool:
        if self.odd == "requires an int":
            assert isinstance(number, int)
        return (
            (self.odd == "asks if it is an int" and isinstance(number, int))
            or (self.odd == "asks for the length" and cache.get_seq_length() > 0)
            or (self.odd == "asks for the cache's type" and type(cache) is self.cache)
        )


class OfType(Filling):
    """One that asks for the type of its number."""

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return super().forward(x * 3 if type(self.layer_idx) is int else x, cache)


class FillingBlocks(nn.Module):
    def __init__(self, odd: str, cache: type) -> None:
        super().__init__()
        self.cache = cache
        kind = OfType if odd == "asks for its type" else Filling
        self.blocks = nn.ModuleList([kind(number, odd, cache) for number in range(DEPTH)])

    def forward(self, x: Tensor) -> Any:
        cache = self.cache()
        for block in self.blocks:
            x = block(x, cache)
        return x.square().sum(), cache
