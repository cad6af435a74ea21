"""The report in a headless browser without network: every part is clicked through."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import EXAMPLES

import graphshard

# -- the browser -----------------------------------------------------------------------------------


NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def browser_path() -> str | None:
    """The program of a Chromium, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """A page in a browser of its own; `errors` has what its console complained of.

    Close it, or use it in a `with`.
    """

    def __init__(self, path: Path, profile: Path, *, width: int = 1400, height: int = 900) -> None:
        program = browser_path()
        assert program is not None
        assert path.exists(), path
        to_browser, self._writes = os.pipe()
        self._reads, from_browser = os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
        ]
        # A browser reads its commands from descriptor 3 and answers on 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "", program, *options],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number, self._rest = 0, b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )
        self.call("Performance.enable", timeDomain="threadTicks")
        self.resize(width, height)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("location.protocol === 'file:' && document.readyState === 'complete'")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        os.close(self._writes)
        os.close(self._reads)
        self._process.terminate()
        self._process.wait(20)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _next(self, seconds: float = 120) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reads], [], [], seconds)
            assert ready, "the browser does not answer"
            more = os.read(self._reads, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(json.dumps(params["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"][:200])

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript, promises awaited."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60) -> None:
        """Return once the expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"never true: {script}; errors: {self.errors}"
            time.sleep(0.05)

    def busy_seconds(self) -> float:
        """Processor time of the page's main thread so far."""
        metrics = self.call("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in metrics if one["name"] == "TaskDuration")

    def resize(self, width: int, height: int) -> None:
        """Give the page another size in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Click with the mouse into an element, at shares of its width and height."""
        point = self._point(selector, x, y)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                button="none" if kind == "mouseMoved" else "left",
                clickCount=0 if kind == "mouseMoved" else 1,
                **point,
            )

    def move(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Move the mouse into an element."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self._point(selector, x, y))

    def drag(self, selector: str, start: float, end: float, y: float = 0.5) -> None:
        """Drag the mouse across an element, from one share of its width to another."""
        for kind, x in (("Moved", start), ("Pressed", start), ("Moved", end), ("Released", end)):
            buttons = 1 if kind != "Released" else 0
            self.call(
                "Input.dispatchMouseEvent",
                type=f"mouse{kind}",
                button="left",
                buttons=buttons,
                clickCount=1,
                **self._point(selector, x, y),
            )

    def key(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def _point(self, selector: str, x: float, y: float) -> dict[str, float]:
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "const seen = e.getBoundingClientRect();"
            "if (seen.top < 0 || seen.bottom > innerHeight) e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        return {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a PNG of the whole page, or of what is seen."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path: Path) -> None:
        """Print the page."""
        printed = self.call("Page.printToPDF", printBackground=True)
        path.write_bytes(base64.b64decode(printed["data"]))


# -- tests -----------------------------------------------------------------------------------------


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
        # So many samples that the peak is in backward, at a line of the dump.
        inputs = tuple(tokens.repeat(4, 1) for tokens in inputs)
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
    page.click(".line.here ~ .line[data-line]", 0.02)
    assert page.run(f"{R}.here()") != before
    for button in ("category", "node", "unit", "born", "dies", "bytes"):
        page.click(f'#holders [data-sort="{button}"]')
    rows = page.run("[...document.querySelectorAll('#holders tbody tr')].length")
    assert rows > 3
    page.key("Escape")
    page.move("#gs-step", 0.15, 0.12)
    page.wait_for(f"{R}.here() < {place}")


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
    other = page.run("document.querySelector('button.unit').innerText")
    page.click("button.unit")
    assert page.run(UNIT) == other != "blocks.1"


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


COUNT_PIXELS = """
window.pixels = (red, root = document) => [...root.querySelectorAll("*")].reduce((sum, each) => {
  if (each.shadowRoot) sum += pixels(red, each.shadowRoot);
  if (each.tagName !== "CANVAS" || !each.width) return sum;
  const { width, height } = each;
  const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(each, 0, 0);
  const bytes = copy.getImageData(0, 0, width, height).data;
  for (let i = 0; i < bytes.length; i += 4) sum += bytes[i] === red && bytes[i + 3] > 200;
  return sum;
}, 0);
addEventListener("afterprint", () => { window.printed = [pixels(0xe3), pixels(0x1b)]; });
"""


def test_figures_of_a_dark_page_are_printed_in_dark_ink(page: Page, tmp_path: Path) -> None:
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    page.call("Emulation.setEmulatedMedia", features=[dark])
    page.run(COUNT_PIXELS)
    page.wait_for("pixels(0xe3) > 1000 && pixels(0x1b) < 100")
    page.pdf(tmp_path / "page.pdf")
    light_ink, dark_ink = page.run("printed")
    assert light_ink < 100 < 1000 < dark_ink
    page.wait_for("pixels(0xe3) > 1000 && pixels(0x1b) < 100")


def test_without_what_it_needs_it_shows_text(written: tuple[Any, Path], tmp_path: Path) -> None:
    broken = tmp_path / "r.html"
    broken.write_text(written[1].read_text().replace("new DecompressionStream", "new Nothing"))
    with Page(broken, tmp_path / "profile") as opened:
        opened.wait_for("!document.getElementById('error').hidden")
        assert "below as text" in text(opened, "#error")
        assert "estimate of GPT" in text(opened, "#text")


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
