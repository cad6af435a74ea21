"""The part of `graphshard.torch_compat` that is about traces, for torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from graphshard.errors import UnsupportedTorchError
from graphshard.torch_private.compat import SUPPORTED, private

_CHECK = torch.ops.aten._linalg_check_errors.default


def joint_graph_exporter() -> Any:
    """`aot_export_joint_with_descriptors(stack, module, args)`: the joint graph of one step."""
    return private("torch._functorch.aot_autograd", "aot_export_joint_with_descriptors")


def is_functional(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is one of those that stand for others while writes are traced."""
    kind = private("torch._subclasses.functional_tensor", "FunctionalTensor")
    return isinstance(tensor, kind)


@contextlib.contextmanager
def lean_graphs() -> Iterator[None]:
    """Let a trace leave out what takes a tenth of its time: code of graphs that nobody calls, and
    on each node a second description of its value.
    """
    tracer = importlib.import_module("torch.fx.experimental.proxy_tensor")
    described = private(tracer.__name__, "_extract_tensor_metadata")
    with private("torch.fx._lazy_graph_module", "_use_lazy_graph_module")(True):
        tracer._extract_tensor_metadata = lambda value: None  # type: ignore[attr-defined]
        try:
            yield
        finally:
            tracer._extract_tensor_metadata = described  # type: ignore[attr-defined]


def descriptors() -> Any:
    """The module of classes that say what each end of a joint graph is."""
    private("torch._functorch._aot_autograd.descriptors", "GradAOTOutput")
    return importlib.import_module("torch._functorch._aot_autograd.descriptors")


@contextlib.contextmanager
def tracing_rules(rules: Mapping[Any, Callable[..., Any] | None]) -> Iterator[None]:
    """Trace through each of these operators by this function; None: by its own kernels alone."""
    for name in ("py_kernels", "_dispatch_cache"):
        if not all(isinstance(getattr(op, name, None), dict) for op in rules):
            raise UnsupportedTorchError(
                f"torch {torch.__version__} has operators without {name}; use {SUPPORTED}"
            )
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    before = {op: dict(op.py_kernels) for op in rules}

    def set_kernels(op: Any, kernels: dict[Any, Any]) -> None:
        op.py_kernels.clear()
        op.py_kernels.update(kernels)
        op._dispatch_cache.clear()

    try:
        for op, rule in rules.items():
            others = {key: kernel for key, kernel in before[op].items() if key not in keys}
            set_kernels(op, others if rule is None else others | dict.fromkeys(keys, rule))
        yield
    finally:
        for op, kernels in before.items():
            set_kernels(op, kernels)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Answer `torch.compiler.is_compiling()` with True."""
    before = private("torch.compiler", "_is_compiling_flag")
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def untraceable_errors() -> tuple[type[Exception], ...]:
    """(value depends on data, shape depends on data, operator without a fake kernel)."""
    module = "torch._subclasses.fake_tensor"
    return (
        private(module, "DataDependentOutputException"),
        private(module, "DynamicOutputShapeException"),
        private(module, "UnsupportedOperatorException"),
    )


def annotate() -> Any:
    """`annotate(dict)`: a context in which traced nodes, and their backward, carry the dict."""
    return private("torch.fx.traceback", "annotate")


def preserve_node_meta() -> Any:
    """The context without which annotations are dropped."""
    return private("torch.fx.traceback", "preserve_node_meta")


def without_dispatch_modes() -> Any:
    """The context in which no dispatch mode sees what tensors do."""
    return torch._C._DisableTorchDispatch()


def traced_graph() -> Any:
    """The fx graph being traced at the moment, or None."""
    mode = private("torch.fx.experimental.proxy_tensor", "get_proxy_mode")()
    return None if mode is None else mode.tracer.graph


@contextlib.contextmanager
def checks_as_operators() -> Iterator[None]:
    """Trace what raises on a bad matrix as any other operator, and keep it though nobody reads it.

    Torch 2.13 threads tokens through it, for which its own fake tensors have no rule; before, it
    was dropped from a trace.
    """
    registry = private("torch._library.simple_registry", "singleton")
    unread = private("torch.fx.node", "_side_effectful_functions")
    holder = registry.find(_CHECK.name().partition(".")[0]).effect
    effect, was_kept = holder.effect, _CHECK in unread
    holder.register(None)
    unread.add(_CHECK)
    try:
        yield
    finally:
        holder.register(effect)
        if not was_kept:
            unread.discard(_CHECK)
