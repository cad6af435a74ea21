"""Ranks whose sizes depend on their own values train with one program each, as `fully_shard`."""

from __future__ import annotations

import dataclasses

import parity
import pytest
import torch
import value_size_models as models
from models import LAYERS, VOCAB, Case, of_transformers
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


SMALL = LAYERS | {"intermediate_size": 32}


def _mixtral():
    return of_transformers(
        "Mixtral",
        "ForCausalLM",
        **SMALL,
        num_key_value_heads=1,
        num_local_experts=4,
        use_cache=False,
        experts_implementation="eager",
    )


def _deberta():
    return of_transformers(
        "DebertaV2",
        "ForSequenceClassification",
        **SMALL,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=4,
        num_labels=3,
    )


def _labelled():
    ids = torch.randint(1, VOCAB, (4, 9))
    labels = torch.randint(-1, 3, (4,))
    labels[0] = 1
    return {"input_ids": ids, "attention_mask": (ids > 9).long(), "labels": labels}


MIXTRAL = Case("mixtral", _mixtral, ("MixtralDecoderLayer",), _tokens)
DEBERTA = Case("deberta", _deberta, ("DebertaV2Layer",), _labelled)


def train(rank, case, *, fully_shard=True, **fields):
    model = graphshard.compile(
        case.model(),
        graphshard.BlockPolicy(case.blocks, **fields),
        example_kwargs=case.inputs(rank),
    )
    exact, _ = parity.check(parity.by_ranks(model, case), case, fully_shard=fully_shard)
    assert exact
    assert len(model.programs) == 1
    assert model.program.sizes.by_values


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
