"""Chromium as a stopwatch: how long a dashboard takes to show its charts, what that costs, and how smooth the pointer is over them."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from boards import Board, Size

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--js-flags=--max-old-space-size=6000",
         # Some of these pages ask things of the web: nothing but this machine answers, at once.
         "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # fmt: skip
WINDOW = {"width": 1600, "height": 1000}
FRAME = "() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))"


@contextlib.contextmanager
def window(**options: Any) -> Iterator[Any]:
    """Start a fresh Chromium, and yield a context of it."""
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise SystemExit("there is no Chromium on this machine. Nothing was measured. Install the package chromium.")
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=FLAGS)
        try:
            yield chromium.new_context(**{"viewport": WINDOW, "color_scheme": "light", **options})
        finally:
            chromium.close()


class Meter:
    """What one page cost so far: main thread, heap, and bytes by kind."""

    def __init__(self, page: Any) -> None:
        self.cdp = page.context.new_cdp_session(page)
        self.bytes: dict[str, int] = {}
        self.urls: dict[str, str] = {}
        self._kind: dict[str, str] = {}
        self.cdp.on("Network.responseReceived", self._answered)
        self.cdp.on("Network.loadingFinished", self._finished)
        for domain in ("Performance", "Network"):
            self.cdp.send(f"{domain}.enable")

    def _answered(self, event: dict[str, Any]) -> None:
        self._kind[event["requestId"]] = event["type"]
        self.urls[event["response"]["url"]] = event["type"]

    def _finished(self, event: dict[str, Any]) -> None:
        kind = self._kind.get(event["requestId"], "Other")
        self.bytes[kind] = self.bytes.get(kind, 0) + int(event["encodedDataLength"])

    def figures(self) -> dict[str, float]:
        return {one["name"]: one["value"] for one in self.cdp.send("Performance.getMetrics")["metrics"]}

    def main(self) -> float:
        """Return the seconds of CPU the main thread has used: a busy machine makes pages slower, not this."""
        return self.figures()["ThreadTime"]

    def heap(self) -> float:
        """Return the MB in use after a collection: what was thrown away does not count."""
        self.cdp.send("HeapProfiler.collectGarbage")
        return self.figures()["JSHeapUsedSize"] / 1e6


def visit(board: Board, base: str, size: Size, *, limit: float, hover: float = 0, picture: Path | None = None) -> dict[str, Any]:
    """Open a board in a fresh browser; return what it took until its charts held their data plus one frame, or why it failed."""
    from playwright.sync_api import Error, TimeoutError

    if not base:
        return {"failed": "its server did not answer"}
    with window() as context:
        page = context.new_page()
        meter = Meter(page)
        try:
            figures = _drawn(board, page, meter, board.url(base, size), size, limit)
            if picture:
                page.screenshot(path=picture, timeout=120_000)
            return {**figures, **(_hover(board, page, meter, hover) if hover else {})}
        except TimeoutError:
            if picture:
                page.screenshot(path=picture, timeout=120_000)
            return {"failed": f"did not draw within {limit:.0f} s"}
        except Error as error:
            return {"failed": str(error).splitlines()[0][:80]}


def _drawn(board: Board, page: Any, meter: Meter, url: str, size: Size, limit: float) -> dict[str, Any]:
    given = {"runs": size.runs, "metrics": size.metrics, "last": size.steps - 1}
    least = min(board.waits, size.metrics)
    began = time.perf_counter()
    page.goto(url, wait_until="commit", timeout=limit * 1000)
    page.wait_for_function(f"given => ({board.drawn})(given) >= {least}", arg=given, polling=50, timeout=limit * 1000)
    page.evaluate(FRAME)
    took = time.perf_counter() - began
    figures = meter.figures()
    page.wait_for_timeout(500)
    return {
        "seconds": took,
        "main": figures["ThreadTime"],
        "nodes": figures["Nodes"],
        "heap": meter.heap(),
        "mb": sum(meter.bytes.values()) / 1e6,
        "js": meter.bytes.get("Script", 0) / 1e6,
        "charts": page.evaluate(f"given => ({board.drawn})(given)", given),
        "urls": meter.urls,
    }


RECORD = """() => { window.frames_ = []; let last = performance.now();
  const next = () => requestAnimationFrame(() => { const now = performance.now(); window.frames_.push(now - last); last = now; next(); }); next(); }"""
PLACE = """selector => [...document.querySelectorAll(selector)].map(e => e.getBoundingClientRect())
  .filter(r => r.height > 100 && r.width > 100 && r.top < 800).map(r => [r.x, r.y, r.width, r.height])[0]"""


def _hover(board: Board, page: Any, meter: Meter, seconds: float) -> dict[str, float]:
    """Move the pointer over the first chart thirty times a second; return the slow end of the frames, and the main thread's part."""
    page.wait_for_timeout(1000)
    place = page.evaluate(PLACE, board.plot)
    if place is None:
        return {}
    x, y, width, height = place
    page.evaluate(RECORD)
    began, busy, moves = time.monotonic(), meter.main(), 0
    end = began + seconds
    while time.monotonic() < end:
        page.mouse.move(x + width * (0.2 + 0.6 * (moves * 7 % 100) / 100), y + height * (0.3 + 0.4 * (moves * 3 % 50) / 50))
        moves += 1
        page.wait_for_timeout(33)
    part = (meter.main() - busy) / (time.monotonic() - began)
    frames = sorted(page.evaluate("() => window.frames_"))
    return {"hover_main": part * 100, "hover": frames[int(len(frames) * 0.95)], "hover_median": frames[len(frames) // 2]}
