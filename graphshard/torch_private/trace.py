"""Torch's private API for tracing, for torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from graphshard.torch_private.compat import private
from graphshard.torch_private.patches import patched

_CHECK = torch.ops.aten._linalg_check_errors.default


def joint_graph_exporter() -> Any:
    """`aot_export_joint_with_descriptors(stack, module, args)`: the joint graph of one step."""
    return private("torch._functorch.aot_autograd", "aot_export_joint_with_descriptors")


def is_functional(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a FunctionalTensor."""
    kind = private("torch._subclasses.functional_tensor", "FunctionalTensor")
    return isinstance(tensor, kind)


@contextlib.contextmanager
def leave_out_descriptions() -> Iterator[None]:
    """Skip code of graphs that nobody calls, and a second description of each node's value.

    Both together take a tenth of the time of a trace.
    """
    lazily = private("torch.fx._lazy_graph_module", "_use_lazy_graph_module")(True)
    tracer = "torch.fx.experimental.proxy_tensor"
    with lazily, patched(tracer, "_extract_tensor_metadata", lambda value: None):
        yield


def descriptors() -> Any:
    """The module of classes that describe the inputs and outputs of a joint graph."""
    private("torch._functorch._aot_autograd.descriptors", "GradAOTOutput")
    return importlib.import_module("torch._functorch._aot_autograd.descriptors")


@contextlib.contextmanager
def tracing_rules(rules: Mapping[Any, Callable[..., Any] | None]) -> Iterator[None]:
    """Trace each of these operators by the given function; None: by its own kernels alone."""
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    with contextlib.ExitStack() as stack:
        for op, rule in rules.items():
            kernels: dict[Any, Any] = getattr(op, "py_kernels", {})
            others = {key: kernel for key, kernel in kernels.items() if key not in keys}
            new = others if rule is None else others | dict.fromkeys(keys, rule)
            for name, table in (("py_kernels", new), ("_dispatch_cache", {})):
                stack.enter_context(
                    patched(op, name, table, expects=_is_dict, where=f"torch.ops.{op}.{name}")
                )
        yield


@contextlib.contextmanager
def claim_compiling() -> Iterator[None]:
    """Answer `torch.compiler.is_compiling()` with True."""
    with patched("torch.compiler", "_is_compiling_flag", True):
        yield


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
    """The context in which no dispatch mode sees the operators on tensors."""
    return torch._C._DisableTorchDispatch()


def traced_graph() -> Any:
    """The fx graph being traced at the moment, or None."""
    mode = private("torch.fx.experimental.proxy_tensor", "get_proxy_mode")()
    return None if mode is None else mode.tracer.graph


@contextlib.contextmanager
def keep_matrix_checks() -> Iterator[None]:
    """Trace `_linalg_check_errors`, which raises on a bad matrix, and keep it though it is unused.

    Torch 2.13 threads effect tokens through it, for which its fake tensors have no rule; earlier
    versions drop it from a trace.
    """
    registry = private("torch._library.simple_registry", "singleton")
    unread = private("torch.fx.node", "_side_effectful_functions")
    holder = registry.find(_CHECK.name().partition(".")[0]).effect
    with (
        patched(holder, "_effect", None),
        patched(unread, _CHECK, _CHECK, where="torch.fx.node._side_effectful_functions"),
    ):
        yield


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)
