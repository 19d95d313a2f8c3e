"""Search files and folders for runs of other tools, by their content. Links are not followed, and the search is bounded."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import SettingError, describe, notices, outcome
from ..journal.directory import is_run
from .events import Found, Importer
from .importers import importer_of, importers

MOST_DEPTH: Final = 16
MOST_ENTRIES: Final = 500_000
ASK_SECONDS: Final = 5.0
# Folders without runs, or with our own.
SKIPPED: Final = frozenset({".git", ".hg", ".svn", ".fanfold", ".venv", "venv", "node_modules", "__pycache__", "site-packages"})


class Sighting(NamedTuple):
    """A run at its source, and who can read it."""

    importer: Importer
    found: Found
    source: str  # as the user named it
    also: tuple[Path, ...] = ()  # where the same run was found again, and is not read


class Search:
    """A search of some sources. Repeating it costs a stat for each folder and a listing for each that changed."""

    def __init__(self, sources: Iterable[str | os.PathLike[str]], kind: str | None = None) -> None:
        self.sources = [os.fspath(source) for source in sources]
        self.chosen: Sequence[Importer] = [importer_of(kind)] if kind else importers()
        self.named = kind is not None
        self._folders: dict[Path, tuple[int, list[Path], list[Path]]] = {}
        self._answers: dict[tuple[Path, bool], tuple[float, int, list[tuple[Importer, Found]]]] = {}
        self._addresses: dict[str, tuple[float, list[tuple[Importer, Found]]]] = {}
        self._left = MOST_ENTRIES

    def __call__(self) -> Iterator[Sighting]:
        """Yield every run found, once each."""
        known: dict[tuple[str, str], Sighting] = {}
        self._left = MOST_ENTRIES
        for source in self.sources:
            for importer, found in self._in(source):
                name = (found.kind, found.id)
                known[name] = _joined(known[name], found) if name in known else Sighting(importer, found, source)
        yield from known.values()

    def _in(self, source: str) -> Iterator[tuple[Importer, Found]]:
        if "://" in source:
            yield from self._at_address(source)
            return
        path = Path(source).expanduser().absolute()
        if not path.exists():
            raise SettingError(f"{source} does not exist. Nothing was imported from it. Check the path.")
        yield from self._below(path, 0, set())

    def _at_address(self, source: str) -> Iterator[tuple[Importer, Found]]:
        """Ask the importers that take addresses, such as a server's."""
        then, answer = self._addresses.get(source, (-ASK_SECONDS, []))
        if time.monotonic() - then >= ASK_SECONDS:
            asked = [importer for importer in self.chosen if hasattr(importer, "find_address")]
            answer = [(importer, found) for importer in asked for found in importer.find_address(source)]
            self._addresses[source] = (time.monotonic(), answer)
        yield from answer

    def _below(self, path: Path, depth: int, taken: set[Path]) -> Iterator[tuple[Importer, Found]]:
        """Ask about a path, then about what is in it, except for what already belongs to a run."""
        if path in taken or self._left <= 0:
            return
        for importer, found in self._at(path, depth):
            taken.update(one for one in found.paths if one != path)
            yield importer, found
        if depth >= MOST_DEPTH or not path.is_dir() or (depth and path.is_symlink()):
            return
        folders, files = self._listed(path)
        if is_run(path):
            return
        for child in (*files, *folders):
            yield from self._below(child, depth + 1, taken)

    def _at(self, path: Path, depth: int) -> list[tuple[Importer, Found]]:
        """Return the runs at a path, asking again only if it changed, or if there was none the last time, a while ago."""
        try:
            date = path.lstat().st_mtime_ns
        except OSError:
            return []
        place = (path, not depth)
        known = self._answers.get(place)
        if known is not None and known[1] == date and (known[2] or time.monotonic() - known[0] < ASK_SECONDS):
            return known[2]
        # Some kinds, such as a CSV file, can be anything: they are read only if the user names the file.
        asked = [one for one in self.chosen if not depth or self.named or getattr(one, "searched", True)]
        answer = [(importer, found) for importer in asked for found in self._asked(importer, path)]
        self._answers[place] = (time.monotonic(), date, answer)
        return answer

    def _asked(self, importer: Importer, path: Path) -> list[Found]:
        found, error = outcome(lambda: list(importer.find(path)))
        if error is not None:
            notices.once(
                f"find:{importer.kind}:{type(error).__name__}",
                f"{path} could not be examined as {importer.title}: {describe(error)}. Nothing is imported from it as such.",
            )
        return found or []

    def _listed(self, path: Path) -> tuple[list[Path], list[Path]]:
        try:
            date = path.stat().st_mtime_ns
            known = self._folders.get(path)
            if known is not None and known[0] == date:
                return known[1], known[2]
            folders: list[Path] = []
            files: list[Path] = []
            with os.scandir(path) as entries:
                for entry in entries:
                    self._left -= 1
                    if self._left < 0:
                        notices.once(
                            f"entries:{self.sources}",
                            f"more than {MOST_ENTRIES:,} files were searched, and the rest were not. Name the folders with runs.",
                        )
                        break
                    mode = entry.stat(follow_symlinks=False).st_mode
                    if stat.S_ISDIR(mode) and entry.name not in SKIPPED:
                        folders.append(path / entry.name)
                    elif stat.S_ISREG(mode):
                        files.append(path / entry.name)
        except OSError as error:
            notices.once(f"list:{path}", f"{path} cannot be searched: {error.strerror}. Nothing is imported from it.")
            return [], []
        self._folders[path] = (date, sorted(folders), sorted(files))
        return self._folders[path][1:]


def _joined(known: Sighting, found: Found) -> Sighting:
    """Return a run that was found in two places: with both, if its importer can tell that they are parts of it."""
    places = set(known.found.paths)
    if all(path in places or not places.isdisjoint(path.parents) for path in found.paths):
        return known  # the same place, named twice, or inside it
    whole: Found | None = getattr(known.importer, "join", lambda *_both: None)(known.found, found)
    return known._replace(also=(*known.also, found.paths[0])) if whole is None else known._replace(found=whole)


def signature(importer: Importer, found: Found) -> object:
    """Return the sizes and dates of a run's files, which change when the files do."""
    own = getattr(importer, "signature", lambda _found: None)(found)
    if own is not None:
        return own
    if not found.paths:  # on a server, which is asked each time
        return time.time_ns()
    return [_sizes(path) for path in found.paths]


def last_written(found: Found) -> float:
    """Return when a run's files were last written to, in seconds since 1970; 0 if it has none, as on a server."""
    files = [path for path in found.paths if path.is_file()] or found.paths
    return max((facts.st_mtime for path in files for facts in _files(path)), default=0.0)


def size_of(found: Found) -> int:
    """Return the size of a run's files in bytes."""
    return sum(facts.st_size for path in found.paths for facts in _files(path))


def _files(path: Path, depth: int = 0) -> Iterator[os.stat_result]:
    """Yield the facts of a file, or of the files below a folder."""
    try:
        facts = path.lstat()
        if not stat.S_ISDIR(facts.st_mode) or depth > MOST_DEPTH:
            yield facts
            return
        with os.scandir(path) as entries:
            inner = [path / entry.name for entry in entries]
    except OSError:
        return
    for one in inner:
        yield from _files(one, depth + 1)


def _sizes(path: Path, depth: int = 0) -> list[object]:
    try:
        facts = path.lstat()
        if not stat.S_ISDIR(facts.st_mode) or depth > MOST_DEPTH:
            return [facts.st_size, facts.st_mtime_ns]
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries)
        return [facts.st_mtime_ns, *(_sizes(path / name, depth + 1) for name in names)]
    except OSError as error:
        return [str(error.strerror)]
