"""Show which nodes and GPUs are slow, over many runs.

Each rank is compared with the ranks of other nodes in its own run, by its time per step without the wait for others; a node is
judged by the median over runs. Runs need StragglerCallback, run.span("ranks") or init(ops=True): steps of synchronous training
take equally long on every rank, and only the waits differ.

exit codes: 0 no node or GPU is slow, 1 nothing could be compared, 3 some are.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import msgspec

from ..drawing.numbers import plural
from ..errors import SettingError
from ..store.nodes import LEAST_RUNS, NodeSpeed, readable, slow_places
from . import choose, output
from .text import took

EXAMPLE = """examples:
  fanfold nodes --since 7d
  fanfold nodes --project llm --json | jq -r '.nodes[] | select(.verdict == "slow").name'
  fanfold nodes --dir clickhouse://db/fanfold --since 30d"""

SLOW = 3


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="only these runs")
    parser.add_argument("--since", metavar="TIME", help="only runs that were active in this time: 90m, 24h, 7d, 4w")
    parser.add_argument(
        "--least",
        type=int,
        default=LEAST_RUNS,
        metavar="N",
        help=f"runs needed to judge a node (default: {LEAST_RUNS})",
    )
    choose.add_filters(parser)


def run(args: argparse.Namespace) -> int:
    since = time.time() - _seconds(args.since) if args.since else 0.0
    if args.least < 1:
        raise SettingError(f"--least {args.least} is not a number of runs. Nothing was compared. Write 1 or more.")
    found = slow_places((one for one in choose.chosen(args) if readable(one)), since=since, least=args.least)
    if args.json:
        output.print_json({**msgspec.to_builtins(found), **{name: [_facts(one) for one in getattr(found, name)]
                          for name in ("nodes", "gpus")}})  # fmt: skip
    else:
        guilty = {one.name for one in found.nodes if one.verdict == "slow"}
        alone = [one for one in found.gpus if one.verdict == "slow" and one.name.rpartition(":")[0] not in guilty]
        _print(args, [*(("node", one) for one in found.nodes), *(("GPU", one) for one in alone)])
        _remarks(args, found)
    if not found.nodes and not found.gpus:
        return 1
    return SLOW if any(one.verdict == "slow" for one in (*found.nodes, *found.gpus)) else 0


def _seconds(text: str) -> float:
    from ..store.filter import length

    seconds = length(text)
    if seconds is None:
        raise SettingError(f"--since {text!r} is not a duration. Nothing was compared. Write 90m, 24h, 7d or 4w.")
    return seconds


def _facts(one: NodeSpeed) -> dict[str, Any]:
    return {**msgspec.structs.asdict(one), "sure": one.sure}


def _print(args: argparse.Namespace, rows: list[tuple[str, NodeSpeed]]) -> None:
    titles = ["kind", "name", "verdict", "time per step", "spread", "slower in", "latest step", "device"]

    def cells(row: tuple[str, NodeSpeed]) -> list[str]:
        kind, one = row
        verdict = f"{one.verdict}, {one.sure}" if one.verdict == "slow" else one.verdict
        change = f"{one.ratio - 1:+.1%}"
        return [kind, one.name, verdict, change, f"±{one.spread:.1%}", f"{one.slower} of {plural(one.runs, 'run')}",
                took(one.seconds * 1e9), one.device]  # fmt: skip

    output.listed(args, rows, titles, cells, right=["time per step", "spread", "latest step"])


def _remarks(args: argparse.Namespace, found: Any) -> None:
    parts = [f"{plural(found.compared, 'run')} compared"]
    if found.alone:
        parts.append(f"{found.alone} of one rank only")
    if found.unmeasured:
        parts.append(f"{found.unmeasured} without a record of how long ranks wait for each other (add StragglerCallback)")
    output.remark(args, f"{'; '.join(parts)}.")
