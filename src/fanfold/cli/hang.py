"""Show why a job hangs or how it died: the collective it waits in, which ranks are missing, and the line each rank is on.

Hangs and crashes are recorded in jobs of torchrun, accelerate launch and srun, and with init(blackbox=True).
exit codes: 0 no hang and no crash, 3 there is one.
"""

from __future__ import annotations

import argparse
import time

import msgspec

from ..blackbox.pulse import FOLDER, Pulse, Spot, read_all
from ..blackbox.verdict import described, own_line
from ..store.blackbox import Hang, RankEnd, RankStand, ends, hangs, line_text, step_text
from ..store.run import StoredRun
from ..tools.answers import named
from . import choose, output
from .text import clean

EXAMPLE = """examples:
  fanfold hang -
  fanfold hang quick-otter-42 --stacks
  fanfold hang - --json | jq '.hangs[-1].culprits'"""

WRONG = 3
STATES = {"still": "stands still", "frozen": "stuck in C", "waiting": "waits", "busy": "works", "gone": "gone"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=choose.RUN_HELP)
    parser.add_argument("--stacks", action="store_true", help="print the stacks of all threads")
    parser.add_argument("--all", action="store_true", help="print every hang of the run, not only the last one")


def run(args: argparse.Namespace) -> int:
    found = choose.one(args, args.run)
    seen, over = hangs(found), ends(found)
    bad = [one for one in over if one.status not in ("running", "finished")]
    if args.json:
        output.print_json({"run": named(found), "hangs": msgspec.to_builtins(seen), "ends": msgspec.to_builtins(over)})
    else:
        print(output.heading(found))
        for hang in seen if args.all else seen[-1:]:
            _print_hang(hang, stacks=args.stacks)
        if bad:
            _print_ends(over, stacks=args.stacks)
        if not seen and not bad:
            print(_nothing(found))
            _print_now(found)
    return WRONG if seen or bad else 0


def _nothing(found: StoredRun) -> str:
    if found.evidence or found.status == "running":
        return "No hang and no crash was recorded."
    return "No hang and no crash was recorded. Jobs of torchrun, accelerate launch and srun record them, and init(blackbox=True)."


def _print_now(found: StoredRun) -> None:
    """Print where each rank of a running job is, as its process published it a moment ago."""
    pulses = sorted(read_all(found.path / FOLDER).values(), key=lambda pulse: pulse.rank) if found.status == "running" else []
    if not pulses:
        return
    print("Where each rank is now; one that saves, evaluates or loads has ten times as long until it counts as hanging:\n")
    output.table(("rank", "node", "state", "step", "line", "collective"), map(_now, pulses), right=("rank", "step"))


def _now(pulse: Pulse) -> tuple[str, ...]:
    doing = pulse.busy or ("waiting" if pulse.waiting else "on this line" if pulse.same_since else "working")
    seconds = f" {max(0.0, pulse.time - pulse.same_since):.0f} s" if pulse.same_since else ""
    waits = described(pulse.waiting[0]) if pulse.waiting else ""
    return str(pulse.rank), clean(pulse.node), f"{doing}{seconds}", step_text(pulse.step), _line(own_line(pulse.where)), waits


def _print_hang(hang: Hang, *, stacks: bool) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(hang.time))
    over = f" It moved again after {hang.over - hang.time:.0f} s." if hang.over else ""
    print(f"✗ Hang at {when}: {clean(hang.text)}{over}\n")
    titles = ("rank", "node", "state", "step", "line", "collective")
    output.table(titles, (_row(one, hang) for one in hang.ranks), right=("rank", "step"), whole=("rank", "state"))
    if stacks:
        for one in hang.ranks:
            for thread in one.threads:
                print(f"\nrank {one.rank}, thread {clean(thread.name) or thread.id}:")
                for spot in thread.frames:
                    print(f"  {_line(spot)}")


def _row(one: RankStand, hang: Hang) -> tuple[str, ...]:
    mark = " ←" if one.rank in hang.culprits else ""
    seconds = f" {one.seconds:.0f} s" if one.state in ("still", "frozen", "waiting") else ""
    waits = described(one.waiting[0]) if one.waiting else ""
    return (
        f"{one.rank}{mark}",
        one.node,
        f"{STATES.get(one.state, one.state)}{seconds}",
        step_text(one.step),
        _line(one.line),
        waits,
    )


def _line(spot: Spot | None) -> str:
    return clean(line_text(spot))


def _print_ends(over: list[RankEnd], *, stacks: bool) -> None:
    first = next((one for one in over if one.first), None)
    start = None if first is None else first.time
    if first is not None and start is not None:
        followed = sum(one.status not in ("running", "finished") for one in over) - 1
        others = f" {followed} other{'s' * (followed != 1)} followed." if followed else ""
        print(f"\n✗ Rank {first.rank} ended first: {clean(first.cause or first.status)}.{others}\n")
    rows = (
        (f"{one.rank}{' ←' if one.first else ''}", "" if one.time is None or start is None else f"{one.time - start:+.1f} s",
         output.mark(one.status), one.signal or ("" if one.exit_code is None else f"exit {one.exit_code}"),
         clean(one.cause), _line(one.line))
        for one in over
    )  # fmt: skip
    output.table(("rank", "time", "status", "code", "cause", "line"), rows, right=("rank", "time"), whole=("rank", "status"))
    if stacks:
        for one in over:
            if one.stack:
                print(f"\nrank {one.rank}:\n{clean(one.stack, lines=True)}")
