"""The dashboard with large data: ten million points in one run, and fifteen hundred runs with fifteen hundred metrics each."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from answers import LOCAL, series
from browser import expect, inked, needs_browser, open_page, painted, serving
from fanfold.journal import Writer
from fanfold.journal import format as fmt
from fanfold.server import app
from store_data import START

STEPS, KEYS = 1_000_000, 10
RUNS, WIDE = 1_500, 1_500
NODES = 3_000
DOTS = 10_000
DOTTED = """canvas => { const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let ink = 0; for (let i = 3; i < data.length; i += 4) if (data[i]) ink++; return ink / (data.length / 4); }"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder for large runs, deleted right after the test."""
    monkeypatch.setenv("FANFOLD_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "runs"
    shutil.rmtree(tmp_path)


def write(folder: Path, project: str, id: str, rows) -> None:
    header = {"format": [fmt.MAJOR, fmt.MINOR], "rank": 0, "role": "main", "attempt": "a", "run": id, "project": project}
    sheet = Writer(folder / project / id / "journal", header)
    for step, values in enumerate(rows):
        sheet.row(values, "d" * len(values), time_ns=START + step * 1_000_000, step=step)
    sheet.close({"status": "finished", "t": START})


@needs_browser
def test_ten_million_points_are_drawn_with_every_extreme_in_a_small_answer(context, place):
    names = [f"loss{key}" for key in range(KEYS)]
    noise = np.random.default_rng(0).random(997).tolist()
    spikes = {123_457: -7.25, 777_771: 99.5}
    write(place, "llm", "long", (dict.fromkeys(names, spikes.get(step, noise[step % 997])) for step in range(STEPS)))
    with TestClient(app(place), base_url=LOCAL) as http:
        found = series(http, runs=["long"], keys=names)
        assert [(one["total"], float(one["columns"]["lo"].min()), float(one["columns"]["hi"].max())) for one in found] == [
            (STEPS, -7.25, 99.5)
        ] * KEYS
        answer = http.post("/api/series", json={"project": "llm", "runs": ["long"], "keys": names})
        assert len(answer.content) < KEYS * 330 * 4 * 8
        near = series(http, runs=["long"], keys=["loss3"], lo=777_700, hi=777_800)
        assert near[0]["raw"] and near[0]["columns"]["y"].max() == 99.5  # zooming in shows the raw points
    with serving(context, place) as address:
        page = open_page(context, address)
        inked(page, painted(page, "loss0"))
        chart = page.locator("figure[data-key='loss0']")
        assert "of 1,000,000 points, extremes kept" in chart.get_attribute("aria-label")
        chart.hover()
        chart.get_by_label("Show loss0 as a table").click()
        expect(chart.locator("tbody td")).to_have_text(
            [re.compile("."), re.compile("."), "\N{MINUS SIGN}7.25", "99.5", "1,000,000"]
        )


@needs_browser
def test_ten_thousand_runs_are_ten_thousand_dots(context, place):
    for run in range(DOTS):
        write(place, "sweep", f"r{run:05d}", [{"loss": float(run % 100), "size": float(run // 100)}])
    with serving(context, place) as address:
        page = open_page(context, address, "p=sweep&v=sweep&sx=metric:size&sy=metric:loss")
        scatter = page.get_by_role("img", name=f"loss over size, {DOTS} runs")
        scatter.scroll_into_view_if_needed()
        page.wait_for_function(f"canvas => ({DOTTED})(canvas) > 0.3", arg=scatter.locator("canvas").element_handle())
        box = scatter.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        expect(scatter.locator("text.name")).to_have_text(re.compile(r"r\d{5}: \d+, \d+"))


@needs_browser
def test_charts_wait_for_the_newest_runs_only_and_known_runs_are_not_sent_again(context, place):
    for run in range(700):
        write(place, "sweep", f"r{run:05d}", [{"loss": float(run + step)} for step in range(3)])
    with serving(context, place) as address:
        answers: list[Any] = []
        context.on("response", lambda got: answers.append(got) if "api/runs?" in got.url else None)
        page = open_page(context, address, "p=sweep")
        painted(page, "loss")
        expect(page.locator("aside .count")).to_have_text("700 runs", timeout=20_000)
        assert [(len(one.json()["runs"]), one.json()["total"]) for one in answers[:2]] == [(300, 700), (700, 700)]
        assert "count=300" in answers[0].url
        write(place, "sweep", "new", [{"loss": 0.5}])
        expect(page.locator("aside .count")).to_have_text("701 runs", timeout=20_000)
        assert len(answers[-1].json()["runs"]) == 201  # only the block with the new run, not the two others
        assert page.evaluate("document.querySelector('aside li').textContent").strip().startswith("new")
        page.get_by_label("Sort runs").select_option("name")
        expect(page.locator("aside li .name").nth(1)).to_have_text("r00000")
        page.reload()
        expect(page.locator("aside .count")).to_have_text("701 runs", timeout=20_000)
        assert "count=" not in answers[-1].url  # sorted by name, the newest runs are not on top


@needs_browser
def test_many_runs_of_many_metrics_open_as_a_page_of_bounded_size(context, place):
    names = [f"part{key % 30:02d}/m{key:04d}" for key in range(WIDE)]
    for run in range(RUNS):
        write(place, "wide", f"r{run:04d}", [dict.fromkeys(names, float(run + step)) for step in range(2)])
    with serving(context, place) as address:
        page = open_page(context, address, "p=wide")
        inked(page, painted(page, "part00/m0000"), 0.005)
        assert page.evaluate("document.querySelectorAll('*').length") < NODES
        first = page.locator("figure[data-key='part00/m0000']")
        page.locator("figure[data-key='part29/m0029']").scroll_into_view_if_needed()  # created a moment later
        expect(first.locator("canvas")).to_have_count(0)  # far outside the viewport only the frame remains
        first.scroll_into_view_if_needed()
        expect(first.locator("canvas")).to_have_count(2)
        inked(page, first, 0.005)
        page.get_by_label("Search charts").fill("m1499")
        inked(page, painted(page, "part29/m1499"), 0.005)
        page.keyboard.press("Escape")
        page.get_by_role("link", name="Table").click()
        page.get_by_text("r1499").first.wait_for()
        assert page.evaluate("document.querySelectorAll('*').length") < NODES
