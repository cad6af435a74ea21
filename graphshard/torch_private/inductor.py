"""Torch's private API for compiling graphs with Inductor, for torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.errors import UnsupportedTorchError
from graphshard.torch_private.compat import (
    SUPPORTED,
    fake_tensor_mode,
    private,
    same_sizes,
    size_hint,
)
from graphshard.torch_private.cpp_kernels import Kernels
from graphshard.torch_private.kernels import as_real
from graphshard.torch_private.patches import patched
from graphshard.torch_private.random_ops import is_random

_COMPILE = "torch._inductor.compile_fx"


_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


_RANDOM_ORDER = "_chain_random_ops_for_ordering"


SETTINGS = {
    # Random numbers come from torch's own generators, as in eager. Each draw is then a kernel of
    # its own: nothing is fused with it, and its mask is written to memory.
    "fallback_random": True,
    # Regions of one form share a compiled function, whose results must not be overwritten by its
    # next call.
    "triton.cudagraphs": False,
}
"""Settings of Inductor that hold while a region is compiled, and for nothing else."""


Compiled = Callable[[list[Any]], Sequence[Any]]
"""Takes the list of arguments, and empties it; gives the results in order."""


@cache
def draws_as_eager() -> bool:
    """Whether compiled code draws random numbers in the order, and in the layout, eager does.

    Torch 2.13 keeps the order; before, `fallback_random` draws each operator's numbers from torch's
    own generator, but in an order of Inductor's.
    """
    passes = importlib.import_module("torch._inductor.fx_passes.post_grad")
    return hasattr(passes, _RANDOM_ORDER)


def require_inductor() -> None:
    """Check that this torch can compile a region."""
    parameters = signature(private(_COMPILE, "compile_fx_inner")).parameters
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind in _NAMED]
    if needed != ["gm", "example_inputs"]:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} compiles graphs by other arguments than graphshard gives; "
            f'use {SUPPORTED}, or backend="eager"'
        )
    private("torch._inductor.decomposition", "select_decomp_table")
    private("torch._guards", "TracingContext")


@contextlib.contextmanager
def compiling(environment: Any, kernels: Kernels) -> Iterator[Any]:
    """The context of a compilation; gives the FakeTensorMode its example inputs are made in.

    environment: the ShapeEnv of the sizes. Inductor's cache on disk is not used without one.
    kernels: collects the kernels to make before the compiled graph may be called.
    """
    guards = importlib.import_module("torch._guards")
    config = importlib.import_module("torch._inductor.config")
    mode = fake_tensor_mode()(shape_env=environment, allow_non_fake_inputs=True)
    tags = importlib.import_module("torch.compiler.config")
    with (
        config.patch(SETTINGS),
        tags.patch(cache_key_tag=f"{tags.cache_key_tag}graphshard"),  # torch's may be wrong
        _renamed_reads(),
        kernels.put_off(),
        guards.tracing(private("torch._guards", "TracingContext")(mode)),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        _no_autocast_on_accelerator(),
    ):
        yield mode


def _renamed_reads() -> AbstractContextManager[Any]:
    """A context in which a node keeps the order of its reads behind writes in place.

    torch 2.13 forgets that a node reads the result of such a write when it fuses the node with one
    of other ranges on the CPU: zeros, into which values are scattered, are then read before that.
    """
    kind = private("torch._inductor.scheduler", "SchedulerNode")
    original = kind.recompute_size_and_body

    def recompute(node: Any, *args: Any, **kwargs: Any) -> None:
        original(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    return patched(kind, "recompute_size_and_body", recompute)


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any], mode: Any) -> Compiled:
    """Compile `graph`, whose results are a list of tensors, for calls like `inputs`.

    Its operators write nowhere, and it stays as it is. Results have the strides that its own
    operators give them. Inputs are FakeTensors of `mode`, that of `compiling`, and symbolic sizes.
    """
    make_fx = importlib.import_module("torch.fx.experimental.proxy_tensor").make_fx
    decompositions = {
        op: decomposition
        for op, decomposition in private(
            "torch._inductor.decomposition", "select_decomp_table"
        )().items()
        # Bernoulli's would draw float32 numbers for float64 probabilities.
        if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ())
    }
    python_dispatcher = private("torch._dispatch.python", "enable_python_dispatcher")

    def run(*args: Any) -> Any:
        results = _Decomposed(graph).run(*args, enable_io_processing=False)
        return [_lying_as(r, p) for r, p in zip(results, promised, strict=True)]

    with mode, python_dispatcher():
        promised = _AsEager(graph).run(*inputs, enable_io_processing=False)
        traced = make_fx(run, decomposition_table=decompositions)(*inputs)
    traced = with_joint_passes(traced, inputs, promised, mode)
    output = traced.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(promised)))
    compiled: Compiled = private(_COMPILE, "compile_fx_inner")(traced, list(inputs))
    return compiled


class _AsEager(fx.Interpreter):
    """Runs a graph with the results that eager's kernels give."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator."""
        return as_real(target, args, kwargs, super().call_function(target, args, kwargs))


class _Decomposed(fx.Interpreter):
    """Runs a graph whose operators may be decomposed, with results of other strides."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator; a view becomes a copy if the strides of its operand changed."""
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


def _lying_as(result: torch.Tensor, promised: torch.Tensor) -> torch.Tensor:
    """`result` with the strides of `promised`, copied if need be."""
    if result.dtype != promised.dtype:
        raise UnsupportedTorchError(
            f"Inductor's operators give a result dtype {result.dtype}, torch's own {promised.dtype}"
        )
    if same_sizes(result.stride(), promised.stride()):
        return result
    order, back = dims_by_stride(promised)
    copied = result.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    if not same_sizes(copied.stride(), promised.stride()):
        raise UnsupportedTorchError(
            f"Inductor's operators give a result strides {tuple(result.stride())}, torch's own "
            f"{tuple(promised.stride())}"
        )
    return copied


def counts() -> dict[str, int]:
    """Counts of hits, misses and bypasses of Inductor's cache of graphs on disk."""
    counters = private("torch._dynamo.utils", "counters")["inductor"]
    return {name: int(counters[f"fxgraph_cache_{name}"]) for name in ("hit", "miss", "bypass")}


def _no_autocast_on_accelerator() -> Any:
    if not torch.cuda.is_available():
        return contextlib.nullcontext()
    return torch.autocast("cuda", enabled=False)


logger = logging.getLogger("graphshard")

_FOLDER = "torch._inductor.fx_passes"
_PASSES = f"{_FOLDER}.joint_graph"


def with_joint_passes(
    traced: fx.GraphModule, inputs: Sequence[Any], promised: Sequence[Any], mode: Any
) -> fx.GraphModule:
    """`traced` as Inductor's joint passes rewrite it; itself where they may not.

    Passes that measure (`pad_mm`, on GPUs) allocate and run kernels now; torch's random generators
    are put back afterwards. `promised` are the results of the region's own operators for `inputs`.
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
