"""Capturing on a device, on a `torch.cuda` that only notes what is done with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphshard.errors import RuntimeStateError
from graphshard.runtime.cuda_graphs import Recorder, _cause
from graphshard.torch_private import compat as torch_compat

DEVICE = SimpleNamespace(type="cuda", index=1)


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.device = device


class Given:
    """`torch.cuda` as far as a `Recorder` needs it, with device 0 current.

    The captures in `fail` are given up by CUDA, which torch leaves as it stands. A graph is empty
    unless something is queued on the capture's stream while the capture's device is current.
    """

    def __init__(self, fail: frozenset[int] = frozenset()) -> None:
        self.fail = fail
        self.current: Any = SimpleNamespace(type="cuda", index=0)
        self.streams: dict[int, Stream] = {0: Stream(), 1: Stream()}
        self.captured: list[bool] = []
        self.capturing: Stream | None = None
        self.pool_in_use = False
        self.queued = 0
        self.warning = ""  # given at the end of a capture

    CUDAGraph = SimpleNamespace
    Stream = Stream

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    def current_stream(self) -> Any:
        return self.streams[self.current.index]

    def set_stream(self, stream: Any) -> None:
        self.streams[self.current.index] = stream

    def graph_pool_handle(self) -> int:
        return 7

    @contextmanager
    def graph(
        self, graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = ""
    ) -> Iterator[None]:
        assert stream.device is DEVICE
        index = stream.device.index
        before, self.streams[index] = self.streams[index], stream
        graph.replay = None
        self.capturing, self.pool_in_use, self.queued = stream, True, 0
        try:
            yield
        finally:
            self.captured.append(len(self.captured) not in self.fail)
            if not self.captured[-1]:
                raise RuntimeError("the capture was invalidated")
            self.streams[index], self.capturing, self.pool_in_use = before, None, False
            if self.warning:
                warnings.warn(self.warning, stacklevel=2)
            if not self.queued:
                warnings.warn("The CUDA Graph is empty. This usually means", stacklevel=2)

    def kernel(self) -> None:
        """What a kernel does: it is queued on the current stream of the current device."""
        self.queued += self.current_stream() is self.capturing

    def end_allocation(self, pool: int) -> None:
        assert pool == 7
        self.pool_in_use = False


def given(monkeypatch: pytest.MonkeyPatch, *fail: int) -> Given:
    cuda = Given(frozenset(fail))
    names = "CUDAGraph Stream device current_stream set_stream graph_pool_handle graph"
    for name in names.split():
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch_compat, "end_allocation", cuda.end_allocation)
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: cuda.kernel())
    return cuda


def test_it_captures_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = given(monkeypatch)
    recorder = Recorder(DEVICE)  # type: ignore[arg-type]
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _, result = recorder.capture(lambda args: (cuda.kernel(), args)[1], [3])
        assert result == [3]
        assert cuda.queued == 1
    assert cuda.current.index == 0


def test_a_graph_of_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = given(monkeypatch)

    def elsewhere(args: list[Any]) -> None:
        with cuda.device(SimpleNamespace(index=0)):
            cuda.kernel()

    with pytest.raises(RuntimeStateError, match=r"nothing was queued on .* while a CUDA graph"):
        Recorder(DEVICE).capture(elsewhere, [])  # type: ignore[arg-type]


def test_other_warnings_are_still_given(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = given(monkeypatch)
    cuda.warning = "of torch's own"
    with pytest.warns(UserWarning, match="of torch's own"):
        Recorder(DEVICE).capture(lambda args: cuda.kernel(), [])  # type: ignore[arg-type]


@pytest.mark.parametrize("given_up", [True, False])
def test_a_capture_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    cuda = given(monkeypatch, *([0] if given_up else []))
    before = dict(cuda.streams)

    def run(args: list[Any]) -> None:
        cuda.kernel()
        raise RuntimeError("not permitted\nwhen stream is capturing")

    with pytest.raises(RuntimeError) as raised:
        Recorder(DEVICE).capture(run, [])  # type: ignore[arg-type]
    assert _cause(raised.value) == "not permitted"
    assert cuda.streams == before
    assert cuda.capturing is None
    assert not cuda.pool_in_use
    # Another, empty one takes torch's generator out of the state of a capture.
    assert cuda.captured == ([False, True] if given_up else [True])
