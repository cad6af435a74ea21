"""Compiled regions as the runtime calls them: one compiled function per form, one call per region.

A form is compiled when it is first needed. Where that fails on a rank, for whatever reason, the
form's own operators run there one by one: this is nobody's business but that rank's, since a region
communicates nothing and gives the same values.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from graphshard.errors import FixedSizeError
from graphshard.program.annotations import Regions
from graphshard.program.regions import Region, form_of, viewed, works
from graphshard.program.sizes import Sizes
from graphshard.progress import Stages
from graphshard.runtime.codegen import BoxedCodeGen
from graphshard.runtime.group import Group
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private import inductor as torch_inductor
from graphshard.torch_private.compat import SYMBOLIC
from graphshard.torch_private.cpp_kernels import Kernels

logger = logging.getLogger("graphshard")


def pack(*values: Any) -> list[Any]:
    """`values` in a list of its own, which alone holds them once the code has dropped its names."""
    return list(values)


pack.__module__ = "graphshard"  # fx prints a call by it


def _nothing() -> None:
    """No kernels are waited for."""


def compile_all(forms: Sequence[Form], done: Callable[[], None] | None = None) -> None:
    """Compile each of `forms` that is not compiled yet, in this order.

    Args:
        forms: to be compiled.
        done: called after each, but for the C++ kernels that come last for all of them.
    """
    kernels = Kernels()
    for form in forms:
        form.compile(kernels)
        if done is not None:
            done()
    kernels.make()
    for form in forms:
        form.settle()


class Form:
    """What regions of equal structure share: their operators, and the function compiled of them.

    Args:
        region: any region of the form.
    """

    def __init__(self, region: Region) -> None:
        self.module, self._vals = _module_of(region)
        self._roots = _roots(region)
        self._compiled: torch_inductor.Compiled | None = None
        self._sizes: Sizes | None = None
        self._tried = False
        self._check_kernels: Callable[[], None] = _nothing
        self._checked = False
        self.failure: str | None = None
        self.calls: list[RegionCall] = []

    def compile(self, kernels: Kernels) -> None:
        """Compile the operators, unless that was tried before.

        Args:
            kernels: what to make before `settle` is called, and that before this form is.
        """
        if self._tried:
            return
        self._tried = True
        try:
            self._compiled = self._compile(kernels)
            self._check_kernels = kernels.of_graph()
        except Exception as error:  # whatever a compiler raises
            self.fall_back(_reason(error))

    def settle(self) -> None:
        """The kernels are made: fall back if one of this form's cannot be."""
        try:
            self._check_kernels()
        except Exception as error:  # whatever a compiler raises
            self.fall_back(_reason(error))
        self._check_kernels = _nothing

    def fall_back(self, reason: str) -> None:
        """Run the operators one by one from here on."""
        self._compiled, self.failure = None, reason
        logger.warning("graphshard runs a region operator by operator: %s", reason)
        for call in self.calls:
            call.note(reason)

    def _compile(self, kernels: Kernels) -> torch_inductor.Compiled:
        sizes = Sizes()
        known: dict[Any, Any] = {}
        with torch_inductor.compiling(sizes.environment, kernels) as mode:
            inputs = [_like(val, index, sizes, known, mode) for index, val in enumerate(self._vals)]
            compiled = torch_inductor.compile_graph(self.module, inputs, mode)
        if sizes.symbols:
            sizes.close_guards([f"input {index}" for index in range(len(inputs))])
            self._sizes = sizes
        return compiled

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """The results for `args`, which is emptied."""
        if not self._tried:
            compile_all([self])
        if self._compiled is None or not self._serves(args):
            return self.module.forward(args)
        if self._checked:
            return self._compiled(args)
        return self._first(args)

    def _serves(self, args: Sequence[Any]) -> bool:
        """Whether what was compiled is right for the sizes of this call."""
        if self._sizes is None:
            return True
        return self._sizes.admits(tuple(args[: len(self._sizes.symbols)]))

    def _first(self, args: list[Any]) -> Sequence[Any]:
        """Run what was compiled, and see that its results share memory as the operators' would."""
        assert self._compiled is not None
        given = [_storage(arg) for arg in args]
        results = list(self._compiled(args))
        self._checked = True
        owner: dict[int, Any] = {key.cdata: index for index, key in enumerate(given) if key}
        for index, (result, root) in enumerate(zip(results, self._roots, strict=True)):
            key = _storage(result).cdata
            found = owner.setdefault(key, root)
            expected = given[root].cdata if type(root) is int else None
            if found != root and key != expected:
                results[index] = result.clone()
                if self.failure is None:
                    self.fall_back(
                        f"a result of its compiled code, number {index}, shares memory that the "
                        "operators' would not"
                    )
        return results


class RegionCall:
    """One region of a lowered program: calls its form.

    Args:
        form: of the region.
        region: it.
        table: where to note that it fell back.
    """

    def __init__(self, form: Form, region: Region, table: Regions) -> None:
        self.form = form
        self._strides = [_strides(node.meta["val"]) for node in region.inputs]
        self._table = table
        first = region.nodes[0]
        count = sum(map(works, region.nodes))
        self._where = (
            f"region {region.number} ({first.meta['phase']} of {first.meta['unit'] or '(root)'}, "
            f"{count} operators)"
        )
        self.__name__ = self.__qualname__ = f"region_{region.number}"
        self.__module__ = "graphshard"  # fx prints a call by these
        self._run = self._first
        form.calls.append(self)
        if form.failure is not None:
            self.note(form.failure)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """The region's results, in order; `args` is emptied."""
        return self._run(args)

    def note(self, reason: str) -> None:
        """Tell the program that this region runs operator by operator."""
        self._table.fell_back[self._where] = reason

    def _first(self, args: list[Any]) -> Sequence[Any]:
        """Compiled code counts on the strides that capture saw."""
        if wrong := self._wrong_strides(args):
            self.note(wrong)
            self._run = self.form.module.forward
            return self._run(args)
        results = self.form(args)
        self._run = self.form.__call__
        return results

    def _wrong_strides(self, args: Sequence[Any]) -> str:
        """What is wrong with the strides of `args`; nothing is held of these afterwards."""
        for arg, strides in zip(args, self._strides, strict=True):
            if strides is not None and not _lies_as(arg, strides):
                return f"it is given strides {tuple(arg.stride())}, and was captured for {strides}"
        return ""


class Forms:
    """The forms of all programs of one module."""

    def __init__(self) -> None:
        self.by_structure: dict[Any, Form] = {}

    def call(self, region: Region, table: Regions) -> RegionCall:
        """What runs for `region` of a program that has `table`."""
        structure = form_of(region)
        form = self.by_structure.get(structure)
        if form is None:
            form = self.by_structure[structure] = Form(region)
        return RegionCall(form, region, table)


def _module_of(region: Region) -> tuple[fx.GraphModule, list[Any]]:
    """The operators of `region` as code that takes a list and gives one, and its inputs' values."""
    graph = fx.Graph()
    new: dict[fx.Node, Any] = {}
    vals = []
    for index, node in enumerate(region.inputs):
        new[node] = graph.placeholder(f"given_{index}")
        vals.append(node.meta["val"])
    for node in region.nodes:
        copied = graph.node_copy(node, lambda n: new[n] if n in new else n.meta["val"])
        copied.meta = {"val": node.meta.get("val")}
        new[node] = copied
    graph.output([new[node] for node in region.outputs])
    graph.set_codegen(BoxedCodeGen())
    return fx.GraphModule(nn.Module(), graph), vals


def _roots(region: Region) -> list[Any]:
    """Of each output whose storage it lies in: the number of an input, or a node's own."""
    inputs = {node: index for index, node in enumerate(region.inputs)}
    inside = set(region.nodes)
    roots = []
    for output in region.outputs:
        node = output
        while node in inside and (base := viewed(node)) is not None:
            node = base
        roots.append(inputs.get(node, node))
    return roots


def _like(val: Any, index: int, sizes: Sizes, known: dict[Any, Any], mode: Any) -> Any:
    """An example of an input: fake, with symbols of its own for those in `val`."""

    def size_of(size: Any, dim: int) -> Any:
        if not isinstance(size, SYMBOLIC):
            return size
        expression = torch_compat.size_expression(size)
        hint = torch_compat.size_hint(size)
        if expression.is_symbol:
            if expression not in known:
                known[expression] = sizes.new(f"s{len(known)}", hint, input=index, dim=dim)
            return known[expression]
        renamed = {s: torch_compat.size_expression(known[s]) for s in expression.free_symbols}
        return torch_compat.size_of_expression(
            sizes.environment, expression.xreplace(renamed), hint
        )

    if not isinstance(val, Tensor):
        return size_of(val, 0)
    shape = [size_of(size, dim) for dim, size in enumerate(val.shape)]
    strides = [size_of(stride, dim) for dim, stride in enumerate(val.stride())]
    with mode:
        return torch.empty_strided(shape, strides, dtype=val.dtype, device=val.device)


def _strides(val: Any) -> tuple[int, ...] | None:
    """The strides that an input must have; None where they are not fixed."""
    if not isinstance(val, Tensor) or any(isinstance(s, SYMBOLIC) for s in val.stride()):
        return None
    return tuple(val.stride())


def _lies_as(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether `tensor` has these strides, where they matter."""
    if tensor.numel() == 0:
        return True
    sizes = tensor.shape
    return all(
        a == b or size == 1 for a, b, size in zip(tensor.stride(), strides, sizes, strict=True)
    )


def _storage(value: Any) -> Any:
    """A weak reference to a tensor's storage, whose identity it thereby keeps; None for numbers."""
    return StorageWeakRef(value.untyped_storage()) if isinstance(value, Tensor) else None


def _reason(error: Exception) -> str:
    """The first line of what a compiler says that says something."""
    if isinstance(error, FixedSizeError):
        return f"it is compiled for one value of {error.size} alone"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text}"[:200]


T = TypeVar("T")


def compile_forms(forms: Sequence[Form], group: Group, progress: Stages) -> None:
    """Compile all of `forms` that are not compiled yet, in the order of this rank."""
    with progress.stage("compile", len(forms)):
        compile_all(turned(forms, *_place_on_host(group)), progress.advance)


def turned(forms: Sequence[T], rank: int, ranks: int) -> list[T]:
    """`forms` in the order in which one of the `ranks` on a host compiles them.

    Their compilers keep what they make in one cache on disk. So ranks begin at different places,
    every second one goes backwards, and each finds there what others made before it came to it.
    Nobody waits for anybody: what is not there yet a rank makes itself.
    """
    pair, back = divmod(rank, 2)
    begin = (pair + back) * len(forms) // -(-ranks // 2)
    order = [*forms[begin:], *forms[:begin]]
    return order[::-1] if back else order


def _place_on_host(group: Group) -> tuple[int, int]:
    """Which of the ranks of its host this one is; which of the group, where nobody says."""
    rank, ranks = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks):
        return int(rank), int(ranks)
    return group.rank, group.size
