"""Count every live byte of tensor storage, and the most that lived at once.

A storage counts from the first operation that returns it (or `add`) until it dies, with the size it
has at the time: `resize_` to zero and back is seen, views of a storage count once. What a kernel
allocates and drops inside one operation is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphshard.torch_private import compat as torch_compat


def most_allocated(work: Callable[[], object]) -> int:
    """The most bytes that `work` has allocated on the CPU and not given back yet, at any time.

    As torch's allocator tells its profiler: in compiled code and inside of kernels, too.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    results: Any = found.profiler
    changes = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        now += change.nbytes()
        most = max(most, now)
    return most


class LiveBytes(TorchDispatchMode):
    """A context that counts; `current` and `peak` are bytes and stay readable after it.

    Only storage on devices of type `device_type` counts. Only one context may be active at a time.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()
        self.device_type = device_type
        self.peak = 0
        self._sizes: dict[int, int] = {}  # by address of the C++ storage
        self._bytes = [0, 0]  # alive and counted; alive and set apart
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._apart: set[int] = set()

    @property
    def current(self) -> int:
        """Bytes alive now."""
        return self._bytes[0]

    @property
    def apart(self) -> int:
        """Bytes alive now of what `set_apart` was given."""
        return self._bytes[1]

    def set_apart(self, tree: Any) -> None:
        """Do not count the tensors of a pytree in `current` and `peak`: they stand for the host's.

        For ranks that compute on the CPU and keep in memory of the same kind what they offload.
        """
        for leaf in tree_leaves(tree):
            if isinstance(leaf, DTensor):
                leaf = torch_compat.local_tensor(leaf)
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._apart:
                    self._resized(storage._cdata, 0)
                    self._apart.add(storage._cdata)
                self._count(storage)

    def add(self, tree: Any) -> None:
        """Count the tensors of a pytree that lived before the context was entered."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, DTensor):
                leaf = leaf.to_local()
            if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
                self._count(leaf.untyped_storage())
        self.peak = max(self.peak, self.current)

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != self.device_type:
            return
        address = storage._cdata
        if address not in self._watches:
            self._watches[address] = weakref.ref(storage, lambda _: self._forget(address))
        self._resized(address, storage.nbytes())

    def _resized(self, address: int, size: int) -> None:
        self._bytes[address in self._apart] += size - self._sizes.get(address, 0)
        self._sizes[address] = size

    def _forget(self, address: int) -> None:
        self._bytes[address in self._apart] -= self._sizes.pop(address, 0)
        self._apart.discard(address)
        self._watches.pop(address, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its operations on local tensors come by next
        result = func(*args, **(kwargs or {}))
        self.add((args, kwargs, result))  # arguments too: the operation may have resized them
        return result

    def __enter__(self) -> Self:
        self._resize = resize = torch.UntypedStorage.resize_

        def counting_resize(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)  # no operation: a dispatch mode alone would miss it
            self._count(storage)
            self.peak = max(self.peak, self.current)

        torch.UntypedStorage.resize_ = counting_resize
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize
