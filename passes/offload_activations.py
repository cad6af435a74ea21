"""offload_activations: what forward saves for backward waits on the host in between."""

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
from graphshard.program.storages import SavedStorage, saved_storages


@dataclass(frozen=True)
class OffloadActivations(Pass):
    """Copy each saved activation to the host after its last use in forward, and back in backward.

    A step of a phase reaches from where one unit's run starts to where the next one's does. What is
    last used in a step of forward is copied to the host at the step's end, and its memory on the
    device is given back once the copy has arrived: at the end of the next step, so at most two
    steps' activations are there at once. What is first used in a step of backward is back when the
    step begins (`PrefetchCopies` issues the copy earlier). A storage is copied once: if several
    views of it are saved, the views are made again in backward.

    The idea is that of "vDNN: Virtualized Deep Neural Networks" (arXiv:1602.08124) and of
    torch.autograd.graph.save_on_cpu.

    Args:
        min_bytes: what is smaller stays on the device, since a copy costs more than it frees
            (torchtune's activation offloading has the same bound). Symbolic sizes count as large.
    """

    min_bytes: int = 1024

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: an activation still crosses on the device.
        """
        if not program.grad:
            return
        _settle_picks(program, plan)
        copies = to_copy(program, plan, self.min_bytes)
        if not copies:
            return
        spans = find_spans(program, plan)
        forward, backward = spans.steps(FORWARD), spans.steps(BACKWARD)
        hosts = _copy_out(program, spans, forward, copies)
        back = {c: _bring_back(program, spans, backward, c, hosts[c.value]) for c in copies}
        for copied in copies:  # now that all of a step's copies arrive before its first node
            _use(program, copied, back[copied])
        note_copies(program, "activations", params=False)
        left = to_copy(program, plan, self.min_bytes)
        if left:
            raise PassError(
                f"pass {self.name}: {left[0].value.name} of unit "
                f"{left[0].value.meta['unit']!r} is still kept on the device for backward"
            )


@dataclass(frozen=True)
class Copied:
    """A value to copy, and those that backward reads of it (it, or views of it)."""

    value: fx.Node
    saved: tuple[fx.Node, ...]


def to_copy(program: Program, plan: ShardingPlan, min_bytes: int) -> list[Copied]:
    """The values of forward to keep on the host, in order of the graph.

    Of a storage either what owns it, or if that is less, each saved view by itself.
    """
    found: list[Copied] = []
    for saved in saved_storages(program, plan):
        size = nbytes(saved.root)
        if size is None or size >= min_bytes:
            found += _of_storage(saved)
    return sorted(found, key=lambda copied: copied.value)


def _of_storage(saved: SavedStorage) -> list[Copied]:
    whole = Copied(saved.root, saved.values)
    if saved.values == (saved.root,):
        return [whole]
    sizes = [nbytes(value) for value in saved.values]
    root = nbytes(saved.root)
    if all(map(is_dense, saved.values)) and root is not None and None not in sizes:
        together = sum(size for size in sizes if size is not None)
        if together < root or len(sizes) == 1:
            return [Copied(value, (value,)) for value in saved.values]
    return [whole]


def _settle_picks(program: Program, plan: ShardingPlan) -> None:
    """Pick in forward what is picked out of a forward result (it runs there anyway)."""
    for saved in saved_storages(program, plan):
        for node in saved.values:
            if node.meta["phase"] == BACKWARD:
                source = node.args[0]
                assert isinstance(source, fx.Node)
                source.append(node)
                node.meta.update(phase=FORWARD, unit=source.meta["unit"])


def _step_of(spans: UnitSpans, steps: Sequence[fx.Node], place: int) -> int:
    """The index of the step that the node at `place` belongs to."""
    return max(0, sum(spans.position[first] <= place for first in steps) - 1)


def _copy_out(
    program: Program, spans: UnitSpans, steps: Sequence[fx.Node], copies: Sequence[Copied]
) -> dict[fx.Node, fx.Node]:
    """Copy to the host, by step; what is on the host, by copied value."""
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


def _bring_back(
    program: Program, spans: UnitSpans, steps: Sequence[fx.Node], copied: Copied, host: fx.Node
) -> fx.Node:
    """Copy to the device before the step of backward that first uses it; what arrived there."""
    uses = _uses(copied)
    place = spans.position[uses[0][0] if uses else program.output_node]
    with program.graph.inserting_before(steps[_step_of(spans, steps, place)]):
        name = copied.value.name
        copy = insert_copy(program, ops.to_device, host, name=f"{name}_to_device", phase=BACKWARD)
        return insert_copy(program, ops.arrive, copy, name=f"{name}_back", phase=BACKWARD)


def _uses(copied: Copied) -> list[tuple[fx.Node, fx.Node]]:
    """(node of backward, what it reads of the copied value), in order."""
    found = [
        (user, value)
        for value in copied.saved
        for user in value.users
        if user.op == "call_function" and user.meta["phase"] == BACKWARD
    ]
    return sorted(found, key=lambda use: use[0])


def _use(program: Program, copied: Copied, back: fx.Node) -> None:
    """Let backward read what came back; drop the views in forward that only backward read."""
    results = program.results()
    ends = [end for end in (*results.grads, *results.input_grads) if end in copied.saved]
    again = {copied.value: back}
    for user, value in _uses(copied):
        user.replace_input_with(value, _made_again(program, value, again, before=user))
    for end in ends:
        _made_again(program, end, again, before=program.output_node)
    results.grads = [again.get(end, end) if end in ends else end for end in results.grads]
    results.input_grads = [again.get(e, e) if e in ends else e for e in results.input_grads]
    program.set_results(results)
    views = aliases_of(storage_root(copied.value))
    erase_dead(view for view in views if view is not copied.value and not ops.writes(view))


def _made_again(
    program: Program, value: fx.Node, again: dict[fx.Node, fx.Node], *, before: fx.Node
) -> fx.Node:
    """`value`, a view of what came back, made again before a node unless it was already."""
    if value not in again:
        if ops.writes(value):
            raise PassError(
                f"{value.name} writes into a value that backward reads, which cannot be done again "
                "there; save a copy of it instead"
            )
        base = alias_inputs(value)[0]
        new = _made_again(program, base, again, before=before)
        with program.graph.inserting_before(before):
            again[value] = program.graph.node_copy(value, lambda n: new if n is base else n)
        unit = before.meta.get("unit", value.meta["unit"])
        again[value].meta = {**value.meta, "phase": BACKWARD, "unit": unit}
    return again[value]


def _computes(node: fx.Node, phase: str) -> bool:
    return ops.is_compute(node) and node.meta["phase"] == phase
