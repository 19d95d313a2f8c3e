"""The dashboard's pages with data of every size: how often they send requests, whose data they show, and what their URL keeps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest

import fanfold
from browser import expect, needs_browser, open_page, serving, start
from fanfold.cli import main
from fanfold.probes.native import build
from fanfold.store.ops import steps_of
from ops_child import program
from ops_child import run as run_program
from paths import ROOT

pytestmark = needs_browser
NO_CLIPBOARD = "Object.defineProperty(navigator, 'clipboard', {value: undefined})"  # as on plain http from another node
DASH = "\N{EN DASH}"
SELECTED = "() => getSelection().toString()"
OPERATORS = """
import torch
for name, work in (("adds", torch.add), ("divides", torch.div)):
    run = begin({"every": 1}, name=name)
    for _ in range(8):
        work(torch.ones(4), 2.0)
    run.finish()
begin(True, name="short").finish()
"""
WORKERS = """
import torch
class Waves(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.linspace(0, index, 256)
run = begin({"every": 2}, name="loads")
weights = torch.zeros(256, requires_grad=True)
optimizer = torch.optim.SGD([weights], 1e-3)
for batch in torch.utils.data.DataLoader(Waves(), batch_size=8, num_workers=2):
    (batch @ weights).sum().backward()
    optimizer.step()
run.finish()
"""
TWO_RANKS = """
import torch
run = begin({"every": 1}, name="two", stamp=True)
for _ in range(8): torch.add(torch.ones(4), 2.0)
for i in range(15): torch.save(torch.ones(2), f"a-rather-long-folder-name/model-{i}.pt"); torch.save(torch.ones(2), "a-rather-long-folder-name/last.pt")
run.finish()
"""
IN_A_REPOSITORY = "import fanfold, sys\nfanfold.init('code', name=sys.argv[1], system=False, quiet=True).finish()\n"


def finished(folder, name: str, values: dict, **options) -> str:
    run = start(folder, name=name, **options)
    run.log(values, step=0)
    run.finish()
    return run.id


def held(page, fragment: str) -> None:
    """Expect something in the URL, before and after a reload."""
    expect(page).to_have_url(re.compile(rf"[#&]{re.escape(fragment)}(&|$)"))
    page.reload()


def accessible(page) -> None:
    """Expect the current page to be accessible in both themes."""
    axe = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
    if not axe.is_file() and not os.environ.get("CI"):
        return  # `make web` installs it
    page.evaluate(axe.read_text())
    found = []
    for theme, rules in (("light", "{}"), ("dark", "{runOnly: ['color-contrast']}")):  # only colors differ
        page.emulate_media(color_scheme=theme)
        violations = page.evaluate(f"axe.run({rules})")["violations"]
        found += [(theme, one["id"], one["nodes"][0]["html"][:160]) for one in violations]
    assert found == []


# Compare


def test_compare_asks_once_for_a_run_with_news(context, tmp_path):
    still = finished(tmp_path, "still", {"loss": 1.0})
    live = start(tmp_path, name="live")
    live.log({"loss": 2.0}, step=0)
    with serving(context, tmp_path) as address:
        page = open_page(context, address, f"p=llm&v=compare&with={still},{live.id}")
        expect(page.get_by_role("group", name="Metrics")).to_contain_text("2")
        expect(page.locator(".live")).to_contain_text("live")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "api/run?" in request.url else None)
        for step, loss in enumerate((7.5, 8.5, 9.5), 1):
            live.log({"loss": loss}, step=step)
            expect(page.get_by_role("group", name="Metrics")).to_contain_text(str(loss))
            expect(page.locator("aside")).to_contain_text(str(loss))  # the list is fetched shortly after the update
        assert 3 <= len(asked) <= 6  # a point may arrive with another update, such as a heartbeat
        assert all(live.id in url for url in asked)
    live.finish()


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """Two runs of a script from two commits, the second with an uncommitted change."""
    repository, runs = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("runs")
    script = repository / "train.py"

    def git(*words: str) -> str:
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *settings, *words], cwd=repository, check=True, capture_output=True, text=True
        ).stdout.strip()

    def train(name: str) -> None:
        env = {**os.environ, "FANFOLD_DIR": str(runs)}
        subprocess.run([sys.executable, str(script), name], cwd=repository, env=env, check=True, timeout=120, capture_output=True)

    script.write_text(IN_A_REPOSITORY)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    train("before")
    first = git("rev-parse", "HEAD")
    git("commit", "-q", "--allow-empty", "-m", "second")
    script.write_text(IN_A_REPOSITORY + "# not committed\n")
    train("after")
    return runs, first, git("rev-parse", "HEAD")


def test_compare_names_the_commits_between_two_runs_and_what_was_not_committed(context, code):
    folder, first, second = code
    found = {run.name: run.id for run in fanfold.runs(dir=folder)}
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    with serving(context, folder) as address:
        page = open_page(context, address, f"p=code&v=compare&with={found['before']},{found['after']}")
        command = f"git diff {first} {second}"
        expect(page.get_by_text(command)).to_be_visible()
        page.get_by_role("button", name="copy the command").click()
        expect(page.get_by_role("main")).to_contain_text("copied")
        assert page.evaluate("() => navigator.clipboard.readText()") == command
        page.get_by_role("button", name="Show differences").click()
        expect(page.locator("pre ins")).to_contain_text("+# not committed")
        assert first not in page.locator("pre").inner_text()  # already shown above
        accessible(page)
        page.get_by_label("Remove after").click()
        expect(page.locator("pre ins")).to_have_count(0)  # it belonged to another pair of runs


def test_compare_keeps_what_is_shown_in_the_address(context, tmp_path):
    for number in range(3):
        finished(
            tmp_path, f"run-{number}", {"loss": number + 0.5, "acc": 1.0}, config={"lr": 10.0**-number, "seed": 7, "dim": number}
        )
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "p=llm&v=compare")
        settings = page.get_by_role("group", name="Config")
        expect(settings).to_contain_text("lr")
        expect(settings).not_to_contain_text("seed")
        page.get_by_label("Show identical values").check()
        held(page, "same=1")
        expect(settings).to_contain_text("seed")


# Profile


def test_profile_shows_the_operators_of_the_run_that_is_picked(context, tmp_path):
    build.build()
    run_program(program(tmp_path, OPERATORS), FANFOLD_DIR=str(tmp_path / "runs"))
    found = {run.name: run.id for run in fanfold.runs(dir=tmp_path / "runs")}
    with serving(context, tmp_path / "runs") as address:
        page = open_page(context, address, f"p=p&v=profile&r={found['adds']}")
        table, icicle = page.get_by_role("main").locator("table"), page.get_by_label(re.compile("^Time by thread"))
        expect(table).to_contain_text("aten::add")
        expect(icicle).to_be_visible()
        box = icicle.bounding_box()
        icicle.click(position={"x": box["width"] / 4, "y": box["height"] - 5})
        page.mouse.move(0, 0)
        expect(page.get_by_text("Click the top row to zoom out")).to_be_visible()
        page.get_by_label("Run", exact=True).select_option(found["divides"])
        expect(table).to_contain_text("aten::div")
        expect(table).not_to_contain_text("aten::add")
        expect(page.get_by_text("Click a box to zoom in")).to_be_visible()
        accessible(page)
        page.get_by_role("button", name="operator").click()
        expect(page.get_by_role("columnheader", name="operator")).to_have_attribute("aria-sort", "ascending")
        page.get_by_label("Search operators").fill("div")
        expect(page).to_have_url(re.compile("by=op"))
        held(page, "op=div")
        expect(table.locator("tbody tr")).to_have_count(1)
        expect(page.get_by_role("columnheader", name="operator")).to_have_attribute("aria-sort", "ascending")
        page.get_by_label("Run", exact=True).select_option(found["short"])
        expect(page.get_by_text("No operators recorded yet")).to_be_visible()


def test_workers_are_named_and_what_is_not_known_of_them_is_left_blank(context, tmp_path, capsys):
    build.build()
    run_program(program(tmp_path, WORKERS), FANFOLD_DIR=str(tmp_path / "runs"))
    (stored,) = fanfold.runs(dir=tmp_path / "runs")
    assert main(["ops", stored.id, "--by", "role", "--top", "0", "--json", "--dir", str(tmp_path / "runs")]) == 0
    wanted = {(row["op"], row["role"]): row for row in json.loads(capsys.readouterr().out)}
    with serving(context, tmp_path / "runs") as address:
        page = open_page(context, address, f"p=p&v=profile&r={stored.id}")
        (taken,) = steps_of(stored)
        assert 0 < taken["observed_steps"] < taken["steps"] == 8
        expect(page.get_by_text(f"{taken['observed_steps']} of 8 steps recorded in full", exact=True)).to_be_visible()
        linspace = page.locator("tr", has=page.get_by_text("aten::linspace", exact=True))
        expect(linspace).to_have_count(1)
        cells = linspace.locator("td").all_inner_texts()
        assert cells[1] == "worker · sampled" and cells[3] == cells[-1] == DASH
        row = wanted["aten::linspace", "worker"]
        assert [nanoseconds(cell) for cell in cells[4:8]] == pytest.approx(
            [row[name] for name in ("total_ns", "mean_ns", "p99_ns", "max_ns")], rel=0.01
        )
        figures = [[cell if cell == DASH else nanoseconds(cell) for cell in some.locator("td").all_inner_texts()[3:5]]
                   for some in page.locator("main tbody tr").all()]  # fmt: skip
        placed = [total if own == DASH else own for own, total in figures]
        assert placed == sorted(placed, reverse=True)
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.get_by_role("region", name="Operators", exact=True).evaluate("table => table.scrollWidth > table.clientWidth")
        accessible(page)
        page.get_by_label("Search operators").fill("no such thing")
        expect(page.get_by_text("No operator matches no such thing")).to_be_visible()
        page.get_by_label("Search operators").fill("worker")
        expect(linspace).to_be_visible()


def nanoseconds(cell: str) -> float:
    number, unit = cell.split()
    return float(number) * {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]


def test_ranks_are_added_up_or_picked_and_every_file_saved_is_listed(context, tmp_path, monkeypatch, capsys):
    build.build()
    (tmp_path / "a-rather-long-folder-name").mkdir()
    monkeypatch.chdir(tmp_path)
    path = program(tmp_path, TWO_RANKS)
    for rank in "01":
        env = {"FANFOLD_RANK": rank, "FANFOLD_WORLD_SIZE": "2", "FANFOLD_RUN_ID": "two"}
        run_program(path, FANFOLD_DIR=str(tmp_path / "runs"), **env)
    assert main(["show", "two", "--dir", str(tmp_path / "runs")]) == 0
    assert re.search(r"saved +last.pt .*, rank 1", capsys.readouterr().out)
    with serving(context, tmp_path / "runs") as address:
        page = open_page(context, address, "p=p&v=profile&r=two")
        table = page.get_by_role("main").locator("table")
        add = table.locator("tr", has=page.get_by_text("aten::add", exact=True))
        expect(add).to_have_count(1)
        expect(add).to_contain_text("16")
        bars = [box["x"] for box in (bar.bounding_box() for bar in table.locator("meter").all())]
        assert max(bars) - min(bars) < 1
        page.set_viewport_size({"width": 700, "height": 900})
        table.evaluate(
            "table => table.querySelectorAll('td.num').forEach(cell => { if (/s$/.test(cell.textContent)) cell.textContent = '1.23 ms' })"
        )
        fits = "table => table.scrollWidth <= table.parentElement.clientWidth"
        page.wait_for_function(fits, arg=table.element_handle())  # whatever the times are
        assert add.evaluate("row => row.clientHeight") < 40  # a number and its unit stay on one line
        page.get_by_label("Rank", exact=True).select_option("1")
        expect(add.locator("td").nth(2)).to_have_text("8")
        held(page, "rank=1")
        expect(add.locator("td").nth(2)).to_have_text("8")
        accessible(page)
        page.goto(f"{address}#p=p&v=run&r=two")
        files = page.locator("section", has_text="Model files")
        expect(files.locator("tbody tr")).to_have_count(60)
        expect(files.locator("tbody tr").first).to_contain_text("last.pt")
        page.goto(f"{address}#p=p&v=provenance&r=two")
        expect(page.get_by_role("img", name="16 results")).to_be_visible()  # a file that was saved repeatedly counts once
        expect(page.get_by_text("The newest 12 of 16")).to_be_visible()
        expect(page.locator("svg text.title", has_text="last.pt")).to_have_count(1)
        accessible(page)


# Black box


def test_a_hang_and_a_memory_error_are_on_the_page_of_the_run(context, tmp_path):
    spot = {"file": "/home/me/train.py", "line": 34, "name": "fetch", "code": "reply = server.recv(4096)"}
    stands = [
        {"rank": 0, "state": "waiting", "seconds": 62.0, "step": 4},
        {"rank": 1, "state": "still", "seconds": 61.0, "where": [spot]},
    ]
    hang = {"text": "", "culprits": [1], "ranks": stands}
    threads = {
        "pulse": None,
        "threads": [{"id": 2, "name": "loader", "frames": []}, {"id": 1, "name": "MainThread", "frames": [spot]}],
    }
    memory = {"requested": 2 << 30, "allocated": 8 << 30, "by_stack": [{"size": 6 << 30, "count": 2, "where": [spot]}]}
    run = fanfold.init("p", dir=tmp_path, id="stuck", quiet=True, system=False)
    run.log({"loss": 1.0})
    for second in range(3):
        run._writer.row({"system/gpu/0/memory_gb": 2.0 + second}, "d", time_ns=time.time_ns(), step=None, origin="system")
    for facts in (
        {"kind": "stacks", "id": "a", "who": 1, "data": threads},
        {"kind": "hang", "id": "a", "data": hang},
        {"kind": "memory", "data": memory},
    ):
        run._recorder.event("blackbox", facts)
    run.finish()
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "p=p&v=run&r=stuck")
        hangs, out = page.get_by_label("Hang", exact=True), page.get_by_role("region", name="Out of GPU memory", exact=True)
        expect(hangs.locator("tr.bad")).to_contain_text("train.py:34 in fetch: reply = server.recv(4096)")
        hangs.locator("summary").first.click()
        expect(hangs.locator("details").first).to_contain_text("rank 1, thread MainThread")
        expect(hangs.locator("pre").first).to_contain_text("server.recv(4096)")
        expect(out).to_contain_text("6.00 GiB")
        expect(out.get_by_role("img", name="system/gpu/0/memory_gb: 2.00 to 4.00 GB, highest 4.00")).to_be_visible()
        accessible(page)
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == 390


# Media


def test_texts_of_one_step_are_compared_and_long_ones_are_shown(context, tmp_path):
    long = " ".join(f"word{number}" for number in range(900))
    assert len(long) > 4096
    finished(tmp_path, "b", {"short": "the red sea", "long": fanfold.Text(long)})
    finished(tmp_path, "a", {"short": "the blue sea", "long": fanfold.Text(long.replace("word450", "another"))})
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "p=llm&v=media&key=short")
        page.get_by_label("show differences").check()
        expect(page.locator("ins")).to_have_text("red")
        page.get_by_role("button", name="long", exact=True).click()
        expect(page.locator("del")).to_have_text("another")
        expect(page.locator("ins")).to_have_text("word450")
        accessible(page)
        held(page, "changes=1")
        expect(page.locator("ins")).to_have_text("word450")
        page.get_by_label("show differences").uncheck()
        expect(page.get_by_text("word899")).to_have_count(2)


def test_a_text_beyond_patience_is_cut_and_offered_whole(context, tmp_path):
    finished(tmp_path, "huge", {"text": fanfold.Text("first\n" + "é\n" * 200_000 + "last")})
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "p=llm&v=media&key=text")
        expect(page.get_by_text("The first 256.0 KiB of 585.9 KiB")).to_be_visible()
        expect(page.locator("figure .text")).to_have_text(re.compile("^first\n(é\n)+é?$"))
        expect(page.get_by_role("link", name="all of it")).to_have_attribute("href", re.compile("^media.*ext=txt"))


def test_every_row_of_a_table_can_be_reached(context, tmp_path):
    table = fanfold.Table(["n", "name"], [[number, f"row-{number}"] for number in range(250)])
    finished(tmp_path, "rows", {"table": table})
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "p=llm&v=media&key=table")
        expect(page.get_by_text("100 of 250 rows")).to_be_visible()
        for count in (200, 250):
            page.get_by_role("button", name="more rows").click()
            expect(page.get_by_role("main").locator("tbody tr")).to_have_count(count)
        expect(page.get_by_role("button", name="more rows")).to_have_count(0)
        assert page.locator("td >> text=/^row-/").all_text_contents() == [f"row-{number}" for number in range(250)]


# Run and Logs


def test_the_run_page_tells_why_a_run_stopped_early(context, tmp_path):
    import optuna

    with pytest.raises(optuna.TrialPruned), start(tmp_path, name="pruned") as run:
        raise optuna.TrialPruned("worse than the median")
    with serving(context, tmp_path) as address:
        page = open_page(context, address, f"p=llm&v=run&r={run.id}")
        expect(page.get_by_text("stopped early by optuna.exceptions.TrialPruned: worse than the median")).to_be_visible()


def test_a_note_keeps_its_lines(context, tmp_path):
    id = finished(tmp_path, "noted", {"loss": 1.0}, notes="one\ntwo")
    with serving(context, tmp_path) as address:
        page = open_page(context, address, f"p=llm&v=run&r={id}")
        field = page.get_by_label("New notes")
        page.get_by_role("button", name="note", exact=True).click()
        expect(field).to_have_value("one\ntwo")
        accessible(page)
        field.press("Control+End")
        field.press("Enter")
        page.keyboard.type("three")
        field.press("Control+Enter")
        expect(field).to_have_count(0)
        expect(page.locator(".note")).to_have_text("one\ntwo\nthree", use_inner_text=True)
        page.get_by_role("button", name="note", exact=True).click()
        field.fill("four")
        field.press("Escape")
        expect(field).to_have_count(0)
        expect(page.locator(".note")).to_have_text("one\ntwo\nthree", use_inner_text=True)
    assert fanfold.open(id, dir=tmp_path).notes == "one\ntwo\nthree"


def test_logs_keep_search_and_rank_in_the_address(context, tmp_path):
    code = "import fanfold, os\nrun = fanfold.init('llm', id='two', system=False, quiet=True, console=True)\nprint('hello from', run.rank)\nprint('bye')\nrun.finish()"
    for rank in "01":
        env = {**os.environ, "FANFOLD_DIR": str(tmp_path), "FANFOLD_RANK": rank, "FANFOLD_WORLD_SIZE": "2"}
        subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120, capture_output=True)
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "p=llm&v=logs")
        page.get_by_label("Rank").select_option("1")
        page.get_by_label("Search lines").fill("hello")
        expect(page).to_have_url(re.compile("line=hello"))
        held(page, "rank=1")
        expect(page.get_by_role("log").locator("p")).to_have_text(["1hello from 1"])
        expect(page.get_by_label("Search lines")).to_have_value("hello")
        expect(page.get_by_label("Rank")).to_have_value("1")


# Without a clipboard


def test_where_there_is_no_clipboard_the_page_says_so_and_selects_the_text(context, tmp_path):
    context.add_init_script(NO_CLIPBOARD)
    finished(tmp_path, "one", {"loss": 1.0})
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "p=llm&s=0.3")
        page.get_by_role("button", name="copy link").click()
        expect(page.get_by_text("no clipboard here")).to_be_visible()
        assert page.evaluate(SELECTED) == page.url
        accessible(page)
        page.evaluate("() => { window.prompt = (_, address) => { window.asked = address; }; }")
        page.keyboard.press("y")
        page.wait_for_function("() => window.asked === location.href")
        page = open_page(context, address, "p=nothing")
        page.get_by_role("button", name="Copy", exact=True).first.click()
        expect(page.get_by_text("no clipboard here")).to_be_visible()
        assert page.evaluate(SELECTED).strip() == page.locator("pre").first.inner_text().strip()


def test_where_there_is_a_clipboard_it_holds_what_was_copied(context, tmp_path):
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    finished(tmp_path, "one", {"loss": 1.0})
    with serving(context, tmp_path) as address:
        page = open_page(context, address, "p=llm&s=0.3")
        page.get_by_role("button", name="copy link").click()
        expect(page.get_by_text("copied", exact=True)).to_be_visible()
        assert page.evaluate("() => navigator.clipboard.readText()") == page.url
        page.evaluate("() => navigator.clipboard.writeText('')")
        page.keyboard.press("y")
        page.wait_for_function("async () => (await navigator.clipboard.readText()) === location.href")


@needs_browser
def test_a_chart_shown_as_a_table_stays_one_in_the_address(context, tmp_path):
    finished(tmp_path, "one", {"loss": 1.5, "acc": 0.5})
    with serving(context, tmp_path) as address:
        page = open_page(context, address)
        page.get_by_label("Show loss as a table").click()
        held(page, "tables=loss")
        expect(page.locator("figure[data-key='loss'] table")).to_contain_text("1.5")
        expect(page.locator("figure[data-key='acc'] table")).to_have_count(0)
        page.get_by_label("Show loss as a table").click()
        expect(page.locator("figure[data-key='loss'] table")).to_have_count(0)
        page.locator("figure[data-key='loss'][data-painted]").wait_for()


def test_the_run_page_shows_where_the_time_went(context, tmp_path):
    with start(tmp_path, name="timed") as run:
        for step in range(5):
            run.log({"loss": 1.0}, step=step)
            time.sleep(0.05)
        with run.span("evaluation"):
            time.sleep(0.5)
    with serving(context, tmp_path) as address:
        page = open_page(context, address, f"p=llm&v=run&r={run.id}")
        bar = page.get_by_label("Goodput")
        expect(bar.get_by_role("img")).to_have_attribute("aria-label", re.compile(r"^steps \d.*evaluation \d"))
        expect(bar.get_by_role("listitem").filter(has_text="evaluation")).to_be_visible()
        accessible(page)
