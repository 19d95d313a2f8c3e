"""Which run, attempt and directory this process belongs to: the part of init() that happens before anything is written."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import process
from .._version import __version__
from ..errors import RunError, SettingError
from ..journal import format as fmt
from ..journal.bodies import Header
from ..journal.directory import check_folders, journal_files, last_step, read_header, run_path
from ..journal.origin import choose_root, spool_roots
from ..journal.spool import Spool, is_network, recover
from ..journal.writer import Writer
from ..process import Identity, Meeting, digest
from .names import name_for
from .options import Options

_inits = itertools.count()
ANSWER_SECONDS = 600.0


@dataclass
class Place:
    """A process's place in a run."""

    me: Identity
    project: str
    run_id: str
    path: Path
    attempt: str
    ordinal: int
    first_step: int
    name: str | None
    resumed: bool
    spool: Spool | None = None
    header: dict[str, Any] = field(default_factory=dict)
    chores: list[Callable[[], object]] = field(default_factory=list)

    def worker_header(self, role: str = "worker") -> dict[str, Any]:
        """Return the header of a journal that belongs to this rank but is not its main one."""
        return {**self.header, "role": role, "pid": os.getpid(), "process": secrets.token_hex(8)}

    def after_fork_in_child(self) -> None:
        self.chores, self.spool = [], None  # the parent mirrors the spool, including its children's journals

    def done(self, closed: bool) -> None:
        """Copy the spool to the run's directory."""
        if self.spool is not None:
            self.spool.finish() if closed else self.spool.mirror()


def find_place(options: Options, *, alone: bool = False) -> Place:
    """Decide which run this process writes to, communicating with other ranks only as a last resort.

    A run opened `alone`, by its id, is not counted: ranks agree on a run by the number of runs each has opened.
    """
    me, count = process.detect(), -1 if alone else next(_inits)
    root, project = options.root, _checked_name("project", options.project)
    shared = "" if options.id else process.shared_key(me, count, lambda: _meet(root, me, count))
    attempt = digest(shared, process.launch_key(me), str(count))
    run_id = _checked_name("id", options.id or _choose(root, options, attempt, digest(project, shared, str(count))))
    path = run_path(root, project, run_id)
    earlier = _earlier(path, me.rank, attempt)
    _check_resume(options.resume, run_id, path, bool(earlier))
    steps = [step for file, header in earlier if header.rank == me.rank and (step := last_step(file)) is not None]
    names = [header.name for _, header in earlier if header.name]
    attempts = {(header.attempt, header.ordinal) for _, header in earlier if header.rank == 0}
    return Place(me, project, run_id, path, attempt, len(attempts) + 1, max(steps, default=-1) + 1,
                 options.name or (names[-1] if names else None), bool(earlier))  # fmt: skip


def _checked_name(what: str, name: Any) -> str:
    if not isinstance(name, str) or not name.strip() or "\x00" in name:
        raise SettingError(f"init({what}={name!r}) is not a name. The run was not started. Pass a text that is not empty.")
    return name


def _meet(root: Path, me: Identity, count: int) -> str:
    _make_root(root)
    meeting = Meeting(root, me, count)
    if not me.main:
        return meeting.ask()
    key = process.first_word(me)
    with contextlib.suppress(OSError):  # ranks that ask while this process lives get an answer anyway
        process.sweep(root, ANSWER_SECONDS)
        meeting.stand(key)
    threading.Thread(target=_answer, args=(meeting, key), name="fanfold-join", daemon=True).start()
    return key


def _answer(meeting: Meeting, key: str) -> None:
    """Answer the other ranks until all have asked, or ANSWER_SECONDS have passed."""
    taken, pause, deadline = 0, 0.02, time.monotonic() + ANSWER_SECONDS
    while taken < meeting.me.world_size - 1 and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            taken = meeting.answer(key)
        time.sleep(pause)
        pause = min(pause * 1.05, 1.0)
    with contextlib.suppress(OSError):
        meeting.leave()


def _earlier(path: Path, rank: int, attempt: str) -> list[tuple[Path, Header]]:
    """Return the journals of earlier attempts that matter here: those of this rank and of rank 0."""
    found = []
    for file in journal_files(path):
        if file.name.partition("-")[0] in (str(rank), "0"):
            header = read_header(file)
            # A journal this rank wrote before is an earlier attempt, even if no launcher distinguishes the two.
            other = header and (header.attempt != attempt or header.rank == rank)
            if header and other and header.role == "main":
                found.append((file, header))
    return sorted(found, key=lambda pair: (pair[1].ordinal or 0, pair[1].started))


def _check_resume(resume: str, run_id: str, path: Path, exists: bool) -> None:
    if resume == "never" and exists:
        raise RunError(
            f"run {run_id} exists already in {path}, and resume='never'. The run was not started. "
            "Choose another id, delete it with `fanfold rm`, or pass resume='allow' to continue it."
        )
    if resume == "must" and not exists:
        raise RunError(
            f"run {run_id} does not exist in {path.parent}, and resume='must'. The run was not started. "
            "Check id=, project= and dir=, or pass resume='allow' to start it."
        )


def _choose(root: Path, options: Options, attempt: str, own: str) -> str:
    """Return this job's own run, or the project's newest unfinished run under resume='auto' if its own does not exist yet.

    Every rank gets the same answer, because journals written by this attempt are ignored.
    """
    if options.resume != "auto" or journal_files(run_path(root, options.project, own)):
        return own
    from ..store import find_unfinished

    return find_unfinished(root, options.project, name=options.name, ignore_attempt=attempt) or own


def open_writer(place: Place, options: Options) -> Writer:
    """Create the run's directory and open this process's journal, on a spool if the directory is on a network filesystem."""
    place.name = options.name or place.name or name_for(place.run_id)
    _make_root(options.root)
    directory = place.path / "journal"
    place.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_folders(place.path)
    directory.mkdir(exist_ok=True, mode=0o700)
    home = _spool(place, options, directory)
    me = place.me
    place.header = {
        "format": [fmt.MAJOR, fmt.MINOR],
        "writer": f"fanfold {__version__}",
        "run": place.run_id,
        "project": place.project,
        "name": place.name,
        "role": "main",
        "rank": me.rank,
        "world": me.world_size,
        "local_rank": me.local_rank,
        "attempt": place.attempt,
        "ordinal": place.ordinal,
        "node": me.node,
        "boot": me.boot,
        "pid": me.pid,
        "process": secrets.token_hex(8),
        "launcher": me.launcher,
        "spool": str(home) if place.spool else None,
    }
    return Writer(home, place.header, durability=options.durability)


def _make_root(root: Path) -> None:
    """Create the directory for all runs; other ranks may be doing the same."""
    if not root.exists():
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        (root / ".gitignore").write_text("*\n", encoding="ascii")  # runs do not belong in a repository


def _spool(place: Place, options: Options, directory: Path) -> Path:
    wanted = options.spool
    if wanted == "never" or (wanted == "auto" and not is_network(directory)):
        return directory
    given = options.spool_dir
    root = Path(given).absolute() if given else choose_root()
    with contextlib.suppress(OSError):
        recover(*{root, *spool_roots()})
    place.spool = Spool(root, directory)
    place.chores.append(place.spool.mirror)
    return place.spool.directory
