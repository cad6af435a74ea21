"""Capturing on a device, where a capture fails or is of nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphshard.errors import RuntimeStateError
from graphshard.runtime.cuda_graphs import Recorder, _cause

pytestmark = pytest.mark.cuda


@pytest.fixture
def recorder() -> Recorder:
    """On the last device, while the first is current."""
    torch.cuda.set_device(0)
    return Recorder(torch.device("cuda", torch.cuda.device_count() - 1))


def replays_a_product(recorder: Recorder) -> None:
    x = torch.ones(8, device=recorder.device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured, y = recorder.capture(lambda args: args[0] * 2, [x])
    x.fill_(3)
    captured.replay()
    torch.cuda.synchronize(recorder.device)
    assert (y == 6).all()
    assert torch.cuda.current_device() == 0


def test_it_captures_on_its_own_device(recorder: Recorder) -> None:
    for _ in range(2):
        replays_a_product(recorder)


def test_a_graph_of_nothing_is_an_error(recorder: Recorder) -> None:
    there = torch.ones(8, device="cuda:0")
    with pytest.raises(RuntimeStateError, match=r"nothing was queued on .* while a CUDA graph"):
        recorder.capture(lambda args: None, [])
    if recorder.device.index:
        with pytest.raises(RuntimeStateError, match="nothing was queued on"):
            recorder.capture(lambda args: there.mul_(2), [])


def waits_for_the_device(recorder: Recorder) -> None:
    torch.cuda.current_stream().synchronize()


def allocates_on_another_device(recorder: Recorder) -> None:
    torch.ones(1 << 22, device="cuda:0")


def raises(recorder: Recorder) -> None:
    raise ValueError("on purpose\nin the midst")


@pytest.mark.parametrize("fails", [waits_for_the_device, allocates_on_another_device, raises])
def test_a_capture_that_fails_leaves_nothing_behind(
    recorder: Recorder, fails: Callable[[Recorder], None]
) -> None:
    """CUDA gives up a capture in which it is asked for what it forbids."""
    if fails is allocates_on_another_device and not recorder.device.index:
        pytest.skip("needs two devices")
    before = torch.cuda.current_stream(recorder.device)

    def run(args: list[Any]) -> None:
        torch.ones(8, device=recorder.device).mul_(2)
        fails(recorder)

    with pytest.raises((RuntimeError, ValueError)) as raised:
        recorder.capture(run, [])
    assert (_cause(raised.value) == "on purpose") is (fails is raises)
    assert torch.cuda.current_stream(recorder.device) == before
    torch.rand(4, device=recorder.device)  # the generator is in no capture
    replays_a_product(recorder)


def test_other_warnings_are_given(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    end = torch.cuda.CUDAGraph.capture_end

    def warns(graph: Any) -> None:
        end(graph)
        warnings.warn("of torch's own", stacklevel=1)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", warns)
    with pytest.warns(UserWarning, match="of torch's own"):
        recorder.capture(lambda args: torch.ones(1, device=recorder.device) * 2, [])
