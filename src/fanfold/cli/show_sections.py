"""One run as text: the sections of `fanfold show`, one short method each. `fanfold top` and the demo print the same."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..drawing.numbers import duration, plural
from ..drawing.order import curve_order
from ..journal.directory import decode_name
from ..plain import flat
from ..relay.cursor import cursors
from ..store import Series, StoredRun, forks
from . import chart, choose, output
from .text import STATUS, age, clean, number, short, size

CHARTS, METRICS, PAIRS, WORDS, LINES = 6, 24, 24, 8, 5  # the most shown of each without --all


def statistics(series: Series) -> dict[str, Any]:
    """Return a series' count, last, lowest and highest value, ignoring NaN."""
    import numpy as np

    values = series.values.astype(np.float64)
    numbers = values[~np.isnan(values)]
    return {
        "count": len(values),
        "last": series.values[-1].item(),
        "last_step": int(series.steps[-1]),
        "min": float(numbers.min()) if len(numbers) else float("nan"),
        "max": float(numbers.max()) if len(numbers) else float("nan"),
        "not_finite": int((~np.isfinite(values)).sum()),
    }


def series_of(run: StoredRun, key: str, rank: int | None = None) -> Series:
    """Return a key's points: of one rank, else the mean over ranks if several have it. Probes have no steps to fold by."""
    if rank is not None:
        return run.series(key, rank=rank)
    holders = {journal.header.rank for journal in run.journals if key in journal.by_key and journal.count(key)}
    return run.series(key, fold="mean") if len(holders) > 1 and not key.startswith("system/") else run.series(key)


def deliveries(run: StoredRun) -> Iterator[dict[str, Any]]:
    """Yield the state of delivery to each tracker: of the run itself, and of the reports of its callbacks."""
    from ..relay.process import OWN, remaining

    for folder in (run.path, *choose.reports(run.path)):
        for cursor in (one for one in cursors(folder) if one.tracker not in OWN):  # see `fanfold notify show`
            yield {
                "tracker": cursor.tracker,
                "report": None if folder == run.path else decode_name(folder.name),
                "delivered": cursor.delivered,
                "left": remaining(folder, cursor),
                "refused": cursor.refused,
                "status": cursor.closed,
                "remote": cursor.remote,
                "error": cursor.error,
                "restarts": cursor.restarts,
            }


class RunPrinter:
    """Prints one run on a terminal; in a pipe, without colours."""

    def __init__(self, run: StoredRun, *, keys: list[str] | None = None, everything: bool = False, log: bool = False,
                 rank: int | None = None) -> None:  # fmt: skip
        self.run = run
        self.keys = keys
        self.everything = everything
        self.log = log
        self.rank = rank
        self.width = output.width()
        self.console = output.console(width=self.width, soft_wrap=True)
        self._series = functools.lru_cache(maxsize=None)(lambda key: series_of(run, key, rank))

    def print(self) -> None:
        """Print every section that is not empty."""
        for section in (self.head, self.error, self.attempts, self.settings, self.origin, self.metrics, self.summary, self.curves,
                        self.line, self.system, self.media, self.alerts, self.requests,
                        self.artifacts, self.saved, self.delivery, self.problems,
                        self.line):  # fmt: skip
            section()

    def line(self, *parts: Any) -> None:
        """Print one line made of texts and (text, style) pairs; nothing in them is markup."""
        from rich.text import Text

        self.console.print(Text.assemble(*parts), soft_wrap=True)

    def fact(self, name: str, *parts: Any) -> None:
        self.line((f"  {name:<10}", "dim"), *parts)

    def short_fact(self, name: str, value: Any) -> None:
        """Print a fact, cut to one line, unless it is empty."""
        if value:
            self.fact(name, short(str(value), self.width - 14))

    def _cut(self, items: Sequence[Any], limit: int) -> Sequence[Any]:
        return items if self.everything else items[:limit]

    def _some(self, items: Sequence[Any], what: str) -> Iterator[Any]:
        """Yield the first few items, then print how many more there are."""
        yield from self._cut(items, LINES)
        if len(items) > LINES and not self.everything:
            self.fact("", (f"and {len(items) - LINES} more {what} (--all)", "dim"))

    def _wrapped(self, name: str, cells: Sequence[str], limit: int) -> None:
        """Print cells, separated by dots, on as many lines as they need."""
        shown = self._cut(cells, limit)
        lines: list[str] = []
        for cell in [*shown, *[f"and {len(cells) - len(shown)} more (--all)"] * (len(shown) < len(cells))]:
            if lines and len(lines[-1]) + 3 + len(cell) <= self.width - 14:
                lines[-1] += " · " + cell
            else:
                lines.append(cell)
        for place, text in enumerate(lines):
            self.fact("" if place else name, text)

    # Status

    def head(self) -> None:
        run, status = self.run, self.run.status
        symbol, colour = STATUS.get(status, ("?", "white"))
        self.line()
        self.line((f"{symbol} ", colour), (clean(run.name), "bold"), "  ", (status, colour), ("  " + clean(run.id), "dim"))
        self.fact("project", clean(run.project))
        if run.fork is not None:
            gone = forks.missing(run)
            self.fact("forked from ", clean(f"{run.fork.project}/{run.fork.run} at step {run.fork.step}"),
                      (clean(f" ({gone})"), "yellow") if gone else "")  # fmt: skip
        ran = ", running for " if status == "running" else ", ran "
        self.fact("started", age(run.started), ran, duration(run.duration))
        if len(run.ranks) > 1:
            nodes = {journal.header.node for journal in run.journals}
            self.fact("ranks", f"{len(run.ranks)} on {plural(len(nodes), 'node')}")

    def error(self) -> None:
        verdict, status = self.run.verdict, self.run.verdict["status"]
        if verdict.get("reason"):
            self.fact("reason", clean(str(verdict["reason"])))
        if status in ("running", "finished"):
            return
        parts = [f"rank {verdict['rank']}"] if verdict.get("rank") is not None else []
        if status == "preempted":
            parts.append(f"stopped by {verdict.get('signal') or 'a signal'} (a scheduler, or kill)")
        elif verdict.get("signal"):
            parts.append(f"by {verdict['signal']}")
        parts += [f"exit code {verdict['exit_code']}"] if verdict.get("exit_code") else []
        parts += [_MEANING[status]] if status in _MEANING and not verdict.get("error") else []
        self.fact("cause", (clean(", ".join(parts)), STATUS[status][1]))
        text = clean(str(verdict.get("error") or ""), lines=True).rstrip().splitlines()
        for one in text if self.everything else text[-12:]:
            self.line((f"    {one}", "red"))

    def attempts(self) -> None:
        attempts = list(enumerate(self.run.attempts, 1))
        for count, attempt in attempts[0 if self.everything else -8 :] if len(attempts) > 1 else ():
            verdict = attempt.verdict()
            symbol, colour = STATUS.get(verdict["status"], ("?", "white"))
            signal = f" by {verdict['signal']}" if verdict.get("signal") else ""
            lasted = duration((attempt.seen - attempt.started) / 1e9)
            self.fact(f"attempt {count}", (f"{symbol} {verdict['status']}{clean(signal)}", colour),
                      f", {age(attempt.started / 1e9)}, {lasted}, {plural(len(attempt.mains), 'rank')}")  # fmt: skip

    # Config and origin

    def settings(self) -> None:
        self._pairs("config", self.run.config)
        self.short_fact("tags", ", ".join(self.run.tags))
        self.short_fact("group", self.run.group)
        self.short_fact("notes", self.run.notes)

    def _pairs(self, title: str, values: dict[str, Any]) -> None:
        self._wrapped(title, [f"{short(str(name), 40)} {short(value, 40)}" for name, value in flat(values).items()], PAIRS)

    def origin(self) -> None:
        facts = self.run.facts
        command = facts.get("command") or facts.get("argv")
        self.short_fact("command", " ".join(map(str, command)) if isinstance(command, list) else command)
        git = facts.get("git")
        if isinstance(git, dict):
            dirty = (" (with changes)", "yellow") if git.get("dirty") and git.get("commit") else ""
            branch = f" on {short(str(git['branch']), 40)}" if git.get("branch") else ""
            commit = clean(str(git["commit"]))[:12] if git.get("commit") else "nothing committed"
            self.fact("git", commit, branch, dirty)
        self.short_fact("code", _code(facts.get("code")))
        self.short_fact("on", ", ".join(_machine(facts)))
        self.fact("files", clean(self.run.place))

    # Metrics

    def metrics(self) -> None:
        keys = self.run.keys() if self.keys is None else self.keys
        shown = self._cut(keys, METRICS) if self.keys is None else keys
        if not shown:
            return
        whose = f"rank {self.rank}" if self.rank is not None else "mean over ranks" if len(self.run.ranks) > 1 else ""
        wide = max(len(whose), min(max(len(clean(key)) for key in shown), max(12, self.width - 62)))
        self.line()
        self.line((f"  {whose:<{wide}}  {'last':>10}  {'min':>10}  {'max':>10}  {'points':>8}", "dim"))
        for key in shown:
            row, spark = statistics(self._series(key)), chart.spark(self._series(key).values)
            cells = "  ".join(f"{number(row[word]):>10}" for word in ("last", "min", "max"))
            self.line("  ", (f"{short(key, wide):<{wide}}", "bold"), f"  {cells}  {row['count']:>8,}  ", (spark, "cyan"))
        if len(shown) < len(keys):
            self.line((f"  and {len(keys) - len(shown)} more keys (--all, or --key)", "dim"))

    def summary(self) -> None:
        """Print the values that the user assigned to the summary; its other values are the metrics above."""
        if self.run.assigned:
            self.line()
            self._pairs("summary", self.run.assigned)

    def curves(self) -> None:
        keys: Sequence[str] = self.keys or ()
        if self.keys is None:
            moving = [key for key in curve_order(self.run.keys()[:200]) if _moves(self._series(key).values)]
            keys = self._cut(moving, CHARTS)
        columns = 2 if self.width >= 96 and len(keys) > 1 else 1
        wide = min((self.width - 4) // columns - 2, 100)
        blocks = [self._block(key, wide) for key in keys]
        for at in range(0, len(blocks), columns):
            self.line()
            for *left, (text, style) in itertools.zip_longest(*blocks[at : at + columns], fillvalue=("", "")):
                self.line("  ", *((f"{part:<{wide + 2}}", look) for part, look in left), (text, style))

    def _block(self, key: str, wide: int) -> list[tuple[str, str]]:
        series = self._series(key)
        x = series.steps if series.steps[-1] >= 0 else series.times - series.times[0]
        drawn = chart.draw(x, series.values, width=wide, height=6, log=self.log)
        ranks = int(series.count.max()) if series.count is not None else 1
        notes = [f"mean of {ranks} ranks"] if ranks > 1 else []
        notes += ["log scale"] if self.log else []
        notes += [f"{plural(drawn.left_out, 'value')} not drawn"] if drawn.left_out else []
        title = short(key, wide - 30) + (f"  ({', '.join(notes)})" if notes else "")
        return [(title, "bold"), *((line, "cyan") for line in drawn.lines)]

    # Everything else

    def system(self) -> None:
        latest = self.run.latest
        words = [text(latest[key]) for key, text in _SYSTEM.items() if isinstance(latest.get(key), float)]
        words += list(_gpus(latest))
        if words:
            self.fact("system", ", ".join(words[:12]))

    def media(self) -> None:
        kinds = {key: Counter(clean(point.kind) for point in self.run.media(key)) for key in self.run.keys("media")}
        words = {key: ", ".join(f"{count} x {kind}" for kind, count in counts.items()) for key, counts in kinds.items()}
        self._wrapped("media", [f"{short(key, 30)} ({word})" for key, word in words.items()], WORDS)
        latest = self.run.latest
        texts = [f"{short(key, 30)}: {short(latest.get(key, ''), 40)!r}" for key in self.run.keys("text")]
        self._wrapped("texts", texts, WORDS)

    def alerts(self) -> None:
        for alert in self._some(self.run.alerts[::-1], "alerts"):
            level = short(str(alert.get("level")), 10)
            colour = {"error": "red", "warning": "yellow"}.get(level, "blue")
            text = f": {short(str(alert['text']), self.width)}" if alert.get("text") else ""
            title = (short(str(alert.get("title")), 80), "bold")
            self.fact("alert", (f"{level}  ", colour), title, text, (short(f"  step {alert.get('s')}"), "dim"))

    def requests(self) -> None:
        for one in self._some(self.run.requests[::-1], "requests"):
            colour = {"done": "green", "asked": "blue"}.get(str(one["state"]), "yellow")
            given = "".join(f" {short(str(name), 30)}={short(str(value), 30)}" for name, value in one["values"].items())
            after = f" after step {one['step']}" if one["state"] == "done" else ""
            why = f": {short(str(one['why']), self.width)}" if one["why"] else ""
            what = (short(str(one["action"]), 20) + given, "bold")
            state, by = (f"  {short(str(one['state']), 10)}{after}", colour), (f"  by {short(str(one['by']), 40)}", "dim")
            self.fact("asked", what, state, why, by)

    def artifacts(self) -> None:
        for one in self._some(self.run.artifacts, "artifacts"):
            files = [file for file in one.get("files") or () if isinstance(file, dict)]
            total = sum(_count(file.get("size")) for file in files)
            name, kind = short(str(one.get("name")), 60), short(str(one.get("kind")), 20)
            self.fact("artifact", (name, "bold"), f"  {kind}, {plural(len(files), 'file')}, {size(total)}")

    def saved(self) -> None:
        for one in self._some(self.run.files[::-1], "files"):
            step = f", step {one['s']}" if isinstance(one.get("s"), int) else ""
            step += f", rank {one['rank']}" if len(self.run.ranks) > 1 and isinstance(one.get("rank"), int) else ""
            folder, _, name = str(one.get("path")).rpartition("/")  # the name first: a long path is cut at its end
            where = f"  in {short(folder, 80)}" if folder else ""
            self.fact("saved", (short(name, 60), "bold"), f"{where}  {size(_count(one.get('size')))}{step}")

    def delivery(self) -> None:
        for one in deliveries(self.run):
            tracker = short(str(one["tracker"]), 40) + (" (report)" if one["report"] else "")
            left = f", {plural(one['left'], 'value')} left (fanfold sync {clean(self.run.id)})" if one["left"] else ""
            where = f", {short(str(one['remote']), self.width)}" if one["remote"] else ""
            count = plural(_count(one["delivered"]), "value")
            self.fact("delivery", (tracker, "bold"), f"  {count} delivered", (left, "yellow"), where)
            if one["error"]:
                self.fact("", (short(str(one["error"]), self.width - 14), "red"))
            if _count(one["refused"]):
                self.fact(
                    "", (f"{plural(_count(one['refused']), 'item')} left out there, because it does not take them", "yellow")
                )
            if _count(one["restarts"]):
                self.fact("", (f"its relay died and was restarted {plural(one['restarts'], 'time')}", "yellow"))

    def problems(self) -> None:
        """Print what is missing; most runs have no such lines."""
        run = self.run
        if run.dropped:
            self.fact("dropped", (f"{plural(run.dropped, 'log call')} could not be written (disk full?)", "yellow"))
        if run.damaged:
            self.fact("damaged", (f"{size(run.damaged)} of the journals cannot be read; the rest is shown", "yellow"))
        if run.lost_values:
            why = Counter(str(one.get("why")) for one in run.lost_values).most_common(1)[0][0]
            self.fact("lost", (f"{plural(len(run.lost_values), 'value')} never arrived: {short(why, 80)}", "yellow"))


_MEANING = {
    "killed": "the process exited without reporting a status: kill -9, out of memory or power loss",
    "lost": "no heartbeat for a minute; it may come back",
}
_SYSTEM: dict[str, Callable[[float], str]] = {
    "system/cpu": "CPU {:.0f} %".format,
    "system/memory": "memory {:.0f} %".format,
    "system/process/rss_gb": lambda count: f"process {size(count * 1e9)}",
    "system/disk_free_gb": "disk {:.0f} GB free".format,
}


def _moves(values: Any) -> bool:
    """Return whether there is a curve to draw."""
    return len(values) > 1 and bool((values != values[0]).any())


def _code(code: Any) -> str:
    """Return the source files that were kept with the run because no commit has them."""
    files = code.get("files") if isinstance(code, dict) else None
    if not isinstance(files, list) or not files:
        return ""
    names = [str(file.get("path")) for file in files if isinstance(file, dict)]
    more = len(names[3:]) + (code.get("left_out") or 0)
    return f"kept {', '.join(names[:3])}" + (f" and {more} more" if more else "")


def _machine(facts: dict[str, Any]) -> Iterator[str]:
    """Yield where a run ran: node, GPUs, Python, torch."""
    node, gpus = facts.get("node"), facts.get("gpus")
    if isinstance(node, dict):
        yield f"{node.get('hostname')} ({node.get('cpu_usable') or node.get('cpu_count')} cores)"
    if isinstance(gpus, list) and gpus:
        names = Counter(str(gpu.get("name")) for gpu in gpus if isinstance(gpu, dict))
        yield ", ".join(f"{count} x {name}" for name, count in names.items())
    for name, what in (("Python", facts.get("python")), ("torch", facts.get("torch"))):
        if isinstance(what, dict) and what.get("version"):
            yield f"{name} {what['version']}"


def _gpus(latest: dict[str, Any]) -> Iterator[str]:
    for key, value in latest.items():
        if key.startswith("system/gpu/") and key.endswith("/util"):
            base = key.removesuffix("/util")
            memory, power = latest.get(f"{base}/memory_gb"), latest.get(f"{base}/power_w")
            text = f"GPU {clean(base.rpartition('/')[2])} {value:.0f} %"
            text += f" {memory:.0f} GB" if memory is not None else ""
            yield text + (f" {power:.0f} W" if power is not None else "")


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
