"""The zoo of architectures: what it compares, and a few of its entries on two ranks."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks

from examples.benchmarks.zoo import Gap, compare, gap, row
from examples.benchmarks.zoo_models import ZOO, Specimen

NAMED = {specimen.name: specimen for specimen in ZOO}


def test_forty_architectures_each_with_its_row() -> None:
    assert len(ZOO) == len(NAMED) == 40
    assert row(NAMED["ViT"], Gap(0.0, 3e-7), "no", 3) == (
        "| ViT | transformers | 3 | equal | 3e-07 | fails |"
    )


def gaps_are_seen(rank: int) -> None:
    """On one rank alone, in one parameter's gradient."""
    loss, there = torch.tensor(1.0), {"a": torch.ones(4), "b": torch.ones(2)}
    mine = {"a": torch.ones(4) + 0.5 * rank, "b": torch.ones(2)}
    assert gap((loss, there), (loss, there)) == Gap(0.0, 0.0)
    assert gap((loss + rank, mine), (loss, there)) == Gap(1.0, 0.5)
    with pytest.raises(AssertionError, match="'b'"):
        gap((loss, {"a": mine["a"]}), (loss, there))


class Equal:
    """A check that an architecture's gradients are the reference's."""

    def __init__(self, specimen: Specimen) -> None:
        self.__name__, self.specimen = specimen.name, specimen

    def __call__(self, rank: int) -> None:
        ours, _, units = compare(self.specimen, rank)
        assert units >= 2
        assert isinstance(ours, Gap), ours
        assert ours.loss == 0
        assert ours.grads <= 1e-6


test_the_figures = pytest.mark.slow(on_ranks([gaps_are_seen], 2))

FEW = [Equal(NAMED[name]) for name in ("Mixtral", "FNet", "Segformer")]

test_a_few = pytest.mark.slow(on_ranks(FEW, 2, timeout=500))
