"""A program's schedule as a graph: what must wait for what. For networkx and for Graphviz."""

from __future__ import annotations

import networkx as nx
from torch import fx

from graphshard import ops
from graphshard.program import Event, Program

COMPUTE_STREAM = "compute"
COMMUNICATION_STREAM = "communication"

_SHAPES = {"compute": "box", "wait": "diamond", "free": "cds"}
_COLLECTIVE_SHAPE = "ellipse"


def schedule_graph(program: Program) -> nx.DiGraph:
    """The events of `program.schedule()` as the nodes 0, 1, 2, ... of a directed acyclic graph.

    Nodes have the attributes `op`, `unit`, `phase` (see `Event`) and `stream`: "communication" for
    what starts a collective, "compute" for all else. An edge means that its end cannot start before
    its beginning; it has the attributes `order` (the two follow each other on one stream) and
    `data` (one uses what the other made).
    """
    graph = nx.DiGraph()
    event_of = _add_events(program, graph)
    last: dict[str, int] = {}
    for index, stream in graph.nodes(data="stream"):
        if stream in last:
            graph.add_edge(last[stream], index, order=True, data=False)
        last[stream] = index
    for node, consumer in event_of.items():
        for source in node.all_input_nodes:
            producer = event_of.get(source, consumer)
            if producer == consumer:
                continue
            order = graph.has_edge(producer, consumer) and graph.edges[producer, consumer]["order"]
            graph.add_edge(producer, consumer, order=order, data=True)
    return graph


def _add_events(program: Program, graph: nx.DiGraph) -> dict[fx.Node, int]:
    """Add the events; say which one each node of the program belongs to."""
    event_of: dict[fx.Node, int] = {}
    previous: Event | None = None
    for node in program.nodes():
        if ops.is_unpack(node):
            event_of[node] = event_of[node.all_input_nodes[0]]
            continue
        op = ops.op_name(node) or "compute"
        event = Event(op, node.meta.get("unit", ""), node.meta["phase"])
        if op != "compute" or event != previous:
            stream = COMMUNICATION_STREAM if ops.is_collective(node) else COMPUTE_STREAM
            graph.add_node(len(graph), op=op, unit=event.unit, phase=event.phase, stream=stream)
            previous = event
        event_of[node] = len(graph) - 1
    return event_of


def dot_text(graph: nx.DiGraph) -> str:
    """`schedule_graph(...)` in the DOT language: phases as boxes, data solid, order dotted."""
    lines = ["digraph schedule {", "  rankdir=TB;", '  node [fontname="monospace"];']
    for phase in dict.fromkeys(phase for _, phase in graph.nodes(data="phase")):
        lines += [f"  subgraph {_quote('cluster_' + phase)} {{", f"    label={_quote(phase)};"]
        for index, data in graph.nodes(data=True):
            if data["phase"] == phase:
                label = f"{data['op']}\n{data['unit'] or '(root)'}"
                shape = _SHAPES.get(data["op"], _COLLECTIVE_SHAPE)
                lines.append(f"    {index} [label={_quote(label)}, shape={shape}];")
        lines.append("  }")
    for start, end, data in sorted(graph.edges(data=True), key=lambda edge: edge[:2]):
        style = "solid" if data["data"] else "dotted"
        lines.append(f"  {start} -> {end} [style={style}];")
    return "\n".join([*lines, "}", ""])


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
