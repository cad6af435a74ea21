"""Slabs: tensors lie apart, aligned, in few powers of two."""

from __future__ import annotations

import copy
import io
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphshard.planning.slabs import ALIGNMENT, pack
from graphshard.runtime.resident import host_memory

SIZES = st.lists(st.integers(0, 3_000_000), max_size=40)


@given(SIZES)
def test_tensors_lie_apart_in_powers_of_two(sizes: list[int]) -> None:
    slabs = pack(sizes)
    ends = dict.fromkeys(range(len(slabs.sizes)), 0)
    for (slab, start), size in sorted(zip(slabs.places, sizes, strict=True)):
        if size:
            assert start % ALIGNMENT == 0
            assert start >= ends[slab]
            ends[slab] = start + size
    for slab, size in enumerate(slabs.sizes):
        assert ends[slab] <= size == 1 << (size.bit_length() - 1)


@given(SIZES)
def test_never_more_than_blocks_of_their_own(sizes: list[int]) -> None:
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    own = sum(1 << (size - 1).bit_length() for size in aligned if size)
    assert pack(sizes).total_bytes <= own


@pytest.mark.parametrize(
    ("sizes", "waste"),
    [
        pytest.param([14336 * 4096 * 4 // 8] * 96 + [4096 * 4096 * 4 // 8] * 128, 1.01, id="llama"),
        pytest.param([28 << 20] * 3, 1.53, id="three"),  # 128 MiB for 84, as in blocks of 32
    ],
)
def test_little_is_wasted(sizes: list[int], waste: float) -> None:
    assert pack(sizes).total_bytes <= waste * sum(sizes)


def test_pieces_are_storages_of_their_own() -> None:
    pieces = host_memory([100, 0, 4096], pinned=False)
    assert [piece.numel() for piece in pieces] == [100, 0, 4096]
    assert pieces[2].untyped_storage().nbytes() == 4096
    for value, piece in enumerate(pieces):
        piece.fill_(value)
    file = io.BytesIO()
    torch.save(pieces[0], file)
    assert len(file.getvalue()) < 3000
    assert copy.deepcopy(pieces[0]).untyped_storage().nbytes() == 100
    kept = pieces[0].view(torch.bfloat16).view(5, 10)
    pieces.clear()
    assert not kept.view(torch.uint8).any()


def test_a_slab_lives_as_long_as_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    empty = torch.empty

    def noted(*args: object, **kwargs: object) -> torch.Tensor:
        block = empty(*args, **kwargs)  # type: ignore[call-overload]
        made.append(weakref.ref(block))
        return block

    monkeypatch.setattr(torch, "empty", noted)
    pieces = host_memory([5000, 700], pinned=False)
    (block,) = made
    kept = pieces.pop().view(torch.float32)
    pieces.clear()
    assert block() is not None
    del kept
    assert block() is None
