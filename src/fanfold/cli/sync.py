"""Deliver runs to trackers: the remaining points to the trackers they were logged to, or a whole run to another one.

Without RUN: every run with undelivered points. With --to, the whole run goes to that tracker, running or finished; points it
already has are not sent again. A tracker of your own is named by module:Class.

A run folder may come from somebody else. A destination recorded in it is used only if you named it before, in fanfold.init() or
here; otherwise this command asks, or refuses where there is no terminal.

Each tracker is served from a process of its own. One that another process serves at the moment is left alone.

exit codes: 0 everything is delivered, 1 something is not (failed or behind), 2 a destination was refused, 3 another process
delivers it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import approvals
from ..callbacks.report import FOLDER
from ..errors import FanfoldError, SettingError
from ..journal.directory import run_directories
from ..journal.files import is_folder
from ..relay.cursor import Cursor, cursors, public
from ..relay.process import OWNED, Relay, cursor_of, learn, remaining
from ..store import StoredRun, open_run
from . import choose, output
from .text import clean, plural

EXAMPLE = """examples:
  fanfold sync                              undelivered points of all runs
  fanfold sync quick-otter-42
  fanfold sync quick-otter-42 --to mlflow --kwargs '{"tracking_uri": "http://mlflow:5000"}'
  fanfold sync - --to tensorboard --follow  a live run, until it ends"""

POLL_SECONDS = 0.1
# What each outcome makes of the exit code; the first that occurred decides.
CODES = {"failed": 1, "behind": 1, "refused": 2, "owned": 3}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="*", help=f"{choose.RUN_HELP} (default: all runs with undelivered points)")
    parser.add_argument("--to", action="append", metavar="NAME", help="to this tracker, or module:Class (repeatable)")
    parser.add_argument(
        "--kwargs", metavar="JSON", help="the tracker's arguments; @FILE or - (stdin) keeps secrets out of the process list"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="keep delivering until the run ends, and retry without end")
    parser.add_argument("--timeout", type=float, metavar="S", help="give up on a tracker after this many seconds")


class Job(NamedTuple):
    """One run to one tracker: its arguments, and whether it can be served at all."""

    run: Path
    id: str
    cursor: Cursor
    kwargs: dict[str, Any]
    relay: Relay | None
    error: str | None = None
    refused: bool = False


class Done(NamedTuple):
    """What became of a job."""

    job: Job
    outcome: str  # delivered | nothing new | behind | owned | refused | failed
    values: int
    left: int
    why: str | None


def run(args: argparse.Namespace) -> int:
    kwargs = read_kwargs(args.kwargs)
    if args.kwargs and len(args.to or ()) != 1:
        raise SettingError("--kwargs are the arguments of one tracker. Nothing was sent. Name it with --to.")
    names = [learn(word) for word in args.to or ()]
    jobs = [job for stored in _runs(args, names) for job in _jobs(stored, names, kwargs, args)]
    done = [_deliver(job, args) for job in jobs]
    _report(args, done)
    seen = {one.outcome for one in done}
    return next((code for outcome, code in CODES.items() if outcome in seen), 0)


def read_kwargs(text: str | None) -> dict[str, Any]:
    """Read a tracker's arguments: JSON as given, from a file, or from stdin."""
    try:
        raw = sys.stdin.read() if text == "-" else Path(text[1:]).read_text(encoding="utf-8") if text and text[0] == "@" else text
        found = json.loads(raw or "{}")
    except ValueError as error:
        raise SettingError(f"--kwargs is not JSON: {error}. Nothing was sent.") from error
    if not isinstance(found, dict):
        raise SettingError('--kwargs is not a JSON object. Nothing was sent. Write for example \'{"project": "llm"}\'.')
    return found


def _runs(args: argparse.Namespace, names: list[str]) -> Iterator[StoredRun]:
    """Yield the runs to look at: those named, else all that went to a tracker before."""
    if args.runs:
        for run in choose.several(args, args.runs):
            run.pulled()
            yield run
            yield from map(open_run, () if names else _reports(run.path))
        return
    if names:
        raise SettingError("--to without RUN would send every run there is. Nothing was sent. Name the runs.")
    for run_folder in run_directories(choose.store(args).root, args.project):
        for folder in (run_folder, *_reports(run_folder)):
            if is_folder(folder / "relay") and any((folder / "relay").glob("*.cursor")):
                yield open_run(folder)


def _reports(folder: Path) -> list[Path]:
    """Return the reports that callbacks keep inside a run; each has its tracker, and goes to no other."""
    return list(run_directories(folder / FOLDER)) if is_folder(folder / FOLDER) else []


def _jobs(stored: StoredRun, names: list[str], kwargs: Mapping[str, Any], args: argparse.Namespace) -> list[Job]:
    folder = stored.path
    known = cursors(folder)
    if not names:
        due = [cursor for cursor in known if not _is_done(stored, cursor)]
        return [
            _job(stored, cursor, cursor.kwargs, args.follow) if _is_trusted(cursor) or _confirmed(stored, cursor, args)
            else _refused(stored, cursor)
            for cursor in due
        ]  # fmt: skip
    jobs = []
    for name in names:
        wanted = public(kwargs)
        approvals.remember(name, wanted)
        same = [cursor for cursor in known if cursor.tracker == name and _is_meant(cursor, wanted)]
        for cursor in same or [cursor_of(folder, name, kwargs)]:
            jobs.append(_job(stored, cursor, {**cursor.kwargs, **kwargs}, args.follow))  # noqa: PERF401 - reads better so
    return jobs


def _is_meant(cursor: Cursor, wanted: Mapping[str, Any]) -> bool:
    """Return whether --to means this destination: the same arguments, and no others but this user's own."""
    return cursor.kwargs == wanted or (wanted.items() <= cursor.kwargs.items() and _is_trusted(cursor))


def _is_trusted(cursor: Cursor) -> bool:
    """Return whether this user chose a destination: they named it, or nothing but their environment does."""
    return not cursor.kwargs or approvals.is_approved(cursor.tracker, cursor.kwargs)


def _confirmed(stored: StoredRun, cursor: Cursor, args: argparse.Namespace) -> bool:
    """Ask whether a destination that stands in a run's folder may be used, where there is somebody to ask."""
    if args.json or args.quiet or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    question = (
        f"The folder of run {clean(stored.id)} names {_destination(cursor)}, which you have not used before.\n"
        "It would get the run, and your credentials for it. Send it there? [y/N] "
    )
    print(question, file=sys.stderr, end="", flush=True)
    agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if agreed:
        approvals.remember(cursor.tracker, cursor.kwargs)
    return agreed


def _destination(cursor: Cursor) -> str:
    return clean(f"{cursor.tracker} with {json.dumps(cursor.kwargs, default=str)}")


def _refused(stored: StoredRun, cursor: Cursor) -> Job:
    why = (
        f"the run's folder names {_destination(cursor)}, which you have not used before; nothing was sent. If you trust it: "
        f"fanfold sync {stored.id} --to {cursor.tracker} --kwargs '…'"
    )
    return Job(stored.path, stored.id, cursor, {}, None, why, refused=True)


def _is_done(stored: StoredRun, cursor: Cursor) -> bool:
    """Tell whether a destination has all and was told how the run ended."""
    return cursor.closed == stored.status and cursor.error is None and remaining(stored.path, cursor) == 0


def _job(stored: StoredRun, cursor: Cursor, kwargs: dict[str, Any], follow: bool) -> Job:
    fold = dict(stored.info.get("fold") or {})
    try:
        relay = Relay(stored.path, cursor.tracker, kwargs, fold, follow=follow)
    except (FanfoldError, ValueError) as error:
        hint = f" Name its class: fanfold sync {stored.id} --to module:Class." if not isinstance(error, FanfoldError) else ""
        return Job(stored.path, stored.id, cursor, kwargs, None, f"{error}.{hint}".replace("..", "."))
    return Job(stored.path, stored.id, cursor, kwargs, relay)


def _deliver(job: Job, args: argparse.Namespace) -> Done:
    """Serve one job from a process of its own, with a bar while it takes."""
    before = Cursor.load(job.cursor.path)
    if job.relay is None:
        return Done(job, "refused" if job.refused else "failed", 0, remaining(job.run, before), job.error)
    try:
        job.relay.start()
        code = _watch(job, job.relay, before, args)
    finally:
        job.relay.kill()  # after Ctrl-C or when time is up; what it had settled stays settled
    after = Cursor.load(job.cursor.path)
    values, left = after.delivered - before.delivered, remaining(job.run, after)
    if code == OWNED:
        return Done(job, "owned", 0, left, "another process is delivering it; nothing was sent from here")
    if code != 0:
        said = "it took longer than --timeout" if code is None else f"see {job.run / 'relay' / job.cursor.tracker}.log"
        return Done(job, "failed", values, left, after.error or said)
    return Done(job, "behind" if left else "delivered" if values else "nothing new", values, left, None)


def _watch(job: Job, relay: Relay, before: Cursor, args: argparse.Namespace) -> int | None:
    """Wait for a relay, moving the bar along; None when time is up."""
    total = remaining(job.run, before)
    deadline = time.monotonic() + args.timeout if args.timeout else float("inf")

    def positions() -> Iterator[int]:
        while relay.wait_code(POLL_SECONDS) is None and time.monotonic() < deadline:
            yield min(Cursor.load(job.cursor.path).delivered - before.delivered, total)

    for _ in output.moving(args, positions(), total, f"{job.cursor.tracker} ← {job.id}"):
        pass
    return relay.wait_code(0)


def _report(args: argparse.Namespace, done: list[Done]) -> None:
    if args.json:
        output.print_json([_as_dict(one) for one in done])
        return
    if not done:
        output.remark(args, "everything is delivered.")
        return
    output.table(
        ["RUN", "TRACKER", "OUTCOME", "VALUES", "LEFT", "WHERE", "WHY"],
        [
            [one.job.id, one.job.cursor.tracker, one.outcome, f"{one.values:,}", f"{one.left:,}", _where(one), one.why or ""]
            for one in done
        ],
        right=["VALUES", "LEFT"],
        whole=["RUN", "TRACKER", "OUTCOME"],
    )
    failed = sum(one.outcome == "failed" for one in done)
    if failed:
        output.remark(
            args, f"{plural(failed, 'tracker')} could not be delivered; no data is lost. Fix the cause and run this again."
        )
    for one in done:
        if one.outcome == "refused":
            output.remark(args, f"fanfold: {one.job.id}: {one.why}")


def _where(one: Done) -> str:
    return Cursor.load(one.job.cursor.path).remote or ""


def _as_dict(one: Done) -> dict[str, Any]:
    cursor = Cursor.load(one.job.cursor.path)
    return {
        "run": one.job.id,
        "tracker": cursor.tracker or one.job.cursor.tracker,
        "outcome": one.outcome,
        "values": one.values,
        "left": one.left,
        "delivered": cursor.delivered,
        "refused": cursor.refused,
        "partial": cursor.partial,
        "status": cursor.closed,
        "remote": cursor.remote,
        "error": one.why,
    }
