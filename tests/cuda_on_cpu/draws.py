"""Random draws on CUDA tensors: from the CUDA generator's seed and offset, which each draw moves.

So a draw is the same again after the generator's state has been put back, and a graph's draws move
on with each replay, as on a GPU. The values are the CPU generator's, seeded by both numbers; each
call, whatever its size, moves the offset by 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch
from cuda_on_cpu import attention, stream_queue
from torch import Tensor

Drawn = Callable[..., Any]
_lock = Lock()
_uniform = torch.library.get_kernel("aten::uniform_", "CUDA")
"""torch's own kernel, which asks the generator for seed and offset."""


def draws_of(op: Any) -> Callable[[Any, torch.device, Sequence[Any], dict[str, Any]], Drawn] | None:
    """What makes a call of `op` on the CPU draw as its CUDA generator says; None: it draws nothing.

    The generator is moved when the call is made; what it says is read when the call runs.
    """
    if op._schema.name == "aten::native_dropout":
        return lambda op, device, args, kwargs: partial(_dropout, _next(None, device))
    if op._schema.name in attention.FORWARD:
        return _attention
    if op._schema.name in attention.BACKWARD:
        return None  # it draws again by the seed that forward kept
    places = [n for n, argument in enumerate(op._schema.arguments) if argument.name == "generator"]
    if places:
        return partial(_by_generator, places[0])
    if torch.Tag.nondeterministic_seeded in op.tags:
        return lambda op, device, args, kwargs: partial(_by_default, op, _next(None, device))
    return None


def _attention(op: Any, device: torch.device, args: Sequence[Any], kwargs: dict[str, Any]) -> Drawn:
    place = next(n for n, each in enumerate(op._schema.arguments) if each.name == "dropout_p")
    p = args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)
    return partial(attention.FORWARD[op._schema.name], _next(None, device) if p > 0 else None)


def _next(generator: Any, device: torch.device) -> Callable[[], torch.Generator]:
    """Makes the CPU generator for the next draw of a CUDA one, by default the device's."""
    one = torch.empty(1, device=device)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    state = stream_queue.philox_of(
        lambda: _uniform.call_boxed(keys, one, 0.0, 1.0, generator=generator)
    )

    def seeded() -> torch.Generator:
        seed, offset = state.read()
        mixed = (seed * 6364136223846793005 + offset * 1442695040888963407) % 2**63
        return torch.Generator("cpu").manual_seed(mixed)

    return seeded


def _by_generator(
    place: int, op: Any, device: torch.device, args: Sequence[Any], kwargs: dict[str, Any]
) -> Drawn:
    given = args[place] if len(args) > place else kwargs.get("generator")
    seeded = _next(given, device)

    def drawn(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place:
            return op(*args[:place], seeded(), *args[place + 1 :], **kwargs)
        return op(*args, **{**kwargs, "generator": seeded()})

    return drawn


def _by_default(op: Any, seeded: Callable[[], torch.Generator], *args: Any, **kwargs: Any) -> Any:
    """An operator that takes no generator draws from the CPU's own, which is put back."""
    with _lock:
        state = torch.default_generator.get_state()
        torch.default_generator.set_state(seeded().get_state())
        try:
            return op(*args, **kwargs)
        finally:
            torch.default_generator.set_state(state)


def _dropout(
    seeded: Callable[[], torch.Generator], value: Tensor, p: float, train: bool | None = True
) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return value.clone(), torch.ones_like(value, dtype=torch.bool)
    mask = torch.empty_like(value, dtype=torch.bool).bernoulli_(1 - p, generator=seeded())
    return value * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
