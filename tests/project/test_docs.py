"""The docs run: every Python block of a page, in order, in one process; links lead somewhere; every command is documented."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paths import DOCS, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SITE = "https://fanfold.github.io/fanfold/latest/"
REPOSITORY = ("https://github.com/fanfold/fanfold/blob/main/", "https://raw.githubusercontent.com/fanfold/fanfold/main/")
# Pages of trackers need their system set up; tutorials are played by test_tutorials.py.
RUN = [page for page in PAGES if page.parent.name not in ("trackers", "tutorials") or page.name == "index.md"]


def title(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def python(code: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=100,
                          env={**os.environ, "FANFOLD_SYSTEM": "0", "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [page for page in RUN if blocks(page)], ids=title)
def test_every_snippet_runs(page, runs_dir, tmp_path):
    """A page's blocks are pasted one after another, by somebody who has logged a run before."""
    python('import fanfold; fanfold.init(project="llm").log({"loss": 0.5}, step=0)', tmp_path)
    python("\n".join(blocks(page)).replace("rank=3", "rank=0"), tmp_path)  # the docs speak of a job with many ranks


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=title)
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


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_inside_the_project_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_table_is_whole(page):
    """A blank line inside a table ends it: the rows below it are shown as text."""
    lines = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE).splitlines()
    begins = [n for n, line in enumerate(lines) if line.startswith("|") and not lines[n - 1].startswith("|")]
    assert [lines[n] for n in begins if not re.fullmatch(r"[|\s:-]+", "".join(lines[n + 1 : n + 2]) or "no rule")] == []


def test_addresses_of_the_project_lead_somewhere():
    """The README is also shown by package indexes, so its links are absolute; each names a file or a page of this checkout."""
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [link for link in links if "://" not in link] == []
    for link in links:
        address, _, anchor = link.partition("#")
        for begin in REPOSITORY:
            if address.startswith(begin):
                assert (ROOT / address.removeprefix(begin)).is_file(), link
        if address.startswith(SITE):
            name = address.removeprefix(SITE).rstrip("/")
            found = [DOCS / f"{name}.md", DOCS / name / "index.md"]
            (page,) = [one for one in found if one.is_file()]
            assert not anchor or anchor in anchors(page), link


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_first_screen_of_the_readme_has_the_install_line_and_the_two_commands():
    blocks = re.findall(
        r"^```\n(.*?)^```", "\n".join((ROOT / "README.md").read_text().splitlines()[:25]), re.DOTALL | re.MULTILINE
    )
    assert blocks[0] == "pip install fanfold\n"
    assert [line.split("#")[0].strip() for line in blocks[1].splitlines()] == ["make demo", "make test"]


def test_the_numbers_of_the_readme_are_those_of_the_benchmarks():
    readme, bench = ((ROOT / name).read_text() for name in ("README.md", "docs/benchmarks.md"))
    table = bench.partition("### One log() call")[2].partition("\n\n|")[2].partition("\n\n")[0]
    measured = {cells[1].strip(): cells[2].strip() for line in table.splitlines() if (cells := line.split("|"))[0] == ""}
    quoted = re.findall(r"^\| \**([\w]+)(?: [\d.]+)?\** \| \**([\d.]+ [mµ]s)\** \|", readme, re.MULTILINE)
    assert len(quoted) == 7
    for name, time in quoted:
        number, unit = measured[name].split()
        assert (f"{float(number):.2g}" in time or f"{float(number):.0f}" in time) and unit in time, (name, time, measured[name])


# Lists of links, records, generated pages, and pages that explain how something works inside.
WITHOUT_A_BLOCK = ("decisions.md", "map.md", "refused.md", "operator-internals.md", "operator-native.md")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "reference" and page.name not in WITHOUT_A_BLOCK], ids=title
)
def test_a_page_begins_with_something_to_run(page):
    assert "\n```" in page.read_text().split("\n## ")[0]


def test_no_page_names_a_path_of_the_machine_it_was_written_on():
    text = {title(page): page.read_text() for page in PAGES}
    assert {name: found for name, page in text.items() if (found := re.findall(r"/(?:work|root|tmp/helper)/\S+", page))} == {}


def test_every_command_is_documented():
    from fanfold.cli import COMMANDS

    text = (ROOT / "docs" / "cli.md").read_text()
    names = [row if isinstance(row, str) else getattr(row, "name", row[0]) for row in COMMANDS]
    assert [name for name in names if f"`fanfold {name}" not in text] == []


def test_the_docs_name_no_file_that_is_gone():
    text = (ROOT / "docs" / "map.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py|[\w]+/)`", text))
    assert [name for name in sorted(named) if not (ROOT / "src" / "fanfold" / name).exists() and not (ROOT / name).exists()] == []


def test_every_task_of_the_side_by_side_page_is_proved_by_a_test_that_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "tasks.md").read_text())
    assert len(named) == 25
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), name
