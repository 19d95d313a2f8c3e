"""What we promise of our own dashboard, measured on the real store, the real server and the real page."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import random
import statistics
import struct
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from boards import PROJECT, Fanfold, Size, get, served
from browser import WINDOW, Meter, window
from store import best, write

SPIKES = (0.123456, 0.876543)  # where, in parts of the series, one point stands far above and one far below


@dataclass
class Budget:
    """One promise: what was measured, and the most it may be. Nothing measured is a failure that says why."""

    what: str
    value: float | None
    most: float
    unit: str
    note: str = ""

    @property
    def kept(self) -> bool:
        return self.value is not None and self.value <= self.most

    def row(self) -> list[str]:
        measured = (
            "-"
            if self.value is None
            else f"{self.value:,.3g} {self.unit}"
            if self.value < 1000
            else f"{self.value:,.0f} {self.unit}"
        )
        return [self.what, measured, f"{self.most:g} {self.unit}", "yes" if self.kept else "**no**", self.note]


@dataclass(frozen=True)
class Plan:
    """How much of everything: the promise's own sizes, or a quick look."""

    data: Path
    size: Size
    quick: bool
    soak: float  # seconds of live heap

    def of(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@contextlib.contextmanager
def dashboard(dir: Path) -> Iterator[str]:
    with served(Fanfold(), dir, Size()) as base:
        if not base:
            raise SystemExit(f"`fanfold ui --dir {dir}` did not answer. The budgets were not measured. See {dir}.server.log.")
        yield base


# Bytes and requests


def first_page(base: str, urls: dict[str, str]) -> list[Budget]:
    """Sum what the browser fetched as code for the first page."""
    code = [url for url, kind in urls.items() if kind in ("Script", "Stylesheet") and url.startswith(base)]
    packed = sum(len(gzip.compress(get(url), 9)) for url in code) / 1000
    names = ", ".join(sorted(urllib.parse.urlsplit(url).path.strip("/") for url in code))
    return [Budget("JS + CSS of the first page, gz", packed if code else None, 60, "KB", names)]


class Client:
    """One kept connection, as a page has it."""

    def __init__(self, base: str) -> None:
        self.host = urllib.parse.urlsplit(base).netloc
        self.connection = http.client.HTTPConnection(self.host, timeout=60)

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        self.connection.request(
            "POST", path, json.dumps(body), {"content-type": "application/json", "origin": f"http://{self.host}"}
        )
        answer = self.connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path} answered {answer.status}: {data[:200]!r}. The budgets were not measured.")
        return data


def decode(data: bytes) -> list[dict[str, Any]]:
    """Read an answer of columns (docs/dashboard.md)."""
    import numpy as np

    version, length = struct.unpack_from("<II", data)
    assert version == 1
    head, start = json.loads(data[8 : 8 + length]), 8 + length
    for item in head["items"]:
        item |= {
            name: np.frombuffer(data, f"<{type}", count, start + at) for name, (type, at, count) in item.pop("columns").items()
        }
    return head["items"]


def series_request(base: str, plan: Plan) -> list[Budget]:
    client, runs = Client(base), [f"run{i:03d}" for i in range(plan.size.runs)]
    asked = {"project": PROJECT, "runs": runs, "keys": [plan.size.names[0]], "n": 330}
    size = len(client.post("/api/series", asked))
    least, median = best(lambda: client.post("/api/series", asked), plan.of(31, 9))
    note = f"{size / 1000:,.0f} KB; median of a kept connection, best {least:.1f} ms"
    return [Budget(f"series request, {len(runs)} runs x 330 buckets", median, 20, "ms", note)]


# Exactness


def extremes(base: str, plan: Plan) -> list[Budget]:
    """Compare what the server sends for drawing with the raw data: whole series, and windows as a zoom asks for them."""
    client, raw = Client(base), [plan.size.values(run).astype("f4") for run in range(plan.size.runs)]
    wrong = looked = 0
    rng = random.Random(1)
    windows = [(0, plan.size.steps - 1)] + [tuple(sorted(rng.sample(range(plan.size.steps), 2))) for _ in range(plan.of(20, 5))]
    for lo, hi in windows:
        asked = {
            "project": PROJECT,
            "runs": [f"run{i:03d}" for i in range(plan.size.runs)],
            "keys": plan.size.names,
            "n": 50,
            "lo": lo,
            "hi": hi,
        }
        for item in decode(client.post("/api/series", asked)):
            there = raw[int(item["run"][3:])][lo : hi + 1, plan.size.names.index(item["key"])]
            inside = (item["x"] >= lo) & (item["x"] <= hi)
            low, high = item.get("lo", item["y"])[inside].min(), item.get("hi", item["y"])[inside].max()
            wrong += (low.astype("f4") != there.min()) + (high.astype("f4") != there.max())
            looked += 2
    note = f"{looked:,} extremes of {len(windows)} ranges in 50 buckets, compared with the data"
    return [Budget("extremes lost on the way to the page", int(wrong) if looked else None, 0, "", note)]


COLUMN = """([where, from, to]) => { const canvas = document.querySelector('figure canvas');
  const g = canvas.getContext('2d'), PAD = { l: 48, r: 10, t: 8, b: 20 };
  const x = Math.round(PAD.l + where * (canvas.width - PAD.l - PAD.r)), top = PAD.t, high = canvas.height - PAD.t - PAD.b;
  const ground = g.getImageData(1, 1, 1, 1).data, first = Math.round(top + from * high), last = Math.round(top + to * high);
  let most = 0;
  for (let at = x - 3; at <= x + 3; at++) { let ink = 0;
    const data = g.getImageData(at, first, 1, last - first).data;
    for (let i = 0; i < data.length; i += 4) ink += data[i] !== ground[0] || data[i + 1] !== ground[1] || data[i + 2] !== ground[2];
    most = Math.max(most, ink / (last - first)); }
  return most; }"""


def pixels(base: str) -> list[Budget]:
    """Look for two single points of a long series on the canvas itself: lines of ink to where they stand, and none beside them."""
    with window() as context:
        page = context.new_page()
        page.goto(f"{base}#p=long")
        page.wait_for_function(f"given => ({Fanfold.drawn})(given) >= 1", arg={"runs": 1}, timeout=120_000)
        page.wait_for_timeout(300)
        up, down = (page.evaluate(COLUMN, [at, *part]) for at, part in zip(SPIKES, ((0.1, 0.35), (0.65, 0.9)), strict=True))
        beside = page.evaluate(COLUMN, [0.5, 0.1, 0.35])
    missing = int(up < 0.9) + (down < 0.9) + (beside > 0.5)
    return [
        Budget(
            "single points missing on the canvas",
            missing,
            0,
            "",
            f"ink to the spikes {up:.2f} and {down:.2f}, beside them {beside:.2f}",
        )
    ]


# The store


def long_run(plan: Plan) -> tuple[Path, int]:
    """Write a long run with two single points out of line, once."""
    from fanfold.journal import Writer
    from fanfold.journal import format as fmt

    points = plan.of(1_000_000, 20_000)
    root = plan.data / f"long-{points}"
    if root.with_suffix(".done").exists():
        return root, points
    noise, spikes = random.Random(1), {int(points * at): 50.0 * sign for at, sign in zip(SPIKES, (1, -1), strict=True)}
    header = {
        "format": [fmt.MAJOR, fmt.MINOR],
        "rank": 0,
        "role": "main",
        "attempt": "a",
        "run": "long",
        "project": "long",
        "ordinal": 1,
    }
    out, clock = Writer(root / "long" / "long" / "journal", header), 1_790_000_000_000_000_000
    for step in range(points):
        clock += 10_000_000
        out.row({"loss": spikes.get(step) or noise.gauss(0, 1)}, "d", time_ns=clock, step=step)
    out.close({"status": "finished", "t": clock})
    root.with_suffix(".done").touch()
    return root, points


def long_series(plan: Plan) -> list[Budget]:
    from fanfold.store.merge import merge
    from fanfold.store.query import LocalStore

    root, points = long_run(plan)
    journals = list((root / "long" / "long" / "journal").glob("*.ffj"))
    found = []
    for origin, most in (("a journal", 20), ("a segment", 3)):
        store = LocalStore(root)  # a reader that opens the run anew sees its segments
        ask = partial(store.series, store.run("long", "long"), "loss", buckets=1000)
        least, median = best(ask, 15)
        note = f"median of the same question asked again, best {least:.2f} ms"
        found.append(Budget(f"{points:,} points to 1,000 buckets from {origin}", median, most, "ms", note))
        for journal in journals:
            list(merge(journal))
    return found


def many_runs(plan: Plan, runs: int, keys: int) -> Path:
    """Write runs of one step with many keys, once; they ended a while ago."""
    root = plan.data / f"wide-{runs}x{keys}"
    if not root.with_suffix(".done").exists():
        for i in range(runs):
            folder = write(root, 1, keys, id=f"run{i}", project="wide", noise=i)
            for journal in (folder / "journal").glob("*.ffj"):
                os.utime(journal, (time.time() - 600,) * 2)
        root.with_suffix(".done").touch()
    return root


def latest_values(plan: Plan) -> list[Budget]:
    from fanfold.store.query import LocalStore

    runs, keys = plan.of(1000, 50), plan.of(100, 20)
    root = many_runs(plan, runs, keys)
    LocalStore(root).runs("wide")
    fresh, _ = best(lambda: LocalStore(root).runs("wide"), 5)
    store = LocalStore(root)
    store.runs("wide")
    least, median = best(lambda: store.runs("wide"), 9)
    note = f"median in a server that is up, best {least:.1f} ms; a new process with the catalogue on disk {fresh:.0f} ms"
    return [Budget(f"latest values of {runs:,} runs x {keys} keys", median, 50, "ms", note)]


# The table


SORT = """async turn => { const next = () => new Promise(done => { const c = new MessageChannel(); c.port1.onmessage = done; c.port2.postMessage(0); });
  const heads = [...document.querySelectorAll('[role=grid] [role=columnheader]')].filter(e => e.textContent.includes('metric/'));
  const head = heads[(turn >> 1) % heads.length], before = head.getAttribute('aria-sort'), began = performance.now();
  head.querySelector('button').click();
  while (head.getAttribute('aria-sort') === before) await next();
  document.querySelector('[role=grid]').getBoundingClientRect();
  return performance.now() - began; }"""
FILTER = """text => new Promise(done => { const input = document.querySelector('#filter'), list = document.querySelector('aside'), before = list.textContent, began = performance.now();
  const told = new MutationObserver(() => { if (list.textContent !== before) { told.disconnect(); list.getBoundingClientRect(); done(performance.now() - began); } });
  told.observe(list, { subtree: true, childList: true, characterData: true });
  input.value = text; input.dispatchEvent(new Event('input', { bubbles: true })); })"""


def table(plan: Plan) -> list[Budget]:
    """Sort by figures and filter in the page; a filter is answered by the server, so its wait and its work are told apart."""
    runs, keys = plan.of(5000, 200), plan.of(1000, 50)
    root = many_runs(plan, runs, keys)
    with dashboard(root) as base, window() as context:
        page = context.new_page()
        page.set_default_timeout(120_000)
        meter = Meter(page)
        page.goto(f"{base}#p=wide&v=table")
        page.wait_for_function(f"() => document.querySelector('[role=grid]')?.getAttribute('aria-rowcount') == {runs + 1}")
        page.wait_for_function(
            "() => [...document.querySelectorAll('[role=gridcell].num')].slice(0, 8).some(e => /[0-9]/.test(e.textContent))"
        )
        page.wait_for_timeout(1000)
        sorts = [_asked(page, meter, SORT, turn) for turn in range(plan.of(12, 4))]
        filters = [_asked(page, meter, FILTER, f"metric/{i}>{x}") for i, x in enumerate((0, 0.1, 0.2, -0.1, 0.3))]
    sort, sort_cpu = (statistics.median(one) for one in zip(*sorts, strict=True))
    wait, filter_cpu = (statistics.median(one) for one in zip(*filters, strict=True))
    what = f"{runs:,} runs x {keys:,} columns"
    return [
        Budget(f"sort {what} in the page", sort, 30, "ms", f"click to laid out; CPU of the main thread {sort_cpu:.0f} ms with painting"),
        Budget(f"filter {what} in the page", filter_cpu, 30, "ms",
               f"CPU of the main thread with painting; typed to shown {wait:.0f} ms, 120 of them waiting for more keys, then the server"),
    ]  # fmt: skip


def _asked(page: Any, meter: Meter, code: str, given: Any) -> tuple[float, float]:
    """Return the milliseconds the page says something took, and what it cost the main thread until all was quiet."""
    page.wait_for_timeout(400)
    before = meter.main()
    took = page.evaluate(code, given)
    page.wait_for_timeout(200)
    return took, (meter.main() - before) * 1000


# Live

WATCH = """() => { window.shownAt = {}; const counts = new Map();
  const inView = figure => { const r = figure.getBoundingClientRect(); return r.top < innerHeight && r.bottom > 0; };
  new MutationObserver(news => {
    for (const one of news) {
      const found = /([\\d,]+) points?/.exec(one.target.getAttribute('aria-label') ?? '');
      if (found) counts.set(one.target, Number(found[1].replaceAll(',', '')));
    }
    const seen = [...document.querySelectorAll('figure[data-key]')].filter(inView);
    const all = Math.min(...seen.map(figure => counts.get(figure) ?? 0));
    window.inView = seen.length;
    if (all && !(all in window.shownAt)) { window.shownAt[all] = 0; requestAnimationFrame(() => (window.shownAt[all] = Date.now())); }
  }).observe(document.body, { subtree: true, attributes: true, attributeFilter: ['data-painted'] }); }"""


def live(plan: Plan, scratch: Path) -> list[Budget]:
    """Log a point now and then, and ask every tab when the last of its charts in view had painted it."""
    import fanfold

    names = [f"live/k{i:02d}" for i in range(20)] + [f"more/k{i:02d}" for i in range(20)]
    run = fanfold.init("live", dir=scratch / "live", id="now", name="now", system=False, quiet=True)
    run.log(dict.fromkeys(names, 0.0), step=0)
    delays: list[float] = []
    with dashboard(scratch / "live") as base, window() as context:
        tabs = [context.new_page() for _ in range(12)]
        tabs[0].set_viewport_size({"width": WINDOW["width"], "height": 4000})  # one that shows all forty
        for tab in tabs:
            tab.set_default_timeout(60_000)
            tab.goto(f"{base}#p=live")
            tab.wait_for_function(f"given => ({Fanfold.drawn})(given) >= 4", arg={"runs": 1})
            tab.locator(".live", has_text="live").first.wait_for()
            tab.evaluate(WATCH)
        tabs[0].wait_for_timeout(2000)
        rng = random.Random(1)
        for n in range(2, 2 + plan.of(20, 5)):
            began = time.time()
            run.log(dict.fromkeys(names, float(n)), step=n)
            for tab in tabs:
                tab.wait_for_function("n => window.shownAt[n]", arg=n)
                delays.append(tab.evaluate("n => window.shownAt[n]", n) / 1000 - began)
            tabs[0].wait_for_timeout(rng.uniform(400, 1300))
        charts = tabs[0].evaluate("() => window.inView")
    run.finish()
    note = f"slowest of {len(delays)}; median {statistics.median(delays):.2f} s; one tab with {charts} charts in view, eleven with a window's"
    return [Budget("point logged to painted, 40 charts, 12 tabs", max(delays), 1.5, "s", note)]


def heap(plan: Plan, scratch: Path) -> list[Budget]:
    """Watch one page while a run grows: its charts are full of buckets from the start, so the heap has no reason to grow."""
    import fanfold

    names = [f"live/k{i:02d}" for i in range(15)]
    run = fanfold.init("soak", dir=scratch / "soak", id="now", name="now", system=False, quiet=True)
    for step in range(3000):
        run.log(dict.fromkeys(names, step % 17 / 7), step=step)
    samples: list[float] = []
    with dashboard(scratch / "soak") as base, window() as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        meter = Meter(page)
        page.goto(f"{base}#p=soak")
        page.wait_for_function(f"given => ({Fanfold.drawn})(given) >= 4", arg={"runs": 1})
        busy = watched = 0.0
        began, every = time.monotonic(), max(0.5, plan.soak / 60)
        while time.monotonic() < began + plan.soak:
            here, cpu = time.monotonic(), meter.main()
            until = here + every
            while time.monotonic() < until:
                step += 1
                run.log(dict.fromkeys(names, step % 17 / 7), step=step)
                page.wait_for_timeout(100)
            busy, watched = busy + meter.main() - cpu, watched + time.monotonic() - here
            samples.append(meter.heap())
        nodes = meter.figures()["Nodes"]
    run.finish()
    third = max(1, len(samples) // 3)
    # The first samples still load code and warm caches.
    first, last = statistics.median(samples[third : 2 * third] or samples), statistics.median(samples[-third:])
    minutes = plan.soak / 60
    note = f"{first:.1f} to {last:.1f} MB, middle to last third; main thread {busy / watched:.0%} of a core; {nodes:,.0f} nodes"
    return [
        Budget(f"heap growth in {minutes:.3g} min live, 15 charts", max(0.0, last - first), max(1.0, 0.1 * first), "MB", note)
    ]


def all_budgets(plan: Plan, base: str, urls: dict[str, str], scratch: Path, say: Callable[[str], None]) -> list[Budget]:
    """Measure every budget, in an order that leaves the long ones for last."""
    from playwright.sync_api import Error

    found: list[Budget] = []
    for what, ask in (
        ("bytes", lambda: first_page(base, urls)),
        ("requests", lambda: series_request(base, plan)),
        ("extremes", lambda: extremes(base, plan)),
        ("a long series", lambda: long_series(plan)),
        ("its pixels", lambda: _pixels(plan)),
        ("latest values", lambda: latest_values(plan)),
        ("the table", lambda: table(plan)),
        ("live", lambda: live(plan, scratch)),
        ("the heap", lambda: heap(plan, scratch)),
    ):
        say(what)
        try:
            found += ask()
        except Error as error:  # the page did not get there: a row that says so, and on with the rest
            found.append(Budget(what, None, 0, "", str(error).splitlines()[0][:120]))
    return found


def _pixels(plan: Plan) -> list[Budget]:
    with dashboard(long_run(plan)[0]) as base:
        return pixels(base)
