"""Show what held the memory when a job ran out of it: the lines of code that allocated most, by stack and by label.

Recorded in jobs of torchrun, accelerate launch and srun, and with init(blackbox=True).
--save writes snapshots that you can open at https://docs.pytorch.org/memory_viz.
exit codes: 0 memory did not run out, 3 it did.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import msgspec

from ..blackbox.memory import Holder, MemoryUse, size_text
from ..blackbox.verdict import own_line
from ..errors import FanfoldError
from ..store.blackbox import Curve, FailedAllocation, ends, line_text, memory_curves, memory_errors
from ..store.run import StoredRun
from ..tools.answers import named
from . import choose, output
from .text import clean

EXAMPLE = """examples:
  fanfold memory -
  fanfold memory quick-otter-42 --stacks
  fanfold memory quick-otter-42 --save snapshots"""

WRONG = 3


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=choose.RUN_HELP)
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank")
    parser.add_argument("--stacks", action="store_true", help="print the whole stack of each line")
    parser.add_argument("--save", metavar="DIR", help="write the snapshots of the allocator to this folder")


def run(args: argparse.Namespace) -> int:
    found = choose.one(args, args.run)
    failed = [one for one in memory_errors(found) if args.rank in (None, one.rank)]
    killed = [one for one in ends(found) if one.cause.endswith("out of memory on the host") and args.rank in (None, one.rank)]
    moment = failed[-1].time if failed else next((one.time for one in killed if one.time), found.seen)
    curves = memory_curves(found, moment, rank=failed[-1].rank if failed else killed[0].rank if killed else args.rank)
    if args.save:
        _save(found, failed, Path(args.save))
    if args.json:
        parts = {"errors": failed, "host": killed, "curves": curves}
        output.print_json({"run": named(found), **msgspec.to_builtins(parts)})
    else:
        print(output.heading(found))
        for end in killed:
            print(f"✗ Rank {end.rank} was killed by the kernel: the job's memory limit was reached.")
        for one in failed[-1:]:
            _print(one, stacks=args.stacks)
        if len(failed) > 1:
            print(f"\n{len(failed) - 1} earlier allocations failed as well; --json has them.")
        _print_curves(curves)
        if not failed and not killed:
            print("Memory did not run out, or the run has no black box: see docs/blackbox.md.")
    return WRONG if failed or killed else 0


def _print(one: FailedAllocation, *, stacks: bool) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.time))
    print(f"✗ Rank {one.rank}, {when}: {clean(one.text)}\n")
    use = one.use
    print(f"cuda:{use.device}: {size_text(use.allocated)} in tensors, {size_text(use.reserved)} held by the allocator, "
          f"{size_text(use.free)} free of {size_text(use.total)}")  # fmt: skip
    if use.unknown:
        print(f"{size_text(use.unknown)} were allocated before recording began, or outside Python")
    _print_holders("line", use.by_stack, use, stacks=stacks)
    _print_holders("label", use.by_label, use, stacks=False)
    for file in one.files:
        print(f"\nsnapshot: {clean(str(file.get('path')))}, {size_text(int(file.get('size') or 0))}; --save DIR writes it")


def _print_holders(title: str, holders: list[Holder], use: MemoryUse, *, stacks: bool) -> None:
    if not holders:
        return
    print()
    rows = [(size_text(one.size), f"{one.size / use.allocated:.0%}" if use.allocated else "", str(one.count), _name(one, title))
            for one in holders]  # fmt: skip
    output.table(("size", "share", "count", title), rows, right=("size", "share", "count"), whole=("size", "share", "count"))
    for one in holders if stacks else ():
        print(f"\n{size_text(one.size)} in {one.count} allocations:")
        for spot in one.where:
            print(clean(f"  {spot.file}:{spot.line} in {spot.name}: {spot.code}"))


def _name(one: Holder, title: str) -> str:
    return one.label if title == "label" else line_text(own_line(one.where))


def _print_curves(curves: list[Curve]) -> None:
    from .chart import spark

    if curves:
        print("\nthe last minutes:")
    wide = max((len(curve.key) for curve in curves), default=0)
    for curve in curves:
        ends_at = f"{curve.values[0]:.2f} → {curve.values[-1]:.2f} GB, highest {max(curve.values):.2f}"
        print(clean(f"  {curve.key:<{wide}}  {spark(curve.values)}  {ends_at}, {-curve.times[0]:.0f} s"))


def _save(found: StoredRun, failed: list[FailedAllocation], folder: Path) -> None:
    """Write the snapshots under their names, without replacing anything."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(failed):
        for file in one.files:
            target = folder / f"memory-rank{one.rank}-{number + 1}.pickle"
            try:
                with target.open("xb") as out:
                    out.write(found.blob(str(file["blob"])))
            except FileExistsError as error:
                raise FanfoldError(f"{target} exists already. Nothing was replaced. Choose another folder for --save.") from error
            print(f"wrote {target}")
