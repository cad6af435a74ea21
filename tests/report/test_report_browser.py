"""The report in a headless browser without network: every part is clicked through."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Page, browser_path
from paths import EXAMPLES
from simulations import simulate

import graphshard
from graphshard.errors import CostError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser_path() is None, reason="no Chromium is installed"),
]

READY = "document.documentElement.dataset.ready"
R = "graphshardReport"
UNIT = "document.querySelector('#unit-details a').innerText"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """An estimate of a traced model, and its page with all parts."""
    from torch.profiler import ProfilerActivity, profile

    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import factories
        import gpt

        model, inputs = factories.small()
        policy = graphshard.BlockPolicy({gpt.Block})
        sharded = graphshard.compile(model, policy, example_inputs=inputs)
        sharded(*inputs).backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            sharded(*inputs).backward()
        profiler.export_chrome_trace(str(folder / "trace.json"))
        estimate = graphshard.simulate(sharded, hardware="cpu-gloo")
        other = graphshard.simulate(
            model,
            policy=graphshard.BlockPolicy({gpt.Block}, recompute="units"),
            hardware="cpu-gloo",
            world_size=1,
            example_inputs=inputs,
        )
    estimate.report(folder / "r.html", what_if={"recompute": other}, trace=folder / "trace.json")
    return estimate, folder / "r.html"


@pytest.fixture
def page(written: tuple[Any, Path], tmp_path: Path) -> Any:
    with Page(written[1], tmp_path / "profile") as opened:
        opened.wait_for(READY)
        yield opened
        assert opened.errors == []
        asked = [url for url in opened.requests if not url.startswith(("file:", "data:", "blob:"))]
        assert asked == []


def text(page: Page, selector: str) -> str:
    return page.run(f"document.querySelector({json.dumps(selector)}).innerText")


def test_what_is_drawn_is_the_estimate(page: Page, written: tuple[Any, Path]) -> None:
    """The stack and the spans in the figures, as BokehJS holds them."""
    estimate, _ = written
    unit, size = page.run(f"[{R}.data.units.time[1], {R}.data.units.memory[1]]")
    layers = page.run(f"{R}.data.layers")
    columns = page.run(
        f"Object.fromEntries(Object.entries({R}.source('step', 'memory'))"
        ".map(([k, v]) => [k, Array.from(v)]))"
    )
    seconds = page.run(f"{R}.data.estimate.memory.seconds")
    shown = dict(zip(seconds, estimate.memory.points, strict=True))  # the last of each time
    assert [at * unit for at in columns["seconds"]] == pytest.approx(
        [*shown, estimate.step_seconds], rel=1e-12
    )
    for index, point in enumerate(shown.values()):
        assert columns[f"y{len(layers)}"][index] * size == pytest.approx(point.bytes, rel=1e-12)
        for number, name in enumerate(layers):
            drawn = (columns[f"y{number + 1}"][index] - columns[f"y{number}"][index]) * size
            assert drawn == pytest.approx(point.by_category.get(name, 0), abs=1)
    spans = page.run(f"{R}.source('step', 'spans')")
    compute = sum(
        (right - left) * unit
        for stream, left, right in zip(spans["stream"], spans["left"], spans["right"], strict=True)
        if stream == "compute"
    )
    assert compute == pytest.approx(estimate.step_seconds, rel=1e-9)


def test_who_is_alive_is_who_the_estimate_holds(page: Page, written: tuple[Any, Path]) -> None:
    estimate, _ = written
    for point in estimate.memory.points:
        sizes = page.run(f"{R}.holdersAt({point.place}).map((row) => row.bytes)")
        last = [p for p in estimate.memory.points if p.place == point.place][-1]
        assert sum(sizes) == last.bytes


def test_the_cursor_leads_everywhere(page: Page) -> None:
    page.click("#verdict a")
    peak = page.run(f"{R}.data.estimate.memory.place[{R}.data.estimate.memory.peak]")
    assert page.run(f"{R}.here()") == peak
    assert page.run("document.querySelector('.line.here').dataset.line") == str(peak)
    page.click("#gs-step", 0.3, 0.12)
    place = page.run(f"{R}.here()")
    assert place != peak
    name = page.run(f"{R}.data.estimate.nodes.name[{place}]")
    assert name in text(page, "#at")
    page.wait_for(f"document.querySelector('.line.here').innerText.startsWith('%{name} ')")
    page.click("#holders tbody a")
    assert page.run(f"{R}.here()") != place
    before = page.run(f"{R}.here()")
    page.click(".line:not(.here)", 0.02)
    assert page.run(f"{R}.here()") != before
    for button in ("category", "node", "unit", "born", "dies", "bytes"):
        page.click(f'#holders [data-sort="{button}"]')
    rows = page.run("[...document.querySelectorAll('#holders tbody tr')].length")
    assert rows > 3
    page.key("Escape")
    page.move("#gs-step", 0.15, 0.12)
    page.wait_for(f"{R}.here() < {place}")


def test_hovering_names_what_is_there(page: Page) -> None:
    spans = page.run(f"{R}.source('step', 'spans').tip")
    assert any("module blocks.0" in tip and "gpt.py:" in tip for tip in spans)
    page.move("#gs-step", 0.3, 0.12)
    page.wait_for(
        "(() => { const inside = (root) => [...root.querySelectorAll('*')].some((e) =>"
        "e.shadowRoot && (e.shadowRoot.textContent.includes('alive when it begins') ||"
        "inside(e.shadowRoot))); return inside(document); })()",
        20,
    )


def test_one_zoom_for_both(page: Page) -> None:
    whole = page.run(f"{R}.range()")
    page.drag("#gs-step", 0.3, 0.5, 0.75)
    page.wait_for(f"{R}.range()[1] < {whole[1]} * 0.9")
    start, end = page.run(f"{R}.range()")
    assert whole[0] < start < end < whole[1]
    page.key("0")
    assert page.run(f"{R}.range()") == pytest.approx(whole)


def test_the_keys(page: Page) -> None:
    page.key("p")
    peak = page.run(f"{R}.here()")
    page.key("ArrowRight")
    right = page.run(f"{R}.here()")
    assert right > peak
    page.key("ArrowLeft")
    assert page.run(f"{R}.here()") < right
    whole = page.run(f"{R}.range()")
    page.key("+")
    assert page.run(f"{R}.range()[1] - {R}.range()[0]") == pytest.approx((whole[1] - whole[0]) / 2)
    page.key("-")
    page.key("3")
    assert page.run("document.activeElement.id") == "alive"
    page.key("/")
    assert page.run("document.activeElement.id") == "search"


def test_the_dump_is_searched(page: Page) -> None:
    page.click("#search")
    page.call("Input.insertText", text="all_gather(")
    page.wait_for("document.getElementById('matches').textContent.startsWith('1 of ')")
    found = page.run(f"{R}.here()")
    assert "all_gather" in page.run(f"{R}.data.estimate.nodes.name[{found}]")
    page.click("#next")
    assert page.run(f"{R}.here()") > found
    page.click("#previous")
    assert page.run(f"{R}.here()") == found
    page.run("document.getElementById('search').value = ''")
    page.click("#search")
    page.call("Input.insertText", text="gpt.py:")
    page.wait_for("document.querySelectorAll('.line.match').length > 3")


def test_the_tiles(page: Page) -> None:
    page.click("#gs-treemap", 0.97, 0.5)
    page.wait_for(f"{UNIT} === 'blocks.1' || {UNIT} === '(root)'")
    first = page.run(UNIT)
    time.sleep(0.6)  # two clicks, not a double one
    page.click("#gs-treemap", 0.03, 0.5)
    page.wait_for(f"{UNIT} !== '{first}'", 20)
    for area in ("sharded", "padding", "gathered"):
        page.run(
            f"(() => {{ const s = document.getElementById('area'); s.value = '{area}';"
            "s.dispatchEvent(new Event('change')); })()"
        )
    page.run(
        "(() => { const s = document.getElementById('unit'); s.value = 'blocks.1';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert "blocks.1.attn.qkv.weight" in text(page, "#unit-details")
    assert "gpt.py:" in text(page, "#unit-details")


def test_what_if_and_measured(page: Page) -> None:
    assert "recompute  None against 'units'" in text(page, "#comparison")
    page.run(
        "(() => { const s = document.getElementById('other'); s.value = '0';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert text(page, "#comparison").startswith("graphshard.BlockPolicy")
    points = page.run(f"{R}.source('scatter', 'points').x")
    assert len(points) == 2
    before = page.run(f"{R}.here()")
    page.click("#events a")
    assert page.run(f"{R}.here()") != before
    assert page.run(f"{R}.source('trace', 'events').x.length") > 5


@pytest.mark.parametrize("width", [1400, 800])
def test_nothing_is_cut_off(page: Page, width: int, tmp_path: Path) -> None:
    page.resize(width, 900)
    page.wait_for(f"innerWidth === {width}")
    # Figures follow the window a little later.
    page.wait_for(f"document.documentElement.scrollWidth <= {width}")
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000
    page.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_without_what_it_needs_it_shows_text(written: tuple[Any, Path], tmp_path: Path) -> None:
    broken = tmp_path / "r.html"
    broken.write_text(written[1].read_text().replace("new DecompressionStream", "new Nothing"))
    with Page(broken, tmp_path / "profile") as opened:
        opened.wait_for("!document.getElementById('error').hidden")
        assert "below as text" in text(opened, "#error")
        assert "estimate of GPT" in text(opened, "#text")


def test_a_small_program_is_drawn_too(tmp_path: Path) -> None:
    simulate(recompute="units").report(tmp_path / "r.html")
    with Page(tmp_path / "r.html", tmp_path / "profile") as opened:
        opened.wait_for(READY)
        assert opened.errors == []


def test_llama_70b_opens_in_two_seconds(tmp_path: Path) -> None:
    """Seconds of the page's own thread, as the processor may be at work for others, too."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(1, 4096, dtype=torch.int64)
    estimate = graphshard.simulate(
        model,
        policy=graphshard.BlockPolicy(
            mixed_precision=graphshard.MixedPrecision(param_dtype=torch.bfloat16)
        ),
        hardware="h100-sxm",
        world_size=64,
        example_kwargs={"input_ids": tokens, "labels": tokens},
    )
    path = tmp_path / "r.html"
    estimate.report(path)
    assert path.stat().st_size < 2_000_000
    with Page(path, tmp_path / "profile") as opened:
        opened.wait_for(READY)
        assert opened.errors == []
        passed, busy = opened.run("graphshardReport.milliseconds") / 1000, opened.busy_seconds()
    print(
        f"{path.stat().st_size:,} bytes, ready after {passed:.2f} s, {busy:.2f} s of them at work"
    )
    assert busy < 2


def test_a_trace_of_another_program_is_refused(written: tuple[Any, Path], tmp_path: Path) -> None:
    with pytest.raises(CostError, match="another program"):
        simulate().report(tmp_path / "r.html", trace=written[1].parent / "trace.json")
