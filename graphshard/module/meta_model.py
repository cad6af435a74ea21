"""The copy of a model on meta that captures trace: code and structure, no parameter memory."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.capture.traced_module import ORIGINALS


def meta_model_of(model: nn.Module) -> nn.Module:
    """A copy of `model` with its parameters and buffers on meta.

    The forward then changes Python attributes of the copy. Attributes that cannot be copied (locks,
    process groups, generators) are shared with the model.
    """
    twins = {id(tensor): twin for tensor, twin in _on_meta(model)}
    try:
        meta_model = copy.deepcopy(model, dict(twins))
    except Exception:  # whatever the attributes of a module raise
        meta_model = _copied_by_attribute(model, dict(twins))
    named = (*model.named_parameters(), *model.named_buffers())
    vars(meta_model)[ORIGINALS] = [(name, weakref.ref(tensor)) for name, tensor in named]
    return meta_model


def _on_meta(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    for param in model.parameters():
        twin = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        vars(twin).update(vars(param))
        yield param, twin
    storages: dict[int, Tensor] = {}
    for buffer in model.buffers():
        # Buffers that share memory go on sharing it, for capture to see.
        storage = buffer.untyped_storage()
        length = max(storage.nbytes() // buffer.itemsize, 1)
        whole = storages.setdefault(
            storage._cdata, torch.empty(length, dtype=buffer.dtype, device="meta")
        )
        if whole.dtype == buffer.dtype:
            yield buffer, whole.as_strided(buffer.shape, buffer.stride(), buffer.storage_offset())
        else:
            yield buffer, torch.empty_like(buffer, device="meta")


def _copied_by_attribute(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    twins = {module: module.__class__.__new__(module.__class__) for module in model.modules()}
    memo.update((id(module), twin) for module, twin in twins.items())
    for module, twin in twins.items():
        for name, value in vars(module).items():
            try:
                vars(twin)[name] = copy.deepcopy(value, memo)
            except Exception:  # shared, then
                vars(twin)[name] = value
    return twins[model]


@contextlib.contextmanager
def set_flags(
    model: nn.Module, training: Sequence[bool], requires_grad: Mapping[str, bool]
) -> Iterator[None]:
    """Set `training` (in module order) and `requires_grad` (by name) of `model` for a while."""
    modules = list(model.modules())
    params = dict(model.named_parameters())
    before = [module.training for module in modules], [p.requires_grad for p in params.values()]
    try:
        for module, flag in zip(modules, training, strict=True):
            module.training = flag
        for name, param in params.items():
            param.requires_grad_(requires_grad[name])
        yield
    finally:
        for module, flag in zip(modules, before[0], strict=True):
            module.training = flag
        for param, flag in zip(params.values(), before[1], strict=True):
            param.requires_grad_(flag)
