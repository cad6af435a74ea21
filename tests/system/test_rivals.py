"""The comparison with other systems: what it counts, its tables, and the script on two ranks."""

from __future__ import annotations

import re
from math import prod

import pytest
import torch
import torch.distributed as dist
from example_runs import TORCHRUN, run, watched
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from examples.benchmarks.live_bytes import most_allocated
from examples.benchmarks.rival_models import TINY, Data, expected_losses, made
from examples.benchmarks.rival_systems import FSDP2, OURS, SYSTEMS, Setting, Trained
from examples.benchmarks.rival_table import bars, ratios, table
from examples.benchmarks.rivals import Result, in_turn
from examples.benchmarks.step_watch import StepWatch, traffic
from graphshard.program import ops

CPU = torch.device("cpu")


# -- what is counted -------------------------------------------------------------------------------


def storages_of_sharding(rank: int) -> None:
    shard = torch.ones(256)
    watch = StepWatch(2)
    watch.add(shard)
    with watch:
        whole = torch.empty(512)
        dist.all_gather_into_tensor(whole, shard)
        activation = whole * 2
        tied = activation * 3
        gradient = activation * 4 + tied  # of which the product is dropped in between
        whole.untyped_storage().resize_(0)
        sent = gradient.clone()
        del tied, gradient
        reduced = torch.empty(256)
        dist.reduce_scatter_tensor(reduced, sent)
        shard.grad = reduced
        watch.end_of_backward([shard])
        torch.empty(10_000).clone()  # the optimizer's part
    kib = 2 * 1024
    # The whole parameter, both addends of its gradient, and their sum; no activation.
    assert watch.transient == 4 * kib
    assert watch.peak > 10_000 * 4
    assert watch.calls == {"all_gather": 1, "reduce_scatter": 1}
    assert watch.moved == 2 * 1024
    with watch:
        watch.end_of_backward([shard])
    assert (watch.transient, watch.moved) == (0, 0)


def bytes_moved_are_those_of_the_program(rank: int) -> None:
    data = Data(TINY, 2, 1, CPU)
    setting = Setting(init_device_mesh("cpu", (2,)), CPU, TINY.blocks, None, data.batch(0, rank))
    moved = {}
    for system in SYSTEMS:
        if system.name in (OURS, FSDP2):
            trained = system.build(setting, made(TINY, CPU))
            watch = watched(trained, setting)
            moved[system.name] = watch.moved
            assert 0 < watch.transient < watch.peak
            if system.name == FSDP2:
                assert watch.calls == {"all_gather": 5, "reduce_scatter": 3}
            else:
                assert trained.collectives == 8
                tickets = 3 * 24  # what ranks tell each other before each half, and after backward
                assert watch.moved == tickets + shard_bytes(trained)
    assert moved[OURS] <= moved[FSDP2], "biases are not gathered for backward"


def shard_bytes(trained: Trained) -> int:
    """What one of two ranks gets from the other: a shard of each operand, in float32."""
    layouts = trained.module.plan.layouts
    return sum(
        4 * prod(layouts[name].shard_shape)
        for node in trained.program.nodes()
        if ops.is_collective(node)
        for name in node.kwargs["params"]
    )


def losses_are_those_expected(rank: int) -> None:
    data = Data(TINY, 2, 1, CPU)
    expected = expected_losses(data, 3, rank, torch.bfloat16)
    assert expected[0] != expected_losses(data, 1, rank, None)[0]
    setting = Setting(
        init_device_mesh("cpu", (2,)), CPU, TINY.blocks, torch.bfloat16, data.batch(0, rank)
    )
    for system in SYSTEMS[:2]:
        trained = system.build(setting, made(TINY, CPU))
        losses = [trained.step(data.batch(step, rank)).item() for step in range(3)]
        assert losses == pytest.approx(expected, abs=2e-2)


CHECKS = [storages_of_sharding, bytes_moved_are_those_of_the_program, losses_are_those_expected]

test_on_two_ranks = pytest.mark.slow(on_ranks(CHECKS, 2, timeout=300, group_timeout=200))


def test_memory_inside_of_compiled_code_counts() -> None:
    mib = 1 << 20

    def work() -> Tensor:
        kept = torch.empty(mib)
        torch.empty(2 * mib)
        return kept.add(1)

    assert 3 * 4 * mib <= most_allocated(work) < 3.1 * 4 * mib


FULL, PART = torch.empty(64), torch.empty(16)


@pytest.mark.parametrize(
    ("name", "args", "kind", "moved"),
    [
        ("_allgather_base_", (FULL, PART, None), "all_gather", 192),
        ("allgather_into_tensor_coalesced_", ([FULL, FULL], [PART, PART]), "all_gather", 384),
        ("all_gather_into_tensor", (PART, 4, "0"), "all_gather", 192),
        ("_reduce_scatter_base_", (PART, FULL, None), "reduce_scatter", 192),
        ("reduce_scatter_tensor", (FULL, "avg", 4, "0"), "reduce_scatter", 192),
        ("allreduce_", ([FULL], None), "all_reduce", 384),
        ("alltoall_base_", (FULL, FULL, None), "all_to_all", 192),
        ("send", ([PART], None, 1, 0), "send", 64),
        ("recv_", ([PART], None, 1, 0), "", 0),
        ("wait_tensor", (PART,), "", 0),
    ],
)
def test_bytes_that_four_ranks_must_move(name, args, kind, moved) -> None:
    assert traffic(name, args, 4) == (kind, moved)


# -- what is said of it ----------------------------------------------------------------------------


def test_every_system_comes_as_often_at_every_place() -> None:
    rounds = [in_turn("abc", index) for index in range(6)]
    for places in zip(*rounds, strict=True):
        assert sorted(places) == sorted("aabbcc")
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)


def found(system: str, step: float, peak: int, transient: int | None = 10) -> Result:
    times = [step, 1.1 * step, step]
    return Result(system, transient is None, "", 1.0, times, [], peak, transient, 5, 2**20, 0.0)


def test_ratios_are_paired() -> None:
    assert ratios([1.0, 4.0, 9.0], [2.0, 4.0, 6.0]) == (1.0, 0.75, 1.25)
    assert ratios([1.0], [2.0]) == (0.5, 0.5, 0.5)


def test_a_table_has_a_row_or_a_reason_for_every_system() -> None:
    results = [found(OURS, 0.1, 2**20), found(FSDP2, 0.2, 2**20, 20), Result("FSDP1", False, "no")]
    text = table(results)
    assert re.search(r"^FSDP2 +1\.0 s +200\.0 ms +0\.500 \[0\.50 0\.50\]", text, re.MULTILINE)
    assert "not here: FSDP1: no" in text
    said = list(bars(results))
    assert [line.rsplit(maxsplit=1)[1] for line in said] == ["met", "met", "met"]
    worse = list(bars([found(OURS, 0.19, 2**21), found(FSDP2, 0.2, 2**20)]))
    assert [line.rsplit(maxsplit=1)[1] for line in worse] == ["MISSED"] * 3


# -- the script ------------------------------------------------------------------------------------

SCRIPT = "examples/benchmarks/rivals.py"
SHORT = "--models tiny --pairs 2 --warmup 1"


@pytest.mark.slow
def test_the_script_compares_systems_that_do_not_compile() -> None:
    output = run(f"{TORCHRUN} {SCRIPT} {SHORT} --dtypes fp32 --eager --errors")
    for name in (OURS, FSDP2, "FSDP1", "DDP", "graphshard overlap"):
        row = re.search(rf"^{name} +[\d.]+ s .*?([\d.]+e[+-]\d+)$", output, re.MULTILINE)
        assert row is not None, output
        assert float(row[1]) < 1e-4, "the losses are a single process's"
    assert re.search(r"not here: DeepSpeed ZeRO-3: .*GPU", output)
    assert re.search(r"tiny fp32 +step, of FSDP2's .*(met|MISSED)", output)


@pytest.mark.slow
def test_the_script_compares_systems_that_compile() -> None:
    systems = "--dtypes fp32 --systems graphshard compile Simple --errors"
    output = run(f"{TORCHRUN} {SCRIPT} {SHORT} {systems}", timeout=540.0)
    assert output.count("\nSimpleFSDP ") == 1, output
    assert output.count("\nFSDP2 compile whole ") == 1, output
    assert output.count("\nFSDP2 compile blocks ") == 1, output


@pytest.mark.slow
def test_memory_of_one_rank_of_eight() -> None:
    output = run(f"{SCRIPT} --fake 8 --models tiny")
    rows = re.findall(r"^(\S.*?) +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    assert [name for name, *_ in rows][:2] == [OURS, FSDP2]
    assert "transient, of FSDP2's" in output


@pytest.mark.slow
def test_no_schedule_by_cost_is_slower_or_larger() -> None:
    output = run("examples/benchmarks/schedules.py --models gpt2 --worlds 8 --hardware h100-sxm")
    assert re.search(r"^gpt2 +8 +h100-sxm +[\d.]+ +[\d.]+ +[\d.]+ +-", output, re.MULTILINE), output
    assert "never slower, never larger" in output
