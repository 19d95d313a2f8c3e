"""What got slower: two sides, each a run, a part of one, or all runs of a version, compared operator by operator."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RunNotFound, SettingError
from ..probes.image import Table
from ..store import StoredRun
from ..store import ops as store
from . import choose, output
from .ops_formats import Found
from .text import plural, took

PARTS = ("rank", "node", "label", "role", "thread")
KNOWN = f"Known: {', '.join(PARTS)}; project, tag, commit, python, or the name of a package, such as torch."


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its runs, the rows that belong to it, and how much work they stand for."""

    runs: list[StoredRun]
    rows: list[dict[str, Any]]
    steps: int  # of all its processes, added up
    seconds: float


def side(args: argparse.Namespace, word: str, kinds: Sequence[str]) -> Side:
    """Read `RUN`, `RUN@rank=1`, or `@torch=2.13`: every run (of --project) with that version."""
    name, *parts = re.split(r"@(?=[\w.-]+=)", word)
    wanted = [(field, value) for field, _, value in (part.partition("=") for part in parts)]
    if "@" in name or not word:
        raise SettingError(f"{word!r} is no part of a run. Nothing was compared. Write RUN@rank=1 or @torch=2.13. {KNOWN}")
    runs = [choose.one(args, name)] if name else choose.matching(args, choose.everything(args))
    for field, value in wanted:
        runs = runs if field in PARTS else _having(runs, field, value, word)
    found = [(run, [row for row in run.ops() if not kinds or row["kind"] in kinds]) for run in runs]
    if not any(rows for _, rows in found):
        raise RunNotFound(
            f"{word} has no operator profile{' of that kind' if kinds else ''}. Nothing was compared. "
            "Start runs with fanfold.init(ops=True) or FANFOLD_OPS=1."
        )
    for field, value in wanted:
        found = _only(found, field, value, word) if field in PARTS else found
    found = [(run, rows) for run, rows in found if rows]
    tables = [table for run, _ in found for table in store.tables(run) if _counts(table, wanted)]
    return Side(
        [run for run, _ in found],
        [row for _, rows in found for row in rows],
        sum(int(table.facts.get("steps") or 0) for table in tables),
        sum(map(_seconds, tables)),
    )


def _counts(table: Table, wanted: Iterable[tuple[str, str]]) -> bool:
    """Tell whether a process's steps are a side's."""
    # Labels, threads and workers are parts of processes, whose steps are all theirs.
    return all(field not in ("rank", "node") or str(table.facts.get(field)) == value for field, value in wanted)


def _having(runs: list[StoredRun], field: str, value: str, word: str) -> list[StoredRun]:
    known = {trait for run in runs for trait in traits(run, field)}
    if runs and not known and field not in ("tag", "commit"):
        raise SettingError(f"{word!r}: no run has {field!r}. Nothing was compared. {KNOWN}")
    found = [run for run in runs if any(_fits(trait, field, value) for trait in traits(run, field))]
    if not found:
        there = f"There are: {', '.join(sorted(known))}." if known else "`fanfold ls` lists the runs."
        raise RunNotFound(f"{word}: no run has {field} {value}. Nothing was compared. {there}")
    return found


def traits(run: StoredRun, field: str) -> list[str]:
    """Return what a run has under a name: its tags, its commit, the version of a package."""
    if field in ("project", "tag"):
        return [run.project] if field == "project" else list(run.tags)
    facts = run.facts
    about = {"commit": facts.get("git"), "python": facts.get("python")}.get(field, facts.get("packages"))
    found = (about or {}).get("version" if field == "python" else field) if isinstance(about, Mapping) else about
    return [str(found)] if found else []


def _fits(trait: str, field: str, value: str) -> bool:
    """Tell whether a trait is meant: a version by its first numbers, a commit by its beginning, all else in full."""
    if trait == value or field in ("project", "tag"):
        return trait == value
    return bool(value) and trait.startswith(value) and (field == "commit" or trait[len(value)] in ".+")


def _only(found: Found, field: str, value: str, word: str) -> Found:
    kept = [(run, [row for row in rows if str(row[field]) == value]) for run, rows in found]
    if not any(rows for _, rows in kept):
        there = ", ".join(sorted({str(row[field]) or "''" for _, rows in found for row in rows}))
        raise RunNotFound(f"{word}: no operator was seen with {field} {value!r}. Nothing was compared. There are: {there}.")
    return kept


def _seconds(table: Table) -> float:
    facts = table.facts
    return 0.0 if facts.get("worker") else max(int(facts.get("now") or 0) - int(facts.get("started") or 0), 0) / 1e9


def run(args: argparse.Namespace, words: list[str], by: Sequence[str], kinds: Sequence[str]) -> int:
    """Compare two sides and print what changed, first what costs the most time more."""
    if len(words) != 2:
        raise SettingError("diff compares two runs. Nothing was compared. Write: fanfold ops diff A B.")
    a, b = (side(args, word, kinds) for word in words)
    unit = "step" if a.steps and b.steps else "second"
    changed = changes(a, b, ("op", "scope", *by), unit)
    shown = changed[: args.top] if args.top > 0 else changed
    if args.json:
        output.print_json(shown)
        return 0
    what = "self" if any(row["self_ns"] for row in (*a.rows, *b.rows)) else "total"
    _print(shown, by, what, unit)
    names = (f"{letter} {word}: {_about(one, word)}" for letter, word, one in (("A", words[0], a), ("B", words[1], b)))
    more = len(changed) - len(shown)
    output.remark(args, "; ".join(names) + f". First what B takes more of{f', {more} rows more (--top 0)' if more else ''}.")
    if words[0] == words[1]:
        output.remark(args, "A and B are the same, so nothing differs.")
    if unit == "second":
        output.remark(args, "one side or both counted no optimizer steps, so calls and times are per second of each process.")
    return 0


def _about(one: Side, word: str) -> str:
    names = one.runs[0].name if len(one.runs) == 1 else plural(len(one.runs), "run")
    torch = ", ".join(sorted({version for run in one.runs for version in traits(run, "torch")})) or "?"
    return ", ".join([*[names] * (names != word), plural(one.steps, "step"), f"torch {torch}"])


def changes(a: Side, b: Side, by: tuple[str, ...], unit: str) -> list[dict[str, Any]]:
    """Compare two sides row by row; first what costs the most time more per step (or second)."""
    left, right = ({tuple(row[name] for name in by): row for row in store.together(one.rows, by)} for one in (a, b))
    parts = [(one.steps if unit == "step" else one.seconds) or 1 for one in (a, b)]
    found = [_change(dict(zip(by, key, strict=True)), [left.get(key), right.get(key)], parts, unit) for key in {**left, **right}]
    order = (f"self_per_{unit}_ns", f"total_per_{unit}_ns")  # own time is not known of calls sampled at random
    return sorted(found, key=lambda row: tuple(-row[name] for name in order))


_NOTHING: dict[str, Any] = {"mean_ns": 0.0, "calls": 0.0, "self_ns": 0.0, "total_ns": 0.0, "device_count": 0, "device_ns": 0}


def _change(names: dict[str, Any], rows: Iterable[dict[str, Any] | None], parts: list[float], unit: str) -> dict[str, Any]:
    a, b = (row or _NOTHING for row in rows)
    device = [row["device_ns"] / row["device_count"] if row["device_count"] else None for row in (a, b)]
    return {
        **names,
        "mean_a_ns": a["mean_ns"],
        "mean_b_ns": b["mean_ns"],
        "ratio": b["mean_ns"] / a["mean_ns"] if a["mean_ns"] else None,
        f"calls_per_{unit}_a": a["calls"] / parts[0],
        f"calls_per_{unit}_b": b["calls"] / parts[1],
        f"self_per_{unit}_ns": b["self_ns"] / parts[1] - a["self_ns"] / parts[0],
        f"total_per_{unit}_ns": b["total_ns"] / parts[1] - a["total_ns"] / parts[0],
        "device_mean_a_ns": device[0],
        "device_mean_b_ns": device[1],
    }


def _print(rows: list[dict[str, Any]], by: Sequence[str], what: str, unit: str) -> None:
    """Print the change first, by which rows are sorted: a narrow terminal leaves the last columns out."""
    short = "step" if unit == "step" else "s"
    numbers = [f"{what}/{short}", "B/A", "mean A", "mean B", f"calls/{short}"]
    device = any(row[f"device_mean_{letter}_ns"] is not None for row in rows for letter in "ab")
    numbers += ["device A", "device B"] * device
    cells = [[row["op"], row["scope"], *(str(row[name]) for name in by), *_cells(row, what, unit, device)] for row in rows]
    output.table(["op", "scope", *by, *numbers], cells, right=numbers, whole=numbers)


def _cells(row: dict[str, Any], what: str, unit: str, device: bool) -> list[str]:
    change = row[f"{what}_per_{unit}_ns"]
    ratio = "new" if row["ratio"] is None else f"{row['ratio']:.2f}" if row["mean_b_ns"] else "gone"
    means = [took(row[name]) if row[name] else "" for name in ("mean_a_ns", "mean_b_ns")]
    calls = " → ".join(dict.fromkeys(_calls(row[f"calls_per_{unit}_{letter}"]) for letter in "ab"))
    timed = [took(row[name]) if row[name] is not None else "" for name in ("device_mean_a_ns", "device_mean_b_ns")]
    return [("+" if change > 0 else "-" if change < 0 else "") + took(abs(change)), ratio, *means, calls, *timed * device]


def _calls(count: float) -> str:
    return f"{count:,.0f}" if count >= 100 else f"{count:.2g}" if count < 1 else f"{count:.3g}"
