"""The dashboard's controls, used like a user would: axes, groups, zoom, saved views, the table, and charts of interrupted runs.

The runs are generated, so the expected numbers are exact; lines are checked by their pixels.
"""

from __future__ import annotations

import base64
import csv
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

import fanfold
from browser import expect, inked, needs_browser, open_page, painted, start
from store_data import START, Call, write_run

SECOND = 1_000_000_000
LEFT, RIGHT = 48, 10  # the margins of a chart outside its plot area
RUNS = [("a", 2, 0.1, 1.0), ("b", 2, 0.01, 3.0), ("c", 4, 0.1, 5.0), ("d", 4, 0.01, 9.0)]  # name, depth, lr, loss
KILLED = """import fanfold, os, sys
first, last, dies = map(int, sys.argv[1:])
run = fanfold.init('torn', id='again', name='again', resume='allow', system=False, quiet=True)
for step in range(first, last):
    run.log({'loss': 1.0 + step / 100}, step=step)
os.kill(os.getpid(), 9) if dies else run.finish()
"""
FILM = """() => new Promise((done) => {
  const canvas = document.createElement('canvas'), chunks = [];
  canvas.width = canvas.height = 64;
  const film = new MediaRecorder(canvas.captureStream(25), { mimeType: 'video/webm' });
  let n = 0;
  const paint = () => { const g = canvas.getContext('2d'); g.fillStyle = n++ % 2 ? 'red' : 'blue'; g.fillRect(0, 0, 64, 64); };
  film.ondataavailable = (e) => chunks.push(e.data);
  film.onstop = async () => { const all = new Uint8Array(await new Blob(chunks).arrayBuffer()); done(btoa(String.fromCharCode(...all))); };
  const ticks = setInterval(() => { paint(); if (n > 20) { clearInterval(ticks); film.stop(); } }, 40);
  paint();
  film.start();
})"""


DOTTED = """(canvas, places) => { const g = canvas.getContext('2d'), k = canvas.width / canvas.clientWidth;
  return places.every(([x, y]) => g.getImageData(Math.round(x * k), Math.round(y * k), 1, 1).data[3] === 255); }"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, browser):
    """One project per kind of control."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FANFOLD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        since = [time.time_ns() - START, *[SECOND] * 999]  # one call per second, starting now
        long = [Call(0, 0, step, wait, {"loss": step / 100, "seen": 32.0 * step}) for step, wait in enumerate(since, 1)]
        write_run(folder, long, project="axes", id="long")
        for project in ("sweep", "edit"):
            sweep(folder, project)
        torn(folder)
        films(folder, browser)
        yield folder


def sweep(folder: Path, project: str) -> None:
    for name, depth, lr, loss in RUNS:
        run = start(folder, project=project, name=name, config={"depth": depth, "lr": lr, "optimizer": "adam"}, tags=["first"])
        for step in range(0, 100, 10):
            run.log({"loss": loss, "accuracy": 1 / loss}, step=step)
        run.finish()


def torn(folder: Path) -> None:
    """A gap in few points, a gap in many, and a run that was killed at step 60 and resumed from step 50."""
    for name, steps in (("few", [*range(30), *range(70, 100)]), ("many", [*range(3000), *range(7000, 10000)])):
        write_run(folder, [Call(0, 0, step, SECOND, {"loss": 1.0 + step / 1000}) for step in steps], project="torn", id=name)
    env = {**os.environ, "FANFOLD_DIR": str(folder)}
    for life, code in (("0 60 1", -signal.SIGKILL), ("50 100 0", 0)):
        done = subprocess.run([sys.executable, "-c", KILLED, *life.split()], env=env, timeout=120)
        assert done.returncode == code


def films(folder: Path, browser) -> None:
    page = browser.new_page()
    encoded = base64.b64decode(page.evaluate(FILM))
    page.close()
    for name, film in (("encoded", fanfold.Video(encoded)), ("frames", fanfold.Video(np.zeros((3, 16, 16, 3), np.uint8), fps=4))):
        run = fanfold.init("film", dir=folder, name=name, quiet=True, system=name == "encoded")
        run.log({"film": film, "loss": 1.0}, step=0)
        run.finish()


CHROMA = """(figure, [from, to]) => { const canvas = figure.querySelector('canvas'), h = canvas.height - 20, found = [];
  const { data } = canvas.getContext('2d').getImageData(from, 0, to - from, h);
  for (let x = 0; x < to - from; x++) { const rows = []; for (let y = 8; y < h; y++) { const i = 4 * (y * (to - from) + x), rgb = [...data.slice(i, i + 3)];
    if (Math.max(...rgb) - Math.min(...rgb) > 10) rows.push(y); } found.push(rows); }
  return found; }"""


def pixel(figure, part: float) -> int:
    """Return the pixel column of a fraction of the x axis."""
    return round(LEFT + part * (figure.locator("canvas").first.bounding_box()["width"] - LEFT - RIGHT))


def coloured(figure, start: float, end: float) -> list[list[int]]:
    """Return the colored rows (lines and bands, not the grid) of each pixel column in a part of a chart."""
    return figure.evaluate(CHROMA, [pixel(figure, start), pixel(figure, end)])


def filled(columns: list[list[int]]) -> float:
    """Return the share of columns with color."""
    return sum(map(bool, columns)) / len(columns)


def spot(figure, part: float, height: int = 100) -> tuple[float, float]:
    """Return the screen position of a fraction of the x axis."""
    box = figure.locator(".plot").bounding_box()
    return box["x"] + pixel(figure, part), box["y"] + height


def tells(page, figure, part: float, pattern: str) -> None:
    """Expect the tooltip at a fraction of the x axis to show this x."""
    page.mouse.move(*spot(figure, part))
    expect(figure.locator(".tip thead")).to_have_text(re.compile(rf"^\s*(step |seen |after )?{pattern}\s*$"))


def drag(page, figure, begin: float, end: float) -> None:
    page.mouse.move(*spot(figure, begin))
    page.mouse.down()
    page.mouse.move(*spot(figure, end), steps=4)
    page.mouse.up()


def numbers(page, figure, key: str) -> list[list[str]]:
    """Save the chart as CSV, and read it."""
    figure.hover()
    figure.get_by_role("button", name=f"Save {key}").click()
    with page.expect_download() as download:
        figure.get_by_role("button", name="CSV", exact=True).click()
    return list(csv.reader(Path(download.value.path()).read_text().splitlines()))


def zoomed(page, first: float, last: float, **near: float) -> None:
    """Wait for this range in the URL; during a drag it passes through others."""
    wanted, found = pytest.approx((first, last), **near), None
    for _ in range(50):
        found = parse_qs(urlsplit(page.url).fragment).get("zoom", ["nan..nan"])[0]
        if tuple(map(float, found.split(".."))) == wanted:
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"the range is {found}, not {first}..{last}")


def press_log_x(page, figure) -> None:
    """Press the button, and wait until the chart is redrawn."""
    before = figure.get_attribute("data-painted")
    page.get_by_role("button", name="log x").click()
    expect(page.get_by_role("button", name="log x")).to_have_attribute("aria-pressed", "true")
    expect(figure).not_to_have_attribute("data-painted", before)


# Axes and zoom


@needs_browser
def test_the_horizontal_axis_is_step_time_time_since_start_or_a_key(context, address):
    page = open_page(context, address, "p=axes")
    figure = painted(page, "loss")
    axis = page.get_by_label("Horizontal axis")
    axis.hover()
    assert axis.locator("option").all_inner_texts() == ["default", "step", "time since start", "time of day", "loss", "seen"]
    for name, told, first, last in (
        ("seen", r"1[56],\d{3}", 32, 32_000),
        ("relative", r"8 min \d+ s", 0, 1000),
        ("time", r".*\d:\d\d.*", time.time(), time.time() + 1000),
        ("step", r"(49|50)\d", 1, 1000),
    ):
        axis.select_option(name)
        tells(page, figure, 0.5, told)
        head, *rows = numbers(page, figure, "loss")
        assert head[:5] == ["run", name, "loss", "lowest", "highest"]
        at = [float(row[1]) for row in rows]
        assert at == sorted(at)
        assert (at[0], at[-1]) == pytest.approx((first, last), abs=300 if name == "time" else 6 if name != "seen" else 200)
        assert (float(rows[0][3]), float(rows[-1][4])) == pytest.approx((0.01, 10))  # every point of the run, in either layout
    axis.select_option("auto")
    expect(page).not_to_have_url(re.compile("x="))


@needs_browser
def test_a_pointer_at_rest_tells_what_the_axis_under_it_became(context, address):
    page = open_page(context, address, "p=axes")
    figure = painted(page, "loss")
    axis = page.get_by_label("Horizontal axis")
    axis.hover()  # renders all of its options
    tells(page, figure, 0.5, r"(49|50)\d")
    for name, told in (("seen", r"1[56],\d{3}"), ("relative", r"8 min \d+ s"), ("step", r"(49|50)\d")):
        axis.select_option(name)  # does not move the pointer
        expect(figure.locator(".tip thead")).to_have_text(re.compile(rf"^\s*(step |seen |after )?{told}\s*$"))


@needs_browser
def test_a_logarithmic_horizontal_axis_spreads_the_beginning(context, address):
    page = open_page(context, address, "p=axes")
    figure = painted(page, "loss")
    inked(page, figure, 0.005)
    tells(page, figure, 0.5, r"(49|50)\d")
    straight = coloured(figure, 0.05, 0.95)
    press_log_x(page, figure)
    tells(page, figure, 0.5, r"(2|3)\d")  # the square root of a thousand
    curved = coloured(figure, 0.05, 0.95)
    middle = len(curved) // 2
    assert min(curved[middle]) > min(straight[middle]) + 30  # the log axis bends the straight line downwards
    expect(page).to_have_url(re.compile("logx=1"))
    drag(page, figure, 0.5, 0.75)  # the same distance on screen, a sixth of the points
    zoomed(page, 31.6, 177.8, rel=0.05)


@needs_browser
def test_shift_and_drag_pans_and_a_double_click_zooms_out(context, address):
    page = open_page(context, address, "p=axes")
    figure = painted(page, "loss")
    inked(page, figure, 0.005)
    drag(page, figure, 0.4, 0.6)
    zoomed(page, 400, 600, abs=8)
    expect(figure).to_have_attribute("aria-label", re.compile(r"run, \d{3} points$"))
    page.keyboard.down("Shift")
    drag(page, figure, 0.75, 0.25)
    page.keyboard.up("Shift")
    zoomed(page, 500, 700, abs=12)
    tells(page, figure, 0.5, r"(59|60)\d")
    at = [float(row[1]) for row in numbers(page, figure, "loss")[1:]]
    assert (at[0], at[-1]) == pytest.approx((500, 700), abs=14)  # the new range was fetched
    expect(page.locator("figure[data-key='seen']")).to_have_attribute("aria-label", re.compile(r"run, \d{3} points$"))
    page.mouse.dblclick(*spot(figure, 0.5))
    expect(figure).to_have_attribute("aria-label", re.compile(" 1,000 points"))
    tells(page, figure, 0.5, r"(49|50)\d")
    expect(page).not_to_have_url(re.compile("zoom="))


@needs_browser
def test_panning_a_logarithmic_axis_keeps_the_line_under_the_pointer(context, address):
    page = open_page(context, address, "p=axes&logx=1&zoom=10..1000")
    figure = painted(page, "loss")
    inked(page, figure, 0.005)
    page.keyboard.down("Shift")
    drag(page, figure, 0.2, 0.7)  # drag right by half the axis: back by one decade
    page.keyboard.up("Shift")
    zoomed(page, 1, 100, rel=0.2)
    inked(page, figure, 0.005)


@needs_browser
def test_a_zoom_that_reaches_zero_is_drawn_on_a_logarithmic_axis(context, address):
    page = open_page(context, address, "p=sweep&zoom=0..50")
    figure = painted(page, "loss")
    inked(page, figure, 0.005)
    press_log_x(page, figure)
    assert filled(coloured(figure, 0.5, 0.98)) == 1  # a log axis cannot show zero, but the later points
    tells(page, figure, 0.98, "50")


# Groups


@needs_browser
def test_colour_and_dash_make_groups_one_line_with_a_band_or_each_run_a_line(context, address):
    page = open_page(context, address, "p=sweep")
    figure = painted(page, "loss")
    inked(page, figure, 0.005)
    plain = sum(map(len, coloured(figure, 0.1, 0.9)))
    page.locator("summary", has_text="group").click()
    page.get_by_label("Color by").select_option("config:depth")
    expect(figure).to_have_attribute("aria-label", "loss: 2 groups, 40 points")
    expect(page.get_by_role("group", name="Legend")).to_have_text(re.compile(r"depth\s*2\s*4"))
    rows = numbers(page, figure, "loss")[1:]
    assert {(row[0], *row[2:]) for row in rows} == {("depth=2", "2", "1", "3"), ("depth=4", "7", "5", "9")}
    assert sum(map(len, coloured(figure, 0.1, 0.9))) > 3 * plain  # the bands
    page.mouse.move(*spot(figure, 0.5, 60))
    expect(figure.locator(".tip .who")).to_have_text(["depth=4", "depth=2"])
    expect(figure.locator(".tip .rank")).to_have_text(re.compile("low 5 c · high 9 d"))
    page.locator("summary", has_text="group").click()
    page.get_by_label("Dash by").select_option("config:lr")
    expect(figure).to_have_attribute("aria-label", "loss: 4 groups, 40 points")  # one run per group: no band
    expect(page.get_by_role("group", name="Legend")).to_have_text(re.compile(r"depth\s*2\s*4\s*lr\s*0\.01\s*0\.1"))
    page.get_by_label("Color by").select_option("")
    expect(figure).to_have_attribute("aria-label", "loss: 2 groups, 40 points")
    page.get_by_label("Show individual runs").check()
    expect(figure).to_have_attribute("aria-label", "loss: 4 runs, 40 points")
    assert {row[0] for row in numbers(page, figure, "loss")[1:]} == {"a", "b", "c", "d"}
    expect(page).to_have_url(re.compile("dash=config:lr&each=1"))


@needs_browser
def test_dash_by_draws_one_value_whole_and_the_other_dashed(context, address):
    shares = {}
    for name in ("a", "b"):
        page = open_page(context, address, f"p=sweep&f=name={name}&dash=config:lr&each=1")
        figure = painted(page, "accuracy")
        inked(page, figure, 0.001)
        shares[name] = filled(coloured(figure, 0.02, 0.98))
    assert shares["b"] == 1  # lr 0.01 comes first
    assert 0.55 < shares["a"] < 0.98


# Saved views


@needs_browser
def test_a_saved_view_brings_back_everything_it_was_saved_with(context, address):
    page = open_page(context, address, "p=edit&f=depth=4&log=1&colour=config:lr&each=1&zoom=20..60")
    painted(page, "loss")
    page.locator("summary", has_text="views").click()
    page.get_by_label("View name").fill("deep ones")
    page.get_by_role("button", name="save", exact=True).click()
    expect(page.get_by_role("button", name="deep ones", exact=True)).to_be_visible()
    page = open_page(context, address, "p=edit&v=table&s=0.5")
    expect(page.get_by_text("4 runs")).to_be_visible()
    page.locator("summary", has_text="views").click()
    page.get_by_role("button", name="deep ones", exact=True).click(timeout=5000)
    figure = painted(page, "loss")
    expect(page.get_by_text("2 of 4 runs")).to_be_visible()
    expect(page.get_by_role("link", name="Charts")).to_have_attribute("aria-current", "page")
    expect(page.get_by_role("button", name="log y")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_label("Smoothing")).to_have_value("0")
    expect(figure).to_have_attribute("aria-label", "loss: 2 runs, 10 points")
    zoomed(page, 20, 60)
    page.go_back()
    expect(page.get_by_role("grid")).to_be_visible()
    page.locator("summary", has_text="views").click()
    page.get_by_role("button", name="Delete the view deep ones").click()
    expect(page.get_by_text("No saved views in this project.")).to_be_visible()


# Sweeps


@needs_browser
def test_scatter_and_parallel_coordinates_show_every_run_where_its_figures_are(context, address):
    page = open_page(context, address, "p=sweep&v=sweep")
    page.get_by_label("Scatter x").select_option("config:lr")
    page.get_by_label("Scatter y").select_option("metric:loss")
    scatter = page.get_by_role("img", name="loss over lr, 4 runs")
    scatter.scroll_into_view_if_needed()
    box = scatter.bounding_box()
    found = {}
    for x in range(60, int(box["width"]), 14):  # scan for the names of dots under the pointer
        for y in range(10, int(box["height"]), 14):
            page.mouse.move(box["x"] + x, box["y"] + y)
            for name in scatter.locator("text.name").all_text_contents():
                at = scatter.locator(".over circle")
                found[name] = (float(at.get_attribute("cx")), float(at.get_attribute("cy")))
    assert sorted(found) == ["a: 0.1, 1", "b: 0.01, 3", "c: 0.1, 5", "d: 0.01, 9"]
    a, b, c, d = (found[name] for name in sorted(found))
    assert a[0] == c[0] > b[0] == d[0]
    assert d[1] < c[1] < b[1] < a[1]
    page.mouse.move(box["x"] + c[0], box["y"] + c[1])
    expect(scatter.locator("text.name")).to_have_text("c: 0.1, 5")
    expect(page.locator("aside li.on")).to_contain_text("c")
    assert scatter.locator("canvas").evaluate(DOTTED, [[x, y] for x, y in (a, b, c, d)])  # all four dots are drawn
    page.get_by_label("Scatter x").select_option("config:depth")
    expect(page.get_by_role("img", name="loss over depth, 4 runs")).to_be_visible()

    expect(page.get_by_role("img", name="4 runs over depth, lr, loss")).to_be_visible()
    page.get_by_label("Show b", exact=True).uncheck()
    expect(page.get_by_role("img", name="3 runs over depth, lr, loss")).to_be_visible()


# Media, and the page of a run


@needs_browser
def test_a_film_plays(context, address):
    page = open_page(context, address, "p=film&v=media&key=film&f=name=encoded")
    film = page.locator("video")
    expect(film).to_have_count(1)
    assert page.request.get(film.evaluate("film => film.src")).headers["content-type"] == "video/webm"
    film.evaluate("async film => { film.muted = true; await film.play(); }")
    page.wait_for_function("() => document.querySelector('video').currentTime > 0.1")
    assert film.evaluate("film => [film.videoWidth, film.videoHeight, film.error]") == [64, 64, None]


@needs_browser
def test_frames_that_were_logged_as_an_array_are_seen_to_move(context, address):
    page = open_page(context, address, "p=film&v=media&key=film&f=name=frames")
    expect(page.locator("figure video, figure img")).to_have_count(1)
    page.wait_for_function(
        "() => [...document.querySelectorAll('figure video, figure img')].every(one => (one.videoWidth ?? one.naturalWidth) === 16)",
        timeout=5000,
    )


@needs_browser
def test_the_page_of_a_run_has_its_system_figures_folded_away(context, address):
    page = open_page(context, address, "p=film&v=run&f=name=encoded")
    expect(page.get_by_role("heading", name="encoded")).to_be_visible()
    system = page.get_by_role("button", name=re.compile(r"system \d+"))
    expect(system).to_have_attribute("aria-expanded", "false")
    expect(page.locator("figure[data-key^='system/']")).to_have_count(0)
    system.click()
    expect(system).to_have_attribute("aria-expanded", "true")
    expect(page.locator("figure[data-key^='system/']")).to_have_count(int(system.inner_text().split()[-1]))
    figure = painted(page, "system/memory")
    figure.scroll_into_view_if_needed()
    inked(page, figure, 0.0005)
    expect(figure).to_have_attribute("aria-label", re.compile(r"^system/memory · %: 1 run, \d+ points?$"))
    expect(page).to_have_url(re.compile("fold=run-system"))
    page.reload()
    expect(page.locator("figure[data-key='system/memory']")).to_be_visible()  # expanded sections are in the URL
    system.click()
    expect(page.locator("figure[data-key^='system/']")).to_have_count(0)


# The table


@needs_browser
def test_table_columns_are_chosen_cut_to_what_differs_and_rows_are_grouped(context, address):
    page = open_page(context, address, "p=sweep&v=table")
    page.set_viewport_size({"width": 2000, "height": 900})  # room for every column
    grid = page.get_by_role("grid")
    heads = grid.get_by_role("columnheader")
    usual = ["run", "status", "created", "duration", "tags", "depth", "lr", "optimizer", "loss", "accuracy"]
    expect(heads).to_have_count(len(usual))
    assert sorted(one.strip() for one in heads.all_inner_texts()) == sorted(usual)
    page.get_by_label("Show differences only").check()
    expect(heads.filter(has_text="optimizer")).to_have_count(0)
    expect(heads.filter(has_text="status")).to_have_count(0)
    for name in ("depth", "lr", "loss", "accuracy"):
        expect(heads.filter(has_text=name)).to_have_count(1)
    page.get_by_label("Show differences only").uncheck()
    page.locator("summary", has_text="columns").click()
    page.get_by_role("button", name="None", exact=True).click()
    page.get_by_label("Search columns").fill("config:")
    expect(page.locator("details li")).to_have_text(["depth", "lr", "optimizer"])
    page.get_by_role("button", name="All", exact=True).click()
    expect(heads).to_have_text(["run", "status", "depth", "lr", "optimizer"])
    page.locator("details li").get_by_label("optimizer").uncheck()
    expect(heads).to_have_text(["run", "status", "depth", "lr"])
    page.get_by_label("Search columns").fill("loss")
    page.locator("details li").get_by_label("loss", exact=True).check()
    expect(heads).to_have_text(["run", "status", "depth", "lr", "loss"])
    expect(page).to_have_url(re.compile("cols=status,config[^,]+depth,config[^,]+lr,metric[^,]+loss"))
    page.locator("summary", has_text="columns").click()
    page.locator("summary", has_text="group").click()
    page.get_by_role("checkbox", name="depth", exact=True).check()
    page.keyboard.press("Escape")
    first = grid.get_by_role("rowheader")
    expect(first).to_have_text([re.compile(one) for one in (r"depth = 2 2", "[ab]", "[ab]", r"depth = 4 2", "[cd]", "[cd]")])
    heads.filter(has_text="loss").get_by_role("button", name="loss", exact=True).click()
    expect(first).to_have_text([re.compile(one) for one in (r"depth = 2 2", "a", "b", r"depth = 4 2", "c", "d")])
    expect(page).to_have_url(re.compile("o=metric.*group=config"))
    page.reload()
    expect(heads).to_have_text([re.compile(one) for one in ("run", "status", "depth", "lr", "loss")])
    expect(first).to_have_count(6)
    page.locator("summary", has_text="columns").click()
    page.get_by_role("button", name="Default", exact=True).click()
    expect(heads).to_have_count(len(usual))


@pytest.fixture
def answering(browser):
    """A browser context that answers every prompt with a tag."""
    made = browser.new_context(viewport={"width": 1400, "height": 900})
    errors: list[str] = []
    made.on("weberror", lambda error: errors.append(str(error.error)))
    made.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    made.on("dialog", lambda dialog: dialog.accept("kept"))
    yield made
    made.close()
    assert errors == []


@needs_browser
def test_chosen_runs_are_tagged_hidden_archived_and_taken_back_together(answering, address, place):
    page = open_page(answering, address, "p=edit&v=table&cols=tags&o=name")
    grid = page.get_by_role("grid")
    rows = grid.get_by_role("row")
    tags = grid.get_by_role("gridcell")
    expect(tags).to_have_text(["first"] * 4)

    def choose(*names: str) -> None:
        for name in names:
            grid.get_by_label(f"Select {name}", exact=True).check()
        expect(page.get_by_text(f"{len(names)} selected")).to_be_visible()

    choose("b", "d")
    page.locator("summary", has_text="tag").click()
    page.get_by_label("Add a tag").fill("kept")
    page.get_by_role("button", name="add", exact=True).click()
    expect(tags).to_have_text(["first", "first, kept", "first", "first, kept"])
    page.get_by_role("button", name="clear selection").click()
    choose("a", "b")
    page.get_by_role("button", name="hide", exact=True).click()
    for name, shown in zip("abcd", (False, False, True, True), strict=True):
        expect(grid.get_by_label(f"Show {name} in charts")).to_have_attribute("aria-pressed", str(shown).lower())
    page.get_by_role("button", name="archive", exact=True).click()
    expect(rows).to_have_count(3)
    expect(page.get_by_text("2 of 4 runs")).to_be_visible()
    page.get_by_label("Show archived").check()
    expect(rows).to_have_count(5)
    expect(page).to_have_url(re.compile("archived=1"))
    page.reload()
    expect(grid.locator(".tag", has_text="archived")).to_have_count(2)
    choose("a", "b")
    page.get_by_role("button", name="unarchive").click()
    expect(grid.locator(".tag", has_text="archived")).to_have_count(0)
    assert [run.tags for run in sorted(fanfold.runs("edit", dir=place), key=lambda run: run.name)][1] == ["first", "kept"]


# Interrupted runs


@needs_browser
def test_a_hole_in_the_steps_is_dotted_in_few_points_and_in_many(context, address):
    for name, points in (("few", "60 points"), ("many", "6,000 points")):
        page = open_page(context, address, f"p=torn&f=id={name}")
        figure = painted(page, "loss")
        expect(figure).to_have_attribute("aria-label", re.compile(points))
        inked(page, figure, 0.001)
        before, hole, after = (coloured(figure, *part) for part in ((0.02, 0.28), (0.34, 0.66), (0.73, 0.98)))
        assert filled(before) == filled(after) == 1
        assert 0.1 < filled(hole) < 0.6
        heights = [sum(column) / len(column) for column in hole if column]
        assert max(np.diff(heights)) <= 1 and heights[0] > heights[-1] + 20  # a straight line from end to end


@needs_browser
def test_a_run_that_was_killed_and_went_on_has_a_flag_where_it_began_anew(context, address):
    page = open_page(context, address, "p=torn&f=id=again")
    figure = painted(page, "loss")
    expect(figure).to_have_attribute("aria-label", "loss: 1 run, 100 points")  # ten points of the first attempt were repeated
    inked(page, figure, 0.001)
    columns = coloured(figure, 0, 1)
    restart = pixel(figure, 50 / 99) - LEFT
    tall = [place for place, rows in enumerate(columns) if len(rows) > 25]
    assert len(tall) == 1 and abs(tall[0] - restart) <= 1
    assert all(set(columns[tall[0] + right]) & set(range(8, 15)) for right in (1, 2, 3))  # the restart flag
    assert not set(columns[tall[0] - 2]) & set(range(8, 15))
    page.get_by_role("button", name="again", exact=True).click()
    expect(page.get_by_text("2 attempts")).to_be_visible()
    attempts = page.locator("section", has=page.get_by_role("heading", name="Attempts")).locator("tbody tr")
    expect(attempts).to_have_text([re.compile("1.*killed"), re.compile("2.*finished")])


# Access from other machines


def status(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as refusal:
        return refusal.code


@needs_browser
def test_from_elsewhere_the_page_opens_only_by_the_printed_address(context, place):
    command = [sys.executable, "-m", "fanfold", "ui", "--dir", str(place), "--host", "0.0.0.0", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        printed = urlsplit(server.stdout.readline().strip())
        token = parse_qs(printed.query)["token"][0]
        assert printed.scheme == "http" and printed.hostname and len(token) >= 24
        base = f"http://127.0.0.1:{printed.port}/"  # its hostname may not resolve here
        for path in ("", "api/projects", "api/runs?project=sweep", "?token=", "api/projects?token=guess"):
            assert status(base + path) == 401, path
        assert status(base + "api/projects", Authorization="Bearer guess") == 401
        assert status(base + "api/projects", Authorization=f"Bearer {token}") == 200
        page = context.new_page()
        assert page.goto(f"{base}?token={token}#p=sweep").status == 200
        inked(page, painted(page, "loss"), 0.005)
        expect(page.locator(".live", has_text=re.compile("^live$"))).to_be_visible()
        assert page.url == f"{base}#p=sweep"  # the token is not in a URL that people copy
        page.close()
    finally:
        server.terminate()
        server.wait(20)
        server.stdout.close()
