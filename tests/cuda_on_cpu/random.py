"""Random draws on CUDA tensors: from the CUDA generator's seed and offset, which each draw moves.

So a draw is the same again after the generator's state has been put back, as on a GPU. The values
are the CPU generator's, seeded by both; each call, whatever its size, moves the offset by 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from cuda_on_cpu import queue

Drawn = Callable[..., Any]
_lock = Lock()


def draws(op: Any) -> Callable[[Any, torch.device, Sequence[Any], dict[str, Any]], Drawn] | None:
    """What makes a call of `op` on the CPU draw as its CUDA generator says; None: it draws nothing.

    Its state is read and moved by the host, when it makes the call.
    """
    if op._schema.name == "aten::native_dropout":
        return lambda op, device, args, kwargs: partial(_dropout, _next(None, device))
    places = [n for n, argument in enumerate(op._schema.arguments) if argument.name == "generator"]
    if places:
        return partial(_by_generator, places[0])
    if torch.Tag.nondeterministic_seeded in op.tags:
        return lambda op, device, args, kwargs: partial(_by_default, op, _next(None, device))
    return None


def _next(generator: Any, device: torch.device) -> torch.Generator:
    """A CPU generator for the next draw of a CUDA one, by default the device's."""
    if queue.is_capturing(queue.current_stream(device)):
        raise NotImplementedError(
            "random draws in a CUDA graph are not built in the CUDA runtime made of CPU threads"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index] if generator is None else generator
    with _lock:
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
    mixed = (generator.initial_seed() * 6364136223846793005 + offset * 1442695040888963407) % 2**63
    return torch.Generator().manual_seed(mixed)


def _by_generator(
    place: int, op: Any, device: torch.device, args: Sequence[Any], kwargs: dict[str, Any]
) -> Drawn:
    given = args[place] if len(args) > place else kwargs.get("generator")
    generator = _next(given, device)

    def drawn(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place:
            args = (*args[:place], generator, *args[place + 1 :])
            return op(*args, **kwargs)
        return op(*args, **{**kwargs, "generator": generator})

    return drawn


def _by_default(op: Any, generator: torch.Generator, *args: Any, **kwargs: Any) -> Any:
    """An operator that takes no generator draws from the CPU's own, which is put back."""
    with _lock:
        state = torch.default_generator.get_state()
        torch.default_generator.set_state(generator.get_state())
        try:
            return op(*args, **kwargs)
        finally:
            torch.default_generator.set_state(state)


def _dropout(
    generator: torch.Generator, value: Tensor, p: float, train: bool | None = True
) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return value.clone(), torch.ones_like(value, dtype=torch.bool)
    mask = torch.empty_like(value, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return value * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
