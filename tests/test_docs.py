"""The docs run: every Python block of a page, in order, in one process; links lead somewhere; every command is documented."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [page for page in PAGES if page.parent.name != "trackers" or page.name == "index.md"]  # the others need their system set up


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def python(code: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=100,
                          env={**os.environ, "FANFOLD_SYSTEM": "0"})  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [page for page in RUN if blocks(page)], ids=lambda page: page.name)
def test_every_snippet_runs(page, runs_dir, tmp_path):
    """A page's blocks are pasted one after another, by somebody who has logged a run before."""
    python('import fanfold; fanfold.init(project="llm").log({"loss": 0.5}, step=0)', tmp_path)
    python("\n".join(blocks(page)).replace("rank=3", "rank=0"), tmp_path)  # the docs speak of a job with many ranks


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_every_snippet_imports_what_it_uses(page):
    """A block may use what an earlier one of its page made; imports are repeated, so that each can be pasted without looking for them."""
    trees = [ast.parse(block) for block in blocks(page)]
    known = {"fanfold"}.union(*map(imported, trees))
    used = [{node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & known for tree in trees]
    missing = {number: names - imported(tree) for number, (names, tree) in enumerate(zip(used, trees, strict=True), 1)}
    assert {number: names for number, names in missing.items() if names} == {}


def imported(tree: ast.AST) -> set[str]:
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}


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
