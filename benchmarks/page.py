"""What we promise of our own page, measured in it: single points on the canvas, sorting and filtering, live points, a flat heap."""

from __future__ import annotations

import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from boards import Fanfold
from browser import WINDOW, Meter, window
from budgets import SPIKES, Budget, Plan, dashboard, long_run, many_runs
from store import write

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


def pixels(plan: Plan) -> list[Budget]:
    """Look for two single points of a long series on the canvas itself: lines of ink to where they stand, and none beside them."""
    with dashboard(long_run(plan)[0]) as base, window() as context:
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


# The table


SORT = """async turn => { const next = () => new Promise(done => { const c = new MessageChannel(); c.port1.onmessage = done; c.port2.postMessage(0); });
  const heads = [...document.querySelectorAll('[role=grid] [role=columnheader]')].filter(e => e.textContent.includes('metric/'));
  const head = heads[(turn >> 1) % heads.length], before = head.getAttribute('aria-sort'), began = performance.now();
  head.querySelector('button').click();
  while (head.getAttribute('aria-sort') === before) await next();
  document.querySelector('[role=grid]').getBoundingClientRect();
  return performance.now() - began; }"""
# The rows on top may all pass: that a filter is done shows in the number of rows.
FILTER = """text => new Promise(done => { const input = document.querySelector('#filter'), list = document.querySelector('[role=grid]'), rows = () => list.getAttribute('aria-rowcount'), before = rows(), began = performance.now();
  const told = new MutationObserver(() => { if (rows() !== before) { told.disconnect(); list.getBoundingClientRect(); done(performance.now() - began); } });
  told.observe(list, { attributes: true, attributeFilter: ['aria-rowcount'] });
  input.value = text; input.dispatchEvent(new Event('input', { bubbles: true })); })"""


def table(plan: Plan) -> list[Budget]:
    """Sort by figures and filter in the page; a filter is answered by the server, so its wait and its work are told apart."""
    runs, keys = plan.table
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
        sorts = [_asked(page, meter, SORT, turn) for turn in range(plan.of(24, 4))]
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


# Growth: the same page over few and over many

FIRST = """() => { const one = document.querySelector('figure[data-painted]');
  return one && !/: 0 runs/.test(one.getAttribute('aria-label')) ? performance.now() : 0; }"""
ZOOM = """given => new Promise(done => { const one = document.querySelector('figure[data-painted]'), label = one.getAttribute('aria-label'), began = performance.now();
  const told = new MutationObserver(() => { if (one.getAttribute('aria-label') === label) return;
    told.disconnect(); const painted = one.dataset.painted;
    const see = () => (one.dataset.painted === painted ? requestAnimationFrame(see) : done(performance.now() - began)); see(); });
  told.observe(one, { attributes: true, attributeFilter: ['aria-label'] });
  location.hash = given; })"""


def shaped(plan: Plan, runs: int, keys: int) -> Path:
    """Write runs of 200 steps, once; they ended a while ago."""
    root = plan.data / f"shaped-{runs}x{keys}"
    if not root.with_suffix(".done").exists():
        for i in range(runs):
            folder = write(root, 200, keys, id=f"run{i}", project="shaped", noise=i % 50)
            for journal in (folder / "journal").glob("*.ffj"):
                os.utime(journal, (time.time() - 600,) * 2)
        root.with_suffix(".done").touch()
    return root


def _opened(plan: Plan, runs: int, keys: int) -> tuple[float, float]:
    """Return the milliseconds until the first chart is painted, and those a zoom takes; medians over fresh browsers."""
    firsts, zooms = [], []
    with dashboard(shaped(plan, runs, keys)) as base:
        for turn in range(plan.of(6, 2)):
            with window() as context:
                page = context.new_page()
                page.goto(f"{base}#p=shaped")
                took = page.wait_for_function(FIRST, polling=20, timeout=120_000).json_value()
                page.wait_for_timeout(1500)
                zoom = page.evaluate(ZOOM, "p=shaped&zoom=50..90")
            if turn:  # the first visit only warms the server up
                firsts.append(took)
                zooms.append(zoom)
    return statistics.median(firsts), statistics.median(zooms)


def grows(plan: Plan) -> list[Budget]:
    """Compare the page over few runs and metrics with the page over many."""
    many, thousand, metrics = plan.of(10_000, 300), plan.of(1000, 100), plan.of(400, 40)
    few, _ = _opened(plan, 60, 4)
    most, _ = _opened(plan, many, 4)
    four, near = _opened(plan, 4, 4)
    _, far = _opened(plan, thousand, 4)
    wide, _ = _opened(plan, 4, metrics)
    return [
        Budget(f"first chart with {many:,} runs, to that with 60", most / few, 3, "", f"{few:.0f} and {most:.0f} ms"),
        Budget(f"zoom with {thousand:,} runs, to that with 4", far / near, 3, "", f"{near:.0f} and {far:.0f} ms, until the first chart is painted"),
        Budget(f"first chart of {metrics} metrics, to that of 4", wide / four, 1.5, "", f"{four:.0f} and {wide:.0f} ms, of 4 runs"),
    ]  # fmt: skip


# Live

WATCH = """attribute => { window.shownAt = {}; const counts = new Map();
  const inView = figure => { const r = figure.getBoundingClientRect(); return r.top < innerHeight && r.bottom > 0; };
  new MutationObserver(news => {
    for (const one of news) {
      const found = /([\\d,]+) points?/.exec(one.target.getAttribute('aria-label') ?? '');
      if (found) counts.set(one.target, Number(found[1].replaceAll(',', '')));
    }
    const seen = [...document.querySelectorAll('figure[data-key]')].filter(inView);
    const all = Math.min(...seen.map(figure => counts.get(figure) ?? 0));
    window.inView = seen.length;
    if (!all || all in window.shownAt) return;
    window.shownAt[all] = 0;
    const now = () => (window.shownAt[all] = Date.now());
    if (attribute === 'data-painted') requestAnimationFrame(now); else now();
  }).observe(document.body, { subtree: true, attributes: true, attributeFilter: [attribute] }); }"""


def live(plan: Plan, scratch: Path) -> list[Budget]:
    """Log a point now and then; ask the tab in front when the last of forty charts had painted it, and the others when they had it.

    A tab behind another has one frame a second at most, whatever the page does: what it would paint nobody sees.
    """
    import fanfold

    names = [f"live/k{i:02d}" for i in range(20)] + [f"more/k{i:02d}" for i in range(20)]
    run = fanfold.init("live", dir=scratch / "live", id="now", name="now", system=False, quiet=True)
    run.log(dict.fromkeys(names, 0.0), step=0)
    with dashboard(scratch / "live") as base, window() as context:
        tabs = [_live_tab(context, base) for _ in range(12)]
        tabs[0].set_viewport_size({"width": WINDOW["width"], "height": 4000})
        tabs[0].bring_to_front()
        for tab in tabs:
            tab.evaluate(WATCH, "data-painted" if tab is tabs[0] else "aria-label")
        tabs[0].wait_for_timeout(2000)
        rng, rounds = random.Random(1), []
        for n in range(2, 2 + plan.of(20, 5)):
            began = time.time()
            run.log(dict.fromkeys(names, float(n)), step=n)
            rounds.append([_shown(tab, n) - began for tab in tabs])
            tabs[0].wait_for_timeout(rng.uniform(400, 1300))
        charts = tabs[0].evaluate("() => window.inView")
    run.finish()
    front, behind = [one[0] for one in rounds], [delay for one in rounds for delay in one[1:]]
    note = (
        f"slowest of {len(rounds)} points; median {statistics.median(front):.2f} s; {charts} charts in view; "
        f"the eleven tabs behind have it within {max(behind):.2f} s, median {statistics.median(behind):.2f} s"
    )
    return [Budget("point logged to painted, 40 charts, 12 tabs", max(front + behind), 1.5, "s", note)]


def _live_tab(context: Any, base: str) -> Any:
    tab = context.new_page()
    tab.set_default_timeout(60_000)
    tab.goto(f"{base}#p=live")
    tab.wait_for_function(f"given => ({Fanfold.drawn})(given) >= 4", arg={"runs": 1})
    tab.locator(".live", has_text="live").first.wait_for()
    return tab


def _shown(tab: Any, count: int) -> float:
    # Frames are rare in a tab behind others: the question is asked by the clock.
    tab.wait_for_function("count => window.shownAt[count]", arg=count, polling=50)
    return tab.evaluate("count => window.shownAt[count]", count) / 1000


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
