"""Samples and media: logged tables, the same row side by side, Plotly figures, images with boxes and masks, shared steps and ranges."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import plotly.graph_objects
import pytest

import fanfold
from browser import expect, needs_browser, open_page, start
from paths import ROOT

pytestmark = needs_browser

ROWS, STEPS = 250, (0, 10, 20)
MASK = [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 0, 0], [2, 2, 0, 0]]
PIXEL = """([canvas, x, y]) => [...canvas.getContext('2d').getImageData(x, y, 1, 1).data]"""


def answer(run: str, step: int, row: int) -> str:
    word = {"base": "slow", "tuned": "quick"}[run] if step else "lazy"
    return f"the {word} fox {row} jumps"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FANFOLD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        for name in ("tuned", "base"):  # the newest is first
            run = start(folder, project="llm", id=name, name=name)
            for step in STEPS:
                picture = np.full((8, 16, 3), 10 * step, np.uint8)
                rows = [[row, f"question {row}", answer(name, step, row), row / 100, fanfold.Image(picture), fanfold.Audio(np.zeros(80, np.float32), sample_rate=8000)]
                        for row in range(ROWS)]  # fmt: skip
                if step == 20:
                    rows.reverse()
                boxes = [
                    {"box": [2, 2, 8, 6], "label": "car", "score": 0.91},
                    {"x": 0.5, "y": 0.5, "width": 0.25, "height": 0.25, "class": "dog"},
                ]
                run.log(
                    {
                        "samples": fanfold.Table(["id", "prompt", "answer", "reward", "picture", "sound"], rows),
                        "seen": fanfold.Image(picture, boxes=boxes, masks=[{"data": MASK, "labels": {"1": "road"}}]),
                        "weights": fanfold.Histogram(np.linspace(-1 - step, 1 + step * (2 if name == "tuned" else 1), 500)),
                    },
                    step=step,
                )
            run.log({"depth": fanfold.Image(np.zeros((8, 8), np.uint8))}, step=15)
            figure = plotly.graph_objects.Figure(
                plotly.graph_objects.Bar(x=["one", "two"], y=[3, 7]), layout={"title": {"text": f"<b>counts</b> of {name}"}}
            )
            run.log({"plot": fanfold.Figure(figure)}, step=20)
            run.finish()
        yield folder


def column(page, number: int) -> list[str]:
    return page.get_by_role("group", name="samples of base").locator(f"tbody tr td:nth-child({number})").all_inner_texts()


def test_rows_are_searched_filtered_sorted_and_saved(context, address):
    page = open_page(context, address, "p=llm&v=media&key=samples&step=0&f=name=base")
    table = page.get_by_role("group", name="samples of base")
    expect(page.get_by_text("100 of 250 rows")).to_be_visible()
    head = table.locator("th").nth(1).bounding_box()
    table.evaluate("box => { box.scrollTop = 1500; }")
    assert table.locator("th").nth(1).bounding_box()["y"] == head["y"]  # the header is sticky
    table.get_by_role("button", name="reward").click()
    table.get_by_role("button", name="reward").click()
    expect(table.locator("tbody tr").first.locator("td").nth(1)).to_have_text("249")
    expect(table.locator("th").nth(4)).to_have_attribute("aria-sort", "descending")
    page.get_by_label("Search rows").fill("question 24")
    expect(page.get_by_text("11 of 250 rows match")).to_be_visible()
    page.set_viewport_size({"width": 560, "height": 900})  # on a narrow screen text wraps, but numbers do not
    number = table.locator("tbody tr").first.locator("td").nth(1).locator(".text")
    assert number.bounding_box()["height"] < 24
    page.set_viewport_size({"width": 1400, "height": 900})
    assert column(page, 2) == [str(row) for row in (*range(249, 239, -1), 24)]
    page.get_by_label("Filter column").select_option("reward")
    page.get_by_label("Filter condition").select_option("<")
    page.get_by_label("Filter value").fill("2.43")
    page.get_by_role("button", name="filter", exact=True).click()
    expect(table.locator("tbody tr")).to_have_count(4)
    assert column(page, 2) == ["242", "241", "240", "24"]
    page.reload()  # all of it is in the URL
    expect(table.locator("tbody tr")).to_have_count(4)
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    found = list(csv.reader(Path(download.value.path()).read_text().splitlines()))
    assert found[0][:4] == ["id", "prompt", "answer", "reward"] and [row[:4] for row in found[1:]] == [
        [str(row), f"question {row}", answer("base", 0, row), f"{row / 100:g}"] for row in (242, 241, 240, 24)
    ]
    page.get_by_role("button", name="Remove the filter reward < 2.43").click()
    expect(table.locator("tbody tr")).to_have_count(11)


def test_pictures_and_sound_are_in_their_cells(context, address):
    page = open_page(context, address, "p=llm&v=media&key=samples&step=10&f=name=base")
    table = page.get_by_role("group", name="samples of base")
    image = table.locator("tbody img").first
    page.wait_for_function("image => image.naturalWidth === 16 && image.naturalHeight === 8", arg=image.element_handle())
    sound = table.locator("audio").first
    assert sound.evaluate("async (sound) => (await (await fetch(sound.src)).arrayBuffer()).byteLength") > 160


def test_the_same_row_is_compared_across_runs_and_steps_word_by_word(context, address):
    page = open_page(context, address, "p=llm&v=media&key=samples&step=20")
    page.get_by_role("group", name="samples of base").get_by_role("button", name="Compare row 3", exact=True).click()
    dialog = page.get_by_role("dialog", name="Row 3 of samples")
    expect(dialog.get_by_label("Rows are the same by")).to_have_value("id")  # here, row 3 has the id 246
    expect(dialog.get_by_role("columnheader")).to_have_text([re.compile("base"), re.compile("tuned")])
    expect(dialog.locator("del")).to_have_text("slow")
    expect(dialog.locator("ins")).to_have_text("quick")
    expect(dialog.get_by_role("row", name="prompt")).to_contain_text("question 246")
    dialog.get_by_role("button", name="across steps").click()
    expect(dialog.get_by_role("columnheader")).to_have_text(
        [re.compile("step 0.*row 246"), re.compile("step 10.*row 246"), re.compile("step 20")]
    )
    expect(dialog.locator("del")).to_have_text(["lazy", "lazy"])
    expect(dialog.locator("ins")).to_have_text(["slow", "slow"])
    dialog.get_by_label("Run of the row").select_option("tuned")
    expect(dialog.locator("ins")).to_have_text(["quick", "quick"])
    dialog.get_by_label("Rows are the same by").select_option("")
    expect(dialog.get_by_role("row", name="prompt").get_by_role("cell").first).to_have_text("question 3")
    dialog.get_by_role("button", name="across runs").click()
    dialog.get_by_label("Step of the row").fill("0")
    expect(dialog.locator("ins")).to_have_count(0)  # at step 0 both had the same text
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


def test_plotly_figures_are_drawn_in_a_frame_without_access(context, address):
    page = open_page(context, address, "p=llm&v=media&key=plot&f=name=base")
    frame = page.locator("iframe[title^='Plotly figure plot of base']")
    expect(frame).to_have_attribute("data-drawn", "true", timeout=60_000)
    assert frame.get_attribute("sandbox") == "allow-scripts"
    inside = page.frame_locator("iframe[title^='Plotly figure plot of base']")
    expect(inside.locator("g.point")).to_have_count(2)
    expect(inside.locator(".gtitle")).to_have_text("counts of base")
    content = frame.element_handle().content_frame()
    assert (
        content.evaluate("() => { try { return parent.document.title; } catch (error) { return error.name; } }")
        == "SecurityError"
    )
    assert content.evaluate("() => fetch('api/projects').then(() => 'reached', () => 'kept out')") == "kept out"
    context.expected[:] = [
        error for error in context.expected if "Content Security Policy" not in error and "Refused" not in error
    ]


def test_several_keys_share_one_step(context, address):
    page = open_page(context, address, "p=llm&v=media&key=seen")
    page.get_by_role("button", name="Add depth").click()
    expect(page.get_by_role("heading", name="depth")).to_be_visible()
    expect(page.locator("#step")).to_have_attribute("max", "3")  # 0, 10, 15 and 20
    page.locator("#step").fill("2")
    expect(page.get_by_role("region", name="seen").get_by_text("step 10").first).to_be_visible()
    expect(page.get_by_role("region", name="depth").get_by_text("step 15").first).to_be_visible()
    page.locator("#step").fill("1")
    expect(page.get_by_role("region", name="depth").get_by_text("Nothing logged up to this step.").first).to_be_visible()
    expect(page).to_have_url(re.compile("also=depth"))
    page.get_by_role("button", name="Remove depth").click()
    expect(page.get_by_role("region", name="depth")).to_have_count(0)
    page.get_by_role("button", name="all", exact=True).click()
    expect(page.get_by_role("heading", level=2)).to_have_text(["samples", "seen", "weights", "depth", "plot"])
    page.get_by_role("button", name="all", exact=True).click()
    expect(page.get_by_role("region")).to_have_count(1)


def test_boxes_and_masks_lie_where_they_were_logged(context, address):
    page = open_page(context, address, "p=llm&v=media&key=seen&f=name=base")
    boxes = page.locator("figure rect")
    expect(boxes).to_have_count(2)
    places = [[float(box.get_attribute(name)) for name in ("x", "y", "width", "height")] for box in boxes.all()]
    assert places == [[2, 2, 6, 4], [8, 4, 4, 2]]  # in pixels, and as fractions of 16 x 8
    expect(page.locator("figure svg text")).to_have_text(["car 0.91", "dog"])
    assert page.locator("figure svg text").first.bounding_box()["height"] > 10  # readable, although the image is 16 pixels wide
    expect(page.locator("figure img.crisp")).to_have_count(1)  # and pixels have sharp edges
    canvas = page.locator("figure canvas")
    page.wait_for_function(
        "canvas => canvas.width === 4 && canvas.getContext('2d').getImageData(3, 0, 1, 1).data[3] > 0",
        arg=canvas.element_handle(),
    )
    colours = [page.evaluate(PIXEL, [canvas.element_handle(), x, y]) for x, y in ((0, 0), (3, 0), (0, 3), (3, 3))]
    assert [colour[3] > 0 for colour in colours] == [False, True, True, False]
    assert colours[1] != colours[2]
    page.get_by_label("Show boxes and masks").uncheck()
    expect(page.locator("figure rect, figure canvas")).to_have_count(0)


def test_the_lightbox_zooms_moves_and_goes_through_images_and_steps(context, address):
    page = open_page(context, address, "p=llm&v=media&key=seen&step=0")
    page.get_by_role("button", name="Enlarge seen of base at step 0").click()
    box = page.get_by_role("dialog", name="Image")
    expect(box.get_by_text("seen · base · step 0")).to_be_visible()
    sheet = box.locator(".sheet")
    before = sheet.bounding_box()
    assert before["width"] > 600  # as large as fits the window
    at = (before["x"] + before["width"] * 0.25, before["y"] + before["height"] * 0.25)
    page.mouse.move(*at)
    page.mouse.wheel(0, -400)
    expect(box.get_by_label("Zoom", exact=True)).not_to_have_text("100%")
    after = sheet.bounding_box()
    for side, size in (("x", "width"), ("y", "height")):  # the point under the pointer stays in place
        place = at[0] if side == "x" else at[1]
        assert abs((place - after[side]) / after[size] - 0.25) < 0.02
    page.mouse.down()
    page.mouse.move(at[0] + 50, at[1] + 30, steps=4)
    page.mouse.up()
    moved = sheet.bounding_box()
    assert abs(moved["x"] - after["x"] - 50) < 2 and abs(moved["y"] - after["y"] - 30) < 2
    box.get_by_role("button", name="fit").click()
    expect(box.get_by_label("Zoom", exact=True)).to_have_text("100%")
    page.keyboard.press("ArrowUp")
    expect(box.get_by_text("seen · base · step 10")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(box.get_by_text("seen · tuned · step 10")).to_be_visible()
    box.get_by_role("button", name="car", exact=True).click()
    expect(box.locator("rect")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(box).to_have_count(0)
    expect(page).to_have_url(re.compile("step=10"))


def test_histograms_of_all_runs_share_one_range(context, address):
    page = open_page(context, address, "p=llm&v=media&key=weights")
    everywhere = page.get_by_role("img", name="distribution over 3 steps, from \N{MINUS SIGN}21 to 41")
    expect(everywhere).to_have_count(2)
    page.get_by_label("Same range for all runs").uncheck()
    expect(everywhere).to_have_count(1)
    expect(page.get_by_role("img", name="distribution over 3 steps, from \N{MINUS SIGN}21 to 21")).to_have_count(1)


def test_samples_and_media_are_accessible_in_both_themes(context, address):
    axe = (ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js").read_text()
    for key, act in (
        ("samples", None),
        ("samples", "Compare row 3"),
        ("seen", None),
        ("seen", "Enlarge seen of base at step 20"),
        ("weights", None),
    ):
        page = open_page(context, address, f"p=llm&v=media&key={key}&also=depth")
        expect(page.locator("figure").first).to_be_visible()
        if act:
            page.get_by_role("button", name=act, exact=True).first.click()
            expect(page.get_by_role("dialog")).to_be_visible()
        page.evaluate(axe)
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            found = page.evaluate("axe.run({})")["violations"]
            assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == [], (key, act, theme)
        page.close()
