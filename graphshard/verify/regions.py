"""Rule on regions: compiling one moves no compute across communication, and changes no value."""

from __future__ import annotations

from torch import fx

from graphshard.program import ops
from graphshard.program.regions import REGION, Region, may_join, picks_from, regions_in
from graphshard.program.sizes import is_size
from graphshard.verify.facts import Facts


def check_regions(facts: Facts) -> None:
    """The nodes of a region may be compiled, have one unit and phase, and stand together.

    Only sizes, and values picked from results of other nodes, may stand between its first and its
    last node, and they must not need a value of the region. A release that belongs to a region has
    nodes of it on both sides.
    """
    table = facts.program.regions
    marked = [node for node in facts.nodes if REGION in node.meta]
    if table is None:
        for node in marked:
            facts.fail("regions", node, "it is in a region of a program that has none")
        return
    numbers = []
    releases = {node for node in marked if node.target is ops.release}
    for region in regions_in(facts.program.graph):
        numbers.append(region.number)
        nodes = [node for node in region.nodes if picks_from(node) is None]
        _check_nodes(facts, region, nodes)
        _check_between(facts, region, nodes)
        releases.difference_update(region.releases)
        for node in region.releases:
            if not facts.place[nodes[0]] < facts.place[node] < facts.place[nodes[-1]]:
                facts.fail("regions", node, f"it does not stand among region {region.number}")
        for value in region.inputs:
            if facts.place[value] > facts.place[nodes[-1]]:
                facts.fail("regions", value, f"region {region.number} needs it before")
    if numbers != list(range(len(table.forms))):
        facts.fail("regions", None, f"the table has other regions than the graph: {numbers}")
    for node in releases:
        facts.fail("regions", node, "it is said to be of a region that there is not")


def _check_nodes(facts: Facts, region: Region, nodes: list[fx.Node]) -> None:
    for node in nodes:
        if not may_join(node):
            facts.fail("regions", node, f"it cannot be compiled in region {region.number}")
        for key in ("unit", "phase"):
            was, now = nodes[0].meta[key], node.meta[key]
            if was != now:
                text = f"region {region.number} is of {key} {was!r}, this node of {now!r}"
                facts.fail("regions", node, text)


def _check_between(facts: Facts, region: Region, nodes: list[fx.Node]) -> None:
    inside = {*region.nodes, *region.releases}
    for node in facts.nodes[facts.place[nodes[0]] : facts.place[nodes[-1]]]:
        if node in inside:
            continue
        if ops.is_unpack(node) or not (picks_from(node) is not None or is_size(node)):
            facts.fail("regions", node, f"it stands in the midst of region {region.number}")
        if any(value in inside for value in node.all_input_nodes):
            facts.fail("regions", node, f"it needs a value from inside region {region.number}")
