"""Inductor's joint passes on regions: what they may change, and what keeps them out."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.fx_passes import fuse_attention, joint_graph, pad_mm
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphshard.torch_private import inductor as torch_inductor
from graphshard.torch_private.cpp_kernels import Kernels

aten = torch.ops.aten


def rewritten(function: Any, *shapes: tuple[int, ...]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The trace of `function` for tensors of these shapes, and what the passes make of it."""
    with torch_inductor.compiling(ShapeEnv(), Kernels()) as mode:
        with mode:
            inputs = [torch.empty(shape) for shape in shapes]
            traced = make_fx(function)(*inputs)
            promised = function(*inputs)
        return traced, torch_inductor.with_joint_passes(traced, inputs, promised, mode)


def counted(graph: fx.GraphModule, operator: Any) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=operator))


def test_constants_are_folded():
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x * torch.full((4,), 3.0) * torch.full((4,), 2.0).div(2.0)) @ y]

    before, after = rewritten(function, (4, 4), (4, 5))
    assert (counted(before, aten.mul.Tensor), counted(after, aten.mul.Tensor)) == (2, 1)
    x, y = torch.randn(4, 4), torch.randn(4, 5)
    assert torch.equal(before(x, y)[0], after(x, y)[0])


def test_what_is_folded_to_an_input_or_to_another_result_is_copied():
    def function(x: Tensor) -> list[Tensor]:
        return [x + torch.full((4, 4), 0.0), x.t() + torch.full((4, 4), 0.0), x + 1]

    before, after = rewritten(function, (4, 4))
    assert (counted(before, aten.add.Tensor), counted(after, aten.add.Tensor)) == (3, 1)
    x = torch.randn(4, 4)
    results = after(x)
    for result, expected in zip(results, before(x), strict=True):
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()
    assert len({t.untyped_storage().data_ptr() for t in (x, *results)}) == 4


def with_passes_on_cpu(monkeypatch) -> None:
    """Let `pad_mm` take CPUs for GPUs."""
    monkeypatch.setattr(pad_mm, "check_device", lambda a, b: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)


def test_products_of_odd_sizes_are_padded(monkeypatch):
    with_passes_on_cpu(monkeypatch)
    with config.patch(force_shape_pad=True):
        before, after = rewritten(lambda x, y: [x @ y], (6, 7), (7, 5))
    assert counted(before, aten.constant_pad_nd.default) == 0
    assert counted(after, aten.constant_pad_nd.default) == 2
    x, y = torch.randn(6, 7), torch.randn(7, 5)
    torch.testing.assert_close(after(x, y)[0], x @ y)
    assert after(x, y)[0].is_contiguous()  # as promised, though it is part of a wider matrix


def test_attention_patterns_are_loaded_for_attention_alone(monkeypatch):
    loaded = []
    monkeypatch.setattr(fuse_attention, "_sfdp_init", lambda device=None: loaded.append(device))
    monkeypatch.setattr(
        joint_graph,
        "lazy_init",
        joint_graph.init_once_fakemode(joint_graph.lazy_init.__wrapped__.__wrapped__),
    )
    rewritten(lambda x: [x.exp() + 1], (4, 4))
    assert not loaded
    rewritten(lambda q: [(q @ q.mT).exp() @ q], (2, 4, 4))
    assert loaded == [torch.device("cpu")]


def drop_a_draw(graph: fx.Graph) -> None:
    (draw,) = graph.find_nodes(op="call_function", target=aten.bernoulli.p)
    draw.replace_all_uses_with(draw.args[0])
    graph.erase_node(draw)


def widen(graph: fx.Graph) -> None:
    output = graph.output_node()
    with graph.inserting_before(output):
        wide = graph.call_function(aten.to.dtype, (output.args[0][0], torch.float64))
        output.args = ([wide, *output.args[0][1:]],)


def fail(graph: fx.Graph) -> None:
    raise RuntimeError("no such pass")


def draw_beside(graph: fx.Graph) -> None:
    """As `pad_mm` does for the operands it measures with."""
    torch.rand(3)


BROKEN = {
    drop_a_draw: r"draw random numbers by \[\] instead of \['aten.bernoulli.p'\]",
    widen: r"result 0 becomes torch.float64\[4, 4\]",
    fail: "RuntimeError: no such pass",
}


def two_results(x: Tensor) -> list[Tensor]:
    return [x * 2, torch.bernoulli(x, 0.5) + 1]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_region_that_would_differ_is_compiled_as_it_was(broken, caplog):
    with config.patch(joint_custom_post_pass=broken), caplog.at_level(logging.WARNING):
        before, after = rewritten(two_results, (4, 4))
    assert after is before
    assert counted(before, aten.bernoulli.p) == 1  # it was not changed in place
    (record,) = caplog.records
    assert re.search(BROKEN[broken], record.getMessage())


def test_what_passes_draw_for_themselves_is_put_back():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with config.patch(joint_custom_post_pass=draw_beside):
        before, after = rewritten(two_results, (4, 4))
    assert after is not before
    assert torch.equal(torch.rand(2), expected)


def test_a_compilation_without_joint_passes_has_none():
    with config.patch(use_joint_graph_passes=False):
        before, after = rewritten(two_results, (4, 4))
    assert after is before
