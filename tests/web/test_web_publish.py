"""A published folder under a path of a plain file server: the real dashboard with the logged numbers, without a fanfold server."""

# ruff: noqa: F401 - fixtures are imported by their names

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest

import fanfold
from browser import HOSTILE, SLOW, expect, inked, needs_browser, open_page, painted, serve, start

pytestmark = needs_browser


def published(place: Path, *words: str) -> dict:
    command = [sys.executable, "-m", "fanfold", "publish", *words, "--dir", str(place), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.fixture(scope="module")
def facts(place, tmp_path_factory):
    base = start(place, project="tree", name="base", id="base", config={"lr": 0.5})
    for step in range(100):
        base.log({"loss": 100.0 - step}, step=step)
    base.finish()
    child = start(place, project="tree", name="child", id="child", fork="base@49")
    for step in range(50, 100):
        child.log({"loss": 500.0 + step}, step=step)
    child.finish()
    long = start(place, project="long", name="long", id="long")
    values = np.random.default_rng(7).normal(size=20_000)
    values[12_345] = 99.0
    for step, value in enumerate(values.tolist()):
        long.log({"loss": value}, step=step)
    long.finish()
    folder = tmp_path_factory.mktemp("host") / "some" / "path"
    return published(place, "llm", "tree", "ranks", "odd", "long", HOSTILE, "-o", str(folder))


@pytest.fixture(scope="module")
def address(facts):
    root = Path(facts["path"]).parent.parent
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(root)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    port = re.search(r"port (\d+)", server.stdout.readline())[1]
    yield f"http://127.0.0.1:{port}/some/path/"
    server.terminate()
    server.wait(20)


def as_table(page, key: str) -> dict[str, list[str]]:
    """Return the rows of a chart shown as a table, by run."""
    figure = painted(page, key)
    figure.hover()
    figure.get_by_role("button", name=f"Show {key} as a table").click()
    rows = figure.locator("tbody tr")
    rows.first.wait_for()
    return {cells[0]: cells[1:] for cells in (row.locator("td").all_inner_texts() for row in rows.all())}


def test_the_command_says_what_is_there_and_what_is_not(facts):
    assert (facts["runs"], facts["projects"]) == (19, ["llm", "tree", "ranks", "odd", "long", HOSTILE])
    assert facts["bytes"] == sum(file.stat().st_size for file in Path(facts["path"]).rglob("*") if file.is_file())
    assert any("thinned" in one["what"] for one in facts["left_out"])


def test_charts_show_the_numbers_that_were_logged(context, address):
    page = open_page(context, address)
    inked(page, painted(page))
    expect(page.get_by_text("published", exact=False).first).to_be_visible()
    found = as_table(page, "train/loss")
    last = 2 / (1 + 2999 / 300) + 0.05 * np.sin(2999)
    assert float(found["run-00"][0].replace(",", "")) == pytest.approx(last, rel=1e-3)
    assert found["run-00"][3] == "3,000"
    assert page.get_by_role("button", name="rename").count() == 0
    assert "api/" not in " ".join(page.evaluate("performance.getEntriesByType('resource').map((one) => one.name)"))


def test_a_long_series_keeps_its_extreme(context, address):
    page = open_page(context, address, "p=long")
    found = as_table(page, "loss")["long"]
    assert (found[2], found[3]) == ("99", "20,000")


def test_filters_work_in_the_page(context, address):
    page = open_page(context, address, "p=llm&f=lr<0.05+and+train/loss.min<0.3")
    painted(page)
    own = [i for i in range(12) if 10.0 ** -(i % 3) < 0.05]
    low = {i: min(2 / (1 + s / 300) + i / 20 + 0.05 * np.sin(s) for s in range(0, 3000, 3)) for i in own if i != 3}
    expected = sorted(f"run-{i:02d}" for i in low if low[i] < 0.3)
    assert expected
    expect(page.get_by_text("run-02", exact=True).first).to_be_visible()
    names = page.evaluate(
        "[...new Set([...document.querySelectorAll('aside, nav, section, div')].flatMap((e) => [...e.innerText.matchAll(/run-\\d\\d/g)].map((m) => m[0])))].sort()"
    )
    assert names == expected
    page.locator("#filter").fill("lr<")
    expect(page.get_by_role("alert")).to_contain_text("no value on its right")


def test_the_table_has_config_and_statistics(context, address):
    page = open_page(context, address, "p=llm&v=table&cols=config:lr,min:train/acc,max:train/acc")
    row = page.get_by_role("row").filter(has_text="run-05")
    row.wait_for()
    expect(row).to_contain_text("0.01")
    expect(row).to_contain_text("0.999")


def test_a_fork_is_one_curve_and_names_its_parent(context, address):
    page = open_page(context, address, "p=tree&v=run&r=child")
    expect(page.get_by_text("forked from")).to_contain_text("base at step 49")
    page.goto(f"{address}#p=tree")
    found = as_table(page, "loss")
    assert (found["child"][3], found["child"][2], found["child"][0]) == ("100", "599", "599")
    assert float(found["child"][1]) == 51.0  # the parent's minimum up to step 49


def test_ranks_logs_media_tables_and_figures(context, address):
    page = open_page(context, address, "p=ranks&ranks=mean")
    assert as_table(page, "time")["three"][0] == "5"
    page.goto(f"{address}#p=ranks&v=logs&r=three")
    expect(page.get_by_text("hello from 2").first).to_be_visible()
    page.goto(f"{address}#p=llm&v=media&key=picture")
    image = page.locator("figure img").first
    image.wait_for()
    assert image.evaluate("(i) => i.decode().then(() => [i.naturalWidth, i.naturalHeight])") == [16, 16]
    page.goto(f"{address}#p=llm&v=media&key=page")
    expect(page.frame_locator("figure iframe").first.get_by_role("heading", name="inside")).to_be_visible()
    page.goto(f"{address}#p=llm&v=media&key=rows")
    page.get_by_role("columnheader", name="n").first.wait_for()
    page.get_by_label("Search rows").first.fill("b")
    expect(page.locator("figure tbody tr").first).to_contain_text("2.5")
    page.close()
    page = open_page(context, address, "p=llm&v=media&key=plot")
    page.locator("iframe[data-drawn]").first.wait_for(timeout=2 * SLOW)  # the script is 5 MB


def test_what_needs_a_server_is_not_offered(context, address):
    page = open_page(context, address, "p=llm&v=sweep")
    page.get_by_role("heading", name="Parallel coordinates").wait_for()
    assert page.get_by_text("Importance for").count() == 0
    page.goto(f"{address}#p=llm")
    figure = painted(page)
    figure.hover()
    figure.get_by_role("button", name="Save train/loss").click()
    expect(figure.get_by_role("group", name="Save").get_by_role("button")).to_have_text(["PNG", "SVG", "Embed"])


def test_hostile_names_and_html_run_nothing(context, address, facts):
    page = open_page(context, address, f"p={HOSTILE}&v=media&key=page".replace("<", "%3C").replace(">", "%3E"))
    expect(page.frame_locator("iframe").first.get_by_text("kept")).to_be_visible()
    context.expected[:] = [text for text in context.expected if "ERR" not in text and "Content Security Policy" not in text
                           and "404" not in text and "Failed to load" not in text and "Blocked script" not in text]  # fmt: skip
    folder = Path(facts["path"])
    assert not [file for file in folder.rglob("*.html") if file.parent != folder]  # no logged content can be opened as a page
    assert "onerror" not in (folder / "index.html").read_text().replace("&lt;img src=x onerror=alert(1)&gt;", "")


def test_the_page_for_figures_does_nothing_outside_a_sandbox(context, address):
    page = context.new_page()
    page.goto(f"{address}plot.html")
    context.expected[:] = [text for text in context.expected if "only inside the dashboard" not in text]
    page.evaluate("postMessage({figure: {data: []}, script: 'window.ran = true'}, '*')")
    page.wait_for_timeout(200)
    assert page.evaluate("window.ran") is None


def test_one_chart_is_embedded_in_another_page(context, address, tmp_path):
    page = context.new_page()
    page.set_content(f'<iframe src="{address}embed.html#p=tree&key=loss" width="700" height="400"></iframe>')
    frame = page.frame_locator("iframe")
    frame.locator("figure[data-painted]").wait_for()
    expect(frame.get_by_label("Legend")).to_contain_text("child")
    assert frame.locator("figure").count() == 1


def test_a_zip_is_the_same_folder_and_a_strange_folder_is_not_replaced(place, facts, tmp_path):  # facts writes the runs
    found = published(place, "base", "-o", str(tmp_path / "one"), "--zip", "--project", "tree")
    assert found["path"] == str(tmp_path / "one.zip")
    with zipfile.ZipFile(found["path"]) as archive:
        assert {"one/index.html", "one/embed.html"} <= set(archive.namelist())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    command = [sys.executable, "-m", "fanfold", "publish", "tree", "--dir", str(place), "-o", str(tmp_path / "mine")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "was not published by fanfold" in refused.stderr
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
