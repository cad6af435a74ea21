"""Inductor's passes over the joint graph, run on a region, for torch 2.11 to 2.15.

AOTAutograd runs them before it cuts forward from backward: they fold constants, drop views and
casts that do nothing, and pad matrix products on GPUs. Regions enter Inductor behind that point.
A rewritten region is taken only if it draws the same random numbers in the same order, and its
results have the shapes, dtypes and devices of the operators'; otherwise it is compiled as it was.
A result that has other strides than theirs, or shares memory that theirs does not share, is copied.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.torch_private.compat import private, same_sizes, size_hint
from graphshard.torch_private.patches import patched
from graphshard.torch_private.random_ops import is_random

logger = logging.getLogger("graphshard")

_FOLDER = "torch._inductor.fx_passes"
_PASSES = f"{_FOLDER}.joint_graph"


def with_joint_passes(
    traced: fx.GraphModule, inputs: Sequence[Any], promised: Sequence[Any], mode: Any
) -> fx.GraphModule:
    """`traced` as Inductor's joint passes rewrite it; itself where they may not.

    Passes that measure (`pad_mm`, on GPUs) allocate and run kernels now; torch's random generators
    are put back afterwards.

    Args:
        traced: a region's graph, whose results are a list of tensors; it stays as it is.
        inputs: FakeTensors of `mode`, and symbolic sizes.
        promised: the results of the region's own operators for `inputs`.
        mode: the FakeTensorMode.
    """
    config = importlib.import_module("torch._inductor.config")
    if not config.use_joint_graph_passes:
        return traced
    copied = fx.GraphModule(traced, copy.deepcopy(traced.graph))
    tensors = [value for value in (*inputs, *promised) if isinstance(value, Tensor)]
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    try:
        with _as_in_a_compilation(devices, mode), _few_patterns(copied.graph):
            run = private(_PASSES, "joint_graph_passes")
            rewritten: fx.GraphModule = run(copied, devices[0])
        reason = _keep_promises(traced, rewritten, inputs, promised, mode)
    except Exception as error:  # whatever a pass of Inductor's, or of the user's own, raises
        reason = f"{type(error).__name__}: {error}"
    if reason:
        logger.warning("graphshard compiles a region without Inductor's joint passes: %s", reason)
        return traced
    return rewritten


@contextlib.contextmanager
def _few_patterns(graph: fx.Graph) -> Iterator[None]:
    """Keep the patterns of attention, which take longest to load, from graphs without it.

    A later call loads them, also one by torch.compile.
    """
    targets = {node.target for node in graph.nodes}
    if {torch.ops.aten.bmm.default, torch.ops.aten.exp.default} <= targets:
        yield
        return
    once = private("torch._inductor.pattern_matcher", "init_once_fakemode")
    inits = [private(f"{_FOLDER}.{name}", f"_{name}_init") for name in ("pad_mm", "misc_patterns")]

    def lazy_init(input_device: Any = None) -> None:
        for init in inits:
            init(input_device)

    with patched(importlib.import_module(_PASSES), "lazy_init", once(lazy_init)):
        yield


@contextlib.contextmanager
def _as_in_a_compilation(devices: Sequence[torch.device], mode: Any) -> Iterator[None]:
    """What the passes find around them under torch.compile."""
    cuda = [device for device in devices if device.type == "cuda"]
    fake_mode_set = private("torch._inductor.virtualized", "V").set_fake_mode
    with (
        torch.random.fork_rng(cuda),
        torch.cuda.device(cuda[0]) if cuda else contextlib.nullcontext(),
        fake_mode_set(mode),
    ):
        yield


def _keep_promises(
    before: fx.GraphModule,
    after: fx.GraphModule,
    inputs: Sequence[Any],
    promised: Sequence[Any],
    mode: Any,
) -> str:
    """Copy results of `after` that lie otherwise; why it cannot stand for `before`, "" if it can.

    The product of padded matrices, for one, is a slice of a wider matrix.
    """
    drawn, expected = _draws(after.graph), _draws(before.graph)
    if drawn != expected:
        return f"they draw random numbers by {drawn} instead of {expected}"
    with mode:
        results = fx.Interpreter(after).run(*inputs)
    for index, (result, own) in enumerate(zip(results, promised, strict=True)):
        same = same_sizes(result.shape, own.shape)
        if not same or (result.dtype, result.device) != (own.dtype, own.device):
            return f"result {index} becomes {result.dtype}{list(result.shape)} on {result.device}"
    origins = zip(_origins(inputs, promised), _origins(inputs, results), strict=True)
    copied = [
        index
        for index, (origin, actual) in enumerate(origins)
        if actual not in (index - len(results), origin)
        or not same_sizes(results[index].stride(), promised[index].stride())
    ]
    return _copy_results(after, copied, results, promised, mode) if copied else ""


def _copy_results(
    graph: fx.GraphModule,
    which: Sequence[int],
    results: Sequence[Tensor],
    promised: Sequence[Tensor],
    mode: Any,
) -> str:
    """Make the results `which` of `graph` copies that lie as `promised`; why not, if they cannot.

    A copy cannot lie as a tensor whose elements share memory with each other.
    """
    output = graph.graph.output_node()
    given: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    aten = torch.ops.aten
    for index in which:
        node, val = given[index], results[index]
        order, back = dims_by_stride(promised[index])
        steps: list[tuple[Any, list[Any], dict[str, Any]]] = [
            (aten.permute.default, [order], {}),
            (aten.clone.default, [], {"memory_format": torch.contiguous_format}),
            (aten.permute.default, [back], {}),
        ]
        for operator, arguments, options in steps:
            with mode:
                val = operator(val, *arguments, **options)
            with graph.graph.inserting_before(output):
                node = graph.graph.call_function(operator, (node, *arguments), options)
            node.meta["val"] = val
        if not same_sizes(val.stride(), promised[index].stride()):
            return f"result {index} gets strides {tuple(results[index].stride())}"
        given[index] = node
    output.args = (given,)
    graph.recompile()
    return ""


def dims_by_stride(tensor: Tensor) -> tuple[list[int], list[int]]:
    """The dims of `tensor`, that of the longest stride first, and the permutation back."""
    order = sorted(range(tensor.dim()), key=lambda dim: -size_hint(tensor.stride(dim)))
    return order, [order.index(dim) for dim in range(tensor.dim())]


def _draws(graph: fx.Graph) -> list[str]:
    """The operators that draw random numbers, in order."""
    return [str(node.target) for node in graph.nodes if is_random(node)]


def _origins(inputs: Sequence[Any], results: Sequence[Tensor]) -> list[int]:
    """By result, who has its storage first: the number of an input, or of a result less theirs."""
    owners: dict[int, int] = {}
    for index, value in enumerate(inputs):
        if isinstance(value, Tensor):
            owners.setdefault(value.untyped_storage()._cdata, index)
    return [
        owners.setdefault(result.untyped_storage()._cdata, index - len(results))
        for index, result in enumerate(results)
    ]
