"""The storage counter of the benchmarks, on steps whose live bytes are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from examples.benchmarks.live_bytes import LiveBytes
from examples.benchmarks.paired import median_interval


def test_storage_counts_while_it_lives_and_views_count_once():
    with LiveBytes() as live:
        a = torch.zeros(1024)
        view = a[10:].view(2, -1)
        assert live.current == 4096
        b = a + 1
        assert live.current == 8192
        del a
        assert live.current == 8192, "the view still holds it"
        del view
        assert live.current == 4096
        del b
    assert live.current == 0
    assert live.peak == 8192


def test_resized_storage_counts_with_the_size_it_has():
    with LiveBytes() as live:
        a = torch.empty(1024)
        storage = a.untyped_storage()
        storage.resize_(0)
        assert live.current == 0
        storage.resize_(8192)
        assert live.current == 8192
        storage.resize_(0)
        a.resize_(256)
        assert live.current == 1024
    assert live.peak == 8192
    storage.resize_(4096)
    assert live.current == 1024, "nothing is counted after the context"


def test_what_autograd_saves_is_counted_until_backward_drops_it():
    layer = nn.Linear(64, 64, bias=False)
    x = torch.zeros(16, 64)
    with LiveBytes() as live:
        live.add([layer.weight, x])
        base = live.current
        assert base == 64 * 64 * 4 + 16 * 64 * 4
        hidden = layer(x)
        saved = hidden.sigmoid()  # saves its own result
        del hidden
        loss = saved.sum()
        del saved
        assert live.current == base + 16 * 64 * 4 + 4
        loss.backward()
        del loss
        assert live.current == base + layer.weight.nbytes, "the gradient stays"
        layer.weight.grad = None
        assert live.current == base


def test_other_devices_do_not_count():
    with LiveBytes() as live:
        kept = torch.empty(1024, device="meta") + 1
    assert kept.numel() == 1024
    assert live.peak == 0


@pytest.mark.parametrize(("count", "low", "high"), [(6, 0, 5), (9, 1, 7), (20, 5, 14), (30, 9, 20)])
def test_interval_of_a_median(count, low, high):
    # Ranks from tables of the sign test at 95 %.
    assert median_interval([float(i) for i in range(count)][::-1]) == (low, high)
