"""Python's max and min of sizes that depend on values, as in `total / max(count, 1)`.

Python decides by a comparison, which a trace cannot; torch has functions that give a size again.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch

from graphshard.torch_private.patches import patched
from graphshard.torch_private.unbacked import depends_on_values


@contextlib.contextmanager
def max_and_min_of_sizes() -> Iterator[None]:
    """Let `max` and `min` of such sizes be sizes; of anything else they are what they were."""
    with (
        patched(builtins, "max", _of_sizes(builtins.max, torch.sym_max)),
        patched(builtins, "min", _of_sizes(builtins.min, torch.sym_min)),
    ):
        yield


def _of_sizes(plain: Callable[..., Any], of_two: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        values = args[0] if len(args) == 1 and type(args[0]) in (list, tuple) else args
        if not kwargs and len(values) > 1 and any(map(depends_on_values, values)):
            return reduce(of_two, values)
        return plain(*args, **kwargs)

    return function
