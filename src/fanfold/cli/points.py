"""Print a metric's curve in a few numbers: each bucket has its first, last, lowest and highest value, exactly.

With as many buckets as points, every point is printed. The runs of a gateway (--dir https://…) are printed as JSON.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from ..drawing.numbers import plural
from ..errors import SettingError
from ..store.buckets import Buckets
from ..tools import answers
from . import choose, output, remote
from .text import clean, number

EXAMPLE = """examples:
  fanfold points - loss
  fanfold points quick-otter-42 'val/*' --buckets 10 --json
  fanfold points - loss --around 1200
  fanfold points - loss --from 1000 --to 2000 --x step"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=choose.RUN_HELP)
    parser.add_argument("keys", metavar="KEY", nargs="+", help="a metric, or a pattern such as 'val/*'")
    parser.add_argument("--buckets", type=int, default=50, metavar="N", help="at most this many buckets (default: 50)")
    parser.add_argument("--from", type=float, dest="lo", metavar="X", help="from this x on")
    parser.add_argument("--to", type=float, dest="hi", metavar="X", help="up to this x")
    parser.add_argument("--around", type=float, metavar="X", help=f"every point near this x: {answers.AROUND} on either side")
    parser.add_argument("--x", default="auto", metavar="KEY", help="step, time, relative, or any metric (default: the chart's)")
    parser.add_argument("--rank", type=int, metavar="R", help="one rank (default: the lowest that has the metric)")
    parser.add_argument("--fold", metavar="HOW", help="combine all ranks: mean, min, max, sum, std or last")


def run(args: argparse.Namespace) -> int:
    if args.buckets < 1:
        raise SettingError(f"--buckets {args.buckets} is less than 1. Nothing was printed.")
    if args.around is not None and (args.lo is not None or args.hi is not None):
        raise SettingError("--around cannot be combined with --from or --to. Nothing was printed.")
    if any(x is not None and math.isnan(x) for x in (args.lo, args.hi, args.around)):
        raise SettingError("--from, --to and --around cannot be nan. Nothing was printed. Give a number.")
    how = {"lo": args.lo, "hi": args.hi, "around": args.around, "x": args.x, "rank": args.rank, "fold": args.fold}
    if remote.is_gateway(args):
        asked = {"run": remote.named(args, args.run), "keys": args.keys, "buckets": args.buckets, **how}
        output.print_json(remote.ask(args, "points", **asked))  # a table is for people, who have the dashboard there
        return 0
    found = choose.one(args, args.run)
    store, keys = choose.store(args), choose.keys_of([found], args.keys, undone="printed")
    curves = {key: answers.curve(store, found, key, buckets=args.buckets, **how) for key in keys}
    if args.json:
        output.print_json([answers.points(found, key, curve) for key, curve in curves.items()])
    else:
        for key, curve in curves.items():
            _print(args, key, curve)
    return 0 if any(map(len, curves.values())) else 1


def _print(args: argparse.Namespace, key: str, curve: Buckets) -> None:
    key, axis = clean(key), clean(curve.axis)
    if curve.raw:
        titles = [axis, key]
        columns: list[Any] = [curve.x, curve.first]
    else:
        titles = [axis, "to", "points", "first", "last", "min", "max"]
        columns = [curve.x, curve.x_last, curve.count, curve.first, curve.last, curve.min, curve.max]
        print(f"{key}: {plural(curve.total, 'point')} in {plural(len(curve), 'bucket')}")
    rows = zip(*(column.tolist() for column in columns), strict=True)
    output.table(titles, [[number(value) for value in row] for row in rows], right=titles)
    if curve.marks:
        where = f"{axis} {number(curve.marks[0][0])}"
        verb = "is" if curve.marked == 1 else "are"
        output.remark(args, f"{key}: {plural(curve.marked, 'value')} {verb} NaN or infinite, the first at {where}.")
