"""Schedulers, scalers, extra values and random states in a checkpoint."""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import error_of, run_ranks
from state_checks import assert_same, full_state
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

import graphshard
from graphshard.errors import CheckpointError
from graphshard.module.sharded_module import ShardedModule
from graphshard.state.dcp import quiet
from graphshard.state.training_state import flatten, unflatten

Schedule = Callable[[torch.optim.Optimizer], Any]


def sharded_and_optim() -> tuple[ShardedModule, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 2))
    module = graphshard.compile(model, graphshard.BlockPolicy({nn.Linear}))
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def step(module: nn.Module, optim: torch.optim.Optimizer) -> None:
    module(torch.ones(2, 3)).sum().backward()
    optim.step()
    optim.zero_grad()


class Warm:
    """A callable whose state is kept by LambdaLR."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, number: int) -> float:
        self.calls += 1
        return 1 / (1 + self.calls)


def sequential(optim: torch.optim.Optimizer) -> Any:
    first = lr_scheduler.LinearLR(optim, total_iters=2)
    second = lr_scheduler.MultiStepLR(optim, [3, 5])
    return lr_scheduler.SequentialLR(optim, [first, second], milestones=[2])


SCHEDULES: dict[str, Schedule] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "callable": lambda o: lr_scheduler.LambdaLR(o, Warm()),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "sequential": sequential,
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


def rates(schedule: Any, optim: torch.optim.Optimizer, count: int) -> list[float]:
    found = []
    for _ in range(count):
        optim.step()
        arguments = (1.0,) if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else ()
        schedule.step(*arguments)
        found.append(optim.param_groups[0]["lr"])
    return found


@pytest.fixture(scope="module")
def trained() -> tuple[ShardedModule, torch.optim.Optimizer]:
    module, optim = sharded_and_optim()
    step(module, optim)
    return module, optim


@pytest.mark.filterwarnings("ignore:To get the last learning rate")
@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_scheduler_goes_on_where_it_was(kind: str, trained: Any, tmp_path: Path) -> None:
    module, _ = trained
    optim = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = SCHEDULES[kind](optim)
    rates(schedule, optim, 3)
    module.save_checkpoint(tmp_path, optim, schedule)
    saved = copy.deepcopy(schedule.state_dict())
    expected = rates(schedule, optim, 4)
    again = torch.optim.SGD(module.parameters(), lr=0.1)
    other = SCHEDULES[kind](again)
    module.load_checkpoint(tmp_path, again, other)
    assert other.state_dict() == saved
    assert rates(other, again, 4) == expected


def test_a_scaler_goes_on_where_it_was_and_torch_reads_the_same(
    trained: Any, tmp_path: Path
) -> None:
    module, optim = trained
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0, "_growth_tracker": 3})
    cosine = SCHEDULES["cosine"](optim)
    module.save_checkpoint(tmp_path, optim, cosine, scaler, extra={"step": 7})
    fresh = torch.amp.GradScaler("cpu")
    module.load_checkpoint(tmp_path, scaler=fresh)
    assert fresh.state_dict() == scaler.state_dict()

    theirs = torch.amp.GradScaler("cpu")
    their_cosine = lr_scheduler.CosineAnnealingLR(optim, 99)
    state: dict[str, Any] = {"scaler": theirs, "scheduler": their_cosine, "extra": {"step": 0}}
    with quiet():
        checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert theirs.state_dict() == scaler.state_dict()
    assert their_cosine.state_dict() == cosine.state_dict()
    assert state["extra"] == {"step": 7}


# -- extra ----------------------------------------------------------------------------------------

ODD: dict[str, Any] = {
    "empty": {},
    "numbers": {1: "a", (2, 3): [{}]},
    "counter": Counter({"a": 2, 5: 1}),
    "nested": {"list": [1, [2.5, None]], "tensors": [torch.arange(3), {"x": torch.ones(2, 2)}, {}]},
    "tuple": (True, b"bytes", 1 + 2j, {"set"}),
    "lists": [[], [[]]],
    "none": None,
}


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


@pytest.mark.parametrize("name", ODD)
def test_plain_data_is_flattened_and_put_together_without_loss(name: str) -> None:
    flat = dict(flatten(ODD[name], ()))
    assert same(unflatten(flat), ODD[name])


class Loader:
    """An object with a state; refuses to go back."""

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.loaded = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded += 1
        if state["position"] < 0:
            raise ValueError("no such position")
        self.position = state["position"]


def test_extra_comes_back_in_place(trained: Any, tmp_path: Path) -> None:
    module, optim = trained
    buffer = torch.arange(4.0)
    module.save_checkpoint(
        tmp_path, optim, extra={**ODD, "loader": Loader(11), "buffer": buffer, "step": 3}
    )
    filled: dict[str, Any] = {}
    module.load_checkpoint(tmp_path, extra=filled)
    assert same({name: filled[name] for name in ODD}, ODD)
    assert filled["loader"] == {"position": 11}
    target, loader = torch.zeros(4), Loader()
    named: dict[str, Any] = {**dict.fromkeys(ODD), "loader": loader, "buffer": target, "step": 0}
    module.load_checkpoint(tmp_path, optim, extra=named)
    assert named["loader"] is loader
    assert loader.position == 11
    assert named["buffer"] is target
    assert torch.equal(target, buffer)
    assert named["step"] == 3


def unchanged(module: ShardedModule, path: Path, match: str, **options: Any) -> None:
    """A load is refused and changes nothing."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(9.0)
    torch.manual_seed(123)
    before = full_state(module), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=match):
        module.load_checkpoint(path, **options)
    assert_same(full_state(module), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_what_is_missing_unknown_or_refused_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    module, optim = sharded_and_optim()
    step(module, optim)
    cosine = SCHEDULES["cosine"](optim)
    scaler = torch.amp.GradScaler("cpu")
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    module.save_checkpoint(tmp_path / "bare", optim)
    extra: dict[str, Any] = {"step": 1, "bad": Loader(-1), "good": Loader(5), "x": torch.ones(3)}
    module.save_checkpoint(tmp_path / "full", optim, cosine, disabled, extra=extra)

    bare, full = tmp_path / "bare", tmp_path / "full"
    unchanged(module, bare, "has no state of a scheduler", scheduler=cosine)
    unchanged(module, bare, "has no state of a scaler", scaler=scaler)
    unchanged(module, bare, "has no extra 'step'; it has none", extra={"step": 0})
    nothing: dict[str, Any] = {}
    module.load_checkpoint(bare, extra=nothing)
    assert not nothing
    message = "the scheduler in .* has no 'step_size': it was of another class"
    unchanged(module, full, message, scheduler=lr_scheduler.StepLR(optim, 3))
    unchanged(module, full, "the scaler in .* has no 'scale': .* disabled", scaler=scaler)
    unchanged(module, full, "scheduler must have state_dict", scheduler=3)
    all_names = {"step": 0, "bad": None, "good": None, "x": None}
    unchanged(module, full, "has no extra 'epoch'; it has 'step'", extra={**all_names, "epoch": 0})
    unchanged(module, full, "has extra 'bad', which no rank asks for", extra={"step": 0})
    message = r"'extra.x' has shape \[3\] and dtype torch.float32 in .* \[4\] and torch.float32"
    unchanged(module, full, message, extra={**all_names, "x": torch.ones(4)})
    good, bad = Loader(1), Loader(2)
    message = r"extra\['bad'\].load_state_dict\(\) refuses .* \(ValueError: no such position\)"
    named = {"good": good, "bad": bad, "step": 0, "x": None}
    unchanged(module, full, message, extra=named)
    assert (good.position, good.loaded) == (1, 2), "restored, and given back its former state"
    assert (bad.position, named["step"]) == (2, 0)
    loose = {"step": 0}
    module.load_checkpoint(full, extra=loose, strict=False)
    assert loose == {"step": 1}


class Odd:
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "an object": ({"inner": {"o": Odd()}}, r"'extra.x.inner.o' is or holds something"),
    "in a tuple": ((1, Odd()), "'extra.x' is or holds something .* only by running code"),
    "numpy": (numpy.float64(1.0), r"number.item\(\)"),
    "a lambda": (lambda: 0, "'extra.x' is or holds something"),
    "two of a key": ({"a.b": 1, "a": {"b": 2}}, r"extra\['x'\] has two entries 'extra.x.a.b'"),
    "an optimizer": (torch.optim.SGD([torch.ones(1)]), "pass it as optim"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_load_could_not_restore_is_not_saved(
    kind: str, trained: Any, tmp_path: Path
) -> None:
    module, _ = trained
    module.save_checkpoint(tmp_path, extra={"x": 1})
    value, message = REFUSED[kind]
    with pytest.raises(CheckpointError, match=message):
        module.save_checkpoint(tmp_path, extra={"x": value})
    extra = {"x": 0}
    module.load_checkpoint(tmp_path, extra=extra)
    assert extra == {"x": 1}
    with pytest.raises(CheckpointError, match="keys of extra must be names; got 3"):
        module.save_checkpoint(tmp_path, extra={3: value})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"save_checkpoint\(\) got an unexpected keyword"):
        module.save_checkpoint(tmp_path, extras={})  # type: ignore[call-arg]


CLASHES: list[dict[str, Any]] = [
    {"a": {"b": 1}, "a.b": 2},
    {"a.b": 2, "a": {"b": 1}},
    {"a": [torch.ones(1)], "a.0": 5},
    {"a": {"b": {"c": 1}}, "a.b": {"c": 1}},
]


@pytest.mark.parametrize("extra", CLASHES, ids=str)
def test_names_that_come_to_the_same_are_refused(
    extra: dict[str, Any], trained: Any, tmp_path: Path
) -> None:
    module, _ = trained
    match = r"extra\['a.*'\] and extra\['a.*'\] both have an entry 'extra\.a\..*rename one of them"
    with pytest.raises(CheckpointError, match=match):
        module.save_checkpoint(tmp_path / "c", extra=extra)
    assert not (tmp_path / "c").exists()


# -- random states and ranks ----------------------------------------------------------------------


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def draws() -> tuple[float, float, float, float]:
    """One number of each library, and one of numpy's, of which it draws two at a time."""
    normal = float(numpy.random.standard_normal())
    return torch.rand(()).item(), random.random(), float(numpy.random.random()), normal


def test_random_states_of_all_libraries_go_on(trained: Any, tmp_path: Path) -> None:
    module, _ = trained
    seed_all(5)
    draws()
    module.save_checkpoint(tmp_path)
    expected = draws()
    seed_all(6)
    module.load_checkpoint(tmp_path)
    assert draws() == expected


def ema_of(module: ShardedModule, value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(p.detach(), value) for name, p in module.named_parameters()}


def on_two(rank: int, folder: Path) -> list[tuple[float, ...]]:
    module, optim = sharded_and_optim()
    step(module, optim)
    cosine = SCHEDULES["cosine"](optim)

    # What one process wrote: rank 1 has no states there, and draws numbers of its own.
    numbers = []
    for _ in range(2):
        seed_all(100 + rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module.load_checkpoint(folder / "one")
        said = [str(w.message) for w in caught if "random states" in str(w.message)]
        assert len(said) == (rank == 0), said
        assert all("1 rank: random states of rank 1 are seeded" in text for text in said)
        numbers.append(draws())
    assert numbers[0] == numbers[1], "the same at each load"

    # Written by two: DTensors by shards, names of one rank, and states of each.
    seed_all(200 + rank)
    extra = {"ema": ema_of(module, 2.0), "rank": rank, f"loader {rank}": Loader(rank)}
    saving = module.save_checkpoint(
        folder / "two", optim, cosine, extra=extra, background=True, keep=None
    )
    expected = draws()
    extra["ema"]["0.weight"].fill_(5.0)  # after the save
    saving.result()
    seed_all(0)
    loader = Loader()
    again: dict[str, Any] = {"ema": ema_of(module, 0.0), "rank": 9, f"loader {rank}": loader}
    target = again["ema"]["0.weight"]
    module.load_checkpoint(folder / "two", optim, cosine, extra=again)
    assert draws() == expected
    assert again["rank"] == 0, "rank 0's"
    assert loader.position == rank
    assert again["ema"]["0.weight"] is target
    assert isinstance(target, DTensor)
    assert all((v.full_tensor() == 2.0).all() for v in again["ema"].values())

    # One rank's problem is that of all.
    bad = Odd() if rank == 1 else 1
    save = error_of(
        lambda: module.save_checkpoint(folder / "two", extra={"x": bad}), CheckpointError
    )
    assert "(on rank 1)" in save
    wrong: dict[str, Any] = {"rank": 0, "ema": None, **{f"loader {r}": Loader(3) for r in (0, 1)}}
    if rank == 1:
        wrong["loader 0"] = Refusing(5)
    told = error_of(lambda: module.load_checkpoint(folder / "two", extra=wrong), CheckpointError)
    assert "refuses the state" in told
    assert "(on rank 1)" in told
    assert wrong["loader 1"].position == 3, "undone on the ranks on which it worked"
    dist.barrier()
    return numbers


class Refusing(Loader):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["position"] != self.position:
            raise ValueError("another position")


def test_states_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    module, optim = sharded_and_optim()
    step(module, optim)
    seed_all(7)
    module.save_checkpoint(tmp_path / "one")
    expected = draws()
    first, second = run_ranks(on_two, 2, tmp_path)
    assert first[0] == expected
    assert not set(second[0]) & set(expected)

    extra = {"ema": None, "rank": 9, "loader 0": None}
    with pytest.raises(CheckpointError, match="has extra 'loader 1', which no rank asks for"):
        module.load_checkpoint(tmp_path / "two", extra=extra)
    message = "written by 2 ranks: random states of rank 1 are dropped"
    with pytest.warns(UserWarning, match=message):
        module.load_checkpoint(tmp_path / "two", extra=extra, strict=False)
    seed_all(200)
    expected = draws()
    with pytest.warns(UserWarning, match="random states"):
        module.load_checkpoint(tmp_path / "two")
    assert draws() == expected, "rank 0's"
    assert extra["loader 0"] == {"position": 0}
    assert same(extra["ema"], {n: torch.full_like(p, 2.0) for n, p in full_state(module).items()})
