"""What the other open dashboards do for the 25 tasks of docs/tasks.md: python benchmarks/tasks.py [--only NAME,…] [--data FOLDER] [--pictures FOLDER]

Each is started over the runs of tasks_data.py and used in a real browser, a line of the tables below for each look: the rows it is about, what is tried,
how, and what is printed. With --pictures every look leaves a screenshot: a person judges from those whether the tool does the task. Most looks print which
words the page shows; a word can be elsewhere, and a control can do less than its name says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from playwright.sync_api import Error

from boards import BOARDS, PROJECT, Board, get, served
from browser import window
from tasks_data import BEST, REASON, SAMPLED, STEPS

HERE = Path(__file__).resolve().parent
AXE = HERE.parent / "web" / "node_modules" / "axe-core" / "axe.min.js"
DESKTOP, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 800}
# Everything a page says, in the shadow of its elements too: texts, what fields hold, and the names of controls that are drawn as signs.
WORDS = """() => { const found = [document.body.innerText];
  const walk = root => root.querySelectorAll('*').forEach(e => {
    found.push(...['aria-label', 'placeholder', 'title', 'alt'].map(name => e.getAttribute(name)), e.tagName === 'INPUT' && e.value);
    if (e.shadowRoot) { found.push(...[...e.shadowRoot.children].map(one => one.innerText)); walk(e.shadowRoot); } });
  walk(document);
  return found.filter(Boolean).join('\\n'); }"""
# The points of each line that a chart of Plotly (MLflow) or of paths (Aim) holds, with the lowest of the first.
PLOTLY = "() => { const p = [...document.querySelectorAll('.js-plotly-plot')].pop(); return p.data.map(d => [d.x.length, Math.min(...d.y)]); }"
PATHS = "() => [...document.querySelectorAll('path.Line')].map(e => e.getAttribute('d').split('L').length)"
FOCUS = "() => { const e = document.activeElement; return e ? e.outerHTML.slice(0, 300) : ''; }"


@dataclass
class Desk:
    """A page of one tool, and what a user does with it."""

    page: Any
    base: str
    wait: int = 1500  # milliseconds after each step: these pages draw a moment later

    def go(self, path: str = "", until: str = "") -> Desk:
        """Open a page as if for the first time, and wait until it shows this and says no more than a moment before."""
        if self.page.url.startswith(self.base):
            self.page.evaluate("localStorage.clear()")
        self.page.goto("about:blank")  # a change after the # alone loads nothing
        self.page.goto(self.base + path, timeout=120_000)
        with contextlib.suppress(Error):  # looked at as it is
            self._at(until or "css=body", 0).wait_for(timeout=60_000)
        for _ in range(20):
            before = self.text()
            if len(before) > 300 and self.pause().text() == before:
                break
            self.pause()
        return self

    def pause(self, wait: int | None = None) -> Desk:
        self.page.wait_for_timeout(self.wait if wait is None else wait)
        return self

    def _at(self, what: str, nth: int) -> Any:
        """Find a visible part: CSS after "css=", otherwise by its whole text."""
        where = what[4:] if what.startswith("css=") else f"text=/^\\s*{re.escape(what)}\\s*$/i"
        return self.page.locator(f"{where} >> visible=true").nth(nth)

    def click(self, what: str, nth: int = 0, **more: Any) -> Desk:
        self._at(what, nth).click(**more)
        return self.pause()

    def hover(self, what: str, x: float = 0.5, y: float = 0.5, nth: int = 0) -> Desk:
        box = self._at(what, nth).bounding_box()
        self.page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] * y)
        return self.pause()

    def drag(self, what: str, start: tuple[float, float], end: tuple[float, float], nth: int = 0) -> Desk:
        """Drag over a part, from and to shares of its width and height."""
        self.hover(what, *start, nth)
        box = self._at(what, nth).bounding_box()
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + box["width"] * end[0], box["y"] + box["height"] * end[1], steps=8)
        self.page.mouse.up()
        return self.pause(4000)

    def keys(self, *keys: str) -> Desk:
        """Press keys by name, type anything longer than a name with a space before it."""
        for key in keys:
            self.page.keyboard.type(key[1:], delay=30) if key.startswith(" ") else self.page.keyboard.press(key)
        return self.pause()

    def zoom(self, what: str, low: int, high: int, shown: tuple[float, float], nth: int = 0) -> Desk:
        share = [(step - shown[0]) / (shown[1] - shown[0]) for step in (low, high)]
        return self.drag(what, (share[0], 0.5), (share[1], 0.5), nth)

    def text(self) -> str:
        return str(self.page.evaluate(WORDS))

    def says(self, *patterns: str) -> dict[str, bool]:
        """Tell which of these words the page shows."""
        text = self.text()
        return {pattern: re.search(pattern, text, re.IGNORECASE) is not None for pattern in patterns}

    def runs(self) -> list[str]:
        """Tell which runs the page names."""
        return sorted(set(re.findall(r"lr0\.\d+-seed\d", self.text())))

    def js(self, script: str) -> Any:
        return self.page.evaluate(script)

    def address(self) -> list[str]:
        """Tell what the address keeps."""
        parts = urlsplit(self.page.url)
        return [key for key, _ in parse_qsl(f"{parts.query}&{parts.fragment.partition('?')[2]}")]

    def reach(self, path: str) -> dict[str, Any]:
        """Open a page on a phone; tell its width there, what axe finds wrong, and how many parts 40 presses of Tab reach."""
        self.page.set_viewport_size(PHONE)
        try:
            self.go(path)
            wide = self.js("() => document.documentElement.scrollWidth")
            if AXE.is_file():
                self.page.add_script_tag(path=AXE)
            wrong = [one["id"] for one in self.js("() => axe.run()")["violations"]] if AXE.is_file() else "axe is not here"
            reached = {self.keys("Tab") and self.js(FOCUS) for self.wait in [60] * 40}
            return {"width at 390": wide, "violations": wrong, "parts reached by 40 tabs": len(reached)}
        finally:
            self.wait = 1500

    def post(self, path: str, body: dict[str, Any]) -> Any:
        asked = urllib.request.Request(self.base + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.loads(answer.read())


@dataclass(frozen=True)
class Look:
    """One thing tried: the rows of docs/tasks.md it is about, in words, and how."""

    rows: str
    what: str
    how: Callable[[Desk], Any]


# TensorBoard

CARD = "css=scalar-card"
PIN, WIDE, MORE = 1, 2, 3  # of the buttons of a card
SERIES = f"data/plugin/scalars/scalars?{urlencode({'run': SAMPLED[0], 'tag': 'train/loss'})}"


def card(d: Desk) -> Desk:
    """Open the chart of the losses, over the whole width."""
    d.go("?tagFilter=loss#timeseries", CARD)
    return d.click(f"{CARD} button", WIDE)


TENSORBOARD = [
    Look("1 24", "as it opens", lambda d: (d.go().js("() => document.querySelectorAll('image-card, scalar-card').length"), d.says("Pinned"))),
    Look("6", "charts of the ranks", lambda d: d.go("?tagFilter=time#timeseries", CARD).says("job/rank2", "0.8")),
    Look("2", "filter runs by name", lambda d: (d.click("css=input[placeholder*='Filter runs']").keys(" seed1").says("lr0.1-seed1", "lr0.1-seed0"), d.address())),
    Look("2 13", "config as a column, and its filter", lambda d: d.go("#timeseries").click("css=.add-button, button:has(mat-icon[svgicon='add_24px'])").click("lr").keys("Escape").click("lr", button="right").click("Filter").says("Filter Discrete Values|Values", "Sort", "Compare")),
    Look("7 9", "menus of the list of runs", lambda d: d.keys("Escape").go("#timeseries").click("css=runs-group-menu-button button").says("Color runs by|Run", "Regex", "group by", "mean", "delete")),
    Look("3", "settings and the menu of a chart", lambda d: card(d).click(f"{CARD} button", MORE).says("Smoothing", "Horizontal Axis", "log scale")),
    Look("4 5", f"points of a series of {STEPS} that the server hands out, and the lowest", lambda d: (len(rows := json.loads(get(d.base + SERIES))), min(row[2] for row in rows))),
    Look("5", "a value under the pointer", lambda d: card(d).hover(f"{CARD} line-chart", 0.3).says("Smoothed", "Value", "Min|Max")),
    Look("4", "a drag zooms", lambda d: card(d).drag(f"{CARD} line-chart", (0.15, 0.3), (0.2, 0.7)).hover(f"{CARD} line-chart", 0.9).says("train/loss")),
    Look("8", "lowest and highest below the chart", lambda d: card(d).click("css=mat-checkbox:has-text('Enable Range Selection') label").says(r"\bMin\b", r"\bMax\b", "Start Step", "Step of Min|Min Step")),
    Look("2 8 12 21", "HParams: filter by result, status, sorting", lambda d: d.go("#hparams").says("Max", "Status", "Failure", "Sort by", "importance")),
    Look("11", "parallel coordinates, an axis brushed", lambda d: (d.click("Parallel Coordinates View").drag("css=svg .axis", (0.5, 0.2), (0.5, 0.6), 1).says("Parallel"), d.click("Table View").runs())),
    Look("17 18", "images over steps, boxes, a GIF", lambda d: d.go("#images").says("step", "box|mask")),
    Look("18", "sound", lambda d: d.go("#audio").js("() => !!document.querySelector('audio, tf-audio-dashboard')")),
    Look("19", "distributions of two runs", lambda d: d.go("#histograms").says("weights", "Overlay", "Offset", "range")),
    Look("15 16", "a table as text, of runs and steps", lambda d: d.go("#text").says("question 5", "the quick answer", "step", "sort|search rows", "diff")),
    Look("20 22 23", "pages that are not active", lambda d: d.go("#timeseries").click("css=.plugin-dropdown, mat-select").says("Profile", "Log|Console", "Stop")),
    Look("24", "what the address keeps", lambda d: d.keys("Escape").go("?smoothing=0.9&tagFilter=loss#timeseries").click(f"{CARD} button", PIN).address()),
    Look("25", "on a phone, by keyboard, for a screen reader", lambda d: d.reach("#timeseries")),
]  # fmt: skip


# MLflow

RUNS = "#/experiments/1/runs"
CHARTS = f"{RUNS}?compareRunsMode=CHART"
QUERY = "css=input[placeholder*='metrics.rmse']"
EXPAND = "css=[role=row]:has-text('job') button"
MENU = "css=[data-testid=experiment-view-compare-runs-card-menu]"
PLOT, ROW = "css=.nsewdrag", "css=[role=row] a"


def chart(d: Desk) -> Desk:
    """Open the chart of the losses, over the whole width."""
    d.go(CHARTS, PLOT).click("css=input[placeholder*='Search metric charts']").keys(" loss")
    return d.click("css=[data-component-id=fullscreen_button_chartcard]").pause(3000)


def shown(d: Desk) -> tuple[float, float]:
    low, high = d.js("() => [...document.querySelectorAll('.js-plotly-plot')].pop()._fullLayout.xaxis.range")
    return low, high


def chosen(d: Desk, *names: str) -> Desk:
    d.go(RUNS, ROW)
    for name in names:
        d.click(f"css=[role=row]:has-text('{name}') input[type=checkbox]")
    return d


MLFLOW = [
    Look("1", "as it opens", lambda d: d.go().says("Recent Experiments", PROJECT)),
    Look("1", "the chart view of an experiment", lambda d: d.go(CHARTS, PLOT).js("() => document.querySelectorAll('.js-plotly-plot').length")),
    Look("2", "filter runs by config", lambda d: d.go(RUNS, ROW).click(QUERY).keys(" params.lr = '0.1' and metrics.\"val/acc\" > 0.5", "Enter").pause(2000).says("lr0.1-seed0", "lr0.01-seed0")),
    Look("3", "settings of a chart", lambda d: d.go(CHARTS, PLOT).click("css=input[placeholder*='Search metric charts']").keys(" loss").click(MENU).click("Configure").pause(2000).says("Log scale", "Time \\(relative\\)", "Metric", "smooth")),
    Look("5", "points a chart holds, the lowest, and a value under the pointer", lambda d: (chart(d).js(PLOTLY)[-1], d.hover(PLOT, 0.5, nth=-1).says("Step \\d+", "min|max"))),
    Look("4", f"zoomed to the lowest point at {BEST}", lambda d: d.zoom(PLOT, 1000, 2000, shown(d), -1).zoom(PLOT, 1150, 1320, shown(d), -1).pause(8000).js(PLOTLY)[-1]),
    Look("6", "runs of the ranks", lambda d: d.go(CHARTS, PLOT).click(EXPAND).pause(6000).says("rank2", "time/step")),
    Look("7", "runs grouped by a config value: mean and band", lambda d: d.go(CHARTS, PLOT).click("css=button:has-text('Group by')").click("lr", -1).keys("Escape").pause(3000).says("Group: 0.1", "Group: 0.01")),
    Look("8", "columns of the table", lambda d: d.go(RUNS, ROW).click("css=button:has-text('Columns')").says("train/loss", "min|max|best")),
    Look("9", "two runs chosen", lambda d: chosen(d, SAMPLED[0], SAMPLED[1]).says("Delete", "tags", "Rename", "Move")),
    Look("13 14", "and compared", lambda d: d.click("Compare").pause(4000).says("Show diff only", "Parameters", "Tags", "packages|environment|git diff|commit")),
    Look("11", "parallel coordinates over chosen runs, an axis brushed", lambda d: (d.drag("css=.axis-brush", (0.5, 0.05), (0.5, 0.4)).says("Parallel Coordinates Plot"), d.runs())),
    Look("11 12", "kinds of charts", lambda d: d.go(CHARTS, PLOT).click("css=button:has-text('Add chart')").says("Parallel coordinates", "Contour|Scatter", "importance", "Difference")),
    Look("17", "images over steps", lambda d: d.go(CHARTS, PLOT).click("css=input[placeholder*='Search metric charts']").keys(" seen").pause(4000).js("() => [document.querySelectorAll('img').length, !!document.querySelector('[role=slider]')]")),
    Look("16", "a logged table of two runs side by side", lambda d: d.go(f"{RUNS}?compareRunsMode=ARTIFACT", ROW).says("Group by: id", "Compare: prompt", "Filter by id", "diff")),
    Look("13 14 20 21 22", "a run's page", lambda d: d.go(RUNS, ROW).click(SAMPLED[0]).pause(3000).says("Finished", "Source", "console|stdout|logs", "goodput|where the time")),
    Look("15", "its table, sorted", lambda d: d.click("Artifacts").pause(2000).click("samples.json").pause(3000).click("reward").says("question 30", "search|filter")),
    Look("18", "its figure", lambda d: d.click("plot.html").pause(3000).says("counts")),
    Look("18", "its moving picture", lambda d: d.click("movie.gif").pause(2000).js("() => !!document.querySelector('img[src*=\"movie\"], img')")),
    Look("18", "its sound", lambda d: d.click("sound.wav").pause(2000).js("() => !!document.querySelector('audio')")),
    Look("21", "a run that failed", lambda d: d.go(RUNS, ROW).click("failed").pause(3000).says("Failed", REASON, "Traceback")),
    Look("24", "views, and what the address keeps", lambda d: (d.go(CHARTS, PLOT).click("css=button:has-text('Views')").says("Save as new view", "undo"), d.address())),
    Look("25", "on a phone, by keyboard, for a screen reader", lambda d: d.reach(RUNS)),
]  # fmt: skip


# Aim


def aim_url(page: str, kind: str, *names: str, **grouping: list[str]) -> str:
    """Choose what an explorer shows in its address, as its own links do."""
    board: Any = BOARDS["Aim"]
    chosen = [
        {"label": n, "group": n, "color": "#18AB6D", "type": kind, "value": {"option_name": n, "context": None}} for n in names
    ]
    select = {"options": chosen, "query": "", "advancedMode": False, "advancedQuery": ""}
    groups = {"color": [], "stroke": [], "chart": [], **grouping}
    return f"{page}?select={board._packed(select)}&grouping={board._packed(groups)}"


LINE = "css=path.Line"
LOW = "api/runs/search/run/?" + urlencode({"q": "run.metrics['train/loss'].last < 0.105"})  # what the page of runs asks
LOSSES = aim_url("metrics", "metrics", "train/loss", color=["run.hash"], chart=["name"])


def explorer(d: Desk, page: str, button: str, *words: str) -> Desk:
    """Choose in an explorer what contains these words, and search."""
    d.go(page).click(f"css=button:has-text('{button}')")
    for word in words:
        d.keys("Control+A", f" {word}").click("css=[role=option]")
    return d.keys("Escape").click("Search").pause(4000)


AIM = [
    Look("1", "as it opens", lambda d: d.go().says("Total runs", "Contributions")),
    Look("1", "the page of metrics as it opens", lambda d: (len(d.go("metrics").js(PATHS)), d.says("easy to search"))),
    Look("2", "a query over runs", lambda d: d.go("runs", "css=input[type=checkbox]").click("css=.monaco-editor").keys(" run.hparams.lr == 0.1", "Enter").pause(3000).says("lr0.1-seed0", "lr0.01-seed0")),
    Look("2", "and by a result", lambda d: set(re.findall(r"lr0\.\d+-seed\d", str(get(d.base + LOW))))),
    Look("5", f"points drawn of {STEPS}, a value under the pointer", lambda d: (d.go(LOSSES, LINE).js(PATHS), d.hover("css=svg:has(path.Line)", 0.4, 0.6).says("Step", "min|max"))),
    Look("4", "zoomed", lambda d: d.click("css=.Controls__anchor:has([class*='zoom-in']), [class*=Controls] button:has([class*='zoom-in']), .icon-zoom-in").drag("css=svg:has(path.Line)", (0.1, 0.2), (0.2, 0.8)).js(PATHS)),
    Look("3", "smoothing, axes", lambda d: [d.go(LOSSES, LINE).click(f"css=.icon-{name}").says(*words) for name, words in (("smoothing", ("Smoothing", "Exponential|Moving")), ("axes-props", ("Alignment", "Epoch|Step|Relative")))]),
    Look("6", "ranks as contexts of a metric", lambda d: explorer(d, "metrics", "Metrics", "rank=0", "rank=1", "rank=2", "rank=3").says("rank=2", "rank")),
    Look("7", "grouped by config: mean and band", lambda d: d.go(aim_url("metrics", "metrics", "train/loss", color=["run.params.hparams.lr"], chart=["name"]), LINE).click("css=.icon-aggregation").says("Aggregat|Deaggregat", "hparams.lr")),
    Look("8", "the table: last, lowest, highest", lambda d: d.go("runs", "css=input[type=checkbox]").click("css=button:has-text('Last Value')").says("Min Value", "Max Value", "step of")),
    Look("9", "two runs chosen", lambda d: d.go("runs", "css=input[type=checkbox]").click("css=input[type=checkbox]", 3).click("css=input[type=checkbox]", 4).says("Delete", "Archive", "Tag", "Move")),
    Look("13", "the columns that differ", lambda d: d.go("runs", "css=input[type=checkbox]").click("css=button:has-text('Show Table Diff')").pause(2000).says("hparams", "packages")),
    Look("11 12", "parallel coordinates", lambda d: explorer(d, "params", "Run Params", "hparams.lr", "hparams.seed", "loss").says("hparams.lr", "importance")),
    Look("11", "an axis brushed, and the table below", lambda d: d.drag("css=.ParallelCoordinates svg .overlay, svg g.Axis .overlay, svg .brush .overlay, svg .overlay", (0.5, 0.4), (0.5, 0.7)).runs()),
    Look("16", "texts of two runs", lambda d: explorer(d, "text", "Texts", "samples").says("the quick answer", "the slow answer", "diff")),
    Look("17", "images over steps", lambda d: explorer(d, "images", "Images", "seen").says("step", "a car", "box|mask")),
    Look("18", "figures", lambda d: explorer(d, "figures", "Figures", "plot").js("() => document.querySelectorAll('.js-plotly-plot').length")),
    Look("18", "sound", lambda d: explorer(d, "audios", "Audios", "sound").js("() => document.querySelectorAll('audio, [class*=Audio]').length")),
    Look("13 14 22", "a run's page", lambda d: d.go("runs", "css=input[type=checkbox]").click(SAMPLED[0]).pause(3000).says("CLI Arguments", "Packages", "Git", "diff|patch")),
    Look("19", "its distributions", lambda d: d.click("Distributions").pause(3000).says("weights", "Step 0")),
    Look("20", "its printed lines", lambda d: d.click("Logs").pause(2000).says("printed by", "search|filter")),
    Look("15", "its texts", lambda d: d.click("Texts").pause(3000).says("question|answer", "sort|filter|search")),
    Look("21", "a run that failed: state and log", lambda d: (d.go("runs", "css=input[type=checkbox]").click("failed").pause(3000).says("Finished", "Failed"), d.click("Logs").pause(2000).says(REASON))),
    Look("23", "settings of a run", lambda d: d.click("Settings").says("Archive", "Delete", "Stop")),
    Look("24", "bookmarks, and what the address keeps", lambda d: (d.go(LOSSES, LINE).says("Bookmark", "undo"), d.address())),
    Look("25", "on a phone, by keyboard, for a screen reader", lambda d: d.reach("runs")),
]  # fmt: skip


# Trackio

HOME = f"?project={PROJECT}"
DRAWN = "css=canvas, svg.marks"


def trackio_points(d: Desk) -> list[int]:
    runs = [{"run": SAMPLED[0]}]
    logs = d.post("api/get_logs_batch", {"project": PROJECT, "runs": runs})
    return [len(one.get("logs", one)) for one in (logs["data"] if isinstance(logs, dict) else logs)]


TRACKIO = [
    Look("1 6", "as it opens", lambda d: (d.go(HOME, DRAWN).js("() => document.querySelectorAll('canvas, svg.marks').length"), d.says("rank2"))),
    Look("2", "filter runs", lambda d: d.click("css=input[placeholder*='Type to filter']").keys(" seed1").says("Runs \\(2\\)", "config|metric filter")),
    Look("3", "smoothing, axes", lambda d: d.go(HOME, DRAWN).says("Smoothing", "X-axis", "Log scale")),
    Look("4 5", f"points of a series of {STEPS} that the server hands out", trackio_points),
    Look("5", "a value under the pointer", lambda d: d.hover(DRAWN, 0.3, 0.5, 1).says("step", "min|max")),
    Look("4", "zoomed", lambda d: d.drag(DRAWN, (0.2, 0.2), (0.3, 0.6), 1).says("loss")),
    Look("7", "runs grouped by a config value", lambda d: d.go(HOME, DRAWN).click("css=input[placeholder='Select...']").keys("ArrowDown", "ArrowDown", "ArrowDown", "Enter").pause(2000).says("\\(unset\\)", "mean|average")),
    Look("13", "the comparison of runs", lambda d: d.click("css=label:has-text('Show run comparer')").pause(2000).says("Diff only", "Config", "packages|environment")),
    Look("8 9 10", "the page of runs", lambda d: d.go(f"runs{HOME}").says("Delete selected", "Last step", "tag", "move", "best|min")),
    Look("13 14 20 21 22", "a run that failed", lambda d: d.click("failed").pause(2000).says("Configuration", "Failed", REASON, "printed|console")),
    Look("17 18", "images, video and sound", lambda d: d.go(f"media{HOME}").says("Images", "Videos", "Audio", "box|mask")),
    Look("18", "a figure, as a page", lambda d: d.js("() => { const e = document.querySelector('iframe'); if (e) e.scrollIntoView(); return !!e; }") and d.pause(8000).says("plot")),
    Look("15", "a table, its head clicked twice", lambda d: d.click("css=th:has-text('REWARD')").click("css=th:has-text('REWARD')").says("question 1", "search rows|filter rows")),
    Look("16", "traces of all runs and steps, searched", lambda d: d.go(f"traces{HOME}").says("Search traces", "the quick answer", "the slow answer", "diff")),
    Look("16", "one trace", lambda d: d.click("css=tbody tr").pause(2000).says("question 1", "compare|diff")),
    Look("19", "distributions of two runs", lambda d: d.go(HOME, DRAWN).js("() => { const e = [...document.querySelectorAll('canvas, svg.marks')].pop(); e.scrollIntoView(); return !!e; }")),
    Look("12 20 21 23", "alerts, reports, settings", lambda d: (d.go(f"reports{HOME}").says("Reports", "Alerts", "Stop"), d.go("settings").says("Appearance", "importance"))),
    Look("24", "what the address keeps", lambda d: (d.go(HOME, DRAWN).click("css=label:has-text('Log scale Y-axis')").address(), d.says("undo", "share|copy link"))),
    Look("25", "on a phone, by keyboard, for a screen reader", lambda d: d.reach(HOME)),
]  # fmt: skip

LOOKS = {"TensorBoard": TENSORBOARD, "MLflow": MLFLOW, "Aim": AIM, "Trackio": TRACKIO}


def written(board: Board, data: Path) -> Path:
    """Return the folder of a board's data; what an earlier run wrote is taken as it is."""
    folder = data / f"tasks-{board.name.lower()}"
    mark = folder.with_suffix(".done")
    if not mark.exists():
        folder.mkdir(parents=True)
        with folder.with_suffix(".log").open("w") as log:
            command = [sys.executable, str(HERE / "tasks_data.py"), board.name, str(folder)]
            subprocess.run(command, check=True, cwd=folder, env={**os.environ, **board.env(folder)}, stdout=log, stderr=log)
        mark.touch()
    return folder


def looked(desk: Desk, look: Look, pictures: Path | None, number: int) -> str:
    try:
        seen = look.how(desk)
    except (Error, OSError, LookupError, TypeError, ValueError) as error:  # said: a later look may still work
        seen = f"NOT SEEN, {str(error).splitlines()[0]}"
    if pictures:
        with contextlib.suppress(Error):
            desk.page.screenshot(path=pictures / f"{number:02d}-rows-{look.rows.replace(' ', '-')}.png", timeout=60_000)
    desk.page.set_viewport_size(DESKTOP)
    return f"  {look.rows:>14}  {look.what}: {seen}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="where written data is kept between runs")
    parser.add_argument("--only", default=",".join(LOOKS), help="which boards")
    parser.add_argument("--pictures", type=Path, help="a folder for a screenshot of each look")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fanfold-tasks-") as scratch:
        data = (args.data or Path(scratch)).resolve()
        for name in args.only.split(","):
            folder = written(BOARDS[name], data)
            pictures = args.pictures and args.pictures / name.lower()
            if pictures:
                pictures.mkdir(parents=True, exist_ok=True)
            with served(BOARDS[name], folder) as base, window(viewport=DESKTOP, bypass_csp=True) as context:
                print(name if base else f"{name}: its server did not answer", flush=True)
                context.set_default_timeout(8_000)
                desk = Desk(context.new_page(), base)
                for number, look in enumerate(LOOKS[name] if base else [], 1):
                    print(looked(desk, look, pictures, number), flush=True)


if __name__ == "__main__":
    main()
