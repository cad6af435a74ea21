"""Methods that all ranks of a sharded module call together, with arguments that must agree."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from graphshard.runtime.calls import call_text

P = ParamSpec("P")
R = TypeVar("R")


def on_all_ranks(
    *same: str, **converted: Callable[[Any], Any]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let the ranks name a method and its arguments when they meet inside of it.

    Ranks that are in different methods then, or gave other arguments, get a `FingerprintError`
    that names both calls; an error between the meetings is told to the other ranks. A generator
    (under `contextmanager`) is one call from its first line to its last.

    Args:
        *same: names of the arguments that ranks must give alike.
        **converted: further ones, each with a function; the method gets what it returns.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(method)
        shown = [name for name in signature.parameters if name in {*same, *converted}]
        function: Callable[..., Any] = method

        def bound(args: Any, kwargs: Any) -> tuple[Any, inspect.BoundArguments]:
            try:
                call = signature.bind(*args, **kwargs)
            except TypeError:
                function(*args, **kwargs)  # Python's own words name the method
                raise
            call.apply_defaults()
            for name, convert in converted.items():
                call.arguments[name] = convert(call.arguments[name])
            text = call_text(method, **{name: call.arguments[name] for name in shown})
            return call.args[0]._graphshard.bindings.agreement.call(text), call

        if inspect.isgeneratorfunction(method):

            @wraps(method)
            def generator(*args: P.args, **kwargs: P.kwargs) -> Any:
                in_agreement, call = bound(args, kwargs)
                with in_agreement:
                    return (yield from function(*call.args, **call.kwargs))

            return generator

        @wraps(method)
        def together(*args: P.args, **kwargs: P.kwargs) -> Any:
            in_agreement, call = bound(args, kwargs)
            with in_agreement:
                return function(*call.args, **call.kwargs)

        return together

    return decorate
