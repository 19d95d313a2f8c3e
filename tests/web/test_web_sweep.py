"""The Sweep page: parallel coordinates, importance, contour and a scatter of a hundred thousand runs, compared with the data."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import numpy as np
import pytest

from browser import expect, large_answers, needs_browser, open_page, start
from fanfold.store.importance import importance
from paths import ROOT

pytestmark = needs_browser

COUNT, DOTS = 24, 100_000
OPTIMIZERS = ("adam", "lion", "sgd")


def made() -> list[tuple[dict, float]]:
    chance = np.random.default_rng(5)
    found = []
    for run in range(COUNT):
        config = {"lr": float(f"{10 ** chance.uniform(-4, -1):.3g}"), "opt": OPTIMIZERS[run % 3], "depth": 2 + run % 4, "same": 1}
        found.append((config, round(abs(math.log10(config["lr"]) + 2.5) + (config["opt"] == "sgd") + 0.1, 4)))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FANFOLD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        for number, (config, loss) in enumerate(made()):
            run = start(folder, project="sweep", id=f"r{number:02d}", name=f"r{number:02d}", config=config)
            run.log({"loss": loss + 1}, step=0)
            run.log({"loss": loss}, step=1)
            run.finish()
        yield folder


def strip(page, name: str):
    return page.locator(f"rect.strip[data-axis='{name}']")


def drag(page, box: dict, low: float, high: float) -> None:
    """Drag along an axis from one fraction of its height to another."""
    x = box["x"] + box["width"] / 2
    page.mouse.move(x, box["y"] + box["height"] * (1 - low))
    page.mouse.down()
    page.mouse.move(x, box["y"] + box["height"] * (1 - high), steps=6)
    page.mouse.up()


def test_a_brush_selects_the_runs_whose_values_lie_in_it(context, address):
    page = open_page(context, address, "p=sweep&v=sweep&axes=config:lr,config:opt,metric:loss&axislog=config:lr")
    expect(page.get_by_role("img", name=f"{COUNT} runs over lr, opt, loss")).to_be_visible()
    expect(page.locator("canvas[data-lines]").first).to_have_attribute("data-lines", str(COUNT))
    rates = [config["lr"] for config, _ in made()]
    low, high = math.log(min(rates)), math.log(max(rates))
    drag(page, strip(page, "config:lr").bounding_box(), 0.25, 0.75)
    inside = [lr for lr in rates if 0.25 < (math.log(lr) - low) / (high - low) < 0.75]
    expect(page.get_by_role("status").filter(has_text="selected")).to_have_text(f"{len(inside)} of {COUNT} runs selected")
    drag(page, strip(page, "config:opt").bounding_box(), 0.02, 0.6)  # adam and lion
    both = [1 for config, _ in made() if config["lr"] in inside and config["opt"] != "sgd"]
    expect(page.get_by_role("status").filter(has_text="selected")).to_have_text(f"{len(both)} of {COUNT} runs selected")
    expect(page).to_have_url(re.compile("brush="))
    page.reload()
    expect(page.get_by_role("status").filter(has_text="selected")).to_have_text(f"{len(both)} of {COUNT} runs selected")
    page.get_by_role("button", name="filter to these").click()
    expect(page.get_by_text(f"{len(both)} of {COUNT} runs")).to_be_visible()  # in the run list: a regular filter
    expect(page.get_by_role("img", name=f"{len(both)} runs over lr, opt, loss")).to_be_visible()


def test_axes_are_moved_made_logarithmic_removed_and_brushed_by_keyboard(context, address):
    page = open_page(context, address, "p=sweep&v=sweep")
    shown = page.get_by_role("img", name=f"{COUNT} runs over")
    expect(shown).to_have_attribute("aria-label", f"{COUNT} runs over lr, opt, depth, loss")  # what differs, then the metric
    page.get_by_role("button", name="opt: axis options").press("ArrowLeft")
    expect(shown).to_have_attribute("aria-label", f"{COUNT} runs over opt, lr, depth, loss")
    box = page.get_by_role("button", name="depth: axis options").bounding_box()
    to = page.get_by_role("button", name="opt: axis options").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 8)
    page.mouse.down()
    page.mouse.move(to["x"] + to["width"] / 2, to["y"] + 8, steps=10)
    page.mouse.up()
    expect(shown).to_have_attribute("aria-label", f"{COUNT} runs over depth, opt, lr, loss")
    # The learning rates span powers of ten, so their axis is logarithmic by default.
    for now, then in (("lr log", "lr"), ("lr", "lr log")):
        page.get_by_role("button", name=f"{now}: axis options", exact=True).press("Enter")
        page.get_by_role("menuitemcheckbox", name="Log axis").press("Enter")
        expect(page.get_by_role("button", name=f"{then}: axis options", exact=True)).to_be_visible()
    page.get_by_role("button", name="lr log: axis options").press("Enter")
    page.get_by_role("menuitem", name="Select a range").press("Enter")
    expect(page.get_by_text(f"{COUNT} of {COUNT} runs selected")).to_be_visible()
    page.get_by_role("slider", name="Highest lr").press("PageDown")
    expect(page.get_by_text(f"{COUNT} of {COUNT} runs selected")).to_have_count(0)
    page.get_by_role("slider", name="Highest lr").press("Escape")
    page.get_by_role("button", name="depth: axis options").press("Delete")
    expect(page.get_by_role("img", name=f"{COUNT} runs over opt, lr, loss")).to_be_visible()
    page.get_by_label("Add an axis").select_option("config:same")
    expect(page.get_by_role("img", name=f"{COUNT} runs over opt, lr, same, loss")).to_be_visible()


def test_on_a_phone_axes_do_not_overlap_and_labels_can_be_read(browser, address):
    phone = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    page = open_page(phone, address, "p=sweep&v=sweep")
    titles = page.get_by_role("button", name="axis options")
    expect(titles).to_have_count(4)
    boxes = [title.bounding_box() for title in titles.all()]
    assert all(one["x"] + one["width"] <= two["x"] for one, two in pairwise(boxes))
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    for name in ("loss over lr and depth", "loss over lr,"):
        plot = page.get_by_role("img", name=name)
        plot.scroll_into_view_if_needed()
        assert plot.locator("svg text").first.bounding_box()["height"] > 10
    phone.close()


def test_importance_shown_is_that_of_the_data_with_its_uncertainty(context, address):
    page = open_page(context, address, "p=sweep&v=sweep")
    rows = page.get_by_role("group", name="Importance of config values").locator("tbody tr")
    config, loss = (list(part) for part in zip(*made()[::-1], strict=True))  # newest first, as the store lists them
    expected = importance(config, loss)
    expect(rows).to_have_count(len(expected["fields"]))

    def two(number: float) -> str:
        return f"{round(number, 2) + 0.0:g}".replace("-", "\N{MINUS SIGN}")

    for row, field in zip(rows.all(), expected["fields"], strict=True):
        expect(row.get_by_role("rowheader")).to_contain_text(field["name"])
        expect(row.locator(".value")).to_contain_text(two(field["importance"]))
        expect(row.locator(".value")).to_contain_text(
            f"{two(field['importance_low'])} \N{EN DASH} {two(field['importance_high'])}"
        )
        if field["correlation"] is not None:
            expect(row.locator("td").last).to_contain_text(two(field["correlation"]))
        expect(row.get_by_text("could be chance")).to_have_count(int(field["importance_low"] <= 0))
    expect(page.get_by_text(f"a forest predicts {round(max(0, expected['score']) * 100)}%")).to_be_visible()
    page.get_by_label("Metric of the sweep").select_option("min:loss")
    expect(page.get_by_role("heading", name="Importance for loss · min")).to_be_visible()


def test_a_contour_shows_low_and_high_where_they_are(context, address):
    page = open_page(context, address, "p=sweep&v=sweep&cx=config:lr&cy=config:depth&clog=x")
    contour = page.get_by_role("img", name=f"loss over lr and depth, {COUNT} runs")
    contour.scroll_into_view_if_needed()
    expect(contour).to_be_visible()
    losses = [loss for _, loss in made()]
    expect(page.locator(".scale").last).to_contain_text(f"{min(losses):g}")
    expect(page.locator(".scale").last).to_contain_text(f"{max(losses):g}")
    config, loss = made()[7]
    rates, depths = [one["lr"] for one, _ in made()], [one["depth"] for one, _ in made()]
    box = contour.bounding_box()
    wide, high = box["width"] - 66, box["height"] - 38  # without the axis labels
    across = (math.log(config["lr"]) - math.log(min(rates))) / (math.log(max(rates)) - math.log(min(rates)))
    up = (config["depth"] - min(depths)) / (max(depths) - min(depths))
    page.mouse.move(box["x"] + 56 + (0.04 + 0.92 * across) * wide, box["y"] + 8 + (0.96 - 0.92 * up) * high)
    expect(contour.locator("text.name")).to_have_text(f"r07: {loss:g}")
    page.mouse.down()
    page.mouse.up()
    expect(page.get_by_role("heading", name="r07")).to_be_visible()  # a click opens the run


def test_a_scatter_has_log_axes_and_a_trend(context, address):
    page = open_page(context, address, "p=sweep&v=sweep&sx=config:lr&sy=metric:loss")
    log = page.get_by_role("button", name="log x", exact=True).last
    expect(log).to_have_attribute("aria-pressed", "true")  # the learning rates span powers of ten
    log.click()
    expect(log).to_have_attribute("aria-pressed", "false")
    log.click()
    page.get_by_role("button", name="trend").click()
    scatter = page.get_by_role("img", name=f"loss over lr, {COUNT} runs")
    scatter.scroll_into_view_if_needed()
    expect(scatter.locator("path.trend")).to_have_count(1)
    ticks = [text for text in scatter.locator("svg").first.locator("text[text-anchor=middle]").all_text_contents() if text]
    assert {"0.01", "0.001"} <= set(ticks) or {"1e-3", "0.01"} <= set(ticks)
    a, b = np.array([config["lr"] for config, _ in made()]), np.array([loss for _, loss in made()])
    ranks = [values.argsort().argsort() for values in (a, b)]
    rho = np.corrcoef(*ranks)[0, 1] if len(set(a)) == len(a) and len(set(b)) == len(b) else None
    if rho is not None:
        expect(page.get_by_text(re.compile("^rank correlation ."))).to_contain_text(
            f"{round(rho, 3):g}".replace("-", "\N{MINUS SIGN}")
        )
    page.keyboard.press("t")
    expect(page).to_have_url(re.compile("slx=1&trend=1"))


def test_a_hundred_thousand_runs_are_drawn_and_each_can_be_pointed_at(context, address):
    values = {"metric:x": lambda run: run % 400, "metric:loss": lambda run: run // 400}
    large_answers(context, DOTS, ["metric:loss", "metric:x"], lambda name, run: values[name](run))
    page = open_page(context, address, "p=sweep&v=sweep&sx=metric:x&sy=metric:loss")
    scatter = page.get_by_role("img", name=f"loss over x, {DOTS} runs")
    scatter.scroll_into_view_if_needed()
    expect(scatter.locator("canvas")).to_have_attribute("data-dots", str(DOTS))
    box = scatter.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.55, box["y"] + box["height"] * 0.45)
    expect(scatter.locator("text.name")).to_have_text(re.compile(r"r\d{6}: \d+, \d+"))
    name, x, y = re.match(r"r(\d+): (\d+), (\d+)", scatter.locator("text.name").text_content()).groups()
    assert (int(name) % 400, int(name) // 400) == (int(x), int(y))


def test_the_sweep_page_is_accessible_in_both_themes(context, address):
    axe = (ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js").read_text()
    page = open_page(context, address, "p=sweep&v=sweep&brush=config:lr%3D0.001..0.05")
    expect(page.get_by_role("group", name="Importance of config values")).to_be_visible()
    page.evaluate(axe)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        found = page.evaluate("axe.run({})")["violations"]
        assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == [], theme
