"""Write files for debugging: the plan, the rewritten program, and the Python that ranks run."""

from __future__ import annotations

import json
import os
import re
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from graphshard.errors import RuntimeStateError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.cut import cut
from graphshard.program.program import COMPUTE, Program
from graphshard.program.text import full_text, roles_of_others, schedule_text, value_text

if TYPE_CHECKING:
    import networkx as nx


COMPUTE_STREAM = "compute"


COMMUNICATION_STREAM = "communication"


COPY_STREAM = "copy"


_SHAPES = {COMPUTE: "box", **{op.name: op.drawn_as for op in ops.OPS.values()}}


def schedule_graph(program: Program) -> nx.DiGraph:
    """Return the events of `program.timeline()` as numbered nodes of a directed acyclic graph.

    Nodes have the attributes `op`, `unit`, `phase` (see `Event`) and `stream`: "communication" for
    launches of collectives (followed by the group's name, unless it is that of the shards, since
    each group has its own communicator), "copy" for copies between host and device, and "compute"
    for all others. The end of an edge cannot start before its beginning. Edges have the attributes
    `order` (both events are on one stream, one after the other) and `data` (the end uses a result
    of the beginning).
    """
    import networkx as nx  # here, as it takes long to load and few programs are dumped

    graph = nx.DiGraph()
    event_of: dict[fx.Node, int] = {}
    last: dict[str, int] = {}  # by stream
    for index, (event, nodes) in enumerate(program.timeline()):
        stream = _stream(nodes[0])
        graph.add_node(index, op=event.op, unit=event.unit, phase=event.phase, stream=stream)
        if stream in last:
            graph.add_edge(last[stream], index, order=True, data=False)
        last[stream] = index
        event_of |= dict.fromkeys(nodes, index)
    for node, consumer in event_of.items():
        for source in node.all_input_nodes:
            producer_node = source.args[0] if ops.is_unpack(source) else source
            producer = event_of.get(producer_node, consumer)  # type: ignore[arg-type]
            if producer == consumer:
                continue
            order = graph.has_edge(producer, consumer) and graph.edges[producer, consumer]["order"]
            graph.add_edge(producer, consumer, order=order, data=True)
    return graph


def _stream(node: fx.Node) -> str:
    if ops.is_collective(node):
        group = ops.group_of(node)
        return COMMUNICATION_STREAM if group == ops.SHARD else f"{COMMUNICATION_STREAM} {group}"
    return COPY_STREAM if node.target in ops.COPIES else COMPUTE_STREAM


def dot_text(graph: nx.DiGraph) -> str:
    """Return a `schedule_graph` in the DOT language: phases as boxes, data solid, order dotted."""
    lines = ["digraph schedule {", "  rankdir=TB;", '  node [fontname="monospace"];']
    for phase in dict.fromkeys(phase for _, phase in graph.nodes(data="phase")):
        lines += [f"  subgraph {_quote('cluster_' + phase)} {{", f"    label={_quote(phase)};"]
        for index, data in graph.nodes(data=True):
            if data["phase"] == phase:
                label = f"{data['op']}\n{data['unit'] or '(root)'}"
                shape = _SHAPES[data["op"]]
                lines.append(f"    {index} [label={_quote(label)}, shape={shape}];")
        lines.append("  }")
    for start, end, data in sorted(graph.edges(data=True), key=lambda edge: edge[:2]):
        style = "solid" if data["data"] else "dotted"
        lines.append(f"  {start} -> {end} [style={style}];")
    return "\n".join([*lines, "}", ""])


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# Names in fx's generated code that cannot be imported.
_DEFINED = {
    "inf": 'inf = float("inf")',
    "nan": 'nan = float("nan")',
    "NoneType": "NoneType = type(None)",
}


def graph_source(graph: fx.Graph, function: str, explanation: str) -> str:
    """Return the Python source of a module with a function that computes `graph`.

    The placeholders become its parameters, in order; `explanation` is the module's docstring.
    """
    code = graph.python_code("self")
    _, _, body = code.src.strip().partition("\n")
    parameters = "".join(f"    {node.target},\n" for node in graph.find_nodes(op="placeholder"))
    head = f"def {function}(\n{parameters}):" if parameters else f"def {function}():"
    body = "\n".join(line.rstrip() for line in body.splitlines())
    used = {name: value for name, value in code.globals.items() if re.search(rf"\b{name}\b", body)}
    imports = sorted(_binding(name, value) for name, value in used.items())
    docstring = explanation.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return "\n".join([f'"""{docstring}"""', "", *imports, "", "", head, body, ""])


def _binding(name: str, value: Any) -> str:
    if name in _DEFINED:
        return _DEFINED[name]
    module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    if isinstance(value, types.ModuleType):
        return f"import {module}" if module == name else f"import {module} as {name}"
    qualname = value.__qualname__
    return f"from {module} import {qualname}" + ("" if qualname == name else f" as {name}")


_FORWARD_RETURNS = """\
Returns [outputs, mutations, tensors kept for backward, other values kept for backward]."""


_BACKWARD_RETURNS = """\
Returns [gradients of parameters, gradients of inputs], None where there is none."""


_BINDINGS = """\
The functions imported from graphshard.ops name the communication and cannot be called as they
are: on a rank the runtime puts the collectives of the unit in their place. To run this file by
itself, set these names to functions of your own; see graphshard.ops for what each has to do."""


def dump_program(
    program: Program, plan: ShardingPlan, directory: str | os.PathLike[str]
) -> list[Path]:
    """Write `program` and `plan` as files into `directory`, which is created if needed.

    schedule.txt   events, compute collapsed per unit
    program.txt    every node
    forward.py     a rank's forward as Python
    backward.py    a rank's backward as Python (not for a forward-only program)
    plan.json      `plan.to_dict()`
    schedule.dot   `schedule_graph(program)` for Graphviz

    The same program and plan give the same bytes. Files are written atomically, so all ranks may
    write to one directory.

    Returns:
        The paths of the files, in the order above.
    """
    phases = cut(program)
    meanings = dict(_meanings(program, plan))
    files = {
        "schedule.txt": schedule_text(program),
        "program.txt": full_text(program),
        "forward.py": _source("forward", phases.forward, meanings, plan.world_size),
    }
    if phases.backward is not None:
        files["backward.py"] = _source("backward", phases.backward, meanings, plan.world_size)
    files["plan.json"] = json.dumps(plan.to_dict(), indent=2) + "\n"
    files["schedule.dot"] = dot_text(schedule_graph(program))
    return _write(Path(directory), files)


def dump_programs(
    programs: Sequence[Program], plan: ShardingPlan, directory: str | os.PathLike[str]
) -> list[Path]:
    """Call `dump_program` for each of `programs`, in the order of capture.

    The first is written into `directory`, the others into program_1, program_2 and so on below it.

    Returns:
        The paths of all files.
    """
    if not programs:
        raise RuntimeStateError(
            "there is no program to dump before one is captured; pass example_inputs to "
            "graphshard.compile or call the module once"
        )
    paths = []
    for index, program in enumerate(programs):
        folder = Path(directory) / f"program_{index}" if index else Path(directory)
        paths += dump_program(program, plan, folder)
    return paths


def _source(phase: str, graph: fx.Graph, meanings: Mapping[str, str], world_size: int) -> str:
    placeholders = graph.find_nodes(op="placeholder")
    rows = []
    for node in placeholders:
        val = node.meta.get("val")
        type_ = f"{len(val)} tensors" if isinstance(val, list) else value_text(val)
        rows.append((node.name, type_, meanings.get(node.name, "kept from forward")))
    names, types = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    parameters = [f"    {name:<{names}}  {type_:<{types}}  {what}" for name, type_, what in rows]
    explanation = "\n".join(
        [
            f"The {phase} of one step, the same on each rank of {world_size}.",
            "",
            f"{phase}() takes, in order:",
            "",
            *parameters,
            "",
            _FORWARD_RETURNS if phase == "forward" else _BACKWARD_RETURNS,
            "",
            _BINDINGS,
            "",
        ]
    )
    return graph_source(graph, phase, explanation)


def _meanings(program: Program, plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    """Yield the name and the meaning of each placeholder of the program."""
    for param in program.params:
        sharded = plan.layouts[param.fqn].enters_as_shard(program.stale)
        shard = ", this rank's shard" if sharded else ""
        host = ", on the host" if plan.policy.offloads("params") and not param.ignored else ""
        yield param.node.name, f"parameter {' = '.join(param.names)}{shard}{host}"
    for node, role in roles_of_others(program):
        yield node.name, role


def _write(directory: Path, files: Mapping[str, str]) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in files.items():
        path = directory / name
        temporary = directory / f".{name}.{uuid.uuid4().hex}"
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        paths.append(path)
    return paths
