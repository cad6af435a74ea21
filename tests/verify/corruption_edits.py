"""Edits that corrupt a program at a place; each is used by rows of `corruption_kinds.KINDS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from corruption_programs import Net
from torch import fx
from toy_programs import emit

from graphshard.program import ops
from graphshard.program.collective import operands_of, params_of
from graphshard.program.program import BACKWARD, FORWARD, Program

aten = torch.ops.aten

Edit = Callable[[Program, Any], None]
Pair = tuple[fx.Node, fx.Node]


# -- any node -----------------------------------------------------------------------------------


def deleted(program: Program, node: fx.Node) -> None:
    """Readers read the first operand, or the first list of operands, in its place."""
    operand = node.args[0] if node.args else None
    for user in list(node.users):
        _reread(user, {node: operand})
    program.graph.erase_node(node)


def _reread(user: fx.Node, others: Mapping[fx.Node, Any]) -> None:
    """Give `user` other arguments in place of the nodes in `others`."""
    user.args = fx.map_arg(user.args, lambda value: others.get(value, value))
    user.kwargs = fx.map_arg(user.kwargs, lambda value: others.get(value, value))


def repeated_behind(program: Program, node: fx.Node) -> None:
    with program.graph.inserting_after(node):
        _copy_of(program, node)


def repeated_before(program: Program, node: fx.Node) -> None:
    with program.graph.inserting_before(node):
        _copy_of(program, node)


def _copy_of(program: Program, node: fx.Node) -> fx.Node:
    again = program.graph.node_copy(node)
    again.meta = dict(node.meta)
    return again


def repeated_for_a_reader(program: Program, node: fx.Node) -> None:
    """The last reader reads a copy of the node, made right before it."""
    reader = max(user for user in node.users)
    with program.graph.inserting_before(reader):
        again = _copy_of(program, node)
    if reader.op != "output":
        again.meta |= {"phase": reader.meta["phase"], "unit": reader.meta["unit"]}
    reader.replace_input_with(node, again)


def above_its_operands(program: Program, node: fx.Node) -> None:
    last = max(value for value in node.all_input_nodes)
    last.prepend(node)


def below_its_readers(program: Program, node: fx.Node) -> None:
    min(user for user in node.users).append(node)


def in_the_other_phase(program: Program, node: fx.Node) -> None:
    forward = node.meta["phase"] == FORWARD
    node.meta["phase"] = BACKWARD if forward else FORWARD


def at_the_other_phase(program: Program, node: fx.Node) -> None:
    """The node stands at the end of forward, or at the begin of backward."""
    in_the_other_phase(program, node)
    program.first_backward().prepend(node)


def exchanged(program: Program, place: Pair) -> None:
    """Readers of either of two nodes read the other; no reader moves."""
    first, second = place
    for user in {**first.users, **second.users}:
        _reread(user, {first: second, second: first})


def swapped(*fields: str) -> Edit:
    """Two nodes get each other's fields, such as "args", and are read as before."""

    def edit(program: Program, place: Pair) -> None:
        first, second = place
        for name in fields:
            mine, others = getattr(first, name), getattr(second, name)
            setattr(first, name, others)
            setattr(second, name, mine)

    return edit


def reads_another(program: Program, place: tuple[fx.Node, fx.Node, fx.Node]) -> None:
    node, operand, other = place
    node.replace_input_with(operand, other)


def meta(key: str, change: Callable[[Any], Any]) -> Edit:
    """Another entry of `meta`."""

    def edit(program: Program, node: fx.Node) -> None:
        node.meta[key] = change(node.meta.get(key))

    return edit


def without(key: str) -> Edit:
    """`meta` lacks an entry."""
    return lambda program, node: node.meta.pop(key)


def other_dtype(val: torch.Tensor) -> torch.Tensor:
    return val.to(torch.float64 if val.dtype == torch.float32 else torch.float32)


def other_shape(val: torch.Tensor) -> torch.Tensor:
    return val.new_empty((*val.shape, 2))


# -- vocabulary ---------------------------------------------------------------------------------


def keyword(name: str, change: Callable[[fx.Node, Any], Any]) -> Edit:
    """Another value of a keyword argument; None takes it away."""

    def edit(program: Program, node: fx.Node) -> None:
        now = change(node, node.kwargs.get(name))
        rest = {key: value for key, value in node.kwargs.items() if key != name}
        node.kwargs = rest if now is None else {**rest, name: now}

    return edit


SHAPES: dict[str, dict[str, torch.Size]] = {"": {}, "layers.0": {}, "layers.1": {}}
"""By unit, the shapes of its parameters by name."""
for _name, _param in Net().named_parameters():
    _unit = ".".join(_name.split(".")[:2]) if _name.startswith("layers") else ""
    SHAPES[_unit][_name] = _param.shape


def another_unit(node: fx.Node, unit: str) -> str:
    units = [*SHAPES]
    return units[(units.index(unit) + 1) % len(units)]


def another_param(node: fx.Node, param: str | None) -> str:
    """Another parameter of the unit, of the same shape if there is one."""
    shapes = SHAPES[str(node.kwargs["unit"])]
    others = [fqn for fqn in shapes if fqn != param]
    return min(others, key=lambda fqn: shapes[fqn] != shapes.get(str(param)))


def other_form(node: fx.Node, of: str) -> str:
    return "shard" if of == "gradient" else "gradient"


def operands_exchanged(program: Program, place: tuple[fx.Node, int, int]) -> None:
    node, *pair = place
    operands = operands_of(node)
    swap(operands, pair)
    node.args = (operands,)


def params_exchanged(program: Program, place: tuple[fx.Node, int, int]) -> None:
    node, *pair = place
    params = list(params_of(node))
    swap(params, pair)
    node.kwargs = {**node.kwargs, "params": tuple(params)}


def operands_and_params_exchanged(program: Program, place: tuple[fx.Node, int, int]) -> None:
    """Each result is that of the other parameter now."""
    operands_exchanged(program, place)
    params_exchanged(program, place)


def operand_doubled(program: Program, place: tuple[fx.Node, int, int]) -> None:
    """One operand is taken twice, the other not at all."""
    node, *pair = place
    operands = operands_of(node)
    copy_first(operands, pair)
    node.args = (operands,)


def operand_dropped(program: Program, node: fx.Node) -> None:
    """The last operand and its parameter are gone; its result is still picked."""
    node.args = (operands_of(node)[:-1],)
    node.kwargs = {**node.kwargs, "params": params_of(node)[:-1]}


def next_picked(program: Program, node: fx.Node) -> None:
    """Another of several results is picked."""
    source, index = node.args
    node.args = (source, (index + 1) % len(source.meta["val"]))  # type: ignore[operator, union-attr]


def other_op(target: Any) -> Edit:
    """The node calls another op."""
    return lambda program, node: setattr(node, "target", target)


def merged_waits(program: Program, place: Pair) -> None:
    """Results of the second collective are picked from the first."""
    first, second = place
    for user in list(second.users):
        if ops.is_unpack(user):
            user.replace_input_with(second, first)


def above_a_reader(program: Program, place: Pair) -> None:
    """A free or release stands before a reader."""
    free, reader = place
    reader.prepend(free)
    free.meta["phase"] = reader.meta["phase"]


def read_behind(program: Program, place: Pair) -> None:
    """A freed value is read, behind its free, by a node that is returned."""
    free, value = place
    after = free.next
    while not ops.is_compute(after) and after.next.op != "output":
        after = after.next
    emit(program, after, aten.neg.default, value, like=value)


def at_the_end(program: Program, node: fx.Node) -> None:
    """A node stands at the end of its phase."""
    end = program.first_backward() if node.meta["phase"] == FORWARD else program.output_node
    end.prepend(node)


def issued_earlier(program: Program, node: fx.Node) -> None:
    """A gather stands right behind the one before, or at the begin of its phase."""
    phase = node.meta["phase"]
    place = node.prev
    while place.op == "call_function" and place.meta["phase"] == phase:
        if ops.is_collective(place) or place in node.all_input_nodes:
            break
        place = place.prev
    place.append(node)


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

    def edit(program: Program, place: tuple[fx.Node, Any]) -> None:
        node, key = place
        if isinstance(key, str) and key not in node.kwargs:
            declared = node.target._schema.arguments  # type: ignore[union-attr]
            index = [each.name for each in declared].index(key)
            if index >= len(node.args):
                node.kwargs = {**node.kwargs, key: change(declared[index].default_value)}
                return
            key = index
        if isinstance(key, str):
            node.kwargs = {**node.kwargs, key: change(node.kwargs[key])}
        else:
            node.args = (*node.args[:key], change(node.args[key]), *node.args[key + 1 :])

    return edit


def operands_reversed(program: Program, node: fx.Node) -> None:
    node.args = (node.args[1], node.args[0], *node.args[2:])


Make = Callable[[Program, fx.Node], fx.Node]
"""Makes a node of another, right behind it, in its place."""


def through(target: Any, *arguments: Any) -> Make:
    """`target(value)`."""
    return lambda program, node: emit(program, node, target, node, *arguments, like=node)


def rounded(program: Program, node: fx.Node) -> fx.Node:
    """Cast to float16 and back."""
    down = emit(program, node, _CONVERT, node, torch.float16, like=node)
    down.meta["val"] = node.meta["val"].to(torch.float16)
    return emit(program, down, _CONVERT, down, node.meta["val"].dtype, like=node)


_CONVERT = torch.ops.prims.convert_element_type.default


def all_read(make: Make) -> Edit:
    def edit(program: Program, node: fx.Node) -> None:
        readers = list(node.users)
        new = make(program, node)
        for reader in readers:
            reader.replace_input_with(node, new)

    return edit


def one_reads(make: Make) -> Edit:
    """What reads one gradient of a parameter reads another value."""

    def edit(program: Program, place: Pair) -> None:
        reader, grad = place
        reader.replace_input_with(grad, make(program, grad))

    return edit


def bypassed(program: Program, node: fx.Node) -> None:
    """Readers read the first operand."""
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    program.graph.erase_node(node)


def cast_elsewhere(program: Program, node: fx.Node) -> None:
    """A cast to float16, but said to be to the same dtype as before."""
    if "dtype" in node.kwargs:
        node.kwargs = {**node.kwargs, "dtype": torch.float16}
    else:
        node.args = (node.args[0], torch.float16)


def summand_dropped(program: Program, place: tuple[fx.Node, int]) -> None:
    node, index = place
    node.replace_all_uses_with(node.args[index])  # type: ignore[arg-type]


# -- results and tables -------------------------------------------------------------------------


def result(kind: str, change: Callable[[list[Any], Any], None]) -> Edit:
    """Another list of results of one kind; `change` edits it in place."""

    def edit(program: Program, place: Any) -> None:
        results = program.results()
        change(getattr(results, kind), place)
        program.set_results(results)

    return edit


def table(name: str, change: Callable[[list[Any], Any], None]) -> Edit:
    """Another table; `change` edits the list of its entries in place."""

    def edit(program: Program, place: Any) -> None:
        rows = list(getattr(program, name))
        change(rows, place)
        setattr(program, name, tuple(rows))

    return edit


def swap(values: list[Any], place: Any) -> None:
    i, j = place
    values[i], values[j] = values[j], values[i]


def copy_first(values: list[Any], place: Any) -> None:
    """One value stands there twice, the other not at all."""
    i, j = place
    values[j] = values[i]


def forget(values: list[Any], index: int) -> None:
    values[index] = None


def drop(values: list[Any], index: int) -> None:
    values.pop(index)


def returned_before_its_reduce(program: Program, index: int) -> None:
    """The gradient of this rank alone is returned."""
    results = program.results()
    grad = ops.origin(results.grads[index])
    results.grads[index] = ops.collective_of(grad).args[0][grad.args[1]]  # type: ignore[index]
    program.set_results(results)


def returned_as_it_entered(program: Program, index: int) -> None:
    """What a mutation should have replaced is returned."""
    results = program.results()
    results.mutations[index] = program.mutations[index].target
    program.set_results(results)


def returned_through(kind: str, make: Make) -> Edit:
    def edit(program: Program, index: int) -> None:
        results = program.results()
        values = getattr(results, kind)
        values[index] = make(program, values[index])
        program.set_results(results)

    return edit


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

    def edit(program: Program, place: tuple[int, int]) -> None:
        rows = getattr(program, name)
        exchanged(program, tuple(getattr(rows[index], of) for index in place))  # type: ignore[arg-type]

    return edit


def of_program(name: str, change: Callable[[Any], Any]) -> Edit:
    """Another attribute of the program itself."""
    return lambda program, place: setattr(program, name, change(getattr(program, name)))


# -- random numbers and sizes -------------------------------------------------------------------


def first_behind_second(program: Program, place: Pair) -> None:
    """The first draw, and what picks its results, stand behind the second."""
    first, second = place
    for node in (*[*first.users][::-1], first):
        second.append(node)


def draw_dropped(program: Program, node: fx.Node) -> None:
    """Readers of the value read what it was drawn on; those of the mask the next mask."""
    for user in list(node.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    others = [n for n in program.nodes() if n.target is node.target and n is not node]
    for user in list(node.users):
        user.replace_input_with(node, others[0])
    program.graph.erase_node(node)


def put_back_at_once(program: Program, begins: fx.Node) -> None:
    """The generator's state is put back before anything is drawn."""
    (ends,) = begins.users
    begins.append(ends)


def state_saved_behind(program: Program, place: Pair) -> None:
    """The state is saved behind the draw that will be repeated from it."""
    state, draw = place
    draw.append(state)


def state_saved_first(program: Program, place: Pair) -> None:
    """The state is saved where forward begins."""
    next(iter(program.nodes())).prepend(place[0])


def drawn_before_the_state(program: Program, again: fx.Node) -> None:
    """A draw stands before the node that sets the state it has to draw from."""
    begins = again
    while begins.target is not ops.set_random_state:
        begins = begins.prev
    begins.prepend(again)


def size_fixed(program: Program, place: Pair) -> None:
    """A node takes the number that a size has in the example."""
    node, size = place
    _reread(node, {size: int(size.meta["val"].node.hint)})
