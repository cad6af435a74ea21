"""Inductor's C++ kernels of one graph in one file, for torch 2.11 to 2.13.

Inductor gives every kernel to the C++ compiler by itself. That takes 0.6 s of CPU before the kernel
is looked at (headers, though precompiled, and linking), and 0.05 s for the kernel; so those of a
graph are joined here: 18 kernels of a GPT took 13 s one by one, and 1.5 s in one file (gcc, torch
2.13). What is called in the end is the same code. Wherever anything is not as expected, kernels are
compiled one by one, as Inductor has it.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any

Kernel = tuple[Sequence[str], str]
"""The C++ types of a kernel's arguments, and its source: includes, and one function "kernel"."""

_ALONE = re.compile(r'(\s*(?:#include [^\n]*\n\s*)+extern "C"\s+void\s+kernel)\(')
_CALL = """
static PyObject* graphshard_call_{number}(PyObject* args) {{
    kernel_{number}({arguments});
    Py_RETURN_NONE;
}}
"""
_CHOICE = "static PyObject* (*const graphshard_calls[])(PyObject*) = {{{names}}};"
_ENTRY = "return graphshard_calls[parse_arg<int64_t>(args, 0)](args);"


@contextlib.contextmanager
def kernels_in_one_file() -> Iterator[None]:
    """While this holds, the C++ kernels of a graph, compiled or loaded, are in one file."""
    owner = importlib.import_module("torch._inductor.async_compile").AsyncCompile
    single = owner.cpp_pybinding
    if list(signature(single).parameters) != ["self", "argtypes", "source_code"]:
        yield
        return
    waiting: list[_File] = []

    def joining(compiler: Any, argtypes: Sequence[str], source_code: str) -> Any:
        if not _can_join(source_code):
            return single(compiler, argtypes, source_code)
        if not waiting or waiting[-1].made is not None:
            waiting[:] = [_File(partial(single, compiler))]
        return waiting[-1].add(argtypes, source_code)

    owner.cpp_pybinding = joining
    try:
        yield
    finally:
        owner.cpp_pybinding = single


def _can_join(source: str) -> bool:
    """Whether a kernel is a single function, and Inductor will ask for it when it has all."""
    threads = importlib.import_module("torch._inductor.async_compile").get_compile_threads()
    return threads > 1 and _ALONE.match(source) is not None and source.count('extern "C"') == 1


class _File:
    """Kernels that are compiled together once the first of them is asked for.

    Args:
        single: compiles one as Inductor does: from the types of its arguments, and its source.
    """

    def __init__(self, single: Callable[[Sequence[str], str], Any]) -> None:
        self.kernels: list[Kernel] = []
        self.made: list[Any] | None = None
        self._single = single

    def add(self, argtypes: Sequence[str], source: str) -> Any:
        """A promise of the kernel's function, as Inductor takes it."""
        number = len(self.kernels)
        self.kernels.append((argtypes, source))
        future = importlib.import_module("torch._inductor.codecache").LambdaFuture
        return future(lambda: self._functions()[number])

    def _functions(self) -> list[Any]:
        if self.made is None:
            self.made = []  # sealed
            if len(self.kernels) > 1:
                with contextlib.suppress(Exception):  # one by one they may be compiled
                    self.made = self._together()
            if not self.made:
                promises = [self._single(*kernel) for kernel in self.kernels]
                self.made = [promise.result() for promise in promises]
        return self.made

    def _together(self) -> list[Any]:
        cache = importlib.import_module("torch._inductor.codecache").CppPythonBindingsCodeCache
        library = cache.load_async(joined(self.kernels, cache.suffix_template))()
        call = getattr(library, cache.entry_function)
        return [partial(call, number) for number in range(len(self.kernels))]


def joined(kernels: Sequence[Kernel], template: str) -> str:
    """The source of a module whose function "kernel" calls one of `kernels`, by number.

    Args:
        kernels: each becomes `kernel_0`, `kernel_1` and so on.
        template: Inductor's, of what makes a C++ function one of Python.
    """
    parts = []
    calls = []
    for number, (argtypes, source) in enumerate(kernels):
        parts.append(_ALONE.sub(rf"\1_{number}(", source, count=1))
        types = (kind.replace("const ", "") for kind in argtypes)
        arguments = (f"parse_arg<{kind}>(args, {at})" for at, kind in enumerate(types, start=1))
        calls.append(_CALL.format(number=number, arguments=", ".join(arguments)))
    names = ", ".join(f"graphshard_call_{number}" for number in range(len(kernels)))
    binding = template.format(
        arg_len="PyTuple_GET_SIZE(args)",  # each has its own
        call_entry_func=_ENTRY,
        entry_func="kernel",
        extra_parse_arg="\n".join([*calls, _CHOICE.format(names=names)]),
    )
    return "\n".join([*parts, binding])
