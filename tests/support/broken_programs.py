"""Ways to break a finished program, and what the error has to say of each.

The table of `corruption_kinds` has more kinds, in more programs, and the rules alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import fx
from toy_programs import WIDTH, aten

from graphshard.program import ops
from graphshard.program.program import BACKWARD, FORWARD, Program


def named(program: Program, name: str) -> fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


def compute_after(program: Program, node: fx.Node) -> fx.Node:
    """The first compute node after `node`."""
    while not ops.is_compute(node):
        node = node.next
    return node


def emit(program: Program, after: fx.Node, target: Any, *args: Any, like: fx.Node) -> fx.Node:
    """A compute node right after another, with the value and place of `like`."""
    with program.graph.inserting_after(after):
        node = program.graph.call_function(target, args)
    node.meta = {**like.meta, "phase": after.meta["phase"], "unit": after.meta["unit"]}
    return node


def dropped_wait(program: Program) -> None:
    wait = named(program, "layers_1_reduced")
    results = program.results()
    for index, grad in enumerate(results.grads):
        if grad is not None and grad.args[0] is wait:
            results.grads[index] = grad.args[0].args[0].args[0][grad.args[1]]
    program.set_results(results)
    for node in [*wait.users, wait]:
        program.graph.erase_node(node)


def double_wait(program: Program) -> None:
    gather = named(program, "layers_1_all_gather")
    wait = named(program, "layers_1_full")
    emit(program, wait, ops.wait, gather, like=wait)


def read_without_wait(program: Program) -> None:
    gather = named(program, "layers_1_all_gather")
    like = named(program, "layers_1_up_weight_full")
    emit(program, gather, aten.t.default, gather, like=like)


def wait_read_whole(program: Program) -> None:
    wait = named(program, "layers_1_full")
    emit(program, wait, aten.cat.default, wait, like=named(program, "layers_1_up_weight_full"))


def double_free(program: Program) -> None:
    free = named(program, "layers_1_free")
    emit(program, compute_after(program, free), ops.free, free.args[0], like=free)


def missing_free(program: Program) -> None:
    program.graph.erase_node(named(program, "layers_1_free_1"))


def freed_reduce(program: Program) -> None:
    wait = named(program, "layers_1_reduced")
    emit(program, wait, ops.free, wait, like=named(program, "layers_1_free"))


def free_of_no_wait(program: Program) -> None:
    named(program, "layers_1_free").args = (named(program, "layers_1_all_gather"),)


def use_after_free(program: Program) -> None:
    late = compute_after(program, named(program, "layers_1_free"))
    full = named(program, "layers_1_up_weight_full")
    emit(program, late, aten.cos.default, full, like=full)


def use_after_free_through_a_view(program: Program) -> None:
    view = next(
        u for u in named(program, "layers_1_up_weight_full").users if u.target is aten.t.default
    )
    second = emit(program, view, aten.detach.default, view, like=view)
    late = compute_after(program, named(program, "layers_1_free"))
    emit(program, late, aten.cos.default, second, like=view)


def view_made_after_free(program: Program) -> None:
    late = compute_after(program, named(program, "layers_1_free"))
    full = named(program, "layers_1_up_weight_full")
    emit(program, late, aten.t.default, full, like=full)


def returned_after_free(program: Program) -> None:
    results = program.results()
    results.outputs[0] = named(program, "head_weight_full")
    program.set_results(results)


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


def dropped_gradient(program: Program) -> None:
    results = program.results()
    results.grads[1] = None
    program.set_results(results)


def double_reduce(program: Program) -> None:
    reduce = named(program, "layers_1_reduce_scatter")
    wait = named(program, "layers_1_reduced")
    with program.graph.inserting_after(wait):
        again = program.graph.node_copy(reduce)
    again.meta = dict(reduce.meta)
    emit(program, again, ops.wait, again, like=wait)


def swapped_gradients(program: Program) -> None:
    """Two parameters of one shape get each other's gradient."""
    results = program.results()
    index = {param.fqn: i for i, param in enumerate(program.params)}
    first, second = index["embed.weight"], index["head.weight"]
    results.grads[first], results.grads[second] = results.grads[second], results.grads[first]
    program.set_results(results)


def reduce_of_something_else(program: Program) -> None:
    reduce = named(program, "layers_1_reduce_scatter")
    reduce.args = ([reduce.args[0][0], reduce.args[0][0]],)


def wrong_reduce_op(program: Program) -> None:
    named(program, "layers_1_reduce_scatter").target = ops.all_reduce


def reordered_gathers(program: Program) -> None:
    first = named(program, "layers_0_all_gather")
    first.prepend(named(program, "layers_1_all_gather"))


def reordered_reduces(program: Program) -> None:
    """Layer 2's gradients are reduced behind layer 1's, all waits being at the end."""
    end = program.output_node
    for unit in ("layers_1", "layers_2"):
        for name in ("reduce_scatter", "reduced"):
            end.prepend(named(program, f"{unit}_{name}"))
    for grad in program.results().grads:
        end.prepend(grad)


def wrong_shape(program: Program) -> None:
    full = named(program, "layers_1_up_weight_full")
    full.meta["val"] = full.meta["val"].new_empty((3, WIDTH))


def wrong_wait(program: Program) -> None:
    named(program, "layers_1_full").meta["val"].reverse()


def no_such_result(program: Program) -> None:
    full = named(program, "layers_1_up_weight_full")
    full.args = (full.args[0], 7)


def reads_another_shape(program: Program) -> None:
    """A matrix product reads the other weight of its block."""
    view = next(iter(named(program, "layers_1_up_weight_full").users))
    down = next(iter(named(program, "layers_1_down_weight_full").users))
    user = next(u for u in view.users if u.target is aten.mm.default)
    view.append(down)
    user.replace_input_with(view, down)


def other_output(program: Program) -> None:
    results = program.results()
    results.outputs[0] = next(program.nodes(FORWARD)).next.next.next.next
    while not ops.is_compute(results.outputs[0]):
        results.outputs[0] = results.outputs[0].next
    program.set_results(results)


def shard_read_as_full(program: Program) -> None:
    free = named(program, "layers_1_free")
    shard = program.params[3].node
    emit(program, free, aten.t.default, shard, like=shard)


def full_placeholder(program: Program) -> None:
    param = program.params[3]
    param.node.meta["val"] = param.node.meta["val"].new_empty(param.shape)


def foreign_shard(program: Program) -> None:
    gather = named(program, "layers_1_all_gather")
    gather.args = ([program.params[1].node, gather.args[0][1]],)


def gather_of_another_unit(program: Program) -> None:
    gather = named(program, "layers_1_all_gather")
    gather.kwargs = {**gather.kwargs, "unit": "layers.2"}


def gather_of_unknown(program: Program) -> None:
    gather = named(program, "layers_1_all_gather")
    gather.kwargs = {**gather.kwargs, "params": ("layers.1.up.weight", "nothing")}


def gather_without_params(program: Program) -> None:
    named(program, "layers_1_all_gather").kwargs = {"unit": "layers.1"}


def gather_of_too_few(program: Program) -> None:
    gather = named(program, "layers_1_all_gather")
    gather.args = (gather.args[0][:1],)


def forward_reads_backward(program: Program) -> None:
    named(program, "mm_default").replace_input_with(
        named(program, "mm_default").args[0], program.outputs[0].tangent
    )


def returned_from_backward(program: Program) -> None:
    results = program.results()
    results.outputs[0] = next(n for n in program.nodes(BACKWARD) if ops.is_compute(n))
    program.set_results(results)


def forward_below_backward(program: Program) -> None:
    named(program, "layers_2_free").meta["phase"] = FORWARD
    program.output_node.prepend(named(program, "layers_2_free"))


def read_before_made(program: Program) -> None:
    named(program, "layers_1_full").append(named(program, "layers_1_all_gather"))


def no_phase(program: Program) -> None:
    named(program, "layers_1_full").meta["phase"] = "sideways"


def no_unit(program: Program) -> None:
    del named(program, "layers_1_full").meta["unit"]


def swapped_tables(program: Program) -> None:
    first, second, *rest = program.params
    program.params = (second, first, *rest)


def forgotten_input(program: Program) -> None:
    program.inputs = ()


def forgotten_tangent(program: Program) -> None:
    program.outputs = (dataclasses.replace(program.outputs[0], tangent=None),)


def swapped_weights(program: Program) -> None:
    """Two gathered parameters of one shape are read for each other."""
    embed, head = named(program, "embed_weight_full"), named(program, "head_weight_full")
    embed.args, head.args = head.args, embed.args


def reversed_reduce(program: Program) -> None:
    """The root's two gradients, of one shape, are reduced for each other's parameter."""
    reduce = named(program, "root_reduce_scatter")
    reduce.args = (reduce.args[0][::-1],)


def gradient_reduced_twice(program: Program) -> None:
    reduce = named(program, "root_reduce_scatter")
    reduce.args = ([reduce.args[0][0]] * 2,)


def bypassed_relu(program: Program) -> None:
    relu = next(n for n in program.nodes() if n.target is aten.relu.default)
    relu.replace_all_uses_with(relu.args[0])


def another_constant(program: Program) -> None:
    mask = next(n for n in program.nodes() if n.target is aten.threshold_backward.default)
    mask.args = (*mask.args[:2], 0.0)


def free_while_reduced(program: Program) -> None:
    """A gathered parameter is freed between the issue and the wait of a reduce that reads it."""
    reduce, free = named(program, "layers_1_reduce_scatter"), named(program, "layers_1_free_1")
    free.prepend(reduce)
    reduce.args = ([named(program, "layers_1_up_weight_full_1"), reduce.args[0][1]],)


def reissued_gathers(program: Program) -> None:
    """The gathers of two units in the other order, by new nodes."""
    first, second = named(program, "layers_0_all_gather"), named(program, "layers_1_all_gather")
    with program.graph.inserting_before(first):
        news = [(old, program.graph.node_copy(old)) for old in (second, first)]
    for old, new in news:
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        program.graph.erase_node(old)


def renamed_param(program: Program) -> None:
    first, second, *rest = program.params
    program.params = (first, dataclasses.replace(second, names=(*second.names, "tie")), *rest)


def lost_result(program: Program) -> None:
    results = program.results()
    results.grads.pop()
    program.set_results(results)


BREAKS: dict[Callable[[Program], None], tuple[str, str]] = {
    # what is done: (the rule it breaks, what the message must say)
    dropped_wait: ("waits", "%layers_1_reduce_scatter, unit 'layers.1'"),
    double_wait: ("waits", "%layers_1_all_gather is waited for twice"),
    read_without_wait: ("waits", "reads %layers_1_all_gather without a wait"),
    wait_read_whole: ("waits", "pick one result out of %layers_1_full"),
    double_free: ("frees", "%layers_1_full is freed by %layers_1_free already"),
    missing_free: ("frees", "what %layers_1_all_gather_1 gathered is never freed"),
    freed_reduce: ("frees", "it frees what a reduce_scatter returned"),
    free_of_no_wait: ("operands", "free must take a wait on an all_gather"),
    use_after_free: ("lifetimes", "%layers_1_up_weight_full, which shares the storage of"),
    use_after_free_through_a_view: ("lifetimes", "after %layers_1_free freed it"),
    view_made_after_free: ("lifetimes", "after %layers_1_free freed it"),
    returned_after_free: ("lifetimes", "%head_weight_full"),
    missing_reduce: ("reduces", "the gradient of 'layers.1.up.weight' is never reduced"),
    dropped_gradient: ("reduces", "the gradient of 'layers.0.up.weight' is computed but not"),
    double_reduce: ("reduces", "'layers.1.up.weight' is reduced here and by"),
    swapped_gradients: ("reduces", "is returned as the gradient of 'embed.weight'"),
    reduce_of_something_else: ("reduces", "no gradient of 'layers.1.down.weight'"),
    wrong_reduce_op: ("reduces", "'layers.1.up.weight' is sharded"),
    reordered_gathers: ("order", "it is issued where %layers_0_all_gather was"),
    reordered_reduces: ("order", "it is issued where %layers_2_reduce_scatter was"),
    wrong_shape: ("shapes", "the layout says ((8, 6), torch.float32)"),
    wrong_wait: ("shapes", "node %layers_1_full, unit 'layers.1'"),
    no_such_result: ("shapes", "%layers_1_full has no result 7"),
    reads_another_shape: ("unchanged", "before the pass"),
    other_output: ("unchanged", "the step returns"),
    shard_read_as_full: ("shards", "the shard of 'layers.1.up.weight'"),
    full_placeholder: ("shards", "'layers.1.up.weight' enters as"),
    foreign_shard: ("gathers", "is not the shard of 'layers.1.up.weight'"),
    gather_of_another_unit: ("operands", "not a parameter of unit 'layers.2'"),
    gather_of_unknown: ("operands", "the program has no parameter 'nothing'"),
    gather_without_params: ("operands", "must say its unit and its params"),
    gather_of_too_few: ("operands", "1 operands for 2 parameters"),
    forward_reads_backward: ("phases", "it is in forward and reads %tangent_0"),
    returned_from_backward: ("phases", "but forward returns it"),
    forward_below_backward: ("layout", "node %layers_2_free"),
    read_before_made: ("metadata", "%layers_1_all_gather, which stands below it"),
    no_phase: ("layout", "its phase is 'sideways'"),
    no_unit: ("metadata", "meta lacks unit"),
    swapped_tables: ("layout", "expect placeholder %layers_0_up_weight here"),
    forgotten_input: ("layout", "the tables expect placeholder %tangent_0 here"),
    forgotten_tangent: ("layout", "the tables name 9 placeholders, the graph has 10"),
    swapped_weights: ("same values", "its operand 0 is %head_weight, and was %embed_weight"),
    reversed_reduce: ("same values", "grad 'embed.weight' is reduced %t_default_"),
    gradient_reduced_twice: ("same values", "grad 'head.weight' is reduced %"),
    bypassed_relu: ("same values", "its operand 0 is %mm_default, and was %relu_default"),
    another_constant: ("same values", "its operand 2 is 0.0, and was 0"),
    free_while_reduced: ("lifetimes", "it ends what reads %layers_1_up_weight_full_1"),
    reissued_gathers: ("order", "it is issued where %layers_0_all_gather was"),
    renamed_param: ("unchanged", "entry 1 of the program's params was (fqn='layers.0.up.weight'"),
    lost_result: ("layout", "7 grads are returned, the table has 8"),
}
