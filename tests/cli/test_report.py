"""Reports: one file that shows everything and asks for nothing, whatever the runs are called and whatever they logged."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import matplotlib.figure
import numpy as np
import plotly.graph_objects
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fanfold
from fanfold.drawing.chart import Line, chart
from fanfold.drawing.markup import escape, tag
from fanfold.drawing.numbers import duration, number, tick, ticks
from fanfold.report import markdown, media
from fanfold.store.query import LocalStore
from paths import CHROMIUM, ROOT
from store_data import Call, write_run

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
HOSTILE = "<img src=x onerror=alert(1)>"
needs_browser = pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="no Chromium on this machine")


def report(*words: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "fanfold", "report", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def start(name: str, project: str = "llm", **options):
    return fanfold.init(project, name=name, system=False, quiet=True, **options)


def fill(runs_dir: Path) -> None:
    """Two runs that differ, with holes, NaN, infinities and pictures; one hostile; one of three ranks and two attempts."""
    for i in range(2):
        run = start(f"run-{i}", config={"lr": 10.0**-i, "model": {"dim": 64}}, notes="first try" if i else None)
        for step in range(2000):
            if not 900 < step < 1500 or i:
                run.log({"train/loss": 2 / (1 + step / 300) + 9 * (step == 777), "acc": step / 2000}, step=step)
        run.log({"train/loss": math.nan}, step=2000)
        run.log({"train/loss": math.inf}, step=2001)
        run.log({"picture": fanfold.Image(np.full((8, 8, 3), 200, np.uint8), caption=HOSTILE)}, step=2001)
        run.finish()
    bad = start(HOSTILE, HOSTILE, id="bad", config={HOSTILE: HOSTILE}, tags=[HOSTILE], notes=HOSTILE)
    bad.log({HOSTILE: 1.0, "train/loss": 1.0}, step=0)
    bad.finish()
    calls = [
        Call(a, rank, step, 1000, {"train/loss": 3.0 + rank}) for a in (0, 1) for step in range(a * 5, 10) for rank in range(3)
    ]
    write_run(runs_dir, calls, project="llm", id="ranks")


@needs_browser
def test_a_report_opens_from_disk_shows_everything_and_asks_for_nothing(runs_dir, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    fill(runs_dir)
    note, out = tmp_path / "note.md", tmp_path / "out" / "report.html"
    out.parent.mkdir()
    note.write_text(f"# Findings\n\nThe **rate** matters. {HOSTILE}\n\n[more](https://example.org) [no](javascript:alert)\n")
    said = json.loads(report("run-0", "run-1", "bad", "ranks", "-o", str(out), "--text", str(note), "--smooth", "0.4", "--json"))
    assert said["keys"] == ["train/loss", "acc", HOSTILE]
    assert (said["file"], said["bytes"], said["pictures"], said["left_out"]) == (str(out), out.stat().st_size, 2, [])
    assert said["points"] == 2 * 2002 - 599 + 1 + 10 + 4000 - 599 + 1
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]

    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        grounds = {theme: look_at(browser, out, theme) for theme in ("light", "dark")}
        browser.close()
    assert grounds["light"] != grounds["dark"]


def look_at(browser, out: Path, theme: str) -> str:
    from PIL import Image

    page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme=theme)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith(("file:", "data:")) else None)
    page.goto(out.as_uri())
    assert page.locator("h1").inner_text() == f"llm, {HOSTILE}: 4 runs"
    assert page.locator("img").count() == 2 and page.locator("img[src='x']").count() == 0
    assert page.evaluate("[...document.images].every(one => one.naturalWidth === 8)")
    for i in range(3):
        picture = Image.open(io.BytesIO(page.locator("svg.plot").nth(i).screenshot())).convert("RGB")
        colours = picture.getcolors(1 << 24)
        assert 1 - max(count for count, _ in colours) / sum(count for count, _ in colours) > 0.01
    assert page.get_by_role("img", name=re.compile("train.loss.*extremes kept, 4 not finite, marked, 1 restart")).count() == 1
    page.locator("summary", has_text="as a table").first.click()
    cells = page.get_by_role("region", name="train/loss as a table").locator("tr").last.inner_text()
    assert cells.split("\t")[:8] == ["ranks", "10", "4", "4", "3 (rank 0)", "5 (rank 2)", "0", "1"]
    differing = page.get_by_role("region", name="Config values that differ").inner_text()
    assert "lr\t1\t0.1" in differing and HOSTILE in differing
    assert page.locator("a").evaluate_all("links => links.map(one => one.href)") == ["https://example.org/"]
    if AXE.is_file() or os.environ.get("CI"):
        page.evaluate(AXE.read_text())
        found = page.evaluate("axe.run()")["violations"]
        wrong += [f"{one['id']}: {node['html'][:160]}" for one in found for node in one["nodes"][:3]]
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.close()
    assert wrong == []
    return ground


def test_a_link_beside_a_report_is_not_written_through(runs_dir, tmp_path):
    run = start("one")
    run.log({"loss": 1.0})
    run.finish()
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / ".report.html.part").symlink_to(precious)
    report("one", "-o", str(tmp_path / "report.html"))
    assert precious.read_text() == "mine"
    assert "<html" in (tmp_path / "report.html").read_text()


def test_nan_in_both_configs_is_no_difference_and_lost_media_leave_no_heading(runs_dir, tmp_path):
    for name in ("one", "two"):
        run = start(name, config={"limit": math.nan, "lr": 0.1 if name == "one" else 0.2})
        run.log({"loss": 1.0, "lost table": fanfold.Table(columns=["a"], data=[[1]])})
        run.finish()
        shutil.rmtree(run.path / "blobs")
    out = tmp_path / "r.html"
    report("one", "two", "-o", str(out))
    differing = out.read_text().partition('aria-label="Config values that differ"')[2].partition("</table>")[0]
    assert "lr" in differing
    assert "limit" not in differing
    assert "<h3>lost table</h3>" not in out.read_text()


def test_keys_of_any_run_are_drawn_and_unknown_ones_refused(runs_dir, tmp_path):
    for name, key in (("one", "a/x"), ("two", "a/y")):
        run = start(name)
        run.log({key: 1.0, "loss": 2.0}, step=0)
        run.finish()
    out = tmp_path / "r.html"
    assert json.loads(report("one", "two", "-o", str(out), "--keys", "a/*", "--json"))["keys"] == ["a/x", "a/y"]
    assert "no numbers under 'nothing'" in report("one", "-o", str(tmp_path / "no.html"), "--keys", "nothing", code=1)
    assert "between 0 and 1" in report("one", "--smooth", "7", code=2)
    assert not (tmp_path / "no.html").exists()
    assert report("one", "-o", str(out), "--title", "A & B").strip() == str(out)
    assert "<title>A &amp; B</title>" in out.read_text()


def test_pictures_that_are_large_damaged_or_of_another_kind_are_left_out_and_named(runs_dir, monkeypatch):
    monkeypatch.setattr(media, "ONE", 500)
    run = start("run")
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3)).astype(np.uint8)
    run.log(
        {
            "large": fanfold.Image(noise),
            "gone": fanfold.Image(np.zeros((2, 2, 3), np.uint8)),
            "fine": fanfold.Image(np.full((2, 2, 3), 9, np.uint8)),
        },
        step=3,
    )
    run.finish()
    stored = fanfold.open(run.id)
    gone = stored.artifact_file(stored.media("gone")[0].entry["blob"])
    gone.write_bytes(b"<svg onload=alert(1)>")
    budget = media.PictureBudget()
    shown = "".join(media.pictures([stored], budget))
    assert (shown.count("<img"), budget.shown["pictures"]) == (1, 1)
    assert [line.partition(":")[0] for line in budget.left_out] == ["large at step 3", "gone at step 3"]
    out = runs_dir.parent / "r.html"
    report("run", "-o", str(out))
    assert "Left out" in out.read_text()
    assert "gone at step 3" in out.read_text()


def test_every_kind_of_media_is_in_the_report_or_named_as_left_out(runs_dir, tmp_path):
    rng, drawn = np.random.default_rng(0), matplotlib.figure.Figure((2, 2))
    drawn.subplots().plot([1, 3, 2])
    run = start("all")
    run.log(
        {
            "images": [fanfold.Image(rng.random((8, 8, 3))) for _ in range(4)],
            "many": [fanfold.Image(rng.random((8, 8, 3))) for _ in range(20)],
            "figure": drawn,
            "plotly": plotly.graph_objects.Figure(plotly.graph_objects.Bar(y=[1, 2], name=HOSTILE)),
            "lines": plotly.graph_objects.Figure(plotly.graph_objects.Scatter(x=np.arange(5), y=np.arange(5.0) ** 2)),
            "pie": plotly.graph_objects.Figure(plotly.graph_objects.Pie(values=[1, 2])),
            "table": fanfold.Table(columns=["first", HOSTILE], data=[[i, f"cell {i} {HOSTILE}"] for i in range(60)]),
            "histogram": fanfold.Histogram(rng.normal(size=1000)),
            "text": f"an epitaph {HOSTILE}",
            "typed": fanfold.Text(f"a sonnet {HOSTILE}"),
            "sound": fanfold.Audio(np.zeros(80, np.float32), sample_rate=8000),
            "clip": fanfold.Video(rng.integers(0, 255, (3, 8, 8, 3), dtype=np.uint8), fps=4),
            "web": fanfold.Html(f"<b>in a frame</b><script>parent.ran = 1</script>{HOSTILE}"),
        },
        step=7,
    )
    run.finish()
    out = tmp_path / "r.html"
    said = json.loads(report("all", "-o", str(out), "--json"))
    counts = {name: said[name] for name in ("pictures", "sounds", "tables", "histograms", "texts", "pages")}
    assert counts == {"pictures": 4 + 16 + 1 + 1 + 2, "sounds": 1, "tables": 1, "histograms": 1, "texts": 2, "pages": 1}
    named = [line.partition(":")[0] for line in said["left_out"]]
    assert named == ["many at step 7", "pie at step 7", "table at step 7"]
    html = out.read_text()
    assert html.count("<img") == 22
    assert "cell 49 " in html and "cell 50 " not in html
    assert "an epitaph &lt;img" in html and "a sonnet &lt;img" in html and "1,000 values from" in html
    assert HOSTILE not in html and "<script" not in html
    assert 'sandbox="" ' in html and "&lt;b&gt;in a frame" in html and html.count("<audio ") == 1
    assert html.count("<rect ") == 2  # the bars
    for line in said["left_out"]:
        assert escape(line) in html


def test_saved_views_are_drawn_with_their_runs_keys_and_scales(runs_dir, tmp_path):
    for name, lr in (("low", 0.1), ("high", 1.0), ("other", 2.0)):
        with start(name, config={"lr": lr}, id=name) as run:
            for step in range(20):
                run.log({"loss": lr / (1 + step), "acc": step / 20, "val/loss": lr}, step=step)
    views = LocalStore(runs_dir).changes.views
    views.save("llm", "small", "p=llm&f=lr<1.5&hide=high&pin=loss&log=1&s=0.5")
    views.save("llm", "all losses", "p=llm&q=loss&x=relative")
    out = tmp_path / "r.html"
    said = json.loads(report("--project", "llm", "--view", "small", "--view", "all losses", "-o", str(out), "--json"))
    assert (said["views"], sorted(said["runs"]), sorted(said["keys"])) == (
        ["small", "all losses"],
        ["high", "low", "other"],
        ["loss", "val/loss"],
    )
    _, small, both = out.read_text().split("<h2>View: ")
    assert small.count("<h3>") == 1 and "log scale" in small.partition("as a table")[0]
    assert ">low<" in small and ">high<" not in small.partition("</figure>")[0]
    assert both.partition("<h2>Summary")[0].count("<h3>") == 2
    assert "no saved view" in report("low", "--view", "large", "-o", str(out), code=2)
    assert "needs a run" in report("-o", str(out), code=2)


def test_keys_are_drawn_over_what_define_metric_names(runs_dir, tmp_path):
    run = start("over")
    run.define_metric("val/*", x="epoch")
    run.define_metric("odd", x="never logged")
    for step in range(10):
        run.log({"val/acc": step * 0.1, "epoch": step * 0.5, "loss": 1.0, "odd": 1.0}, step=step * 100)
    run.finish()
    out = tmp_path / "r.html"
    assert sorted(json.loads(report("over", "-o", str(out), "--json"))["keys"]) == ["epoch", "loss", "odd", "val/acc"]
    figures = {part.partition("</h3>")[0]: part for part in out.read_text().split("<h3>")[1:]}
    assert "over epoch" in figures["val/acc"]
    assert ">900<" not in figures["val/acc"]
    assert "over epoch" not in figures["loss"] and "over" not in figures["odd"].partition("as a table")[0].partition("points")[2]
    report("over", "-o", str(out), "--x", "step")
    assert "over epoch" not in out.read_text()


# Notes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# One\n###### Six", "<h2>One</h2><h6>Six</h6>"),
        ("a *b* **c *d*** `e*f*`", "<p>a <em>b</em> <strong>c <em>d</em></strong> <code>e*f*</code></p>"),
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("- a\n  b\n- c\n1. d", "<ul><li>a\nb</li><li>c</li></ul><ol><li>d</li></ol>"),
        ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
        ("```py\n<b>*x*\n```\nafter", "<pre><code>&lt;b&gt;*x*</code></pre><p>after</p>"),
        ("```\nnever closed", "<pre><code>never closed</code></pre>"),
        ("---", "<hr>"),
        ("[a](https://b.c/?d=1&e)", '<p><a href="https://b.c/?d=1&amp;e" rel="noreferrer noopener">a</a></p>'),
        ("[a](javascript:x) ![b](http://c/d.png)", '<p>a <a href="http://c/d.png" rel="noreferrer noopener">b</a></p>'),
        ("[a](data:text/html,x)", "<p>a</p>"),
        ('[a](https://b"onclick="x)', '<p><a href="https://b&quot;onclick=&quot;x" rel="noreferrer noopener">a</a></p>'),
        (HOSTILE, "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
        ("snake_case_name 2*3*4", "<p>snake_case_name 2<em>3</em>4</p>"),
        ("", ""),
    ],
)  # fmt: skip
def test_notes_become_a_few_elements(text, expected):
    assert markdown.html(text) == expected


def test_a_table_in_a_note_has_a_cell_for_each_title():
    assert markdown.html("| a | b |\n|---|:-:|\n| 1 |\n").count("<td>") == 2


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.seen: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, name, attributes):
        self.seen.add(name)
        assert {key for key, _ in attributes} <= {"href", "rel", "scope", "class", "tabindex", "role", "aria-label"}
        self.links += [value for key, value in attributes if key == "href"]


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("ab<>&\"'*_`[]()!#->|\n \t:/x\x00\u202e") | st.characters(), max_size=120) | st.lists(st.sampled_from(
    ["<script>", "[a](", "javascript:", "https://x", ")", "**", "*", "`", "```\n", "> ", "| a |\n|---|\n", "\n", "- ", "onerror=", '"']), max_size=14).map("".join))  # fmt: skip
def test_no_note_can_make_anything_else(text):
    tags = Tags()
    tags.feed(markdown.html(text))
    assert tags.seen <= {
        "p",
        "em",
        "strong",
        "code",
        "pre",
        "a",
        "ul",
        "ol",
        "li",
        "blockquote",
        "hr",
        "div",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        *(f"h{i}" for i in range(2, 7)),
    }
    assert all(link.lower().startswith(("http://", "https://", "mailto:")) for link in tags.links)


@given(st.text())
def test_text_stays_text(text):
    inside = tag("p", text, title=text)
    assert inside.count("<") == 2 and inside.startswith('<p title="')
    assert escape(escape(text)) == escape(text)


# Charts


def buckets(x, y, **more):
    found = {"x_last": np.array(x, float), "last": np.array(y, float), "min": None, "max": None, "low": None, "high": None, "low_rank": None,
             "high_rank": None, "marks": [], "marked": 0, "restarts": [], "raw": True, "total": len(x), "axis": "step"}  # fmt: skip
    return SimpleNamespace(**{**found, **more})


def curves(svg: str) -> list[list[tuple[float, float]]]:
    paths = re.findall(r'<path d="M([^"Zlm]*)"[^>]*stroke-width="1.5"', svg)
    return [[tuple(map(float, point.split())) for point in path.split("L")] for path in paths]


def test_every_extreme_is_drawn_and_holes_are_not_joined():
    one = buckets(
        [0, 1, 2, 3, 4, 100, 101],
        [1, 1, 1, 1, 1, 1, 1],
        raw=False,
        total=700,
        min=np.array([1, 1, -5, 1, 1, 1, 1.0]),
        max=np.array([1, 9, 1, 1, 1, 1, 1.0]),
    )
    svg = chart([Line("a", 0, one)], label="k", width=640, height=260)
    before, after = curves(svg)
    assert (min(y for _, y in before), max(y for _, y in before)) == pytest.approx(
        (8 + 232 * 0.5 / 15.12, 8 + 232 * (1 - 0.56 / 15.12)), abs=1
    )
    assert before[-1][0] < after[0][0] and svg.count('stroke-dasharray="1 4"') == 1
    assert "7 of 700 points, extremes kept" in svg


def test_marks_restarts_and_a_lone_point_are_drawn():
    one = buckets([5], [1], marks=[(5.0, "nan"), (6.0, "inf"), (7.0, "-inf")], marked=3, restarts=[6.0])
    svg = chart([Line(HOSTILE, 9, one)], label=HOSTILE)
    assert [kind for kind in ("nan", "inf", "-inf") if f": {kind} at " in svg] == ["nan", "inf", "-inf"]
    assert "restarted at 6" in svg and svg.count("<circle") == 1 and "<img" not in svg
    assert "No points" in chart([], label="k")


def test_smoothing_does_not_lag_and_leaves_the_ends():
    line = Line("a", 0, buckets(range(200), np.arange(200) * 2.0), smooth=0.9)
    assert np.allclose(line.smooth, line.y)
    noisy = Line("a", 0, buckets(range(200), np.random.default_rng(0).normal(size=200)), smooth=0.9)
    assert np.std(noisy.smooth[20:-20]) < 0.5 * np.std(noisy.y)


finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**15), st.floats()), min_size=1, max_size=40), st.booleans())
def test_whatever_was_logged_is_drawn_inside_the_frame(points, log):
    points.sort(key=lambda point: point[0])
    svg = chart([Line("a", 0, buckets(*zip(*points, strict=True)))], label="k", log=log)
    numbers = [
        float(word)
        for path in re.findall(r' d="([^"]*)"', svg)
        for word in re.findall(
            r"[-\d.a-z]+(?= |L|Z|$)", path.replace("M", "").replace("l", " ").replace("m", " ").replace("L", "L ")
        )
    ]
    assert all(-10 <= value <= 650 for value in numbers)


def test_numbers_are_written_as_the_page_writes_them():
    assert [number(value) for value in (0.123456789, 1e-5, 12345678.5, -3, 1234567, math.nan, -math.inf, True, "x", None)] == [
        "0.12346", "1e-5", "1.2346e7", "\N{MINUS SIGN}3", "1,234,567", "NaN", "\N{MINUS SIGN}∞", "True", "x", ""]  # fmt: skip
    assert [tick(value) for value in (0, 2500, 25000, 3e6, -0.0001, 1e13)] == [
        "0",
        "2500",
        "25k",
        "3M",
        "\N{MINUS SIGN}1e-4",
        "1e13",
    ]
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.001, 1000, 8, log=True) == [0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]
    assert [duration(seconds) for seconds in (4.2, 200, 18720, 183600)] == ["4.2 s", "3 min 20 s", "5 h 12 min", "2 d 3 h"]


@given(finite, finite, st.booleans())
def test_ticks_are_few_and_inside(one, two, log):
    low, high = sorted((one, two))
    found = ticks(low, high, 8, log=log)
    room = 0.0 if low == high else (high / 2 - low / 2) * 1e-6
    assert len(found) <= 40 and all(low - room <= place <= high + room for place in found)
