"""What a fleet costs: ten thousand simulated processes over real gateways into a real ClickHouse, on this machine.

`make bench-fleet` runs it; `python benchmarks/fleet.py --quick` is a check of a few minutes. A full run writes its block of
docs/benchmarks.md. The processes are simulated (`fleet_load.py`), all else is real: bytes over loopback, tokens, views, merges.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import fleet_ingest
import fleet_reads
from fleet_ingest import KEYS, Way
from fleet_load import PER_NODE
from fleet_stage import FULL, QUICK, Plan, Stage
from report import Sheet, cpu, write_page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
MARKS = ("<!-- fleet: written by `make bench-fleet`, do not edit by hand -->", "<!-- fleet: end -->")
PARTS = ("store", "way", "reads", "ages", "forwarder")
AGE_NOTE = (
    "From log() in a training process, over its node's forwarder (which looks each second) and a gateway (which gathers for a quarter of a second), "
    "until another process finds it; every point counts. The reader asks as often as it gets answers, the fleet writes as above."
)
BIG = 100_000  # processes of the estimate
ROOM = 2.0  # machines are not planned to be full


def sheets(stage: Stage, plan: Plan, only: list[str]) -> Iterator[Sheet]:
    if "store" in only:
        rows = fleet_ingest.store_path(stage, plan)
        yield Sheet("The store alone", fleet_ingest.STORE_HEAD, rows, fleet_ingest.STORE_NOTE)
    if "way" in only:
        rows, way, points = fleet_ingest.whole_way(stage, plan)
        yield Sheet("The whole way", fleet_ingest.WAY_HEAD, rows, fleet_ingest.WAY_NOTE)
        rows, stored = fleet_ingest.on_disk(stage, points)
        yield Sheet("On disk", fleet_ingest.DISK_HEAD, rows, fleet_ingest.DISK_NOTE)
        yield estimate(way, stored)
    if "reads" in only:
        rows, note = fleet_reads.reads(stage, plan)
        yield Sheet("Reading", fleet_reads.READ_HEAD, rows, note)
    if "ages" in only:
        rows = fleet_reads.age_rows(stage, plan)
        yield Sheet("How old a point is when another node sees it", ["", "p50", "p95", "oldest"], rows, AGE_NOTE)
    if "forwarder" in only:
        rows = [["one process, 100 metrics, 100 times a second", fleet_reads.forwarder_row(stage, plan)]]
        yield Sheet("A forwarder", ["", "of a core"], rows)


def estimate(way: Way, stored: float) -> Sheet:
    """Work out on paper what a fleet of a hundred thousand processes needs, from what a point cost here."""
    rate = BIG * KEYS
    day = rate * 86400
    rows = [
        ["points", f"{rate / 1e6:.0f} M/s", f"{BIG:,} processes, {KEYS} metrics a second each"],
        ["requests", f"{BIG // PER_NODE:,}/s", f"one a second from each of {BIG // PER_NODE:,} nodes with {PER_NODE} processes"],
        ["bytes to the gateways", f"{rate * way.wire / 1e6:.0f} MB/s", f"{way.wire:.1f} B a point, compressed"],
        ["cores of gateways", f"{_cores(rate, way.gateway_ns)}", f"{way.gateway_ns:.0f} ns a point, and {ROOM:.0f} times that for room"],
        ["cores of ClickHouse", f"{_cores(rate, way.clickhouse_ns)}", f"{way.clickhouse_ns:.0f} ns a point, merges included, and as much room"],
        ["disk a day", f"{day * stored / 1e12:.1f} TB", f"{stored:.1f} B a point, merged, journals' bytes and cells included"],
    ]  # fmt: skip
    note = (
        "Not measured: multiplied. Runs are spread over shards by their id, so ClickHouse grows by adding shards; gateways share nothing. "
        "Batches are larger at such a rate, so a point costs rather less than here."
    )
    return Sheet(f"On paper: {BIG:,} processes", ["", "needed", "how that follows"], rows, note)


def _cores(rate: float, nanoseconds: float) -> int:
    return max(1, round(rate * nanoseconds / 1e9 * ROOM))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the fleet: a check, not a measurement")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--page", type=Path, help="write the block into this page (a full run: docs/benchmarks.md)")
    options = parser.parse_args()
    from rich.console import Console

    load = os.getloadavg()[0]
    console, plan = Console(width=None if sys.stdout.isatty() else 160), QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="fanfold-fleet-", ignore_cleanup_errors=True) as base, ExitStack() as stack:
        os.environ["FANFOLD_CACHE_DIR"] = f"{base}/cache"
        stage = Stage(Path(base), stack)
        version = stage.database.one("SELECT version() AS v")["v"].decode()
        found = []
        for sheet in sheets(stage, plan, options.only.split(",")):
            found.append(sheet)
            sheet.print(console)
    facts = [
        f"{cpu()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        f"Python {platform.python_version()}, ClickHouse {version}; {time.strftime('%Y-%m-%d')}, load {load:.1f} before",
    ]
    whole = not options.quick and options.only == parser.get_default("only")
    if page := options.page or (PAGE if whole else None):
        write_page(page, facts, found, marks=MARKS)


if __name__ == "__main__":
    main()
