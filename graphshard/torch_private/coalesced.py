"""Collectives of several tensors in one call, also through backends that have none.

With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps each backend to compare what the ranks call. The
wrapper of torch 2.11 has no coalesced gathers and reduce_scatters. Those of Gloo overwrite other
memory while two gathers are in flight (torch 2.13 and 2.15; see runtime/README.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

_ONE_BY_ONE = {
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}


class Works:
    """The works of several calls, as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, *timeout: Any) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait(*timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all of them are done."""
        return all(work.is_completed() for work in self._works)


def coalesced(process_group: Any, name: str, backend: str) -> Callable[..., Any]:
    """The method `name` of `process_group`, or a call for each tensor where `backend` lacks it.

    All ranks have the same backend, and it refuses before it sends anything.
    """

    def one_by_one(outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> Any:
        call = getattr(process_group, _ONE_BY_ONE[name])
        works = [call(o, i, *options) for o, i in zip(outputs, inputs, strict=True)]
        works = [work for work in works if work is not None]
        return Works(works) if works else None

    def launch(outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> Any:
        try:
            return getattr(process_group, name)(outputs, inputs, *options)
        except RuntimeError as error:
            if "does not support" not in str(error) or name not in str(error):
                raise
        return one_by_one(outputs, inputs, *options)

    overwrites = (backend, name) == ("gloo", "allgather_into_tensor_coalesced")
    return one_by_one if overwrites else launch
