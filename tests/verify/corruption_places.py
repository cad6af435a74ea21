"""The places where a kind of corruption can be made: nodes, pairs of them, entries of tables."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import fx

from graphshard.program import ops
from graphshard.program.aliases import aliases_of, cast_dtype, unpacks
from graphshard.program.collective import begins_replay
from graphshard.program.program import BACKWARD, RECOMPUTED, REPLAYS, Program, signature

aten = torch.ops.aten

Place = Any
Places = Callable[[Program], list[Place]]


def whole(program: Program) -> list[Place]:
    """The program itself, for what exists once."""
    return [None]


def nodes(accepts: Callable[[fx.Node], bool]) -> Places:
    """The nodes that `accepts` accepts."""
    return lambda program: [node for node in program.nodes() if accepts(node)]


def where(finder: Places, accepts: Callable[[Any], bool]) -> Places:
    """The places of `finder` that `accepts` accepts."""
    return lambda program: [place for place in finder(program) if accepts(place)]


def calls(*targets: Any) -> Places:
    """The nodes that call one of `targets`."""
    return nodes(lambda node: node.target in targets)


def results_of(*targets: Any) -> Places:
    """The nodes that pick a result of a collective that calls one of `targets`."""
    return nodes(lambda node: ops.is_unpack(node) and ops.collective_of(node).target in targets)


def _changes_dtype(node: fx.Node) -> bool:
    dtype = cast_dtype(node)
    return dtype is not None and node.args[0].meta["val"].dtype != dtype  # type: ignore[union-attr]


def _of_one_shape(a: Any, b: Any) -> bool:
    return isinstance(a, fx.Node) and isinstance(b, fx.Node) and _shape(a) == _shape(b)


def _shape(node: Any) -> Any:
    return signature(node.meta["val"])


# Every cast, by whichever operator.
casts = nodes(_changes_dtype)

# The model's own compute, without what picks one of several results; that returns one tensor.
compute = nodes(lambda node: ops.is_compute(node) and node.target is not operator.getitem)
of_tensors = where(compute, lambda node: isinstance(node.meta["val"], torch.Tensor))
read_floats = where(
    of_tensors, lambda node: bool(node.users) and node.meta["val"].is_floating_point()
)

# Nodes of backward that compute a value of forward again.
recomputed = where(of_tensors, lambda node: RECOMPUTED in node.meta)

# Compute that is read, and draws and writes nothing.
pure = where(
    of_tensors,
    lambda node: bool(node.users) and not ops.has_effect(node) and "region" not in node.meta,
)

# Operators of two tensors of one shape, whose order matters.
noncommutative = where(
    calls(aten.sub.Tensor, aten.div.Tensor, aten.mm.default, aten.bmm.default),
    lambda node: _of_one_shape(*node.args[:2]),
)

# Operators whose first operand has the shape of the result, and other elements.
_COPIES = (aten.clone.default, aten.detach.default, aten.alias.default)
bypassable = where(
    of_tensors,
    lambda node: (
        bool(node.args)
        and _of_one_shape(node.args[0], node)
        and node.target not in _COPIES
        and not ops.has_effect(node)
    ),
)

# Nodes that pick one of several results of compute.
picked = nodes(
    lambda node: node.target is operator.getitem and not ops.is_unpack(node) and bool(node.users)
)

# Nodes that draw random numbers; those of backward that draw what forward drew; those that put a
# generator into a state of forward; the masks that dropouts drew.
draws = nodes(ops.is_random)
draws_again = where(draws, lambda node: REPLAYS in node.meta)
replays = nodes(begins_replay)
dropouts = calls(aten.native_dropout.default)
masks = nodes(
    lambda node: (
        node.target is operator.getitem
        and node.args[0].target is aten.native_dropout.default  # type: ignore[union-attr]
        and node.args[1] == 1
    )
)

# Nodes in a compiled region.
marked = nodes(lambda node: "region" in node.meta)


def collectives_with_regions(program: Program) -> list[fx.Node]:
    return [] if program.regions is None else calls(*ops.COLLECTIVES)(program)


# -- pairs --------------------------------------------------------------------------------------


def pairs_in_one_phase(finder: Places) -> Places:
    return lambda program: [
        (a, b) for a, b in combinations(finder(program), 2) if a.meta["phase"] == b.meta["phase"]
    ]


def pairs_of(finder: Places) -> Places:
    """Pairs of nodes in one phase with values of one shape and dtype, the earlier one first."""
    return where(pairs_in_one_phase(finder), lambda pair: _of_one_shape(*pair))


def readers_behind(place: Any) -> bool:
    """Whether all readers of the first node of a pair stand behind the second."""
    first, second = place
    return all(user > second for user in first.users)


def exchangeable(finder: Places) -> Places:
    """Pairs of nodes of which the second's value is there for the readers of the first."""
    return where(pairs_of(finder), readers_behind)


def operands_before(place: Any) -> bool:
    """Whether all operands of the second node of a pair stand before the first."""
    first, second = place
    return all(value < first for value in second.all_input_nodes)


def draws_in_order(program: Program) -> list[Place]:
    return [(a, b) for a, b in pairwise(dropouts(program)) if a.meta["phase"] == b.meta["phase"]]


def pairs_of_constants(program: Program) -> list[Place]:
    constant = [index for index, entry in enumerate(program.buffers) if entry.constant]
    return list(combinations(constant, 2))


def of_one_shape(finder: Places) -> Places:
    """Pairs of collectives whose operands have the same shapes."""

    def shapes(node: fx.Node) -> Any:
        return [_shape(operand) for operand in node.args[0]]  # type: ignore[union-attr]

    def alike(pair: tuple[fx.Node, fx.Node]) -> bool:
        a, b = pair
        params = a.kwargs["params"] != b.kwargs["params"]
        return a.target is b.target and params and shapes(a) == shapes(b)

    return where(pairs_in_one_phase(finder), alike)


def equal_operands(finder: Places) -> Places:
    """(collective, i, j): operands i and j have one shape."""

    def find(program: Program) -> list[Place]:
        return [
            (node, i, j)
            for node in finder(program)
            for i, j in combinations(range(len(node.args[0])), 2)
            if _of_one_shape(node.args[0][i], node.args[0][j])
        ]

    return find


def other_operands(program: Program) -> list[Place]:
    """(compute node, its operand, another value of that shape that exists by then)."""
    by_shape: dict[Any, list[fx.Node]] = {}
    places: list[Place] = []
    for node in program.graph.nodes:
        if ops.is_compute(node) and node.target is not operator.getitem:
            for operand in node.all_input_nodes:
                same = by_shape.get(_shape(operand), [])
                places += [
                    (node, operand, other)
                    for other in same[-3:]
                    if other is not operand and other.meta["phase"] == node.meta["phase"]
                ]
        val = node.meta.get("val")
        if node.op != "output" and isinstance(val, torch.Tensor) and ops.op_of(node) is None:
            by_shape.setdefault(signature(val), []).append(node)
    return places


def arguments(*kinds: type) -> Places:
    """(node, index or name) of the constant arguments of compute nodes of one of `kinds`."""

    def find(program: Program) -> list[Place]:
        return [
            (node, key)
            for node in compute(program)
            for key, value in (*enumerate(node.args), *node.kwargs.items())
            if type(value) in kinds
        ]

    return find


def pairs_of_entries(table: str) -> Places:
    """Pairs of indices in a table whose placeholders have values of one shape and dtype."""
    return lambda program: _pairs([_node_of(entry) for entry in getattr(program, table)])


def pairs_of_results(kind: str) -> Places:
    """Pairs of indices in a list of the output node whose values have one shape and dtype."""
    return lambda program: _pairs(getattr(program.results(), kind))


def _pairs(values: list[Any]) -> list[Place]:
    return [
        (i, j)
        for (i, a), (j, b) in combinations(enumerate(values), 2)
        if a is not b and _of_one_shape(a, b)
    ]


def _node_of(entry: Any) -> Any:
    for name in ("node", "tangent", "target"):
        if hasattr(entry, name):
            return getattr(entry, name)
    raise AssertionError(entry)


def returned(kind: str) -> Places:
    """The indices of the values, not None, in a list of the output node."""
    return lambda program: [
        index for index, value in enumerate(getattr(program.results(), kind)) if value is not None
    ]


def entries(table: str, accepts: Callable[[Any], bool] = lambda entry: True) -> Places:
    """The indices of a table's entries that `accepts` accepts."""
    return lambda program: [
        index for index, entry in enumerate(getattr(program, table)) if accepts(entry)
    ]


def repeated_draws(program: Program) -> list[Place]:
    """(state saved in forward, the draw that it is saved for)."""
    by_name = {node.name: node for node in program.nodes()}
    return [
        (set_again.args[0], by_name[again.meta[REPLAYS]])
        for again in draws_again(program)
        if begins_replay(set_again := again.prev)
    ]


def lists(program: Program) -> list[Place]:
    """(node, index) of the arguments that are lists of different numbers."""
    return [
        (node, index)
        for node in compute(program)
        for index, value in enumerate(node.args)
        if isinstance(value, list) and len({*map(str, value)}) > 1
    ]


def has_others(node: fx.Node) -> bool:
    """Whether `node` picks one of several results."""
    return len(node.args[0].meta["val"]) > 1  # type: ignore[union-attr, arg-type]


def gradients(program: Program) -> list[Place]:
    """(collective or accumulate_grad, operand): full gradients before anything is done to them."""
    places: list[Place] = []
    for node in program.nodes(BACKWARD):
        if node.target in ops.REDUCES:
            places += [(node, operand) for operand in node.args[0]]  # type: ignore[union-attr]
        elif node.target in (ops.accumulate_grad, ops.add_accumulated):
            places.append((node, node.args[0]))
    return [place for place in places if isinstance(place[1], fx.Node)]


def sums(program: Program) -> list[Place]:
    """(sum of two tensors of one shape, index of one)."""
    return [
        (node, index)
        for node in calls(aten.add.Tensor)(program)
        if _of_one_shape(*node.args[:2])
        for index in (0, 1)
    ]


def size_uses(program: Program) -> list[Place]:
    """(node, size it reads, another size)."""
    sizes = where(_sizes, lambda node: not ops.is_unpack(node))(program)
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    return [
        (node, size, other)
        for size in sizes
        for node in size.users
        for other in sizes
        if node.op == "call_function"
        and str(other.meta["val"]) != str(size.meta["val"])
        and place[other] < place[node]
    ]


def last_result(kind: str) -> Places:
    """The index of the last value of a list of the output node."""

    def find(program: Program) -> list[Place]:
        number = len(getattr(program.results(), kind))
        return [number - 1] if number else []

    return find


def reduced_grads(program: Program) -> list[Place]:
    """The indices of the gradients that are reduced."""
    return [
        index
        for index, grad in enumerate(program.results().grads)
        if isinstance(grad, fx.Node) and ops.is_reduced(grad)
    ]


# -- freed memory, sizes and arguments ----------------------------------------------------------


def _freed(target: Any, program: Program) -> list[Place]:
    """(free or release, a value or view that it gives back)."""
    return [
        (node, value)
        for node in calls(target)(program)
        for value in aliases_of(*(unpacks(node.args[0]) if target is ops.free else node.args))  # type: ignore[arg-type]
    ]


def _reads(target: Any, program: Program) -> list[Place]:
    """(free or release, a reader of what it gives back)."""
    return [
        (node, user)
        for node, value in _freed(target, program)
        for user in value.users
        if user.op == "call_function" and user.target is not ops.release
    ]


freed_reads = partial(_reads, ops.free)
released_reads = partial(_reads, ops.release)
freed_values = where(
    partial(_freed, ops.free), lambda place: isinstance(place[1].meta["val"], torch.Tensor)
)


def named(name: str, *targets: Any) -> Places:
    """(node, `name`) of the calls of `targets`, whether the argument is given or by default."""
    return lambda program: [(node, name) for node in calls(*targets)(program)]


def size_reads(program: Program) -> list[Place]:
    """(node that takes a size of a tensor, index of the dim)."""
    return [(node, 1) for node in calls(aten.sym_size.int)(program) if node.args[1] in (0, 1)]


_sizes = nodes(lambda node: isinstance(node.meta["val"], torch.SymInt))


def fixed_sizes(program: Program) -> list[Place]:
    """(node, symbolic size that it reads)."""
    return [(user, node) for node in _sizes(program) for user in node.users if ops.is_compute(user)]
