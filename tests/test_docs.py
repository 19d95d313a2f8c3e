"""The docs run: every Python block of a page, in order, in one process; links lead somewhere; every command is documented."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [page for page in PAGES if page.parent.name != "trackers" or page.name == "index.md"]  # the others need their system set up

# What the snippets speak of without saying where it comes from.
PRELUDE = """
import fanfold, itertools
loss, lr, n, step = 0.5, 1e-3, 10, 0
loader = range(5)
def train_step(batch): return 1.0 / (batch + 1)
run = fanfold.init(project="llm")
run.log({"loss": loss}, step=0)
"""


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in RUN if blocks(page)], ids=lambda page: page.name)
def test_every_snippet_runs(page, runs_dir, tmp_path):
    code = PRELUDE + "\n".join(blocks(page))
    code = code.replace("rank=3", "rank=0")  # the docs speak of a job with many ranks
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100,
                          env={**os.environ, "FANFOLD_SYSTEM": "0"})  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_project_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_command_is_documented():
    from fanfold.cli import COMMANDS

    text = (ROOT / "docs" / "cli.md").read_text()
    names = [row if isinstance(row, str) else getattr(row, "name", row[0]) for row in COMMANDS]
    assert [name for name in names if f"`fanfold {name}" not in text] == []


def test_the_docs_name_no_file_that_is_gone():
    text = (ROOT / "docs" / "map.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py|[\w]+/)`", text))
    assert [name for name in sorted(named) if not (ROOT / "src" / "fanfold" / name).exists() and not (ROOT / name).exists()] == []
