"""Pictures of every page of the dashboard, in both themes, for the docs: `make screenshots` writes them to docs/img/pages."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from browser import window
from fanfold.transfer.examples import write_examples

FOLDER = Path(__file__).parents[1] / "docs" / "img" / "pages"
WIDE, PHONE = (1280, 800), (390, 780)
COLOURS = 128  # of a picture: flat colours need no more, and the file is a third
TRAINING = """
import fanfold, torch
run = fanfold.init("code", name="linear", system=True, quiet=True, console=True, ops={"every": 1}, stamp=True,
                   config={"lr": 0.05, "width": 64}, notes="**Baseline** of the small model, see `train.py`.")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), run.config["lr"])
for step in range(150):
    x = torch.randn(128, 64)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    run.log({"loss": loss, "grad_norm": sum(p.grad.norm() for p in model.parameters())}, step=step)
    if step % 30 == 0: print(f"step {step}: loss {loss.item():.3f}")
torch.save(model.state_dict(), "model.pt")
run.finish()
"""
# Name, fragment, what has to be there.
PAGES = (
    ("charts", "p=demo&s=0.3", "figure[data-painted]"),
    ("ranks", "p=demo&q=step_seconds&ranks=mean&f=ranks>1", "figure[data-painted]"),
    (
        "table",
        "p=demo&v=table&freeze=metric:train/loss&shade=metric:val/accuracy,metric:train/loss",
        "[role=grid] [role=rowheader]",
    ),
    ("run", "p=code&v=run", "figure[data-painted]"),
    ("compare", "p=demo&v=compare", "figure[data-painted]"),
    ("sweep", "p=demo&v=sweep&sweep=min:val/loss", "main canvas"),
    ("media", "p=demo&v=media&key=val/picture&also=val/samples&f=width=256", "main img"),
    ("logs", "p=code&v=logs", "[role=log] p"),
    ("alerts", "p=demo&v=alerts", "main ul li"),
    ("provenance", "p=code&v=provenance", "main svg rect"),
    ("profile", "p=code&v=profile", "main table"),
    ("empty", "p=my-project", "main pre"),
)


@contextmanager
def dashboard() -> Iterator[str]:
    """Serve example runs and a real training from a directory of their own."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        write_examples(runs)
        (Path(folder) / "train.py").write_text(TRAINING)
        env = {**os.environ, "FANFOLD_DIR": str(runs), "FANFOLD_CACHE_DIR": f"{folder}/cache"}
        subprocess.run([sys.executable, "train.py"], cwd=folder, env=env, check=True, capture_output=True)
        command = [sys.executable, "-m", "fanfold", "ui", "--dir", str(runs), "--json", "--no-token", "--port", "0", "--write"]
        server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["address"]
        finally:
            server.terminate()
            server.wait(20)


def save(page: Any, name: str) -> None:
    picture = Image.open(io.BytesIO(page.screenshot()))
    picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(FOLDER / f"{name}.png", optimize=True)


def take(address: str, theme: str, wide: int, high: int, pages: Sequence[tuple[str, str, str]]) -> None:
    with window(viewport={"width": wide, "height": high}, color_scheme=theme, reduced_motion="reduce") as context:
        context.set_default_timeout(120_000)
        for name, fragment, there in pages:
            page = context.new_page()
            page.goto(f"{address}#{fragment}")
            page.locator(there).first.wait_for()
            page.wait_for_timeout(1500)  # what is drawn a moment later
            save(page, f"{name}-{theme}")
            page.close()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with dashboard() as address:
        for theme in ("light", "dark"):
            take(address, theme, *WIDE, PAGES)
            take(address, theme, *PHONE, [("phone", *PAGES[0][1:])])
    print(f"{len(list(FOLDER.glob('*.png')))} pictures in {FOLDER}")


if __name__ == "__main__":
    main()
