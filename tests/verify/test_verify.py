"""A program broken in each way, and the error that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import corruption_edits as do
import pytest
import torch
import toy_programs as toys
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from toy_programs import BATCH, VOCAB, WIDTH, aten, emit, named

from graphshard.errors import VerifyError
from graphshard.format import human_bytes
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.program import FORWARD, Program, signature
from graphshard.program.storages import storages_of
from graphshard.verify.facts import Reference
from graphshard.verify.rules import verify

Break = Callable[[Program], None]


def at(name: str, edit: do.Edit, *more: Any) -> Break:
    """An edit at the node of a name, or at the place of that node and `more`."""

    def break_it(program: Program) -> None:
        node = named(program, name)
        edit(program, (node, *more) if more else node)

    break_it.__name__ = f"at {name}"
    return break_it


def in_tables(edit: do.Edit, place: Any) -> Break:
    """An edit of tables or results, at an index or some."""
    return lambda program: edit(program, place)


def compute_after(program: Program, node: fx.Node) -> fx.Node:
    """The first compute node after `node`."""
    while not ops.is_compute(node):
        node = node.next
    return node


def read_without_wait(program: Program) -> None:
    gather = named(program, "layers_1_all_gather")
    like = named(program, "layers_1_up_weight_full")
    emit(program, gather, aten.t.default, gather, like=like)


def wait_read_whole(program: Program) -> None:
    wait = named(program, "layers_1_full")
    emit(program, wait, aten.cat.default, wait, like=named(program, "layers_1_up_weight_full"))


def freed_reduce(program: Program) -> None:
    wait = named(program, "layers_1_reduced")
    emit(program, wait, ops.free, wait, like=named(program, "layers_1_free"))


def use_after_free(program: Program) -> None:
    late = compute_after(program, named(program, "layers_1_free"))
    full = named(program, "layers_1_up_weight_full")
    emit(program, late, aten.cos.default, full, like=full)


def missing_reduce(program: Program) -> None:
    reduce = named(program, "layers_1_reduce_scatter")
    wait = named(program, "layers_1_reduced")
    results = program.results()
    for index, grad in enumerate(results.grads):
        if grad.args[0] is wait:
            results.grads[index] = reduce.args[0][grad.args[1]]
    program.set_results(results)
    for node in [*wait.users, wait, reduce]:
        program.graph.erase_node(node)


def reordered_gathers(program: Program) -> None:
    first = named(program, "layers_0_all_gather")
    first.prepend(named(program, "layers_1_all_gather"))


def reads_another_shape(program: Program) -> None:
    """A matrix product reads the other weight of its block."""
    view = next(iter(named(program, "layers_1_up_weight_full").users))
    down = next(iter(named(program, "layers_1_down_weight_full").users))
    user = next(u for u in view.users if u.target is aten.mm.default)
    view.append(down)
    user.replace_input_with(view, down)


def shard_read_as_full(program: Program) -> None:
    free = named(program, "layers_1_free")
    shard = program.params[3].node
    emit(program, free, aten.t.default, shard, like=shard)


def forward_reads_backward(program: Program) -> None:
    named(program, "mm_default").replace_input_with(
        named(program, "mm_default").args[0], program.outputs[0].tangent
    )


def swapped_weights(program: Program) -> None:
    """Two gathered parameters of one shape are read for each other."""
    embed, head = named(program, "embed_weight_full"), named(program, "head_weight_full")
    embed.args, head.args = head.args, embed.args


dropped_wait = at("layers_1_reduced", do.deleted)
full_placeholder = at("layers_1_up_weight", do.meta("val", lambda val: val.new_empty((8, WIDTH))))
foreign_shard = at("layers_1_all_gather", do.operands_exchanged, 0, 1)
missing_free = at("layers_1_free_1", do.deleted)
double_free = at("layers_1_free", do.repeated_behind)
swapped_gradients = in_tables(do.result("grads", do.swap), (0, 7))
wrong_shape = at("layers_1_up_weight_full", do.meta("val", lambda val: val.new_empty((3, WIDTH))))
no_such_result = at("layers_1_up_weight_full", do.argument(lambda index: 7), 1)
gather_of_unknown = at(
    "layers_1_all_gather",
    do.keyword("params", lambda *_: ("layers.1.up.weight", "nothing")),
)
gather_without_params = at("layers_1_all_gather", do.keyword("params", lambda *_: None))
read_before_made = at("layers_1_all_gather", do.below_its_readers)
no_phase = at("layers_1_full", do.meta("phase", lambda phase: "sideways"))
no_unit = at("layers_1_full", do.without("unit"))
forgotten_input = in_tables(do.of_program("inputs", lambda inputs: ()), None)
forgotten_tangent = in_tables(do.field("outputs", "tangent", lambda tangent: None), 0)
bypassed_relu = at("relu_default", do.bypassed)
lost_result = in_tables(do.result("grads", do.drop), -1)

BREAKS: dict[Break, tuple[str, str]] = {
    # what is done: (the rule it breaks, what the message must say)
    dropped_wait: ("waits", "%layers_1_reduce_scatter, unit 'layers.1'"),
    read_without_wait: ("waits", "reads %layers_1_all_gather without a wait"),
    wait_read_whole: ("waits", "pick one result out of %layers_1_full"),
    double_free: ("frees", "%layers_1_full is freed by %layers_1_free already"),
    missing_free: ("frees", "what %layers_1_all_gather_1 gathered is never freed"),
    freed_reduce: ("frees", "it frees what a reduce_scatter returned"),
    use_after_free: ("lifetimes", "%layers_1_up_weight_full, which shares the storage of"),
    missing_reduce: ("reduces", "the gradient of 'layers.1.up.weight' is never reduced"),
    swapped_gradients: ("reduces", "is returned as the gradient of 'embed.weight'"),
    reordered_gathers: ("order", "it is issued where %layers_0_all_gather was"),
    wrong_shape: ("shapes", "the layout says ((8, 6), torch.float32)"),
    no_such_result: ("shapes", "%layers_1_full has no result 7"),
    reads_another_shape: ("unchanged", "before the pass"),
    shard_read_as_full: ("shards", "the shard of 'layers.1.up.weight'"),
    full_placeholder: ("shards", "'layers.1.up.weight' enters as"),
    foreign_shard: ("gathers", "is not the shard of 'layers.1.up.weight'"),
    gather_of_unknown: ("operands", "the program has no parameter 'nothing'"),
    gather_without_params: ("operands", "must say its unit and its params"),
    forward_reads_backward: ("phases", "it is in forward and reads %tangent_0"),
    read_before_made: ("metadata", "%layers_1_all_gather, which stands below it"),
    no_phase: ("layout", "its phase is 'sideways'"),
    no_unit: ("metadata", "meta lacks unit"),
    forgotten_input: ("layout", "the tables expect placeholder %tangent_0 here"),
    forgotten_tangent: ("layout", "the tables name 9 placeholders, the graph has 10"),
    swapped_weights: ("same values", "its operand 0 is %head_weight, and was %embed_weight"),
    bypassed_relu: ("same values", "its operand 0 is %mm_default, and was %relu_default"),
    lost_result: ("layout", "7 grads are returned, the table has 8"),
}


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda break_it: break_it.__name__)
def test_a_broken_program_is_refused(break_it: Break) -> None:
    program, plan = toys.rewritten(toys.blocks)
    reference = Reference.of(program)
    verify(program, plan, after="before")
    break_it(program)
    rule, said = BREAKS[break_it]
    with pytest.raises(VerifyError) as raised:
        verify(program, plan, after="the culprit", reference=reference)
    message = str(raised.value)
    assert message.startswith(f"after pass 'the culprit' the program breaks the rule {rule!r}: ")
    assert said in message


def test_the_dump_around_the_fault_is_shown() -> None:
    program, plan = toys.rewritten(toys.blocks)
    missing_free(program)
    with pytest.raises(VerifyError) as raised:
        verify(program, plan, after="prefetch")
    said, where, *dump = str(raised.value).splitlines()
    assert where == "node %layers_1_full_1, unit 'layers.1'"
    assert said == (
        "after pass 'prefetch' the program breaks the rule 'frees': "
        "what %layers_1_all_gather_1 gathered is never freed"
    )
    assert [line[:2] for line in dump] == ["  ", "  ", "> ", "  ", "  "]
    assert dump[1].startswith("  %layers_0_all_gather_1 : None = all_gather([%layers_0_up_weight, ")
    assert dump[2] == (
        "> %layers_1_full_1 : (f32[8, 6], f32[6, 8]) = wait(%layers_1_all_gather_1)"
        "  # backward layers.1"
    )


def test_a_wait_in_the_other_phase() -> None:
    program, plan = toys.rewritten(toys.blocks, Policy(backward_prefetch=None))
    gather = named(program, "layers_2_all_gather_1")
    gather.meta["phase"] = FORWARD
    program.first_backward().prepend(gather)
    with pytest.raises(VerifyError, match=r"'waits'.*issued in forward and waited for in backward"):
        verify(program, plan, after="x")


def test_a_replicated_parameter_is_not_gathered() -> None:
    program, plan = toys.rewritten(toys.odd_params)
    gather = named(program, "a_all_gather")
    gain = next(p for p in program.params if p.fqn == "a.gain")
    gather.args = ([*gather.args[0], gain.node],)
    gather.kwargs = {**gather.kwargs, "params": (*gather.kwargs["params"], "a.gain")}
    with pytest.raises(VerifyError, match=r"'gathers'.*'a.gain' is whole on each rank"):
        verify(program, plan, after="x")


def test_a_frozen_parameter_has_no_gradient() -> None:
    program, plan = toys.rewritten(toys.blocks)
    do.field("params", "requires_grad", lambda flag: False)(program, -1)
    with pytest.raises(VerifyError, match=r"'reduces'.*'head.weight' is frozen"):
        verify(program, plan, after="x")


def test_budget() -> None:
    # 4 ranks: 12 of the root's two times 10 rows after padding, 8 of each of a block's.
    root, block = 4 * (2 * 12 * WIDTH), 4 * (8 * WIDTH + 8 * 8)
    program, _ = toys.rewritten(toys.blocks)
    most = max(storages_of(program).live())
    toys.rewritten(toys.blocks, Policy(memory_budget=most))
    with pytest.raises(VerifyError) as raised:
        toys.rewritten(toys.blocks, Policy(memory_budget=most - 1))
    said, rule, where, *_ = str(raised.value).splitlines()
    x, h, wide = 4 * BATCH * WIDTH, 4 * BATCH * 8, 4 * BATCH * VOCAB
    grad, size = 4 * 8 * WIDTH, human_bytes
    assert said == (
        f"memory_budget={most - 1:,} is too small for a step that holds {size(most)} at once "
        f"(unsharded parameters {size(root + 2 * block)}: (root) {size(root)}, layers.0 "
        f"{size(block)}, layers.1 {size(block)}; saved for backward {size(2 * x + h)}: layers.0 "
        f"{size(x + h)}, (root) {size(x)}; gradients to reduce {size(4 * grad + 240)}: layers.1 "
        f"{size(2 * grad)}, layers.2 {size(2 * grad)}, (root) 240 B; returned {size(wide)}: (root) "
        f"{size(wide)}; at work 224 B: layers.1 224 B); give at least {most:,} bytes, or "
        "recompute more, make smaller units, prefetch less, or take a smaller batch"
    )
    assert (
        rule == "after pass 'release_early' the program breaks the rule 'budget': most is held here"
    )
    assert where == "node %mm_default_16, unit 'layers.1'"


def test_a_captured_program_needs_no_pass_to_be_valid() -> None:
    program = toys.blocks()
    plan = toys.make_toy_plan(program, toys.UNITS[toys.blocks])
    toys.run_passes(program, plan, ())


def test_symbolic_sizes_are_compared_without_guards() -> None:
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    fake = mode.from_tensor(torch.empty(BATCH, WIDTH), static_shapes=False)
    size = fake.shape[0]
    assert signature(fake) == signature(fake.clone())
    assert signature(fake) != signature(fake.new_empty((WIDTH, size)))
    assert not shapes.guards
