"""C++ kernels of graphs in few files. No compiler runs here; in test_inductor.py one does."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor import async_compile, codecache

from graphshard.torch_private.cpp_kernels import Kernels, join_sources

TEMPLATE = "{extra_parse_arg}; entry {entry_func} of {arg_len}: {{ {call_entry_func} }}"


def kernel(body: str) -> str:
    return (
        f'\n#include <prefix.h>\nextern "C"  void  kernel(const float* a, int64_t n)\n{{{body}}}\n'
    )


ARGTYPES = ("const float*", "int64_t")


def test_one_source_calls_kernels_by_number():
    source = join_sources([(ARGTYPES, kernel("x")), (ARGTYPES[:1], kernel("kernel(1)"))], TEMPLATE)
    assert 'extern "C"  void  kernel_0(const float* a, int64_t n)\n{x}' in source
    assert 'extern "C"  void  kernel_1(const float* a, int64_t n)\n{kernel(1)}' in source
    assert "kernel_0(parse_arg<float*>(args, 1), parse_arg<int64_t>(args, 2));" in source
    assert "kernel_1(parse_arg<float*>(args, 1));" in source
    assert "{graphshard_call_0, graphshard_call_1}" in source
    assert "entry kernel of PyTuple_GET_SIZE(args): { return graphshard_calls[" in source


@pytest.fixture
def compiler(monkeypatch) -> Any:
    """Inductor's, which compiles nothing and keeps what it was given.

    files: what was to be compiled together, "kernel_0" and so on; singles: by itself. A source with
    "bad" in it is refused.
    """
    found = SimpleNamespace(files=[], singles=[], refuses_files=False)

    def load_async(source: str, submit_fn: Any) -> Any:
        found.files.append(source)
        if found.refuses_files:
            raise RuntimeError("no such luck")

        def load() -> Any:
            if "bad" in source:
                raise RuntimeError("an error in a file")
            number = len(found.files)
            return SimpleNamespace(kernel=lambda *args: calls.append((number, *args)))

        return load

    def single(self: Any, argtypes: Any, source_code: str) -> Any:
        found.singles.append(source_code)

        def result() -> Any:
            if "bad" in source_code:
                raise RuntimeError("it is bad")
            return lambda *args: calls.append(("alone", source_code, *args))

        return codecache.LambdaFuture(result)

    calls: list[Any] = []
    found.calls = calls
    monkeypatch.setattr(Kernels, "_failed", False)
    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_async", load_async)
    monkeypatch.setattr(async_compile.AsyncCompile, "cpp_pybinding", single)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    return found


def graph_of(kernels: Kernels, *sources: str) -> tuple[dict[str, Any], Any]:
    """Compile what Inductor makes of a graph: the module's names, and the check of its kernels."""
    compiler = async_compile.AsyncCompile()
    with kernels.put_off():
        scope = {
            f"cpp_{number}": compiler.cpp_pybinding(list(ARGTYPES), source)
            for number, source in enumerate(sources)
        }
        compiler.wait(scope)
    return scope, kernels.of_graph()


def test_kernels_of_all_graphs_are_compiled_together_and_equal_ones_once(compiler):
    kernels = Kernels()
    first, check = graph_of(kernels, kernel("b"), kernel("a"))
    second, _ = graph_of(kernels, kernel("c"), kernel("b"))
    assert not [*compiler.files, *compiler.singles], "nothing before all are known"
    kernels.make()
    check()
    assert len(compiler.files) == 1
    assert not compiler.singles
    for call in (first["cpp_0"], first["cpp_1"], second["cpp_0"], second["cpp_1"]):
        assert type(call) is partial, "the module calls the compiled function itself"
        call("x")
    assert [number for _, number, _ in compiler.calls] == [1, 0, 2, 1], (
        "a, b, c: as they are sorted"
    )


def test_ranks_that_compile_in_other_orders_make_the_same_files(compiler):
    sources = [kernel(f"number {number}") for number in range(20)]
    for order in (sources, sources[::-1]):
        kernels = Kernels()
        for at in range(0, 20, 4):
            graph_of(kernels, *order[at : at + 4])
        kernels.make()
    assert len(compiler.files) == 4, "as many as there are threads, each with its part"
    assert compiler.files[:2] == compiler.files[2:]


def test_what_cannot_be_joined_is_compiled_alone(compiler):
    odd = '#include <a.h>\nstatic int one() { return 1; }\nextern "C" void kernel('
    kernels = Kernels()
    scope, check = graph_of(kernels, odd, kernel("a"))
    assert compiler.singles == [odd]
    kernels.make()
    check()
    assert compiler.singles == [odd, kernel("a")], "nor is one that is the only one"
    assert not compiler.files
    compiler.refuses_files = True
    scope, check = graph_of(kernels, kernel("b"), kernel("c"))
    kernels.make()
    check()
    scope["cpp_0"](1)
    assert compiler.calls == [("alone", kernel("b"), 1)]


def test_a_kernel_that_is_refused_is_its_graphs_failure_alone(compiler):
    kernels = Kernels()
    good, check_good = graph_of(kernels, kernel("a"), kernel("b"))
    bad, check_bad = graph_of(kernels, kernel("bad"), kernel("a"))
    kernels.make()
    assert len(compiler.files) == 1
    assert len(compiler.singles) == 3
    check_good()
    good["cpp_0"](1)
    for refused in (check_bad, partial(bad["cpp_0"], 1)):
        with pytest.raises(RuntimeError, match="it is bad"):
            refused()
    # Inductor keeps code in the process: a graph that it ran no new module for may use that kernel.
    later = Kernels()
    with later.put_off():
        pass
    with pytest.raises(RuntimeError, match="refused"):
        later.of_graph()()


def test_a_kernel_called_before_all_are_known_is_made_at_once(compiler):
    kernels = Kernels()
    scope, check = graph_of(kernels, kernel("a"), kernel("b"), kernel("c"))
    scope["cpp_1"](5)
    assert compiler.calls == [("alone", kernel("b"), 5)]
    kernels.make()
    check()
    assert compiler.singles == [kernel("b")]
    scope["cpp_1"](6)
    assert compiler.calls[-1] == ("alone", kernel("b"), 6)


def test_a_kernel_refused_before_all_are_known_is_remembered_as_any_other(compiler):
    kernels = Kernels()
    scope, check = graph_of(kernels, kernel("bad"))
    with pytest.raises(RuntimeError, match="it is bad"):
        scope["cpp_0"](1)
    scope.clear()
    kernels.make()
    for later in (check, Kernels().of_graph()):
        with pytest.raises(RuntimeError, match=r"bad|refused"):
            later()


def test_where_nothing_is_awaited_kernels_are_compiled_alone(compiler, monkeypatch):
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)
    kernels = Kernels()
    with kernels.put_off():
        async_compile.AsyncCompile().cpp_pybinding(ARGTYPES, kernel("a"))
    assert compiler.singles == [kernel("a")]
    async_compile.AsyncCompile().cpp_pybinding(ARGTYPES, kernel("e"))
    assert len(compiler.singles) == 2, "outside, things are as they were"
