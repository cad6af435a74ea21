"""A program's schedule as a dependency graph, for networkx and Graphviz."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from graphshard.program import ops
from graphshard.program.program import COMPUTE, Program

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
