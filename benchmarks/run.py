"""`make bench`: measure fanfold beside its peers in one run, so that every ratio is between figures of the same hour.

Repeats are interleaved (every peer once, then every peer again) and the median is shown: a busy minute on the machine
hurts everybody alike.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console

from harness import Bench, await_calls, seconds_of, size
from peers import PEERS
from report import Sheet, machine, ms, ratio, us, write_page

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
US, FLOOR = "fanfold", "JSON lines"
TOGETHER = (US, FLOOR, "Trackio", "wandb", "TensorBoard")


def measure_log(bench: Bench) -> list[Sheet]:
    for _ in range(1 if bench.quick else 3):
        for name in bench.names:
            calls = PEERS[name].calls // (10 if bench.quick else 1)
            dir = bench.place()
            ten = bench.run("latency", name, dir, keys=10, calls=calls, seconds=20)
            if ten:
                ten["bytes_per_point"] = (size(dir) - ten["disk_before"]) / (ten["calls"] * 10)
            bench.keep("log", name, ten)
            shutil.rmtree(dir, ignore_errors=True)
            wide = bench.run("latency", name, bench.place(), keys=1000, calls=200, seconds=3, finish=0)
            bench.keep("log of 1,000", name, wide)
    p50, wide50 = bench.medians("log", "p50_us"), bench.medians("log of 1,000", "p50_us")
    rows = [
        [
            name,
            us(p50[name]),
            ratio(p50[name], p50.get(US)),
            us(bench.median("log", name, "p99_us")),
            us(wide50[name]),
            ratio(wide50[name], wide50.get(US)),
            ms(bench.median("log", name, "finish_ms")),
            number(bench.median("log", name, "bytes_per_point"), ".1f"),
        ]
        for name in bench.names
    ]
    head = ["", "10 floats, p50", "to fanfold", "p99", "1,000 floats, p50", "to fanfold", "finish()", "bytes per point"]
    cost = max((bench.median("log", name, "clock_ns") or 0 for name in bench.names), default=0)
    note = (
        "Time on the calling thread, one clock reading before and after each call; what reading the clock takes "
        f"({cost:.0f} ns) is subtracted. Up to 5,000 calls (MLflow and DVCLive 1,000), with 1,000 floats up to 200 "
        "calls or 3 s. finish() follows at once. Bytes: what the run added to the disk after its first call."
    )
    return [Sheet("One log() call", head, rows, note)]


def measure_kill(bench: Bench) -> list[Sheet]:
    rounds, more = (1, 1) if bench.quick else (3, 17)
    paced = 40 if bench.quick else 200
    for turn in range(rounds + more):
        names = bench.names if turn < rounds else [name for name in bench.names if name == US]
        for name in names:
            kill_all(bench, "kill at full speed", [name], calls=1000, hz=0)
        if turn < rounds:
            kill_all(bench, "kill at 20 Hz", names, calls=paced, hz=20)
    if US in bench.names:
        kill_all(bench, "kill at 20 Hz", [US] * more, calls=paced, hz=20)
    rows = [
        [name, kept(bench, "kill at full speed", name), kept(bench, "kill at 20 Hz", name), kills(bench, name)]
        for name in bench.names
    ]
    note = (
        "The process is killed (SIGKILL) right after its last log() returned. Helpers its library started live one "
        "more second to write what they hold; then its own reader counts what is there. Lowest and highest."
    )
    head = ["", "kept of 1,000 calls at full speed", f"kept of {paced} calls at 20 a second", "kills"]
    return [Sheet("What is left after kill -9", head, rows, note)]


def kill_all(bench: Bench, section: str, names: Iterable[str], *, calls: int, hz: float) -> None:
    """Run victims side by side, kill each after its last call, then count what it left."""
    victims = []
    for name in names:
        dir = bench.place()
        ack = bench.work / f"{bench.made}.ack"
        ack.write_bytes(bytes(8))
        victims.append((name, dir, ack, bench.start("kill", name, dir, calls=calls, hz=hz, ack=str(ack))))
    returned = await_calls([(ack, child) for _, _, ack, child in victims], calls)
    time.sleep(1)
    for (name, dir, _, child), done in zip(victims, returned, strict=True):
        child.sweep()
        if done < calls:
            bench.console.print(f"[red]{child.title} ended after {done} of {calls} calls: see {child.log}")
            continue
        rows = bench.run("count", name, dir, timeout=120).get("rows")
        bench.keep(section, name, {"returned": done, "kept": rows})
        shutil.rmtree(dir, ignore_errors=True)


def kept(bench: Bench, section: str, name: str) -> str:
    found = [f["kept"] for f in bench.raw.get(f"{section}: {name}", [])]
    if not found or None in found:
        return "-" if not found else "unreadable"
    return f"{min(found):,}" if min(found) == max(found) else f"{min(found):,} to {max(found):,}"


def kills(bench: Bench, name: str) -> str:
    return " + ".join(str(len(bench.raw.get(f"kill at {how}: {name}", []))) for how in ("full speed", "20 Hz"))


def measure_processes(bench: Bench) -> list[Sheet]:
    names = [name for name in bench.names if name in TOGETHER]
    seconds = 1 if bench.quick else 3
    for _ in range(1 if bench.quick else 3):
        for name in names:
            for processes in (1, 4):
                dir = bench.place()
                children = [bench.start("load", name, dir, seconds=seconds) for _ in range(processes)]
                for child in children:
                    bench.keep(f"{processes} processes", name, child.wait())
                shutil.rmtree(dir, ignore_errors=True)
    one, four = (bench.medians(f"{n} processes", "cpu_us_per_point") for n in (1, 4))
    head = ["", "one process, CPU per point", "to fanfold", "four at once", "four to one"]
    rows = [[n, us(one[n]), ratio(one[n], one.get(US)), us(four[n]), ratio(four[n], one[n])] for n in names]
    note = (
        "CPU time of the process and of helpers its library started, finish() included; ten floats a call at full "
        f"speed for {seconds} s, all writing below one folder. On {os.cpu_count()} cores."
    )
    return [Sheet("Four processes at once", head, rows, note)]


def measure_read(bench: Bench) -> list[Sheet]:
    calls, runs = (100_000, 100) if bench.quick else (1_000_000, 1000)
    long, short = bench.place(), bench.place()
    written = bench.run("write", US, long, calls=calls)
    bench.keep("read", "written", written)
    for at in range(3):
        # A new cache folder: the first process has to walk and check every byte, the second finds what it left.
        env = {"XDG_CACHE_HOME": str(bench.work / f"cache-{at}")}
        for kind in ("no cache", "cache on disk"):
            bench.keep("read", kind, bench.run("read", US, long, env=env))
    bench.keep("read", "runs", bench.run("many", US, short, runs=runs))
    env = {"XDG_CACHE_HOME": str(bench.work / "cache-ls"), "FANFOLD_DIR": str(short), "HOME": str(short)}
    listing = [seconds_of([sys.executable, "-m", "fanfold", "ls"], env) * 1e3 for _ in range(6)]
    bench.keep("read", "ls", {"first_ms": listing[0], "ms": statistics.median(listing[1:])})
    median = bench.median
    rows = [
        [
            f"series of {calls:,} points, cold: new process, every byte walked and checked",
            ms(median("read", "no cache", "first_ms")),
        ],
        ["the same, new process with the cache of an earlier one", ms(median("read", "cache on disk", "first_ms"))],
        ["the same again in one process", ms(median("read", "cache on disk", "second_ms"))],
        [f"fanfold ls over {runs:,} runs, the first time (whole command)", ms(listing[0])],
        ["fanfold ls again", ms(statistics.median(listing[1:]))],
        [f"init(), median of {runs:,} in one process", ms(median("read", "runs", "open_ms"))],
        ["finish() of the same, no tracker", ms(median("read", "runs", "finish_ms"))],
        ["points written per second, ten a call", number(written.get("points_per_second"), ",.0f")],
    ]
    note = f"The long run holds {calls * 10:,} points in {written.get('disk', 0) / 1e6:,.0f} MB; its pages are in memory."
    return [Sheet("Reading, and many runs", ["", "fanfold"], rows, note)]


def measure_start(bench: Bench) -> list[Sheet]:
    for _ in range(2 if bench.quick else 5):
        for name in bench.names:
            bare = seconds_of([sys.executable, "-c", "pass"]) * 1e3
            full = seconds_of([sys.executable, "-c", f"import {PEERS[name].module}"]) * 1e3
            figures = bench.run("many", name, bench.place(), runs=1)
            bench.keep("start", name, {"bare_ms": bare, "full_ms": full, **figures})
    bare = statistics.median(f["bare_ms"] for name in bench.names for f in bench.raw[f"start: {name}"])
    imports = {name: max(0.0, whole - bare) for name, whole in bench.medians("start", "full_ms").items() if whole}
    opens = bench.medians("start", "open_ms")
    both = {name: imports[name] + (opens[name] or 0) for name in bench.names}
    rows = [
        [
            name,
            ms(imports[name]),
            ms(opens[name]),
            ms(both[name]),
            ratio(both[name], both.get(US)),
            ms(bench.median("start", name, "finish_ms")),
        ]
        for name in bench.names
    ]
    head = ["", "import", "first run opened", "together", "to fanfold", "finish() after one call"]
    note = (
        "Each in a new process and a new folder; import is the whole process less one that does nothing. Together is "
        "what a script waits: some libraries load their parts at import, some (fanfold) when the first run opens."
    )
    return [Sheet("Start and finish", head, rows, note)]


def measure_memory(bench: Bench) -> list[Sheet]:
    calls = 1_000_000 if bench.quick else 10_000_000
    dir = bench.place()
    figures = bench.run("memory", US, dir, calls=calls, timeout=1800)
    bench.keep("memory", US, figures)
    shutil.rmtree(dir, ignore_errors=True)
    marks = {int(at): mb for at, mb in figures.get("marks", {}).items()}
    rows = [[f"{at:,}", f"{mb:.1f} MB"] for at, mb in marks.items() if at in (0, calls // 10, calls)]
    return [Sheet("Memory of the process that logs", ["calls of two floats", "resident memory"], rows)]


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


SECTIONS: dict[str, Callable[[Bench], list[Sheet]]] = {
    "log": measure_log,
    "kill": measure_kill,
    "processes": measure_processes,
    "read": measure_read,
    "start": measure_start,
    "memory": measure_memory,
}


def listed(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Read a comma-separated choice among known names."""
    names = list(known)

    def parse(text: str) -> list[str]:
        chosen = [part.strip() for part in text.split(",")]
        if unknown := [part for part in chosen if part not in names]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(names)}")
        return chosen

    return parse


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", type=listed(SECTIONS), default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--peers", type=listed(PEERS), default=list(PEERS), help=", ".join(PEERS))
    parser.add_argument("--quick", action="store_true", help="fewer calls and repeats: a check, not a measurement")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--page", type=Path, help="write the tables into this page (a full run: docs/benchmarks.md)")
    return parser.parse_args()


def main() -> None:
    options, console = arguments(), Console(width=None if sys.stdout.isatty() else 150)
    facts, sheets = machine(), []
    console.print(*facts, sep="\n")
    with tempfile.TemporaryDirectory(prefix="fanfold-bench-", ignore_cleanup_errors=True) as work:
        bench = Bench(Path(work), options.quick, options.peers, console)
        for name in options.only:
            start = time.monotonic()
            for sheet in SECTIONS[name](bench):
                sheets.append(sheet)
                sheet.print(console)
            console.print(f"[dim]{name}: {time.monotonic() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "figures": bench.raw}, indent=1))
    # A page of figures from different hours, or without a peer, would compare what was never measured together.
    whole = not options.quick and options.only == list(SECTIONS) and options.peers == list(PEERS)
    if page := options.page or (PAGE if whole else None):
        write_page(page, facts, sheets)


if __name__ == "__main__":
    main()
