"""A real browser on a real server, for all tests of the dashboard."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import plotly.graph_objects
import pytest

import fanfold
import fanfold.recording.keeper
from paths import CHROMIUM

sync_api = pytest.importorskip("playwright.sync_api")


expect = sync_api.expect


FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip


HOSTILE = "<img src=x onerror=alert(1)>"


SLOW = 30_000  # ms: the machine may be busy, and these tests do not measure speed


needs_browser = pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Runs of every kind: plain, with gaps, NaN and restarts, with three ranks, hostile, empty, with media."""
    folder = tmp_path_factory.mktemp("runs")
    os.environ["FANFOLD_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    for i in range(12):
        run = start(
            folder,
            name=f"run-{i:02d}",
            config={"lr": 10.0 ** -(i % 3), "model": {"dim": 64 * (1 + i % 2)}},
            tags=["even"] if i % 2 == 0 else [],
        )
        for step in range(0, 3000, 3 if i else 1):
            if i != 3 or not 900 < step < 1800:
                run.log(
                    {
                        "train/loss": 2 / (1 + step / 300) + i / 20 + 0.05 * np.sin(step),
                        "train/acc": step / 3000,
                        "lr": 0.1 / (1 + step),
                    },
                    step=step,
                )
        if i == 4:
            run.log({"train/loss": float("nan")}, step=3000)
            run.log({"train/loss": float("inf")}, step=3001)
            run.alert("loss is NaN", "from step 3000 on", level="error")
        if i < 2:
            media(run)
        run.finish(status="failed" if i == 4 else "finished")
    ranks(folder)
    hostile = start(
        folder, project=HOSTILE, name=HOSTILE, config={HOSTILE: HOSTILE}, tags=[HOSTILE], notes=HOSTILE, id="../../etc"
    )
    hostile.log({HOSTILE: 1.0, "../../etc/passwd": 2.0, "say": HOSTILE, "page": fanfold.Html(f"<b>kept</b>{HOSTILE}")}, step=0)
    hostile.alert(HOSTILE, HOSTILE)
    hostile.finish()
    odd = start(folder, project="odd", name="one-point")
    odd.log({"alone": 5.0}, step=7)
    odd.finish()
    start(folder, project="odd", name="no-points").finish()
    return folder


def start(folder: Path, project: str = "llm", **options):
    return fanfold.init(project, dir=folder, system=False, quiet=True, **options)


def media(run) -> None:
    for step in (0, 500):
        picture = np.full((16, 16, 3), step // 2, np.uint8)
        run.log({"picture": fanfold.Image(picture, caption=f"at {step}"), "weights": fanfold.Histogram(np.random.default_rng(step).normal(size=500)),
                 "words": f"the {run.name} at step {step}", "page": fanfold.Html("<h1>inside</h1>")}, step=step)  # fmt: skip
    run.log(
        {
            "rows": fanfold.Table(["name", "n"], [["a", 1], ["b", 2.5]]),
            "tone": fanfold.Audio(np.zeros(400, np.float32), sample_rate=8000),
            "plot": fanfold.Figure(plotly.graph_objects.Figure({"data": [{"type": "scatter", "y": [1, 3, 2]}]})),
        },
        step=500,
    )


def ranks(folder: Path) -> None:
    code = "import fanfold, os\nr = int(os.environ['FANFOLD_RANK'])\nrun = fanfold.init('ranks', id='three', name='three', system=False, quiet=True, console=True)\nprint('hello from', r)\nfor s in range(20): run.log({'time': [5., 1., 9.][r]}, step=s)\nrun.finish()"
    for rank in range(3):
        env = {**os.environ, "FANFOLD_DIR": str(folder), "FANFOLD_RANK": str(rank), "FANFOLD_WORLD_SIZE": "3"}
        subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120, capture_output=True)


@pytest.fixture(scope="module")
def address(place):
    server, address = serve(place)
    yield address
    server.terminate()
    server.wait(20)


def serve(folder: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    command = [
        sys.executable,
        "-m",
        "fanfold",
        "ui",
        "--dir",
        str(folder),
        "--json",
        "--no-token",
        *(options or ("--port", "0", "--write")),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return server, json.loads(server.stdout.readline())["address"]


@contextlib.contextmanager
def serving(context, folder: Path):
    """Serve other runs, and close their pages before the server."""
    server, address = serve(folder)
    try:
        yield address
    finally:
        for page in context.pages:
            page.close()
        server.terminate()
        server.wait(20)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def context(browser):
    made = browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light", reduced_motion="reduce")
    made.set_default_timeout(SLOW)
    errors: list[str] = []
    made.on("weberror", lambda error: errors.append(str(error.error)))
    made.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    made.on(
        "dialog",
        lambda dialog: dialog.accept() if "permanently" in dialog.message else (errors.append(dialog.message), dialog.dismiss()),
    )
    made.expected = errors  # a test that provokes an error removes it
    yield made
    made.close()
    assert errors == [], errors


@pytest.fixture
def page(context, address):
    return open_page(context, address)


def open_page(context, address: str, fragment: str = "p=llm"):
    page = context.new_page()
    page.goto(f"{address}#{fragment}")
    page.locator("header h1").wait_for()
    return page


def painted(page, key: str = "train/loss"):
    figure = page.locator(f"figure[data-key='{key}'][data-painted]").first
    figure.wait_for()
    return figure


INK = """figure => { const canvas = figure.querySelector('canvas'), data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let other = 0; for (let i = 0; i < data.length; i += 4) if (data[i] !== data[0] || data[i + 1] !== data[1] || data[i + 2] !== data[2]) other++;
  return other / (data.length / 4); }"""


def inked(page, figure, least: float = 0.02) -> float:
    """Wait until a chart shows more than its frame, and return the share of colored pixels."""
    for _ in range(100):
        share = figure.evaluate(INK)
        if share >= least:
            return share
        page.wait_for_timeout(100)
    raise AssertionError(f"the chart has {share:.4f} ink")


def large_answers(context, count: int, columns: list[str], value) -> list[list[str]]:
    """Serve the page a made-up project of many runs, as the bytes the server would send; return the columns it requests."""
    from fanfold.server import wire

    ids = [f"r{run:06d}" for run in range(count)]
    facts = {"status": "finished", "created": 1e9, "seen": 1e9, "duration": 1.0, "tags": [], "notes": None, "group": None,
             "ranks": 1, "attempts": 1, "archived": False, "failed": False}  # fmt: skip
    keys = [name.removeprefix("metric:") for name in columns if name.startswith("metric:")]
    listed = {"runs": [{"id": id, "name": id, **facts} for id in ids], "keys": keys, "media": [], "columns": columns, "goals": {},
              "unreadable": []}  # fmt: skip
    answer, asked = json.dumps(listed), []

    def some(route) -> None:
        names = route.request.post_data_json["names"]
        asked.append(names)
        cells = [
            ({"name": name, "missing": []}, {"values": np.array([value(name, run) for run in range(count)], np.float64)})
            for name in names
        ]
        route.fulfill(body=wire.encode({"runs": ids}, cells), content_type="application/octet-stream")

    context.route("**/api/runs?*", lambda route: route.fulfill(body=answer, content_type="application/json"))
    context.route("**/api/columns", some)
    return asked
