"""The dashboard shows what was logged: tooltips, exported files, and regressions that hid or distorted values.

Every value read from the page is compared with the value logged at that step.
"""

# ruff: noqa: F401 - fixtures are imported by their names

from __future__ import annotations

import csv
import io
import json
import os
import re
import urllib.request
import uuid
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

import clickhouse_server as real
import fanfold
from browser import SLOW, expect, inked, needs_browser, open_page, painted, serve, serving, start
from clickhouse_tools import Fleet
from fanfold.journal import Writer
from fanfold.journal import format as fmt
from store_data import START, Call, write_run

SHORT, LONG, RANKS = 500, 3_000_000, 3
LEFT, RIGHT = 48, 10  # the margins of a chart outside its plot area


def short_values() -> np.ndarray:
    return np.random.default_rng(1).normal(size=SHORT)


def long_values() -> np.ndarray:
    return np.random.default_rng(2).normal(size=LONG) + np.linspace(5, 0, LONG)


def rank_values() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(RANKS, 4000))


def write(folder: Path, project: str, values: np.ndarray, *, rank: int = 0, every: int = 1) -> None:
    header = {"format": [fmt.MAJOR, fmt.MINOR], "rank": rank, "role": "main", "attempt": "a", "run": "r", "project": project}
    sheet = Writer(folder / project / "r" / "journal", header)
    for i, value in enumerate(values.tolist()):
        sheet.row({"loss": value}, "d", time_ns=START + i * 1_000_000, step=i * every)
    sheet.close({"status": "finished", "t": START + len(values) * 1_000_000})


@pytest.fixture(scope="module")
def place(tmp_path_factory, browser):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FANFOLD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        write(folder, "short", short_values())
        write(folder, "long", long_values())
        for rank, values in enumerate(rank_values()):
            write(folder, "ranks", values, rank=rank)
        yield folder


@pytest.fixture(scope="module", params=["directory", "clickhouse"])
def address(request, place):
    fleet = None
    if request.param == "clickhouse":
        fleet = Fleet(real.Database([request.getfixturevalue("clickhouse_server")], f"t{uuid.uuid4().hex[:12]}"))
        fleet.ship(place)
    server, address = serve(fleet.url if fleet else place)
    yield address
    server.terminate()
    server.wait(20)
    if fleet:
        fleet.close()


def hovered(page, figure, part: float) -> tuple[int, float, str]:
    """Point at a fraction of the x axis, and return the tooltip's step and value, and its other text."""
    box = figure.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + LEFT + part * (box["width"] - LEFT - RIGHT), box["y"] + 90)
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))")
    head, *rows = figure.locator(".tip tr").all_inner_texts()
    value = figure.locator(".tip tbody .num").inner_text()
    return int(number(head.split()[-1])), number(value), " ".join(rows[1:])


def number(text: str) -> float:
    return float(text.replace(",", "").replace("\N{MINUS SIGN}", "-"))


def exported(page, figure, kind: str) -> bytes:
    figure.hover()
    figure.get_by_role("button", name="Save loss").click()
    with page.expect_download(timeout=4 * SLOW) as download:  # this does not test speed
        figure.get_by_role("button", name=kind, exact=True).click()
    return Path(download.value.path()).read_bytes()


CASES = [
    ("short", short_values, 1, ["", "zoom=100..200", "zoom=40.5..420", "logx=1"]),
    ("long", long_values, 10_000, ["", "zoom=1000000..1400000", "zoom=777700..777950", "logx=1"]),
    ("ranks&ranks=mean", lambda: rank_values().mean(axis=0), 20, ["", "zoom=1000..3000", "zoom=1700..1810"]),
]


@needs_browser
@pytest.mark.parametrize(("project", "made", "pixel", "zooms"), CASES, ids=["short", "long", "ranks"])
def test_the_tooltip_shows_a_point_that_was_logged(context, address, project, made, pixel, zooms):
    values = made()
    for zoom in zooms:
        page = open_page(context, address, f"p={project}&{zoom}")
        figure = painted(page, "loss")
        inked(page, figure, 0.005)
        given = re.search(r"zoom=([\d.]+)\.\.([\d.]+)", zoom)
        lo, hi = map(float, given.groups()) if given else (0.0, len(values) - 1.0)
        for part in np.linspace(0.03, 0.97, 24):
            step, value, more = hovered(page, figure, part)
            assert value == pytest.approx(values[step], rel=1e-4, abs=1e-4), (zoom, step)
            if "logx" not in zoom:
                assert abs(step - (lo + part * (hi - lo))) <= 1.01 + (hi - lo) / 200, (zoom, part)
            for name, at in re.findall(r"(low|high) \S+ @ ([\d,]+)", more):  # if several points share the pixel
                said = number(re.search(rf"{name} (\S+) @", more)[1])
                assert said == pytest.approx(values[int(at.replace(",", ""))], rel=1e-4, abs=1e-4)
        page.close()


@needs_browser
def test_ranks_in_a_pixel_are_named_with_the_range_they_span(context, address):
    page = open_page(context, address, "p=ranks&ranks=mean")
    figure = painted(page, "loss")
    inked(page, figure, 0.005)
    values = rank_values()
    for part in (0.2, 0.5, 0.8):
        _, _, more = hovered(page, figure, part)
        found = re.search(r"([\d,]+) . ([\d,]+): low (\S+) rank (\d) · high (\S+) rank (\d)", more)
        first, last = (int(text.replace(",", "")) for text in found.group(1, 2))
        inside = values[:, first : last + 1]
        assert (number(found[3]), number(found[5])) == pytest.approx((inside.min(), inside.max()), rel=1e-4)
        assert (int(found[4]), int(found[6])) == (inside.min(axis=1).argmin(), inside.max(axis=1).argmax())


@needs_browser
@pytest.mark.parametrize(("project", "made", "pixel", "zooms"), CASES, ids=["short", "long", "ranks"])
def test_exported_files_hold_every_point_as_it_was_logged(context, address, project, made, pixel, zooms):
    values = made()
    for zoom in zooms[:3]:
        if project == "long" and not zoom:
            continue  # 3 million lines; the next zoom has 400,000
        page = open_page(context, address, f"p={project}&{zoom}")
        figure = painted(page, "loss")
        given = re.search(r"zoom=([\d.]+)\.\.([\d.]+)", zoom)
        lo, hi = map(float, given.groups()) if given else (0.0, len(values) - 1.0)
        steps = np.arange(int(np.ceil(lo)), int(hi) + 1)
        rows = list(csv.DictReader(io.StringIO(exported(page, figure, "CSV").decode())))
        assert [int(row["step"]) for row in rows] == steps.tolist()
        assert np.allclose([float(row["loss"]) for row in rows], values[steps], rtol=1e-12, atol=0)
        assert {row["points"] for row in rows} == {"1"}
        table = pyarrow.parquet.read_table(io.BytesIO(exported(page, figure, "Parquet")))
        assert table.schema.metadata[b"thinned"] == b"no"
        assert table["x"].to_pylist() == steps.tolist()
        assert np.allclose(table["value"].to_numpy(), values[steps], rtol=1e-12, atol=0)
        page.close()


@needs_browser
def test_an_export_of_a_log_x_axis_has_the_points_that_the_axis_cannot_show(context, address):
    figure = painted(page := open_page(context, address, "p=short&logx=1"), "loss")
    rows = list(csv.DictReader(io.StringIO(exported(page, figure, "CSV").decode())))
    assert [int(row["step"]) for row in rows] == list(range(SHORT))


@needs_browser
def test_points_close_in_time_have_times_that_differ(context, address):
    page = open_page(context, address, "p=short&x=time")
    figure = painted(page, "loss")
    inked(page, figure, 0.005)
    box, heads = figure.locator(".plot").bounding_box(), set()
    for part in (0.1, 0.5, 0.9):  # of half a second
        page.mouse.move(box["x"] + LEFT + part * (box["width"] - LEFT - RIGHT), box["y"] + 90)
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))")
        heads.add(figure.locator(".tip thead").inner_text())
    assert len(heads) == 3


@needs_browser
def test_an_export_does_not_wait_for_the_chart_to_be_drawn(context, address):
    page = context.new_page()
    held = []
    page.route("**/api/series", lambda route: held.append(route))  # noqa: PLW0108 - playwright wants a function; the points of the chart do not arrive
    page.goto(f"{address}#p=short")
    figure = painted(page, "loss")
    rows = list(csv.DictReader(io.StringIO(exported(page, figure, "CSV").decode())))
    assert held and [float(row["loss"]) for row in rows] == short_values().tolist()
    figure.get_by_role("button", name="Save loss").click()
    figure.get_by_role("button", name="PNG", exact=True).click()
    expect(figure.get_by_role("alert")).to_have_text(re.compile("was not saved as PNG: the chart shows no points yet"))
    for route in held:
        route.continue_()
    inked(page, figure, 0.005)
    figure.get_by_role("button", name="Close").click()
    expect(figure.get_by_role("alert")).to_have_count(0)


@needs_browser
@pytest.mark.parametrize("kind", ["CSV", "Parquet"])
def test_an_export_that_fails_says_so_until_it_is_closed(context, place, kind):
    with serving(context, place) as address:
        page = open_page(context, address, "p=short")
        figure = painted(page, "loss")
        inked(page, figure, 0.005)
        with page.expect_request_finished(lambda one: one.url.endswith("ChartOptions.js")):  # loaded once the pointer is near
            figure.get_by_role("button", name="Save loss").hover()
        context.set_offline(True)
        figure.get_by_role("button", name="Save loss").click()
        figure.get_by_role("button", name=kind, exact=True).click()
        alert = figure.get_by_role("alert")
        expect(alert).to_contain_text(f"loss was not saved as {kind}: ")
        context.set_offline(False)
        figure.get_by_role("button", name="Show loss as a table").click()  # hides the chart, but not the message
        expect(alert).to_be_visible()
        assert exported(page, figure, kind)
        expect(alert).to_have_count(0)
    context.expected.clear()  # the browser reports failed requests


@needs_browser
def test_a_log_x_axis_shows_the_first_points_of_a_long_run(context, address):
    page = open_page(context, address, "p=long&logx=1")
    figure = painted(page, "loss")
    inked(page, figure, 0.005)
    steps = [hovered(page, figure, part)[0] for part in (0.0, 0.05, 0.2, 0.4)]
    assert steps[0] <= 1 and steps[1] <= 4 and steps[2] <= 40 and steps[3] <= 800
