"""Deliver runs to trackers: the remaining points to the trackers they were logged to, or a whole run to another one.

Without RUN: every run with undelivered points. With --to, the whole run goes to that tracker, running or finished; points it
already has are not sent again. A tracker of your own is named by module:Class.

A run folder may come from somebody else. A destination recorded in it is used only if you named it before, in fanfold.init() or
here; otherwise this command asks, or refuses if there is no terminal.

A separate process delivers to each tracker. Trackers that another process is delivering to are skipped.

exit codes: 0 everything is delivered, 1 something is not (failed or behind), 2 a destination was refused, 3 another process
delivers it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import approvals
from ..drawing.numbers import plural
from ..errors import FanfoldError, RunNotFound, SettingError
from ..journal.directory import decode_name, run_directories
from ..journal.files import is_folder
from ..relay.cursor import Cursor, cursors, public
from ..relay.process import OWNED, Relay, cursor_of, has_everything, learn, remaining
from ..store import StoredRun, open_run
from . import choose, output
from .text import clean

EXAMPLE = """examples:
  fanfold sync                              undelivered points of all runs
  fanfold sync quick-otter-42
  fanfold sync quick-otter-42 --to mlflow --kwargs '{"tracking_uri": "http://mlflow:5000"}'
  fanfold sync - --to tensorboard --follow  a live run, until it ends"""

POLL_SECONDS = 0.1
# The exit code of each outcome; the first that occurred decides.
CODES = {"failed": 1, "behind": 1, "refused": 2, "owned": 3}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="*", help=f"{choose.RUN_HELP} (default: all runs with undelivered points)")
    parser.add_argument("--to", action="append", metavar="NAME", help="to this tracker, or module:Class (repeatable)")
    parser.add_argument("--kwargs", metavar="JSON", help="the tracker's arguments; secrets are better in @FILE or - (stdin)")
    parser.add_argument("-f", "--follow", action="store_true", help="keep delivering until the run ends, and retry forever")
    parser.add_argument("--timeout", type=float, metavar="S", help="give up on a tracker after this many seconds")


class Job(NamedTuple):
    """The delivery of one run to one tracker; without a relay, the outcome is known already."""

    stored: StoredRun
    cursor: Cursor
    relay: Relay | None
    outcome: str = ""
    why: str | None = None


class Done(NamedTuple):
    """The result of a job: its cursor afterwards, and one of delivered, nothing new, behind, owned, refused, failed."""

    job: Job
    cursor: Cursor
    outcome: str
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
    """Yield the named runs, else every run that was ever sent to a tracker; reports of callbacks are runs too."""
    if args.runs:
        for run in {run.path: run for run in (_named(args, word) for word in args.runs)}.values():
            run.pulled()
            yield run
            yield from map(open_run, () if names else choose.reports(run.path))
        return
    if names:
        raise SettingError("--to without RUN would send every run there is. Nothing was sent. Name the runs.")
    for run_folder in run_directories(choose.store(args).root, args.project):
        for folder in (run_folder, *choose.reports(run_folder)):
            if is_folder(folder / "relay") and any((folder / "relay").glob("*.cursor")):
                yield open_run(folder)


def _named(args: argparse.Namespace, word: str) -> StoredRun:
    """Open a run, or a report inside one, which is listed here by its own id."""
    try:
        return choose.one(args, word)
    except RunNotFound:
        for run_folder in run_directories(choose.store(args).root, args.project):
            for folder in choose.reports(run_folder):
                if decode_name(folder.name) == word:
                    return open_run(folder)
        raise


def _jobs(stored: StoredRun, names: list[str], kwargs: Mapping[str, Any], args: argparse.Namespace) -> list[Job]:
    known = cursors(stored.path)
    if not names:
        return [_again(stored, cursor, args) for cursor in known if not has_everything(stored, cursor)]
    jobs = []
    for name in names:
        wanted = public(kwargs)
        approvals.remember(name, wanted)
        same = [cursor for cursor in known if cursor.tracker == name and _is_meant(cursor, wanted)]
        chosen = same or [cursor_of(stored.path, name, kwargs)]
        jobs += [_job(stored, cursor, {**cursor.kwargs, **kwargs}, args) for cursor in chosen]
    return jobs


def _again(stored: StoredRun, cursor: Cursor, args: argparse.Namespace) -> Job:
    """Continue a delivery, if the user chose its destination."""
    if _is_trusted(cursor) or _confirmed(stored, cursor, args):
        return _job(stored, cursor, cursor.kwargs, args)
    why = (
        f"the run's folder names {_destination(cursor)}, which you have not used before; nothing was sent. If you trust it: "
        f"fanfold sync {clean(stored.id)} --to {clean(cursor.tracker)} --kwargs {shlex.quote(clean(json.dumps(cursor.kwargs)))}"
    )
    return Job(stored, cursor, None, "refused", why)


def _is_meant(cursor: Cursor, wanted: Mapping[str, Any]) -> bool:
    """Return whether --to means this destination: the same arguments, and no others but this user's own."""
    return cursor.kwargs == wanted or (wanted.items() <= cursor.kwargs.items() and _is_trusted(cursor))


def _is_trusted(cursor: Cursor) -> bool:
    """Return whether this user chose a destination: they named it, or nothing but their environment does."""
    return not cursor.kwargs or approvals.is_approved(cursor.tracker, cursor.kwargs)


def _confirmed(stored: StoredRun, cursor: Cursor, args: argparse.Namespace) -> bool:
    """Ask whether a destination that a run's folder names may be used, if there is a terminal to ask on."""
    if args.json or args.quiet or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    agreed = output.confirmed(
        f"The folder of run {clean(stored.id)} names {_destination(cursor)}, which you have not used before.\n"
        "It would get the run, and your credentials for it. Send it there?"
    )
    if agreed:
        approvals.remember(cursor.tracker, cursor.kwargs)
    return agreed


def _destination(cursor: Cursor) -> str:
    return clean(f"{cursor.tracker} with {json.dumps(cursor.kwargs, default=str)}")


def _job(stored: StoredRun, cursor: Cursor, kwargs: dict[str, Any], args: argparse.Namespace) -> Job:
    fold = dict(stored.info.get("fold") or {})
    try:
        return Job(stored, cursor, Relay(stored.path, cursor.tracker, kwargs, fold, follow=args.follow))
    except (FanfoldError, ValueError) as error:
        hint = f" Name its class: fanfold sync {stored.id} --to module:Class." if not isinstance(error, FanfoldError) else ""
        return Job(stored, cursor, None, "failed", f"{error}.{hint}".replace("..", "."))


def _deliver(job: Job, args: argparse.Namespace) -> Done:
    """Serve one job from a separate process, with a progress bar."""
    before = Cursor.load(job.cursor.path)
    if job.relay is None:
        return Done(job, before, job.outcome, 0, remaining(job.stored.path, before), job.why)
    try:
        job.relay.start()
        code = _watch(job, job.relay, before, args)
    finally:
        job.relay.kill()  # after Ctrl-C or --timeout; what the tracker confirmed stays confirmed
    after = Cursor.load(job.cursor.path)
    values, left = after.delivered - before.delivered, remaining(job.stored.path, after)
    if code == OWNED:
        return Done(job, after, "owned", 0, left, "another process is delivering it; nothing was sent from here")
    if code != 0:
        why = "it took longer than --timeout" if code is None else f"see {job.stored.path / 'relay' / job.cursor.tracker}.log"
        return Done(job, after, "failed", values, left, after.error or why)
    return Done(job, after, "behind" if left else "delivered" if values else "nothing new", values, left, None)


def _watch(job: Job, relay: Relay, before: Cursor, args: argparse.Namespace) -> int | None:
    """Wait for a relay, with a progress bar; return its exit code, or None after --timeout."""
    total = remaining(job.stored.path, before)
    deadline = time.monotonic() + args.timeout if args.timeout else float("inf")

    def positions() -> Iterator[int]:
        while relay.wait_code(POLL_SECONDS) is None and time.monotonic() < deadline:
            yield min(Cursor.load(job.cursor.path).delivered - before.delivered, total)

    for _ in output.progress(args, positions(), total, f"{job.cursor.tracker} ← {job.stored.id}", at=int):
        pass
    return relay.wait_code(0)


def _report(args: argparse.Namespace, done: list[Done]) -> None:
    output.listed(
        args,
        done,
        ("RUN", "TRACKER", "OUTCOME", "VALUES", "LEFT", "WHERE", "WHY"),
        lambda one: [one.job.stored.id, one.job.cursor.tracker, one.outcome, f"{one.values:,}", f"{one.left:,}",
                     one.cursor.remote or "", one.why or ""],
        facts=_facts,
        right=["VALUES", "LEFT"],
        whole=["RUN", "TRACKER", "OUTCOME"],
        empty="everything is delivered.",
    )  # fmt: skip
    failed = sum(one.outcome == "failed" for one in done)
    if failed and not args.json:
        output.remark(args, f"delivery failed for {plural(failed, 'tracker')}; no data is lost. Fix the cause and try again.")
    for one in done:
        if one.outcome == "refused" and not args.json:
            output.remark(args, f"fanfold: {one.job.stored.id}: {one.why}")


def _facts(one: Done) -> dict[str, Any]:
    cursor = one.cursor
    counts = {name: getattr(cursor, name) for name in ("delivered", "refused", "partial", "remote")}
    tracker = cursor.tracker or one.job.cursor.tracker
    return {"run": one.job.stored.id, "tracker": tracker, "outcome": one.outcome, "values": one.values, "left": one.left,
            **counts, "status": cursor.closed, "error": one.why}  # fmt: skip
