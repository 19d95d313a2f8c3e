"""Import runs of other tools: TensorBoard, W&B, MLflow and others, with their original times.

SOURCE is a file or a folder; a folder is searched for everything known. Importing again adds only what is new, and a run that
fanfold itself sent there is recognized. --follow keeps importing what is added. The summary lists what was not imported, and why.

exit codes: 0 imported or nothing new, 1 no runs found, 2 the import failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..drawing.numbers import plural
from . import output
from .text import clean, size

if TYPE_CHECKING:
    from ..transfer.account import RunAccount

EXAMPLE = """examples:
  fanfold import ./runs ./wandb ./mlruns
  fanfold import ./runs --from tensorboard --project vision --tag old
  fanfold import ./wandb --dry-run               what would be imported
  fanfold import ./runs --follow                 until Ctrl-C"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help="a file, a folder to search, or an address")
    parser.add_argument("--from", dest="kind", metavar="KIND", help="only runs of this tool, such as tensorboard or wandb")
    parser.add_argument("--name", metavar="GLOB", help="only runs whose name matches, such as 'resnet*'")
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="add a tag to the runs (repeatable)")
    parser.add_argument("--dry-run", action="store_true", help="read everything, write nothing")
    parser.add_argument("-f", "--follow", action="store_true", help="keep importing what is added, until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    from ..errors import SettingError
    from ..transfer.importing import Import

    if args.follow and args.dry_run:
        raise SettingError("--follow writes and --dry-run does not. Nothing was imported. Leave one of the two out.")
    work = Import(args.sources, kind=args.kind, project=args.project, name=args.name, tags=args.tag, dry_run=args.dry_run,
                  dir=args.dir)  # fmt: skip
    if args.follow:
        return _follow(args, work)

    def bar(items: Iterable[Any], total: int) -> Iterable[Any]:
        return output.progress(args, items, total, "Importing")

    accounts = work.once(bar)
    if args.json:
        output.print_json({"runs": [_plain(one) for one in accounts], "passed_over": work.passed_over})
    else:
        _report(args, accounts, work.passed_over)
    return 0 if accounts else 1


def _follow(args: argparse.Namespace, work: Any) -> int:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    def report(account: RunAccount) -> None:
        if args.json:
            output.print_json(_plain(account), line=True)
        else:
            print(f"{clean(account.name or account.id)}: {account.outcome}, {_carried(account) or account.why or 'nothing new'}")
        sys.stdout.flush()

    output.remark(args, "Ctrl-C stops it.")
    work.follow(stop, report)
    return 0


def _plain(account: RunAccount) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(account)
    return found


def _report(args: argparse.Namespace, accounts: Sequence[RunAccount], passed_over: int) -> None:
    by_source: dict[str, list[RunAccount]] = defaultdict(list)
    for account in accounts:
        by_source[account.source].append(account)
    for source in args.sources:
        found = by_source.get(source, [])
        print(f"{source}: {_summary(found)}")
        if found:
            titles = ("run", "name", "project", "from", "outcome", "points", "texts", "media", "files")
            rows = [(one.run, one.name, one.project, one.kind, one.outcome, f"{one.points:,}", f"{one.texts:,}", f"{one.media:,}",
                     f"{one.files:,}") for one in found]  # fmt: skip
            output.table(titles, rows, right=titles[5:], whole=titles[:1])
        _not_carried(found)
    growing = sum(one.growing for one in accounts)
    if growing:
        words = "was written to in the last minutes" if growing == 1 else "were written to in the last minutes"
        output.remark(args, f"{plural(growing, 'run')} {words}. Import again for what is added, or use --follow.")
    if passed_over:
        output.remark(args, f"{plural(passed_over, 'run')} found whose name does not match {args.name!r}.")


def _summary(accounts: Sequence[RunAccount]) -> str:
    if not accounts:
        return "no runs found"
    carried = [
        plural(sum(one.points for one in accounts), "point"),
        plural(sum(one.texts for one in accounts), "text"),
        f"{sum(one.media for one in accounts):,} media",
        plural(sum(one.files for one in accounts), "file"),
    ]
    alerts, console = sum(one.alerts for one in accounts), sum(one.console for one in accounts)
    carried += [plural(alerts, "alert")] if alerts else []
    carried += [f"{size(console)} of console output"] if console else []
    return f"{plural(len(accounts), 'run')}, {', '.join(carried)}"


def _carried(account: RunAccount) -> str:
    counts = {"point": account.points, "text": account.texts, "media": account.media, "file": account.files}
    return ", ".join(f"{count:,} {name}{'' if count == 1 or name == 'media' else 's'}" for name, count in counts.items() if count)


def _not_carried(accounts: Sequence[RunAccount]) -> None:
    from ..transfer.account import RunAccount

    total = RunAccount(kind="", source="", id="")
    for account in accounts:
        for left in account.left:
            total.leave(left)
        if account.why:
            print(clean(f"  {account.name or account.id}: {account.outcome}: {account.why}"))
    if total.left:
        print("not carried:")
        for left in total.left:
            example = f" (for example {left.example})" if left.example else ""
            print(clean(f"  {left.count:,} {left.what}: {left.why}{example}"))
