"""Edits that corrupt a program at a place; each is used by rows of `corruption_kinds.KINDS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from broken_programs import emit
from corruption_programs import Finished
from torch import fx

from graphshard.program import ops
from graphshard.program.collective import operands_of, params_of
from graphshard.program.program import BACKWARD, FORWARD, Program

aten = torch.ops.aten

Edit = Callable[[Finished, Any], None]


def on_program(edit: Callable[..., None]) -> Edit:
    """An edit that needs the program only."""
    return lambda sample, place: edit(sample.program, place)


# -- any node -----------------------------------------------------------------------------------


@on_program
def deleted(program: Program, node: fx.Node) -> None:
    """Readers read the first operand, or the first list of operands, in its place."""
    operand = node.args[0] if node.args else None
    for user in list(node.users):
        user.args = _replaced(user.args, node, operand)
        user.kwargs = _replaced(user.kwargs, node, operand)
    program.graph.erase_node(node)


def _replaced(value: Any, node: fx.Node, new: Any) -> Any:
    return fx.map_arg(value, lambda item: new if item is node else item)


@on_program
def repeated_behind(program: Program, node: fx.Node) -> None:
    with program.graph.inserting_after(node):
        _copy_of(program, node)


@on_program
def repeated_before(program: Program, node: fx.Node) -> None:
    with program.graph.inserting_before(node):
        _copy_of(program, node)


def _copy_of(program: Program, node: fx.Node) -> fx.Node:
    again = program.graph.node_copy(node)
    again.meta = dict(node.meta)
    return again


@on_program
def repeated_for_a_reader(program: Program, node: fx.Node) -> None:
    """The last reader reads a copy of the node, made right before it."""
    reader = max(user for user in node.users)
    with program.graph.inserting_before(reader):
        again = _copy_of(program, node)
    if reader.op != "output":
        again.meta |= {"phase": reader.meta["phase"], "unit": reader.meta["unit"]}
    reader.replace_input_with(node, again)


@on_program
def above_its_operands(program: Program, node: fx.Node) -> None:
    last = max(value for value in node.all_input_nodes)
    last.prepend(node)


@on_program
def below_its_readers(program: Program, node: fx.Node) -> None:
    min(user for user in node.users).append(node)


@on_program
def in_the_other_phase(program: Program, node: fx.Node) -> None:
    forward = node.meta["phase"] == FORWARD
    node.meta["phase"] = BACKWARD if forward else FORWARD


@on_program
def at_the_other_phase(program: Program, node: fx.Node) -> None:
    """The node stands at the end of forward, or at the begin of backward."""
    forward = node.meta["phase"] == FORWARD
    node.meta["phase"] = BACKWARD if forward else FORWARD
    program.first_backward().prepend(node)


def exchanged(sample: Finished, place: tuple[fx.Node, fx.Node]) -> None:
    """Readers of either of two nodes read the other; no reader moves."""
    first, second = place
    other = {first: second, second: first}
    for user in {**first.users, **second.users}:
        user.args = fx.map_arg(user.args, lambda value: other.get(value, value))
        user.kwargs = fx.map_arg(user.kwargs, lambda value: other.get(value, value))


def arguments_exchanged(sample: Finished, place: tuple[fx.Node, fx.Node]) -> None:
    first, second = place
    first.args, second.args = second.args, first.args


def all_exchanged(sample: Finished, place: tuple[fx.Node, fx.Node]) -> None:
    """Two nodes do what the other did, and are read as before."""
    first, second = place
    first.args, second.args = second.args, first.args
    first.kwargs, second.kwargs = second.kwargs, first.kwargs


@on_program
def reads_another(program: Program, place: tuple[fx.Node, fx.Node, fx.Node]) -> None:
    node, operand, other = place
    node.replace_input_with(operand, other)


def meta(key: str, change: Callable[[Any], Any]) -> Edit:
    """Another entry of `meta`."""

    def edit(sample: Finished, node: fx.Node) -> None:
        node.meta[key] = change(node.meta[key])

    return edit


def other_dtype(val: torch.Tensor) -> torch.Tensor:
    return val.to(torch.float64 if val.dtype == torch.float32 else torch.float32)


def other_shape(val: torch.Tensor) -> torch.Tensor:
    return val.new_empty((*val.shape, 2))


# -- vocabulary ---------------------------------------------------------------------------------


def keyword(name: str, change: Callable[[Finished, fx.Node, Any], Any]) -> Edit:
    """Another value of a keyword argument; None takes it away."""

    def edit(sample: Finished, node: fx.Node) -> None:
        now = change(sample, node, node.kwargs.get(name))
        rest = {key: value for key, value in node.kwargs.items() if key != name}
        node.kwargs = rest if now is None else {**rest, name: now}

    return edit


def another_unit(sample: Finished, node: fx.Node, unit: str) -> str:
    fqns = [each.fqn for each in sample.plan.units]
    return fqns[(fqns.index(unit) + 1) % len(fqns)]


def another_param(sample: Finished, node: fx.Node, param: str | None) -> str:
    """Another parameter of the unit, of the same shape if there is one."""
    unit = sample.plan.unit(str(node.kwargs["unit"]))
    shapes = {layout.fqn: layout.shape for layout in unit.layouts}
    others = [fqn for fqn in shapes if fqn != param]
    return sorted(others, key=lambda fqn: shapes[fqn] != shapes.get(str(param)))[0]


def each_group(name: str) -> Edit:
    """The collective joins the ranks `name`."""
    return keyword("group", lambda sample, node, group: name)


@on_program
def operands_exchanged(program: Program, place: tuple[fx.Node, int, int]) -> None:
    node, i, j = place
    operands = operands_of(node)
    operands[i], operands[j] = operands[j], operands[i]
    node.args = (operands,)


@on_program
def params_exchanged(program: Program, place: tuple[fx.Node, int, int]) -> None:
    node, i, j = place
    params = list(params_of(node))
    params[i], params[j] = params[j], params[i]
    node.kwargs = {**node.kwargs, "params": tuple(params)}


def operands_and_params_exchanged(sample: Finished, place: tuple[fx.Node, int, int]) -> None:
    """Each result is that of the other parameter now."""
    operands_exchanged(sample, place)
    params_exchanged(sample, place)


@on_program
def operand_doubled(program: Program, place: tuple[fx.Node, int, int]) -> None:
    """One operand is taken twice, the other not at all."""
    node, i, j = place
    operands = operands_of(node)
    operands[j] = operands[i]
    node.args = (operands,)


@on_program
def operand_dropped(program: Program, node: fx.Node) -> None:
    """The last operand and its parameter are gone; its result is still picked."""
    node.args = (operands_of(node)[:-1],)
    node.kwargs = {**node.kwargs, "params": params_of(node)[:-1]}


@on_program
def next_result(program: Program, node: fx.Node) -> None:
    """Another result is picked."""
    wait, index = node.args
    node.args = (wait, (index + 1) % len(wait.meta["val"]))  # type: ignore[operator, union-attr]


def other_op(target: Any) -> Edit:
    """The node calls another op."""

    def edit(sample: Finished, node: fx.Node) -> None:
        node.target = target

    return edit


@on_program
def merged_waits(program: Program, place: tuple[fx.Node, fx.Node]) -> None:
    """Results of the second collective are picked from the first."""
    first, second = place
    for user in list(second.users):
        if ops.is_unpack(user):
            user.replace_input_with(second, first)


@on_program
def above_a_reader(program: Program, place: tuple[fx.Node, fx.Node]) -> None:
    """A free or release stands before a reader."""
    free, reader = place
    reader.prepend(free)
    free.meta["phase"] = reader.meta["phase"]


@on_program
def read_behind(program: Program, place: tuple[fx.Node, fx.Node]) -> None:
    """A freed value is read, behind its free, by a node that is returned."""
    free, value = place
    after = free.next
    while not ops.is_compute(after) and after.next.op != "output":
        after = after.next
    emit(program, after, aten.neg.default, value, like=value)


@on_program
def freed_later(program: Program, free: fx.Node) -> None:
    """The free stands at the end of its phase."""
    end = program.first_backward() if free.meta["phase"] == FORWARD else program.output_node
    end.prepend(free)


@on_program
def issued_earlier(program: Program, node: fx.Node) -> None:
    """A gather stands right behind the one before, or at the begin of its phase."""
    phase = node.meta["phase"]
    place = node.prev
    while place.op == "call_function" and place.meta["phase"] == phase:
        if ops.is_collective(place) or place in node.all_input_nodes:
            break
        place = place.prev
    place.append(node)


@on_program
def waited_later(program: Program, wait: fx.Node) -> None:
    """A wait, with the nodes that pick its results, stands right before their first reader."""
    picked = [user for user in wait.users if ops.is_unpack(user)]
    readers = [user for each in picked for user in each.users if user.op == "call_function"]
    end = program.output_node if wait.meta["phase"] == BACKWARD else program.first_backward()
    before = min(readers, default=end)
    for node in (wait, *picked):
        before.prepend(node)


# -- compute ------------------------------------------------------------------------------------


def argument(change: Callable[[Any], Any]) -> Edit:
    """Another constant argument of an operator, given by index or name."""

    def edit(sample: Finished, place: tuple[fx.Node, Any]) -> None:
        node, key = place
        if isinstance(key, str) and key not in node.kwargs:
            names = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
            index = names.index(key)
            if index < len(node.args):
                key = index
            else:
                default = node.target._schema.arguments[index].default_value  # type: ignore[union-attr]
                node.kwargs = {**node.kwargs, key: change(default)}
                return
        if isinstance(key, str):
            node.kwargs = {**node.kwargs, key: change(node.kwargs[key])}
        else:
            node.args = (*node.args[:key], change(node.args[key]), *node.args[key + 1 :])

    return edit


@on_program
def operands_reversed(program: Program, node: fx.Node) -> None:
    node.args = (node.args[1], node.args[0], *node.args[2:])


def followed_by(target: Any, *arguments: Any) -> Edit:
    """All readers read `target(value)`."""

    def edit(sample: Finished, node: fx.Node) -> None:
        readers = list(node.users)
        new = emit(sample.program, node, target, node, *arguments, like=node)
        for reader in readers:
            reader.replace_input_with(node, new)

    return edit


def rounded_between(low: torch.dtype) -> Edit:
    """All readers read the value cast to `low` and back."""

    def edit(sample: Finished, node: fx.Node) -> None:
        readers = list(node.users)
        up = _rounded(sample, node, low)
        for reader in readers:
            reader.replace_input_with(node, up)

    return edit


def _rounded(sample: Finished, node: fx.Node, low: torch.dtype) -> fx.Node:
    down = emit(sample.program, node, _CONVERT, node, low, like=node)
    down.meta["val"] = node.meta["val"].to(low)
    return emit(sample.program, down, _CONVERT, down, node.meta["val"].dtype, like=node)


_CONVERT = torch.ops.prims.convert_element_type.default


@on_program
def cast_dropped(program: Program, node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    program.graph.erase_node(node)


@on_program
def cast_elsewhere(program: Program, node: fx.Node) -> None:
    """A cast to float16, but said to be to the same dtype as before."""
    if "dtype" in node.kwargs:
        node.kwargs = {**node.kwargs, "dtype": torch.float16}
    else:
        node.args = (node.args[0], torch.float16)


@on_program
def summand_dropped(program: Program, place: tuple[fx.Node, int]) -> None:
    node, index = place
    node.replace_all_uses_with(node.args[index])  # type: ignore[arg-type]


# -- gradients ----------------------------------------------------------------------------------


def gradient_through(target: Any, *arguments: Any) -> Edit:
    """What reads one gradient of a parameter reads `target(gradient)`."""

    def edit(sample: Finished, place: tuple[fx.Node, fx.Node]) -> None:
        reader, grad = place
        new = emit(sample.program, grad, target, grad, *arguments, like=grad)
        reader.replace_input_with(grad, new)

    return edit


def gradient_rounded(sample: Finished, place: tuple[fx.Node, fx.Node]) -> None:
    """A gradient is cast to float16 and back before its reduce."""
    reader, grad = place
    reader.replace_input_with(grad, _rounded(sample, grad, torch.float16))


def gradient_of_zeros(sample: Finished, place: tuple[fx.Node, fx.Node]) -> None:
    reader, grad = place
    zeros = emit(sample.program, grad, aten.zeros.default, list(grad.meta["val"].shape), like=grad)
    reader.replace_input_with(grad, zeros)


# -- results and tables -------------------------------------------------------------------------


def result(kind: str, change: Callable[[Finished, list[Any], Any], None]) -> Edit:
    """Another list of results of one kind; `change` edits it in place."""

    def edit(sample: Finished, place: Any) -> None:
        results = sample.program.results()
        change(sample, getattr(results, kind), place)
        sample.program.set_results(results)

    return edit


def swap(sample: Finished, values: list[Any], place: tuple[int, int]) -> None:
    i, j = place
    values[i], values[j] = values[j], values[i]


def copy_first(sample: Finished, values: list[Any], place: tuple[int, int]) -> None:
    """One value is returned twice, the other not at all."""
    i, j = place
    values[j] = values[i]


def forget(sample: Finished, values: list[Any], index: int) -> None:
    values[index] = None


def drop_last(sample: Finished, values: list[Any], index: int) -> None:
    values.pop(index)


def returns(
    change: Callable[[Finished, int], fx.Node],
) -> Callable[[Finished, list[Any], int], None]:
    def edit(sample: Finished, values: list[Any], index: int) -> None:
        values[index] = change(sample, index)

    return edit


def before_its_reduce(sample: Finished, index: int) -> fx.Node:
    """The gradient of this rank alone."""
    grad = ops.origin(sample.program.results().grads[index])
    return ops.collective_of(grad).args[0][grad.args[1]]  # type: ignore[index, return-value]


def as_it_entered(sample: Finished, index: int) -> fx.Node:
    """What a mutation should have replaced."""
    return sample.program.mutations[index].target


def result_through(kind: str, target: Any, *arguments: Any) -> Edit:
    def change(sample: Finished, values: list[Any], index: int) -> None:
        value = values[index]
        values[index] = emit(sample.program, value, target, value, *arguments, like=value)

    return result(kind, change)


def table(name: str, change: Callable[[list[Any], Any], None]) -> Edit:
    """Another table; `change` edits the list of its entries in place."""

    def edit(sample: Finished, place: Any) -> None:
        rows = list(getattr(sample.program, name))
        change(rows, place)
        setattr(sample.program, name, tuple(rows))

    return edit


def swap_entries(rows: list[Any], place: tuple[int, int]) -> None:
    i, j = place
    rows[i], rows[j] = rows[j], rows[i]


def swap_fields(*names: str) -> Callable[[list[Any], tuple[int, int]], None]:
    """Two entries get each other's fields."""

    def change(rows: list[Any], place: tuple[int, int]) -> None:
        i, j = place
        first, second = rows[i], rows[j]
        rows[i] = dataclasses.replace(first, **{name: getattr(second, name) for name in names})
        rows[j] = dataclasses.replace(second, **{name: getattr(first, name) for name in names})

    return change


def field(of: str, name: str, change: Callable[[Any], Any]) -> Edit:
    """Another value of one field of one entry of the table `of`."""

    def edit(rows: list[Any], index: int) -> None:
        rows[index] = dataclasses.replace(rows[index], **{name: change(getattr(rows[index], name))})

    return table(of, edit)


def placeholders_exchanged(name: str, of: str = "node") -> Edit:
    """What reads one of two entries' placeholders reads the other."""

    def edit(sample: Finished, place: tuple[int, int]) -> None:
        rows = getattr(sample.program, name)
        exchanged(sample, tuple(getattr(rows[index], of) for index in place))  # type: ignore[arg-type]

    return edit


def attribute(name: str, change: Callable[[Any], Any]) -> Edit:
    """Another attribute of the program itself."""

    def edit(sample: Finished, place: None) -> None:
        setattr(sample.program, name, change(getattr(sample.program, name)))

    return edit


def keywords_exchanged(sample: Finished, place: tuple[fx.Node, fx.Node]) -> None:
    first, second = place
    first.kwargs, second.kwargs = second.kwargs, first.kwargs


def other_form(sample: Finished, node: fx.Node, of: str) -> str:
    return "shard" if of == "gradient" else "gradient"


def one_bit(value: torch.Tensor) -> torch.Tensor:
    bits = value.clone().view(torch.int32)
    bits[-1] ^= 1
    return bits.view(value.dtype)


def of_other_strides(value: torch.Tensor) -> torch.Tensor:
    return torch.stack((value, value), -1)[..., 0]


def stale_changed(sample: Finished, place: None) -> None:
    changed = {"embed.weight"}
    sample.program.stale = frozenset(sample.program.stale ^ changed)


@on_program
def first_behind_second(program: Program, place: tuple[fx.Node, fx.Node]) -> None:
    """The first draw, and what picks its results, stand behind the second."""
    first, second = place
    for node in (*[*first.users][::-1], first):
        second.append(node)


@on_program
def draw_dropped(program: Program, node: fx.Node) -> None:
    """Readers of the value read what it was drawn on; those of the mask the next mask."""
    for user in list(node.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    others = [n for n in program.nodes() if n.target is node.target and n is not node]
    for user in list(node.users):
        user.replace_input_with(node, others[0])
    program.graph.erase_node(node)


@on_program
def put_back_at_once(program: Program, begins: fx.Node) -> None:
    """The generator's state is put back before anything is drawn."""
    (ends,) = begins.users
    begins.append(ends)


@on_program
def state_saved_behind(program: Program, place: tuple[fx.Node, fx.Node]) -> None:
    """The state is saved behind the draw that will be repeated from it."""
    state, draw = place
    draw.append(state)


@on_program
def state_saved_first(program: Program, place: tuple[fx.Node, fx.Node]) -> None:
    """The state is saved where forward begins."""
    next(iter(program.nodes())).prepend(place[0])


@on_program
def drawn_before_the_state(program: Program, again: fx.Node) -> None:
    """A draw stands before the node that sets the state it has to draw from."""
    begins = again
    while begins.target is not ops.set_random_state:
        begins = begins.prev
    begins.prepend(again)


@on_program
def next_pick(program: Program, node: fx.Node) -> None:
    source, index = node.args
    vals = source.meta["val"]  # type: ignore[union-attr]
    node.args = (source, (index + 1) % len(vals))  # type: ignore[operator]


@on_program
def without_value(program: Program, node: fx.Node) -> None:
    del node.meta["val"]


@on_program
def in_no_region(program: Program, node: fx.Node) -> None:
    del node.meta["region"]


@on_program
def in_a_region(program: Program, node: fx.Node) -> None:
    node.meta["region"] = 0


@on_program
def size_fixed(program: Program, place: tuple[fx.Node, fx.Node]) -> None:
    """A node takes the number that a size has in the example."""
    node, size = place
    number = int(size.meta["val"].node.hint)
    node.args = _replaced(node.args, size, number)
    node.kwargs = _replaced(node.kwargs, size, number)
