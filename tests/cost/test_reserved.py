"""Reserved bytes of a step: the requests, their replay, what FSDP2 would do, and what is said."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

import graphshard
from examples.gpt import GPT, Block, GPTConfig
from graphshard import BlockPolicy, MixedPrecision
from graphshard.cli.main import main
from graphshard.cost.allocations import (
    GATHERS,
    REDUCES,
    Event,
    Request,
    StepRequests,
    fsdp2_lives,
    lives_of,
    requests_of,
)
from graphshard.cost.caching_allocator import EXPANDABLE, MIB
from graphshard.cost.estimate import Estimate
from graphshard.cost.reserved import CONTEXT, GRAPHS, reserved_memory, usable_bytes
from graphshard.hardware.hardware import Hardware
from graphshard.program import ops
from graphshard.program.program import COMPUTE
from graphshard.program.storages import storages_of

GIB = 1 << 30
BF16 = MixedPrecision(torch.bfloat16, torch.float32)


@cache
def estimate(*mesh: int, hardware: str = "h100-sxm", **fields) -> Estimate:
    """The estimate of a GPT of two blocks, 512 wide, so that most of its tensors are large."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=2048, layers=2, heads=4, width=512))
        tokens = torch.zeros(8, 256, dtype=torch.int64)
    return graphshard.simulate(
        model,
        policy=BlockPolicy({Block}, **fields),
        hardware=hardware,
        mesh_shape=mesh or (8,),
        example_inputs=(tokens, tokens),
    )


def under(allocator: str) -> Estimate:
    """The estimate with these settings of the allocator."""
    return replace(estimate(), allocator=allocator)


def live(requests: StepRequests, workspaces: int = 0) -> int:
    """The most bytes that the requests of a step ask for at once, its update included."""
    now = most = sum(r.size for r in (*requests.held, *requests.states)) + workspaces
    sizes = {}
    for event in requests.events:
        if event.new is None:
            now -= sizes.pop(event.key)
        else:
            sizes[event.key] = event.new.size
            now += event.new.size
        most = max(most, now)
    return max(most, now + sum(r.size for r in requests.temporary))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mixed_precision": BF16},
        {"recompute": "units"},
        {"strategy": "SHARD_OPTIMIZER"},
        {"strategy": "NO_SHARD"},
        {"offload": ("params", "activations")},
    ],
    ids=str,
)
def test_the_requests_ask_for_the_storages_of_the_estimate(fields):
    predicted = estimate(**fields)
    requests = requests_of(
        predicted.program,
        predicted.plan,
        predicted.optimizer,
        lives_of(predicted.program, predicted.memory.storages),
    )
    inside = max(
        [e.new.size for e in requests.events if e.new and "inside" in e.new.category] + [0]
    )
    assert predicted.peak_bytes <= live(requests) <= predicted.peak_bytes + inside
    asked = Counter(e.key for e in requests.events if e.new)
    given = Counter(e.key for e in requests.events if not e.new)
    assert max(asked.values()) == 1, "each request once"
    assert set(given) | set(requests.outliving) == set(asked)
    assert not set(given) & set(requests.outliving)


def test_reserved_bytes_are_the_tensors_and_what_the_allocator_adds():
    predicted = estimate()
    reserved = predicted.reserved
    assert reserved is not None
    usage = reserved.usage
    parts = usage.live + usage.rounding + usage.holes + usage.unused
    assert parts == sum(usage.by_stream.values()) == reserved.bytes
    assert usage.live - 2 * 32 * MIB == pytest.approx(predicted.peak_bytes, rel=1e-3)
    assert predicted.peak_bytes < reserved.allocated <= reserved.bytes
    assert set(usage.by_stream) == {f"{COMPUTE}, large", f"{COMPUTE}, small"}
    assert 2 <= reserved.steps <= 4
    assert (reserved.retries, reserved.failed) == (0, "")


def test_a_step_fits_if_all_that_the_rank_takes_does():
    predicted = estimate()
    taken = predicted.device_bytes
    overheads = predicted.overheads
    assert taken == (
        predicted.reserved_bytes + overheads.context + overheads.communicators + overheads.driver
    )
    exact = Hardware.load("h100-sxm").with_(
        memory_bytes=taken, overhead={"driver": overheads.driver, "workspace": 32 * MIB}
    )
    fitting = predicted.with_hardware(exact)
    assert fitting.fits
    assert fitting.device_bytes == taken
    least = predicted.peak_bytes + overheads.outside + overheads.driver
    tight = predicted.with_hardware(exact.with_(memory_bytes=least))
    assert not tight.fits, "the tensors fit, but not with workspaces"
    assert "DOES NOT FIT" in str(tight)
    assert "no room for " in str(tight)
    assert tight.reserved.failed
    assert tight.reserved_bytes == predicted.reserved_bytes, "what it would take"


def test_a_device_that_is_full_at_times_makes_do_with_less():
    predicted = estimate(mixed_precision=BF16)
    requests = requests_of(
        predicted.program, predicted.plan, "adamw", fsdp2_lives(predicted.program)
    )
    without = reserved_memory(requests)
    least = None
    for capacity in range(without.bytes, live(requests), -2 * MIB):
        tight = reserved_memory(requests, capacity=capacity)
        if tight.failed:
            break
        least = tight
        assert tight.bytes <= capacity
    assert least is not None
    assert least.retries > 0
    assert live(requests) <= least.bytes < without.bytes


def test_figures_of_a_hardware_file_replace_the_common_ones(tmp_path):
    own = {"context": 1, "communicator": 10, "workspace": 512, "driver": 100}
    machine = Hardware.load("a100-40gb").with_(overhead=own)
    machine.save(tmp_path / "machine.json")
    predicted = estimate().with_hardware(tmp_path / "machine.json")
    assert dict(predicted.hardware.overhead) == own
    assert predicted.overheads.outside == 11
    assert predicted.device_bytes == predicted.reserved_bytes + 111
    assert usable_bytes(machine, 2) == machine.memory_bytes - 121


def test_one_rank_has_no_communicator_and_replicas_have_two():
    assert estimate(1).overheads.communicators == 0
    assert estimate(1).overheads.context == CONTEXT
    hybrid = estimate(2, 4, strategy="HYBRID_SHARD").overheads.communicators
    assert hybrid == 2 * estimate().overheads.communicators


def test_graphs_have_a_pool_of_their_own():
    predicted = estimate(cuda_graph=True)
    streams = predicted.reserved.usage.by_stream
    assert f"{GRAPHS}, large" in streams
    assert predicted.reserved_bytes > estimate().reserved_bytes
    assert predicted.reserved_bytes < 2 * estimate().reserved_bytes


def test_fsdp2_reserves_more_since_streams_share_nothing():
    own = estimate(mixed_precision=BF16)
    fsdp2 = graphshard.simulate(own.plan, hardware="h100-sxm", runtime="fsdp2")
    streams = fsdp2.reserved.usage.by_stream
    assert {GATHERS, REDUCES} < {stream.rpartition(",")[0] for stream in streams}
    of_streams = sum(s for stream, s in streams.items() if not stream.startswith(COMPUTE))
    assert fsdp2.reserved_bytes > own.reserved_bytes
    assert of_streams >= own.plan.units[0].unsharded_bytes


def test_a_replay_by_hand():
    # 30 MiB of weights; 40 MiB live to 70; then 10 more of states lie where 40 were given back.
    def request(size: int, name: str) -> Request:
        return Request(size * MIB, COMPUTE, "at work", name)

    requests = StepRequests(
        held=(request(30, "weights"),),
        events=(
            Event(0, 0, request(40, "a")),
            Event(1, 1, request(24, "gradient")),
            Event(0, 2),
        ),
        states=(request(10, "state"),),
        temporary=(),
        outliving=(1,),
    )
    reserved = reserved_memory(requests)
    assert reserved.bytes == (30 + 40 + 24 + 40) * MIB, "`a` no longer fits in its own block"
    assert reserved.steps == 3
    assert reserved.usage.live == (30 + 40 + 24 + 10) * MIB
    assert (reserved.usage.holes, reserved.usage.unused) == (30 * MIB, 0)
    (segment,) = [s for s in reserved.usage.largest if s.free]
    assert (segment.size, segment.largest) == (40 * MIB, 30 * MIB)
    assert segment.holders == ("state of (root)",)
    full = reserved_memory(requests, capacity=134 * MIB - 1)
    # In step 2 the gradient's 24 MiB go back for `a`, and the gradient fits in `a`'s old segment.
    assert (full.bytes, full.retries, full.failed) == (110 * MIB, 1, "")
    tight = reserved_memory(requests, capacity=110 * MIB - 1)
    assert tight.failed.startswith("a of (root) in step 2: 40.00 MiB asked for")
    assert tight.bytes == reserved.bytes
    expandable = reserved_memory(requests, settings=EXPANDABLE)
    assert expandable.bytes == 120 * MIB


def test_all_of_it_is_in_the_json_and_on_the_page():
    data = json.loads(json.dumps(estimate().to_dict()))
    assert data["reserved_bytes"] == estimate().reserved_bytes == data["reserved"]["reserved_bytes"]
    assert data["device_bytes"] == estimate().device_bytes
    assert data["overheads"]["context"] == CONTEXT
    assert data["reserved"]["largest"][0]["size"] > 0
    text = str(estimate())
    assert "device     " in text
    assert "cuBLAS workspaces" in text


FACTORY = """
import torch

from examples.gpt import GPT, GPTConfig


def small():
    with torch.device("meta"):
        tokens = torch.zeros(8, 256, dtype=torch.int64)
        return GPT(GPTConfig(vocab=2048, layers=2, heads=4, width=512)), (tokens, tokens)
"""


def test_the_command_takes_the_settings_of_the_allocator(tmp_path, capsys, monkeypatch):
    (tmp_path / "reserved_factory.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    start = ["simulate", "reserved_factory:small", "--policy", "block:Block", "--world-size", "8"]
    found = {}
    for settings in ("", "expandable_segments:True", "none"):
        assert main([*start, "--hardware", "h100-sxm", "--json", "--allocator", settings]) == 0
        found[settings] = json.loads(capsys.readouterr().out)["reserved_bytes"]
    assert found[""] == estimate().reserved_bytes
    assert found["expandable_segments:True"] == under("expandable_segments:True").reserved_bytes
    assert found["none"] == estimate().peak_bytes
    assert len(set(found.values())) == 3


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_one_rank_takes_its_shards_as_they_are(strategy):
    held = storages_of(estimate(1, strategy=strategy).program).all
    assert sum(s.size for s in held if s.node.target is ops.all_gather) == 0


def test_hosts_have_no_allocator_to_reserve_anything():
    predicted = estimate(hardware="cpu-gloo")
    assert predicted.reserved is None
    assert predicted.overheads is None
    assert predicted.reserved_bytes == predicted.device_bytes == predicted.peak_bytes
    assert "reserved" not in str(predicted)
    assert usable_bytes(predicted.hardware, 3) == predicted.hardware.memory_bytes
