"""offload_activations: store saved activations on the host between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import alias_inputs, aliases_of, is_dense, nbytes, storage_root
from graphshard.program.edit import erase_dead, insert_copy, note_copies
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.spans import UnitSpans, find_spans
from graphshard.program.storages import saved_storages

ON_CUDA = 1 << 20
"""Bytes below which an activation stays: over PCIe 1 MiB takes 20 us each way, and the launches and
events of its two copies more of the host."""

ELSEWHERE = 1024


@dataclass(frozen=True)
class OffloadActivations(Pass):
    """Copy each saved activation to the host after its last use in forward, and back in backward.

    A step of a phase lasts from the start of one unit's span to the start of the next one's. An
    activation leaves at the end of the step of forward that last uses it. Its device memory is
    freed when the copy arrives, at the end of the next step, so at most two steps' activations are
    on the device at once. It is back at the start of the step of backward that first uses it;
    `PrefetchCopies` issues that copy earlier. Each storage is copied once: views of it that are
    saved are computed again in backward.

    Args:
        min_bytes: smaller activations stay on the device, since their copy costs more than it
            frees. Symbolic sizes count as large. None: `ON_CUDA` or `ELSEWHERE`.
    """

    min_bytes: int | None = None

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        if not program.grad:
            return
        _pick_in_forward(program, plan)
        min_bytes = self.min_bytes
        if min_bytes is None:
            min_bytes = ON_CUDA if program.device == "cuda" else ELSEWHERE
        copies = to_copy(program, plan, min_bytes)
        if not copies:
            return
        spans = find_spans(program, plan)
        forward, backward = spans.steps(FORWARD), spans.steps(BACKWARD)
        hosts = _copy_to_host(program, spans, forward, copies)
        back = {c: _copy_back(program, spans, backward, c, hosts[c.value]) for c in copies}
        for copied in copies:  # once all copies of a step arrive before its first node
            _redirect_backward(program, copied, back[copied])
        note_copies(program, "activations", params=False)
        left = to_copy(program, plan, min_bytes)
        if left:
            raise PassError(
                f"pass {self.name}: {left[0].value.name} of unit "
                f"{left[0].value.meta['unit']!r} is still kept on the device for backward"
            )


@dataclass(frozen=True)
class Copied:
    """A value to copy, and the saved values (it, or views of it) that backward reads."""

    value: fx.Node
    saved: tuple[fx.Node, ...]


def to_copy(program: Program, plan: ShardingPlan, min_bytes: int) -> list[Copied]:
    """The values of forward to copy to the host, in order of the graph.

    For each storage this is its owner, or each saved view by itself if that is fewer bytes.
    """
    copies: list[Copied] = []
    for root, values in saved_storages(program, plan).items():
        size = nbytes(root)
        if size is None or size >= min_bytes:
            copies += _copies_of(Copied(root, values))
    return sorted(copies, key=lambda copied: copied.value)


def _copies_of(whole: Copied) -> list[Copied]:
    """The copies of one storage, of which `whole` is the owner."""
    if whole.saved == (whole.value,):
        return [whole]
    sizes = [nbytes(value) for value in whole.saved]
    size = nbytes(whole.value)
    if all(map(is_dense, whole.saved)) and size is not None and None not in sizes:
        together = sum(size for size in sizes if size is not None)
        if together < size or len(sizes) == 1:
            return [Copied(value, (value,)) for value in whole.saved]
    return [whole]


def _pick_in_forward(program: Program, plan: ShardingPlan) -> None:
    """Move picks from a forward result to forward, where they run anyway."""
    for values in saved_storages(program, plan).values():
        for node in values:
            if node.meta["phase"] == BACKWARD:
                source = node.args[0]
                assert isinstance(source, fx.Node)
                source.append(node)
                node.meta.update(phase=FORWARD, unit=source.meta["unit"])


def _step_of(spans: UnitSpans, steps: Sequence[fx.Node], place: int) -> int:
    """The index of the step that the node at `place` belongs to."""
    return max(0, sum(spans.position[first] <= place for first in steps) - 1)


def _copy_to_host(
    program: Program, spans: UnitSpans, steps: Sequence[fx.Node], copies: Sequence[Copied]
) -> dict[fx.Node, fx.Node]:
    """Insert the copies to the host, step by step; returns the host value by copied value."""
    by_step: dict[int, list[fx.Node]] = {}
    for copied in copies:
        last = spans.position[copied.value]
        for value in aliases_of(storage_root(copied.value)):
            uses = (value, *value.users)
            last = max([last, *(spans.position[u] for u in uses if _computes(u, FORWARD))])
        by_step.setdefault(_step_of(spans, steps, last), []).append(copied.value)
    hosts: dict[fx.Node, fx.Node] = {}
    under_way: dict[fx.Node, fx.Node] = {}

    def arrive() -> None:
        for value, copy in under_way.items():
            hosts[value] = insert_copy(
                program, ops.arrive, copy, name=f"{value.name}_on_host", phase=FORWARD
            )
        under_way.clear()

    for step in sorted(by_step):
        after = steps[step + 1] if step + 1 < len(steps) else program.first_backward()
        after = after.prev
        while not _computes(after, FORWARD):
            after = after.prev
        with program.graph.inserting_before(after.next):
            arrive()
            for value in by_step[step]:
                under_way[value] = insert_copy(
                    program, ops.to_host, value, name=f"{value.name}_to_host", phase=FORWARD
                )
    with program.graph.inserting_before(program.first_backward()):
        arrive()
    return hosts


def _copy_back(
    program: Program, spans: UnitSpans, steps: Sequence[fx.Node], copied: Copied, host: fx.Node
) -> fx.Node:
    """Copy a value back before the step of backward that first uses it; returns the arrival."""
    uses = _backward_uses(copied)
    place = spans.position[uses[0][0] if uses else program.output_node]
    with program.graph.inserting_before(steps[_step_of(spans, steps, place)]):
        name = copied.value.name
        copy = insert_copy(program, ops.to_device, host, name=f"{name}_to_device", phase=BACKWARD)
        return insert_copy(program, ops.arrive, copy, name=f"{name}_back", phase=BACKWARD)


def _backward_uses(copied: Copied) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs (node of backward, saved value that it reads), in order."""
    uses = [
        (user, value)
        for value in copied.saved
        for user in value.users
        if user.op == "call_function" and user.meta["phase"] == BACKWARD
    ]
    return sorted(uses, key=lambda use: use[0])


def _redirect_backward(program: Program, copied: Copied, back: fx.Node) -> None:
    """Redirect backward to the arrived value; drop views in forward that only backward read."""
    results = program.results()
    returned = [end for end in (*results.grads, *results.input_grads) if end in copied.saved]
    arrived = {copied.value: back}
    for user, value in _backward_uses(copied):
        user.replace_input_with(value, _view_again(program, value, arrived, before=user))
    for end in returned:
        _view_again(program, end, arrived, before=program.output_node)
    results.grads = [arrived.get(end, end) if end in returned else end for end in results.grads]
    results.input_grads = [arrived.get(e, e) if e in returned else e for e in results.input_grads]
    program.set_results(results)
    views = aliases_of(storage_root(copied.value))
    erase_dead(view for view in views if view is not copied.value and not ops.writes(view))


def _view_again(
    program: Program, value: fx.Node, arrived: dict[fx.Node, fx.Node], *, before: fx.Node
) -> fx.Node:
    """The view `value` of the arrived value, computed again before a node if not done yet."""
    if value not in arrived:
        if ops.writes(value):
            raise PassError(
                f"{value.name} writes into a value that backward reads, which cannot be done again "
                "there; save a copy of it instead"
            )
        base = alias_inputs(value)[0]
        arrived_base = _view_again(program, base, arrived, before=before)
        with program.graph.inserting_before(before):
            arrived[value] = program.graph.node_copy(
                value, lambda n: arrived_base if n is base else n
            )
        unit = before.meta.get("unit", value.meta["unit"])
        arrived[value].meta = {**value.meta, "phase": BACKWARD, "unit": unit}
    return arrived[value]


def _computes(node: fx.Node, phase: str) -> bool:
    return ops.is_compute(node) and node.meta["phase"] == phase
