"""Inductor's C++ kernels of many graphs in few files, for torch 2.11 to 2.13.

Kernels are put off until all graphs are known, equal ones are made once, and the rest are joined in
files that are compiled at once; wherever anything differs from the expected, kernels are compiled
one by one. See README.md.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any

from graphshard.torch_private.patches import patched

Kernel = tuple[tuple[str, ...], str]
"""The C++ types of a kernel's arguments, and its source: includes, and one function "kernel"."""


_MODULE = "torch._inductor.async_compile"


_LEAST_IN_A_FILE = 8  # kernels: below, one more file takes longer than it saves


_ALONE = re.compile(r'(\s*(?:#include [^\n]*\n\s*)+extern "C"\s+void\s+kernel)\(')


_CALL = """
static PyObject* graphshard_call_{number}(PyObject* args) {{
    kernel_{number}({arguments});
    Py_RETURN_NONE;
}}
"""


_CHOICE = "static PyObject* (*const graphshard_calls[])(PyObject*) = {{{names}}};"


_ENTRY = "return graphshard_calls[parse_arg<int64_t>(args, 0)](args);"


class Kernels:
    """The kernels of graphs that are compiled one after the other; `make` compiles them.

    All ranks of a host that compile the same graphs, in whatever order, make the same files, which
    they find in Inductor's cache on disk.
    """

    _failed = False  # of any, ever: code that one graph has made serves others of the process, too

    def __init__(self) -> None:
        self._late: dict[Kernel, _Late] = {}
        self._places: list[tuple[dict[str, Any], str, _Late]] = []
        self._of_graph: list[_Late] | None = None

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """While this holds, for one graph, its kernels are left to be made."""
        self._of_graph = None
        owner = importlib.import_module(_MODULE).AsyncCompile
        single, wait = owner.cpp_pybinding, owner.wait
        if [*signature(single).parameters] != ["self", "argtypes", "source_code"]:
            yield
            return

        def late(compiler: Any, argtypes: Sequence[str], source_code: str) -> Any:
            if not _can_join(source_code):
                return single(compiler, argtypes, source_code)
            kernel = tuple(argtypes), source_code
            return self._late.setdefault(kernel, _Late(kernel, partial(single, compiler)))

        def waited(compiler: Any, scope: dict[str, Any]) -> None:
            wait(compiler, scope)
            found = {name: value for name, value in scope.items() if isinstance(value, _Late)}
            self._of_graph = [*(self._of_graph or ()), *found.values()]
            self._places.extend((scope, name, late) for name, late in found.items())

        with patched(owner, "cpp_pybinding", late), patched(owner, "wait", waited):
            yield

    def of_graph(self) -> Callable[[], None]:
        """A check of what the last graph was compiled to, for when `make` has run.

        It raises whatever the compiler said of a kernel.
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
        """Compile what was put off; one that the compiler refuses stands back, see `of_graph`."""
        # The order of sources is one that every rank has.
        waiting = [late for _, late in sorted(self._late.items()) if not late.is_made]
        files = max(1, min(_threads(), len(waiting) // _LEAST_IN_A_FILE))
        parts = [waiting[at::files] for at in range(files)]
        for part, load in [(part, _started(part)) for part in parts]:
            if load is None:
                continue
            with contextlib.suppress(Exception):  # one by one they may be compiled
                call = load()
                for number, late in enumerate(part):
                    late.function = partial(call, number)
        for late in waiting:
            late.make_alone()
        for scope, name, late in self._places:
            scope[name] = late.function or late
        self._late.clear()
        self._places.clear()


class _Late:
    """A kernel that is not compiled yet; who calls it all the same has it made by itself.

    Args:
        kernel: it.
        single: compiles one as Inductor does: from the types of its arguments, and its source.
    """

    def __init__(self, kernel: Kernel, single: Callable[[Sequence[str], str], Any]) -> None:
        self.kernel = kernel
        self.function: Callable[..., None] | None = None
        self.error: Exception | None = None
        self._single = single

    @property
    def is_made(self) -> bool:
        """Whether there is nothing left to do."""
        return self.function is not None or self.error is not None

    def make_alone(self) -> None:
        """Compile it as Inductor does, unless it was tried before."""
        if self.is_made:
            return
        try:
            self.function = self._single(*self.kernel).result()
        except Exception as error:  # whatever a compiler raises
            self.error = error
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


def _started(part: Sequence[_Late]) -> Callable[[], Callable[..., None]] | None:
    """What waits for the function that calls one of these kernels by number, or raises.

    The file is being compiled meanwhile. None: they are to be made one by one.
    """
    if len(part) < 2:
        return None
    with contextlib.suppress(Exception):
        cache = importlib.import_module("torch._inductor.codecache").CppPythonBindingsCodeCache
        submit = importlib.import_module(_MODULE).AsyncCompile.submit
        source = joined([late.kernel for late in part], cache.suffix_template)
        load = cache.load_async(source, submit_fn=submit)
        return lambda: getattr(load(), cache.entry_function)
    return None


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
