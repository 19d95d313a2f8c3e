"""Take the pictures of the docs again: runs of the tutorials and of a made-up project, in a real dashboard and a real browser.

`make docs-pictures`; ARGS="first-run tour notebooks" takes only some. The runs are kept in build/pictures for the next time.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import stories
from nbclient import NotebookClient
from PIL import Image
from playwright.sync_api import Page, sync_playwright

import fanfold

DOCS = Path(__file__).parents[1]
KEPT = DOCS.parent / "build" / "pictures"
SIZE = {"width": 1240, "height": 760}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# name: (the tutorial or "gallery", the view, the theme). `{}` is the id of the newest run.
PICTURES = {
    "first-run": ("first-run", "p=first", "light"),
    "compare-seeds": ("compare-seeds", "p=seeds&colour=lr", "light"),
    "multi-gpu": ("multi-gpu", "p=ddp&ranks=mean&band=1&pin=data_seconds", "dark"),
    "notebook-to-cluster": ("notebook-to-cluster", "p=cluster", "light"),
    "debug-a-nan": ("debug-a-nan", "p=nan", "dark"),
    "evaluate-a-language-model": ("evaluate-a-language-model", "p=adder&v=media&key=eval/answers", "light"),
    "charts-light": ("gallery", "p=llm&s=0.6", "light"),
    "charts-dark": ("gallery", "p=llm&s=0.6", "dark"),
    "ranks-dark": ("gallery", "p=ddp&ranks=mean&band=1", "dark"),
    "table-light": ("gallery", "p=llm&v=table", "light"),
}
TOUR = (
    "p=llm&s=0.6",
    "p=llm&colour=lr&s=0.6",
    "p=llm&v=table",
    "p=llm&v=sweep",
    "p=llm&v=run&r={}",
    "p=ddp&ranks=mean&band=1",
)


def main(names: list[str]) -> int:
    wanted = names or [*PICTURES, "tour", "notebooks"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for source in dict.fromkeys(PICTURES[name][0] for name in wanted if name in PICTURES):
            with dashboard(runs_of(source)) as address:
                for name in (one for one in wanted if PICTURES.get(one, ("",))[0] == source):
                    picture = taken(browser, address, source, *PICTURES[name][1:])
                    Image.open(io.BytesIO(picture)).convert("RGB").save(DOCS / "img" / f"{name}.png", optimize=True)
                    print(f"docs/img/{name}.png")
        if "tour" in wanted:
            with dashboard(runs_of("gallery")) as address:
                frames = [taken(browser, address, "gallery", view, "light") for view in TOUR]
            first, *rest = [Image.open(io.BytesIO(frame)).convert("RGB").resize((930, 570)) for frame in frames]
            first.save(DOCS / "img" / "tour.webp", save_all=True, append_images=rest, duration=2500, loop=0, quality=70, method=6)
            print("docs/img/tour.webp")
        if "notebooks" in wanted:
            for notebook in sorted((DOCS.parent / "examples" / "notebooks").glob("*.ipynb")):
                shown(browser, notebook).save(DOCS / "img" / "gallery" / f"{notebook.stem}.png", optimize=True)
                print(f"docs/img/gallery/{notebook.stem}.png")
        browser.close()
    return 0


def runs_of(source: str) -> Path:
    """Return a folder with the runs of a tutorial, or of the made-up project."""
    folder = KEPT / source
    if not (folder / ".done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if source == "gallery":
            gallery(folder / ".fanfold")
        else:
            print(stories.play(DOCS / "tutorials" / f"{source}.md", folder))
        (folder / ".done").touch()
    return folder


@contextlib.contextmanager
def dashboard(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "fanfold", "ui", "--json", "--no-token", "--port", "0", "--dir", str(folder / ".fanfold")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=stories.environment(folder))
    try:
        yield json.loads(server.stdout.readline())["address"]  # type: ignore[union-attr]
    finally:
        server.terminate()
        server.wait(20)


def taken(browser: Any, address: str, source: str, view: str, theme: str) -> bytes:
    newest = fanfold.open("-", dir=KEPT / source / ".fanfold", project=view.partition("&")[0].removeprefix("p="))
    context = browser.new_context(viewport=SIZE, color_scheme=theme, reduced_motion="reduce")
    page: Page = context.new_page()
    page.goto(f"{address}#{view.replace('{}', newest.id)}")
    page.wait_for_timeout(6000)  # the stream of live updates never ends, so there is no idle moment to wait for
    try:
        return page.screenshot()
    finally:
        context.close()


def shown(browser: Any, notebook: Path) -> Image.Image:
    """Run a notebook, and return a picture of what its last cell shows."""
    book = nbformat.read(notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= stories.environment(Path(folder))
        NotebookClient(book, timeout=250, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    page: Page = browser.new_page(viewport={"width": 760, "height": 160})
    output = book.cells[-1].outputs[-1].data["text/html"]
    page.set_content(f"<body style='margin:16px;background:#fff;font-family:system-ui'>{output}</body>")
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    page.close()
    return picture


def gallery(place: Path) -> None:
    """Make runs that look like the training of a language model: a sweep of eight, and one of eight ranks."""
    rng = random.Random(7)
    os.environ |= {"FANFOLD_SYSTEM": "0", "FANFOLD_QUIET": "1"}
    for number in range(8):
        lr, layers = (3e-4, 1e-3)[number % 2], (6, 12)[number // 4]
        config = {"lr": lr, "layers": layers, "batch": 256 << (number % 3), "seed": number}
        with fanfold.init("llm", dir=place, config=config, name=f"base-{layers}l-{number}", tags=["sweep"]) as run:
            run.define_metric("val/loss", summary="min")
            floor = 1.7 + 0.25 * (layers == 6) + 0.12 * (lr == 1e-3) + rng.random() / 10
            for step in range(0, 4000, 4):
                loss = floor + 8 * math.exp(-step / (350 + 200 * (lr < 1e-3))) + rng.gauss(0, 0.05)
                values = {
                    "train/loss": loss,
                    "train/perplexity": math.exp(min(loss, 8)),
                    "lr": lr * min(1, step / 400) * (1 - step / 4400),
                }
                values |= {
                    "grad/norm": 1.2 * math.exp(-step / 1500) + abs(rng.gauss(0, 0.08)),
                    "tokens/s": 51000 + rng.gauss(0, 900),
                }
                if step % 200 == 0:
                    values |= {
                        "val/loss": floor + 0.08 + 8 * math.exp(-step / 500),
                        "val/accuracy": 0.95 - 0.2 * floor - 0.4 * math.exp(-step / 900),
                    }
                run.log(values, step=step)
    for rank in range(8):
        code = (
            "import fanfold, random, math\n"
            f"rng = random.Random({rank})\n"
            f"run = fanfold.init('ddp', dir={str(place)!r}, id='eight', name='eight-ranks')\n"
            "for step in range(0, 1000, 2):\n"
            f"    slow = 0.12 if {rank} == 5 and 400 < step < 650 else 0\n"
            "    run.log({'loss': 2 + 6 * math.exp(-step / 150) + rng.gauss(0, .08), 'step_seconds': .31 + slow + rng.gauss(0, .006),\n"
            "             'data_seconds': .01 + slow + abs(rng.gauss(0, .002)), 'grad/norm': 1 + math.exp(-step / 300) + rng.gauss(0, .05)}, step=step)\n"
            "run.finish()\n"
        )
        env = {**os.environ, "FANFOLD_RANK": str(rank), "FANFOLD_WORLD_SIZE": "8"}
        subprocess.run([sys.executable, "-c", code], env=env, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
