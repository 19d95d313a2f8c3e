"""Every page and menu of the dashboard, checked with axe in both themes, on desktop and phone sizes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browser import SLOW, expect, needs_browser, open_page
from fanfold.transfer.examples import write_examples
from paths import ROOT

pytestmark = needs_browser
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
INK = "getComputedStyle(document.body).color"
SIZES = {"desktop": (1400, 900), "phone": (390, 800)}


def column_menu(page: Any, size: str) -> None:
    page.get_by_role("grid").focus()
    for key in ("ArrowUp", "ArrowRight", "m"):
        page.keyboard.press(key)
    expect(page.get_by_role("menu")).to_be_visible()


def run_list(page: Any, size: str) -> None:
    if size == "phone":
        page.get_by_role("button", name="Runs", exact=True).click()
        expect(page.get_by_role("button", name="hide all")).to_be_visible()
    else:
        page.keyboard.press("e")
        expect(page.get_by_role("button", name="Show the run list")).to_be_visible()


def opened(name: str) -> Callable[[Any, str], None]:
    def act(page: Any, size: str) -> None:
        page.locator("summary", has_text=name).click()
        expect(page.get_by_label("View name")).to_be_visible()

    return act


def grouping(page: Any, size: str) -> None:
    page.locator("summary", has_text="group").click()
    expect(page.get_by_role("group", name="Group runs by")).to_be_visible()


def chart_options(page: Any, size: str) -> None:
    figure = page.locator("figure").first
    figure.focus()
    figure.get_by_role("button", name="Options of").click()
    expect(figure.get_by_role("dialog").get_by_label("Title")).to_be_focused()


def colours(page: Any, size: str) -> None:
    if size == "phone":
        page.get_by_role("button", name="Runs", exact=True).click()
    page.get_by_role("button", name="Color of lr0.01-width256-seed1").click()
    expect(page.get_by_role("dialog", name="Color of")).to_be_visible()


def helped(page: Any, size: str) -> None:
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()


# URL fragment, the locator to wait for, and the action to take then.
STATES: dict[str, tuple[str, str, Callable[[Any, str], None] | None]] = {
    "charts": ("p=demo", "figure[data-painted]", None),
    "saved views": ("p=demo", "figure[data-painted]", opened("views")),
    "groups and pairs": ("p=demo&pairs=1&s=0.4&group=*,config:seed", "figure[data-painted]", grouping),
    "facets and a scale": ("p=demo&colour=metric:train/loss&split=config:width", "figure[data-painted]", None),
    "options of a chart": ("p=demo&y=train/loss=0..3", "figure[data-painted]", chart_options),
    "a chart as large as the screen": ("p=demo&full=train/loss", "figure [aria-label=Legend] li", None),
    "colour of a run": ("p=demo", "figure[data-painted]", colours),
    "help": ("p=demo", "figure", helped),
    "list folded, or drawer": ("p=demo", "figure[data-painted]", run_list),
    "table": ("p=demo&v=table&shade=metric:train/loss", "[role=grid] [role=rowheader]", None),
    "table of groups": ("p=demo&v=table&group=config:lr,config:width", "[role=grid] .total", grouping),
    "menu of a column": ("p=demo&v=table", "[role=grid] [role=rowheader]", column_menu),
    "run": ("p=demo&v=run", "main h2", None),
    "compare": ("p=demo&v=compare", ".commands, [aria-label=Config] tbody tr", None),
    "sweep": ("p=demo&v=sweep", "main canvas", None),
    "media": ("p=demo&v=media&also=val/samples", "main img", None),
    "logs": ("p=demo&v=logs", "[role=log] p", None),
    "alerts": ("p=demo&v=alerts", "main ul li", None),
    "provenance": ("p=demo&v=provenance", "main svg rect", None),
    "profile": ("p=demo&v=profile", "main .page", None),
    "empty": ("p=nothing", "main pre", None),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    os.environ["FANFOLD_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    write_examples(folder)
    return folder


@pytest.fixture(scope="module", params=SIZES)
def look(request, browser):
    """A browser context of one size, shared by all states."""
    wide, high = SIZES[request.param]
    context = browser.new_context(viewport={"width": wide, "height": high}, color_scheme="light", reduced_motion="reduce")
    context.set_default_timeout(SLOW)
    yield request.param, context
    context.close()


@pytest.mark.skipif(not AXE.is_file() and not os.environ.get("CI"), reason="axe is not here: `make web` brings it")
@pytest.mark.parametrize("state", STATES)
def test_no_state_has_a_violation(look, address, state):
    size, context = look
    fragment, there, act = STATES[state]
    page = open_page(context, address, fragment)
    page.locator(there).first.wait_for()
    if act is not None:
        act(page, size)
    page.evaluate(AXE.read_text())
    violations, light = page.evaluate("axe.run()")["violations"], page.evaluate(INK)
    page.emulate_media(color_scheme="dark")
    violations += page.evaluate("axe.run({runOnly: ['color-contrast']})")["violations"]  # only colors differ
    assert page.evaluate(INK) != light
    page.close()
    assert [(one["id"], node["html"][:200]) for one in violations for node in one["nodes"][:3]] == []
