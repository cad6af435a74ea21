"""Rules on regions: compiling one moves nothing across communication, and changes no value."""

from __future__ import annotations

from torch import fx

from graphshard.program import ops
from graphshard.program.regions import REGION, Region, may_join, picks_from, regions_in
from graphshard.program.sizes import is_size
from graphshard.verify.facts import Facts


def check_regions(facts: Facts) -> None:
    """A region's nodes may be compiled, are of one unit and phase, and stand together.

    Between its first and its last node stands nothing but sizes and what is picked from elsewhere,
    and that needs nothing the region computes. A release of a region has nodes of it on both sides.
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
        own = [node for node in region.nodes if picks_from(node) is None]
        _check_nodes(facts, region, own)
        _check_between(facts, region, own)
        releases.difference_update(region.releases)
        for node in region.releases:
            if not facts.place[own[0]] < facts.place[node] < facts.place[own[-1]]:
                facts.fail("regions", node, f"it does not stand among region {region.number}")
        for value in region.inputs:
            if facts.place[value] > facts.place[own[-1]]:
                facts.fail("regions", value, f"region {region.number} needs it before")
    if numbers != list(range(len(table.forms))):
        facts.fail("regions", None, f"the table has other regions than the graph: {numbers}")
    for node in releases:
        facts.fail("regions", node, "it is said to be of a region that there is not")


def _check_nodes(facts: Facts, region: Region, own: list[fx.Node]) -> None:
    for node in own:
        if not may_join(node):
            facts.fail("regions", node, f"it cannot be compiled in region {region.number}")
        for key in ("unit", "phase"):
            was, now = own[0].meta[key], node.meta[key]
            if was != now:
                text = f"region {region.number} is of {key} {was!r}, this node of {now!r}"
                facts.fail("regions", node, text)


def _check_between(facts: Facts, region: Region, own: list[fx.Node]) -> None:
    inside = {*region.nodes, *region.releases}
    for node in facts.nodes[facts.place[own[0]] : facts.place[own[-1]]]:
        if node in inside:
            continue
        if ops.is_unpack(node) or not (picks_from(node) is not None or is_size(node)):
            facts.fail("regions", node, f"it stands in the midst of region {region.number}")
        if any(value in inside for value in node.all_input_nodes):
            facts.fail("regions", node, f"it needs a value from inside region {region.number}")
