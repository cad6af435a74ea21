"""Ranks whose values answer a model's questions otherwise train as one process does."""

from __future__ import annotations

import copy
import functools
import random

import parity
import pytest
import question_models as models
import torch
from capture_models import Net
from full_tensors import full_grads
from models import LAYERS, VOCAB, Case, of_transformers
from ranks import on_ranks
from torch import nn

import graphshard
from graphshard.errors import FingerprintError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.fc(x).tanh()


def drawn():
    """Half of the masks hide something."""
    mask = torch.randint(1, 3, (6, 4))
    if torch.rand(()) < 0.5:
        mask[1:] *= torch.randint(2, (5, 1))
    return {"x": torch.randn(6, 4), "mask": mask}


def case_of(forward, **buffers):
    def build():
        head = nn.Linear(4, 4)
        fc = nn.Sequential(Block(), Block(), head)
        return Net(lambda m, **kw: forward(m, **kw).square().sum(), fc=fc, **buffers)

    return Case(forward.__name__, build, ("Block",), drawn)


def train(rank, case, *, fully_shard=True, **fields):
    sharded = graphshard.compile(case.model(), graphshard.BlockPolicy(case.blocks, **fields))
    parity.check(parity.by_ranks(sharded, case), case, fully_shard=fully_shard)
    return sharded


def inputs_answer(rank):
    assert len(train(rank, case_of(models.hides)).programs) == 2


def numbers_of_rounds_differ(rank):
    def rounds(m, x, mask):
        y = m.fc(x)
        for _ in range(int(mask.sum(1).max()) - 4):
            y = y.tanh()
        return y

    assert len(train(rank, case_of(rounds)).programs) > 1


def buffers_answer(rank):
    """Each rank keeps statistics of its own; of those, parity compares rank 0's."""
    case = case_of(models.starts, **models.starting())
    assert len(train(rank, case, strategy="SHARD_GRAD_OP").programs) == 2


def activations_answer(rank):
    """The ranks' answers differ in some steps: all run again where one guessed wrong."""
    policies = (
        *({}, {"schedule": "overlap"}, {"recompute": "units"}, {"strategy": "SHARD_GRAD_OP"}),
        *({"strategy": "NO_SHARD"}, {"gather_unused": True}),
    )
    for fields in policies:
        case = case_of(models.turns_if_hot)
        train(rank, case, **fields)
        model = case.model()
        sharded = graphshard.compile(case.model(), graphshard.BlockPolicy(case.blocks, **fields))
        answers = []
        for seed in range(8):
            torch.manual_seed(2 * seed + rank)
            batch = drawn()
            answers.append(bool(model.fc(batch["x"])[0, 0] > 0))
            with torch.no_grad():
                assert torch.equal(sharded(**batch), model(**batch))
        assert len(sharded.programs) == 2
        of_all = [[], []]
        torch.distributed.all_gather_object(of_all, answers)
        assert len({*zip(*of_all, strict=True)}) > 2  # some differ


def questions_behind_what_inputs_answer(rank):
    """The program of one rank asks of activations, and that of the other asks nothing."""

    def forward(m, x, mask):
        y = torch.dropout(m.fc(x), 0.3, m.training)
        if mask.any():
            y = y.exp() if y[0, 0] > 0 else y.cos()
        return y.square().sum()

    policies = ({}, {"strategy": "SHARD_OPTIMIZER"}, {"strategy": "SHARD_GRAD_OP"})
    for fields in policies:
        model = case_of(forward).model()
        policy = graphshard.BlockPolicy({Block}, **fields)
        sharded = graphshard.compile(copy.deepcopy(model), policy)
        for seed in range(6):
            losses = []
            for each in (model, sharded):
                torch.manual_seed(2 * seed + rank)
                x, mask = torch.randn(6, 4), torch.ones(6, 4) * ((seed + rank) % 2)
                losses.append(each(x=x, mask=mask))
                losses[-1].backward()
                losses[-1] = torch.stack([losses[-1].detach(), torch.rand(())])
            assert torch.equal(*losses)
        found = full_grads(sharded)
        for name, param in model.named_parameters():
            torch.distributed.all_reduce(param.grad)
            torch.testing.assert_close(found[name], param.grad / 2, rtol=3e-5, atol=1e-6)


def other_units_by_activations(rank):
    def forward(m, x, mask):
        y = m.fc(x)
        return (m.one(y) if y.sum() > 0 else m.other(y)).square().sum()

    def build():
        return Net(forward, fc=nn.Linear(4, 4), one=Block(), other=Block())

    model = build()
    policy = graphshard.BlockPolicy({Block}, gather_unused=True)
    sharded = graphshard.compile(copy.deepcopy(model), policy)
    for seed in range(0, 12, 2):
        gives_the_mean(sharded, model, seed)
    assert len(sharded.programs) == 2
    sharded = graphshard.compile(build(), graphshard.BlockPolicy({Block}, merge_below=0))
    torch.manual_seed(rank)
    with pytest.raises(FingerprintError):
        [sharded(torch.randn(6, 4), torch.ones(6, 4)) for _ in range(30)]


def branches_that_raise(rank):
    assert len(train(rank, case_of(models.asserts), recompute="units").programs) == 1


def each_rank_draws_what_it_skips(rank):
    skips_blocks_by(lambda: torch.rand(()))


def each_rank_draws_on_its_host(rank):
    skips_blocks_by(lambda: random.random())


def skips_blocks_by(draw):
    """Of six blocks each rank leaves out about half; the gathers of all ranks are the same."""

    def drops(m, x, mask):
        for block in m.fc[:-1]:
            if not draw() < 0.5:
                x = block(x)
        return m.fc[-1](x).square().sum()

    model = Net(drops, fc=nn.Sequential(*(Block() for _ in range(6)), nn.Linear(4, 4)))
    policies = ({}, {"schedule": "overlap"}, {"recompute": "units"})
    for sharded in (
        graphshard.compile(copy.deepcopy(model), graphshard.BlockPolicy({Block}, **fields))
        for fields in policies
    ):
        for seed in (0, 2, 4):
            gives_the_mean(sharded, model, seed)
        assert len(sharded.programs) == 1


def gives_the_mean(sharded, model, seed):
    """Gradients are the mean of those of `model` for each rank, zeros where it has none."""

    def backward(model, seed):
        torch.manual_seed(seed)
        random.seed(seed)
        model.zero_grad()
        model(**drawn()).backward()

    backward(sharded, seed + torch.distributed.get_rank())
    found = full_grads(sharded)
    expected = {name: torch.zeros_like(grad) for name, grad in found.items()}
    for each in (seed, seed + 1):
        backward(model, each)
        for name, param in model.named_parameters():
            expected[name] += 0 if param.grad is None else param.grad / 2
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert len(found) == len(expected)


def other_units_on_each_rank(rank):
    """Their gathers differ, which all ranks say before one waits for another."""

    def forward(m, x, mask):
        return (m.one(x) if mask.any() else m.other(x)).sum()

    model = Net(forward, one=Block(), other=Block())
    sharded = graphshard.compile(model, graphshard.BlockPolicy({Block}, merge_below=0))
    x, mask = torch.randn(6, 4), torch.ones(6, 4)
    for share in (1, 0):
        sharded(x, mask * share).backward()
    with pytest.raises(FingerprintError):
        sharded(x, mask * rank)


class Captioner(nn.Module):
    """Text with or without an image, which tower and bridge read; both of a kind of block."""

    def __init__(self, *frozen: str, aux: bool = True):
        super().__init__()
        self.tower = nn.Sequential(Block(), Block())
        self.bridge = nn.Linear(4, 4)
        self.aux = nn.Linear(4, 4) if aux else nn.Identity()
        self.text = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 4)
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x, image=None):
        # Parameters of the root, too, are used by some calls only.
        x = self.aux(x) if image is None else x + self.bridge(self.tower(image))
        return self.head(self.text(x)).square().sum()


def images_on_one_rank():
    """In turns one of the two ranks has an image."""
    batch = {"x": torch.randn(6, 4)}
    seed = torch.initial_seed()
    return batch if (seed + seed // 2) % 2 else batch | {"image": torch.randn(6, 4)}


def images_on_some_ranks(rank):
    apart = {"merge_below": 0, "reshard_root": True}
    builds = [
        functools.partial(Captioner, *frozen)
        for frozen in ((), ("tower",), ("tower", "text"), ("tower", "bridge", "aux"))
    ]
    # Without an image the root then begins at the same operator as the first block of the text.
    bare = functools.partial(Captioner, aux=False)
    of_bare = ({}, {"strategy": "SHARD_OPTIMIZER"}, apart)
    for build, policies in (
        *((b, ({}, apart, {"recompute": "units"})) for b in builds),
        (bare, of_bare),
    ):
        case = Case("captions", build, ("Block",), images_on_one_rank)
        for fields in policies:
            sharded = train(rank, case, fully_shard=False, gather_unused=True, **fields)
            assert len(sharded.programs) == 2


def units_that_no_rank_uses_get_zeros(rank):
    sharded = graphshard.compile(Captioner(), graphshard.BlockPolicy({Block}, gather_unused=True))
    with torch.no_grad():
        sharded(torch.ones(6, 4), torch.ones(6, 4) if rank else None)
    sharded(torch.ones(6, 4)).backward()
    grads = full_grads(sharded)
    assert grads.keys() == dict(sharded.named_parameters()).keys()
    unused = [name for name in grads if name.startswith(("tower", "bridge"))]
    assert not any(grads[name].any() for name in unused)
    assert all(grads[name].any() for name in ("aux.weight", "text.0.fc.weight"))
    assert "touch" in str(sharded.programs[-1].graph)


def units_out_of_order_are_refused(rank):
    """What is used runs in the order of the plan, or ranks would not gather alike."""

    def forward(m, x, image):
        y = m.second(x) if image is None else m.first(m.second(image)) + x
        return y.sum()

    model = Net(forward, first=Block(), second=Block())
    policy = graphshard.BlockPolicy({Block}, gather_unused=True, merge_below=0)
    sharded = graphshard.compile(model, policy)
    x = torch.randn(6, 4)
    with pytest.raises(FingerprintError, match="rank 0: forward all_gather of first"):
        sharded(x, x if rank else None)


ON_TWO = [
    inputs_answer,
    activations_answer,
    questions_behind_what_inputs_answer,
    other_units_by_activations,
    buffers_answer,
    branches_that_raise,
    numbers_of_rounds_differ,
    each_rank_draws_what_it_skips,
    other_units_on_each_rank,
    images_on_some_ranks,
    units_that_no_rank_uses_get_zeros,
    units_out_of_order_are_refused,
]

test_on_two_ranks = on_ranks(ON_TWO, 2)


# -- transformers ---------------------------------------------------------------------------------

SMALL = LAYERS | {"intermediate_size": 32}


def _longformer():
    return of_transformers(
        "Longformer", "ForSequenceClassification", **SMALL, attention_window=[4, 4], num_labels=3
    )


def _documents():
    """In every other step all ranks attend to the first token: its parameters have a gather."""
    ids = torch.randint(5, VOCAB, (2, 9))
    attends = torch.zeros_like(ids)
    attends[:, 0] = torch.initial_seed() // 2 % 2
    labels = torch.randint(3, (2,))
    return {"input_ids": ids, "global_attention_mask": attends, "labels": labels}


def _xlm():
    return of_transformers("XLM", "ForSequenceClassification", emb_dim=16, n_layers=2, n_heads=2)


def _lengths():
    ids = torch.randint(5, VOCAB, (2, 9))
    lengths = torch.randint(3, 10, (2,))
    return {"input_ids": ids, "lengths": lengths, "labels": torch.randint(2, (2,))}


def longformer_with_global_attention_at_times(rank):
    train(rank, Case("longformer", _longformer, ("LongformerLayer",), _documents))


def _questions():
    """One of two ranks attends to the first token."""
    batch = _documents()
    batch["global_attention_mask"][:, 0] = torch.initial_seed() % 2
    return batch


def longformer_with_global_attention_on_one_rank(rank):
    case = Case("longformer", _longformer, ("LongformerLayer",), _questions)
    train(rank, case, fully_shard=False, gather_unused=True)


def xlm_of_lengths(rank):
    train(rank, Case("xlm", _xlm, ("MultiHeadAttention", "TransformerFFN"), _lengths))


SLOW = [
    each_rank_draws_on_its_host,
    longformer_with_global_attention_at_times,
    longformer_with_global_attention_on_one_rank,
    xlm_of_lengths,
]
test_more_on_two_ranks = pytest.mark.slow(on_ranks(SLOW, 2, timeout=595))
