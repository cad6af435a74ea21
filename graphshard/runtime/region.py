"""Compiled regions as the runtime calls them: one compiled function per form, one call per region.

A form is compiled when it is first needed. Where that fails on a rank, for whatever reason, that
rank runs the form's operators one by one. Other ranks need not know, since a region communicates
nothing and computes the same values either way.
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
    """`values` in a new list, which holds the last references once the code drops its names."""
    return list(values)


pack.__module__ = "graphshard"  # fx prints a call by it


def _nothing() -> None:
    """Check nothing: the form has no kernels to wait for."""


def compile_all(forms: Sequence[Form], done: Callable[[], None] | None = None) -> None:
    """Compile each of `forms` that was not tried yet, in this order.

    done: called after each form, before the C++ kernels of all forms are compiled together.
    """
    kernels = Kernels()
    for form in forms:
        form.compile(kernels)
        if done is not None:
            done()
    kernels.make()
    for form in forms:
        form.check_kernels()


class Form:
    """The operators that regions of equal structure share, and the function compiled from them.

    module: the operators, as code that takes a list and empties it.
    failure: why the operators run one by one; None while they do not.
    calls: the regions of this form.
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
        """Compile the operators, unless that was tried before; fall back if it fails.

        `kernels` collects C++ kernels, to be compiled before `check_kernels` is called.
        """
        if self._tried:
            return
        self._tried = True
        try:
            self._compiled = self._compile(kernels)
            self._check_kernels = kernels.of_graph()
        except Exception as error:  # whatever a compiler raises
            self.fall_back(_reason(error))

    def check_kernels(self) -> None:
        """Fall back if a kernel of this form could not be compiled."""
        try:
            self._check_kernels()
        except Exception as error:  # whatever a compiler raises
            self.fall_back(_reason(error))
        self._check_kernels = _nothing

    def fall_back(self, reason: str) -> None:
        """Run the operators one by one from now on, and note `reason` on all calls."""
        self._compiled, self.failure = None, reason
        logger.warning("graphshard runs a region operator by operator: %s", reason)
        for call in self.calls:
            call.note(reason)

    def _compile(self, kernels: Kernels) -> torch_inductor.Compiled:
        sizes = Sizes()
        symbols: dict[Any, Any] = {}
        with torch_inductor.compiling(sizes.environment, kernels) as mode:
            inputs = [
                _example_input(val, index, sizes, symbols, mode)
                for index, val in enumerate(self._vals)
            ]
            compiled = torch_inductor.compile_graph(self.module, inputs, mode)
        if sizes.symbols:
            sizes.close_guards([f"input {index}" for index in range(len(inputs))])
            self._sizes = sizes
        return compiled

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """The results for `args`, which is emptied."""
        if not self._tried:
            compile_all([self])
        sizes = self._sizes
        fits = sizes is None or sizes.admits(tuple(args[: len(sizes.symbols)]))
        if self._compiled is None or not fits:
            return self.module.forward(args)
        if self._checked:
            return self._compiled(args)
        return self._first_call(args)

    def _first_call(self, args: list[Any]) -> Sequence[Any]:
        """Call the compiled function; check that its results share memory as the operators' do."""
        assert self._compiled is not None
        storages = [_storage(arg) for arg in args]
        results = list(self._compiled(args))
        self._checked = True
        root_of: dict[int, Any] = {key.cdata: index for index, key in enumerate(storages) if key}
        for index, (result, root) in enumerate(zip(results, self._roots, strict=True)):
            key = _storage(result).cdata
            actual = root_of.setdefault(key, root)
            expected = storages[root].cdata if type(root) is int else None
            if actual != root and key != expected:
                results[index] = result.clone()
                if self.failure is None:
                    self.fall_back(
                        f"result {index} of its compiled code shares memory that the result of "
                        "its operators would not share"
                    )
        return results


class RegionCall:
    """One region of a lowered program, as the function that its code calls.

    table: the program's regions, which note why one fell back.
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
        self._run = self._first_call
        form.calls.append(self)
        if form.failure is not None:
            self.note(form.failure)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """The region's results, in order; `args` is emptied."""
        return self._run(args)

    def note(self, reason: str) -> None:
        """Note on the program why this region runs operator by operator."""
        self._table.fell_back[self._where] = reason

    def _first_call(self, args: list[Any]) -> Sequence[Any]:
        """Use the compiled code if the arguments have the strides that it was compiled for."""
        if reason := self._wrong_strides(args):
            self.note(reason)
            self._run = self.form.module.forward
            return self._run(args)
        results = self.form(args)
        self._run = self.form.__call__
        return results

    def _wrong_strides(self, args: Sequence[Any]) -> str:
        """Why compiled code cannot take `args`; "" if it can. No reference to them is kept."""
        for arg, strides in zip(args, self._strides, strict=True):
            if strides is not None and not _has_strides(arg, strides):
                return f"an input has strides {tuple(arg.stride())}, at capture it had {strides}"
        return ""


class Forms:
    """The forms of all programs of one module, so that equal regions are compiled once."""

    def __init__(self) -> None:
        self.by_structure: dict[Any, Form] = {}

    def call(self, region: Region, table: Regions) -> RegionCall:
        """The call for `region` of a program whose regions are `table`."""
        structure = form_of(region)
        form = self.by_structure.get(structure)
        if form is None:
            form = self.by_structure[structure] = Form(region)
        return RegionCall(form, region, table)


def _module_of(region: Region) -> tuple[fx.GraphModule, list[Any]]:
    """(a module with the operators of `region`, from list to list, the `val` of each input)."""
    graph = fx.Graph()
    new: dict[fx.Node, Any] = {}
    vals = []
    for index, node in enumerate(region.inputs):
        new[node] = graph.placeholder(f"input_{index}")
        vals.append(node.meta["val"])
    for node in region.nodes:
        copied = graph.node_copy(node, lambda n: new[n] if n in new else n.meta["val"])
        if copied.target is torch.ops.aten.view.default:
            copied.target = torch.ops.aten.reshape.default  # see `codegen.view`
        copied.meta = {"val": node.meta.get("val")}
        new[node] = copied
    graph.output([new[node] for node in region.outputs])
    graph.set_codegen(BoxedCodeGen())
    return fx.GraphModule(nn.Module(), graph), vals


def _roots(region: Region) -> list[Any]:
    """By output, the origin of its storage: the number of an input, or the node that allocates."""
    inputs = {node: index for index, node in enumerate(region.inputs)}
    inside = set(region.nodes)
    roots = []
    for output in region.outputs:
        node = output
        while node in inside and (base := viewed(node)) is not None:
            node = base
        roots.append(inputs.get(node, node))
    return roots


def _example_input(val: Any, index: int, sizes: Sizes, symbols: dict[Any, Any], mode: Any) -> Any:
    """A fake input like `val`, a tensor or a size, with symbols of `sizes` in place of its own.

    symbols: the new symbol for each old one met so far.
    """

    def size_of(size: Any, dim: int) -> Any:
        if not isinstance(size, SYMBOLIC):
            return size
        expression = torch_compat.size_expression(size)
        hint = torch_compat.size_hint(size)
        if expression.is_symbol:
            if expression not in symbols:
                symbols[expression] = sizes.new(f"s{len(symbols)}", hint, input=index, dim=dim)
            return symbols[expression]
        renamed = {s: torch_compat.size_expression(symbols[s]) for s in expression.free_symbols}
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
    """The strides that an input must have; None if they are symbolic or it is no tensor."""
    if not isinstance(val, Tensor) or any(isinstance(s, SYMBOLIC) for s in val.stride()):
        return None
    return tuple(val.stride())


def _has_strides(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether `tensor` has `strides`, apart from dims of size 1."""
    if tensor.numel() == 0:
        return True
    sizes = tensor.shape
    return all(
        a == b or size == 1 for a, b, size in zip(tensor.stride(), strides, sizes, strict=True)
    )


def _storage(value: Any) -> Any:
    """A weak reference to a tensor's storage, whose address is not reused; None for numbers."""
    return StorageWeakRef(value.untyped_storage()) if isinstance(value, Tensor) else None


def _reason(error: Exception) -> str:
    """The first line of a compiler's error that is not blank, at most 200 characters."""
    if isinstance(error, FixedSizeError):
        return f"it is compiled for one value of {error.size} alone"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text}"[:200]


T = TypeVar("T")


def compile_forms(forms: Sequence[Form], group: Group, progress: Stages) -> None:
    """Compile those of `forms` that were not tried yet, in the order of this rank."""
    with progress.stage("compile", len(forms)):
        compile_all(rotated(forms, *_rank_on_host(group)), progress.advance)


def rotated(forms: Sequence[T], rank: int, ranks: int) -> list[T]:
    """`forms` in the order in which `rank` of the `ranks` on a host compiles them.

    The ranks' compilers share a cache on disk. So the ranks begin at different forms, every second
    one goes backwards, and each finds in the cache the forms that others compiled before it gets
    there. No rank waits for another: a form that is not in the cache it compiles itself.
    """
    pair, back = divmod(rank, 2)
    begin = (pair + back) * len(forms) // -(-ranks // 2)
    order = [*forms[begin:], *forms[:begin]]
    return order[::-1] if back else order


def _rank_on_host(group: Group) -> tuple[int, int]:
    """(rank, number of ranks) on this host; in the group where torchrun's variables are not set."""
    rank, ranks = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks):
        return int(rank), int(ranks)
    return group.rank, group.size
