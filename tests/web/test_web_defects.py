"""Regression tests of the dashboard, each as a user would run into the defect."""

# ruff: noqa: F401 - fixtures are imported by their names

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import fanfold
from browser import expect, inked, needs_browser, open_page, painted, serve, serving, start
from store_data import START, Call, write_run

RATES = [0.1, 1e-5, 2.0, 0.002, -1.0, 10.0, 0.03, 3.0, 1e-4, 0.5, 20.0, 0.07]
INK = """canvas => { const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let ink = 0; for (let i = 3; i < data.length; i += 4) if (data[i]) ink++; return ink; }"""
TOPMOST = """tip => { tip.style.pointerEvents = 'auto'; const r = tip.getBoundingClientRect();
  return [[r.left + 4, r.top + 4], [r.right - 4, r.top + 4], [r.left + 4, r.bottom - 4], [r.right - 4, r.bottom - 4]]
    .every(([x, y]) => tip.contains(document.elementFromPoint(x, y))); }"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, browser):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FANFOLD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        for i, rate in enumerate(RATES):
            run = start(folder, project="many", name=f"a-run-with-a-long-name-{i:02d}", id=f"r{i:02d}", config={"lr": rate})
            for step in range(50):
                run.log({"loss": i + step / 50, "acc": 1.0 - i / 20, "up": float(step)}, step=step)
            run.finish()
        run = start(folder, project="signs", name="signs")
        for step in range(50):
            run.log({"below": -1.0 - step, "both": step - 25.0, "above": step + 1.0}, step=step)
        run.finish()
        run = start(folder, project="axes", name="axes")
        run.define_metric("val/*", x="epoch")
        for step in range(100):
            run.log({"epoch": step / 10, "val/acc": step / 100, "loss": 1.0 / (step + 1)}, step=step)
        run.log({"four": [fanfold.Image(np.full((8, 8, 3), 60 * i, np.uint8), caption=f"number {i}") for i in range(4)]}, step=99)
        run.finish()
        for name, error in (("by-hand", KeyboardInterrupt), ("broken", ValueError)):
            with contextlib.suppress(error), start(folder, project="ends", name=name) as run:
                run.log({"loss": 1.0}, step=0)
                raise error
        waits = [time.time_ns() - START, *[4_000_000_000] * 249]  # one call every four seconds, starting now
        write_run(folder, [Call(0, 0, 1_999_990 + i, wait, {"loss": i * 1.0}) for i, wait in enumerate(waits)], project="far")
        yield folder


@pytest.fixture(scope="module")
def address(place):
    server, address = serve(place)
    yield address
    server.terminate()
    server.wait(20)


@pytest.fixture
def stumbling(context):
    """A context that expects the browser to report failed requests."""
    yield context
    assert all(re.search("Failed to load|ERR_|503", error) for error in context.expected), context.expected
    context.expected.clear()


def looks(page, *names: str) -> list[str]:
    rows = [page.locator("aside li", has_text=name).locator(".swatch line") for name in names]
    return [f"{row.get_attribute('stroke')} {row.get_attribute('stroke-dasharray')}" for row in rows]


# Runs and filters


@needs_browser
def test_escape_leaves_the_filter_as_it_is(context, address):
    page = open_page(context, address, "p=many")
    page.get_by_text("12 runs").wait_for()
    page.keyboard.press("/")
    expect(page.get_by_label("Filter runs")).to_be_focused()
    page.keyboard.insert_text("lr>1")  # in one piece: a slow machine would send `lr>`, which is not a valid filter
    expect(page.locator(".count")).to_have_text("4 of 12 runs")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Filter runs")).to_have_value("lr>1")
    expect(page.get_by_label("Filter runs")).not_to_be_focused()
    expect(page.locator(".count")).to_have_text("4 of 12 runs")


@needs_browser
def test_shown_runs_have_colours_of_their_own_and_keep_them(context, address):
    hidden = [f"r{i:02d}" for i in range(12) if i not in (0, 3, 8, 11)]  # 0 and 8, and 3 and 11, are eight apart
    page = open_page(context, address, f"p=many&hide={','.join(hidden)}")
    names = [f"name-{i:02d}" for i in (0, 3, 8, 11)]
    page.locator("aside li", has_text=names[0]).wait_for()
    before = looks(page, *names)
    assert len({look.split()[0] for look in before}) == 4
    page.get_by_label("Show a-run-with-a-long-name-05").check()
    page.get_by_label("Show a-run-with-a-long-name-00").uncheck()
    expect(page.get_by_label("Show a-run-with-a-long-name-00")).not_to_be_checked()
    assert looks(page, *names[1:]) == before[1:]
    page.get_by_label("Show a-run-with-a-long-name-06").check()
    shown = looks(page, *names[1:], "name-05", "name-06")
    assert len({look.split()[0] for look in shown}) == 5


@needs_browser
def test_a_run_that_is_filtered_away_is_not_drawn_any_more(context, address):
    page = open_page(context, address, "p=many")
    figure = painted(page, "loss")
    inked(page, figure, 0.005)
    page.locator("aside li", has_text="name-03").hover()
    top = figure.locator("canvas.top")
    page.wait_for_function(f"canvas => ({INK})(canvas) > 0", arg=top.element_handle())
    page.get_by_label("Filter runs").fill("name=nothing")
    expect(page.get_by_text("No runs match")).to_be_visible()
    page.wait_for_function(f"canvas => ({INK})(canvas) === 0", arg=top.element_handle())


@needs_browser
def test_groups_of_numbers_stand_in_the_order_of_the_numbers(context, address):
    page = open_page(context, address, "p=many&colour=config:lr")
    legend = page.get_by_role("group", name="Legend")
    least, most = (f"{rate:g}".replace("-", "\N{MINUS SIGN}") for rate in (min(RATES), max(RATES)))
    expect(legend).to_have_text(re.compile(rf"lr\s*{least}\s*{most}"))  # too many values for separate colors: a color scale
    page = open_page(context, address, "p=many&v=table&group=config:lr")
    heads = page.locator("[role=row].total [role=rowheader]")
    heads.first.wait_for()
    found = [float(re.search(r"= (\S+)", text)[1]) for text in heads.all_inner_texts()]
    assert found == sorted(RATES)[: len(found)] and len(found) > 5


@needs_browser
def test_a_run_stopped_with_ctrl_c_is_not_counted_as_failed(context, address):
    page = open_page(context, address, "p=ends")
    button = page.get_by_role("button", name="1 failed")
    button.click()
    expect(page.locator("aside li .name")).to_have_text(re.compile("broken"))
    expect(page).to_have_url(re.compile("failed=1"))
    button.click()
    expect(page.locator("aside li .name")).to_have_count(2)


@needs_browser
def test_an_address_that_is_escaped_wrongly_still_opens(context, address):
    page = open_page(context, address, "p=many&hide=%25E0%25A4%25A&pin=%E0%A4%A")
    inked(page, painted(page, "loss"), 0.005)


@needs_browser
def test_runs_that_cannot_be_read_are_counted_and_the_reasons_can_be_opened(context, address):
    def more(route):
        answer = route.fetch()
        lost = [{"path": "/runs/many/torn", "reason": "the journal is of a later version"}]
        route.fulfill(response=answer, json={**answer.json(), "unreadable": lost})

    context.route("**/api/runs?*", more)
    page = open_page(context, address, "p=many")
    page.get_by_text("1 run could not be read").click()
    expect(page.locator(".why")).to_have_text("/runs/many/torn the journal is of a later version")


# Charts


@needs_browser
def test_the_tooltip_of_groups_lies_over_the_charts_beside_it(context, address):
    page = open_page(context, address, "p=many&colour=status")
    figures = [painted(page, key) for key in ("loss", "acc", "up")]
    for figure in figures:
        inked(page, figure, 0.005)
        box = figure.locator(".plot").bounding_box()
        for part in (0.2, 0.5, 0.95):
            page.mouse.move(box["x"] + part * box["width"], box["y"] + 100)
            tip = figure.locator(".tip")
            expect(tip.locator(".rank")).to_contain_text("a-run-with-a-long-name")
            assert tip.evaluate(TOPMOST), part


@needs_browser
def test_a_point_of_another_step_has_its_step_apart_from_its_value(context, tmp_path):
    for name, every in (("often", 5), ("seldom", 9)):
        run = start(tmp_path, project="apart", name=name)
        for step in range(0, 91, every):
            run.log({"loss": 2.5}, step=step)
        run.finish()
    with serving(context, tmp_path) as address:
        figure = painted(open_page(context, address, "p=apart"), "loss")
        inked(figure.page, figure, 0.005)
        box = figure.locator(".plot").bounding_box()
        figure.page.mouse.move(box["x"] + 48 + 0.3 * (box["width"] - 58), box["y"] + 90)
        expect(figure.locator(".tip .num", has_text="@")).to_have_text(re.compile(r"^@ \d+ 2\.5$"))


@needs_browser
def test_a_log_axis_says_what_it_cannot_show(context, address):
    page = open_page(context, address, "p=signs&log=1")
    expect(page.locator("figure[data-key=below]")).to_contain_text("No value is above zero")
    expect(page.locator("figure[data-key=both]")).to_contain_text("values ≤ 0 are not shown on a log axis")
    expect(page.locator("figure[data-key=above]")).not_to_contain_text("log")
    page.locator("figure[data-key=below]").get_by_role("button", name="Linear y axis").click()
    inked(page, painted(page, "below"), 0.005)


@needs_browser
@pytest.mark.parametrize(
    ("fragment", "first"),
    [("zoom=2000000..2000050", r"2(\.\d+)?M"), ("x=relative", r"\d+ min"), ("zoom=1999995..2000003", r"\d")],
)
def test_labels_of_an_axis_differ_and_are_round(context, address, fragment, first):
    page = open_page(context, address, f"p=far&{fragment}")
    figure = painted(page, "loss")
    inked(page, figure, 0.005)
    figure.hover()
    figure.get_by_role("button", name="Save loss").click()
    with page.expect_download() as download:
        figure.get_by_role("button", name="SVG", exact=True).click()
    middle = re.findall(r'text-anchor="middle"[^>]*>([^<]+)<', Path(download.value.path()).read_text())
    assert len(middle) > 2 and len(set(middle)) == len(middle)
    assert all(re.match(first, label) for label in middle) and not any(len(label) > 10 for label in middle), middle


@needs_browser
def test_a_metric_is_drawn_over_the_axis_that_was_defined_for_it(context, address):
    page = open_page(context, address, "p=axes")
    figure = painted(page, "val/acc")
    expect(figure.locator("figcaption")).to_contain_text("over epoch")
    inked(page, figure, 0.005)
    box = figure.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + 48 + 0.5 * (box["width"] - 58), box["y"] + 80)
    head = float(figure.locator(".tip thead").inner_text().split()[-1])
    assert head == pytest.approx(4.95, abs=0.06)
    assert float(figure.locator(".tip .num").inner_text()) == pytest.approx(head / 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 48 + 0.8 * (box["width"] - 58), box["y"] + 80, steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile("zoom=.*zoomx=epoch"))
    expect(figure).to_have_attribute("aria-label", re.compile(r"val/acc: 1 run, (29|3\d) points"))
    expect(painted(page, "loss")).to_have_attribute("aria-label", "loss: 1 run, 100 points")  # its steps are a different axis
    page.get_by_label("Horizontal axis").select_option("step")
    expect(figure.locator("figcaption")).not_to_contain_text("over epoch")


# Other pages


@needs_browser
def test_every_image_of_a_list_is_shown(context, address):
    page = open_page(context, address, "p=axes&v=media")
    expect(page.get_by_role("main").locator("img")).to_have_count(4)
    for i in range(4):
        expect(page.get_by_text(f"number {i}", exact=True)).to_be_visible()
    sources = {one.get_attribute("src") for one in page.get_by_role("main").locator("img").all()}
    assert len(sources) == 4


@needs_browser
def test_what_a_run_has_twice_does_not_blank_its_pages(context, tmp_path):
    run = start(tmp_path, project="twice", name="twice", tags=["same", "same"])
    for step in range(3):
        run.log({"weights": [fanfold.Histogram(np.arange(9.0) * k) for k in (1, 10)]}, step=step)
    run.finish()
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "p=twice&v=media&key=weights&step=1")
        ridges = page.get_by_role("main").get_by_role("img", name=re.compile("distribution over 3 steps"))
        expect(ridges).to_have_count(2)
        paths = [one.locator("path").evaluate_all("paths => paths.map(path => path.getAttribute('d'))") for one in ridges.all()]
        assert [len(one) for one in paths] == [3, 3] and paths[0] != paths[1]
        expect(open_page(context, address, f"p=twice&v=run&r={run.id}").get_by_role("main")).to_contain_text("same")


@needs_browser
def test_the_refusal_to_delete_a_live_run_stays_while_the_run_goes_on(stumbling, tmp_path):
    run = start(tmp_path, project="live", name="now")
    run.log({"loss": 1.0}, step=0)
    with serving(stumbling, tmp_path) as address:
        page = open_page(stumbling, address, f"p=live&v=run&r={run.id}")
        page.get_by_role("button", name="delete").click()
        refusal = page.get_by_role("alert").filter(has_text=re.compile("still|may"))
        expect(refusal).to_be_visible()
        for step in range(1, 4):
            run.log({"loss": 1.0}, step=step)
            expect(page.locator("figure[data-key=loss]")).to_have_attribute("aria-label", f"loss: 1 run, {step + 1} points")
        expect(refusal).to_be_visible()
        refusal.get_by_role("button", name="OK").click()
        expect(refusal).to_have_count(0)
    run.finish()


@needs_browser
@pytest.mark.parametrize("view", ["charts", "run", "alerts", "media", "provenance"])
def test_what_failed_in_an_outage_is_there_when_it_is_over(stumbling, address, view):
    down = threading.Event()
    down.set()

    def answer(route):
        if down.is_set():
            route.fulfill(status=503, json={"error": "the store cannot be read now"})
        else:
            route.continue_()

    stumbling.route(re.compile(r"api/(series|run\?|alerts|media)"), answer)
    page = open_page(stumbling, address, f"p=ends&v={view}" if view == "alerts" else f"p=axes&v={view}")
    expect(page.get_by_role("alert").filter(has_text="cannot be read now").first).to_be_visible()
    down.clear()  # the event stream never broke
    expect(page.get_by_role("alert").filter(has_text="cannot be read now")).to_have_count(0)
    expect(page.get_by_role("main").locator("figure:visible, .panel:visible").first).to_be_visible()


@needs_browser
@pytest.mark.parametrize("view", ["sweep&sweep=metric:loss", "alerts"])
def test_parts_of_a_page_that_failed_in_an_outage_are_asked_for_again(stumbling, address, view):
    down = threading.Event()
    down.set()
    part = re.compile(r"api/(importance|rules)")
    stumbling.route(part, lambda route: route.abort() if down.is_set() else route.continue_())
    page = open_page(stumbling, address, f"p=many&v={view}")
    failed = page.get_by_role("alert").filter(has_text="Failed to fetch")
    expect(failed).to_be_visible()
    down.clear()
    expect(failed).to_have_count(0)
    expect(page.get_by_text(re.compile("a forest predicts|No rules in this project"))).to_be_visible()


@needs_browser
def test_a_page_whose_code_did_not_arrive_opens_when_the_server_is_back(stumbling, address):
    down = threading.Event()
    down.set()
    stumbling.route("**/Table*.js", lambda route: route.abort() if down.is_set() else route.continue_())
    page = open_page(stumbling, address, "p=many&v=table")
    expect(page.get_by_text("This page could not be loaded")).to_be_visible()
    down.clear()
    expect(page.get_by_role("grid")).to_be_visible()
    expect(page).to_have_url(re.compile("v=table"))
