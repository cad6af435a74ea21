"""Random numbers drawn again: which draws, and the states of generators that they are drawn from.

A state is small (16 bytes on CUDA, 5,056 on the CPU), so backward draws the numbers of a region
again instead of reading saved masks. Forward saves the state before the region's first draw.
Further draws follow from it as they did in forward, so neighbouring draws need one state together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from operator import getitem

import torch
from torch import fx

from graphshard.cost.op_cost import tensors_in
from graphshard.program import ops
from graphshard.program.collective import generator_of
from graphshard.program.edit import fake_as, fake_like, fake_on, insert_node
from graphshard.program.program import BACKWARD, FORWARD, REPLAYS, Program
from graphshard.program.storages import bytes_of
from graphshard.recompute.regions import Region, is_dropout, saved_by_model
from graphshard.torch_private.random_ops import may_draw, may_move_generators, state_bytes


def redrawn(
    program: Program,
    region_of: Callable[[fx.Node], Region | None],
    min_bytes: int | None = None,
) -> frozenset[fx.Node]:
    """The draws of forward that backward may repeat, in the regions where that saves memory.

    A region whose random results take fewer than `min_bytes` keeps them; None: no more than a state
    of the generator. Operators that may draw without saying so are always repeated, as they mostly
    do not. `region_of` gives the region that a node is recomputed with.
    """
    by_region: dict[tuple[Region, str], list[fx.Node]] = defaultdict(list)
    found: list[fx.Node] = []
    for node in program.nodes(FORWARD):
        if not may_draw(node) or ops.writes(node):
            continue
        region, device = region_of(node), generator_of(program, node)
        if region is None or any(map(saved_by_model, (node, *node.users))):
            continue
        if ops.is_random(node):
            by_region[region, device].append(node)
        elif state_bytes(device) is not None:
            found.append(node)
    for (_, device), draws in by_region.items():
        size = state_bytes(device)
        if size is not None:
            least = size + 1 if min_bytes is None else min_bytes
            found += draws if sum(map(_kept_bytes, draws)) >= least else ()
    return frozenset(found)


def _kept_bytes(draw: fx.Node) -> int:
    """Bytes of the results of `draw` that are saved if it is not repeated."""
    val = draw.meta["val"]
    if is_dropout(draw):
        return bytes_of(val[1])
    return sum(map(bytes_of, tensors_in(val)))


# -- states ---------------------------------------------------------------------------------------


def replay_draws(program: Program) -> None:
    """Put the generator into the state of forward around the draws that backward repeats.

    Operators of other libraries are taken for draws, since they may draw without saying so. Draws
    that stand in forward's order, with no other between, share one saved state.
    """
    runs = _runs(program)
    saved: dict[str, fx.Node] = {}
    for run in runs:
        first = run[0].meta[REPLAYS]
        if first not in saved:
            saved[first] = _save_before(program, run[0])
        _replay(program, saved[first], run)
        for draw in run:
            for pick in list(_repeated(program, draw).users):
                if pick.target is getitem and not pick.users:  # a mask that nobody reads now
                    program.graph.erase_node(pick)


def _repeated(program: Program, draw: fx.Node) -> fx.Node:
    """The node of forward whose numbers `draw` draws again."""
    return next(n for n in program.nodes(FORWARD) if n.name == draw.meta[REPLAYS])


def _runs(program: Program) -> list[list[fx.Node]]:
    """The repeated draws of backward in order; those of a list follow from one state."""
    place: dict[str, int] = {}
    for index, node in enumerate(filter(may_move_generators, program.nodes(FORWARD))):
        place[node.name] = index
    runs: list[list[fx.Node]] = []
    expected: int | None = None  # the place of the draw that would go on the last run
    for node in filter(may_move_generators, program.nodes(BACKWARD)):
        draw = node.meta.get(REPLAYS)
        if draw is None:
            expected = None
            continue
        same = bool(runs) and generator_of(program, runs[-1][0]) == generator_of(program, node)
        if same and place[draw] == expected:
            runs[-1].append(node)
        else:
            runs.append([node])
        expected = place[draw] + 1
    return runs


def _save_before(program: Program, draw: fx.Node) -> fx.Node:
    """Save the generator's state in forward, before the draw that `draw` repeats."""
    original = _repeated(program, draw)
    with program.graph.inserting_before(original):
        return _insert(program, ops.save_random_state, (), original, "random_state", FORWARD)


def _replay(program: Program, state: fx.Node, run: list[fx.Node]) -> None:
    first, last = run[0], run[-1]
    with program.graph.inserting_before(first):
        present = _insert(program, ops.set_random_state, (state,), first, "present_state", BACKWARD)
    with program.graph.inserting_after(last):
        _insert(program, ops.set_random_state, (present,), last, "replayed_state", BACKWARD)


def _insert(
    program: Program, target: object, args: tuple[fx.Node, ...], at: fx.Node, name: str, phase: str
) -> fx.Node:
    device = generator_of(program, at)
    like = next(tensors_in(at.meta["val"]))
    size = state_bytes(device)
    assert size is not None
    node = insert_node(
        program,
        target,
        args,
        {"device": device},
        name=f"{at.meta.get('unit') or 'root'}_{name}",
        unit=at.meta.get("unit", ""),
        phase=phase,
        val=fake_on(fake_as(fake_like(like, (size,)), torch.uint8), "cpu"),
    )
    node.meta["fqn"] = at.meta["fqn"]
    return node
