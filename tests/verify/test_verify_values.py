"""What a step returns is what was captured, whatever a pass of one's own does to the program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import corruption_edits as do
import pytest
import torch
import toy_programs as toys
from torch import fx, nn
from toy_programs import named

import graphshard
from graphshard.errors import VerifyError
from graphshard.pipeline import default_passes, run_passes
from graphshard.policy.units import Policy
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import Program
from graphshard.verify.numbering import Values

aten = torch.ops.aten


class Net(nn.Module):
    """Two dropouts that could be drawn in either order, a mutated buffer, a returned parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scales = torch.tensor([[0.0, 1.0], [math.nan, math.inf]], dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> Any:
        left = nn.functional.dropout(self.left(x) * self.scales.nan_to_num(1.0).sum(), 0.25)
        right = nn.functional.dropout(self.right(x), 0.25)
        return self.norm(left), right, self.left.weight


@dataclass(frozen=True)
class Edit:
    edit: Callable[[Program], None]
    name: str = "edit"

    def apply(self, program: Program, plan: graphshard.ShardingPlan) -> None:
        self.edit(program)


@dataclass(frozen=True)
class ChangingEdit(Edit):
    changes_values: ClassVar[bool] = True


def planned(*passes: Pass, **policy: Any) -> Program:
    x = torch.ones(4, 8, requires_grad=True)
    plan = graphshard.plan(
        Net(),
        graphshard.BlockPolicy({nn.Linear}, **policy),
        world_size=2,
        example_inputs=(x,),
        passes=passes,
    )
    assert plan.program is not None
    return plan.program


def dropouts(program: Program) -> list[fx.Node]:
    return [n for n in program.nodes() if n.target is aten.native_dropout.default]


def swap_draws(program: Program) -> None:
    do.first_behind_second(program, tuple(dropouts(program)))


def write_in_place(program: Program) -> None:
    do.all_read(do.through(aten.relu_.default))(program, program.results().outputs[1])


def other_probability(program: Program) -> None:
    first, _ = dropouts(program)
    first.args = (first.args[0], 0.5, True)


def swap_outputs(program: Program) -> None:
    do.result("outputs", do.swap)(program, (0, 1))


def forget_input_grad(program: Program) -> None:
    do.result("input_grads", do.forget)(program, 0)


def double_output(program: Program) -> None:
    do.returned_through("outputs", do.through(aten.mul.Tensor, 2))(program, 1)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (swap_draws, "%native_dropout_1 stands where %native_dropout did"),
        (write_in_place, "%relu__default stands where nothing did"),
        (other_probability, "its operand 1 is 0.5, and was 0.25"),
        (swap_outputs, "output 'out[0]' is %"),
        (forget_input_grad, "input_grad 'args[0]' is None, and was %"),
        (double_output, "the captured program has no such node"),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_pass_that_changes_what_is_computed(edit: Callable[[Program], None], said: str) -> None:
    with pytest.raises(VerifyError) as raised:
        planned(Edit(edit))
    message = str(raised.value)
    assert message.startswith("after pass 'edit' the program breaks the rule 'same values': ")
    assert said in message
    assert "unit" in message.splitlines()[1]


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"recompute": "units"},
        {"strategy": "SHARD_GRAD_OP"},
        {"strategy": "NO_SHARD"},
        {"backward_prefetch": "post", "forward_prefetch": 2, "reshard_root": True},
    ],
    ids=str,
)
def test_own_passes_change_nothing(policy: dict[str, Any]) -> None:
    """Recomputed, re-derived, copied and reduced values are found equal to the captured ones."""
    program = planned(**policy)
    assert any(n.target is aten.clone.default for n in program.nodes()) != (
        policy.get("strategy") == "NO_SHARD"
    )


def test_a_pass_may_say_that_it_changes_values() -> None:
    program = planned(ChangingEdit(double_output), Edit(lambda program: None))
    assert program.results().outputs[1].target is aten.mul.Tensor
    with pytest.raises(VerifyError, match=r"'again' .*'same values'"):
        planned(ChangingEdit(double_output), Edit(double_output, "again"))


def with_constant(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Edit:
    """A pass that replaces the captured constant by another tensor."""

    def edit(program: Program) -> None:
        (changed,) = (entry for entry in program.buffers if entry.constant)
        assert changed.value is not None
        value = change(changed.value)
        program.buffers = tuple(
            dataclasses.replace(entry, value=value) if entry is changed else entry
            for entry in program.buffers
        )

    return Edit(edit)


CONSTANTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "another tensor": (torch.clone, "is another tensor"),
    "written in place": (lambda value: value.add_(0.0), "was written in place"),
    "none": (lambda value: None, "is another tensor"),
}


@pytest.mark.parametrize(("change", "said"), CONSTANTS.values(), ids=CONSTANTS)
def test_a_pass_that_changes_a_constant(change: Any, said: str) -> None:
    with pytest.raises(VerifyError) as raised:
        planned(with_constant(change))
    message = str(raised.value)
    assert message.startswith("after pass 'edit' the program breaks the rule 'constants': ")
    assert f"the constant 'constant_0' {said}" in message
    assert "node %constant_0" in message.splitlines()[1]


def test_a_pass_may_say_that_it_changes_a_constant() -> None:
    change = with_constant(lambda value: value + 1)
    program = planned(ChangingEdit(change.edit), Edit(lambda program: None))
    (entry,) = (entry for entry in program.buffers if entry.constant)
    assert entry.value is not None
    assert entry.value[0, 0] == 1
    with pytest.raises(VerifyError, match=r"'edit' .*'constants'"):
        planned(ChangingEdit(change.edit, "first"), change)


def test_a_dropped_mutation_is_an_error_of_its_own() -> None:
    def forget(program: Program) -> None:
        program.mutations = program.mutations[:-1]
        results = program.results()
        results.mutations.pop()
        program.set_results(results)

    with pytest.raises(VerifyError, match=r"rule 'unchanged': entry 2 .* mutations was \(kind="):
        planned(Edit(forget))


@pytest.mark.parametrize(
    ("name", "rule", "break_it"),
    [
        ("unshard", "shards", lambda p: do.meta("val", do.other_shape)(p, p.params[3].node)),
        ("reduce_grads", "reduces", lambda p: do.result("grads", do.forget)(p, 1)),
        ("insert_free", "frees", lambda p: do.deleted(p, named(p, "layers_1_free_1"))),
    ],
)
def test_a_name_turns_no_rule_on_or_off(
    name: str, rule: str, break_it: Callable[[Program], None]
) -> None:
    def run(passes: Sequence[Pass]) -> None:
        program = toys.blocks()
        run_passes(program, toys.make_toy_plan(program, toys.UNITS[toys.blocks]), passes)

    ours = default_passes(toys.one_by_one(Policy()))
    run((Edit(lambda program: None, name), *ours))
    for step in ours:
        if step.name == name:
            object.__setattr__(step, "name", "another")
    with pytest.raises(VerifyError, match=f"rule '{rule}'"):
        run((*ours, Edit(break_it)))


def test_only_changed_nodes_are_numbered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program = toys.blocks()
    captured = Values.of(program)
    visited: list[str] = []
    original = Values._numbered

    def noted(values: Values, node: fx.Node) -> Any:
        visited.append(node.name)
        return original(values, node)

    monkeypatch.setattr(Values, "_numbered", noted)
    again = Values.of(program, captured)
    assert not visited
    assert again.of_node == captured.of_node
    assert again.ends == captured.ends
    # What reads a node that computes something else has another number, and keeps its arguments.
    changed = next(node for node in program.nodes() if node.users)
    changed.target = (
        aten.neg.default if changed.target is not aten.neg.default else aten.abs.default
    )
    changed.args = changed.args[:1]
    reader = next(iter(changed.users))
    after = Values.of(program, captured)
    assert {changed.name, reader.name} <= set(visited)
    assert after.of_node[reader] not in captured.of_node.values()
