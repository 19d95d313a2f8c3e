"""Wait until runs have ended, or until a condition holds, and report the outcome in the exit code.

exit codes: 0 every run finished, or --until holds for every run; 1 no such run; 3 a run failed; 4 a run was killed, preempted or
lost; 5 a run ended and --until does not hold; 124 timed out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ..errors import RunNotFound
from ..store import StoredRun
from ..store.filter import Filter
from ..tools.answers import OUTCOMES, became
from ..tools.answers import outcome as outcome_of
from . import choose, output, remote
from .text import clean

EXAMPLE = """examples:
  fanfold wait quick-otter-42 && python evaluate.py
  fanfold wait - --until 'loss<0.5' --timeout 3600
  fanfold wait a b c --json -q | jq -r .outcome"""

T = TypeVar("T")
POLL_SECONDS = 0.5
GATEWAY_SECONDS = 20.0  # of one question to a gateway
APPEAR_SECONDS = 10.0  # a job that was just started has not made its run yet
CODES = {"finished": 0, "met": 0, "failed": 3, "killed": 4, "preempted": 4, "lost": 4, "not met": 5, "timeout": 124}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=choose.RUN_HELP)
    parser.add_argument("--until", default="", metavar="F", help="a filter that every run has to match, such as 'loss<0.5'")
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="give up after this many seconds (default: never)")


def run(args: argparse.Namespace) -> int:
    until = time.monotonic() + (args.timeout if args.timeout is not None else float("inf"))
    if remote.is_gateway(args):
        return _report(args, _at_gateway(args, until))
    condition, store = Filter(args.until) if args.until else None, choose.store(args)
    waiting = {word: _appeared(args, word, until) for word in args.runs}
    outcomes: dict[str, str] = {}
    while True:
        for word in [word for word in waiting if word not in outcomes]:
            now = waiting[word] = waiting[word].reopened()
            met = condition is not None and condition.matches(now.row(), stats=store.statistics)
            outcome = outcome_of(now, met=met, conditional=condition is not None)
            if outcome is not None:
                outcomes[word] = outcome
        left = until - time.monotonic()
        if len(outcomes) == len(waiting) or left <= 0:
            break
        time.sleep(min(POLL_SECONDS, left))
    return _report(args, [{**became(one), "outcome": outcomes.get(word, "timeout")} for word, one in waiting.items()])


def _at_gateway(args: argparse.Namespace, until: float) -> list[dict[str, Any]]:
    """Let the gateway wait, a while at a time."""
    runs = [remote.named(args, word) for word in args.runs]
    while True:
        most = max(0.0, min(GATEWAY_SECONDS, until - time.monotonic()))
        found = _patiently(partial(remote.ask, args, "wait", runs=runs, until=args.until, timeout=most), until)
        if found["outcome"] != "timeout" or time.monotonic() >= until:
            return list(found["runs"])


def _appeared(args: argparse.Namespace, word: str, until: float) -> StoredRun:
    return _patiently(lambda: choose.one(args, word), until)


def _patiently(ask: Callable[[], T], until: float) -> T:
    """Ask about a run, waiting a moment for one that is about to begin."""
    until = min(until, time.monotonic() + APPEAR_SECONDS)
    while True:
        try:
            return ask()
        except RunNotFound:
            if time.monotonic() >= until:
                raise
        time.sleep(POLL_SECONDS)


def _report(args: argparse.Namespace, found: list[dict[str, Any]]) -> int:
    worst = max((one["outcome"] for one in found), key=OUTCOMES.index)
    if args.json:
        output.print_json({"outcome": worst, "runs": found})
    else:
        for one in found:
            print(f"{output.mark(one['status'])}  {clean(one['name'])}  {clean(one['id'])}{_remark(args, one)}")
    return CODES[worst]


def _remark(args: argparse.Namespace, found: dict[str, Any]) -> str:
    outcome = found["outcome"]
    if outcome == "timeout":
        return "  (still running: the time is up)"
    if outcome in ("met", "not met"):
        return f"  ({args.until}: {'holds' if outcome == 'met' else 'does not hold'})"
    error = (found["error"] or "").strip().splitlines()
    return f"  ({clean(error[-1])})" if error else ""


def _seconds(word: str) -> float:
    try:
        found = float(word)
    except ValueError:
        found = -1.0
    if not found >= 0:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of seconds. Write for example 3600.")
    return found
