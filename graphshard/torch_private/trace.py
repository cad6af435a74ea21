"""Torch's private API for tracing, for torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch

from graphshard.torch_private.compat import private, private_of
from graphshard.torch_private.patches import patched

_CHECK = torch.ops.aten._linalg_check_errors.default


def joint_graph_exporter() -> Any:
    """`aot_export_joint_with_descriptors(stack, module, args)`: the joint graph of one step."""
    return private("torch._functorch.aot_autograd", "aot_export_joint_with_descriptors")


def is_functional(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a FunctionalTensor."""
    kind = private("torch._subclasses.functional_tensor", "FunctionalTensor")
    return isinstance(tensor, kind)


def without_functional(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that `tensor` holds, if it is a FunctionalTensor, or else itself."""
    return torch._from_functional_tensor(tensor.elem) if is_functional(tensor) else tensor  # type: ignore[attr-defined]


def is_real(tensor: Any) -> bool:
    """Whether `tensor` has values: neither fake, nor traced, nor on meta."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    return type(tensor) in kinds and tensor.device.type != "meta"


@contextlib.contextmanager
def leave_out_descriptions() -> Iterator[None]:
    """Skip code of graphs that nobody calls, and a second description of each node's value.

    Both together take a tenth of the time of a trace.
    """
    lazily = private("torch.fx._lazy_graph_module", "_use_lazy_graph_module")(True)
    tracer = "torch.fx.experimental.proxy_tensor"
    with lazily, patched(tracer, "_extract_tensor_metadata", lambda value: None):
        yield


@cache
def load_dynamo() -> None:
    """Import what a trace imports of torch, from a thread of its own.

    Modules there call `torch.fx.wrap`, which leaves its caller's frame in a circle of references.
    The frame holds all those around it, and with them the module that is captured at the moment,
    until Python's garbage collector runs. In a thread of its own there are no others.
    """
    thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
    thread.start()
    thread.join()


@contextlib.contextmanager
def compiled_functions_as_they_are() -> Iterator[None]:
    """Run what torch.compile has wrapped as plain Python, which a trace records."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    config = private("torch._dynamo", "config")
    with torch.compiler.set_stance("force_eager"), config.patch(error_on_nested_fx_trace=False):
        yield


def inside_compiled_function() -> bool:
    """Whether the code that runs now was called from a function under torch.compile."""
    if "torch._dynamo" not in sys.modules:
        return False
    callback = private("torch._C._dynamo.eval_frame", "get_eval_frame_callback")()
    return callback is not None and callback is not False


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
                stack.enter_context(patched(op, name, table, where=f"torch.ops.{op}.{name}"))
        yield


def by_own_kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `op`, which torch takes apart into others, as if no rule of `tracing_rules` were set."""
    run = private_of(op, "_op_dk")
    return run(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@contextlib.contextmanager
def claim_compiling() -> Iterator[None]:
    """Answer `torch.compiler.is_compiling()` with True."""
    with patched("torch.compiler", "_is_compiling_flag", True):
        yield


def untraceable_errors() -> tuple[Any, Any, Any]:
    """(value depends on data, shape depends on data, operator without a fake kernel).

    Each is an exception, or a tuple of them. Where sizes are symbolic a value is asked for without
    an error, and only a decision by it is refused.
    """
    module = "torch._subclasses.fake_tensor"
    decided = private("torch.fx.experimental.symbolic_shapes", "GuardOnDataDependentSymNode")
    return (
        (private(module, "DataDependentOutputException"), decided),
        private(module, "DynamicOutputShapeException"),
        private(module, "UnsupportedOperatorException"),
    )


_LOUD = (
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.recording",
    "torch.fx.experimental.symbolic_shapes",
)
"""The loggers on which a trace that fails writes pages before the error reaches its caller."""


@contextlib.contextmanager
def quiet_errors() -> Iterator[None]:
    """Keep what torch logs of an error to itself, since the error says it, too.

    It is shown where somebody asked for it: by torch's own TORCH_LOGS in the environment, or by the
    level DEBUG of the logger "graphshard".
    """
    if os.environ.get("TORCH_LOGS") or logging.getLogger("graphshard").isEnabledFor(logging.DEBUG):
        yield
        return
    loggers = [logging.getLogger(name) for name in _LOUD]

    def below_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    for logger in loggers:
        logger.addFilter(below_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(below_error)


def annotate() -> Any:
    """`annotate(dict)`: a context in which traced nodes, and their backward, carry the dict."""
    return private("torch.fx.traceback", "annotate")


@contextlib.contextmanager
def note_nodes(note: Callable[[Any], None]) -> Iterator[None]:
    """Call `note` with each node that a trace makes, in the Python frames that make it."""
    tracer = private("torch.fx.proxy", "TracerBase")
    create = tracer.create_node

    def create_node(self: Any, *args: Any, **kwargs: Any) -> Any:
        node = create(self, *args, **kwargs)
        note(node)
        return node

    with patched(tracer, "create_node", create_node, where="torch.fx.proxy.TracerBase.create_node"):
        yield


def preserve_node_meta() -> Any:
    """The context without which annotations are dropped."""
    return private("torch.fx.traceback", "preserve_node_meta")


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """The context in which no dispatch or function mode sees what is done with tensors."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def modes() -> tuple[Any, ...]:
    """The dispatch and function modes that see what is done with tensors, the outermost first."""
    dispatch = private("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack")
    functions = private("torch.overrides", "_get_current_function_mode_stack")
    return (*dispatch(), *functions())


def annotated() -> Mapping[str, Any]:
    """What `annotate` has noted around the code that runs now."""
    noted: Mapping[str, Any] = (
        private("torch.fx.traceback", "get_current_meta")().get("custom") or {}
    )
    return noted


def write_count(tensor: torch.Tensor) -> tuple[int, ...]:
    """Numbers that change with each write into `tensor`, also past autograd if it is functional."""
    if not is_functional(tensor):
        return (tensor._version,)
    counters = ("_functionalize_mutation_counter", "_functionalize_storage_changed_counter")
    return (tensor._version, *(private("torch", name)(tensor.elem) for name in counters))  # type: ignore[attr-defined]


def storage_key(tensor: torch.Tensor) -> int:
    """The same for two tensors of a trace that share memory."""
    return (tensor.elem if is_functional(tensor) else tensor).untyped_storage()._cdata  # type: ignore[attr-defined]


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether code is to run when the gradient of `tensor` is there."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def has_global_hooks() -> bool:
    """Whether code runs around the calls of all modules."""
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    return any(private("torch.nn.modules.module", name) for name in names)


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


def array_of(tensor: torch.Tensor) -> Any:
    """An array whose methods and operators are those of numpy, computed by torch on `tensor`."""
    return _array_type()(tensor)


def without_array(value: Any) -> Any:
    """The tensor of `array_of`; any other value as it is."""
    return value.tensor if isinstance(value, _array_type()) else value


def _array_type() -> Any:
    return private("torch._numpy", "ndarray")
