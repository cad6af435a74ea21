"""SpecAugment of transformers' speech models: masks that numpy draws, by an operator of a program.

The models call a function of Python that draws by `numpy.random`, and may read how long each row
is. The operator here runs that function in each call, as eager does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphshard.torch_private.patches import patched

_FUNCTION = "_compute_mask_indices"

_library = torch.library.Library("graphshard", "FRAGMENT")
_library.define(
    "spec_augment(str module, SymInt[] shape, float mask_prob, int mask_length, "
    "Tensor? attention_mask, int min_masks) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@torch.library.impl(_library, "spec_augment", "CompositeExplicitAutograd")
def _mask(module: str, shape: Iterable[int], *arguments: Any) -> Tensor:
    function = getattr(sys.modules[module], _FUNCTION)
    return torch.from_numpy(function(tuple(shape), *arguments))


@torch.library.register_fake("graphshard::spec_augment", lib=_library)
def _mask_fake(module: str, shape: Iterable[Any], *_: Any) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.bool, device="cpu")


def _traced(
    module: str,
    shape: tuple[Any, Any],
    mask_prob: float,
    mask_length: int,
    attention_mask: Tensor | None = None,
    min_masks: int = 0,
) -> Tensor:
    mask: Tensor = torch.ops.graphshard.spec_augment(
        module, shape, mask_prob, mask_length, attention_mask, min_masks
    )
    return mask


@contextlib.contextmanager
def masks_of_speech(modules: Iterable[str]) -> Iterator[None]:
    """Trace the function of the `modules` of transformers that have it as the operator."""
    with contextlib.ExitStack() as stack:
        for name in modules:
            module = sys.modules.get(name)
            if name.startswith("transformers.") and hasattr(module, _FUNCTION):
                stack.enter_context(patched(module, _FUNCTION, partial(_traced, name)))
        yield
