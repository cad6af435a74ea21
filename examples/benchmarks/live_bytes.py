"""Count every live byte of tensor storage, and the most that lived at once.

A storage counts from the first operation that returns it (or `add`) until it dies, with the size it
has at the time: `resize_` to zero and back is seen, views of a storage count once. What a kernel
allocates and drops inside one operation is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
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


# -- what sharding takes ---------------------------------------------------------------------------

# fsdp: fully_shard's own operators, which copy into and out of what it communicates.
COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp"})
COPIES = frozenset(
    {
        "_chunk_cat",
        "_foreach_copy_",
        "_foreach_copy",
        "_to_copy",
        "cat",
        "clone",
        "constant_pad_nd",
        "contiguous",
        "copy",
        "copy_",
        "slice_backward",
        "split_with_sizes_copy",
        "stack",
    }
)
SUMS = frozenset({"add", "add_"})


class StepWatch(LiveBytes):
    """A context around one step; what it found stays readable until it is entered again.

    It counts also those bytes that come and go for sharding's sake, `transient`: unsharded
    parameters, gradients on their way, communication buffers. These are storages that a collective
    reads or writes, that are emptied and filled again, or that such a storage is copied from or
    into; the addends of a gradient count with it. What was there before the step and the gradients
    that the optimizer reads are none. Code of torch.compile allocates and copies past the
    dispatcher, so of a compiled step neither is known; `most_allocated` has the peak.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__(device_type)
        self._serials: dict[int, int] = {}  # by address; addresses are used again
        self._made = 0
        self._changes: list[tuple[int, int]] = []  # (serial, bytes) in the order of time
        self._seeds: set[int] = set()
        self._links: list[tuple[set[int], set[int]]] = []  # if one of the first is, all the second
        self._kept: set[int] = set()
        self._over = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code runs as it does without this mode."""
        return True

    def __enter__(self) -> Self:
        self.peak = self.current
        self._changes = [(self._serials[at], size) for at, size in self._sizes.items()]
        self._kept = {self._serials[at] for at, size in self._sizes.items() if size}
        self._seeds, self._links, self._over = set(), [], False
        return super().__enter__()

    def end_of_backward(self, parameters: Iterable[Tensor]) -> None:
        """Say that the optimizer's part begins: the gradients of `parameters` are to stay."""
        self._kept |= self._of([parameter.grad for parameter in parameters])
        self._over = True

    @property
    def transient(self) -> int:
        """The most bytes alive at once, before the optimizer's part, that are sharding's."""
        held = self._closure()
        sizes: dict[int, int] = {}
        now = peak = 0
        for serial, size in self._changes:
            if serial in held:
                now += size - sizes.get(serial, 0)
                sizes[serial] = size
                peak = max(peak, now)
        return peak

    def _closure(self) -> set[int]:
        found = self._seeds - self._kept
        links = [(a - self._kept, b - self._kept) for a, b in self._links]
        grows = True
        while grows:
            before = len(found)
            for some, others in links:
                if not found.isdisjoint(some):
                    found |= others
            grows = len(found) > before
        return found

    # -- what happens ---------------------------------------------------------------------------

    def _resized(self, address: int, size: int) -> None:
        before = self._sizes.get(address)
        super()._resized(address, size)
        if before is None:
            self._made += 1
            self._serials[address] = self._made
        if before != size and not self._over:
            self._changes.append((self._serials[address], size))
            if before is not None:
                self._seeds.add(self._serials[address])

    def _forget(self, address: int) -> None:
        if not self._over:
            self._changes.append((self._serials[address], 0))
        super()._forget(address)
        del self._serials[address]

    def _of(self, tree: Any) -> set[int]:
        """Serials of the storages in a pytree."""
        found = set()
        for leaf in tree_leaves(tree):
            if isinstance(leaf, DTensor):
                leaf = leaf.to_local()
            if isinstance(leaf, Tensor):
                serial = self._serials.get(leaf.untyped_storage()._cdata)
                if serial is not None:
                    found.add(serial)
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented or self._over:
            return result
        space, _, name = func._schema.name.partition("::")
        if space in COMMUNICATION:
            self._seeds |= self._of((args, kwargs, result))
        elif name in COPIES:
            touched = self._of((args, kwargs, result))
            self._links.append((touched, touched))
        elif name in SUMS:
            self._links.append((self._of(result), self._of((args, kwargs))))
        return result
