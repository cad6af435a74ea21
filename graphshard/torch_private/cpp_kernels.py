"""Compiling Inductor's C++ kernels of many graphs in few files, for torch 2.11 to 2.15.

Inductor compiles each kernel in a file of its own. Here kernels are deferred until all graphs are
lowered; equal ones are compiled once, and the rest are joined in few files. If joining fails,
kernels are compiled one by one, as Inductor does, and the log says why. See README.md.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any

from graphshard.torch_private.patches import patched

logger = logging.getLogger("graphshard")

Kernel = tuple[tuple[str, ...], str]
"""The C++ types of a kernel's arguments, and its source: includes, and one function "kernel"."""


_MODULE = "torch._inductor.async_compile"


_LEAST_IN_A_FILE = 8  # kernels: below, one more file takes longer than it saves


_ALONE = re.compile(r'(\s*(?:#include [^\n]*\n\s*)+extern "C"\s+void\s+kernel)\(')


_CALL = """
static PyObject* graphshard_call_{number}({args} args) {{
    kernel_{number}({arguments});
    Py_RETURN_NONE;
}}
"""


_CHOICE = "static PyObject* (*const graphshard_calls[])({args}) = {{{names}}};"


_ENTRY = "return graphshard_calls[parse_arg<int64_t>(args, 0)](args);"


class Kernels:
    """The deferred kernels of graphs that are lowered one after the other; `make` compiles them.

    All ranks of a host that compile the same graphs, in whatever order, make the same files, which
    they find in Inductor's cache on disk.
    """

    _failed = False  # of any kernel of the process, since graphs share compiled code

    def __init__(self) -> None:
        self._late: dict[Kernel, _DeferredKernel] = {}
        self._places: list[tuple[dict[str, Any], str, _DeferredKernel]] = []
        self._of_graph: list[_DeferredKernel] | None = None

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Defer the kernels of one graph, which is lowered inside the context."""
        self._of_graph = None
        owner = importlib.import_module(_MODULE).AsyncCompile
        single, wait = owner.cpp_pybinding, owner.wait
        if [*signature(single).parameters] != ["self", "argtypes", "source_code"]:
            yield
            return

        def defer(compiler: Any, argtypes: Sequence[str], source_code: str) -> Any:
            if not _can_join(source_code):
                return single(compiler, argtypes, source_code)
            kernel = tuple(argtypes), source_code
            return self._late.setdefault(kernel, _DeferredKernel(kernel, partial(single, compiler)))

        def wait_and_note(compiler: Any, scope: dict[str, Any]) -> None:
            wait(compiler, scope)
            deferred = {
                name: value for name, value in scope.items() if isinstance(value, _DeferredKernel)
            }
            self._of_graph = [*(self._of_graph or ()), *deferred.values()]
            self._places.extend((scope, name, kernel) for name, kernel in deferred.items())

        with patched(owner, "cpp_pybinding", defer), patched(owner, "wait", wait_and_note):
            yield

    def of_graph(self) -> Callable[[], None]:
        """A check of the last graph's kernels, to call after `make`.

        It raises the compiler's error if one of them could not be compiled.
        """
        kernels = self._of_graph

        def check() -> None:
            if kernels is None and Kernels._failed:
                raise RuntimeError("it may use a kernel that the C++ compiler has refused")
            for kernel in kernels or ():
                if kernel.error is not None:
                    raise kernel.error

        return check

    def make(self) -> None:
        """Compile the deferred kernels; a check of `of_graph` raises the error of a refused one."""
        # The order of sources is one that every rank has.
        waiting = [kernel for _, kernel in sorted(self._late.items()) if not kernel.is_made]
        files = max(1, min(_threads(), len(waiting) // _LEAST_IN_A_FILE))
        batches = [waiting[at::files] for at in range(files)]
        for batch, load in [(batch, _start_compiling(batch)) for batch in batches]:
            if load is None:
                continue
            try:
                call = load()
            except Exception as error:  # whatever a compiler raises
                _log_failure(error)
                continue
            for number, kernel in enumerate(batch):
                kernel.function = partial(call, number)
        for kernel in waiting:
            kernel.make_alone()
        for scope, name, kernel in self._places:
            scope[name] = kernel.function or kernel
        self._late.clear()
        self._places.clear()


class _DeferredKernel:
    """A kernel that is not compiled yet; calling it compiles it alone.

    single: compiles one kernel as Inductor does, from argument types and source.
    """

    def __init__(self, kernel: Kernel, single: Callable[[Sequence[str], str], Any]) -> None:
        self.kernel = kernel
        self.function: Callable[..., None] | None = None
        self.error: Exception | None = None
        self._single = single

    @property
    def is_made(self) -> bool:
        """Whether it is compiled, or was refused."""
        return self.function is not None or self.error is not None

    def make_alone(self) -> None:
        """Compile it as Inductor does, unless that was tried before."""
        if self.is_made:
            return
        try:
            self.function = self._single(*self.kernel).result()
        except Exception as error:  # whatever a compiler raises
            self.error = error.with_traceback(None)  # whose frames hold what was compiled
            Kernels._failed = True

    def __call__(self, *args: Any) -> None:
        self.make_alone()
        if self.function is None:
            assert self.error is not None
            raise self.error
        self.function(*args)


def _threads() -> int:
    threads: int = importlib.import_module(_MODULE).get_compile_threads()
    return threads


def _can_join(source: str) -> bool:
    """Whether a kernel is a single function, and Inductor waits for kernels at all."""
    return _threads() > 1 and _ALONE.match(source) is not None and source.count('extern "C"') == 1


def _start_compiling(batch: Sequence[_DeferredKernel]) -> Callable[[], Callable[..., None]] | None:
    """Start to compile one file of these kernels; None if they must be compiled one by one.

    The function returned waits for the file and gives the function that calls one of the kernels by
    number, or raises the compiler's error.
    """
    if len(batch) < 2:
        return None
    try:
        cache = importlib.import_module("torch._inductor.codecache").CppPythonBindingsCodeCache
        submit = importlib.import_module(_MODULE).AsyncCompile.submit
        source = join_sources([kernel.kernel for kernel in batch], cache.suffix_template)
        load = cache.load_async(source, submit_fn=submit)
    except Exception as error:  # private API of Inductor, or whatever its compiler raises
        _log_failure(error)
        return None
    return lambda: getattr(load(), cache.entry_function)


def _log_failure(error: Exception) -> None:
    logger.info("graphshard compiles C++ kernels one by one: %s: %s", type(error).__name__, error)
    error.__traceback__ = None  # Inductor keeps the error, and with that would keep these frames


def join_sources(kernels: Sequence[Kernel], template: str) -> str:
    """The source of a module whose function "kernel" calls one of `kernels`, by number.

    They become `kernel_0`, `kernel_1` and so on. `template` is Inductor's, which binds a C++
    function to Python.
    """
    # From torch 2.15 on arguments come as an array, before as a tuple.
    array = "PyObject* const* args" in template
    kind_of_args = "PyObject* const*" if array else "PyObject*"
    parts = []
    calls = []
    for number, (argtypes, source) in enumerate(kernels):
        parts.append(_ALONE.sub(rf"\1_{number}(", source, count=1))
        types = (kind.replace("const ", "") for kind in argtypes)
        arguments = (f"parse_arg<{kind}>(args, {at})" for at, kind in enumerate(types, start=1))
        calls.append(_CALL.format(number=number, args=kind_of_args, arguments=", ".join(arguments)))
    names = ", ".join(f"graphshard_call_{number}" for number in range(len(kernels)))
    binding = template.format(
        arg_len="nargs" if array else "PyTuple_GET_SIZE(args)",  # each has its own
        call_entry_func=_ENTRY,
        entry_func="kernel",
        extra_parse_arg="\n".join([*calls, _CHOICE.format(args=kind_of_args, names=names)]),
    )
    return "\n".join([*parts, binding])
