"""Every kind of corruption of a finished program is refused by its rule, or changes no number."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from corruption_edits import Edit
from corruption_kinds import HARMLESS, KINDS, Kind
from corruption_places import Places
from corruption_programs import SETTINGS, Layer, Net, example, of_any_size, sample
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch import Tensor

import graphshard
from graphshard import BlockPolicy, ShardedModule
from graphshard.errors import VerifyError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.program import Program

by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
MAY_BE_HARMLESS = [kind for kind in KINDS if HARMLESS in kind.rules]


def outcome(setting: str, kind: Kind, index: int) -> tuple[str, str]:
    """Corrupt a copy of a program at one place and verify it.

    Returns:
        The rule that refuses it, and the error; or HARMLESS.
    """
    corrupted = sample(setting).copy()
    kind.edit(corrupted.program, kind.places(corrupted.program)[index])
    try:
        corrupted.verify()
    except VerifyError as error:
        return rule_of(error), str(error)
    return HARMLESS, ""


def rule_of(error: VerifyError) -> str:
    """The name of the rule that `error` names."""
    return str(error).split("breaks the rule '")[1].split("'")[0]


@cache
def count(setting: str, kind: Kind) -> int:
    """The number of places where the program of a setting can be corrupted."""
    return len(kind.places(sample(setting).program))


def chosen(kind: Kind, *, programs: int, each: int) -> Iterator[tuple[str, int]]:
    """Up to `each` places in each of up to `programs` programs: (setting, index of the place).

    Other programs and other places for each kind, the same ones in each run.
    """
    first = zlib.crc32(kind.name.encode()) % len(SETTINGS)
    names = [*SETTINGS]
    fitting = [name for name in (*names[first:], *names[:first]) if count(name, kind)]
    for name in fitting[:programs]:
        number = count(name, kind)
        start = zlib.crc32(f"{kind.name} {name}".encode())
        step = max(1, number // each)
        yield from ((name, (start + i * step) % number) for i in range(min(number, each)))


def check(kind: Kind, *, programs: int, each: int) -> None:
    places = list(chosen(kind, programs=programs, each=each))
    assert places, "no program has a place for this corruption"
    for setting, index in places:
        rule, text = outcome(setting, kind, index)
        assert rule in kind.rules, f"{setting}, place {index}: {rule}\n{text}"


@by_kind
def test_the_rule_of_its_row_refuses_it(kind: Kind) -> None:
    check(kind, programs=2, each=1)


@pytest.mark.slow
@by_kind
def test_in_every_program_at_several_places(kind: Kind) -> None:
    check(kind, programs=len(SETTINGS), each=3)


def test_the_programs_have_every_op_and_the_table_every_kind_once() -> None:
    used = {node.target for name in SETTINGS for node in sample(name).program.nodes()}
    assert used >= ops.VOCABULARY
    names = [kind.name for kind in KINDS]
    assert len(names) == len(set(names))
    for op in ops.OPS.values():
        assert f"{op.name} deleted" in names
        assert f"{op.name} done twice" in names


@pytest.mark.parametrize("setting", ["full", "mixed added", "hybrid", "dynamic"])
def test_a_copy_is_as_valid_as_its_original(setting: str) -> None:
    """A fault of the harness would otherwise count as a refusal."""
    sample(setting).copy().verify()


# -- What is accepted is run, to compare its numbers with the original's.


class Corruption:
    """A last pass that makes one corruption in each program, at a place chosen by a number."""

    name = "corruption"
    changes_values = False

    def __init__(self) -> None:
        self.places: Places | None = None
        self.edit: Edit | None = None
        self.number = 0
        self.made = 0

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        places = [] if self.places is None else self.places(program)
        if places and self.edit is not None:
            self.edit(program, places[self.number % len(places)])
            self.made += 1


Numbers = Mapping[str, Tensor]


@dataclass
class Bench:
    """A sharded model on this rank, run with one corruption after another from the same state."""

    module: ShardedModule
    corruption: Corruption
    state: list[Tensor]
    expected: Numbers
    steps: int
    accumulate: bool
    programs: tuple[Program, ...] = ()  # without a corruption

    @classmethod
    def of(cls, setting: str, *, steps: int, accumulate: bool) -> Bench:
        """The model under the policy of a setting, on the ranks that there are.

        Args:
            setting: a key of SETTINGS.
            steps: the number of steps of an optimizer in a run.
            accumulate: whether each step has a micro-batch under no_sync().
        """
        torch.manual_seed(0)
        corruption = Corruption()
        policy = BlockPolicy({Layer}, **SETTINGS[setting].policy)
        module = graphshard.compile(
            Net(), policy, passes=(*SETTINGS[setting].last, corruption), check=True
        )
        programs = module._graphshard.programs
        programs._every_pass = tuple(map(of_any_size, programs._every_pass))
        bench = cls(
            module,
            corruption,
            [t.detach().clone() for t in _tensors(module)],
            {},
            steps,
            accumulate,
        )
        bench.expected = bench._run()
        bench.programs = module.programs
        return bench

    def differences(self, places: Places, edit: Edit, number: int) -> list[str] | None:
        """The names of the numbers that a corruption changes; None if it has no place.

        Raises:
            VerifyError: the corrupted program is refused.
        """
        if not any(map(places, self.programs)):
            return None
        corruption = self.corruption
        corruption.places, corruption.edit, corruption.number = places, edit, number
        corruption.made = 0
        try:
            numbers = self._run()
        finally:
            corruption.places = corruption.edit = None
        if not corruption.made:
            return None
        assert numbers.keys() == self.expected.keys()
        return [name for name, value in numbers.items() if not same(value, self.expected[name])]

    def _run(self) -> Numbers:
        """Outputs, gradients, parameters and buffers of a few steps."""
        module = self.module
        programs = module._graphshard.programs
        programs._described.clear()
        programs.steps.clear()
        programs._recent.clear()
        with torch.no_grad():
            for tensor, was in zip(_tensors(module), self.state, strict=True):
                tensor.copy_(was)
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        numbers: dict[str, Tensor] = {}
        for step in range(self.steps):
            optimizer.zero_grad()
            if self.accumulate:
                with module.no_sync():
                    numbers |= _micro_batch(module, f"step {step} first")
            numbers |= _micro_batch(module, f"step {step} last")
            for name, param in module.named_parameters():
                if param.grad is not None:
                    numbers[f"step {step} gradient of {name}"] = _local(param.grad).clone()
            optimizer.step()
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            numbers[name] = _local(tensor).detach().clone()
        return numbers


def _micro_batch(module: ShardedModule, label: str) -> Numbers:
    ids, left, right = example()
    outputs = module(ids, left, right)
    loss = sum((index + 1) * out.float().square().sum() for index, out in enumerate(outputs))
    assert isinstance(loss, Tensor)
    loss.backward()
    assert left.grad is not None
    assert right.grad is not None
    return {
        **{f"{label} output {i}": out.detach().clone() for i, out in enumerate(outputs)},
        f"{label} left": left.grad,
        f"{label} right": right.grad,
    }


def _tensors(module: ShardedModule) -> list[Tensor]:
    return [_local(tensor) for tensor in (*module.parameters(), *module.buffers())]


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    return a.dtype == b.dtype and torch.equal(a, b)


@cache
def bench(setting: str) -> Bench:
    """The model on one rank in this process."""
    return Bench.of(setting, steps=1, accumulate=False)


def changed(on: Bench, kind: Kind, number: int) -> list[str] | None:
    """The numbers that an accepted corruption changes; None if it is refused or has no place."""
    try:
        return on.differences(kind.places, kind.edit, number)
    except VerifyError as error:
        rule, text = rule_of(error), str(error)
    assert rule in kind.rules, text
    return None


def test_what_is_accepted_changes_no_number() -> None:
    ran = {kind.name for kind in MAY_BE_HARMLESS if changed(bench("full"), kind, 5) == []}
    assert {"a gather issued earlier", "a wait later", "a value cloned"} <= ran


def test_numbers_that_change_are_seen() -> None:
    """The comparison itself: an output doubled without a check differs."""
    on = bench("full")
    kind = next(kind for kind in KINDS if kind.name == "an output doubled where it is returned")
    with pytest.raises(VerifyError):
        on.differences(kind.places, kind.edit, 0)
    on.corruption.changes_values = True
    try:
        assert "step 0 last output 0" in (on.differences(kind.places, kind.edit, 0) or [])
    finally:
        on.corruption.changes_values = False


@pytest.mark.slow
@settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.sampled_from(KINDS), st.integers(0, 10_000))
def test_a_random_corruption_is_refused_or_harmless(kind: Kind, number: int) -> None:
    assert changed(bench("full"), kind, number) in (None, [])


class Harmless:
    """A check that what is accepted in the program of a setting changes no number on ranks."""

    def __init__(self, setting: str) -> None:
        self.__name__ = setting

    def __call__(self, rank: int) -> None:
        on = Bench.of(self.__name__, steps=2, accumulate=True)
        made = {kind.name: changed(on, kind, 3) for kind in MAY_BE_HARMLESS}
        assert {name: numbers for name, numbers in made.items() if numbers} == {}
        assert [*made.values()].count([]) >= 7, made


ON_TWO = [*map(Harmless, ("full", "zero1", "mixed", "offload", "recompute"))]

test_on_two_ranks = pytest.mark.slow(on_ranks(ON_TWO, 2, timeout=900.0))
test_on_four_ranks = pytest.mark.slow(on_ranks([Harmless("partial")], 4, timeout=900.0))
