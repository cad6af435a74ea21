"""What a step costs the host less: operators by torch's functions, few frames, no pytree."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import graphshard
from examples.gpt import GPT, Block, GPTConfig
from graphshard.capture.structure import CALL, FlatCalls, take_apart
from graphshard.runtime import codegen as operator_calls
from graphshard.runtime.codegen import call_of

aten = torch.ops.aten

_X, _ROW, _SQUARE, _CUBE = torch.rand(3, 4), torch.rand(4), torch.rand(4, 4), torch.rand(2, 3, 4)

_CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.add.Tensor: [((_X, _X), {}), ((_X, 2), {}), ((_X, _ROW), {"alpha": 2})],
    aten.addmm.default: [((_ROW, _X, _SQUARE), {}), ((_ROW, _X, _SQUARE), {"beta": 2})],
    aten.bmm.default: [((_CUBE, _CUBE.mT), {})],
    aten.cat.default: [(([_X, _X],), {}), (([_X, _X], -1), {})],
    aten.clone.default: [
        ((_X.t(),), {}),
        ((_X.t(),), {"memory_format": torch.contiguous_format}),
    ],
    aten.cos.default: [((_X,), {})],
    aten.detach.default: [((_X,), {})],
    aten.div.Tensor: [((_X, _X), {}), ((torch.arange(3), -8), {})],
    aten.exp.default: [((_X,), {})],
    aten.mean.dim: [
        ((_X, [0]), {}),
        ((_X, [-1], True), {"dtype": torch.float64}),
        ((_X, None), {}),
    ],
    aten.mm.default: [((_X, _SQUARE), {})],
    aten.mul.Tensor: [((_X, _X), {}), ((_X, 0.5), {}), ((torch.arange(3), 2), {})],
    aten.native_layer_norm.default: [
        ((_X, [4], _ROW, _ROW, 1e-5), {}),
        ((_X, [4], None, None, 1e-5), {}),
    ],
    aten.neg.default: [((_X,), {})],
    aten.permute.default: [((_CUBE, [2, 0, 1]), {})],
    aten.pow.Tensor_Scalar: [((_X, 2), {}), ((_X, 0.5), {})],
    aten.rsqrt.default: [((_X,), {})],
    aten.sigmoid.default: [((_X,), {})],
    aten.sin.default: [((_X,), {})],
    aten.squeeze.dim: [((_X[:, :1], 1), {})],
    aten.stack.default: [(([_X, _X],), {}), (([_X, _X], -1), {})],
    aten.sub.Tensor: [((_X, _X), {}), ((_X, 1), {}), ((_X, _ROW), {"alpha": 2})],
    aten.sum.dim_IntList: [((_X, [0], True), {}), ((_X, [1]), {"dtype": torch.float64})],
    aten.t.default: [((_X,), {}), ((_ROW,), {})],
    aten.tanh.default: [((_X,), {})],
    aten.transpose.int: [((_CUBE, 0, -1), {})],
    aten.unsqueeze.default: [((_X, -1), {})],
    aten.expand.default: [((_ROW, [3, -1]), {}), ((_ROW, [3, 4]), {"implicit": False})],
    aten.view.default: [((_X, [2, -1]), {}), ((_X, [12]), {})],
}


class Dispatched(TorchDispatchMode):
    """Which operators are dispatched, with what."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, form = pytree.tree_flatten((args, kwargs))
        known = [id(x) if x is _X or x is _ROW or x is _SQUARE else str(x) for x in leaves]
        self.calls.append((func, known, form))
        return func(*args, **kwargs or {})


def dispatched(call: Any, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    with Dispatched() as seen, torch.no_grad():
        result = call(*args, **kwargs)
    return seen.calls, result


def test_every_operator_with_another_call_is_tested() -> None:
    assert set(_CALLS) == {*operator_calls._FUNCTIONS, *operator_calls._METHODS}


@pytest.mark.parametrize("operator", _CALLS, ids=str)
def test_torchs_functions_dispatch_what_the_operator_does(operator: Any) -> None:
    assert call_of(operator) is not operator
    for args, kwargs in _CALLS[operator]:
        ours, result = dispatched(call_of(operator), args, kwargs)
        theirs, expected = dispatched(operator, args, kwargs)
        assert [func for func, _, _ in ours] == [operator]
        assert ours == theirs
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        assert pytree.tree_map(Tensor.stride, result) == pytree.tree_map(Tensor.stride, expected)


def test_other_operators_are_called_as_they_are() -> None:
    assert call_of(aten.split.Tensor)(_X, 2)[1].shape == (1, 4)
    custom = torch.ops.aten.add_.Tensor
    assert call_of(custom)(torch.ones(2), 1).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((_X, _ROW), {}),
        ((_X, None, 1, True, 0.5, "a"), {"mask": _ROW, "flag": False}),
        ((), {"y": _ROW, "x": _X}),
        (({"x": _X}, [_ROW]), {}),
        ((torch.nn.Parameter(_X),), {"kind": torch.float32}),
    ],
)
def test_a_call_comes_apart_as_pytree_has_it(args: Any, kwargs: Any) -> None:
    calls = FlatCalls()
    for _ in range(2):
        tensors, structure = calls.take_apart(args, kwargs)
        expected, known = take_apart((args, kwargs), name=CALL)
        assert [id(t) for t in tensors] == [id(t) for t in expected]
        assert structure == known
        assert hash(structure) == hash(known)
        assert structure.paths == known.paths


def test_calls_of_other_forms_are_told_apart() -> None:
    calls = FlatCalls()
    forms: list[tuple[Any, Any]] = [
        ((_X, 1), {}),
        ((_X, True), {}),
        ((_X, 1.0), {}),
        ((_X, "1"), {}),
        ((1, _X), {}),
        ((_X,), {"a": 1}),
        ((_X,), {"b": 1}),
        ((_X, _X), {}),
        ((_X,), {"a": _X}),
        ((), {"a": _X, "b": 1}),
        ((), {"b": 1, "a": _X}),
    ]
    structures = [calls.take_apart(*form)[1] for form in forms]
    assert len(set(structures)) == len(forms)
    again = [calls.take_apart(*form)[1] for form in forms]
    assert all(one is other for one, other in zip(structures, again, strict=True))


def _followed(rank: int) -> tuple[set[str], dict[str, int]]:
    """Our files that a step enters, and the most frames of ours from forward to a message."""
    sharded = graphshard.compile(GPT(GPTConfig()), graphshard.BlockPolicy({Block}))
    tokens = torch.arange(32).view(2, 16) + rank
    ours, files, deepest = graphshard.__path__[0], set(), {"gather": 0, "meeting": 0}

    def follow(frame: FrameType, event: str, called: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            files.add(frame.f_code.co_filename.removeprefix(ours))
        if event != "c_call" or called.__name__ not in ("send", "recv"):
            return
        stack: list[str] = []
        while frame.f_back is not None and "ShardedModule.forward" not in stack:
            if frame.f_code.co_filename.startswith(ours):
                stack.append(frame.f_code.co_qualname)
            frame = frame.f_back
        if stack[-1] == "ShardedModule.forward":
            kind = "meeting" if "Agreement._meet" in stack else "gather"
            deepest[kind] = max(deepest[kind], len(stack))

    for profile in (None, None, None, follow):
        sys.setprofile(profile)
        try:
            sharded(tokens, tokens).backward()
        finally:
            sys.setprofile(None)
    return files, deepest


def test_a_step_can_be_followed() -> None:
    """A reader meets few files, and few functions between the call and what it sends."""
    for files, deepest in run_ranks(_followed, 2):
        assert 0 < deepest["gather"] <= 8
        assert 0 < deepest["meeting"] <= 10
        assert len(files) <= 18, sorted(files)
