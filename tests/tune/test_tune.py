"""The search: as good as the best of a grid, within the budget, by bounds that hold."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn
from tuning import OPEN, SLOW, gpt, simulator_of

import graphshard
from graphshard import AutoPolicy, BlockPolicy, MixedPrecision, SizePolicy
from graphshard.format import human_bytes
from graphshard.hardware.hardware import Hardware
from graphshard.policy.tree import ModuleTree
from graphshard.tune.bounds import Bounds
from graphshard.tune.reasons import advice, reasons, settle
from graphshard.tune.search import Search, largest_room
from graphshard.tune.simulator import Simulator
from graphshard.tune.space import Blocks, Candidate, CandidateGroup
from graphshard.tune.tuning import EQUAL, CandidateResult


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    """Of a small GPT; what it has simulated is shared by the tests."""
    few = replace(OPEN, units=BlockPolicy({"Block"}), forward_prefetch=1)
    return simulator_of(*gpt(), few)


@pytest.fixture(scope="module")
def grid(simulator: Simulator) -> list[tuple[float, int]]:
    """Seconds and peak of every policy of a grid, no bound asked."""
    shardings = [
        *({"strategy": "FULL_SHARD", "reshard_root": root} for root in (False, True)),
        *({"strategy": s} for s in ("SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD")),
    ]
    found = []
    for sharding, backward, recompute in product(
        shardings, ("pre", "post", None), (None, "selective", {"Block"})
    ):
        policy = BlockPolicy(
            {"Block"},
            backward_prefetch=backward,
            forward_prefetch=1,
            recompute=recompute,
            **sharding,
        )
        plan = simulator.plan_of(policy)
        estimate = simulator.estimate(plan, simulator.captures.of(plan))
        found.append((estimate.step_seconds, estimate.peak_bytes))
    return found


def results(simulator: Simulator, group: CandidateGroup) -> list[CandidateResult]:
    found = map(simulator.result, simulator.space.candidates(group))
    return [result for result in found if result is not None]


def best_of(grid: list[tuple[float, int]], budget: int) -> float:
    return min((seconds for seconds, peak in grid if peak <= budget), default=float("inf"))


ROOMY = Hardware.load("h100-sxm").with_(
    gpus_per_node=2,
    overhead={"context": 0, "communicator": 64 << 20, "workspace": 0, "driver": 0},
)


def of_groups(machine: Hardware, **fixed) -> AutoPolicy:
    """Gathers within a node in backward, which needs a communicator more than without."""
    options = {"reshard_after_forward": 2, "offload": None, "recompute": None, "schedule": "fsdp"}
    return AutoPolicy(hardware=machine, units=BlockPolicy({"Block"}), **{**options, **fixed})


@pytest.mark.slow
def test_what_fits_fits_with_all_communicators_of_the_policy():
    model, inputs = gpt()

    def tune(auto: AutoPolicy):
        return auto.tune(model, example_inputs=inputs, world_size=4)

    free = tune(of_groups(ROOMY)).estimate
    assert free.overheads.communicators == 2 * (64 << 20)
    needed = free.device_bytes
    tight = ROOMY.with_(memory_bytes=needed - (32 << 20))  # enough for one communicator
    with pytest.raises(graphshard.PolicyError, match="nothing fits in"):
        tune(of_groups(tight))
    open_to_both = tune(of_groups(tight, reshard_after_forward="auto"))
    assert open_to_both.estimate.fits
    assert open_to_both.estimate.overheads.communicators == 64 << 20
    just = tune(of_groups(ROOMY.with_(memory_bytes=needed)))
    assert just.estimate.fits
    assert just.bytes == just.estimate.reserved_bytes + (64 << 20) <= just.memory_budget
    assert "and 64.00 MiB for further communicators or workspaces" in str(just)


def test_a_budget_of_ones_own_is_what_torch_reserves():
    model, inputs = gpt()
    auto = replace(of_groups(ROOMY), memory_budget="1GiB")
    tuning = auto.tune(model, example_inputs=inputs, world_size=4)
    assert tuning.bytes == tuning.estimate.reserved_bytes
    assert "communicators" not in str(tuning)


@pytest.mark.slow
def test_it_is_as_good_as_the_best_of_a_grid(simulator, grid):
    """And more memory is never slower."""
    peaks = [peak for _, peak in grid]
    before = float("inf")
    for part in (0.0, 0.3, 1.0):
        budget = int(min(peaks) + part * (max(peaks) - min(peaks)))
        winner = Search(simulator, budget).run()
        assert winner is not None
        assert winner.peak <= budget
        assert winner.seconds <= best_of(grid, budget) * (1 + EQUAL)
        assert winner.seconds <= before * (1 + EQUAL)
        before = winner.seconds


@pytest.mark.slow
def test_overlap_is_searched_together_with_recompute_budgets():
    fixed = {"units": BlockPolicy({"Block"}), "strategy": "FULL_SHARD", "reshard_root": False}
    fixed |= {"schedule": "auto", "reshard_after_forward": None}
    simulator = simulator_of(*gpt(), replace(OPEN, **fixed))
    group = next(iter(simulator.space.groups()))
    whole = simulator.result(Candidate(replace(group, recompute=simulator.space.recompute_all)))
    none = simulator.result(Candidate(group))
    assert whole is not None
    assert none is not None
    low, high = whole.step_bytes, none.step_bytes
    budgets = simulator.space.with_budgets(group)
    tried = [
        simulator.result(Candidate(replace(budgets, budget=budget), "pre", 1, schedule))
        for budget in (low + (high - low) * step // 4 for step in (1, 2, 3))
        for schedule in ("overlap", "fsdp")
    ]
    found = sorted((o for o in tried if o is not None), key=lambda result: result.peak)
    budget = found[len(found) // 2].peak
    search = Search(simulator, budget)
    winner = search.run()
    assert winner is not None
    assert winner.peak <= budget
    best = min(result.seconds for result in found if result.peak <= budget)
    assert winner.seconds <= best * (1 + EQUAL)
    budgets = [c for c in search.results if "budget" in (c.group.recompute or ())]
    plain = {(c.backward, c.forward) for c in budgets if c.schedule == "fsdp"}
    assert {("pre", 0), ("pre", 1), ("pre", 2)} <= plain
    overlap = [c for c in budgets if c.schedule == "overlap"]
    assert 0 < len(overlap) <= 6, "FSDP's order, which is quick to simulate, finds the budget"


def test_on_a_host_there_is_nowhere_to_offload_to(simulator):
    space = replace(simulator.space, auto=AutoPolicy(cuda_graph=True))
    assert {group.offload is None for group in space.groups()} == {True, False}
    candidate = Candidate(next(iter(space.groups())))
    assert space.policy(candidate).cuda_graph
    on_host = replace(space, hardware=Hardware.load("cpu-gloo"))
    assert {group.offload for group in on_host.groups()} == {None}


def test_bounds_hold_and_do_prune(simulator, grid):
    bounds = Bounds(simulator)
    for group in simulator.space.groups():
        bound = bounds.of(group)
        for result in results(simulator, group):
            assert bound.seconds <= result.seconds * (1 + 1e-9)
            assert bound.bytes <= result.peak
    search = Search(simulator, int(1.01 * min(peak for _, peak in grid)))
    search.run()
    assert search.too_large
    quick = replace(simulator.space, hardware=Hardware.load("h100-sxm"))
    roomy = Search(Simulator(simulator.captures, quick), 1 << 40)
    roomy.run()
    assert roomy.too_slow


@pytest.mark.parametrize("ranks", [8, pytest.param(2, marks=pytest.mark.slow)])
def test_bounds_hold_for_each_schedule(ranks):
    """For all strategies and ways to issue gathers, where the network slows compute down."""
    hardware = SLOW.with_(contention=0.3, launch_floor=1e-6)
    fields = {"units": BlockPolicy({"Block"}), "schedule": "auto", "recompute": None}
    space = replace(OPEN, hardware=hardware, **fields)
    simulator = simulator_of(*gpt(layers=1), space, ranks=ranks)
    bounds = Bounds(simulator)
    tried, closest = set(), 0.0
    for group in simulator.space.groups():
        bound = bounds.of(group)
        for result in results(simulator, group):
            schedule = result.candidate.schedule
            least = bound.of_schedule(schedule).seconds
            assert bound.seconds <= least <= result.seconds * (1 + 1e-9), result.candidate
            tried.add((group.sharding.strategy, schedule))
            closest = max(closest, least / result.seconds)
    assert len(tried) == 8
    assert closest > 0.85, "bounds that are far off leave nothing out"


def test_contention_makes_a_bound_tighter():
    """While the network is busy, compute gets on at what contention leaves of its speed."""
    seconds = []
    for contention in (0.0, 0.3):
        fields = {"units": BlockPolicy({"Block"}), "strategy": "SHARD_GRAD_OP"}
        auto = replace(OPEN, hardware=SLOW.with_(contention=contention), **fields)
        simulator = simulator_of(*gpt(layers=1), auto)
        seconds.append(Bounds(simulator).of(simulator.space.groups()[0]).seconds)
    assert seconds[1] > 1.01 * seconds[0]


def test_a_budget_may_hold_less_than_all_recomputed(simulator, grid):
    """A block that is recomputed is held all at once, so no bound of its bytes is asked."""
    least = min(peak for _, peak in grid)
    winner = Search(simulator, int(0.9 * least)).run()
    assert winner is not None
    assert winner.peak <= 0.9 * least
    assert winner.candidate.group.budget is not None


def test_a_part_is_recomputed_where_that_is_enough(simulator):
    def smallest(recompute):
        groups = [g for g in simulator.space.groups() if g.recompute == recompute]
        found = [o for group in groups for o in results(simulator, group)]
        return min(found, key=lambda result: result.peak)

    none, whole = smallest(None), smallest(simulator.space.recompute_all)
    search = Search(simulator, (none.peak + whole.peak) // 2)
    winner = search.run()
    assert winner is not None
    policy = simulator.space.policy(winner.candidate)
    assert policy.recompute is not None
    assert winner.seconds < whole.seconds
    rungs = [o for o in search.results.values() if o.candidate.group.budget]
    assert rungs
    assert all(o.step_bytes <= o.candidate.group.budget for o in rungs)


def test_the_frontier_and_the_reasons(simulator, grid):
    budget = sorted(peak for _, peak in grid)[len(grid) // 2]
    search = Search(simulator, budget)
    winner = search.run()
    assert winner is not None
    why = reasons(search, winner)
    assert any(f" of {human_bytes(budget)}" in w for w in why.values())
    assert any("slower" in w for w in why.values())
    assert any(name.startswith("strategy=") for name in why)
    assert any(name.startswith("recompute=") for name in why)


def test_a_better_neighbour_becomes_the_winner(simulator):
    """From the slowest candidate: step by step, and no reason left says that another is faster."""
    search = Search(simulator, 1 << 40)
    search.find_bounds()
    slowest = max(map(simulator.result, map(Candidate, search.bounds)), key=lambda o: o.seconds)
    search.results[slowest.candidate] = slowest
    winner, why = settle(search, slowest)
    assert winner.seconds < slowest.seconds
    assert winner.seconds <= min(o.seconds for o in search.results.values()) * (1 + EQUAL)
    assert why
    assert not any("faster" in text for text in why.values())


def test_no_recomputation_is_simulated_beside_a_budget_that_wins(simulator):
    """It is simpler, so it must not lose to a budget that had nothing to choose."""
    search = Search(simulator, 1 << 40)
    search.find_bounds()
    plain = next(c for c in map(Candidate, search.bounds) if c.group.recompute is None)
    group = replace(simulator.space.with_budgets(plain.group), budget=1 << 40)
    winner = search.result(replace(plain, group=group))
    assert reasons(search, winner)["recompute=None"] != "makes no difference"
    assert plain in search.results
    assert search.best([winner, search.results[plain]]).candidate == plain


@pytest.mark.slow
def test_where_nothing_fits_more_ranks_are_counted(simulator, grid):
    search = Search(simulator, int(0.75 * min(peak for _, peak in grid)))
    assert search.run() is None
    assert "ranks" in advice(search)


def test_units_of_a_model():
    blocks = Blocks(ModuleTree(gpt(layers=3)[0]))
    assert blocks.fqns == ("blocks.0", "blocks.1", "blocks.2")
    assert blocks.classes == ("Block",)
    assert blocks.parts == ("Attention",)
    choices = blocks.unit_choices()
    assert choices[0] == BlockPolicy({"Block"})
    chosen = [tuple(choice.select(blocks.tree)) for choice in choices]
    assert len(set(chosen)) == len(chosen)
    alone = Blocks(ModuleTree(nn.Linear(3, 3)))
    assert alone.fqns == ()
    assert alone.unit_choices() == [SizePolicy(12)]


class Scale(nn.Linear):
    def forward(self, x):
        return x * self.weight


class Strict(nn.Linear):
    def forward(self, x):
        if x.dtype != self.weight.dtype:
            raise TypeError("only where units cast")
        return super().forward(x)


class Casts(nn.Module):
    """What its second part is given is float32, and so is what that returns, if it is no unit."""

    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([kind(8, 8) for _ in range(3)])

    def forward(self, x):
        return self.parts[2](self.parts[1](self.parts[0](x).float())).sum()


@pytest.mark.parametrize(
    ("kind", "choices", "captured"),
    [(Scale, [(), (0,), (2,), (1,), (0, 1, 2)], 4), (Strict, [(0, 1, 2), (1, 2)], 2)],
)
def test_units_share_a_captured_program_where_it_is_the_same(kind, choices, captured):
    x = torch.zeros(8, 8)
    precision = MixedPrecision(torch.bfloat16)
    simulator = simulator_of(Casts(kind), (x,), replace(OPEN, mixed_precision=precision), ranks=2)
    for chosen in choices:
        modules = {f"parts.{index}": {} for index in chosen}
        policy = graphshard.ModulePolicy(modules, mixed_precision=precision)
        plan = simulator.plan_of(policy)
        made = graphshard.plan(Casts(kind), policy, world_size=2, example_inputs=(x,))
        own = simulator.estimate(plan, simulator.captures.of(plan))
        assert str(own.program) == str(made.program)
    assert simulator.captures.count == captured


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_is_as_good_as_all_there_is():
    simulator = simulator_of(*gpt(), OPEN, ranks=8)
    everything = [o for group in simulator.space.groups() for o in results(simulator, group)]
    peaks = [result.peak for result in everything]
    for part in (0.0, 0.05, 0.2, 0.5, 1.0):
        budget = int(min(peaks) + part * (max(peaks) - min(peaks)))
        winner = Search(simulator, budget).run()
        assert winner is not None
        assert winner.peak <= budget
        best = min(result.seconds for result in everything if result.peak <= budget)
        assert winner.seconds <= best * (1 + EQUAL)


MIB = 1 << 20
MEMORY = 1000 * MIB


@pytest.mark.parametrize("first", [1, 500 * MIB, 950 * MIB, 2 * MEMORY])
def test_the_largest_budget_is_found_from_both_sides(first):
    """Steps keep within 600 MiB at least, and reserve 100 MiB more than their budget."""
    tried = []

    def left(room: int) -> int | None:
        tried.append(room)
        return None if room < 600 * MIB else MEMORY - (room + 100 * MIB)

    assert largest_room(left, first, MEMORY, 12) == 900 * MIB
    assert len(tried) == len(set(tried)) <= 12


def test_where_no_budget_fits_there_is_none():
    assert largest_room(lambda room: -room, 500, 1000, 12) is None
    assert largest_room(lambda room: None, 500, 1000, 12) is None


@pytest.mark.parametrize(
    ("layers", "budget", "draws"),
    [
        (3, "60MiB", 2),
        pytest.param(2, "1GiB", 8, marks=pytest.mark.slow),
        pytest.param(3, "60MiB", 8, marks=pytest.mark.slow),
        pytest.param(12, "40MiB", 8, marks=pytest.mark.slow),
    ],
)
def test_what_is_said_of_a_policy_is_what_simulate_says(layers, budget, draws):
    """To the byte, for policies drawn from all that were tried and shown."""
    model, inputs = gpt(layers=layers, width=64)
    auto = AutoPolicy(
        budget, hardware=SLOW, units=BlockPolicy({"Block"}), offload=None, schedule="fsdp"
    )
    tuning = auto.tune(model, example_inputs=inputs, world_size=4)
    drawn = random.Random(0).sample(tuning.tried, min(draws, len(tuning.tried)))
    for entry in [*drawn, tuning.frontier[0], tuning.frontier[-1]]:
        plan = graphshard.plan(
            model, entry.policy, world_size=4, example_inputs=inputs, device="cuda"
        )
        alone = graphshard.simulate(plan, hardware=SLOW)
        assert entry.bytes == alone.reserved_bytes, entry.policy
        assert entry.seconds == alone.step_seconds, entry.policy
    assert tuning.policy == tuning.frontier[0].policy


def test_where_ranks_run_different_programs_none_is_ordered_by_cost():
    for unused, schedules in ((False, ("fsdp", "overlap")), (True, ("fsdp",))):
        auto = AutoPolicy(hardware="h100-sxm", gather_unused=unused)
        assert simulator_of(*gpt(layers=1), auto).space.schedules == schedules
