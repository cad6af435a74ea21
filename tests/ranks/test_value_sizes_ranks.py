"""Ranks whose sizes depend on their own values train with one program each, as `fully_shard`."""

from __future__ import annotations

import dataclasses

import parity
import pytest
import torch
import torch.distributed as dist
import value_size_models as models
from models import VOCAB, Case
from ranks import on_ranks

import graphshard

pytestmark = pytest.mark.slow  # each of its ranks starts and compiles for tens of seconds


def case_of(name):
    def batch():
        return dict(zip(("x", "target", "mask"), models.draw(), strict=True))

    return Case(name, models.MODELS[name], (type(models.MODELS[name]().blocks[0]).__name__,), batch)


def _tokens():
    ids = torch.randint(VOCAB, (2, 9))
    if torch.rand(()) < 0.3:
        ids[:] = ids[0, 0]  # chooses few experts
    return {"input_ids": ids, "labels": ids.clone()}


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        use_cache=False,
    )
    config._experts_implementation = "eager"
    return MixtralForCausalLM(config)


def _deberta():
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=4,
        max_position_embeddings=32,
        num_labels=3,
    )
    return DebertaV2ForSequenceClassification(config)


def _labelled():
    ids = torch.randint(1, VOCAB, (4, 9))
    labels = torch.randint(-1, 3, (4,))
    labels[0] = 1
    return {"input_ids": ids, "attention_mask": (ids > 9).long(), "labels": labels}


MIXTRAL = Case("mixtral", _mixtral, ("MixtralDecoderLayer",), _tokens)
DEBERTA = Case("deberta", _deberta, ("DebertaV2Layer",), _labelled)


def train(rank, case, *, fully_shard=True, **fields):
    world_size = dist.get_world_size()
    model = graphshard.compile(
        case.model(),
        graphshard.BlockPolicy(case.blocks, **fields),
        example_kwargs=case.inputs(rank),
    )
    ours = parity.by_ranks(model, case, world_size, rank)
    assert len(model.programs) == 1
    assert model.program.sizes.by_values
    expected = parity.by_one_process(case, world_size, rank)
    theirs = parity.by_fully_shard(case, world_size, rank) if fully_shard else expected
    outcome = parity.Outcome(parity.difference(ours, expected), parity.difference(theirs, expected))
    parity.check(outcome)
    if world_size == 2:
        assert outcome.graphshard.exact


def experts_of_differing_rows(rank):
    train(rank, case_of("experts_by_nonzero"))


def experts_that_skip_what_is_empty(rank):
    """On rank 0 all rows are equal, so one of three experts gets none; fully_shard aborts there."""
    case = case_of("experts_that_skip")

    def batch():
        drawn = case.batch()
        if torch.initial_seed() % 2 == 0:  # the rank is the last bit of the seed
            drawn["x"] = drawn["x"][:1].expand_as(drawn["x"]).clone()
        return drawn

    train(rank, dataclasses.replace(case, batch=batch), fully_shard=False)


def loss_on_rows_of_a_mask(rank):
    train(rank, case_of("mask_loss"), offload="activations")


def rows_up_to_a_number(rank):
    train(rank, case_of("first_rows"), strategy="SHARD_GRAD_OP")


def experts_of_mixtral(rank):
    train(rank, MIXTRAL)


def labelled_rows_of_deberta(rank):
    train(rank, DEBERTA)


def words_of_packed_sequences(rank):
    def batch():
        words = torch.randint(models.WORDS, (4, models.STEPS))
        return {"words": words, "lengths": torch.randint(1, models.STEPS + 1, (4,))}

    def tagger():
        return models.Tagger(torch.nn.LSTM, num_layers=2, enforce_sorted=False)

    train(rank, Case("tagger", tagger, ("LSTM",), batch))


ON_TWO = [
    loss_on_rows_of_a_mask,
    rows_up_to_a_number,
    experts_of_differing_rows,
    experts_that_skip_what_is_empty,
    experts_of_mixtral,
    labelled_rows_of_deberta,
    words_of_packed_sequences,
]

test_on_two_ranks = on_ranks(ON_TWO, 2, timeout=595)
