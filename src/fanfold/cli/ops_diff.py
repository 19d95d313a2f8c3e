"""`fanfold ops diff`: compares two sides operator by operator. Each is a run, a part of one, or all runs with a version."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..drawing.numbers import plural
from ..errors import RunNotFound, SettingError
from ..store import StoredRun
from ..store import ops as store
from ..store.ops_formats import Found
from . import choose, output
from .text import clean, took

ROWS = 20  # of a table
BLANK = (
    "self is blank where it is not known: for calls sampled at random (as in DataLoader workers, unless every step is observed) "
    "and for ranges longer than a window. Such rows are sorted by their total."
)
HOW = "Start runs with fanfold.init(ops=True) or FANFOLD_OPS=1."
PARTS = ("rank", "node", "label", "role", "thread")
KNOWN = f"Known: {', '.join(PARTS)}; project, tag, commit, python, or the name of a package, such as torch."


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its name, runs, rows, and how much work they represent."""

    word: str
    runs: list[StoredRun]
    rows: list[dict[str, Any]]
    steps: int  # the sum over its processes
    seconds: float


def side(args: argparse.Namespace, word: str, kinds: Sequence[str]) -> Side:
    """Parse `RUN`, `RUN@rank=1`, or `@torch=2.13`, which is every run (of --project) with that version."""
    name, *parts = re.split(r"@(?=[\w.-]+=)", word)
    wanted = [(field, value) for field, _, value in (part.partition("=") for part in parts)]
    if "@" in name or not word:
        raise SettingError(f"{word!r} is not part of a run. Nothing was compared. Write RUN@rank=1 or @torch=2.13. {KNOWN}")
    runs = [choose.one(args, name)] if name else choose.matching(args, choose.everything(args))
    for field, value in wanted:
        runs = runs if field in PARTS else _having(runs, field, value, word)
    found = [(run, [row for row in run.ops() if not kinds or row["kind"] in kinds]) for run in runs]
    if not any(rows for _, rows in found):
        raise RunNotFound(f"{word} has no operator profile{' of that kind' if kinds else ''}. Nothing was compared. {HOW}")
    for field, value in wanted:
        found = _only(found, field, value, word) if field in PARTS else found
    found = [(run, rows) for run, rows in found if rows]
    # Labels, threads and roles are parts of processes, whose steps count as a whole.
    whose = [(field, value) for field, value in wanted if field in ("rank", "node")]
    processes = [table.facts for run, _ in found for table in store.tables(run)]
    processes = [facts for facts in processes if all(str(facts.get(field)) == value for field, value in whose)]
    spans = (int(facts.get("now") or 0) - int(facts.get("started") or 0) for facts in processes if not facts.get("worker"))
    steps, seconds = sum(int(facts.get("steps") or 0) for facts in processes), sum(max(span, 0) for span in spans) / 1e9
    return Side(word, [run for run, _ in found], described(found), steps, seconds)


def described(found: Found) -> list[dict[str, Any]]:
    """Return the rows of some runs, each with its run, project and torch version."""
    done: list[dict[str, Any]] = []
    for run, rows in found:
        about = {"run": run.id, "project": run.project, "torch": ", ".join(traits(run, "torch"))}
        done += [{**row, **about} for row in rows]
    return done


def first(args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows to show: as many as --top says, by default 20, or all with --json."""
    top = args.top if args.top is not None else 0 if args.json else ROWS
    return rows[:top] if top > 0 else rows


def _having(runs: list[StoredRun], field: str, value: str, word: str) -> list[StoredRun]:
    known = {trait for run in runs for trait in traits(run, field)}
    if runs and not known and field not in ("tag", "commit"):
        raise SettingError(f"{word!r}: no run has {field!r}. Nothing was compared. {KNOWN}")
    found = [run for run in runs if any(_fits(trait, field, value) for trait in traits(run, field))]
    if not found:
        there = f"There are: {', '.join(map(clean, sorted(known)))}." if known else "`fanfold ls` lists the runs."
        raise RunNotFound(f"{word}: no run has {field} {value}. Nothing was compared. {there}")
    return found


def traits(run: StoredRun, field: str) -> list[str]:
    """Return a run's values of a field: its tags, its commit, the version of a package."""
    if field in ("project", "tag"):
        return [run.project] if field == "project" else list(run.tags)
    facts = run.facts
    about = {"commit": facts.get("git"), "python": facts.get("python")}.get(field, facts.get("packages"))
    found = (about or {}).get("version" if field == "python" else field) if isinstance(about, Mapping) else about
    return [str(found)] if found else []


def _fits(trait: str, field: str, value: str) -> bool:
    """Return whether a value matches: a version or a commit by its beginning, anything else in full."""
    if trait == value or field in ("project", "tag"):
        return trait == value
    return bool(value) and trait.startswith(value) and (field == "commit" or trait[len(value)] in ".+")


def _only(found: Found, field: str, value: str, word: str) -> Found:
    kept = [(run, [row for row in rows if str(row[field]) == value]) for run, rows in found]
    if not any(rows for _, rows in kept):
        there = ", ".join(sorted({clean(str(row[field])) or "''" for _, rows in found for row in rows}))
        raise RunNotFound(f"{word}: no operator was seen with {field} {value!r}. Nothing was compared. There are: {there}.")
    return kept


def run(args: argparse.Namespace, words: list[str], by: Sequence[str], kinds: Sequence[str]) -> int:
    """Compare two sides and print what changed, the largest slowdown first."""
    if len(words) != 2:
        raise SettingError("diff compares two runs. Nothing was compared. Write: fanfold ops diff A B.")
    a, b = (side(args, word, kinds) for word in words)
    unit = "step" if a.steps and b.steps else "second"
    changed = changes(a, b, ("op", "scope", *by), unit)
    shown = first(args, changed)
    if args.json:
        output.print_json({"unit": unit, "a": _facts(a), "b": _facts(b), "rows": shown})
        return 0
    _print(shown, by, unit)
    more = len(changed) - len(shown)
    compared = f"A {a.word}: {_about(a)}; B {b.word}: {_about(b)}"
    output.remark(args, compared + f". Sorted by how much slower B is{f', {more} more rows (--top 0)' if more else ''}.")
    if words[0] == words[1]:
        output.remark(args, "A and B are the same, so nothing differs.")
    if unit == "second":
        output.remark(args, "at least one side has no optimizer steps, so calls and times are per second of each process.")
    if any(row["self_change_ns"] is None for row in shown):
        output.remark(args, BLANK)
    return 0


def _facts(one: Side) -> dict[str, Any]:
    torch = sorted({version for run in one.runs for version in traits(run, "torch")})
    return {"word": one.word, "runs": [run.id for run in one.runs], "steps": one.steps, "seconds": one.seconds, "torch": torch}


def _about(one: Side) -> str:
    names = one.runs[0].name if len(one.runs) == 1 else plural(len(one.runs), "run")
    torch = ", ".join(_facts(one)["torch"]) or "?"
    return ", ".join([*[names] * (names != one.word), plural(one.steps, "step"), f"torch {torch}"])


def changes(a: Side, b: Side, by: tuple[str, ...], unit: str) -> list[dict[str, Any]]:
    """Compare two sides row by row, sorted by the slowdown per step (or second)."""
    left, right = ({tuple(row[name] for name in by): row for row in store.together(one.rows, by)} for one in (a, b))
    parts = [(one.steps if unit == "step" else one.seconds) or 1 for one in (a, b)]
    found = [_change(dict(zip(by, key, strict=True)), [left.get(key), right.get(key)], parts) for key in {**left, **right}]

    def slowdown(row: Mapping[str, Any]) -> float:
        own = row["self_change_ns"]
        return float(row["total_change_ns"] if own is None else own)

    return sorted(found, key=lambda row: (-slowdown(row), -row["total_change_ns"]))


_NOTHING: dict[str, Any] = {"mean_ns": 0.0, "calls": 0.0, "self_ns": 0.0, "total_ns": 0.0, "device_count": 0, "device_ns": 0}


def _change(names: dict[str, Any], rows: Iterable[dict[str, Any] | None], parts: list[float]) -> dict[str, Any]:
    a, b = (row or _NOTHING for row in rows)
    device = [row["device_ns"] / row["device_count"] if row["device_count"] else None for row in (a, b)]
    own = all(row["self_ns"] or not row["calls"] for row in (a, b))  # known on both sides
    return {
        **names,
        "mean_a_ns": a["mean_ns"],
        "mean_b_ns": b["mean_ns"],
        "ratio": b["mean_ns"] / a["mean_ns"] if a["mean_ns"] else None,
        "calls_a": a["calls"] / parts[0],
        "calls_b": b["calls"] / parts[1],
        "self_change_ns": b["self_ns"] / parts[1] - a["self_ns"] / parts[0] if own else None,
        "total_change_ns": b["total_ns"] / parts[1] - a["total_ns"] / parts[0],
        "device_mean_a_ns": device[0],
        "device_mean_b_ns": device[1],
    }


def _print(rows: list[dict[str, Any]], by: Sequence[str], unit: str) -> None:
    """Print the table; the change is first, because a narrow terminal drops the last columns."""
    short = "step" if unit == "step" else "s"
    known = {row["self_change_ns"] is not None for row in rows}
    sorts = ["self"] * (True in known) + ["total"] * (False in known)
    timed = ["device_mean_a_ns", "device_mean_b_ns"]
    timed *= any(row[name] is not None for row in rows for name in timed)
    numbers = [*(f"{what}/{short}" for what in sorts), "B/A", "mean A", "mean B", f"calls/{short}"]
    numbers += ["device A", "device B"] * bool(timed)

    def cells(row: dict[str, Any]) -> list[str]:
        ratio = "new" if row["ratio"] is None else f"{row['ratio']:.2f}" if row["mean_b_ns"] else "gone"
        times = [took(row[name]) if row[name] else "" for name in ("mean_a_ns", "mean_b_ns", *timed)]
        calls = " → ".join(dict.fromkeys(_calls(row[f"calls_{letter}"]) for letter in "ab"))
        groups = (str(row[name]) for name in ("op", "scope", *by))
        return [*groups, *(_signed(row[f"{what}_change_ns"]) for what in sorts), ratio, *times[:2], calls, *times[2:]]

    output.table(["op", "scope", *by, *numbers], map(cells, rows), right=numbers, whole=numbers)


def _signed(change: float | None) -> str:
    return "" if change is None else ("+" if change > 0 else "-" if change < 0 else "") + took(abs(change))


def _calls(count: float) -> str:
    return f"{count:,.0f}" if count >= 100 else f"{count:.2g}" if count < 1 else f"{count:.3g}"
