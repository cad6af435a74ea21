"""The collectives, each on its own: every dtype, uneven rows, packed and not."""

from __future__ import annotations

import subprocess
import sys
import time
import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import checks_of, on_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from graphshard.errors import CollectiveError
from graphshard.planning.layout import ParamLayout
from graphshard.program import packing
from graphshard.runtime import gloo
from graphshard.runtime.collectives import BoundCollective, Operand, wait
from graphshard.runtime.gather import AllGather, AllGatherInPlace, Gathered, LocalGather, free
from graphshard.runtime.group import Group, find_group
from graphshard.runtime.reduce import (
    AllReduce,
    LocalReduce,
    ReduceScatterByExchange,
    ReduceScatterByPairExchange,
    ReduceScatterByReduce,
)
from graphshard.runtime.shards import part_of, without_padding

ENDS = """
import atexit, threading, time, torch.distributed as dist
from graphshard.runtime.group import find_group

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
find_group(None, None)
ending = threading.Event()
atexit.register(ending.set)  # called first, as it is registered last

def late():
    ending.wait()
    time.sleep(0.001)
    print("a thread took the lock", flush=True)

threading.Thread(target=late, daemon=True).start()
"""
"""A thread that takes Python's lock once Python has begun to end, as those of Gloo may."""


def test_threads_may_take_the_lock_while_python_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=True
    )
    assert "took the lock" in ended.stdout, ended.stderr


SHAPES = ((8, 3), (5,), (1, 4), (7, 2, 2), (16, 1))


def operands(world_size: int, dtype: torch.dtype) -> list[Operand]:
    return [
        Operand(ParamLayout(f"p{i}", (f"p{i}",), shape, dtype, True, "shard", world_size), dtype)
        for i, shape in enumerate(SHAPES)
    ]


def full_values(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def padded_part(full: Tensor, layout: ParamLayout, rank: int) -> Tensor:
    part = torch.zeros(layout.shard_shape, dtype=full.dtype)
    without_padding(part, layout.part_shape(rank)).copy_(part_of(full, layout, rank))
    return part


def gathers(rank: int, group: Group | None = None) -> None:
    group = group or find_group(None, None)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        params = operands(group.size, dtype)
        full = full_values(0, dtype)
        parts = [padded_part(f, p.layout, rank) for f, p in zip(full, params, strict=True)]
        for below in (0, 50, 1 << 20):
            with mock.patch.dict(packing.GATHER_BELOW, gloo=below):
                gather = AllGather(group, "a.b", "forward", params)
            gathered = wait(gather(parts))
            for mine, expected in zip(gathered, full, strict=True):
                assert torch.equal(mine, expected)
            assert isinstance(gathered, Gathered)
            view = gathered[3].transpose(0, 1)
            free(gathered)
            assert [t.untyped_storage().nbytes() for t in gathered] == [0] * len(SHAPES)
            assert view.untyped_storage().nbytes() == 0


def by_the_backends_own(rank: int) -> None:
    """As in groups too large for every rank to send to every other."""
    with mock.patch("graphshard.runtime.group.MAX_RANKS", 1):
        assert find_group(None, None).pairwise is None
        gathers(rank)
        mixed_dtypes(rank)
        reduces(rank)


def many_at_once_and_in_any_order(rank: int) -> None:
    """Gathers, reduces and the user's own sends, waited for in another order than they began."""
    group = find_group(None, None)
    params = operands(group.size, torch.float32)
    each = [full_values(r, torch.float32) for r in range(group.size)]
    reduce = ReduceScatterByExchange(group, "a", "backward", params)
    expected = wait(reduce(each[rank]))
    begun = []
    for seed in range(3):
        full = full_values(seed, torch.float32)
        parts = [padded_part(f, p.layout, rank) for f, p in zip(full, params, strict=True)]
        begun.append((AllGather(group, "a", "forward", params)(parts), full))
        begun.append((reduce(each[rank]), expected))
        token = torch.zeros(2, dtype=torch.int64)
        users = dist.isend(torch.tensor([rank, seed]), (rank + 1) % group.size)
        dist.recv(token, (rank - 1) % group.size)
        assert token.tolist() == [(rank - 1) % group.size, seed]
        users.wait()
    for pending, values in begun[::-1]:
        assert all(torch.equal(a, b) for a, b in zip(wait(pending), values, strict=True))


def nobody_waits_for(rank: int) -> None:
    """What is begun and dropped holds nobody up, and lives no longer than to the next one."""
    group = find_group(None, None)
    params = operands(group.size, torch.float32)
    full = full_values(0, torch.float32)
    parts = [padded_part(f, p.layout, rank) for f, p in zip(full, params, strict=True)]
    gather = AllGather(group, "a", "forward", params)
    for _ in range(3):
        pending = gather(parts)
        kept = weakref.ref(pending.buffers[0])
        del pending
        gathered = wait(gather(parts))
        assert all(torch.equal(a, b) for a, b in zip(gathered, full, strict=True))
        assert kept() is None


def dropped_works_are_kept(rank: int) -> None:
    """A thread of Gloo's is not the last to refer to a tensor, whoever drops the rest and when."""
    with mock.patch("graphshard.runtime.group.MAX_RANKS", 1):
        group = find_group(None, None)
    params = operands(group.size, torch.float32)
    full = full_values(0, torch.float32)
    parts = [padded_part(f, p.layout, rank) for f, p in zip(full, params, strict=True)]
    gather = AllGather(group, "a", "forward", params)
    meeting = dist.new_group()
    if rank == 0:
        dist.barrier(meeting)  # so the works of other ranks are in flight
    pending = gather(parts)
    buffer, works = weakref.ref(pending.buffers[0]), list(pending.works)
    assert len(works) == 1
    del pending
    assert gloo._kept[-1] == works[0]
    if rank != 0:
        assert not works[0].is_completed()
        dist.barrier(meeting)
    wait(gather(parts))
    while not all(work.is_completed() for work in works):
        time.sleep(0.001)  # `wait` may return a moment before that
    last = gather(parts)
    assert gloo._kept[-1] == last.works[0]
    assert works[0] not in gloo._kept
    wait(last)
    works.clear()
    while buffer() is not None:
        time.sleep(0.001)


def gathers_into_place(rank: int) -> None:
    group = find_group(None, None)
    for check in (False, True):
        group.check = check
        params = operands(group.size, torch.float32)
        full = full_values(0, torch.float32)
        buffers = [torch.zeros(p.layout.gathered_shape) for p in params]
        parts = []
        for buffer, value, param in zip(buffers, full, params, strict=True):
            rows = param.layout.shard_shape[0]
            parts.append(buffer.narrow(0, rank * rows, rows))
            parts[-1].copy_(padded_part(value, param.layout, rank))
        for below in (0, 50):
            with mock.patch.dict(packing.GATHER_BELOW, gloo=below):
                gathered = wait(AllGatherInPlace(group, "", "forward", params)(parts))
            for mine, buffer, value in zip(gathered, buffers, full, strict=True):
                assert mine.data_ptr() == buffer.data_ptr()
                assert torch.equal(mine, value)


def within_smaller_groups(rank: int) -> None:
    """Ranks 0 and 1 gather, and then 1 and 2, by their ranks in the group."""
    for members in ((0, 1), (1, 2)):
        made = dist.new_group(members)
        if rank in members:
            group = find_group(DeviceMesh.from_group(made, "cpu"), None)
            assert group.size == 2
            gathers(group.rank, group)


def mixed_dtypes(rank: int) -> None:
    group = find_group(None, None)
    params = operands(group.size, torch.float32)
    params[1] = replace(params[1], dtype=torch.bfloat16)
    params[4] = replace(params[4], dtype=torch.bfloat16)
    full = [f.to(p.dtype) for f, p in zip(full_values(0, torch.float32), params, strict=True)]
    parts = [padded_part(f, p.layout, rank) for f, p in zip(full, params, strict=True)]
    gather = AllGather(group, "", "forward", params)
    assert len(gather.launches) == 2
    for mine, expected in zip(wait(gather(parts)), full, strict=True):
        assert mine.dtype == expected.dtype
        assert torch.equal(mine, expected)


def poisons(rank: int) -> None:
    group = find_group(None, None)
    group.check = True
    params = operands(group.size, torch.float32)
    full = full_values(0, torch.float32)
    parts = [padded_part(f, p.layout, rank) for f, p in zip(full, params, strict=True)]
    gathered = wait(AllGather(group, "", "forward", params)(parts))
    view = gathered[0][2:]
    free(gathered)
    assert view.isnan().all()
    whole = [Operand(replace(p.layout, dtype=torch.int64), torch.int64) for p in params]
    gathered = wait(AllGather(group, "", "forward", whole)([p.long() for p in parts]))
    free(gathered)
    assert (gathered[1] == torch.iinfo(torch.int64).max).all()


def reduces(rank: int) -> None:
    group = find_group(None, None)
    kinds: list[type[BoundCollective]] = [ReduceScatterByReduce, ReduceScatterByExchange]
    if group.size == 2:
        kinds.append(ReduceScatterByPairExchange)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float64, 1e-12)):
        params = operands(group.size, dtype)
        each = [full_values(r, dtype) for r in range(group.size)]
        results = []
        for below in (0, 100, 1 << 20):
            for kind in kinds:
                with mock.patch.dict(packing.REDUCE_BELOW, gloo=below):
                    reduce = kind(group, "a", "backward", params)
                # Gradients come transposed and expanded, too.
                mine = [g.clone() for g in each[rank]]
                mine[0] = mine[0].t().contiguous().t()
                kept = [g.clone() for g in mine]
                results.append(wait(reduce(mine)))
                assert all(torch.equal(a, b) for a, b in zip(mine, kept, strict=True))
        for index, param in enumerate(params):
            mean = torch.stack([e[index].double() for e in each]).mean(0).to(dtype)
            expected = padded_part(mean, param.layout, rank)
            for result in results:
                torch.testing.assert_close(result[index], expected, rtol=tolerance, atol=tolerance)
                if group.size == 2:
                    assert torch.equal(result[index], results[0][index])


def averages_replicas(rank: int) -> None:
    group = find_group(None, None)
    layout = ParamLayout("s", ("s",), (), torch.float32, True, "replicate", group.size)
    wide = replace(layout, fqn="w", shape=(3, 2))
    reduce = AllReduce(
        group, "", "backward", [Operand(layout, torch.float32), Operand(wide, torch.float32)]
    )
    grads = [torch.tensor(float(rank)), torch.full((2, 3), float(rank)).t()]
    scalar, matrix = wait(reduce(grads))
    mean = (group.size - 1) / 2
    assert scalar.shape == ()
    assert scalar == mean
    assert torch.equal(matrix, torch.full((3, 2), mean))
    assert grads[0] == rank  # gradients may be shared: all_reduce must not write them
    for dtype in (torch.float32, torch.float16):  # which is divided before and after
        own = [
            Operand(replace(wide, shape=(n, 2)), dtype, own=n > 1) for n in (1, 2, 1, 3)
        ]  # two of them are copied together
        grads = [torch.full((n, 2), float(rank), dtype=dtype) for n in (1, 2, 1, 3)]
        averages = wait(AllReduce(group, "", "backward", own)(grads))
        for operand, grad, average in zip(own, grads, averages, strict=True):
            assert torch.equal(average, torch.full_like(average, mean))
            assert (average.data_ptr() == grad.data_ptr()) == operand.own
            assert operand.own or (grad == rank).all()


def a_failing_launch(rank: int) -> None:
    """The error names op, unit and phase."""
    group = find_group(None, None)
    group.pairwise = None
    params = operands(group.size, torch.float32)
    with mock.patch.dict(packing.GATHER_BELOW, gloo=0):
        gather = AllGather(group, "blocks.1", "backward", params)
    full = full_values(0, torch.float32)
    parts = [padded_part(f, p.layout, rank) for f, p in zip(full, params, strict=True)]
    gather.options = torch.distributed.distributed_c10d.AllgatherOptions()
    parts[0] = parts[0].to(torch.float64)
    with pytest.raises(CollectiveError) as caught:
        wait(gather(parts))
    told = "all_gather of unit blocks.1 in backward could not be started on rank "
    assert str(caught.value).startswith(told)
    assert "died" not in str(caught.value)


ON_TWO = [gathers, *checks_of(globals(), but=[within_smaller_groups, a_failing_launch])]

test_on_two_ranks = on_ranks([*ON_TWO, a_failing_launch], 2)
test_on_three_ranks = on_ranks([*ON_TWO, within_smaller_groups], 3)


def test_a_single_rank_gathers_without_copying() -> None:
    group = find_group(None, "cpu")
    params = operands(1, torch.float32)
    full = full_values(0, torch.float32)
    gathered = wait(LocalGather(group, "", "forward", params)(full))
    assert [t.data_ptr() for t in gathered] == [t.data_ptr() for t in full]
    free(gathered)
    assert torch.equal(full[0], full_values(0, torch.float32)[0])


def test_a_single_ranks_gradient_shares_nothing() -> None:
    group = find_group(None, "cpu")
    grad = torch.ones(3, 2).t()
    (result,) = wait(LocalReduce("reduce_scatter", group, "", "backward")([grad]))
    assert torch.equal(result, grad)
    assert result.is_contiguous()
    assert result.data_ptr() != grad.data_ptr()


@pytest.mark.parametrize("ranks", [8, 512])
def test_packing_goes_by_what_each_message_carries(ranks: int) -> None:
    """A gradient of 32 KiB a rank is small, and one of 128 KiB a rank is not, on any number."""
    group = Group(None, 0, ranks, torch.device("cpu"), backend="nccl")
    rows = (8192, 8192, 32768)  # of 4 bytes, on each rank
    layouts = [
        ParamLayout(f"p{i}", (f"p{i}",), (ranks * n,), torch.float32, True, "shard", ranks)
        for i, n in enumerate(rows)
    ]
    given = [Operand(layout, torch.float32) for layout in layouts]
    for kind in (AllGather, ReduceScatterByReduce):
        (messages,) = kind(group, "", "backward", given).launches
        assert [message.indices for message in messages] == [(2,), (0, 1)]
