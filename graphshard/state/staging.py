"""Copies of a training state on the CPU, which a save in the background writes.

Torch's own stager copies the storage under each tensor. Under SHARD_OPTIMIZER a parameter is a part
of the storage of the whole one, and torch fails at the wrapper of such a DTensor.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphshard.torch_private import compat as torch_compat


@torch.no_grad()
def staged(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy of nested values, with tensors on the CPU; of a DTensor, this rank's part.

    Args:
        value: dicts, lists and tuples of tensors and plain data. Other objects are copied as
            `copy.deepcopy` does.
        memo: by the `id` of a value, its copy; a value that stands in two places is copied once.
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    made: Any
    if isinstance(value, DTensor):
        local = torch_compat.local_tensor(value)
        made = torch_compat.dtensor_like(value, local.detach().to("cpu", copy=True))
    elif isinstance(value, Tensor):
        made = value.detach().to("cpu", copy=True)
    elif type(value) in (dict, OrderedDict):
        made = type(value)((key, staged(item, memo)) for key, item in value.items())
    elif type(value) in (list, tuple):
        made = type(value)(staged(item, memo) for item in value)
    else:
        return copy.deepcopy(value, memo)
    memo[id(value)] = made
    return made
