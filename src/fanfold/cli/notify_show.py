"""Show what was sent about a run, to whom and when, and what could not be sent yet.

Addresses are shortened to their kind and a few digits that identify them.

exit codes: 0 everything was sent, 1 there is no run or nobody to notify, 3 something was not sent yet.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from ..notify import NAME
from ..notify.ledger import GATEWAY, LEDGER, FilePages, Ledger, Pages
from ..relay.process import cursor_of, has_everything
from ..settings import is_address
from ..store import StoredRun
from . import choose, output
from .text import clean

EXAMPLE = """examples:
  fanfold notify show -
  fanfold notify show quick-otter-42 --json"""

WAITING = 3


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", default="-", help=f"{choose.RUN_HELP} (default: the newest)")


def run(args: argparse.Namespace) -> int:
    found = choose.one(args, args.run)
    ledgers = [Ledger(pages) for pages in _pages(found)]
    rows = [row for ledger in ledgers for row in _rows(ledger).values()]
    meant = bool(rows) or any(ledger.since for ledger in ledgers)
    output.listed(
        args,
        rows,
        ("TIME", "TO", "OUTCOME", "TITLE", "WHY"),
        lambda one: [_time(one["time"]), str(one["to"]), str(one["outcome"]), str(one["title"]), one["why"] or ""],
        facts=dict,
        whole=["TIME", "TO", "OUTCOME"],
        empty="nothing was sent so far." if meant else "nobody was to be told about this run.",
    )
    if not meant:
        return 1
    unseen = _is_unseen(found)
    if unseen:
        output.remark(
            args,
            f"the end of the run, and perhaps more, was not looked at yet. Send the rest with: fanfold sync {clean(found.id)}",
        )
    return WAITING if unseen or any(row["outcome"] != "sent" for row in rows) else 0


def _is_unseen(run: StoredRun) -> bool:
    """Return whether a run has ended and its own notifier has not got to its end."""
    if is_address(run.store) or run.status == "running":
        return False
    cursor = cursor_of(run.path, NAME, {})
    return cursor.path.exists() and not has_everything(run, cursor)


def _pages(run: StoredRun) -> list[Pages]:
    """Return what was sent by the run's own notifier, and by a gateway."""
    own: Pages = FilePages(run.path / "relay" / LEDGER)
    if not is_address(run.store):
        return [own, FilePages(run.path / "relay" / GATEWAY)]
    from ..clickhouse.gateway_tables import NoticePages
    from ..clickhouse.run import FleetRun

    assert isinstance(run, FleetRun)
    return [NoticePages(run.database, run.number)]


def _rows(ledger: Ledger) -> dict[tuple[str, str], dict[str, Any]]:
    """Return one row per message and address, with its last outcome; an intent without one was interrupted."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    meant: dict[tuple[str, str], set[str]] = {}  # the events of each message
    for line in ledger.lines:
        if line.get("state") not in ("intent", "sent", "failed"):
            continue
        place = str(line.get("to")), str(line.get("message"))
        row = rows.setdefault(place, {"to": place[0], "message": place[1], "title": "", "events": 0})
        if line["state"] == "intent":
            meant[place] = set(map(str, line.get("events") or ()))
            row.update(title=str(line.get("title") or ""), events=len(meant[place]))
        outcome = "interrupted" if line["state"] == "intent" else str(line["state"])
        row.update(time=float(line.get("at") or 0.0), outcome=outcome, why=line.get("why"))
    for place, row in rows.items():
        if row["outcome"] == "failed" and meant.get(place) and meant[place] <= ledger.told.get(place[0], set()):
            row.update(outcome="sent", why="as part of a later message")
    return rows


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
