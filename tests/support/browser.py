"""A headless Chromium without network, driven through the pipes of its DevTools protocol."""

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
