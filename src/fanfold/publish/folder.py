"""Writes a published folder: the built page, the answers it needs, and what keeps it safe on a host without our headers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from ..errors import FanfoldError, SettingError
from ..server.app import STATIC
from ..server.guard import PAGE_POLICY, PLOT_POLICY
from ..server.media import PLOT_PAGE
from ..store.query import Store
from .answers import Answers
from .chosen import ChosenRuns

# A host sends none of our headers, so the page carries its policy. Frames with logged HTML inherit it, and need their styles.
POLICY = PAGE_POLICY.partition("; frame-ancestors")[0].replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
# Figures run scripts in a frame that has no origin. Opened in any other way, the page does nothing.
PLOT = PLOT_PAGE.replace("<script>", "<script>\nif (self.origin !== 'null') throw new Error('only inside the dashboard');", 1)
PLOT_META = "; ".join(rule for rule in PLOT_POLICY.split("; ") if not rule.startswith(("sandbox", "frame-ancestors")))
MARK = ".fanfold-published"  # the file that says that a folder is ours to replace
ROBOTS = "User-agent: *\nDisallow: /\n"
FROM_DISK = """if (location.protocol === 'file:') addEventListener('DOMContentLoaded', () => {
  document.body.textContent = 'Browsers do not run this from a file. Serve the folder: python -m http.server --directory FOLDER';
});
"""
Progress = Callable[[Iterable[Callable[[], None]], int], Iterable[Callable[[], None]]]


@dataclass(frozen=True)
class PublishOptions:
    """How a folder is written."""

    zip: bool = False
    media: bool = True
    buckets: int | None = None  # of each series; None: up to 1000, fewer with many runs
    progress: Progress = lambda questions, _total: questions


def publish(store: Store, chosen: Mapping[str, frozenset[str]], target: Path, options: PublishOptions) -> dict[str, Any]:
    """Write the runs (project: ids) to a folder, or to a zip file with one; return what it holds and what it leaves out.

    It is written beside the target and then takes its place, so that a host never serves half of it.
    """
    if not (STATIC / "index.html").is_file():
        raise FanfoldError("the dashboard is not built. Nothing was published. In a checkout, run `make web`.")
    place = target.with_suffix(".zip") if options.zip and target.suffix != ".zip" else target
    _check(place, zipped=options.zip)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fanfold-publish-", dir=place.parent) as scratch:
        folder = Path(scratch) / (place.stem if options.zip else place.name)
        answers = _write(ChosenRuns(store, chosen), folder, options)
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        size, made = sum(file.stat().st_size for file in files), Path(scratch) / "made"
        if options.zip:
            _zip(folder, files, made)
        else:
            folder.replace(made)
            made.chmod(0o755)
        _take_place(made, place)
    runs = sum(map(len, chosen.values()))
    return {"path": str(place), "bytes": size, "files": len(files), "projects": list(chosen), "runs": runs,
            "left_out": [{"what": what, "count": count} for what, count in answers.left_out.items()]}  # fmt: skip


def _check(place: Path, *, zipped: bool) -> None:
    if zipped and place.is_dir():
        raise SettingError(f"{place} is a folder. Nothing was published. Name a file for --zip, such as -o runs.zip.")
    if not zipped and (place.exists() or place.is_symlink()):
        ours = place.is_dir() and not place.is_symlink() and ((place / MARK).is_file() or not any(place.iterdir()))
        if not ours:
            raise SettingError(
                f"{place} exists and was not published by fanfold. Nothing was published. Name another folder with -o."
            )


def _take_place(made: Path, place: Path) -> None:
    if place.is_dir():
        old = made.parent / "old"
        place.replace(old)
    made.replace(place)


def _write(store: ChosenRuns, folder: Path, options: PublishOptions) -> Answers:
    shutil.copytree(STATIC, folder)
    (folder / "data" / "blobs").mkdir(parents=True)
    answers = Answers(store, folder / "data", options.buckets, options.media)
    questions = list(answers.questions())
    for question in options.progress(questions, len(questions)):
        question()
    page = _page((folder / "index.html").read_text("utf-8"), [project.name for project in store.projects()])
    for name, text in _texts(page):
        (folder / name).write_text(text, "utf-8")
    if answers.plotly and not _copy_plotly(folder):
        answers.leave_out("the script that draws Plotly figures (pip install plotly)")
    return answers


def _page(index: str, projects: list[str]) -> str:
    """Return index.html as it is in a folder: it says that it is one, and carries its policy."""
    said = msgspec.json.encode({"made": time.time(), "projects": projects}).decode()
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}" />\n'
        '    <meta name="referrer" content="no-referrer" />\n'
        f'    <meta name="robots" content="noindex" />\n    <meta name="fanfold-published" content="{escape(said)}" />\n'
        '    <script src="./from-disk.js"></script>\n    '
    )
    return index.replace("<title>", head + "<title>", 1)


def _texts(page: str) -> Iterator[tuple[str, str]]:
    yield "index.html", page
    yield "embed.html", page
    yield (
        "plot.html",
        PLOT.replace("<title>", f'<meta http-equiv="Content-Security-Policy" content="{escape(PLOT_META)}"><title>', 1),
    )
    yield "from-disk.js", FROM_DISK
    yield "robots.txt", ROBOTS
    yield ".nojekyll", ""  # GitHub Pages serves files as they are
    yield MARK, ""


def _copy_plotly(folder: Path) -> bool:
    found = importlib.util.find_spec("plotly")
    script = Path(found.origin).parent / "package_data" / "plotly.min.js" if found and found.origin else None
    if script is None or not script.is_file():
        return False
    shutil.copyfile(script, folder / "plotly.js")
    return True


def _zip(folder: Path, files: list[Path], made: Path) -> None:
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, f"{folder.name}/{file.relative_to(folder).as_posix()}")
    os.chmod(made, 0o644)  # noqa: PTH101 - a scratch folder is private to the user
