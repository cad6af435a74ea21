"""`tensor.data = other` in a forward, which no trace sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphshard.errors import CaptureError

_ASSIGN: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class NoDataAssignments(TorchFunctionMode):
    """While this holds, what is assigned to `.data` of a tensor is refused: it would be lost.

    Args:
        names: of parameters and buffers, by identity.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._error: CaptureError | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Whatever `func` gives, unless it is the assignment."""
        if func == _ASSIGN:
            self._error = self._refusal(args[0])
            raise self._error
        return func(*args, **(kwargs or {}))

    def _refusal(self, tensor: Tensor) -> CaptureError:
        what = self._names.get(id(tensor), "a tensor")
        return CaptureError(
            f"the forward assigns .data of {what}, which goes past any trace, so a captured "
            "program would not do it; write into a buffer with copy_, or return the new value"
        )

    def require(self) -> None:
        """See that nothing was refused, if the model caught the error.

        Raises:
            CaptureError: something was.
        """
        if self._error is not None:
            raise self._error
