"""Blocks that fill a cache of keys and values, each a layer, and some do more with it."""

from __future__ import annotations

from typing import Any

from repeated_blocks import DEPTH, WIDTH
from torch import Tensor, nn


class Filling(nn.Module):
    """A block that fills a layer of a cache, and is `odd` with its number or the cache."""

    def __init__(self, number: int, odd: str) -> None:
        super().__init__()
        self.layer_idx, self.odd = number, odd
        self.keys, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        number = self.layer_idx
        if self.odd == "scales by the number":
            x = x * (number + 1)
        if self.odd == "takes an item by the number":
            x = x * [*range(DEPTH)][number]
        if self.odd == "requires an int":
            assert isinstance(number, int)
        if self.odd == "asks for the length" and cache.get_seq_length():
            x = x.relu()
        if self.odd == "reads another layer" and number:
            x = x + cache.layers[number - 1].keys[0]
        if self.odd == "gives the number otherwise":
            number = number + 0
        keys, values = cache.update(self.keys(x)[None], self.values(x)[None], number)
        if self.odd == "fills twice":
            keys, values = cache.update(keys, values, number)
        return x + keys[0, : len(x)].sigmoid() * values[0, : len(x)]


class FillingBlocks(nn.Module):
    def __init__(self, odd: str, cache: type) -> None:
        super().__init__()
        self.cache = cache
        self.blocks = nn.ModuleList([Filling(number, odd) for number in range(DEPTH)])

    def forward(self, x: Tensor) -> Any:
        cache = self.cache()
        for block in self.blocks:
            x = block(x, cache)
        return x.square().sum(), cache
