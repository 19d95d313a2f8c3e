"""The workspace: automatic saving, links that leave it alone, undo; keyboard and layout, notes, and the empty state."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fanfold
from browser import SLOW, expect, large_answers, needs_browser, open_page, serve, serving, start
from fanfold.transfer.examples import write_examples
from fleet_tools import Gateway

pytestmark = needs_browser
LONG = "a-rather-long-name-of-a-run-that-says-what-is-different-about-it-at-its-very-end-seed3"
IN_ENVIRONMENT = "import fanfold, sys, time\nrun = fanfold.init('code', name=sys.argv[1], system=False, quiet=True)\nrun.log({'loss': 1.0})\ntime.sleep(3)\nrun.finish()\n"
NOTE = """# Why

**Bold**, `code` and [a paper](https://example.invalid/paper).

- [x] trained
- plain

| split | loss |
|---|---|
| val | 1.25 |

![picture](https://example.invalid/picture.png) <img src="https://example.invalid/tag.png" onerror="alert(1)"> <script>alert(2)</script> [bad](javascript:alert(3))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Sixteen example runs, one run with a long name and a note, and two runs of one program in different environments."""
    folder = tmp_path_factory.mktemp("runs")
    os.environ["FANFOLD_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    write_examples(folder)
    run = start(folder, "noted", name=LONG, notes=NOTE)
    run.log({"loss": 1.0}, step=0)
    run.finish()
    script = folder.with_name("train.py")
    script.write_text(IN_ENVIRONMENT)
    for name, version, threads in (("before", "1.0", "2"), ("after", "2.5", "7")):
        packages = tmp_path_factory.mktemp(name)
        (packages / f"dwarves-{version}.dist-info").mkdir()
        (packages / f"dwarves-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: dwarves\nVersion: {version}\n"
        )
        path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "FANFOLD_DIR": str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": threads}
        subprocess.run([sys.executable, str(script), name], env=env, check=True, timeout=120, capture_output=True)
    return folder


def pressed(page, name: str):
    return page.get_by_role("button", name=name, exact=True)


def kept(page) -> str:
    """Wait until the workspace was saved, and return it."""
    page.wait_for_timeout(1000)
    return page.evaluate("() => localStorage.getItem('workspace / demo') ?? ''")


# Saving


def test_what_was_chosen_is_there_again_and_each_project_has_its_own(browser, context, address):
    page = open_page(context, address, "p=demo")
    pressed(page, "log y").click()
    page.get_by_label("Sort runs").select_option("name")
    assert set(kept(page).split("&")) == {"o=name", "log=1"}
    again = open_page(context, address, "")  # a bare URL opens the newest project, which is a different one
    again.locator("#project").select_option("demo")
    expect(pressed(again, "log y")).to_have_attribute("aria-pressed", "true")
    expect(again.get_by_label("Sort runs")).to_have_value("name")
    again.locator("#project").select_option("noted")
    expect(pressed(again, "log y")).to_have_attribute("aria-pressed", "false")
    zoomed = open_page(context, address, "p=demo&zoom=1..2")  # transient parts of a URL apply as well
    expect(pressed(zoomed, "log y")).to_have_attribute("aria-pressed", "true")
    expect(pressed(zoomed, "Reset zoom")).to_be_visible()
    bare = open_page(context, address, "p=demo&v=table")  # a page is a location, not a choice
    expect(bare.locator("[role=columnheader][aria-sort=ascending]")).to_contain_text("run")
    other = browser.new_context()
    fresh = open_page(other, address, "p=demo")
    expect(pressed(fresh, "log y")).to_have_attribute("aria-pressed", "false")
    other.close()


def test_a_link_is_shown_as_it_is_and_the_workspace_is_left_alone_until_told(context, address):
    page = open_page(context, address, "p=demo")
    pressed(page, "log y").click()
    assert kept(page) == "log=1"
    linked = open_page(context, address, "p=demo&o=name")
    expect(linked.get_by_text("From a link")).to_be_visible()
    pressed(linked, "band").click()
    linked.wait_for_timeout(300)
    linked.reload()
    expect(pressed(linked, "band")).to_have_attribute("aria-pressed", "true")
    expect(linked.get_by_text("From a link")).to_be_visible()
    assert kept(linked) == "log=1"
    pressed(linked, "my workspace").click()
    expect(pressed(linked, "log y")).to_have_attribute("aria-pressed", "true")
    expect(linked.get_by_text("From a link")).to_have_count(0)
    linked.evaluate("() => (location.hash = 'p=demo&band=1')")  # a link pasted into the same tab
    pressed(linked, "keep").click()
    assert kept(linked) == "band=1"
    reloaded = open_page(context, address, "p=demo&band=1")
    expect(reloaded.get_by_text("From a link")).to_have_count(0)  # it equals the workspace


def test_a_link_to_one_chart_wins_over_a_chart_that_is_drawn_together(context, address):
    page = open_page(context, address, "p=demo")
    page.evaluate("() => localStorage.setItem(`workspace ${location.pathname} demo`, 'pairs=1')")
    linked = open_page(context, address, "p=demo&full=train/loss")
    expect(linked.locator("figure.full [aria-label=Legend] li").first).to_be_visible()
    linked.keyboard.press("Escape")
    expect(linked.get_by_text("From a link")).to_be_visible()
    assert kept(linked) == "pairs=1"


def test_changes_of_the_view_are_undone_and_done_again_by_key_and_by_button(context, address):
    page = open_page(context, address, "p=demo")
    undo, redo, log, band = (pressed(page, name) for name in ("Undo", "Redo", "log y", "band"))
    expect(undo).to_be_disabled()
    log.click()
    page.wait_for_timeout(700)
    band.click()
    page.wait_for_timeout(700)
    page.get_by_role("checkbox", name="Show lr0.0001-width128-seed0").uncheck()
    page.keyboard.press("Control+z")
    expect(page.get_by_role("checkbox", name="Show lr0.0001-width128-seed0")).to_be_checked()
    page.keyboard.press("Control+z")
    expect(band).to_have_attribute("aria-pressed", "false")
    undo.click()
    expect(log).to_have_attribute("aria-pressed", "false")
    expect(undo).to_be_disabled()
    page.keyboard.press("Control+Shift+z")
    redo.click()
    expect(log).to_have_attribute("aria-pressed", "true")
    expect(band).to_have_attribute("aria-pressed", "true")
    field = page.get_by_label("Filter runs")
    field.fill("lr>0.005")
    page.keyboard.press("Control+z")  # in a field, its own undo
    expect(band).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Escape")
    page.keyboard.press("2")  # page changes are undone with Back, not with Ctrl+Z
    expect(page.get_by_role("grid")).to_be_visible()
    page.keyboard.press("Control+z")
    expect(page.get_by_role("grid")).to_be_visible()


def test_a_gateway_keeps_a_workspace_for_its_user_in_any_browser(browser, place, tmp_path):
    gateway = Gateway(place, log=tmp_path / "gateway.log")
    try:
        first, second = browser.new_context(), browser.new_context()
        page = open_page(first, f"{gateway.url}/ui/", "p=demo")
        expect(page.get_by_role("link", name="anybody on this machine")).to_be_visible()
        with page.expect_response("**/api/keep") as answer:
            pressed(page, "log y").click()
        assert answer.value.ok
        other = open_page(second, f"{gateway.url}/ui/", "p=demo")
        expect(pressed(other, "log y")).to_have_attribute("aria-pressed", "true")
        assert other.evaluate("() => Object.keys(localStorage).filter((name) => name.startsWith('workspace')).length") == 0
        first.close()
        second.close()
    finally:
        gateway.close()


def test_a_view_names_the_runs_that_are_shown_not_the_thousands_that_are_not(context, address):
    large_answers(context, 10_000, ["metric:loss"], lambda _, run: run / 10_000)
    page = open_page(context, address, "p=demo")
    pressed(page, "hide all").click()
    for name in ("r000003", "r000007"):
        page.get_by_role("checkbox", name=f"Show {name}").check()
    expect(page).to_have_url(re.compile(r"hide=\*,r000003,r000007(&|$)"))
    page.reload()
    for name, shown in (("r000003", True), ("r000004", False)):
        expect(page.get_by_role("checkbox", name=f"Show {name}")).to_be_checked(checked=shown)
    pressed(page, "show all").click() if pressed(page, "show all").count() else pressed(page, "hide all").click()
    assert len(page.url) < 300


def test_hiding_what_a_filter_leaves_keeps_the_rest_as_it_was(context, address):
    page = open_page(context, address, "p=demo&f=width%3D256")
    expect(page.locator(".count")).to_have_text("8 of 16 runs")
    pressed(page, "hide all").click()
    page.get_by_label("Filter runs").fill("")
    expect(page.locator(".count")).to_have_text("16 runs", timeout=SLOW)
    for name, shown in (("lr0.001-width256-seed0", False), ("lr0.001-width128-seed0", True)):
        expect(page.get_by_role("checkbox", name=f"Show {name}")).to_be_checked(checked=shown)


# Keyboard and layout


def test_everything_is_reached_by_keyboard_and_menus_close(context, address):
    page = open_page(context, address, "p=demo")
    expect(page.get_by_role("checkbox", name="Show lr0.001-width256-seed0")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Charts", exact=True)).to_be_focused()
    edge = page.get_by_role("separator", name="Width of the run list")
    edge.focus()
    page.keyboard.press("ArrowRight")
    expect(edge).to_have_attribute("aria-valuenow", "320")
    page.keyboard.press("e")
    expect(edge).to_have_count(0)
    page.keyboard.press("e")
    expect(edge).to_be_visible()
    menu = page.locator("summary", has_text="views")
    menu.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("View name")).to_be_visible()
    page.get_by_label("View name").focus()
    page.keyboard.press("Escape")
    expect(page.get_by_label("View name")).to_be_hidden()
    expect(menu).to_be_focused()
    menu.click()
    page.locator("main").click(position={"x": 700, "y": 500})
    expect(page.get_by_label("View name")).to_be_hidden()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.mouse.click(5, 400)
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_the_run_list_is_dragged_fitted_to_its_names_and_folded(context, address):
    page = open_page(context, address, "p=noted")
    name = page.locator("aside .name")
    cut = "name => name.scrollWidth > name.clientWidth"
    expect(name).to_have_text(LONG)
    assert name.evaluate(cut)
    edge = page.get_by_role("separator", name="Width of the run list")
    edge.dblclick()
    page.wait_for_function(
        "() => { const name = document.querySelector('aside .name'); return name.scrollWidth <= name.clientWidth }"
    )
    box = edge.bounding_box()
    page.mouse.move(box["x"] + 4, 400)
    page.mouse.down()
    page.mouse.move(240, 400, steps=4)
    page.mouse.up()
    page.wait_for_function("() => Math.abs(document.querySelector('aside').offsetWidth - 240) < 12")
    name.hover()
    expect(page.locator("aside li").first).to_have_attribute("title", re.compile(re.escape(LONG)))
    pressed(page, "Fold the run list").click()
    page.wait_for_function("() => document.querySelector('aside').offsetWidth < 40")
    page.reload()
    pressed(page, "Show the run list").click()
    expect(name).to_be_visible()


def test_on_a_phone_the_runs_are_a_drawer_and_no_page_is_wider_than_the_screen(browser, address):
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True, reduced_motion="reduce")
    context.set_default_timeout(30_000)
    page = open_page(context, address, "p=demo")
    runs = pressed(page, "Runs")
    expect(page.locator("aside")).to_have_count(0)
    runs.tap()
    expect(page.locator("aside").get_by_role("button", name="hide all")).to_be_focused()
    page.get_by_role("checkbox", name="Show lr0.001-width256-seed0").uncheck()
    page.keyboard.press("Escape")
    expect(page.locator("aside")).to_have_count(0)
    expect(runs).to_be_focused()
    runs.tap()
    page.mouse.click(385, 600)  # outside of it
    expect(page.locator("aside")).to_have_count(0)
    runs.tap()
    page.locator("aside .name").first.tap()
    expect(page.get_by_role("heading", name="lr0.01-width256-seed1")).to_be_visible()
    for where in ("charts", "table", "run", "compare", "sweep", "media", "logs", "alerts", "provenance", "profile"):
        page.goto(f"{address}#p=demo&v={where}")
        expect(page.locator("nav a[aria-current=page]")).to_have_text(re.compile(where, re.IGNORECASE))
        page.wait_for_timeout(200)
        assert (
            page.evaluate(
                "() => Math.max(document.scrollingElement.scrollWidth, document.querySelector('main').scrollWidth) - innerWidth"
            )
            <= 0
        ), where
        tab = page.locator("nav a[aria-current=page]").bounding_box()
        assert tab["x"] >= 0 and tab["x"] + tab["width"] <= 390, where  # the line of pages is scrolled to it
        if where == "alerts":
            assert page.get_by_text("from step 600 on").first.bounding_box()["height"] < 40  # in one line, not letter by letter
    page.goto(f"{address}#p=demo")
    page.locator("figure").nth(4).scroll_into_view_if_needed()
    assert page.get_by_role("toolbar", name="Chart options").bounding_box()["y"] < 0  # scrolled away: it would cover the charts
    context.close()


# Notes and environments


def test_notes_are_markdown_in_which_nothing_is_markup(context, address):
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = open_page(context, address, "p=noted&v=run")
    note = page.locator(".note")
    expect(note.get_by_role("heading", name="Why")).to_be_visible()
    expect(note.locator("strong")).to_have_text("Bold")
    expect(note.get_by_role("cell", name="1.25")).to_be_visible()
    expect(note.get_by_role("link", name="a paper")).to_have_attribute("href", "https://example.invalid/paper")
    expect(note.get_by_role("link", name="a paper")).to_have_attribute("rel", re.compile("noopener noreferrer"))
    expect(note).to_contain_text("<script>alert(2)</script> [bad](javascript:alert(3))")
    assert note.locator("img, script, [onerror], a[href^=javascript]").count() == 0
    assert [url for url in asked if "example.invalid" in url] == []


def test_compare_shows_what_differs_in_command_environment_and_packages(context, address, place):
    runs = {run.name: run for run in fanfold.runs("code", dir=place)}
    page = open_page(context, address, f"p=code&v=compare&with={runs['before'].id},{runs['after'].id}")
    packages = page.get_by_role("group", name="Packages")
    expect(packages.locator("tbody tr")).to_have_count(1)
    expect(packages.locator("tbody tr")).to_have_text(re.compile(r"dwarves\s*1\.0\s*2\.5"))
    environment = page.get_by_role("group", name="Environment")
    expect(environment.get_by_role("row", name=re.compile("environment.OMP_NUM_THREADS"))).to_have_text(re.compile(r"2\s*7$"))
    command = page.locator(".commands tr").nth(1)
    expect(command.locator("del")).to_have_text("before")
    expect(command.locator("ins")).to_have_text("after")
    page.get_by_label("Show identical values").check()
    count = len({**runs["before"].facts["packages"], **runs["after"].facts["packages"]})
    expect(packages.locator("tbody tr")).to_have_count(count)


# The empty state


def test_an_empty_dashboard_shows_the_first_lines_and_adds_example_runs(context, tmp_path):
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "")
        expect(page.get_by_role("heading", name="No runs yet")).to_be_visible()
        pressed(page, "Copy").first.click()
        expect(page.get_by_role("status").get_by_text("copied")).to_be_visible()
        copied = page.evaluate("() => navigator.clipboard.readText()")
        pressed(page, "Add example runs").click()
        expect(page.locator(".count")).to_have_text("16 runs", timeout=SLOW)
        run = next(run for run in fanfold.runs("demo", dir=tmp_path) if run.name == "lr0.001-width256-seed0")
        shown = page.locator("aside li", has_text="lr0.001-width256-seed0").locator(".figure")
        expect(shown).to_have_text(f"{run.summary['train/loss']:.5g}")
        code = f"import os\nos.environ['FANFOLD_DIR'] = {str(tmp_path)!r}\n{copied}"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)
        expect(page.locator("#project option", has_text="my-project")).to_have_count(1, timeout=SLOW)


def test_a_dashboard_that_may_not_write_says_how_to_get_example_runs(context, tmp_path):
    server, address = serve(tmp_path, "--port", "0")
    try:
        page = open_page(context, address, "")
        expect(page.get_by_text("fanfold demo --examples")).to_be_visible()
        expect(pressed(page, "Add example runs")).to_have_count(0)
        answer = page.evaluate(
            "() => fetch('api/examples', {method: 'POST', body: '{}', headers: {'content-type': 'application/json'}}).then((one) => one.status)"
        )
        assert answer == 400
        assert fanfold.runs(dir=tmp_path) == []
        command = [sys.executable, "-m", "fanfold", "demo", "--examples", "--dir", str(tmp_path)]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
        expect(page.locator(".count")).to_have_text("16 runs", timeout=SLOW)  # automatically
        context.expected[:] = [one for one in context.expected if "400" not in one]
        page.close()
    finally:
        server.terminate()
        server.wait(20)


def test_an_outage_is_said_and_ends_by_itself(context, tmp_path):
    write_examples(tmp_path)
    server, address = serve(tmp_path)
    port = re.search(r":(\d+)", address)[1]
    page = open_page(context, address, "p=demo")
    expect(page.locator(".count")).to_have_text("16 runs", timeout=SLOW)
    server.kill()
    server.wait(20)
    banner = page.get_by_text("The server does not answer.")
    expect(banner).to_be_visible(timeout=SLOW)
    expect(page.locator("aside li").first).to_be_visible()  # loaded data stays
    start(tmp_path, "demo", name="meanwhile").finish()
    server, _ = serve(tmp_path, "--port", port, "--write")
    try:
        expect(page.locator("aside li", has_text="meanwhile")).to_be_visible(timeout=SLOW)
        expect(banner).to_have_count(0, timeout=SLOW)
        page.close()
    finally:
        server.terminate()
        server.wait(20)
        context.expected.clear()
