"""The dashboard in a real browser: what it shows, keyboard and pointer, live updates, accessibility and packaging.

Every test fails on any error that the page reports. Charts are checked by their colored pixels and their text, not by screenshots.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fanfold
import fanfold.recording.keeper
from browser import (
    HOSTILE,
    SLOW,
    expect,
    inked,
    needs_browser,
    open_page,
    painted,
    serve,
    serving,
    start,
)
from clickhouse_tools import Fleet
from paths import ROOT

STATIC = ROOT / "src" / "fanfold" / "server" / "static"
PAGES = ("charts", "table", "run", "compare", "sweep", "media", "logs", "alerts", "provenance", "profile")
expect.set_options(timeout=SLOW)

needs_node = pytest.mark.skipif(
    not (ROOT / "web" / "node_modules").is_dir() and not os.environ.get("CI"), reason="run `make web` first"
)


HIDE = """hidden => { Object.defineProperty(document, 'hidden', { get: () => hidden, configurable: true });
  document.dispatchEvent(new Event('visibilitychange')); }"""


# Charts


@needs_browser
def test_charts_of_the_newest_project_are_drawn_at_once(context, address):
    page = context.new_page()
    page.goto(address)
    expect(page).to_have_title(re.compile(" · fanfold"))
    expect(page.get_by_role("link", name="Charts")).to_have_attribute("aria-current", "page")
    page.locator("#project").select_option("llm")
    inked(page, painted(page))
    expect(page.get_by_text("12 runs")).to_be_visible()
    assert page.locator("section h2").first.inner_text().startswith("▾train")  # the section with the loss comes first


@needs_browser
def test_filter_by_keyboard_stands_in_the_address_and_survives_a_reload(context, page):
    painted(page)
    expect(page.get_by_text("12 runs")).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_label("Filter runs")).to_be_focused()
    page.keyboard.type("lr<0.05 and tag:even")
    expect(page.get_by_text("2 of 12 runs")).to_be_visible()
    expect(page).to_have_url(re.compile(re.escape("f=lr%3C0.05+and+tag:even")))
    page.reload()
    expect(page.get_by_text("2 of 12 runs")).to_be_visible()
    page.locator("#filter").fill("lr<<")
    expect(page.get_by_role("alert")).to_be_visible()
    context.expected[:] = [error for error in context.expected if "400" not in error]  # the browser logs the 400 response
    page.locator("#filter").fill("name=nobody")
    page.get_by_role("button", name="Clear filter").click()
    expect(page.get_by_text("12 runs")).to_be_visible()


@needs_browser
def test_a_run_can_be_hidden_made_the_baseline_and_opened_by_keyboard(page):
    painted(page)
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.get_by_label("Show run-11")).not_to_be_checked()
    page.keyboard.press("j")
    page.keyboard.press("p")
    expect(page).to_have_url(re.compile("hide=.*base="))
    expect(page.locator("aside .figure.gap").first).to_contain_text(re.compile("[+\u2212]"))
    page.keyboard.press("o")
    expect(page.get_by_role("heading", name="run-10")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("link", name="Charts")).to_have_attribute("aria-current", "page")


@needs_browser
def test_zooming_asks_again_until_every_point_is_there(context, address):
    page = open_page(context, address, "p=llm&f=name=run-00")
    figure = painted(page)
    inked(page, figure)
    expect(figure).to_have_attribute("aria-label", re.compile("of 3,000 points, extremes kept"))
    box = figure.locator(".plot").bounding_box()
    with page.expect_response(lambda answer: answer.url.endswith("api/series") and '"hi":1' in (answer.request.post_data or "")):
        page.mouse.move(box["x"] + 250, box["y"] + 80)
        page.mouse.down()
        page.mouse.move(box["x"] + 270, box["y"] + 80, steps=4)
        page.mouse.up()
    expect(figure).to_have_attribute("aria-label", re.compile(r"run, \d+ points"))
    expect(page).to_have_url(re.compile("zoom=1"))
    page.get_by_role("button", name="Reset zoom").click()
    expect(figure).to_have_attribute("aria-label", re.compile("of 3,000 points"))


@needs_browser
def test_the_crosshair_is_on_all_charts_and_names_values(page):
    figure = painted(page)
    inked(page, figure)
    box = figure.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + 180, box["y"] + 100)
    expect(page.locator(".hair")).to_have_count(page.locator("figure[data-painted]").count())
    expect(figure.locator(".tip")).to_contain_text("run-")
    expect(figure.locator(".tip thead")).to_have_text(re.compile(r"^\s*step \d"))
    assert figure.locator("canvas").first.evaluate("canvas => getComputedStyle(canvas).opacity") == "1"  # the axes do not fade
    figure.focus()
    before = figure.locator(".tip thead").inner_text()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    expect(figure.locator(".tip thead")).not_to_have_text(before)


@needs_browser
def test_smoothing_log_axes_band_and_groups_change_the_picture(page):
    figure = painted(page)
    plain = inked(page, figure)
    for key, mark in (("l", "log=1"), ("b", "band=1"), ("]", "s=0.1")):
        before = figure.get_attribute("data-painted")
        page.keyboard.press(key)
        expect(figure).not_to_have_attribute("data-painted", before)
        expect(page).to_have_url(re.compile(re.escape(mark)))
    assert inked(page, figure) != plain
    page.locator("summary", has_text="group").click()
    page.get_by_label("Facet by").select_option("config:model.dim")
    expect(page.locator("figure[data-key='train/loss']")).to_have_count(2)
    expect(page.get_by_text("train/loss · model.dim=128")).to_be_visible()


@needs_browser
def test_a_group_is_its_mean_with_a_band_unless_every_run_is_asked_for(context, address):
    page = open_page(context, address, "p=llm&colour=config:model.dim")
    figure = painted(page)
    expect(figure).to_have_attribute("aria-label", re.compile(r"^train/loss: 2 groups, "))
    figure.hover()
    tip = figure.locator(".tip")
    expect(tip.get_by_text("model.dim=64", exact=True)).to_be_visible()
    figure.get_by_label("Show train/acc as a table").or_(figure.get_by_label("Show train/loss as a table")).click()
    expect(figure.locator("tbody tr")).to_have_count(2)
    page.locator("summary", has_text="group").click()
    page.get_by_label("Show individual runs").check()
    expect(figure).to_have_attribute("aria-label", re.compile(r"^train/loss: 12 runs, "))
    expect(page).to_have_url(re.compile("each=1"))


@needs_browser
def test_nan_infinities_and_holes_are_said_and_drawn(context, address):
    page = open_page(context, address, "p=llm&f=name=run-04")
    figure = painted(page)
    inked(page, figure)
    expect(figure).to_have_attribute("aria-label", re.compile("2 NaN or infinite"))


@needs_browser
def test_ranks_show_a_band_with_the_lowest_and_highest_named(context, address):
    page = open_page(context, address, "p=ranks&ranks=mean")
    figure = painted(page, "time")
    inked(page, figure)
    box = figure.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + 180, box["y"] + 60)
    expect(figure.locator(".tip")).to_contain_text("low 1 rank 1 · high 9 rank 2")


@needs_browser
def test_one_point_and_none_are_useful_sights(context, address):
    page = open_page(context, address, "p=odd")
    figure = painted(page, "alone")
    inked(page, figure, 0.0005)
    expect(figure).to_have_attribute("aria-label", re.compile("1 point$"))
    figure.get_by_role("button", name="Show alone as a table").click()
    expect(figure.locator("td", has_text="one-point")).to_be_visible()
    page.get_by_role("button", name="no-points", exact=True).click()
    expect(page.get_by_text("This run logged no numbers.")).to_be_visible()


@needs_browser
def test_a_chart_is_saved_as_picture_and_numbers(context, address):
    page = open_page(context, address, "p=odd")
    figure = painted(page, "alone")
    saved = {}
    for kind in ("PNG", "SVG", "CSV", "Parquet"):
        figure.hover()
        figure.get_by_role("button", name="Save alone").click()
        with page.expect_download() as download:
            figure.get_by_role("button", name=kind, exact=True).click()
        saved[kind] = Path(download.value.path()).read_bytes()
    assert saved["PNG"].startswith(b"\x89PNG") and len(saved["PNG"]) > 2000
    assert saved["SVG"].startswith(b"<svg") and b"one-point" in saved["SVG"]
    assert saved["CSV"].decode().startswith("run,step,alone,lowest,highest,points,id\none-point,7,5,5,5,1,")
    assert saved["Parquet"].startswith(b"PAR1")


@needs_browser
def test_an_empty_place_says_what_to_paste(context, tmp_path):
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "")
        expect(page.get_by_text("No runs yet")).to_be_visible()
        expect(page.locator("pre").first).to_contain_text("fanfold.init(")


# Live


@needs_browser
def test_a_new_point_reaches_forty_charts_and_twelve_tabs(context, tmp_path):
    run = start(tmp_path, project="live", name="now")
    point = {f"k{i:02d}": float(i) for i in range(40)}
    run.log(point, step=0)
    with serving(context, tmp_path) as address:
        tabs = [open_page(context, address, "p=live") for _ in range(12)]
        for tab in tabs:
            tab.locator("figure[data-key='k00']").wait_for()
            expect(tab.locator(".live", has_text=re.compile("^live$"))).to_be_visible()
            expect(tab.locator("figure[data-key='k00']")).to_have_attribute("aria-label", "k00: 1 run, 1 point")
        asleep = tabs[5]
        asleep.evaluate(HIDE, True)
        asked: list[str] = []
        asleep.on("request", lambda request: asked.append(request.url))
        run.log(point, step=1)
        for tab in tabs:
            if tab is not asleep:
                expect(tab.locator("figure[data-key='k00']")).to_have_attribute("aria-label", "k00: 1 run, 2 points")
        assert asked == []
        asleep.evaluate(HIDE, False)
        expect(asleep.locator("figure[data-key='k00']")).to_have_attribute("aria-label", "k00: 1 run, 2 points")
    run.finish()


@needs_browser
def test_one_call_of_log_is_asked_for_once(context, tmp_path, monkeypatch):
    monkeypatch.setattr(fanfold.recording.keeper, "BEAT_SECONDS", 1e9)  # heartbeats also trigger updates
    run = start(tmp_path, project="live", name="now")
    run.log({"a": 1.0, "b": 1.0}, step=0)
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "p=live")
        expect(page.locator(".live", has_text=re.compile("^live$"))).to_be_visible()
        expect(page.locator("figure[data-key='b']")).to_have_attribute("aria-label", "b: 1 run, 1 point")
        page.wait_for_timeout(1500)  # until the requests of the page load are done
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "api/series" in request.url else None)
        for step in (1, 2):
            run.log({"a": 2.0, "b": 2.0}, step=step)
            expect(page.locator("figure[data-key='b']")).to_have_attribute("aria-label", f"b: 1 run, {step + 1} points")
            page.wait_for_timeout(2000)  # the server has polled four times, and the page has refreshed the runs
            assert len(asked) == step
    run.finish()


@needs_browser
def test_the_page_survives_its_server(context, tmp_path):
    run = start(tmp_path, project="live", name="now")
    run.log({"v": 1.0}, step=0)
    server, address = serve(tmp_path)
    page = open_page(context, address, "p=live")
    expect(page.locator(".live", has_text=re.compile("^live$"))).to_be_visible()
    server.kill()
    server.wait(20)
    expect(page.get_by_text("offline, retrying")).to_be_visible()
    expect(page.locator("figure[data-key='v']")).to_be_visible()  # the last data stays visible
    run.log({"v": 2.0}, step=1)
    server, _ = serve(tmp_path, "--port", address.rsplit(":", 1)[1].strip("/"))
    try:
        expect(page.locator("figure[data-key='v']")).to_have_attribute("aria-label", "v: 1 run, 2 points")
        expect(page.locator(".live", has_text=re.compile("^live$"))).to_be_visible()
    finally:
        page.close()
        server.terminate()
        server.wait(20)
        run.finish()
    assert all("ERR_" in error for error in context.expected), context.expected
    context.expected.clear()


@needs_browser
def test_what_takes_a_while_is_said_meanwhile(context, address):
    waiting: list = []
    done: list = []
    context.route(re.compile("api/(runs|series)"), lambda route: route.continue_() if done else waiting.append(route))
    page = open_page(context, address)
    expect(page.get_by_role("status").get_by_text("Reading the journals of llm")).to_be_visible()
    waiting.pop().continue_()
    expect(page.locator("figure[data-key='train/loss']").get_by_text("reading…")).to_be_visible()
    done.append(True)
    for route in waiting:
        route.continue_()
    inked(page, painted(page))
    expect(page.get_by_text("reading…")).to_have_count(0)


@needs_browser
def test_a_broken_answer_is_said_in_the_chart_and_harms_nothing_else(context, address):
    def cut(route):
        answer = route.fetch()
        route.fulfill(response=answer, body=answer.body()[:-40])

    context.route("**/api/series", cut)
    page = open_page(context, address)
    expect(page.locator("figure[data-key='train/loss']").get_by_role("alert")).to_have_text("the answer is cut short")
    expect(page.get_by_text("12 runs")).to_be_visible()


# Other pages


@needs_browser
def test_the_table_sorts_chooses_and_compares(context, address):
    page = open_page(context, address, "p=llm&v=table&cols=config:lr,metric:train/loss")
    grid = page.get_by_role("grid")
    expect(grid.get_by_role("row")).to_have_count(13)
    page.evaluate("() => { window.rows = [...document.querySelectorAll('[role=row]')]; }")
    grid.get_by_role("button", name="lr", exact=True).click()
    expect(grid.get_by_role("columnheader").nth(1)).to_have_attribute("aria-sort", "ascending")
    first = grid.get_by_role("row").nth(1).get_by_role("gridcell")
    expect(first.first).to_have_text("0.01")
    first.last.hover()  # the full value, set on hover
    assert len(first.last.get_attribute("title")) > len(first.last.text_content().strip())
    grid.get_by_role("rowheader").first.hover()
    expect(grid.get_by_role("rowheader").first).to_have_attribute("title", re.compile(r".+ \(.+\)"))
    stays = "() => [...document.querySelectorAll('[role=row]')].every((row, i) => row === window.rows[i])"
    assert page.evaluate(stays)  # the same elements with new text
    for name in ("run-02", "run-05"):
        grid.get_by_label(f"Select {name}").check()
    page.get_by_role("button", name="compare", exact=True).click()
    expect(page.get_by_role("group", name="Config")).to_contain_text("model.dim")
    expect(page.locator("figure[data-key='train/loss']")).to_be_visible()


@needs_browser
def test_a_run_is_renamed_tagged_archived_and_deleted_from_the_page(context, tmp_path):
    for name in ("keep", "old"):
        run = start(tmp_path, project="edit", name=name)
        run.log({"v": 1.0}, step=0)
        run.finish()
    with serving(context, tmp_path) as address:
        page = open_page(context, address, f"p=edit&v=run&r={run.id}")
        for button, field, value in (
            ("rename", "New name", "renamed"),
            ("tags", "New tags", "one, two"),
            ("note", "New notes", "why not"),
        ):
            page.get_by_role("button", name=button, exact=True).click()
            page.get_by_label(field).fill(value)
            page.get_by_role("button", name=re.compile("^save ")).click()
            expect(page.get_by_label(field)).to_have_count(0)
        expect(page.get_by_role("heading", name="renamed")).to_be_visible()
        expect(page.get_by_text("why not")).to_be_visible()
        page.get_by_role("button", name="archive", exact=True).click()
        expect(page.get_by_text("1 of 2 runs")).to_be_visible()
        page.get_by_role("button", name="delete", exact=True).click()
        expect(page.get_by_text("1 run", exact=True)).to_be_visible()
        assert not run.path.exists()
        page.wait_for_timeout(200)  # the page may have requested the run once more meanwhile
        context.expected[:] = [error for error in context.expected if "404" not in error]
        page.locator("summary", has_text="views").click()
        page.get_by_label("View name").fill("mine")
        page.get_by_role("button", name="save", exact=True).click()
        expect(page.get_by_role("button", name="mine", exact=True)).to_be_visible()


@needs_browser
def test_media_share_one_step(context, address):
    page = open_page(context, address, "p=llm&v=media&key=picture")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    expect(page.locator("img")).to_have_count(2)
    page.wait_for_function("() => [...document.querySelectorAll('img')].every(one => one.naturalWidth === 16)")
    page.locator("#step").fill("0")
    expect(page.get_by_text("at 0").first).to_be_visible()
    expect(page).to_have_url(re.compile("step=0"))
    for key, sight in (
        ("rows", "td >> text=2.5"),
        ("weights", "svg path.on"),
        ("tone", "audio"),
        ("words", "text=the run-00 at step 500"),
    ):
        page.get_by_role("button", name=key, exact=True).click()
        expect(page.locator(sight).first).to_be_visible()
    page.get_by_label("Show differences from the first").check()
    expect(page.locator("ins").first).to_be_visible()
    page.get_by_role("button", name="page", exact=True).click()
    expect(page.frame_locator("iframe").first.get_by_role("heading", name="inside")).to_be_visible()
    assert sorted(url[-3:] for url in asked if "/html?" in url) == ["n=1", "n=1"]  # only the newest of each run
    page.get_by_role("button", name="plot", exact=True).click()
    expect(page.get_by_text("Plotly figure").first).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").first.click()
    assert download.value.suggested_filename == "plot-500.json"
    assert json.loads(Path(download.value.path()).read_bytes())["data"][0]["y"] == [1, 3, 2]


@needs_browser
def test_console_alerts_and_provenance_are_there(context, address):
    page = open_page(context, address, "p=ranks&v=logs")
    for rank in range(3):
        expect(page.get_by_role("log")).to_contain_text(f"hello from {rank}")
    page = open_page(context, address, "p=llm&v=alerts")
    page.get_by_role("main").get_by_role("button", name="run-04").first.click()
    expect(page.get_by_role("heading", name="run-04")).to_be_visible()
    page = open_page(context, address, "p=llm&v=provenance")
    expect(page.get_by_role("group", name="Provenance graph")).to_contain_text("Environment")


@needs_browser
def test_a_rule_is_added_and_removed_and_a_mistake_is_shown(context, address):
    page = open_page(context, address, "p=llm&v=alerts")
    rules = page.get_by_role("region", name="Alert rules")
    rules.get_by_label("New rule").fill("loss > much")
    rules.get_by_role("button", name="add").click()
    expect(rules.get_by_role("alert")).to_contain_text("mistake at column 8")
    context.expected.clear()  # the browser logs the refused request
    rules.get_by_label("New rule").fill("val/loss > 1e9")
    rules.get_by_role("button", name="add").click()
    expect(rules.get_by_text("val/loss > 1e9", exact=True)).to_be_visible()
    page.reload()
    expect(rules.get_by_text("val/loss > 1e9", exact=True)).to_be_visible()
    rules.get_by_role("button", name="Remove the rule val/loss > 1e9").click()
    expect(rules.get_by_text("No rules in this project.")).to_be_visible()


@needs_browser
def test_hostile_names_are_only_text(context, address):
    from urllib.parse import quote

    page = open_page(context, address, f"p={quote(HOSTILE)}&key=say")
    expect(page.locator("aside .name")).to_have_text(HOSTILE)
    main = page.get_by_role("main")
    sights = {"charts": "figure[data-painted]", "table": "[role=row] >> nth=1", "run": "h2", "compare": ".chip", "sweep": ".none", "media": "p.text",
              "logs": "text=No console output captured", "alerts": "li b", "provenance": "svg g.run", "profile": "text=No operator profile"}  # fmt: skip
    keys = iter("123456789")
    for view in PAGES:
        page.keyboard.press("s" if view == "sweep" else next(keys))
        main.locator(sights[view]).first.wait_for()
        if view not in ("sweep", "logs", "profile"):
            expect(main).to_contain_text(HOSTILE[:20])
        assert page.locator("img[src='x']").count() == 0
    page.keyboard.press("5")
    page.get_by_role("button", name="page", exact=True).click()
    expect(page.frame_locator("iframe").locator("b")).to_have_text("kept")
    context.expected[:] = [
        error for error in context.expected if "sandboxed" not in error and "Content Security Policy" not in error
    ]


@needs_browser
def test_an_unknown_run_project_and_page_are_said(context, address):
    page = open_page(context, address, "p=llm&v=run&r=nobody")
    expect(page.get_by_role("alert")).to_contain_text("no run")
    context.expected[:] = [error for error in context.expected if "404" not in error]
    page = open_page(context, address, "p=nothing&v=nothing")
    expect(page.get_by_text("No runs in nothing yet")).to_be_visible()


# Accessibility


AGES = re.compile(r"\b\d+(\.\d+)?\s*(ms|s|min|h|d)\b|just now|ago|/\S+")


def words(page) -> list[str]:
    """Return the text of a page, without ages and paths."""
    return [line for line in (AGES.sub("", text).strip() for text in page.get_by_role("main").inner_text().splitlines()) if line]


NAMED = {"button", "link", "textbox", "searchbox", "combobox", "checkbox", "radio", "slider", "spinbutton", "tab", "menuitem", "option",
         "image", "figure", "dialog", "grid", "table", "splitter"}  # fmt: skip


@needs_browser
def test_whatever_a_screen_reader_reaches_has_a_name(context, address):
    unnamed = {}
    for view in PAGES:
        page = open_page(context, address, f"p=llm&v={view}")
        page.get_by_role("main").locator("figure:visible, [role=grid], .panel:visible, .none").first.wait_for()
        page.wait_for_timeout(500)
        found = context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
        seen = [one for one in found if not one["ignored"] and one["role"]["value"] in NAMED]
        assert len(seen) > 20, view
        unnamed |= {(view, one["role"]["value"]): one for one in seen if not one["name"]["value"].strip()}
        page.close()
    assert not unnamed


@needs_browser
def test_every_page_says_the_same_over_clickhouse(context, place, address, clickhouse):
    fleet = Fleet(clickhouse)
    fleet.ship(place)
    server, other = serve(fleet.url)
    for view in PAGES:
        fragment = f"p={'ranks' if view == 'logs' else 'llm'}&v={view}"
        pages = [open_page(context, at, fragment) for at in (address, other)]
        for page in pages:
            page.get_by_role("main").locator("figure:visible, [role=grid], .panel:visible, .none").first.wait_for()
        if view == "charts":
            assert all(inked(page, painted(page)) for page in pages)
        for _ in range(100):
            said = [words(page) for page in pages]
            if said[0] == said[1]:
                break
            pages[0].wait_for_timeout(100)
        assert said[0] == said[1], view
        assert said[0], view
        for page in pages:
            page.close()
    server.terminate()
    server.wait(20)
    fleet.close()


@needs_browser
def test_the_theme_can_be_chosen_and_is_remembered(context, address):
    page = open_page(context, address)
    ground = "() => getComputedStyle(document.body.parentElement).backgroundColor"
    light = page.evaluate(ground)
    page.keyboard.press("t")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert page.evaluate(ground) != light
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


@needs_browser
def test_help_lists_the_keys(page):
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("filter runs")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


# Packaging


def test_the_first_page_is_small():
    first = [name for name in ("index.js",) if (STATIC / name).is_file()]
    linked = re.findall(r'(?:src|href)="\./([^"]+\.(?:js|css))"', (STATIC / "index.html").read_text())
    loaded = set(first) | set(linked) | set(re.findall(r'from"\./([^"]+\.js)"', (STATIC / "index.js").read_text()))
    assert sum(len(gzip.compress((STATIC / name).read_bytes(), 9)) for name in loaded) <= 60_000
    assert sum(len(gzip.compress(file.read_bytes(), 9)) for file in STATIC.iterdir()) <= 170_000
    assert sum(file.stat().st_size for file in STATIC.iterdir()) <= 500_000


@needs_browser
def test_what_loads_by_itself_is_small_and_what_a_chart_opens_comes_when_it_is_near(context, address):
    page = open_page(context, address, "p=llm")
    figure = painted(page, "train/loss")
    inked(page, figure)
    page.wait_for_load_state("load")
    page.wait_for_timeout(1000)
    loaded = page.evaluate("() => performance.getEntriesByType('resource').map(one => one.name.split('/').pop())")
    code = {name for name in loaded if name.endswith((".js", ".css"))}
    assert {"core.js", "core.css"} <= code and "ChartOptions.js" not in code
    assert sum(len(gzip.compress((STATIC / name).read_bytes(), 9)) for name in code) <= 60_000
    figure.get_by_role("button", name="Options of train/loss").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Options of train/loss").get_by_label("Title")).to_be_focused()


@needs_browser
def test_slow_answers_do_not_hold_up_other_charts(context, address):
    page = context.new_page()
    held = []
    page.route("**/api/series", lambda route: held.append(route))  # noqa: PLW0108 - playwright wants a function
    page.goto(f"{address}#p=llm")
    page.wait_for_function("() => performance.getEntriesByType('resource').length > 0 && document.querySelector('figure')")
    page.set_viewport_size({"width": 1600, "height": 2000})
    page.get_by_label("Smoothing").wait_for()
    page.get_by_role("button", name="log x").click()  # asks again, while the first answer is still on its way
    page.wait_for_timeout(1500)
    assert len(held) >= 2
    for route in held:
        route.continue_()
    inked(page, painted(page, "train/loss"))


def test_the_page_asks_nothing_of_the_outside():
    for file in STATIC.iterdir():
        hosts = set(re.findall(r"https?://([^/\"'`\s)]+)", file.read_text()))
        assert hosts <= {"www.w3.org", "svelte.dev"}, (file.name, hosts)  # namespaces and links in messages: never fetched


@needs_node
def test_the_committed_page_is_what_its_sources_build(tmp_path):
    out = tmp_path / "static"
    web = ROOT / "web"
    subprocess.run(
        ["npx", "vite", "build", "--outDir", str(out), "--emptyOutDir"], cwd=web, check=True, capture_output=True, timeout=240
    )
    built = {file.name: file.read_bytes() for file in out.iterdir()}
    kept = {file.name: file.read_bytes() for file in STATIC.iterdir()}
    assert sorted(built) == sorted(kept)
    assert [name for name in built if built[name] != kept[name]] == [], "run `make web` and commit what it changed"


@needs_node
def test_the_pages_own_tests_and_types_pass():
    web = ROOT / "web"
    for command in (["npx", "vitest", "run"], ["npx", "svelte-check", "--fail-on-warnings"]):
        done = subprocess.run(command, cwd=web, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_no_package_is_built_without_the_page(tmp_path):
    import sys as python

    python.path.insert(0, str(ROOT))
    try:
        from hatch_build import BuiltPage
    finally:
        python.path.remove(str(ROOT))

    def hook(root: Path):
        return BuiltPage(str(root), {}, None, None, str(tmp_path), "wheel")

    hook(ROOT).initialize("standard", {})
    with pytest.raises(RuntimeError, match="make web"):
        hook(tmp_path).initialize("standard", {})
    hook(tmp_path).initialize("editable", {})


def test_wheel_and_sdist_hold_the_page_and_the_wheel_the_native_part(tmp_path):
    import tarfile
    import zipfile

    from fanfold.probes.native import build

    code = "import sys\nfrom hatchling.build import build_sdist, build_wheel\nprint(build_wheel(sys.argv[1])); print(build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )
    wheel, sdist = done.stdout.split()[-2:]
    # PyPI rejects plain linux tags, and a lower glibc version than the library needs would break on old systems.
    asks = re.findall(rb"GLIBC_2\.(\d+)", build.build().read_bytes())
    assert int(re.search(r"-py3-none-manylinux_2_(\d+)_", wheel)[1]) >= max(map(int, asks))
    names = {Path(name).name for name in zipfile.ZipFile(tmp_path / wheel).namelist() if "/server/static/" in name}
    assert names == {file.name for file in STATIC.iterdir()}
    with tarfile.open(tmp_path / sdist) as archive:
        inside = archive.getnames()
    assert {Path(name).name for name in inside if "/server/static/" in name} == names
    assert any(name.endswith("/web/src/App.svelte") for name in inside) and any(
        name.endswith("/hatch_build.py") for name in inside
    )
    assert not any("node_modules" in name for name in inside)
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        archive.extractall(tmp_path / "site")
    native = tmp_path / "site" / "fanfold" / "probes" / "native" / build.library_name()
    # Without a compiler, the library of the wheel binds to torch and passes its self-test.
    bare = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    bare |= {"PATH": "/nonexistent", "PYTHONPATH": str(tmp_path / "site"), "FANFOLD_CACHE_DIR": str(tmp_path / "cache")}
    code = "from fanfold.probes.native import library; print(library.bind()._name)"
    told = subprocess.run([sys.executable, "-c", code], env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert told.stdout.strip() == str(native), told.stderr
