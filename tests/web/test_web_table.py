"""The Table page, used like a user would: statistics, order, pinned and moved columns, groups, bulk edits, ten thousand runs."""

from __future__ import annotations

import csv
import re
import statistics
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import fanfold
from browser import expect, large_answers, needs_browser, open_page, serving, start
from paths import ROOT

pytestmark = needs_browser

LOSS = {"a": [9.0, 1.0, 2.0], "b": [4.0, 3.0, 3.5], "c": [8.0, 2.5, 2.25], "d": [7.0, 0.5, 6.0]}  # at steps 0, 10, 20
COLUMNS = "cols=config:lr,metric:loss,min:loss,min_step:loss,metric:acc"


def sweep(folder: Path, **options) -> None:
    for place, (name, losses) in enumerate(LOSS.items()):
        run = start(folder, project="sweep", id=name, name=name, config={"lr": 10.0 ** -(place % 2), "dim": place}, **options)
        for step, loss in enumerate(losses):
            run.log({"loss": loss, "acc": 1 - loss / 10}, step=10 * step)
        run.finish()


def heads(page) -> list[str]:
    return [text.replace("▲", "").replace("▼", "").strip() for text in page.get_by_role("columnheader").all_inner_texts()]


def names(page) -> list[str]:
    return [text.strip() for text in page.get_by_role("grid").locator("button.name").all_inner_texts()]


def cells(page, name: str) -> list[str]:
    """Return the displayed cells of a run."""
    row = page.get_by_role("row").filter(has=page.get_by_role("button", name=name, exact=True))
    return [text.strip() for text in row.get_by_role("gridcell").all_inner_texts()]


def test_statistics_are_columns_with_the_numbers_that_were_logged(context, tmp_path):
    sweep(tmp_path)
    with serving(context, tmp_path) as address:
        page = open_page(context, address, f"p=sweep&v=table&{COLUMNS}&o=name")
        expect(page.get_by_role("complementary")).to_have_count(0)  # no run list next to it
        assert heads(page) == ["run", "lr", "loss", "loss · min", "loss · best step", "acc"]
        expect(page.get_by_role("gridcell", name="0.5", exact=True)).to_have_count(1)
        for place, (name, losses) in enumerate(LOSS.items()):
            best = losses.index(min(losses)) * 10
            shown = [
                f"{10.0 ** -(place % 2):g}",
                f"{losses[-1]:g}",
                f"{min(losses):g}",
                str(best),
                f"{round(1 - losses[-1] / 10, 5):g}",
            ]
            assert cells(page, name) == shown
        page.locator("summary", has_text="columns").click()
        page.get_by_label("Search columns").fill("loss")
        page.get_by_role("button", name="max of loss").click()
        page.get_by_role("button", name="None", exact=True).click()  # of those that were searched for
        expect(page.locator("[data-col='metric:loss']")).to_have_count(0)
        expect(page.locator("[data-col='metric:acc']")).to_be_visible()
        page.get_by_role("button", name="All", exact=True).click()
        expect(page.locator("[data-col='metric:loss']")).to_be_visible()
        expect(page.locator("[data-col='metric:acc']")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_label("Search columns")).to_have_count(1)
        page.locator("summary", has_text="columns").press("Escape")
        expect(page.get_by_label("Search columns")).to_be_hidden()
        expect(page.get_by_role("columnheader", name="loss · max")).to_be_visible()
        page.wait_for_function(
            "() => [...document.querySelectorAll('[role=gridcell]')].some(cell => cell.innerText.trim() === '9')"
        )
        assert "9" in cells(page, "a")


def test_a_first_click_sorts_the_best_first(context, tmp_path):
    sweep(tmp_path)
    with serving(context, tmp_path) as address:
        page = open_page(context, address, f"p=sweep&v=table&{COLUMNS}")
        grid = page.get_by_role("grid")
        for column, order, expected in (
            ("loss", "ascending", ["a", "c", "b", "d"]),
            ("acc", "descending", ["a", "c", "b", "d"]),
            ("loss · min", "ascending", ["d", "a", "c", "b"]),
        ):
            head = grid.locator("[role=columnheader]").filter(has=page.get_by_role("button", name=column, exact=True))
            head.get_by_role("button", name=column, exact=True).click()
            expect(head).to_have_attribute("aria-sort", order)
            expect(grid.locator("button.name")).to_have_text(expected)
        head.get_by_role("button", name=column, exact=True).click()
        expect(grid.locator("button.name")).to_have_text(expected[::-1])
        head.get_by_role("button", name=column, exact=True).click()
        expect(head).to_have_attribute("aria-sort", "none")


def test_columns_are_pinned_moved_resized_and_coloured_and_stay_so(context, tmp_path):
    sweep(tmp_path)
    with serving(context, tmp_path) as address:
        page = open_page(context, address, f"p=sweep&v=table&{COLUMNS}")
        place = page.locator("[data-col='metric:acc']").bounding_box()
        page.mouse.move(place["x"] + 60, place["y"] + 12)
        page.mouse.down()
        to = page.locator("[data-col='config:lr']").bounding_box()
        page.mouse.move(to["x"] + 30, to["y"] + 12, steps=8)
        page.mouse.up()
        expect(page.get_by_role("columnheader").nth(1)).to_contain_text("acc")
        assert heads(page) == ["run", "acc", "lr", "loss", "loss · min", "loss · best step"]
        assert "o=" not in page.url  # a drag is not a click
        head = page.locator("[data-col='min:loss']")
        head.hover()
        head.get_by_role("button", name="Options of loss · min").click()
        page.get_by_role("menuitemcheckbox", name="Pin to the left").click()
        expect(page.get_by_role("columnheader").nth(1)).to_contain_text("loss · min")
        head.hover()
        head.get_by_role("button", name="Options of loss · min").click()
        page.get_by_role("menuitemcheckbox", name="Color by value").click()
        tints = {name: float(page.get_by_role("row").filter(has=page.get_by_role("button", name=name, exact=True)).get_by_role("gridcell").first.evaluate(
            "cell => getComputedStyle(cell).getPropertyValue('--tint').replace('%', '')")) for name in LOSS}  # fmt: skip
        assert sorted(tints, key=lambda name: -tints[name]) == ["d", "a", "c", "b"]  # the lowest loss has the strongest color
        edge = head.bounding_box()
        page.mouse.move(edge["x"] + edge["width"] - 3, edge["y"] + 10)
        page.mouse.down()
        page.mouse.move(edge["x"] + edge["width"] + 77, edge["y"] + 10, steps=5)
        page.mouse.up()
        assert abs(head.bounding_box()["width"] - edge["width"] - 80) < 3
        wide = head.bounding_box()["width"]
        expect(page).to_have_url(re.compile("freeze=min.*wide=.*shade=min|wide=.*shade="))
        expect(page).to_have_url(re.compile(f"wide=\\S*{round(wide)}"))
        page.reload()
        expect(head).to_be_visible()
        assert heads(page)[:2] == ["run", "loss · min"] and head.bounding_box()["width"] == wide
        ends = "e => { const range = document.createRange(); range.selectNodeContents(e); return range.getBoundingClientRect().right; }"
        number = page.locator("[role=gridcell][aria-colindex='2']").first
        expect(number).to_have_text(re.compile("[0-9]"))
        assert abs(head.locator(".label").evaluate(ends) - number.evaluate(ends)) < 12  # the header is aligned with its numbers


def test_an_order_by_statistics_says_while_it_is_not_final(context, tmp_path):
    sweep(tmp_path)
    held: list = []
    with serving(context, tmp_path) as address:
        context.route(
            "**/api/columns", lambda route: held.append(route) if "min:loss" in route.request.post_data else route.continue_()
        )
        page = open_page(context, address, "p=sweep&v=table&cols=min:loss&o=min:loss")
        expect(page.get_by_text("Reading statistics of 4 runs…")).to_be_visible()
        for route in held:
            route.continue_()
        expect(page.get_by_text("Reading statistics")).to_have_count(0)
        expect(page.get_by_role("grid").locator("button.name")).to_have_text(["d", "a", "c", "b"])
        context.unroute("**/api/columns")


def test_groups_are_folded_rows_with_what_their_runs_come_to(context, tmp_path):
    sweep(tmp_path)
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "p=sweep&v=table&cols=metric:loss,min:loss&group=config:lr&o=name")
        groups = page.locator(".row.total")
        expect(groups).to_have_count(2)
        low, high = ([LOSS[name] for name in pair] for pair in ("bd", "ac"))  # lr 0.1 and lr 1

        def shown(values: list[float], spread: float) -> str:
            digits = max(0, 1 - int(f"{spread:e}".split("e")[1]))
            mean = Decimal(statistics.mean(values)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
            return f"{float(mean):g} ± {float(f'{spread:.2g}'):g}"

        for row, group in ((groups.first, low), (groups.last, high)):
            last, least = [one[-1] for one in group], [min(one) for one in group]
            expect(row.get_by_role("gridcell")).to_have_text(
                [shown(last, statistics.stdev(last)), shown(least, statistics.stdev(least))]
            )
        page.get_by_label("Groups show").select_option("range")
        expect(groups.first.get_by_role("gridcell").first).to_have_text("3.5 \N{EN DASH} 6")
        page.get_by_label("Groups show").select_option("median")
        expect(groups.first.get_by_role("gridcell").first).to_have_text("4.75")
        groups.first.get_by_role("button", name=re.compile("lr = 0.1")).click()
        expect(page.get_by_role("grid").locator("button.name")).to_have_text(["a", "c"])
        expect(page).to_have_url(re.compile("closed=lr"))
        page.reload()
        expect(page.get_by_role("grid").locator("button.name")).to_have_text(["a", "c"])


def test_groups_are_sorted_by_what_their_runs_come_to_and_keep_their_colors(context, tmp_path):
    sweep(tmp_path)
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "p=sweep&v=table&cols=status,metric:loss&group=config:lr")
        groups = page.locator(".row.total")
        expect(groups).to_have_text([re.compile(r"lr = 0\.1 2 runs\s*finished"), re.compile(r"lr = 1 2 runs\s*finished")])

        def colors() -> dict[str, str]:
            dots = page.get_by_role("grid").locator("button.dot")
            return dict(
                zip(names(page), dots.evaluate_all("all => all.map(e => e.style.getPropertyValue('--colour'))"), strict=True)
            )

        before = colors()
        assert before["a"] == before["c"] != before["b"] == before["d"]
        page.locator("[data-col='metric:loss'] .label").click()  # the lowest mean first: 2 and 2.25 before 3.5 and 6
        expect(groups).to_have_text([re.compile("lr = 1 "), re.compile(r"lr = 0\.1 ")])
        assert names(page) == ["a", "c", "b", "d"]
        assert colors() == before


def test_on_a_phone_what_opens_under_a_button_is_within_the_screen(browser, tmp_path, context):
    sweep(tmp_path, tags=["old"])
    with serving(context, tmp_path) as address:
        phone = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
        page = open_page(phone, address, "p=sweep&v=table")
        page.get_by_role("grid").get_by_label("Select a", exact=True).click()
        expect(page.get_by_text("1 selected")).to_be_visible()
        assert page.locator(".dock").bounding_box()["height"] < 844 / 5
        for name in ("columns", "group", "tag", "move"):
            page.locator("summary", has_text=name).click()
            box = page.locator("details[open] > .panel").bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= 390, name
            page.keyboard.press("Escape")
            expect(page.locator("details[open]")).to_have_count(0)
        phone.close()


def test_many_runs_are_selected_tagged_moved_and_deleted(context, tmp_path):
    sweep(tmp_path, tags=["old"])
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "p=sweep&v=table&cols=tags&o=name")
        grid = page.get_by_role("grid")
        grid.get_by_label("Select a", exact=True).click()
        grid.get_by_label("Select c", exact=True).click(modifiers=["Shift"])
        expect(page.get_by_text("3 selected")).to_be_visible()
        grid.get_by_label("Select all runs").check()
        expect(page.get_by_text("4 selected")).to_be_visible()
        assert page.locator(".dock").bounding_box()["height"] < 60  # one line
        page.locator("summary", has_text="tag").click()
        page.get_by_label("Add a tag").fill("new")
        page.get_by_role("button", name="add", exact=True).click()
        expect(grid.get_by_role("gridcell")).to_have_text(["old, new"] * 4)
        page.locator("summary", has_text="tag").click()
        page.get_by_role("button", name="Remove tag old").click()
        expect(grid.get_by_role("gridcell")).to_have_text(["new"] * 4)
        grid.get_by_label("Select all runs").uncheck()
        for name in ("a", "b"):
            grid.get_by_label(f"Select {name}", exact=True).click()
        page.locator("summary", has_text="move").click()
        page.get_by_label("Move to project").fill("kept")
        page.get_by_role("button", name="move", exact=True).click()
        expect(grid.locator("button.name")).to_have_text(["c", "d"])
        expect(page.get_by_text("2 runs moved to kept.")).to_be_visible()
        grid.get_by_label("Select c", exact=True).click()
        page.get_by_role("button", name="delete", exact=True).click()
        expect(grid.locator("button.name")).to_have_text(["d"])
    found = {run.name: (run.project, run.tags) for run in fanfold.runs(dir=tmp_path)}
    assert found == {"a": ("kept", ["new"]), "b": ("kept", ["new"]), "d": ("sweep", ["new"])}


def test_tags_and_notes_are_changed_where_they_stand(context, tmp_path):
    sweep(tmp_path)
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "p=sweep&v=table&cols=tags,notes&o=name")
        grid = page.get_by_role("grid")
        grid.get_by_role("gridcell").first.dblclick()
        page.get_by_label("Tags of a").fill("one, two,, one")
        page.keyboard.press("Enter")
        expect(grid.get_by_role("gridcell").first).to_have_text("one, two")
        expect(grid).to_be_focused()
        page.keyboard.press("ArrowRight")  # to the notes cell
        page.keyboard.press("Enter")
        page.get_by_label("Notes of a").fill("first line\nsecond")
        page.keyboard.press("Control+Enter")
        expect(grid.get_by_role("gridcell").nth(1)).to_contain_text("first line")
        page.keyboard.press("F2")
        page.get_by_label("Notes of a").fill("thrown away")
        page.keyboard.press("Escape")
        expect(page.get_by_label("Notes of a")).to_have_count(0)
        page.wait_for_timeout(200)
    run = next(run for run in fanfold.runs("sweep", dir=tmp_path) if run.name == "a")
    assert (run.tags, run.notes) == (["one", "two"], "first line\nsecond")


def test_the_head_is_reached_sorted_and_moved_by_keyboard(context, tmp_path):
    sweep(tmp_path)
    with serving(context, tmp_path) as address:
        page = open_page(context, address, f"p=sweep&v=table&{COLUMNS}")
        grid = page.get_by_role("grid")
        grid.focus()
        page.keyboard.press("ArrowUp")
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        expect(page.locator("#table-at")).to_contain_text("loss")
        page.keyboard.press("Enter")
        expect(page.locator("[data-col='metric:loss']")).to_have_attribute("aria-sort", "ascending")
        page.keyboard.press("Shift+ArrowLeft")
        expect(page.get_by_role("columnheader").nth(1)).to_contain_text("loss")
        assert heads(page)[:3] == ["run", "loss", "lr"]
        expect(page.locator("#table-at")).to_contain_text("loss")
        page.keyboard.press("m")
        page.keyboard.press("ArrowDown")
        expect(page.get_by_role("menuitemcheckbox", name="Sort descending")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.get_by_role("menu")).to_have_count(0)
        expect(grid).to_be_focused()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Space")
        page.keyboard.press("Shift+ArrowDown")
        expect(page.get_by_text("2 selected")).to_be_visible()
        page.keyboard.press("Control+a")
        expect(page.get_by_text("4 selected")).to_be_visible()


def test_what_is_shown_is_saved_as_csv(context, tmp_path):
    sweep(tmp_path, notes="=1+1")
    with serving(context, tmp_path) as address:
        page = open_page(context, address, f"p=sweep&v=table&{COLUMNS},notes&o=min:loss")
        expect(page.get_by_role("gridcell", name="0.5", exact=True)).to_be_visible()
        with page.expect_download() as download:
            page.get_by_role("button", name="CSV").click()
        found = list(csv.reader(Path(download.value.path()).read_text().splitlines()))
        assert found[0] == ["id", "name", "lr", "loss", "loss · min", "loss · best step", "acc", "notes"]
        assert [row[1] for row in found[1:]] == ["d", "a", "c", "b"]
        assert float(found[1][4]) == 0.5 and found[1][-1] == "'=1+1"  # not a formula


def test_the_table_is_accessible_in_both_themes(context, tmp_path):
    axe = (ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js").read_text()
    sweep(tmp_path, tags=["x"])
    with serving(context, tmp_path) as address:
        page = open_page(
            context, address, f"p=sweep&v=table&{COLUMNS},tags&freeze=min:loss&shade=min:loss,metric:acc&split=config:lr&base=a"
        )
        expect(page.get_by_role("gridcell").first).to_be_visible()
        page.get_by_label("Select a", exact=True).click()
        page.locator("summary", has_text="tag").click()
        page.evaluate(axe)
        for opened in (False, True):
            if opened:
                page.locator("[data-col='min:loss']").hover()
                page.get_by_role("button", name="Options of loss · min").click()
            for theme in ("light", "dark"):
                page.emulate_media(color_scheme=theme)
                found = page.evaluate("axe.run({})")["violations"]
                assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == [], theme


RUNS, WIDE, NODES = 10_000, 1_000, 4_000
FRAMES = """async (grid) => { const found = [];
  for (let i = 0; i < 40; i++) { grid.scrollTop += 700; grid.scrollLeft += 300; const at = performance.now(); await new Promise(requestAnimationFrame); await new Promise(requestAnimationFrame); found.push(performance.now() - at); }
  return found; }"""


def test_ten_thousand_runs_of_a_thousand_columns_scroll_and_stay_small(context, tmp_path):
    """The page has no more elements than with ten runs, and shows the right numbers at any scroll position."""
    sweep(tmp_path)
    keys = [f"m{key:04d}" for key in range(WIDE)]
    with serving(context, tmp_path) as address:
        asked = large_answers(context, RUNS, [f"metric:{key}" for key in keys], lambda name, run: run * 10 + int(name[-1]))
        page = open_page(context, address, "p=sweep&v=table&o=name&cols=" + ",".join(f"metric:{key}" for key in keys))
        grid = page.get_by_role("grid")
        expect(grid).to_have_attribute("aria-rowcount", str(RUNS + 1))
        expect(page.get_by_text("r000000").first).to_be_visible()
        before = len(asked)
        frames = grid.evaluate(FRAMES)
        assert len(frames) == 40 and len(asked) - before < 40  # columns scrolled past are not fetched one by one
        for row, column in ((5000, 500), (9990, 990)):
            grid.evaluate(f"grid => {{ grid.scrollTop = 28 * {row}; grid.scrollLeft = 112 * {column}; }}")
            expect(page.get_by_text(f"r{row + 5:06d}", exact=True)).to_be_visible()
            expect(page.get_by_role("gridcell", name=f"{(row + 5) * 10 + 5:,}", exact=True).first).to_be_visible()
            assert page.evaluate("document.querySelectorAll('*').length") < NODES
        grid.locator("[data-col='metric:m0995']").get_by_role("button", name="m0995", exact=True).click()
        grid.locator("[data-col='metric:m0995']").get_by_role("button", name="m0995", exact=True).click()
        grid.evaluate("grid => { grid.scrollTop = 0; }")
        expect(grid.locator("button.name").first).to_have_text(f"r{RUNS - 1:06d}")
