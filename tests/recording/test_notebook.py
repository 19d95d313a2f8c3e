"""Runs in a notebook: they show themselves, live while they run, and as text everywhere else."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import nbformat
import pytest
from nbclient import NotebookClient

import fanfold
from browser import browser, needs_browser  # noqa: F401 - fixtures
from fanfold import notebook

HOSTILE = "<img src=x onerror=alert(1)>"
CELLS = (
    """import fanfold, math
run = fanfold.init("llm", name="<img src=x onerror=alert(1)>", config={"lr": 0.1, "model": {"dim": 64}}, quiet=True, system=False)
for step in range(400): run.log({"train/loss": 2 / (1 + step / 50), "lr": 0.1}, step=step)
run""",
    "page = fanfold.ui(run, height=333); page",
    "fanfold.runs('llm')",
    """import urllib.request
base, _, token = page.url.partition("#")[0].partition("?token=")
asked = urllib.request.Request(base + "api/runs?project=llm", headers={"authorization": f"Bearer {token}"})
said = urllib.request.urlopen(asked).read().decode()
print("api has it" if run.id in said else said)
assert fanfold.open(run.id).facts["script"] == 'notebook'""",
    "fanfold.ui().url.partition('#')[0] == page.url.partition('#')[0]",
    "run.finish(); run",
    "fanfold.open(run.id)",
    "fanfold.runs()",
    "fanfold.runs()[:0]",
    "page.stop(); page",
)


def test_a_real_notebook_shows_runs_charts_and_the_dashboard(runs_dir):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(runs_dir.parent)}}).execute()
    first, page, live, api, same, finished, stored, listed, none, stopped = ([*cell.outputs] for cell in book.cells)

    picture = html(first)
    assert picture.count('<svg class="plot"') == 2 and picture.index("<iframe") < picture.index("as of ")
    assert 'aria-label="train/loss of &lt;img' in picture and "330 of 400 points, extremes kept" in picture
    assert "config </span>lr 0.1 · model.dim 64" in picture and "● running" in picture

    address = re.search(r'<iframe src="(http://localhost:\d+/\?token=[\w-]+)#p=llm&amp;v=run&amp;r=(\w+)"', html(page))
    assert 'height="333"' in html(page) and text(page) == f"<fanfold ui {address[1]}#p=llm&v=run&r={address[2]}>"
    assert f'<iframe data-src="{address[1]}#p=llm&amp;v=run' in picture  # one server for all
    assert f'<iframe data-src="{address[1]}#p=llm' in html(live) and "<table>" in html(live)
    assert api[0].text == "api has it\n" and text(same) == "True"
    assert "<iframe" not in html(finished) and "✓ finished" in html(finished) and "fanfold.ui" not in html(finished)
    assert '<svg class="plot"' in html(stored) and text(stored).startswith("<run <img src=x")
    assert "<table>" in html(listed) and "<polyline" in html(listed) and text(listed).startswith("1 run\n  <run ")
    assert "No runs." in html(none)
    assert text(stopped).endswith(", stopped>")
    for cell in (first, live, finished, stored, listed):
        assert "<img" not in html(cell) and html(cell).count("<script") == (1 if cell in (first, live) else 0)


REINIT = (
    "import fanfold; one = fanfold.init('p', name='one', quiet=True, system=False); two = fanfold.init('p', quiet=True, system=False)",
    "print(one.status, two.status)",
    "three = fanfold.init('p', name='three', quiet=True, system=False); print(one.status, two.status, three.status)",
    "four = fanfold.init('p', quiet=True, system=False, reinit='create_new'); print(three.status, four.status)",
    "fanfold.init('p', id='five', quiet=True, system=False); print(three.status, four.status)",
)


def test_init_in_another_cell_finishes_the_run_that_was_open(runs_dir):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in REINIT])
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(runs_dir.parent)}}).execute()
    printed = ["".join(one.text for one in cell.outputs if one.get("name") == "stdout").split() for cell in book.cells]
    said = ["".join(one.text for one in cell.outputs if one.get("name") == "stderr") for cell in book.cells]
    assert printed[1] == ["running", "running"]  # two of one cell are meant
    assert printed[2] == ["finished", "finished", "running"]
    assert "run one was still running in this notebook and is finished now" in said[2]
    assert printed[3] == ["running", "running"] and printed[4] == ["finished", "finished"]


@needs_browser
def test_a_notebook_saved_while_a_run_is_live_shows_its_picture_later(runs_dir, browser, tmp_path):  # noqa: F811
    cells = CELLS[:1]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(runs_dir.parent)}})
    saved = tmp_path / "saved.html"
    with client.setup_kernel():
        client.execute_cell(book.cells[0], 0)
        saved.write_text(html(book.cells[0].outputs))
        page = browser.new_page()
        page.goto(f"{notebooks(tmp_path)}/saved.html")
        page.locator("iframe").wait_for(state="visible", timeout=30_000)
        page.frame_locator("iframe").get_by_role("heading", name="fanfold").wait_for(timeout=30_000)
        assert not page.locator("svg.plot").first.is_visible()
    page.reload()  # the kernel is gone, and the dashboard with it
    page.locator("svg.plot").first.wait_for(state="visible", timeout=30_000)
    assert not page.locator("iframe").is_visible() and page.get_by_text("as of ").is_visible()
    page.close()


def notebooks(folder) -> str:
    """Serve a folder as a notebook server would, from this machine; return its address."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://localhost:{server.server_port}"


def output(outputs):
    [found] = [one for one in outputs if one.output_type == "execute_result"]
    return found.data


def html(outputs) -> str:
    return output(outputs)["text/html"]


def text(outputs) -> str:
    return output(outputs)["text/plain"]


def test_in_a_terminal_the_address_is_printed_and_the_server_ends_with_its_process(runs_dir):
    code = """
import fanfold, os, signal, sys
run = fanfold.init("p", quiet=True, system=False)
run.log({"loss": 1.0})
page = fanfold.ui(run)
print(page._server._process.pid, flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    url, server = child.stdout.readline().strip(), int(child.stdout.readline())
    base, token = re.fullmatch(r"(http://localhost:\d+/)\?token=([\w-]{24,})#p=p&v=run&r=\w+", url).groups()

    def ask(path: str, **headers: str):
        return urllib.request.urlopen(urllib.request.Request(base + path, headers=headers), timeout=60)

    home = ask("", authorization=f"Bearer {token}")
    assert "frame-ancestors 'self' http://localhost:*" in home.headers["content-security-policy"]
    assert [row["name"] for row in json.load(ask("api/projects", authorization=f"Bearer {token}"))["projects"]] == ["p"]
    for stranger in ({}, {"authorization": "Bearer guess"}, {"cookie": "fanfold=guess"}):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask("api/projects", **stranger)
    pipe = os.pidfd_open(server) if hasattr(os, "pidfd_open") else None
    child.send_signal(signal.SIGKILL)
    child.communicate()
    if pipe is not None:
        import select

        assert select.select([pipe], [], [], 60)[0], "the server outlives the process it served"
        os.close(pipe)


def test_a_dashboard_that_cannot_start_says_why(runs_dir, monkeypatch):
    monkeypatch.setattr(notebook.sys, "executable", "/bin/false")
    with pytest.raises(fanfold.FanfoldError, match="did not start"):
        fanfold.ui()


def test_lists_of_runs_are_lists_and_tell_themselves_as_text(runs_dir):
    for name in ("one", "two"):
        fanfold.init("p", name=name, quiet=True, system=False).finish()
    found = fanfold.runs()
    assert isinstance(found, list) and [run.name for run in found[:1]] == ["two"]
    assert type(found[:1]) is type(found) and found[0].name == "two"
    assert repr(found).splitlines()[0] == "2 runs" and "one" in repr(found).splitlines()[2]
    bundle = found[1]._repr_mimebundle_()
    assert "No numbers yet." in bundle["text/html"] and bundle["text/plain"] == repr(found[1])
    assert "p</td>" in found._repr_mimebundle_()["text/html"]
