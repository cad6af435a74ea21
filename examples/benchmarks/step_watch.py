"""The memory of a training step, whichever system runs it.

`StepWatch` counts the live bytes of tensor storage (see live_bytes.py), and also those that come
and go for sharding's sake, `transient`: unsharded parameters, gradients on their way, communication
buffers. These are storages that a collective reads or writes, that are emptied and filled again, or
that such a storage is copied from or into; the addends of a gradient count with it. What was there
before the step and the gradients that the optimizer reads are none.

Kernels of torch.compile are not seen copying, so the transient part of a compiled step is not
known; its buffers are counted all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Self

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from examples.benchmarks.live_bytes import LiveBytes

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
GENERATED = "torch._inductor.runtime.compile_tasks."
"""The package of the modules that Inductor wrote."""


class StepWatch(LiveBytes):
    """A context around one step; what it found stays readable until it is entered again."""

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
        self._swapped = _swap_allocator(self)
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for module, allocate in self._swapped:
            module.empty_strided_cpu = allocate

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


def _swap_allocator(watch: LiveBytes) -> list[tuple[Any, Any]]:
    """Let Inductor's modules tell `watch` of the buffers they allocate past the dispatcher.

    Returns what to put back: (module, its allocator).
    """

    def told(allocate: Any) -> Any:
        def allocated(*args: Any) -> Tensor:
            tensor = allocate(*args)
            watch.add(tensor)
            return tensor

        return allocated

    swapped = []
    for name, module in list(sys.modules.items()):
        if name.startswith(GENERATED) and hasattr(module, "empty_strided_cpu"):
            allocate = module.empty_strided_cpu
            swapped.append((module, allocate))
            module.empty_strided_cpu = told(allocate)
    return swapped
