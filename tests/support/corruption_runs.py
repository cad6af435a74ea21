"""Running a corrupted program that is accepted, to compare its numbers with the original's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from corruption_edits import Edit
from corruption_places import Places
from corruption_programs import SETTINGS, Finished, Layer, Net, example, of_any_size
from torch import Tensor

import graphshard
from graphshard import BlockPolicy, ShardedModule
from graphshard.planning.plan import ShardingPlan
from graphshard.program.program import Program


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
            self.edit(Finished(program, plan), places[self.number % len(places)])
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
        programs.passes = tuple(map(of_any_size, programs.passes))
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
