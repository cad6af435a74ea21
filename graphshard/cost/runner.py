"""What runs a plan: the kernels that compute is fused into, and the storages that a program has.

README.md has the model of fused kernels, and its limits. Not modelled are buffers that a kernel
writes over its own operands, and the room that a template of a matrix product takes.

Of torch.compile (`Runner.runtime` "fsdp2"), forward and backward are compiled together, and a
partitioner chooses what is saved. It computes again in backward what fused kernels read there, if
what that takes is smaller, as in "min-cut partitioning" (github.com/pytorch/functorch, Horace He):
of a float32 loss only the logits are saved. The rule here looks at one value after another, not at
a minimum cut.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from graphshard.cost.op_cost import FREE, OpCost, op_cost
from graphshard.errors import CostError
from graphshard.program import ops
from graphshard.program.aliases import aliases_of, is_view_op
from graphshard.program.program import FORWARD, Program
from graphshard.program.regions import Region, picks_from, regions_in, viewed
from graphshard.program.storages import END, RETURNED, Storage, Storages, node_bytes, storages_of

_STREAMS = ("add",)
"""The measured curve of a fused kernel, which is that of elementwise arithmetic."""


def fused_costs(program: Program, leave_eager: Collection[str] = ()) -> Mapping[fx.Node, OpCost]:
    """The cost of each node in a region of `program`; a kernel's cost is at its last operator.

    What `leave_eager` names is left out; see `is_left_eager`.
    """
    costs: dict[fx.Node, OpCost] = {}
    for region in compiled_regions(program, leave_eager):
        for node in region.nodes:
            costs[node] = op_cost(node) if is_separate(node) else FREE
        for nodes in kernels_of(region):
            costs[nodes[-1]] = _kernel(nodes)
    return costs


def compiled_regions(program: Program, leave_eager: Collection[str] = ()) -> list[Region]:
    """The regions of `program`, without the nodes that `leave_eager` names."""
    if program.regions is None:
        return []
    regions = []
    for region in regions_in(program.graph):
        nodes = tuple(n for n in region.nodes if not is_left_eager(n, leave_eager))
        if nodes:
            regions.append(replace(region, nodes=nodes))
    return regions


def is_left_eager(node: fx.Node, names: Collection[str]) -> bool:
    """Whether `node` belongs to a unit among `names`, or lies in a module among them."""
    if node.meta.get("unit", "") in names:
        return True
    fqn = str(node.meta.get("fqn", ""))
    return any(fqn == name or fqn.startswith(f"{name}.") for name in names if name)


def kernels_of(region: Region) -> list[list[fx.Node]]:
    """The operators of each fused kernel of `region`."""
    inside = set(region.nodes)
    stage: dict[fx.Node, int] = {}
    kernels: dict[int, list[fx.Node]] = {}
    for node in region.nodes:
        read = [value for value in node.all_input_nodes if value in inside]
        behind = (stage[value] + is_separate(operator_of(value)) for value in read)
        stage[node] = max(behind, default=0)
        computes = node.target is not operator.getitem and not is_view_op(node.target)
        if computes and not is_separate(node):
            kernels.setdefault(stage[node], []).append(node)
    return list(kernels.values())


def _kernel(nodes: list[fx.Node]) -> OpCost:
    inside = set(nodes)
    reads: dict[fx.Node, int] = {}
    moved = 0
    for node in nodes:
        for value in node.all_input_nodes:
            base = base_of(value)
            if operator_of(base) not in inside and isinstance(value.meta.get("val"), Tensor):
                size = node_bytes(value)
                reads[base] = max(reads.get(base, 0), min(size, node_bytes(base)))
        for value in results_of(node):
            if read_outside(value, inside):
                moved += node_bytes(value)
    floats = [n.meta["val"].dtype for n in (*reads, *nodes) if isinstance(n.meta["val"], Tensor)]
    floats = [dtype for dtype in floats if dtype.is_floating_point]
    dtype = floats[0] if floats else torch.float32
    return OpCost("bandwidth", 0, moved + sum(reads.values()), dtype, _STREAMS)


def is_separate(node: fx.Node) -> bool:
    """Whether `node` stays a separate kernel in a region."""
    return node.op == "call_function" and (ops.is_random(node) or op_cost(node).flops > 0)


def operator_of(value: fx.Node) -> fx.Node:
    """The operator that returns `value`."""
    return picks_from(value) or value


def base_of(value: fx.Node) -> fx.Node:
    """The value that `value` is a view of, or itself."""
    while (base := viewed(value)) is not None:
        value = base
    return value


def results_of(node: fx.Node) -> list[fx.Node]:
    """The nodes of the tensors that `node` returns."""
    if isinstance(node.meta.get("val"), Tensor):
        return [node]
    return [user for user in node.users if isinstance(user.meta.get("val"), Tensor)]


def read_outside(value: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a node outside the kernel reads `value` or a view of it."""
    for user in value.users:
        aliases = picks_from(user) is value or viewed(user) is value
        if read_outside(user, inside) if aliases else user not in inside:
            return True
    return False


RUNTIMES = ("graphshard", "fsdp2")
"""The runtimes that an estimate can be of."""


@dataclass(frozen=True)
class Runner:
    """The runtime that an estimate is of.

    Args:
        runtime: "graphshard", whose gathers write each parameter in place, or "fsdp2", torch's
            `fully_shard`, which gathers into one buffer and copies each parameter out of it.
        leave_eager: FQNs of units and modules whose compute is not compiled although the program
            has regions; "" is the root unit. Models that are compiled block by block leave the
            root, with its norm, head and loss, eager.
        holds_outputs: whether the training loop holds what a call returned until the next call
            returns, as the variable of `outputs = model(**batch)` does.
    """

    runtime: str = "graphshard"
    leave_eager: frozenset[str] = frozenset()
    holds_outputs: bool = False

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise CostError(f"runtime must be one of {', '.join(RUNTIMES)}; got {self.runtime!r}")

    @classmethod
    def of(cls, runtime: str, leave_eager: Collection[str], holds_outputs: bool) -> Runner:
        """The runner of the arguments of `graphshard.simulate`."""
        if isinstance(leave_eager, str):
            raise CostError(
                f"leave_eager is a list of units and modules; got {leave_eager!r}; write "
                f"leave_eager=[{leave_eager!r}]"
            )
        return cls(runtime, frozenset(leave_eager), holds_outputs)

    def check(self, program: Program) -> None:
        """Check that each name of `leave_eager` keeps a part of `program` from being compiled."""
        if self.leave_eager and program.regions is None:
            raise CostError(
                "leave_eager has no effect where nothing is compiled; leave it out, or plan with "
                'backend="inductor"'
            )
        if self.leave_eager:
            nodes = [node for region in regions_in(program.graph) for node in region.nodes]
            for name in sorted(self.leave_eager):
                if not any(is_left_eager(node, [name]) for node in nodes):
                    raise CostError(
                        f"leave_eager names {name!r}, but nothing that is compiled belongs to a "
                        "unit or module of that name"
                    )

    def storages(self, program: Program) -> tuple[Storages, list[Storage]]:
        """The storages of a step of `program`, and the outputs of the call before that are held."""
        storages = storages_of(program)
        _leave_out_fused(program, storages, self)
        return storages, _hold_outputs(program, storages) if self.holds_outputs else []

    @property
    def copies_gathers(self) -> bool:
        """Whether each gathered parameter is copied out of the collective's buffer."""
        return self.runtime == "fsdp2"


OWN, FSDP2 = Runner(), Runner("fsdp2")


# -- storages --------------------------------------------------------------------------------------


def _leave_out_fused(program: Program, storages: Storages, runner: Runner) -> None:
    """Set the bytes of storages that compiled code does not have to 0, and extend others' lives.

    graphshard compiles forward and backward apart; otherwise backward may compute values again.
    """
    regions = compiled_regions(program, runner.leave_eager)
    fused: set[fx.Node] = set()
    for value, inside in _computed_in(regions):
        fused.add(operator_of(value))
        own = storages.of_node.get(value, ())
        if not read_outside(value, inside) and len(own) == 1 and own[0].node is operator_of(value):
            own[0].size, own[0].pieces = 0, ()
    if runner.copies_gathers:
        forward = [r for r in regions if r.nodes[0].meta["phase"] == FORWARD]
        for value, inside in _computed_in(forward):
            if read_outside(value, inside):
                _save_operands(value, inside, storages, fused)


def _computed_in(regions: Iterable[Region]) -> Iterator[tuple[fx.Node, set[fx.Node]]]:
    """Each value that fused kernels of `regions` compute, with the operators of its kernel."""
    for region in regions:
        for kernel in kernels_of(region):
            inside = set(kernel)
            yield from ((value, inside) for node in kernel for value in results_of(node))


def _save_operands(
    value: fx.Node, inside: set[fx.Node], storages: Storages, fused: set[fx.Node]
) -> None:
    """Save what `value` is computed from instead of itself, where only fused kernels read it."""
    own = storages.of_node.get(value, ())
    aliases = set(aliases_of(value))
    readers = {user for alias in aliases for user in alias.users} - aliases - inside
    if len(own) != 1 or not own[0].size or not readers <= fused:
        return
    if all(user.meta["phase"] == FORWARD for user in readers):
        return
    operands = [s for base in _operands(value, inside) for s in storages.of_node.get(base, ())]
    longer = [storage for storage in operands if storage.dies < own[0].dies]
    if sum(storage.size for storage in longer) < own[0].size:
        own[0].size, own[0].pieces = 0, ()
        for storage in longer:
            storage.dies, storage.ends = own[0].dies, own[0].ends


def _operands(value: fx.Node, inside: set[fx.Node]) -> set[fx.Node]:
    """The values outside of a kernel that `value` is computed from."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    stack = [operator_of(value)]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for operand in node.all_input_nodes:
            base = base_of(operand)
            if operator_of(base) in inside:
                stack.append(operator_of(base))
            elif isinstance(base.meta.get("val"), Tensor):
                found.add(base)
    return found


def _hold_outputs(program: Program, storages: Storages) -> list[Storage]:
    """Let outputs outlive their step, and return those of the step before; see README.md."""
    backward = program.first_backward()
    outputs = [node for node in program.results().outputs if isinstance(node, fx.Node)]
    held = {id(s): s for node in outputs for s in storages.of_node.get(node, ())}
    before = []
    for storage in held.values():
        storage.dies, storage.ends = END, []
        last = storages.place[backward] - 1
        before.append(replace(storage, kind=RETURNED, born=0, dies=last, ends=[backward]))
    return before
