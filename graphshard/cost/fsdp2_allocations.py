"""What torch's FSDP2 would allocate for a program, where graphshard allocates something else.

FSDP2 (`torch.distributed.fsdp.fully_shard`) copies: a unit is gathered into one flat buffer, from
which its parameters are copied out, and its gradients are copied into one flat buffer, which is
reduced. Flat buffers of gathers and reduced gradients are allocated on streams of their own, whose
cached memory no other stream can use. A flat buffer of forward stays until the next unit's copies
are made, one of backward until its own are; a buffer to reduce stays until the next reduce. The
parameters of a unit are given back together, once its backward is done, and gradients keep their
dtype until then. Where nothing is compiled, a selective checkpoint of the model keeps the result of
each operator that its policy saves until the backward of the checkpointed call is over, whether
backward reads it or not (`torch.utils.checkpoint`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest

from torch import fx

from graphshard.capture.annotation import KEEP, REGION
from graphshard.cost.allocations import pieces_of, temporaries
from graphshard.cost.memory import ACCUMULATED, BUFFERS, SHARD_GRADIENTS, buffers_of
from graphshard.cost.runner import FSDP2, Runner
from graphshard.program import ops
from graphshard.program.collective import operands_of, wait_of
from graphshard.program.program import FORWARD, Program
from graphshard.program.storages import (
    FULL_GRADIENTS,
    Storage,
    Storages,
    bytes_of,
    gathered_bytes,
    node_bytes,
)

GATHERS = "FSDP2's gathers"
REDUCES = "FSDP2's reduces"


def fsdp2_lives(program: Program, runner: Runner = FSDP2) -> Iterator[Storage]:
    """What FSDP2 allocates in forward and backward of a step with the units of `program`.

    `runner` says what is not compiled, and whether outputs are held.
    """
    storages, held = runner.storages(program)
    place = storages.place
    if program.regions is None:
        _keep_for_checkpoints(program, storages)
    gathers = [node for node in program.nodes() if node.target is ops.all_gather]
    reduces = [node for node in program.nodes() if node.target in ops.REDUCES]
    waits = {gather: place[wait_of(gather)] for gather in gathers}
    sent, dropped = _gradients(reduces, storages.of_node, place)
    order: list[Storage] = []
    for storage in (*held, *storages.all):
        if storage.node.target is ops.all_gather or storage.node.target is ops.wait:
            continue  # below
        if id(storage) in dropped:
            continue
        order += pieces_of(storage, sent.get(id(storage), storage.dies))
    for storage in buffers_of(program, "nccl"):
        if storage.kind == ACCUMULATED:
            order += pieces_of(storage, storage.dies)
    border = place[program.first_backward()]
    forward = [gather for gather in gathers if gather.meta["phase"] == FORWARD]
    for gather in gathers:
        own = [s for s in storages.all if s.node is gather and s.size]
        if own:
            order += _gathered(gather, own, program, place, waits, forward, border)
    for reduce, after in zip_longest(reduces, reduces[1:]):  # none, if gradients are accumulated
        order += _reduced(reduce, after, place)
    order.sort(key=lambda storage: storage.born)  # stable: what operators allocate comes first
    yield from order
    yield from temporaries(program)


def _keep_for_checkpoints(program: Program, storages: Storages) -> None:
    """Let what selective checkpoints of the model save live until their backward is over."""
    ends: dict[object, int] = {}
    for node in program.nodes():
        if node.meta["phase"] != FORWARD and (calls := node.meta.get(REGION)):
            ends[calls] = storages.place[node]
    for node in program.nodes():
        if node.meta["phase"] == FORWARD and node.meta.get(KEEP):
            for storage in storages.of_node.get(node, ()):
                storage.dies = max(storage.dies, ends.get(node.meta.get(REGION), 0))


def _gradients(
    reduces: list[fx.Node],
    of_node: Mapping[fx.Node, tuple[Storage, ...]],
    place: Mapping[fx.Node, int],
) -> tuple[dict[int, int], set[int]]:
    """The place up to which each gradient lives, and the casts of gradients that are not made."""
    sent: dict[int, int] = {}
    dropped: set[int] = set()
    for reduce in reduces:
        for operand in operands_of(reduce):
            gradient: fx.Node = operand
            if operand.target is ops.cast:
                dropped.update(id(storage) for storage in of_node.get(operand, ()))
                gradient = operand.args[0]  # type: ignore[assignment]
            for storage in of_node.get(gradient, ()):
                if id(storage) not in dropped:
                    sent[id(storage)] = max(sent.get(id(storage), 0), place[reduce])
    return sent, dropped


def _gathered(
    gather: fx.Node,
    own: list[Storage],
    program: Program,
    place: Mapping[fx.Node, int],
    waits: dict[fx.Node, int],
    forward: list[fx.Node],
    border: int,
) -> Iterator[Storage]:
    copied = waits[gather]
    if gather in forward:
        later = [waits[other] for other in forward if waits[other] > copied]
        born, dies = copied, min(later, default=border)
    else:
        born, dies = place[gather], copied
    flat = Storage(gather, gathered_bytes(gather, program), BUFFERS, born=born, stream=GATHERS)
    if any(operand.target is ops.cast for operand in operands_of(gather)):
        shard = sum(map(node_bytes, operands_of(gather)))
        yield replace(flat, size=shard, dies=born, name=f"{gather.name}_cast")
    yield replace(flat, dies=dies, name=f"{gather.name}_flat")
    end = max(storage.dies for storage in own)
    for storage in own:
        for size in storage.pieces or (storage.size,):
            yield replace(storage, size=size, pieces=(), born=copied, dies=end)


def _reduced(
    reduce: fx.Node, after: fx.Node | None, place: Mapping[fx.Node, int]
) -> Iterator[Storage]:
    results = sum(map(bytes_of, wait_of(reduce).meta["val"]))
    full = sum(map(node_bytes, operands_of(reduce)))
    here = place[reduce]
    dies = place[wait_of(reduce)] if after is None else place[after] - 1
    yield Storage(reduce, full, FULL_GRADIENTS, born=here, dies=dies, name=f"{reduce.name}_flat")
    yield Storage(reduce, results, SHARD_GRADIENTS, born=here, stream=REDUCES)
