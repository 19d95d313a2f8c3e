"""Which run, attempt and directory this process belongs to: the part of init() that happens before anything is written."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .. import process
from .._version import __version__
from ..errors import RunError, SettingError, notices
from ..journal import format as fmt
from ..journal.directory import check_folders, check_place, journal_files, last_step, make_root, make_run, read_header, run_path
from ..journal.origin import choose_root, spool_roots
from ..journal.spool import Spool, is_network, recover
from ..journal.writer import Writer
from ..process import Meeting, ProcessIdentity, age, digest
from ..settings import TABLE
from . import wrapped
from .names import name_for
from .options import RunOptions

if TYPE_CHECKING:
    from ..journal.bodies import Fork, Header

_inits = itertools.count()
_joined = 0  # the process that has had its first run
ANSWER_SECONDS = 600.0


class Membership(msgspec.Struct):
    """A process's part in a run: which run and attempt, where it is written, and under which name."""

    me: ProcessIdentity
    project: str
    run_id: str
    path: Path
    attempt: str
    ordinal: int
    first_step: int
    name: str
    resumed: bool
    fork: Fork | None = None  # the run that this one continues
    command: tuple[str, ...] | None = None  # of the process around a command, see wrapped.py
    inside: bool = False  # a process inside it, which records into its run
    spool: Spool | None = None
    header: dict[str, Any] = msgspec.field(default_factory=dict)
    chores: list[Callable[[], object]] = msgspec.field(default_factory=list)

    def worker_header(self, role: str = "worker") -> dict[str, Any]:
        """Return the header of a journal that belongs to this rank but is not its main one."""
        return {**self.header, "role": role, "pid": os.getpid(), "process": fmt.new_id()}

    def after_fork_in_child(self) -> None:
        self.chores, self.spool = [], None  # the parent mirrors the spool, including its children's journals

    def done(self, closed: bool) -> None:
        """Copy the spool to the run's directory."""
        if self.spool is not None:
            self.spool.finish() if closed else self.spool.mirror()


def join(options: RunOptions, *, alone: bool = False, command: Sequence[str] | None = None) -> Membership:
    """Decide which run this process writes to, communicating with other ranks only as a last resort.

    A run opened `alone`, by its id, is not counted: ranks agree on a run by the number of runs each has opened. `command`: the
    run is opened around this command.
    """
    me, count = process.detect(), -1 if alone else next(_inits)
    root, project = options.root, _checked_name("project", options.project)
    shared = "" if options.id else process.shared_key(me, count, lambda: _meet(root, me, count))
    around = None if options.id or alone or command is not None else wrapped.claimed(root, digest(shared, str(count)))
    if around is not None:
        return _join_around(around, me, options)
    me = me if command is None else me._replace(launcher=fmt.EXEC)
    attempt = digest(shared, process.launch_key(me), str(count))
    run_id = _checked_name("id", options.id or _choose(root, options, attempt, digest(project, shared, str(count))))
    path = run_path(root, project, run_id)
    earlier = _earlier(path, me.rank, attempt)
    _check_resume(options.resume, run_id, path, bool(earlier))
    member = _member(me, project, run_id, path, attempt, options, earlier)
    member.command = None if command is None else tuple(command)
    return member


def _join_around(around: wrapped.Wrapped, me: ProcessIdentity, options: RunOptions) -> Membership:
    """Join the run of the command that this process belongs to: its attempt is the command's."""
    found = _earlier(around.path, me.rank, around.attempt)
    earlier = [pair for pair in found if (pair[1].launcher, pair[1].attempt) != (fmt.EXEC, around.attempt)]
    member = _member(me, around.project, around.run, around.path, around.attempt, options, earlier)
    member.inside = member.resumed = True  # it adds to the facts that the process around it wrote
    if options.project not in (TABLE["project"].default, around.project):
        notices.once("exec:project", f"this program runs inside `fanfold exec`, so its run is in project {around.project!r}, "
                     f"not in {options.project!r}. Name the project there: fanfold exec --project NAME.")  # fmt: skip
    return member


def _member(
    me: ProcessIdentity,
    project: str,
    run_id: str,
    path: Path,
    attempt: str,
    options: RunOptions,
    earlier: list[tuple[Path, Header]],
) -> Membership:
    steps = [step for file, header in earlier if header.rank == me.rank and (step := last_step(file)) is not None]
    names = [header.name for _, header in earlier if header.name]
    attempts = {(header.attempt, header.ordinal) for _, header in earlier if header.rank == 0}
    fork = next((header.fork for _, header in earlier if header.fork is not None), None)
    return Membership(me, project, run_id, path, attempt, len(attempts) + 1, max(steps, default=fork.step if fork else -1) + 1,
                 options.name or (names[-1] if names else name_for(run_id)), bool(earlier), fork)  # fmt: skip


def _checked_name(what: str, name: Any) -> str:
    if not isinstance(name, str) or not name.strip() or "\x00" in name:
        raise SettingError(f"init({what}={name!r}) is not a name. The run was not started. Pass a text that is not empty.")
    return name


def _meet(root: Path, me: ProcessIdentity, count: int) -> str:
    make_root(root)
    meeting = Meeting(root, me, count)
    if not me.main:
        try:
            return meeting.ask()
        except OSError as error:
            raise RunError(
                f"the ranks of this job cannot meet in {error.filename or root}: {error.strerror or error}. The run was not "
                "started. Give every process the same FANFOLD_RUN_ID (any unique word), or choose another FANFOLD_DIR."
            ) from error
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


def _choose(root: Path, options: RunOptions, attempt: str, own: str) -> str:
    """Return this job's own run, or the project's newest unfinished run under resume='auto' if its own does not exist yet.

    Every rank gets the same answer, because journals written by this attempt are ignored.
    """
    if options.resume != "auto" or journal_files(run_path(root, options.project, own)):
        return own
    from ..store import find_unfinished

    return find_unfinished(root, options.project, name=options.name, ignore_attempt=attempt) or own


def open_writer(member: Membership, options: RunOptions) -> Writer:
    """Create the run's directory and open this process's journal, on a spool if the directory is on a network filesystem."""
    make_root(options.root)
    directory = member.path / "journal"
    check_place(member.path)
    make_run(member.path)
    check_folders(member.path)
    directory.mkdir(exist_ok=True, mode=0o700)
    home = _spool(member, options, directory)
    me = member.me
    member.header = {
        "format": [fmt.MAJOR, fmt.MINOR],
        "writer": f"fanfold {__version__}",
        "run": member.run_id,
        "project": member.project,
        "name": member.name,
        "role": "main",
        "rank": me.rank,
        "world": me.world_size,
        "local_rank": me.local_rank,
        "attempt": member.attempt,
        "ordinal": member.ordinal,
        "node": me.node,
        "boot": me.boot,
        "pid": me.pid,
        "process": fmt.new_id(),
        "launcher": me.launcher,
        "born": _born_ns(),
        "spool": str(home) if member.spool else None,
        "fork": member.fork,
    }
    return Writer(home, member.header, durability=options.durability)


def _born_ns() -> int | None:
    """Return when this process began, if it began for this run: not a notebook, a worker that waits for jobs, or a second run."""
    global _joined  # noqa: PLW0603 - a process has one first run
    waiting = _joined == os.getpid() or hasattr(sys, "ps1") or "ipykernel" in sys.modules or "RAY_JOB_ID" in os.environ
    _joined = os.getpid()
    return None if waiting else time.time_ns() - int(age() * 1e9)


def _spool(member: Membership, options: RunOptions, directory: Path) -> Path:
    wanted = options.spool
    if wanted == "never" or (wanted == "auto" and not is_network(directory)):
        return directory
    given = options.spool_dir
    root = Path(given).absolute() if given else choose_root()
    with contextlib.suppress(OSError):
        recover(*{root, *spool_roots()}, runs=options.root)
    member.spool = Spool(root, directory)
    member.chores.append(member.spool.mirror)
    return member.spool.directory
