"""Calls that a trace would record as something else, or not at all: they end it with their line.

Collectives of the model's own are not in the order that all ranks agree on before a program runs.
The state of a generator lies outside a graph: seeds set while tracing would not be set again, and
numbers from another generator would come from the default one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

from graphshard.errors import CaptureError
from graphshard.torch_private.patches import patched

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


def refusal_of_collective(call: str) -> str:
    """Why the collective `call` of a model is refused."""
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
    """Refuse calls that set the state of torch's default generator."""
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
