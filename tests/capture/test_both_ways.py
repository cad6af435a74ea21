"""Questions that only skip operators: the program runs them, and `torch.where` leaves them out."""

from __future__ import annotations

import copy
import re

import numpy
import pytest
import torch
from capture_models import Net, X, linear
from hypothesis import given, settings
from hypothesis import strategies as st
from models import VOCAB, of_transformers
from torch import nn

import graphshard
from graphshard.capture.both_ways import BothWaysError
from graphshard.errors import CaptureError

POLICY = graphshard.SizePolicy(10)


def drawn():
    return torch.rand(()) < 0.5


def layers(count=5):
    return nn.ModuleList(linear() for _ in range(count))


def drops_layers(m, x):
    x = m.fc(x)
    for layer in m.layers:
        if not drawn():
            x = x + layer(x).tanh()
    return x.square()


def drops_and_continues(m, x):
    x = m.fc(x)
    for layer in m.layers:
        if drawn():
            continue
        x = layer(x)
    return x.sin()


def asks_twice(m, x):
    x = m.fc(x)
    for layer in m.layers:
        skips = drawn()
        if not skips or x.dim() == 1:
            y = layer(x)
        if skips:
            y = x
        x = y + 1
    return x


def encodes_and_decodes(m, x):
    memory = y = m.fc(x)
    for layer in m.layers[:2]:
        if not drawn():
            memory = layer(memory).tanh()
    for layer in m.layers[2:]:
        if drawn():
            continue
        y = y + layer(y) @ memory.T @ memory
    return y


def by_activations(m, x):
    y = m.layers[0](x)
    if y.norm() > 3:
        y = y / y.norm()
    return m.layers[1](y)


def guards_a_norm(m, x):
    y = m.layers[0](x)
    y = (y - y.detach()) * 2  # zeros, by which a norm's gradient is NaN
    if y.norm() > 0:
        y = y / y.norm()
    return m.layers[1](y)


def returns_early(m, x):
    y = m.layers[0](x)
    return y.sum() if drawn() else m.layers[1](y).sum()


def skips_two_values(m, x):
    y, z = m.layers[0](x), x
    if not drawn():
        y, z = m.layers[1](y).split(3)
        y, z = torch.cat([z, y]), torch.cat([z, z]) * 2
    return y * z


def writes_its_own(m, x):
    y = m.layers[0](x)
    if not drawn():
        z = m.layers[1](y)
        z.add_(1)
        y = z * 2
    return y


def writes_and_casts(m, x):
    y = m.fc(x)
    y[0] = 0  # the trace is functionalized
    y = y.double().float()
    return m.layers[1](y) if (y.T.detach().bool()).sum() > 15 else y


def asks_what_changes(m, x):
    x, stops = m.fc(x), drawn()
    for layer in m.layers:
        if not stops:
            x = layer(x)
        stops.logical_or_(drawn())
    return x


def same_as_eager(model, sharded, *args, seeds=8):
    """The same losses and gradients, zeros where eager has none."""
    for seed in range(seeds):
        losses = []
        for each in (model, sharded):
            each.zero_grad()
            torch.manual_seed(seed)
            numpy.random.seed(seed)
            losses.append(each(*args).sum())
            losses[-1].backward()
        assert torch.equal(*losses)
        for param, other in zip(sharded.parameters(), model.parameters(), strict=True):
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            expected = torch.zeros_like(other) if other.grad is None else other.grad
            assert torch.equal(grad, expected)


@pytest.mark.parametrize(
    ("forward", "count"),
    [
        (drops_layers, 5),
        (drops_and_continues, 5),
        (asks_twice, 5),
        (encodes_and_decodes, 5),
        (by_activations, 1),
        (guards_a_norm, 1),
        (writes_and_casts, 1),
        (returns_early, 1),
        (skips_two_values, 2),
        (writes_its_own, 1),
        (asks_what_changes, 5),
    ],
)
def test_skipped_operators_run_and_are_left_out(forward, count):
    model = Net(forward, fc=linear(), layers=layers())
    sharded = graphshard.compile(copy.deepcopy(model), POLICY, example_inputs=(X,))
    same_as_eager(model, sharded, X)
    assert len(sharded.programs) == 1
    targets = [node.target for node in sharded.program.nodes() if node.meta["phase"] == "forward"]
    assert targets.count(torch.ops.aten.where.self) == count
    notes = [note for note in sharded.program.notes if "torch.where" in note]
    assert notes
    assert all(f"in {forward.__name__}: " in note for note in notes)


def test_the_shapes_may_be_symbols():
    model = Net(drops_layers, fc=linear(), layers=layers())
    sharded = graphshard.compile(
        copy.deepcopy(model), POLICY, example_inputs=(X,), dynamic={"args[0]": {0: "n"}}
    )
    same_as_eager(model, sharded, X)
    same_as_eager(model, sharded, X[:3])
    assert len(sharded.programs) == 1


_DROPS = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "use_cache": False}
_SIZES = {"vocab_size": VOCAB, "d_model": 16, "encoder_layers": 3, "decoder_layers": 3}
_SIZES |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24}
_SIZES |= {"decoder_ffn_dim": 24, "encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4}
_OPT = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
_OPT |= {"ffn_dim": 24, "word_embed_proj_dim": 16, "layerdrop": 0.4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task", "sizes"),
    [
        ("Bart", "ForConditionalGeneration", _SIZES),
        ("M2M100", "ForConditionalGeneration", _SIZES),
        ("OPT", "ForCausalLM", _OPT),
    ],
)
def test_transformers_drop_layers(name, task, sizes):
    torch.manual_seed(0)
    net = of_transformers(name, task, **sizes, **_DROPS)
    model = Net(lambda m, ids: m.net(input_ids=ids, labels=ids).loss, net=net)
    ids = torch.randint(3, VOCAB, (2, 9))
    sharded = graphshard.compile(copy.deepcopy(model), graphshard.SizePolicy(500))
    same_as_eager(model, sharded, ids)
    assert len(sharded.programs) == 1


@pytest.mark.slow
def test_wav2vec2_masks_drops_layers_and_takes_the_ctc_loss_of_padded_rows():
    torch.manual_seed(0)
    net = of_transformers(
        *("Wav2Vec2", "ForCTC"),
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        vocab_size=20,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.3,
        mask_time_length=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        layerdrop=0.3,
    )

    def loss(m, sound, mask, labels):
        return m.net(sound, attention_mask=mask, labels=labels).loss

    model = Net(loss, net=net)
    sound, labels = torch.randn(2, 400), torch.randint(1, 20, (2, 5))
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, 300:], labels[0, 3:] = 0, -100
    policy = graphshard.BlockPolicy({"Wav2Vec2EncoderLayer"})
    sharded = graphshard.compile(copy.deepcopy(model), policy)
    same_as_eager(model, sharded, sound, mask, labels, seeds=4)
    assert len(sharded.programs) == 1


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def decided(m):
    return m.fc.weight.sum() > 0


def writes_before(m, x):
    y = m.fc(x)
    if not decided(m):
        y.add_(m.fc(x.sin()))
    return y


def writes_a_buffer(m, x):
    if not decided(m):
        m.count.add_(1)
    return m.fc(x)


def writes_later(m, x):
    y = x = m.fc(x)
    if not decided(m):
        y = m.fc(y)
    y.mul_(2)
    return x + y


def runs_another(m, x):
    return m.fc(x) if decided(m) else m.fc(x.sin()) * 2


def asks_inside(m, x):
    if decided(m):
        x = m.fc(x)
        if decided(m):
            x = x * 3
    return m.fc(x)


def loops(m, x):
    for _ in range(12):
        if decided(m):
            break
        x = m.fc(x)
    return m.fc(x)


def takes_less(m, x):
    y = m.fc(x)
    return (y if decided(m) else y[:2]).sum()


def in_a_function(m, x):
    y = m.fc(x)
    return (y if decided(m) else Triple.apply(y)).sum()


def other_weights(m, x):
    return nn.functional.linear(x, m.fc.weight if decided(m) else m.fc.weight.T)


def assigns(m, x):
    y = m.fc(x)
    if decided(m):
        m.last += 1
        y = y.sin() * m.last
    return y


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (writes_before, "operators that its answer skips write in place"),
        (writes_a_buffer, "operators that its answer skips write in place"),
        (writes_later, "no skipped operator made"),
        (runs_another, "each of its answers runs operators of its own"),
        (assigns, "each of its answers runs operators of its own"),
        (asks_inside, "changes which are asked later"),
        (loops, "changes which are asked later"),
        (takes_less, "changes the shape, dtype or device"),
        (in_a_function, r"the result of an autograd\.Function"),
    ],
)
def test_answers_that_change_more_have_programs_of_their_own(forward, reason, monkeypatch):
    reasons = []
    make = BothWaysError.__init__
    monkeypatch.setattr(
        BothWaysError, "__init__", lambda error, text: [make(error, text), reasons.append(text)][0]
    )
    model = Net(forward, fc=linear(), count=torch.zeros(()))
    model.last = 1
    sharded = graphshard.compile(copy.deepcopy(model), POLICY, example_inputs=(X,))
    assert re.search(reason, " ".join(reasons))
    for _ in range(4):
        same_as_eager(model, sharded, X, seeds=2)
        assert torch.equal(model.count, sharded.count)
        assert model.last == sharded.last
        for each in (model, sharded):
            each.fc.weight.data.neg_()
    assert len(sharded.programs) >= 2


# -- drawn programs -------------------------------------------------------------------------------

_STEPS = {
    "layer": lambda m, a, b: (m.fc(a), b),
    "add": lambda m, a, b: (a + b, b),
    "sine": lambda m, a, b: (a, b.sin()),
    "both": lambda m, a, b: (b * 2, a.cos()),
    "swap": lambda m, a, b: (b, a),
    "write": lambda m, a, b: (a.add_(1), b),
    "view": lambda m, a, b: (a.view(-1).view(a.shape), b.T.T),
}


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*_STEPS]), st.booleans()), min_size=1, max_size=6))
def test_a_program_is_as_in_eager_or_refused(steps):
    def forward(m, x):
        a, b = m.fc(x), x * 2
        for name, is_drawn in steps:
            if not is_drawn or drawn():
                a, b = _STEPS[name](m, a, b)
        return (a * b).sum() + m.fc(x).sum()

    model = Net(forward, fc=linear())
    x = X[:4]
    try:
        sharded = graphshard.compile(copy.deepcopy(model), POLICY, example_inputs=(x,))
    except CaptureError:
        assert any(is_drawn for _, is_drawn in steps)
        return
    same_as_eager(model, sharded, x, seeds=6)
