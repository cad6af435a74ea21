"""The CUDA runtime made of CPU threads shows what it is for: seeded faults, under random delays.

Each fault takes away an order that the code of streams and copies makes; two ranks then differ from
one process, or end in an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from made_up import is_made_up
from ranks import RankError, run_ranks
from test_cuda_ranks import by_one_process, by_ranks

from graphshard.runtime.streams import Launched, SideStream

pytestmark = [pytest.mark.cuda, pytest.mark.slow]


def compute_does_not_wait_for_a_launch() -> None:
    Launched.join = lambda self: None  # type: ignore[method-assign]


def a_launch_does_not_wait_for_compute() -> None:
    def launch(self: SideStream, work: Callable[..., Any], *args: Any) -> Launched:
        compute = self.cuda.current_stream(self.device)
        with self.cuda.stream(self.stream):
            work(*args)
        return Launched(self.stream.record_event(), compute, self.cuda)

    SideStream.launch = launch  # type: ignore[method-assign]


def a_side_stream_does_not_follow_another() -> None:
    SideStream.follow = lambda self, launched: None  # type: ignore[method-assign]


def an_event_is_recorded_before_the_launch() -> None:
    def launch(self: SideStream, work: Callable[..., Any], *args: Any) -> Launched:
        compute = self.cuda.current_stream(self.device)
        self.stream.wait_stream(compute)
        event = self.stream.record_event()
        with self.cuda.stream(self.stream):
            work(*args)
        return Launched(event, compute, self.cuda)

    SideStream.launch = launch  # type: ignore[method-assign]


def an_event_is_recorded_on_compute() -> None:
    def launch(self: SideStream, work: Callable[..., Any], *args: Any) -> Launched:
        compute = self.cuda.current_stream(self.device)
        self.stream.wait_stream(compute)
        with self.cuda.stream(self.stream):
            work(*args)
        return Launched(compute.record_event(), compute, self.cuda)

    SideStream.launch = launch  # type: ignore[method-assign]


OFFLOAD = {"schedule": "overlap", "offload": ("params", "activations")}
FAULTS: list[tuple[Callable[[], None], dict[str, Any]]] = [
    (compute_does_not_wait_for_a_launch, {}),
    (a_launch_does_not_wait_for_compute, {}),
    (a_side_stream_does_not_follow_another, OFFLOAD),
    (an_event_is_recorded_before_the_launch, {}),
    (an_event_is_recorded_on_compute, {}),
]


def gap(rank: int, fault: Callable[[], None], fields: dict[str, Any]) -> float:
    fault()
    losses, weights = by_ranks(rank, 1, fields)
    expected, state = by_one_process(dist.get_world_size(), 1)
    gaps = [abs(a - b) for a, b in zip(losses, expected, strict=True) if rank == 0]
    gaps += [float((weights[n] - w).abs().max()) for n, w in state.items() if weights]
    return max((1.0 if gap != gap else gap for gap in gaps), default=0.0)


@pytest.mark.parametrize(("fault", "fields"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_is_seen(
    fault: Callable[[], None], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_made_up():
        pytest.skip("on a GPU a race is seen by luck")
    monkeypatch.setenv("CUDA_ON_CPU_DELAY_US", "300")
    monkeypatch.setenv("CUDA_ON_CPU_SEED", "1")
    try:
        gaps = run_ranks(gap, 2, fault, fields, device="cuda", timeout=60.0, group_timeout=30.0)
    except RankError:
        return
    assert max(gaps) > 0
