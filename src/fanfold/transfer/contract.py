"""The importer contract: what every importer must do with files that the product itself wrote.

Subclass `ImporterContract` in a test file, set `importer`, and write `write(folder)` and, if runs grow, `grow(folder)`; pytest
does the rest. The importer need not be installed as an entry point.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..store import open_run
from .account import RunAccount
from .events import Artifact, Event, Found, Importer, Left, Mark, Rows, Values
from .importing import Import

_DTYPES = ("float64", "float32", "int64", "bool")


class ImporterContract:
    """The tests every importer passes. The test names state what is guaranteed."""

    importer: ClassVar[Any]  # the class
    damages: ClassVar[int] = 40  # damaged copies that are imported

    def write(self, folder: Path) -> None:
        """Write one run below an empty folder, with the product's own library or in its own format."""
        raise NotImplementedError

    def grow(self, folder: Path) -> None:
        """Add to the run that `write` wrote, as the product does while the run continues."""

    def _source(self, tmp_path: Path) -> Path:
        source = tmp_path / "source"
        source.mkdir()
        self.write(source)
        return source

    def _found(self, source: Path) -> list[Found]:
        return [one.found for one in self._import(source, source.parent / "none").search()]

    def _events(self, found: Found, position: Any = None) -> list[Event]:
        return list(self.importer().read(found, position))

    def _import(self, source: Path, root: Path) -> Import:
        work = Import([source], dir=root)
        work.search.chosen = [self.importer()]
        work.search.named = True
        return work

    def _imported(self, source: Path, root: Path) -> list[RunAccount]:
        return self._import(source, root).once()

    # The guarantees

    def test_an_importer_has_a_kind_and_a_title(self) -> None:
        importer: Importer = self.importer()
        assert importer.kind.isidentifier() and importer.kind == importer.kind.lower()
        assert importer.title

    def test_the_run_is_found_and_its_id_stays(self, tmp_path: Path) -> None:
        source = self._source(tmp_path)
        (found,) = self._found(source)
        (again,) = self._found(source)
        assert (found.kind, found.id) == (again.kind, again.id) == (self.importer.kind, found.id)
        assert found.id and found.project and found.paths

    def test_other_files_are_not_taken_for_runs(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        (source / "folder").mkdir(parents=True)
        (source / "empty").write_bytes(b"")
        (source / "noise.bin").write_bytes(random.Random(1).randbytes(5000))
        (source / "readme.txt").write_text("hello")
        assert self._found(source) == []

    def test_events_have_the_promised_types(self, tmp_path: Path) -> None:
        (found,) = self._found(self._source(tmp_path))
        points = 0
        for event in self._events(found):
            if isinstance(event, Rows):
                points += _check_rows(event)
            elif isinstance(event, Values):
                assert event.values and all(isinstance(key, str) for key in event.values)
            elif isinstance(event, Artifact):
                assert all(isinstance(name, str) and isinstance(path, Path) for name, path in event.files)
            elif isinstance(event, Mark):
                json.dumps(event.position)
        assert points > 0

    def test_reading_on_from_the_end_repeats_nothing(self, tmp_path: Path) -> None:
        (found,) = self._found(self._source(tmp_path))
        marks = [event.position for event in self._events(found) if isinstance(event, Mark)]
        assert marks, "an importer that gives no position cannot add what is new"
        position = json.loads(json.dumps(marks[-1]))
        assert [event for event in self._events(found, position) if isinstance(event, (Rows, Values, Artifact))] == []

    def test_importing_twice_makes_one_run(self, tmp_path: Path) -> None:
        source = self._source(tmp_path)
        (first,) = self._imported(source, tmp_path / "store")
        (second,) = self._imported(source, tmp_path / "store")
        assert first.outcome == "imported" and first.points > 0
        assert (second.run, second.points) == (first.run, 0)

    def test_importing_again_adds_only_what_is_new(self, tmp_path: Path) -> None:
        source = self._source(tmp_path)
        (first,) = self._imported(source, tmp_path / "store")
        self.grow(source)
        (second,) = self._imported(source, tmp_path / "store")
        (whole,) = self._imported(source, tmp_path / "fresh")
        assert (second.run, second.points) == (first.run, whole.points - first.points)
        timed = all(event.times is not None for event in self._events(self._found(source)[0]) if isinstance(event, Rows))
        assert _numbers(second, timed=timed) == _numbers(whole, timed=timed)

    def test_a_run_that_is_imported_is_over(self, tmp_path: Path) -> None:
        (account,) = self._imported(self._source(tmp_path), tmp_path / "store")
        assert open_run(Path(account.path)).status in ("finished", "failed", "killed", "preempted")

    def test_nothing_is_written_beside_the_source(self, tmp_path: Path) -> None:
        source = self._source(tmp_path)
        before = _content(source)
        self._imported(source, tmp_path / "store")
        assert _content(source) == before

    def test_damage_is_never_an_exception(self, tmp_path: Path) -> None:
        source = self._source(tmp_path)
        chance = random.Random(7)
        files = sorted(path for path in source.rglob("*") if path.is_file() and not path.is_symlink())
        for number in range(self.damages):
            copy, store = tmp_path / f"copy{number}", tmp_path / f"store{number}"
            shutil.copytree(source, copy, symlinks=True)
            victim = copy / chance.choice(files).relative_to(source)
            victim.write_bytes(_damaged(victim.read_bytes(), chance))
            for path in (copy, *copy.rglob("*")):
                list(self.importer().find(path))
            for found in self._found(copy):
                assert all(not isinstance(event, Left) or event.why for event in self._events(found))
            for account in self._imported(copy, store):
                assert account.outcome in ("imported", "skipped")
                if account.outcome == "imported":
                    assert open_run(Path(account.path)).status
            shutil.rmtree(copy)
            shutil.rmtree(store, ignore_errors=True)


def _numbers(account: RunAccount, *, timed: bool) -> dict[str, list[Any]]:
    """Return the steps and values of each metric, and the times if the source has them."""
    run = open_run(Path(account.path))
    series = {key: run.series(key, raw=True) for key in run.keys()}  # noqa: SIM118 - a method of ours
    return {
        key: [one.steps.tolist(), one.times.tolist() if timed else None, repr(one.values.tolist())] for key, one in series.items()
    }


def _check_rows(event: Rows) -> int:
    sizes = {len(column) for column in event.columns.values()}
    sizes |= {len(column) for column in (event.steps, event.times) if column is not None}
    assert len(sizes) == 1
    assert all(isinstance(key, str) and column.dtype.name in _DTYPES for key, column in event.columns.items())
    assert event.times is None or event.times.dtype == np.int64
    assert event.steps is None or event.steps.dtype == np.int64
    return sizes.pop() * len(event.columns)


def _content(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def _damaged(data: bytes, chance: random.Random) -> bytes:
    """Cut a file, flip some of its bytes, or put noise into it."""
    if not data:
        return chance.randbytes(20)
    kind, at = chance.randrange(4), chance.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + chance.randbytes(30) + data[at:]
    changed = bytearray(data)
    for _ in range(1 if kind == 2 else 20):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)
