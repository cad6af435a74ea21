"""The report: what its data says is what was estimated, and its file needs nothing else."""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import toy_programs as toys
from paths import EXAMPLES
from simulations import simulate

import graphshard
from graphshard.cli.main import main
from graphshard.cost import colours
from graphshard.cost.colours import HATCHES, MEMORY, TIMES, UNITS, UNKNOWN
from graphshard.cost.details import start_of
from graphshard.cost.text import causes_of
from graphshard.errors import CostError
from graphshard.report import page as pages
from graphshard.report.page import tiles

# -- what a report's file holds --------------------------------------------------------------------


def packed(page: str, part: str) -> str:
    """The text of a compressed part of the page: "library" or "data"."""
    found = re.search(rf'<script type="text/plain" id="gs-{part}">([^<]*)</script>', page)
    assert found is not None
    return gzip.decompress(base64.b64decode(found[1])).decode()


def data_of(page: str) -> dict[str, Any]:
    """The data of the page."""
    return json.loads(packed(page, "data"))


# -- tests -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["plain", "recomputed", "overlapped"])
def estimate(request):
    options = {
        "plain": {},
        "recomputed": {"recompute": "units"},
        "overlapped": {"slow": 0.5, "forward_prefetch": 1, "offload": "activations"},
    }
    return simulate(**options[request.param])


@pytest.fixture(scope="module")
def page(estimate):
    return pages.page(estimate)


@pytest.fixture(scope="module")
def data(page):
    return data_of(page)["estimate"]


# -- the data --------------------------------------------------------------------------------------


def test_the_data_is_the_estimate(estimate, data):
    assert data == json.loads(json.dumps(estimate.to_dict(details=True)))
    assert set(estimate.to_dict()) < set(data), "details are only added"


def test_the_stack_is_the_memory_of_the_estimate(estimate, data):
    """At each time the layers add up to what is alive, and each layer is its category."""
    memory = data["memory"]
    points = estimate.memory.points
    assert memory["place"] == [point.place for point in points]
    for index, point in enumerate(points):
        layers = {name: sizes[index] for name, sizes in memory["bytes"].items()}
        assert sum(layers.values()) == point.bytes
        assert layers == {name: point.by_category.get(name, 0) for name in layers}
    assert memory["seconds"] == sorted(memory["seconds"])
    assert max(map(sum, zip(*memory["bytes"].values(), strict=True))) == estimate.peak_bytes
    assert points[memory["peak"]] == estimate.memory.peak


def test_who_is_alive_adds_up_to_the_stack(estimate, data):
    """At every point, storages that are alive and what is held between steps are the whole."""
    storages, memory = data["storages"], data["memory"]
    resident = sum(estimate.memory.valley_by_category.values())
    rows = list(zip(storages["bytes"], storages["born"], storages["dies"], strict=True))
    end = len(data["nodes"]["name"])
    last = {place: index for index, place in enumerate(memory["place"])}  # of equal places
    for place, index in last.items():
        alive = sum(
            size for size, born, dies in rows if born <= place and (dies < 0 or dies >= place)
        )
        update = memory["bytes"].get("optimizer's step", [0] * (index + 1))[index]
        total = sum(sizes[index] for sizes in memory["bytes"].values())
        assert alive + resident + update == total
        assert update == 0 or place == end


def test_spans_add_up_to_the_step(estimate, data):
    spans = data["spans"]
    rows = list(zip(spans["stream"], spans["start"], spans["end"], strict=True))
    compute = sum(end - start for stream, start, end in rows if stream == "compute")
    waits = sum(transfer["exposed_seconds"] for transfer in data["transfers"])
    assert compute + waits == pytest.approx(data["timeline_seconds"], rel=1e-12)
    step = data["timeline_seconds"] + data["optimizer_seconds"] + data["step_overhead"]
    assert step == pytest.approx(data["step_seconds"], rel=1e-12)
    assert waits == pytest.approx(data["exposed_seconds"], rel=1e-9)
    waiting = [
        ("compute", t["waited_at"], t["waited_at"] + t["exposed_seconds"])
        for t in data["transfers"]
    ]
    by_stream = {}
    for stream, start, end in [*rows, *waiting]:
        by_stream.setdefault(stream, []).append((start, end))
    for row in by_stream.values():  # a row is drawn flat only if nothing in it overlaps
        row.sort()
        assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(row))


def test_every_node_has_its_line_in_the_dump(estimate, data):
    nodes = data["nodes"]
    names = re.findall(r"^%(\S+) : ", data["dump"], re.MULTILINE)
    assert names == nodes["name"][:-1], "the output node has lines of its own"
    assert nodes["at"] == sorted(nodes["at"])
    assert data["timeline_seconds"] >= nodes["at"][-1]
    for transfer, real in zip(data["transfers"], estimate.transfers, strict=True):
        node = list(estimate.program.graph.nodes)[transfer["place"]]
        assert nodes["name"][transfer["place"]] == node.name
        assert str(node.target.__name__) == transfer["op"]
        assert start_of(transfer["place"], nodes["at"], 0) <= real.span.start + 1e-12
        assert start_of(transfer["waited_place"], nodes["at"], 0) == transfer["waited_at"]


def test_causes_lead_to_their_transfers(estimate, data):
    for cause, real in zip(data["causes"], causes_of(estimate).values(), strict=True):
        worst = data["transfers"][cause["worst_transfer"]]
        assert (worst["op"], worst["phase"]) == (cause["op"], cause["phase"])
        assert worst["place"] == real.worst.span.place
        assert cause["seconds"] == real.seconds


# -- the file --------------------------------------------------------------------------------------


def test_the_file_needs_nothing_else(estimate, page, tmp_path):
    estimate.report(tmp_path / "r.html")
    assert page == (tmp_path / "r.html").read_text(), "the same bytes again"
    assert packed(page, "library").startswith("/* BEGIN bokeh.min.js */")
    outside = re.sub(r'<script type="text/plain"[^>]*>[^<]*</script>', "", page)
    assert 'src="' not in outside
    links = re.findall(r'href="([^"]*)"', outside)
    assert all(link.startswith("#") for link in links), "within the page only"
    assert "default-src 'none'" in outside
    assert len(page) < 600_000


def test_the_verdict_says_what_the_estimate_says(estimate, page):
    verdict = page.split('<div id="verdict">')[1].split("</div>")[0]
    assert ("Does not fit" in verdict) == (not estimate.fits)
    assert f"{estimate.mfu:.1%}" in verdict
    links = re.findall(r'data-place="(\d+)"', verdict)
    causes = list(causes_of(estimate).values())[:3]
    assert list(map(int, links)) == [
        estimate.memory.peak.place,
        *(cause.worst.span.place for cause in causes),
    ]


@pytest.mark.parametrize("spare", [3.004, 0.1168, -0.1168])
def test_the_bytes_of_the_verdict_add_up(data, spare):
    """The figures as they are rounded: tensors, what is beside them, and what is to spare."""
    capacity, tensors = 80.004, 4.7149
    sizes = {"peak_bytes": tensors * 2**30, "device_bytes": (capacity - spare) * 2**30}
    hardware = data["hardware"] | {"memory_bytes": capacity * 2**30}
    text = pages.verdict(data | sizes | {"hardware": hardware, "fits": spare > 0})
    shown = [float(number) for number in re.findall(r"([\d.]+) GiB", text)]
    assert len(shown) == 4
    assert shown[0] == pytest.approx(shown[1] + shown[2] + (shown[3] if spare > 0 else -shown[3]))


def test_the_text_is_there_without_scripts(page):
    text = page.split('<section id="text"')[1].split("</section>")[0]
    assert "estimate of " in text
    assert "sharding plan of " in text
    assert "<noscript>" in page


def test_every_kind_has_a_colour_of_its_own(estimate, data):
    assert set(data["memory"]["bytes"]) <= set(MEMORY)
    assert set(data["spans"]["phase"]) | {"all_gather", "reduce_scatter"} <= set(TIMES)


def test_no_fill_has_two_meanings():
    """Of times, memory and units: a name in two of them is one thing, with one fill."""
    assert all(TIMES[name] == MEMORY[name] for name in set(TIMES) & set(MEMORY))
    fills = TIMES | MEMORY | {"unknown": UNKNOWN}
    looks = [(fill.colour, fill.hatch) for fill in fills.values()]
    looks += [(colour, "") for colour in UNITS]
    assert len(set(looks)) == len(looks)
    assert {hatch for _, hatch in looks} <= {"", *HATCHES}
    assert all(fill.meaning for fill in fills.values())
    assert len({fill.meaning for fill in fills.values()}) == len(fills)
    named = {name for name in vars(colours).values() if isinstance(name, str) and name[0] == "#"}
    for source in ("cost/plot.py", *(f"report/{name}" for name in ("figures.py", "page.js"))):
        text = (Path(colours.__file__).parents[1] / source).read_text()
        assert not any(colour in text for colour in named), source


def test_a_unit_is_in_one_tile_with_its_equals(estimate, page):
    treemap = data_of(page)["treemap"]
    units = estimate.plan.to_dict()["units"]
    assert sorted(number for group in treemap["groups"] for number in group) == [*range(len(units))]
    for group in treemap["groups"]:
        alike = {(units[n]["module_class"], units[n]["unsharded"]) for n in group}
        assert len(alike) == 1
    assert {len(tiles) for tiles in treemap["tiles"].values()} == {len(treemap["groups"])}


def test_tiles_fill_the_map():
    sizes = [7, 0, 3, 3, 3, 1, 12, 1]
    placed = tiles(sizes, 3.0, 1.0)
    areas = [(t.right - t.left) * (t.top - t.bottom) for t in placed]
    assert areas == pytest.approx([3 * size / sum(sizes) for size in sizes])
    for number, one in enumerate(placed):
        assert -1e-9 <= one.left <= one.right <= 3 + 1e-9
        assert -1e-9 <= one.bottom <= one.top <= 1 + 1e-9
        for other in placed[number + 1 :]:
            across = min(one.right, other.right) - max(one.left, other.left)
            up = min(one.top, other.top) - max(one.bottom, other.bottom)
            assert across < 1e-9 or up < 1e-9
    ratios = [
        max((t.right - t.left) / (t.top - t.bottom), (t.top - t.bottom) / (t.right - t.left))
        for t, size in zip(placed, sizes, strict=True)
        if size
    ]
    assert max(ratios) < 3
    assert tiles([0, 0], 3, 1) == [(0, 0, 0, 0)] * 2


# -- other policies, and a trace -------------------------------------------------------------------


def test_other_policies_are_compared():
    mine, early, kept = simulate(), simulate(forward_prefetch=1), simulate(recompute="units")
    data = data_of(pages.page(mine, what_if={"early": early, "again": kept}))["what_if"]
    assert [point["name"] for point in data["points"]] == ["this policy", "early", "again"]
    assert [point["seconds"] for point in data["points"]] == [
        each.step_seconds for each in (mine, early, kept)
    ]
    assert data["pairs"] == {
        "0,1": str(graphshard.compare(mine, early, names=("this policy", "early"))),
        "0,2": str(graphshard.compare(mine, kept, names=("this policy", "again"))),
        "1,2": str(graphshard.compare(early, kept, names=("early", "again"))),
    }
    assert data_of(pages.page(mine))["what_if"] is None
    with pytest.raises(CostError, match="choose another one"):
        pages.page(mine, what_if={"this policy": early})


def test_without_bokeh_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "bokeh.resources", None)
    with pytest.raises(CostError, match=r"graphshard\[report\]"):
        simulate().report(tmp_path / "r.html")


COMMAND = ["report", "factories:small", "--policy", "block:Block", "--world-size", "1"]
COMMAND += ["--hardware", "cpu-gloo", "--out"]


def test_the_command_writes_a_report_with_a_trace(capsys, monkeypatch, tmp_path):
    from torch.profiler import ProfilerActivity, profile

    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    import factories
    import gpt

    model, inputs = factories.small()
    sharded = graphshard.compile(model, graphshard.BlockPolicy({gpt.Block}), example_inputs=inputs)
    sharded(*inputs).backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        sharded(*inputs).backward()
    profiler.export_chrome_trace("trace.json")
    assert main([*COMMAND, "r.html", "--trace", "trace.json"]) == 0
    assert capsys.readouterr().out == "r.html\n"
    page = (tmp_path / "r.html").read_text()
    data = data_of(page)
    names = set(data["estimate"]["nodes"]["name"])
    assert {event["node"] for event in data["trace"]["events"]} <= names
    assert data["trace"]["measured_seconds"] > 0
    assert "Measured beside predicted" in page
    assert any("gpt.py:" in line for line in data["estimate"]["nodes"]["line"])


@pytest.mark.slow
def test_the_command_compares_the_frontier(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    assert main([*COMMAND, str(tmp_path / "r.html"), "--what-if"]) == 0
    found = data_of((tmp_path / "r.html").read_text())["what_if"]
    points = found["points"]
    compared = [point for point in points if point["estimated"]]
    assert points[0]["name"] == "this policy"
    assert len(compared) > 1
    assert len({point["policy"] for point in points}) == len(points)
    assert len(found["pairs"]) == len(compared) * (len(compared) - 1) // 2
    assert any(not point["estimated"] for point in points), "the others are shown, too"


def test_a_step_without_gradients_has_a_report(tmp_path):
    program, plan = toys.rewritten(lambda: toys.blocks(grad=False), graphshard.Policy())
    estimate = graphshard.simulate(replace(plan, program=program), hardware="h100-sxm")
    estimate.report(tmp_path / "r.html")
    with pytest.raises(FileNotFoundError, match="missing"):
        estimate.report(tmp_path / "missing" / "r.html")
    data = data_of((tmp_path / "r.html").read_text())
    assert set(data["estimate"]["spans"]["phase"]) == {"forward"}
