"""Turning the errors of a trace into a `CaptureError` that names the user's source line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from graphshard.errors import CaptureError, GraphshardError, user_line
from graphshard.torch_private import trace as torch_trace


@contextlib.contextmanager
def explain_errors(model: nn.Module) -> Iterator[None]:
    """Re-raise any error as a `CaptureError` that names a line of the user's and a remedy.

    Raises:
        CaptureError: for any exception inside but other errors of graphshard, which pass through.
    """
    try:
        yield
    except GraphshardError as error:
        line = user_line(error.__traceback__)
        if isinstance(error, CaptureError) and line and line not in str(error):
            raise CaptureError(f"{error}\n  at {line}") from error
        raise
    except Exception as error:
        line = user_line(error.__traceback__) or f"the forward of {type(model).__name__}"
        raise CaptureError(f"{_reason(error)}\n  at {line}") from error


def _reason(error: Exception) -> str:
    by_value, by_shape, unsupported = torch_trace.untraceable_errors()
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    if isinstance(error, by_value):
        return (
            "the model's control flow depends on the values of a tensor "
            f"({_op(error)}), which one graph cannot follow; use torch.where or a mask, make the "
            "value a Python argument of forward, or compute it outside the compiled module"
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
    if "fake" in first.lower() and ("register" in first.lower() or "kernel" in first.lower()):
        return f"an operator has no fake kernel ({first}); use torch.library.register_fake"
    if "entirely functional graph" in first:
        return (
            "the forward changes in place a tensor that is neither an input nor a buffer (a plain "
            "attribute or a closure's), so the change would be lost; register it with "
            "register_buffer"
        )
    return f"the model's forward raised {type(error).__name__} while being captured: {first}"


def _op(error: Exception) -> str:
    return str(getattr(error, "func", error))
