"""What the other open dashboards offer for the 25 tasks of docs/tasks.md, as far as a program can see it: python benchmarks/tasks.py [--data FOLDER]

Each is started over the same six runs, its pages are opened in a real browser, and what a task needs is looked for: charts on the first page, a field that
filters, a control with a name, how many points of a series the server hands out. It prints one line for each look. A control that is not found on the pages
opened here may be elsewhere; a control that is found may do less than its name says.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Error

from boards import BOARDS, PROJECT, Size, get, served, written
from browser import window

SIZE = Size(runs=6, metrics=4, steps=3000)
# Everything a page says: texts, and the names of controls that are drawn as signs.
WORDS = """() => { const found = [document.body.innerText];
  for (const e of document.querySelectorAll('[aria-label], [placeholder], [title], [alt]'))
    for (const name of ['aria-label', 'placeholder', 'title', 'alt']) if (e.getAttribute(name)) found.push(e.getAttribute(name));
  return found.join('\\n'); }"""


@dataclass
class Look:
    """One thing that was looked for."""

    task: int
    what: str
    seen: Any


def words(page: Any, url: str, wait: str | None = None) -> str:
    """Open a page and return what it says, once it is quiet or shows what it is waited for."""
    page.goto(url, timeout=120_000)
    try:
        page.wait_for_function(f"() => ({wait})" if wait else "() => document.body.innerText.length > 200", timeout=40_000)
    except Error as error:  # looked at as it is
        print("   ", str(error).splitlines()[0])
    page.wait_for_timeout(2500)
    return str(page.evaluate(WORDS))


def says(text: str, pattern: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE) is not None


def tensorboard(page: Any, base: str) -> list[Look]:
    text = words(page, base, "document.querySelectorAll('scalar-card').length >= 3")
    asked = urllib.parse.urlencode({"run": "run000", "tag": SIZE.names[0]})
    points = len(json.loads(get(f"{base}data/plugin/scalars/scalars?{asked}")))
    plugins = json.loads(get(f"{base}data/plugins_listing"))
    active = sorted(name for name, one in plugins.items() if one.get("enabled"))
    found = [
        Look(1, "charts on the first page", page.locator("scalar-card").count()),
        Look(2, "a field that filters runs by name", says(text, "Filter runs")),
        Look(3, "smoothing, and the axes step, relative and wall", [says(text, one) for one in ("Smoothing", "Horizontal Axis|Step", "Relative|Wall")]),
        Look(4, f"points of a series of {SIZE.steps} that the server hands out", points),
        Look(5, "outliers are left out of the axis", says(text, "outliers")),
        Look(7, "a control that groups runs", says(text, r"group (runs )?by")),
        Look(20, "a page of console output", says(text, "console|stdout")),
        Look(24, "pinned cards", says(text, "Pinned")),
        Look(0, "pages over this data", active),
    ]  # fmt: skip
    page.locator("input[placeholder*='Filter runs']").first.fill("run003")
    page.wait_for_timeout(1500)
    found.append(
        Look(
            2,
            "runs named in the list when the filter says run003",
            sorted(set(re.findall(r"run00\d", page.locator("runs-data-table, runs-table, runs-selector").first.inner_text()))),
        )
    )
    return found


def mlflow(page: Any, base: str) -> list[Look]:
    board: Any = BOARDS["MLflow"]
    first = words(page, base)
    charts = words(page, board.url(base, SIZE), "document.querySelectorAll('.js-plotly-plot').length >= 3")
    drawn = page.locator(".js-plotly-plot").count()
    table = words(page, f"{base}#/experiments/{board.experiment}/runs")
    runs = json.loads(_post(f"{base}api/2.0/mlflow/runs/search", {"experiment_ids": [board.experiment], "max_results": 10}))[
        "runs"
    ]
    one = runs[0]["info"]["run_id"]
    asked = urllib.parse.urlencode({"run_ids": one, "metric_key": SIZE.names[0], "max_results": 320})
    points = len(json.loads(get(f"{base}ajax-api/2.0/mlflow/metrics/get-history-bulk-interval?{asked}")).get("metrics", []))
    kept = json.loads(_post(f"{base}api/2.0/mlflow/runs/search", {"experiment_ids": [board.experiment], "max_results": 10, "filter": "params.lr = '0.0001'"}))  # fmt: skip
    run = words(page, f"{base}#/experiments/{board.experiment}/runs/{one}")
    return [
        Look(1, "charts on the first page", 0 if not page.locator(".js-plotly-plot").count() and not says(first, SIZE.names[0]) else drawn),
        Look(1, "charts on the chart view", drawn),
        Look(2, "runs left by params.lr = '0.0001'", len(kept.get("runs", []))),
        Look(3, "smoothness of lines", says(charts, "smooth")),
        Look(4, f"points of a series of {SIZE.steps} that a chart asks for", points),
        Look(7, "a control that groups runs", says(charts + table, "Group by")),
        Look(9, "delete, and tags, over chosen runs", [says(table, "Delete"), says(table, "tag")]),
        Look(13, "a control that compares", says(table, "Compare")),
        Look(20, "console output on the page of a run", says(run, "console|stdout")),
        Look(17, "artifacts on the page of a run", says(run, "Artifacts")),
    ]  # fmt: skip


def aim(page: Any, base: str) -> list[Look]:
    empty = words(page, f"{base}metrics")
    lines = page.locator("path.Line").count()
    board: Any = BOARDS["Aim"]
    chosen = words(page, board.url(base, SIZE), f"document.querySelectorAll('path.Line').length >= {SIZE.runs}")
    runs = words(page, f"{base}runs")
    return [
        Look(1, "lines on the page of metrics as it opens", lines),
        Look(1, "what it says then", next((line for line in empty.splitlines() if says(line, "select|search")), "")),
        Look(2, "a field for a query over runs", says(empty + runs, "run\\.|query|search")),
        Look(3, "smoothing and axes", [says(chosen, one) for one in ("Smooth|curve", "Axes|axis")]),
        Look(4, "a setting for how many points are drawn", says(chosen, "density")),
        Look(5, "outliers are left out of the axis", says(chosen, "outlier")),
        Look(7, "groups by colour, stroke and facet, and their aggregation", [says(chosen, one) for one in ("Color", "Stroke", "Facet|Chart", "Aggregat")]),
        Look(9, "archive and delete", [says(runs, "Archive"), says(runs, "Delete")]),
        Look(11, "a page of parallel coordinates", says(chosen + empty, "Params")),
        Look(24, "bookmarks", says(chosen, "Bookmark")),
    ]  # fmt: skip


def trackio(page: Any, base: str) -> list[Look]:
    text = words(page, f"{base}?project={PROJECT}", "document.querySelectorAll('canvas, svg.marks').length >= 3")
    drawn = page.locator("canvas, svg.marks").count()
    return [
        Look(1, "charts on the first page", drawn),
        Look(2, "a field that filters runs", says(text, "filter|search")),
        Look(3, "smoothing, x axis, log scale", [says(text, one) for one in ("Smooth", "x-axis|X axis", "log")]),
        Look(7, "a control that groups runs", says(text, "group")),
        Look(20, "a page of console output", says(text, "console|stdout|logs")),
        Look(0, "pages", [one for one in ("Metrics", "System", "Media", "Tables", "Runs", "Run Details", "Files", "Reports", "Traces", "Alerts") if says(text, rf"\b{one}\b")]),
    ]  # fmt: skip


def _post(url: str, body: dict[str, Any]) -> bytes:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return bytes(answer.read())


LOOKS: dict[str, Callable[[Any, str], list[Look]]] = {
    "TensorBoard": tensorboard,
    "MLflow": mlflow,
    "Aim": aim,
    "Trackio": trackio,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="where written data is kept between runs")
    parser.add_argument("--only", default=",".join(LOOKS), help="which boards")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fanfold-tasks-") as scratch:
        for name in args.only.split(","):
            data = (args.data or Path(scratch)).resolve()
            data.mkdir(parents=True, exist_ok=True)
            folder, _ = written(BOARDS[name], data, SIZE)
            with served(BOARDS[name], folder, SIZE) as base, window() as context:
                print(name if base else f"{name}: its server did not answer")
                for look in LOOKS[name](context.new_page(), base) if base else []:
                    print(f"  {look.task or '':>2} {look.what}: {look.seen}")


if __name__ == "__main__":
    main()
