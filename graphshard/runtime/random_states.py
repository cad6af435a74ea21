"""The states of torch's generators, as a rank saves them in forward and sets them in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.program import ops


def bind_random_state(copied: fx.Node, device: torch.device) -> None:
    """Make `copied`, a lowered `save_random_state` or `set_random_state`, the call that does it.

    Args:
        copied: its `device` is the type of a device.
        device: the rank's.
    """
    name = copied.target.__name__  # type: ignore[union-attr]
    get, put = _access(str(copied.kwargs["device"]), device)

    def save() -> Tensor:
        return get()

    def exchange(state: Tensor) -> Tensor:
        present = get()
        put(state)
        return present

    function: Any = save if copied.target is ops.save_random_state else exchange
    function.__name__ = function.__qualname__ = name
    function.__module__ = "graphshard"  # fx prints a call by these
    copied.target, copied.kwargs = function, {}


@contextlib.contextmanager
def put_back_on_error(devices: frozenset[str], device: torch.device) -> Iterator[None]:
    """Put the generators of the device types back if the body fails between two of its draws."""
    access = [_access(kind, device) for kind in devices]
    states = [get() for get, _ in access]
    try:
        yield
    except BaseException:
        for (_, put), state in zip(access, states, strict=True):
            put(state)
        raise


def _access(
    kind: str, device: torch.device
) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """Functions that read and set the state of the default generator of a device type.

    On CUDA it is the rank's device's. Neither waits for the device.
    """
    if kind == "cpu":
        return torch.get_rng_state, torch.set_rng_state
    return (
        lambda: torch.cuda.get_rng_state(device),
        lambda state: torch.cuda.set_rng_state(state, device),
    )
