"""Recurrent layers on packed sequences: one program for all lengths, bit-equal to eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from value_size_models import STEPS, WORDS, Tagger

import graphshard
from graphshard.capture.entry import capture
from graphshard.errors import CaptureError


def batch(lengths, seed=0):
    torch.manual_seed(seed)
    return torch.randint(WORDS, (len(lengths), STEPS)), torch.tensor(lengths)


CASES = {
    "lstm": lambda: Tagger(nn.LSTM),
    "gru": lambda: Tagger(nn.GRU, enforce_sorted=False),
    "rnn": lambda: Tagger(nn.RNN, nonlinearity="relu", bias=False),
    "stacked": lambda: Tagger(
        nn.LSTM, num_layers=2, bidirectional=True, total_length=STEPS, enforce_sorted=False
    ),
    "projected": lambda: Tagger(nn.LSTM, proj_size=6),
}


@pytest.mark.parametrize("name", CASES)
def test_one_program_serves_all_lengths(name):
    torch.manual_seed(0)
    model = CASES[name]()
    sharded = graphshard.compile(
        model, graphshard.SizePolicy(100), example_inputs=batch([7, 3, 2]), check=True
    )
    unsorted = [[1, 4, 2]] if not model.enforce_sorted else []
    for seed, lengths in enumerate([[7, 3, 2], [5, 5, 1], [1, 1, 1], *unsorted]):
        losses = []
        for one in (model, sharded):
            one.zero_grad()
            losses.append(one(*batch(lengths, seed)))
            losses[-1].backward()
        # Products of few rows are rounded in another way on CPUs without AVX-512.
        torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-7, msg=str(lengths))
        wanted = dict(model.named_parameters())
        for parameter, param in sharded.named_parameters():
            torch.testing.assert_close(param.grad, wanted[parameter].grad, rtol=1e-5, atol=1e-6)
    assert len(sharded.programs) == 1


def test_evaluation_takes_packed_sequences_too():
    model = CASES["stacked"]().eval()
    sharded = graphshard.compile(model, graphshard.SizePolicy(100)).eval()
    with torch.no_grad():
        for lengths in ([7, 3, 2], [2, 6, 1]):
            assert torch.equal(model(*batch(lengths)), sharded(*batch(lengths)))


def test_dropout_between_layers_is_refused():
    model = Tagger(nn.LSTM, num_layers=2, dropout=0.5)
    with pytest.raises(CaptureError, match=r"between its layers(.|\n)*self\.layer"):
        capture(model, batch([7, 3, 2]))


def test_autocast_is_refused():
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(CaptureError, match="runs under autocast"),
    ):
        capture(CASES["lstm"](), batch([7, 3, 2]))


def test_a_sequence_packed_elsewhere_is_refused():
    class Elsewhere(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, data, batch_sizes):
            packed = PackedSequence(self.fc(data), batch_sizes)
            return pad_packed_sequence(packed)[0]

    with pytest.raises(CaptureError, match="that pack_padded_sequence did not make"):
        capture(Elsewhere(), (torch.randn(5, 4), torch.tensor([3, 2])))


def test_a_layer_on_a_sequence_packed_elsewhere_is_refused():
    packed = pack_padded_sequence(torch.randn(5, 2, 4), torch.tensor([5, 3]))
    with pytest.raises(CaptureError, match="made outside of this forward"):
        capture(nn.GRU(4, 3), (packed,))
