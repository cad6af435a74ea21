"""C++ kernels of a graph in one file. No compiler runs here; in test_inductor.py one does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor import async_compile, codecache

from graphshard.torch_kernels import joined, kernels_in_one_file

TEMPLATE = "{extra_parse_arg}; entry {entry_func} of {arg_len}: {{ {call_entry_func} }}"


def kernel(body: str) -> str:
    return (
        f'\n#include <prefix.h>\nextern "C"  void  kernel(const float* a, int64_t n)\n{{{body}}}\n'
    )


ARGTYPES = ["const float*", "int64_t"]


def test_one_source_calls_kernels_by_number():
    source = joined([(ARGTYPES, kernel("x")), (ARGTYPES[:1], kernel("kernel(1)"))], TEMPLATE)
    assert 'extern "C"  void  kernel_0(const float* a, int64_t n)\n{x}' in source
    assert 'extern "C"  void  kernel_1(const float* a, int64_t n)\n{kernel(1)}' in source
    assert "kernel_0(parse_arg<float*>(args, 1), parse_arg<int64_t>(args, 2));" in source
    assert "kernel_1(parse_arg<float*>(args, 1));" in source
    assert "{graphshard_call_0, graphshard_call_1}" in source
    assert "entry kernel of PyTuple_GET_SIZE(args): { return graphshard_calls[" in source


@pytest.fixture
def compiler(monkeypatch) -> Any:
    """Inductor's, which compiles nothing and keeps what it was given."""
    found = SimpleNamespace(files=[], singles=[], fails=False)

    def load_async(source: str) -> Any:
        found.files.append(source)
        if found.fails:
            raise RuntimeError("no such luck")
        return lambda: SimpleNamespace(kernel=lambda *args: args)

    def single(self: Any, argtypes: Any, source_code: str) -> Any:
        found.singles.append(source_code)
        return codecache.LambdaFuture(lambda: lambda *args: ("alone", *args))

    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_async", load_async)
    monkeypatch.setattr(async_compile.AsyncCompile, "cpp_pybinding", single)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    found.add = lambda source: async_compile.AsyncCompile().cpp_pybinding(ARGTYPES, source)
    return found


def test_kernels_asked_for_together_are_compiled_together(compiler):
    with kernels_in_one_file():
        first, second = compiler.add(kernel("a")), compiler.add(kernel("b"))
        assert first.result()("x", 2) == (0, "x", 2)
        assert second.result()("x", 2) == (1, "x", 2)
        later = [compiler.add(kernel("c")), compiler.add(kernel("d"))]
        assert later[1].result()(3) == (1, 3)
    assert len(compiler.files) == 2
    assert not compiler.singles
    compiler.add(kernel("e"))
    assert compiler.singles == [kernel("e")], "outside, things are as they were"


def test_what_cannot_be_joined_is_compiled_alone(compiler):
    with kernels_in_one_file():
        odd = compiler.add(
            '#include <a.h>\nstatic int one() { return 1; }\nextern "C" void kernel('
        )
        only = compiler.add(kernel("a"))
        assert odd.result()(1) == only.result()(1) == ("alone", 1)
    assert not compiler.files
    compiler.fails = True
    with kernels_in_one_file():
        both = [compiler.add(kernel("a")), compiler.add(kernel("b"))]
        assert [promise.result()(1) for promise in both] == [("alone", 1)] * 2
    assert len(compiler.files) == 1


def test_where_nothing_is_awaited_kernels_are_compiled_alone(compiler, monkeypatch):
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)
    with kernels_in_one_file():
        compiler.add(kernel("a"))
    assert len(compiler.singles) == 1
