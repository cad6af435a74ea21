"""The sizes of a module's calls that are symbols: named by the user, or learned from the calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from graphshard.capture.arguments import Arguments
from graphshard.capture.changing import ChangingSizes, code_of
from graphshard.capture.dynamic import AUTO, Dynamic, Names
from graphshard.capture.structure import Structure
from graphshard.capture.traced_module import MAIN_ENTRY, EntryPoint
from graphshard.errors import CaptureError, FixedSizeError

OFFER = 3
"""The number of shapes of a tensor from which on `dynamic` is offered as code."""


class CallSizes:
    """Tells which dimensions of a call are symbols.

    Args:
        model: its forward names the tensors of a call.
        dynamic: the user's choice; None: no dimension is a symbol, and one that changes is offered.
    """

    def __init__(self, model: nn.Module, dynamic: Dynamic | Literal["auto"] | None) -> None:
        self.dynamic = dynamic
        self._arguments = Arguments.of(model)
        self._changing: dict[EntryPoint, ChangingSizes] = {}

    def names(
        self, tensors: Sequence[Tensor], structure: Structure, entry: EntryPoint
    ) -> tuple[Names, ...] | None:
        """The dimensions of a call that are symbols; None if there are none."""
        if self.dynamic is None:
            return None
        if self.dynamic == AUTO:
            labels = self._labels(structure, entry)
            return self._of(entry).names(tensors, labels, structure)
        return self.dynamic.names(tensors, structure) if entry == MAIN_ENTRY else None

    def meet(self, tensors: Sequence[Tensor], structure: Structure, entry: EntryPoint) -> bool:
        """Learn from a call that no program fits; whether its shapes are new."""
        return self._of(entry).meet(tensors, self._labels(structure, entry))

    def fix(
        self,
        error: CaptureError,
        tensors: Sequence[Tensor],
        structure: Structure,
        names: Sequence[Names],
        entry: EntryPoint,
        *,
        captured: bool,
    ) -> set[str]:
        """The names of sizes to fix for a call after a capture failed; none: it cannot be helped.

        Args:
            error: that of the capture, in which the sizes in `names` were symbols.
            tensors: of the call.
            structure: of the call.
            names: the symbols of the call.
            entry: the entry point called.
            captured: another capture with these symbols succeeded.
        """
        automatic = self.dynamic == AUTO
        if isinstance(error, FixedSizeError):
            # The model may take any size in general, and handle this one in another way.
            unwanted = {error.size} if automatic or captured else set()
        else:
            unwanted = {n for dims in names for n in dims.values()} if automatic else set()
        if automatic and unwanted:
            self._of(entry).fix(tensors, self._labels(structure, entry), names, unwanted)
        return unwanted

    def offer(self) -> str | None:
        """The argument `dynamic` for the sizes that changed, as code, from the third shape on."""
        changing = self._of(MAIN_ENTRY)
        if self.dynamic is not None or changing.shapes < OFFER:
            return None
        return f"dynamic={code_of(changing.offer())}"

    def _of(self, entry: EntryPoint) -> ChangingSizes:
        return self._changing.setdefault(entry, ChangingSizes())

    def _labels(self, structure: Structure, entry: EntryPoint) -> tuple[str, ...]:
        return self._arguments.labels(structure) if entry == MAIN_ENTRY else structure.paths
