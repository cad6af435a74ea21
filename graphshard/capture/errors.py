"""A `CaptureError` that names the user's source line, for what a trace cannot record.

It comes of the errors of a trace, and of calls that a trace would record as something else, or not
at all.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import sympy
import torch
from torch import nn

from graphshard.errors import CaptureError, GraphshardError, ModelChangeError, user_line
from graphshard.format import meant
from graphshard.program.sizes import expression_text
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private import unbacked
from graphshard.torch_private.patches import patched

_ASK = torch.ops.aten._local_scalar_dense.default  # gives the value of a tensor as a number


@contextlib.contextmanager
def explain_errors(model: nn.Module, environment: Any = None) -> Iterator[None]:
    """Re-raise any error as a `CaptureError` that names a line of the user's and a remedy.

    `environment` is the ShapeEnv of symbolic sizes, if there are any.
    """
    try:
        yield
    except GraphshardError as error:
        line = user_line(error.__traceback__)
        if isinstance(error, CaptureError) and line and line not in str(error):
            kind = ModelChangeError if isinstance(error, ModelChangeError) else CaptureError
            raise kind(f"{error}\n  at {line}") from error
        raise
    except Exception as error:
        found = user_line(error.__traceback__)
        line = found or f"the forward of {type(model).__name__}"
        raise CaptureError(f"{_reason(error, environment, line)}\n  at {line}") from error


def require_arguments(method: Callable[..., Any], name: str, args: Any, kwargs: Any) -> None:
    """Refuse a call of `method`, which errors call `name`, that lacks an argument or has another.

    Raises:
        CaptureError: names the argument, and the one that is meant.
    """
    signature = inspect.signature(method)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        keyword = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        like = meant(keyword[1], signature.parameters) if keyword else ""
        takes = f"; it takes {', '.join(signature.parameters)}"
        reason = f"{name}() {error.args[0]}{like or takes}"
    else:
        return
    raise CaptureError(reason)


def _reason(error: Exception, environment: Any, line: str) -> str:
    by_value, by_shape, unsupported = torch_trace.untraceable_errors()
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    undecided = isinstance(error, unbacked.undecided_error())
    if undecided and environment is not None:
        return _undecided_reason(error, environment, line)
    if isinstance(error, by_value):
        return (
            "the model's control flow depends on the values of a tensor "
            f"({_op(error, _ASK)}), which one graph cannot follow; use torch.where or a mask, make "
            "the value a Python argument of forward, or compute it outside the compiled module"
        )
    if isinstance(error, by_shape):
        return (
            f"an operator's output shape depends on tensor values ({_op(error)}), which one graph "
            "cannot hold; use a form with a fixed shape (torch.where with three arguments, a mask, "
            "topk), or compute it outside the compiled module, as a loss can be"
        )
    if isinstance(error, unsupported):
        return (
            f"the operator {_op(error)} has no fake kernel, so its output shape is unknown without "
            "running it; register one with torch.library.register_fake"
        )
    if reason := _by_origin(error, text):
        return reason
    if "fake" in first.lower() and ("register" in first.lower() or "kernel" in first.lower()):
        return f"an operator has no fake kernel ({first}); use torch.library.register_fake"
    if "entirely functional graph" in first:
        return (
            "the forward changes in place a tensor that is neither an input nor a buffer (a plain "
            "attribute or a closure's), so the change would be lost; register it with "
            "register_buffer"
        )
    return f"the model's forward raised {type(error).__name__} while being captured: {first}"


def _by_origin(error: Exception, text: str) -> str | None:
    """The reason told by the part of torch that the error is from."""
    frames = _frames_in(error, "torch/distributed/distributed_c10d")
    if frames and "group has not been initialized" not in text:
        return refusal_of_collective(f"torch.distributed.{frames[0].name}")
    if _frames_in(error, "torch/_higher_order_ops") and "auto_functionalized" not in text:
        return (
            "the model calls an operator that takes functions (torch.cond, while_loop, scan and "
            "the like), which a program does not hold; use plain operators, such as torch.where"
        )
    if "meta" in text and "devices" in text and _frames_in(error, "torch/autograd/function"):
        return (
            "a backward of the model's own uses a parameter or buffer after the forward has ended, "
            "when a trace has taken it back; pass the tensor to the autograd.Function as an "
            "argument, or save it with ctx.save_for_backward"
        )
    return next((reason for sign, reason in _BY_TEXT.items() if sign in text), None)


def _frames_in(error: Exception, part: str) -> list[traceback.FrameSummary]:
    """The functions, the outermost first, that the error passed through in files of this path."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = (frame for frame in frames if part in frame.filename.replace(os.sep, "/"))
    return [frame for frame in inside if frame.name != "wrapper"]


_BY_TEXT = {
    "HigherOrderOperator auto_functionalized": (
        "the model calls a custom operator that writes into its arguments (mutates_args), which a "
        "program does not hold; let it return new tensors"
    ),
    "Attempting to use FunctionalTensor on its own": (
        "the forward makes an instance of a class of tensors, and a program holds plain tensors; "
        "leave the class out"
    ),
    "SyncBatchNorm expected input tensor": (
        "SyncBatchNorm issues collectives of its own, which a program does not hold; use "
        "BatchNorm, with the statistics of each rank, or a norm without any (GroupNorm)"
    ),
}
"""Reasons by a part of torch's message."""


def _op(error: Exception, default: object = None) -> str:
    """The operator that `error` names, or else `default`, or else all it says."""
    return str(getattr(error, "func", default or error))


def _undecided_reason(error: Any, environment: Any, line: str) -> str:
    """The reason of a CaptureError at `line`, for one of `unbacked.undecided_error()`."""
    condition = error.cond
    lines = {s: unbacked.origin_of(environment, s) for s in condition.free_symbols}
    origins = "".join(
        f"\n  {symbol} is read at {origin}"
        for symbol, origin in sorted(lines.items(), key=str)
        if origin is not None and origin != line
    )
    rule = "the model's control flow depends on the values of a tensor"
    loops = " for " in line or ".tolist()" in line
    needed = "the number of rounds of a loop" if loops else f"the number {condition}"
    if any(map(unbacked.is_float, condition.free_symbols)):
        needed += " (take `tensor.item()` instead of `float(tensor)`)"
    return (
        f"{rule}: it needs {needed}, which one graph cannot have (range, int, indices of lists "
        "and loops over .tolist() ask for it); go over all items that there may be, do it by "
        "tensor operators (a mask, index_add, torch.arange), or make the number a Python "
        f"argument of forward{origins}"
    )


IS_TRUE = "the tensor is true"
IS_FALSE = "the tensor is false"


def question_text(condition: Any, environment: Any) -> str:
    """A condition on numbers read off tensors, as text."""
    (symbol, *others) = condition.free_symbols
    truth_value = isinstance(condition, sympy.Eq) and not others
    if truth_value and unbacked.upper_bound(environment, symbol) == 1:
        return IS_TRUE
    return expression_text(condition, {})


# -- calls that a trace would record as something else --------------------------------------------


_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


def refusal_of_collective(call: str) -> str:
    """Why the collective `call` of a model is refused.

    Ranks agree on the order of collectives before a program runs, and a model's are not in it.
    """
    return (
        f"the model issues a collective of its own ({call}), which neither the plan nor the "
        "agreement of the ranks on their order knows; do it outside of the compiled module, on "
        "what goes in or comes out (gradients are averaged anyway)"
    )


def refuse_operator(func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse a collective, and numbers drawn from a generator."""
    if func.namespace in _COLLECTIVES:
        raise CaptureError(refusal_of_collective(str(func)))
    if kwargs.get("generator") is not None or any(isinstance(arg, torch.Generator) for arg in args):
        raise CaptureError(
            f"the model draws random numbers from a torch.Generator ({func}), whose state a graph "
            "does not hold; leave the generator out and seed with torch.manual_seed, or draw the "
            "numbers outside and pass them as a tensor"
        )


@contextlib.contextmanager
def refuse_seeding() -> Iterator[None]:
    """Refuse calls that set the state of torch's default generator, which lies outside a graph.

    Seeds set while tracing would not be set again.
    """
    with patched("torch.random", "default_generator", _Unseedable()):
        yield


class _Unseedable:
    """Stands for torch's default generator, whose state it only reads."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)

    def _refuse(self, *_: Any) -> NoReturn:
        raise CaptureError(
            "the model sets the state of torch's random numbers (manual_seed, set_rng_state or "
            "fork_rng), which a graph does not hold; seed before the call, or pass random numbers "
            "as a tensor"
        )

    manual_seed = seed = set_state = _refuse
