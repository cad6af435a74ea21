"""Batches as people write them, padded and of every size: one program, with eager's numbers."""

from __future__ import annotations

import pytest
import torch
from capture_models import IDS, Net, linear
from loops import same_step
from models import CASES, VOCAB
from torch import nn
from torch.nn import functional as F

import graphshard
from graphshard.errors import CaptureError, FixedSizeError

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
SHAPES = [(4, 11), (2, 17), (3, 5), (5, 2)]

NAMES = ("input_ids", "attention_mask", "labels")


def padded(shape, *, left=False):
    """Ids of rows of unequal lengths, their mask and labels."""
    batch, length = shape
    torch.manual_seed(length)
    ids = torch.randint(3, VOCAB, shape)
    lengths = torch.randint(1, length + 1, (batch, 1))
    mask = (torch.arange(length) < lengths).long()
    return dict(zip(NAMES, (ids, mask.flip(1) if left else mask, ids.clone()), strict=True))


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["llama", slow("bert"), slow("gpt2"), slow("t5")])
def test_padded_batches_of_every_shape_share_one_program(name):
    case = CASES[name]
    model = case.model()
    assert model.config._attn_implementation == "sdpa"
    policy = graphshard.BlockPolicy(case.blocks)
    sharded = graphshard.compile(model, policy, dynamic=dict.fromkeys(NAMES, IDS), check=True)
    for shape in SHAPES:
        same_step(model, sharded, **padded(shape))
    unpadded = padded((3, 7))
    unpadded["attention_mask"].fill_(1)
    # Without padding transformers passes no mask, and the kernel may round otherwise without one.
    same_step(model, sharded, exact=False, **unpadded)
    same_step(model, sharded, **padded((2, 9), left=True))
    # T5 shifts its labels: of a length of 2 it copies 1, which torch tells from other sizes.
    assert len(sharded.programs) == (2 if name == "t5" else 1)


def test_control_flow_by_values_is_refused_as_for_fixed_sizes():
    def forward(m, x):
        return m.fc(x) if float(m.fc(x).sum()) > 0 else x.sin()

    with pytest.raises(CaptureError) as caught:
        graphshard.plan(
            Net(forward, fc=linear()),
            graphshard.SizePolicy(1),
            example_inputs=(torch.randn(3, 4),),
            dynamic={"args[0]": {0: "batch"}},
        )
    text = str(caught.value)
    assert "the model's control flow depends on the values of a tensor" in text
    assert "return m.fc(x) if float(m.fc(x).sum()) > 0 else x.sin()" in text


# -- models of other kinds ---------------------------------------------------------------------


def train_alike(model, batches, dynamic):
    """Programs after training on each of `batches`, with eager's losses and gradients."""
    sharded = graphshard.compile(model, graphshard.SizePolicy(200), dynamic=dynamic, check=True)
    counts = []
    for batch in batches:
        same_step(model, sharded, **batch)
        counts.append(len(sharded.programs))
    return counts


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.rnn = nn.LSTM(8, 8, num_layers=2, batch_first=True, dropout=0.1, bidirectional=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids, mask):
        logits = self.head(self.rnn(self.embed(ids))[0])
        losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
        return (losses.view_as(ids) * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    "dynamic",
    [pytest.param(None, marks=pytest.mark.slow), {"ids": IDS, "mask": IDS}],
    ids=["fixed", "dynamic"],
)
def test_lstms_are_eager_s_kernel_for_every_length(dynamic):
    torch.manual_seed(0)
    batches = [dict(zip(("ids", "mask"), padded(s).values(), strict=False)) for s in SHAPES]
    counts = train_alike(Recurrent(), batches, dynamic)
    assert counts == ([1, 2, 3, 4] if dynamic is None else [1] * 4)


class Signals(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(3, 8, 5, stride=2, padding=2),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.MaxPool1d(3, stride=2, padding=1, ceil_mode=True),
            nn.Conv1d(8, 8, 3, padding=1),
        )

    def forward(self, x, mask):
        h = self.body(x)
        kept = F.interpolate(mask[:, None], size=h.shape[-1], mode="nearest")
        return ((h * kept).sum(-1) / kept.sum(-1).clamp(min=1)).square().sum()


def test_convolutions_and_pooling_take_every_length():
    torch.manual_seed(0)
    batches = [
        {"x": torch.randn(b, 3, length), "mask": (torch.rand(b, length) > 0.2).float()}
        for b, length in [(4, 22), (2, 31), (3, 16), (2, 9)]
    ]
    dynamic = {"x": {0: "batch", 2: "length"}, "mask": {0: "batch", 1: "length"}}
    # On torch 2.11 pooling with ceil_mode asks whether a length is even.
    counts = [1, 2, 2, 2] if TORCH == (2, 11) else [1, 1, 1, 1]
    assert train_alike(Signals(), batches, dynamic) == counts


def mistral():
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            sliding_window=8,
        )
    )


@pytest.mark.slow
def test_a_length_that_fills_a_sliding_window_has_a_program_of_its_own():
    model = mistral()
    dynamic = dict.fromkeys(NAMES, IDS)
    with pytest.raises(FixedSizeError, match="capture with an example of another size"):
        train_alike(model, [padded((3, 7))], dynamic)
    batches = [padded(shape) for shape in [(3, 9), (2, 7), (4, 7), (2, 12)]]
    assert train_alike(model, batches, dynamic) == [1, 2, 2, 2]
