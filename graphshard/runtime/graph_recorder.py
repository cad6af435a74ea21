"""Capturing CUDA graphs on one device, in one memory pool."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphshard.errors import RuntimeStateError
from graphshard.torch_private import compat as torch_compat

Run = Callable[[list[Any]], Any]

_EMPTY = "CUDA Graph is empty"  # in the warning that torch gives of one


class Recorder:
    """Captures the work that functions queue on a CUDA device.

    pool: the memory pool of all its graphs.
    stream: the stream they are captured on; one for all, so that later graphs reuse the memory that
        earlier ones gave back.

    Args:
        device: a CUDA device with its index; which one is current does not matter.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def capture(self, run: Run, args: list[Any]) -> tuple[Any, Any]:
        """(a CUDA graph of the work that `run(args)` queues, its result).

        Nothing is executed yet. Only this thread is captured, since NCCL's threads query events
        meanwhile.
        """
        with torch.cuda.device(self.device):
            graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                with self._capturing(graph):
                    result = run(args)
            except Exception:
                self._restore(before)
                raise
        return graph, result

    @contextmanager
    def _capturing(self, graph: Any) -> Iterator[None]:
        """A context whose work on the device goes into `graph`."""
        capture = torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        )
        capture.__enter__()
        try:
            yield
        except BaseException:
            capture.__exit__(None, None, None)
            raise
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            capture.__exit__(None, None, None)
        empty = [_EMPTY in str(warning.message) for warning in said]
        for warning, tells_empty in zip(said, empty, strict=True):
            if not tells_empty:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
        if any(empty):
            raise RuntimeStateError(
                f"nothing was queued on {self.device} while a CUDA graph was captured there, so "
                "its replay would do nothing; keep the model and its inputs on that device, or "
                "leave out cuda_graph=True"
            )

    def _restore(self, before: Any) -> None:
        """Restore torch's state after CUDA gave up a capture.

        torch leaves the capture's stream current and the allocator in capture mode, and its
        generator of random numbers refuses to draw until another capture has ended.
        """
        if torch.cuda.current_stream() == before:
            return
        torch.cuda.set_stream(before)
        torch_compat.end_allocation(self.pool)
        other = torch.cuda.CUDAGraph()
        with torch.cuda.graph(other, stream=self.stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=self.device)
