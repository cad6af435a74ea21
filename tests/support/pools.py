"""A pool of registered memory on a machine without GPUs, which counts the bytes in use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphshard.program import ops
from graphshard.runtime import collective_memory, lower
from graphshard.runtime.reduce import ReduceScatterByReduce


class CountingPool:
    """Stands for `RegisteredPool`.

    events: what was done, in order: "register" and "deregister".
    peak: the most bytes in use at once, each tensor rounded up to 512.
    """

    made: ClassVar[list[CountingPool]] = []
    fails: ClassVar[bool] = False

    def __init__(self, process_group: Any, device: torch.device, *, symmetric: bool) -> None:
        self.events: list[str] = []
        self.symmetric = symmetric
        self.peak = self.reserved = 0
        self._storages: list[StorageWeakRef] = []
        self.made.append(self)

    @contextmanager
    def use(self) -> Iterator[None]:
        with _Allocations() as seen:
            yield
        self._storages += seen.storages
        in_use = sum(-(-size // 512) * 512 for size in self._sizes())
        self.peak = max(self.peak, in_use)
        self.reserved = max(self.reserved, in_use)

    def _sizes(self) -> Iterator[int]:
        alive = []
        for ref in self._storages:
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is not None:
                alive.append(ref)
                yield storage.nbytes()
        self._storages = alive

    def segments(self) -> list[int]:
        return [self.reserved] if self.reserved else []

    def register(self) -> None:
        if self.fails:
            raise RuntimeError("no more handles")
        self.events.append("register")

    def deregister(self) -> None:
        self.events.append("deregister")


class _Allocations(TorchDispatchMode):
    """Notes the storages that operators inside allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_is, tree_leaves(result)):
            if tensor.untyped_storage()._cdata not in given:
                self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        return result


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def _nothing(group: Any, kind: str) -> str:  # a mock would keep its arguments
    return ""


@contextmanager
def pools_on_cpu(*, fails: bool = False) -> Iterator[list[CountingPool]]:
    """Let modules have pools on Gloo ranks, whose reduces are those of NCCL; gives the pools."""
    reduce_kind = lower._reduce_kind

    def by_reduce(op: Any, group: Any) -> Any:
        scatters = op.target is ops.reduce_scatter
        return ReduceScatterByReduce if scatters else reduce_kind(op, group)

    made: list[CountingPool] = []
    with (
        mock.patch.object(CountingPool, "made", made),
        mock.patch.object(CountingPool, "fails", fails),
        mock.patch.object(collective_memory, "RegisteredPool", CountingPool),
        mock.patch.object(collective_memory, "why_impossible", _nothing),
        mock.patch.object(lower, "_reduce_kind", by_reduce),
    ):
        yield made
