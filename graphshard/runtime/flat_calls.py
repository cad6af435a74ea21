"""Taking calls apart that are tensors and plain values, as most are, without pytree.

What pytree finds out about such a call depends on its form: which arguments are tensors, the names
of the others and their values. So it is asked once for each form.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from graphshard.structure import CALL, Structure, take_apart

_TENSORS = (Tensor, nn.Parameter)
_PLAIN = frozenset({type(None), bool, int, float, str})


class FlatCalls:
    """The structures of the calls met so far, by their form."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Structure] = {}

    def take_apart(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], Structure]:
        """As `graphshard.structure.take_apart` does; calls of one form get the same structure.

        Raises:
            CaptureError: an argument cannot be taken apart.
        """
        tensors: list[Tensor] = []
        form: list[Any] = [len(args), *kwargs]
        for value in (*args, *kwargs.values()):
            kind = type(value)
            if kind in _TENSORS:
                form.append(Tensor)
                tensors.append(value)
            elif kind in _PLAIN:
                form += (kind, value)  # with the type: True is not 1
            else:
                return take_apart((args, kwargs), name=CALL)
        structure = self._known.get(tuple(form))
        if structure is None:
            tensors, structure = take_apart((args, kwargs), name=CALL)
            self._known[tuple(form)] = structure
        return tensors, structure
