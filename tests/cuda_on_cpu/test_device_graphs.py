"""The rules of CUDA graphs that other tests rely on; on GPUs they hold as well."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.cuda


def captured(work: object, stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def test_a_stream_that_does_not_join() -> None:
    x, side = torch.ones(100, device="cuda"), torch.cuda.Stream()

    def work() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)

    with pytest.raises(RuntimeError, match="unjoined work"):
        captured(work)
    x.add_(1)
    torch.cuda.synchronize()
    assert x.eq(2).all()


@pytest.mark.parametrize("how", ["synchronize", "item", "event outside", "pageable"])
def test_what_a_capture_forbids(how: str) -> None:
    x = torch.ones(100, device="cuda")
    event = torch.cuda.current_stream().record_event()

    def work() -> None:
        y = x + 1
        if how == "synchronize":
            torch.cuda.synchronize()
        elif how == "item":
            y.sum().item()
        elif how == "event outside":
            torch.cuda.current_stream().wait_event(event)
        else:
            y.copy_(torch.ones(100))

    with pytest.raises(RuntimeError):
        captured(work)
    torch.cuda.synchronize()
    assert (x + 1).eq(2).all()


def test_draws_of_a_graph_move_the_generator() -> None:
    torch.cuda.manual_seed(3)
    out = torch.zeros(2, 64, device="cuda")

    def work() -> None:
        out[0].copy_(torch.rand(64, device="cuda"))
        out[1].copy_(torch.nn.functional.dropout(torch.ones(64, device="cuda"), 0.5))

    graph = captured(work)
    seen = []
    for _ in range(2):
        torch.cuda.manual_seed(3)
        for _ in range(2):
            graph.replay()
            seen.append(out.clone())
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[0][1], seen[1][1])
