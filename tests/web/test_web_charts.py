"""Chart options: several metrics in one chart, axes, sizes, smoothing, colors and groups, all compared with the data."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from browser import SLOW, expect, needs_browser, open_page, painted, start

pytestmark = needs_browser

# The highest and lowest rows with colored pixels, as fractions of the plot's height.
ROWS = """figure => { const c = figure.querySelector('canvas'), { data, width, height } = c.getContext('2d').getImageData(0, 0, c.width, c.height);
  const rows = []; for (let y = 8; y < height - 20; y++) for (let x = 60; x < width - 12; x++) { const i = 4 * (y * width + x);
    if (Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]) > 30) { rows.push((y - 8) / (height - 28)); break; } }
  return rows.length ? [rows[0], rows.at(-1)] : null; }"""


# The mean height of colored pixels in the left part of a chart, as a fraction of the plot's height.
USUAL = """figure => { const c = figure.querySelector('canvas'), { data, width, height } = c.getContext('2d').getImageData(0, 0, c.width, c.height);
  let sum = 0, n = 0; for (let y = 8; y < height - 20; y++) for (let x = 60; x < width / 3; x++) { const i = 4 * (y * width + x);
    if (Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]) > 30) { sum += (y - 8) / (height - 28); n++; } }
  return sum / n; }"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Six runs with two learning rates and three seeds and easy numbers, and twenty runs of one metric."""
    folder = tmp_path_factory.mktemp("runs")
    os.environ["FANFOLD_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    for lr, values in ((0.1, (2, 3, 4)), (0.01, (5, 6, 10))):
        for seed, value in enumerate(values):
            run = start(folder, "mix", name=f"lr{lr}-s{seed}", config={"lr": lr, "seed": seed, "width": 64})
            for step in range(10):
                run.log(
                    {"train/loss": float(value), "val/loss": value + 1.0, "spiky": 1000.0 if step == 5 else 1 + step / 100},
                    step=step,
                )
            run.finish()
    for i in range(20):
        run = start(folder, "many", name=f"run-{i:02d}", config={"lr": 10.0 ** -(i / 5), "kind": "ab"[i % 2]})
        for step in range(5):
            run.log({"score": float(i)}, step=step)
        run.finish()
    gpus(folder)
    spike = start(folder, "spike", name="spikes")
    for step in range(200):
        spike.log({"loss": 1000.0 if step == 100 else 1 + step % 2}, step=step)
    spike.finish()
    saving = start(folder, "saved", name="saves", stamp=True)
    for step in range(10):
        saving.log({"loss": 1.0 + step}, step=step)
        if step == 3:
            saving.alert("too warm", "of the room", level="warning")
        if step == 6:
            import torch

            torch.save({"w": torch.zeros(3)}, folder.parent / "weights.pt")
    saving.finish()
    return folder


def gpus(folder: Path) -> None:
    for name in ("one", "two"):
        run = start(folder, "gpus", name=name)
        for step in range(3):
            run.log(
                {"loss": 1.0, "system/cpu": 50.0, **{f"system/gpu/{gpu}/power_w": 100.0 * gpu + step for gpu in range(4)}},
                step=step,
            )
        run.finish()


def chart(page, key: str):
    return page.locator(f"figure[data-key='{key}']")


def options(figure, title: str):
    figure.hover()
    figure.get_by_role("button", name=f"Options of {title}", exact=True).click()
    return figure.get_by_role("dialog")


def rows(figure) -> dict[str, list[str]]:
    """Show a chart as a table, and return its rows by name."""
    figure.hover()
    figure.get_by_role("button", name=re.compile("as a table")).click()
    figure.locator("tbody tr").first.wait_for()
    lines = [row.locator("td").all_inner_texts() for row in figure.locator("tbody tr").all()]
    return {name: rest for name, *rest in lines}


# Several metrics


def test_a_metric_is_dragged_onto_another_and_separated_again(context, address):
    page = open_page(context, address, "p=mix")
    loss, other = painted(page, "train/loss"), painted(page, "val/loss")
    expect(loss.get_by_label("Options of train/loss")).to_be_attached()
    page.wait_for_timeout(300)
    box, onto = other.locator(".title").bounding_box(), loss.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + 10, box["y"] + 8)
    page.mouse.down()
    page.mouse.move(onto["x"] + 60, onto["y"] + 60, steps=5)
    expect(loss).to_have_class(re.compile("aim"))
    page.mouse.up()
    mixed = chart(page, "train/loss|val/loss")
    expect(mixed).to_have_attribute("aria-label", re.compile(r"^train/loss\|val/loss: 12 lines, 120 points"))
    expect(chart(page, "val/loss")).to_have_count(0)
    told = rows(mixed)
    assert told["lr0.1-s0 · train"][0] == "2"
    assert told["lr0.01-s2 · val"][0] == "11"
    page.reload()
    expect(mixed).to_have_attribute("aria-label", re.compile(": 12 lines"))
    panel = options(mixed, "train/loss|val/loss")
    panel.get_by_role("button", name="Separate the metrics").click()
    expect(chart(page, "val/loss")).to_have_attribute("aria-label", re.compile("val/loss: 6 runs"))
    page.keyboard.press("Control+z")
    expect(chart(page, "val/loss")).to_have_count(0)


def test_a_rule_names_the_metrics_of_a_chart_and_a_mistake_is_told(context, address):
    page = open_page(context, address, "p=mix")
    panel = options(painted(page, "train/loss"), "train/loss")
    panel.get_by_label("Metrics").fill("(")
    panel.get_by_label("Metrics").press("Tab")
    expect(panel.get_by_role("alert")).to_contain_text("regular expression")
    panel.get_by_label("Metrics").fill("nothing.*")
    panel.get_by_label("Metrics").press("Tab")
    expect(panel.get_by_role("alert")).to_contain_text("No metric")
    panel.get_by_label("Metrics").fill(".*/loss")
    panel.get_by_label("Metrics").press("Tab")
    expect(chart(page, ".*/loss")).to_have_attribute("aria-label", re.compile(": 12 lines"))
    figure = chart(page, ".*/loss")
    figure.get_by_role("dialog").get_by_label("Add a metric").select_option("spiky")
    expect(chart(page, ".*/loss|spiky")).to_have_attribute("aria-label", re.compile(": 18 lines"))


def test_training_and_validation_are_paired(context, address):
    page = open_page(context, address, "p=mix")
    painted(page, "train/loss")
    page.get_by_role("button", name="pair train/val").click()
    expect(chart(page, "train/loss|val/loss")).to_have_attribute("aria-label", re.compile("^train/loss, val/loss: 12 lines"))
    expect(page.locator("figure[data-key]")).to_have_count(2)
    expect(page).to_have_url(re.compile("pairs=1"))


# Axes, title, size


def test_the_y_axis_is_chosen_zoomed_and_reset(context, address):
    page = open_page(context, address, "p=mix")
    figure = painted(page, "train/loss")
    panel = options(figure, "train/loss")
    panel.get_by_label("y from").fill("8")
    panel.get_by_label("y from").press("Tab")
    panel.get_by_label("y to").fill("4")
    panel.get_by_label("y to").press("Tab")
    expect(panel.get_by_role("alert")).to_contain_text("above the upper one")
    panel.get_by_label("y from").fill("-100")
    panel.get_by_label("y from").press("Tab")
    panel.get_by_label("y to").fill("20")
    panel.get_by_label("y to").press("Tab")
    expect(figure.get_by_label("Reset the y axis of train/loss")).to_have_text("y \N{MINUS SIGN}100\N{EN DASH}20 ✕")
    page.keyboard.press("Escape")
    expect(panel).to_have_count(0)
    assert span(page, figure)[1] < 0.25  # all values are near the top of -100 to 20
    figure.get_by_label("Reset the y axis of train/loss").click()
    expect(page).not_to_have_url(re.compile("y="))
    before = span(page, figure)
    assert before[0] < 0.1 < 0.9 < before[1]
    box = figure.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + 150, box["y"] + 12)
    page.mouse.down()
    page.mouse.move(box["x"] + 152, box["y"] + 90, steps=4)
    page.mouse.up()
    label = figure.get_by_label("Reset the y axis of train/loss").inner_text()
    low, high = (float(end) for end in re.fullmatch(r"y (\S+)\N{EN DASH}(\S+) ✕", label).groups())
    assert 5 < low < 7 < 9.5 < high < 10.4
    page.mouse.dblclick(box["x"] + 150, box["y"] + 60)
    expect(figure.get_by_label("Reset the y axis of train/loss")).to_have_count(0)


def span(page, figure) -> list[float]:
    """Return the vertical extent of the lines, once the chart is redrawn."""
    page.wait_for_timeout(400)
    return figure.evaluate(ROWS)


def test_outliers_are_left_out_of_the_axis(context, address):
    page = open_page(context, address, "p=spike")
    figure = painted(page, "loss")
    page.wait_for_timeout(400)
    assert figure.evaluate(USUAL) > 0.9  # 200 values from 1 to 2 are at the bottom of an axis up to 1,000
    page.get_by_role("button", name="ignore outliers").click()
    expect(page).to_have_url(re.compile("clip=1"))
    page.wait_for_timeout(400)
    assert 0.3 < figure.evaluate(USUAL) < 0.7
    figure.locator(".plot").hover(position={"x": 60, "y": 60})
    page.mouse.move(*spot(figure, 100 / 199))
    expect(figure.locator(".tip")).to_contain_text("1,000")  # the tooltip still shows the outlier


def test_a_chart_has_a_title_a_size_and_the_whole_screen(context, address):
    page = open_page(context, address, "p=mix")
    figure = painted(page, "train/loss")
    small = figure.bounding_box()
    panel = options(figure, "train/loss")
    panel.get_by_label("Title").fill("How wrong it is")
    panel.get_by_label("Title").press("Tab")
    expect(figure.locator(".title")).to_have_text("How wrong it is")
    panel.get_by_label("Width").select_option("2")
    panel.get_by_label("Height").select_option("300")
    page.keyboard.press("Escape")
    expect(figure).to_have_attribute("aria-label", re.compile("^How wrong it is"))
    wide = figure.bounding_box()
    assert wide["width"] > 1.9 * small["width"] and wide["height"] > small["height"] + 90
    corner = figure.locator(".corner").bounding_box()
    page.mouse.move(corner["x"] + 5, corner["y"] + 5)
    page.mouse.down()
    page.mouse.move(corner["x"] + 5, corner["y"] + 85, steps=4)
    page.mouse.up()
    assert abs(figure.bounding_box()["height"] - wide["height"] - 80) < 3
    figure.hover()
    figure.get_by_role("button", name="Show How wrong it is in full screen").click()
    full = figure.bounding_box()
    assert (full["x"], full["y"], full["width"], full["height"]) == (0, 0, 1400, 900)
    expect(figure.get_by_role("list", name="Legend").get_by_role("listitem")).to_have_count(6)
    page.keyboard.press("Escape")
    expect(figure.get_by_role("list", name="Legend")).to_have_count(0)
    page.reload()
    expect(figure.locator(".title")).to_have_text("How wrong it is")


def test_smoothing_shows_its_number_and_has_three_kinds(context, address):
    page = open_page(context, address, "p=mix&s=0.6")
    figure = painted(page, "spiky")
    expect(page.get_by_role("toolbar").locator("output")).to_have_text("0.60")
    seen = {}
    for kind, word in (("", "Gaussian"), ("mean", "running mean"), ("ema", "exponential")):
        page.get_by_label("Kind of smoothing").select_option(word)
        page.wait_for_timeout(200)
        figure.locator(".plot").hover(position={"x": 60, "y": 60})
        page.mouse.move(*spot(figure, 0.5555))
        seen[kind] = figure.locator(".tip .smooth").first.inner_text()
    assert len(set(seen.values())) == 3, seen
    expect(figure.locator(".tip .num").first).to_contain_text("1,000")  # the logged value is next to the smoothed one
    expect(page).to_have_url(re.compile("kernel=ema"))
    old = open_page(context, address, "p=mix&s=0.6&ema=1")  # a link from an older version
    expect(old.get_by_label("Kind of smoothing")).to_have_value("ema")


def spot(figure, where: float) -> tuple[float, float]:
    box = figure.locator(".plot").bounding_box()
    return box["x"] + 48 + where * (box["width"] - 58), box["y"] + 60


# Colours


SWATCHES = "() => [...document.querySelectorAll('aside li .swatch line')].map(e => e.getAttribute('stroke') + ' ' + (e.getAttribute('stroke-dasharray') ?? ''))"


def test_every_shown_run_has_a_look_of_its_own_and_a_colour_can_be_picked(context, address):
    page = open_page(context, address, "p=many")
    painted(page, "score")
    looks = page.evaluate(SWATCHES)
    assert len(looks) == len(set(looks)) == 20
    assert len({look.split()[0] for look in looks}) == 16  # the other four are dashed
    page.get_by_role("button", name="Color of run-03").click()
    expect(page.get_by_role("dialog", name="Color of run-03")).to_be_visible()
    page.get_by_role("button", name=re.compile("^Color 9,")).click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    line = page.locator("aside li", has_text="run-03").locator(".swatch line")
    expect(line).to_have_attribute("stroke", "#d21e00")
    page.reload()
    expect(line).to_have_attribute("stroke", "#d21e00")
    page.get_by_role("button", name="Color of run-03").click()
    page.get_by_label("Any color").fill("#123456")
    expect(line).to_have_attribute("stroke", "#123456")
    page.get_by_role("button", name="automatic").click()
    expect(line).not_to_have_attribute("stroke", "#123456")


@pytest.mark.parametrize("field", ["metric:score", "config:lr"])
def test_colours_follow_a_number_on_a_scale(context, address, field):
    page = open_page(context, address, "p=many&o=name")
    painted(page, "score")
    page.locator("summary", has_text="group").click()
    page.get_by_label("Color by").select_option(field)
    legend = page.get_by_role("group", name="Legend")
    expect(legend).to_contain_text("19" if field == "metric:score" else "(log)")
    page.wait_for_timeout(300)
    colours = [tuple(int(n) for n in re.findall(r"\d+", look)) for look in page.evaluate(SWATCHES)]
    assert len(set(colours)) == 20
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b, *_ in colours]
    assert light == sorted(light, reverse=field == "config:lr")  # lr decreases with the run number
    expect(chart(page, "score")).to_have_attribute("aria-label", re.compile("^score: 20 runs"))  # not groups of one


# Groups


def test_groups_by_all_of_the_config_but_the_seed_show_what_was_asked_for(context, address):
    page = open_page(context, address, "p=mix")
    figure = painted(page, "train/loss")
    page.locator("summary", has_text="group").click()
    page.get_by_label("all of the config but these").check()
    expect(page.get_by_role("checkbox", name="seed", exact=True)).to_be_checked()
    expect(figure).to_have_attribute("aria-label", re.compile("^train/loss: 2 groups"))
    told = rows(figure)
    assert {name: row[0] for name, row in told.items()} == {"lr=0.1": "3", "lr=0.01": "7"}  # means of 2, 3, 4 and of 5, 6, 10
    figure.get_by_role("button", name=re.compile("as a table")).click()
    page.locator("summary", has_text="group").click()
    tips = {
        "std": ("", "low 4.3542 · high 9.6458 · n 3"),
        "sem": ("", "low 5.4725 · high 8.5275 · n 3"),
        "ci": ("", "low 0.42706 · high 13.573 · n 3"),
        "": ("", "low 5 lr0.01-s0 · high 10 lr0.01-s2 · n 3"),
    }
    for spread, (_, words) in tips.items():
        page.get_by_label("Band of a group").select_option(spread)
        page.wait_for_timeout(200)
        page.mouse.move(*spot(figure, 0.3))
        page.mouse.move(spot(figure, 0.3)[0], figure.locator(".plot").bounding_box()["y"] + 70)
        near(page, figure, "lr=0.01")
        expect(figure.locator(".tip .rank").first).to_contain_text(words)
    page.get_by_label("Line of a group").select_option("median")
    assert {name: row[0] for name, row in rows(figure).items()} == {"lr=0.1": "3", "lr=0.01": "6"}
    page.locator("summary", has_text="group").click()
    page.get_by_label("Show individual runs").check()
    expect(figure).to_have_attribute("aria-label", re.compile("^train/loss: 6 runs"))


def near(page, figure, name: str) -> None:
    """Move the pointer down a chart until it hits a line."""
    box = figure.locator(".plot").bounding_box()
    for y in range(12, int(box["height"]) - 22, 6):
        page.mouse.move(spot(figure, 0.3)[0], box["y"] + y)
        if figure.locator(".tip tr.on .who").all_inner_texts() == [name]:
            return
    raise AssertionError(f"no line of {name} under the pointer")


def test_the_table_groups_by_several_fields_and_counts_their_runs(context, address):
    page = open_page(context, address, "p=mix&v=table&group=config:lr,config:width")
    heads = page.locator("[role=rowheader] .fold")
    expect(heads).to_have_count(2)
    expect(heads.first).to_contain_text("lr = 0.01, width = 64 3")
    page.get_by_label("Groups show").select_option("median")
    cells = page.locator(".row.total").first.locator("[role=gridcell]")
    names = page.locator("[role=columnheader][data-col]").evaluate_all("all => all.map(e => e.dataset.col)")
    expect(cells.nth(names.index("metric:train/loss"))).to_have_text("6")
    page.get_by_label("Groups show").select_option("count")
    expect(cells.nth(names.index("metric:train/loss"))).to_have_text("3")
    page.locator("summary", has_text="group").click()
    page.get_by_label("all of the config but these").check()
    page.get_by_role("checkbox", name="lr", exact=True).check()
    expect(heads).to_have_count(1)  # width does not differ
    expect(heads.first).to_contain_text("all runs 6")


def test_facets_share_an_axis_until_each_has_its_own(context, address):
    page = open_page(context, address, "p=mix&split=config:lr")
    low = page.locator("figure[data-key='train/loss']", has=page.get_by_text("train/loss · lr=0.1", exact=True))
    low.wait_for()
    page.wait_for_function("() => document.querySelectorAll('figure[data-key=\"train/loss\"][data-painted]').length === 2")
    shared = span(page, low)
    assert shared[0] > 0.65  # 2, 3 and 4 on an axis from 2 to 10
    page.locator("summary", has_text="group").click()
    page.get_by_label("A y axis for each facet").check()
    own = span(page, low)
    assert own[0] < 0.1 < 0.9 < own[1]


# System metrics


def test_system_metrics_are_one_chart_of_each_kind_for_all_gpus(context, address):
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = open_page(context, address, "p=gpus")
    page.get_by_role("button", name=re.compile("system")).click()
    section = page.get_by_role("region", name="system")
    expect(section.locator("figure .title")).to_have_text(["system/cpu · %", "system/gpu/power_w · W"])
    power = section.locator("figure", has_text="power_w")
    expect(power).to_have_attribute("aria-label", re.compile("^system/gpu/power_w · W: 8 lines, 24 points"))
    last = {name: row[0] for name, row in rows(power).items()}
    assert last == {f"{run} · gpu {gpu}": str(100 * gpu + 2) for run in ("one", "two") for gpu in range(4)}
    power.get_by_role("button", name=re.compile("as a table")).click()
    power.hover()
    power.get_by_label("Save system/gpu/power_w").click()
    power.get_by_role("button", name="Embed").click()
    expect(power.get_by_text("The code of the chart is copied.")).to_be_visible()
    there = context.new_page()
    there.goto(re.search(r'src="([^"]+)"', page.evaluate("() => navigator.clipboard.readText()")).group(1).replace("&#38;", "&"))
    expect(there.locator("figure[data-key]")).to_have_attribute("aria-label", re.compile(": 8 lines, 24 points"))


# Annotations, sharing, reloads


def test_alerts_and_checkpoints_are_flags_in_the_charts(context, address):
    page = open_page(context, address, "p=saved")
    figure = painted(page, "loss")
    expect(figure.get_by_role("img", name="alert: too warm")).to_have_attribute("title", "alert: too warm @ 3")
    flag = figure.get_by_role("img", name="checkpoint: weights.pt")
    expect(flag).to_have_attribute("title", "checkpoint: weights.pt @ 6")


def test_one_facet_is_embedded(context, address):
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = open_page(context, address, "p=mix&split=config:lr")
    figure = page.locator("figure[data-key='train/loss']").nth(1)
    figure.scroll_into_view_if_needed()
    figure.hover()
    figure.get_by_label("Save train/loss").click()
    figure.get_by_role("button", name="Embed").click()
    expect(figure.get_by_text("The code of the chart is copied.")).to_be_visible()
    code = page.evaluate("() => navigator.clipboard.readText()")
    there = context.new_page()
    there.goto(re.search(r'src="([^"]+)"', code).group(1).replace("&#38;", "&"))
    expect(there.locator("figure[data-key]")).to_have_attribute("aria-label", re.compile("^train/loss · lr=0.1: 3 runs"))
    expect(there.get_by_role("list", name="Legend").get_by_role("listitem").filter(has_text="lr0.1-")).to_have_count(3)
    expect(there.get_by_text("lr0.01-s0")).to_have_count(0)
    grouped = context.new_page()
    grouped.goto(f"{address}embed#p=mix&key=train/loss&group=config:lr")
    expect(grouped.get_by_role("list", name="Legend").get_by_role("listitem")).to_have_text(
        ["lr=0.01", "lr=0.1", "open in fanfold"]
    )
    mixed = context.new_page()
    mixed.goto(f"{address}embed#p=mix&key=.*/loss")
    expect(mixed.locator("figure[data-key]")).to_have_attribute("aria-label", re.compile(": 12 lines"))


def test_a_change_right_before_a_reload_is_kept(context, address):
    page = open_page(context, address, "p=mix")
    painted(page, "train/loss")
    page.wait_for_timeout(1200)
    page.evaluate(
        "() => { [...document.querySelectorAll('button')].find(e => e.textContent === 'log y').click(); return new Promise(done => setTimeout(() => { location.reload(); done(); })); }"
    )
    page.wait_for_timeout(500)
    expect(page.get_by_role("button", name="log y", exact=True)).to_have_attribute("aria-pressed", "true", timeout=SLOW)
    assert "log=1" in json.dumps(page.evaluate("() => location.hash"))
