"""A run on the screen: the sections of `fanfold show`, one short method each. The demo prints the same."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..drawing.order import curve_order
from ..plain import flat
from ..relay.cursor import cursors
from ..store import Series, StoredRun
from . import chart, output
from .text import STATUS, age, clean, duration, number, plural, short, size

CHARTS, FIGURES, SETTINGS, LINES = 6, 24, 24, 5


def figures(run: StoredRun, key: str, rank: int | None = None) -> dict[str, Any]:
    """Return what a key comes down to: count, last, lowest and highest, passing over NaN."""
    return _figures(series_of(run, key, rank))


def _figures(series: Series) -> dict[str, Any]:
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
    """Return a key's points: of a rank, else the mean over ranks where several have it; probes have no step to fold by."""
    if rank is not None:
        return run.series(key, rank=rank)
    holders = {journal.header.rank for journal in run.journals if key in journal.by_key and journal.count(key)}
    return run.series(key, fold="mean") if len(holders) > 1 and not key.startswith("system/") else run.series(key)


def seen(attempt: Any) -> float:
    """Return an attempt's last sign of life."""
    return float(attempt.seen / 1e9)


class Report:
    """One run as lines on a terminal; in a pipe the same without colours."""

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
        """Print every section that has something to say."""
        self.head()
        self.error()
        self.attempts()
        self.settings()
        self.origin()
        self.figures()
        self.summary()
        self.curves()
        self.rest()
        self.problems()
        self.line()

    def line(self, *parts: Any) -> None:
        """Print one line made of texts and (text, style) pairs; nothing in them is markup."""
        from rich.text import Text

        self.console.print(Text.assemble(*parts), soft_wrap=True)

    def fact(self, name: str, *parts: Any) -> None:
        self.line((f"  {name:<10}", "dim"), *parts)

    def _cut(self, items: Sequence[Any], limit: int) -> Sequence[Any]:
        return items if self.everything else items[:limit]

    def _more(self, items: Sequence[Any], what: str) -> None:
        """Say how many were left out, where any were."""
        if len(items) > LINES and not self.everything:
            self.fact("", (f"and {len(items) - LINES} more {what} (--all)", "dim"))

    # How it stands

    def head(self) -> None:
        run, status = self.run, self.run.status
        symbol, colour = STATUS.get(status, ("?", "white"))
        self.line()
        self.line((f"{symbol} ", colour), (clean(run.name), "bold"), "  ", (status, colour), ("  " + clean(run.id), "dim"))
        self.fact("project", clean(run.project))
        ran = ", running for " if status == "running" else ", ran "
        self.fact("started", age(run.started), ran, duration(run.duration))
        if len(run.ranks) > 1:
            nodes = {journal.header.node for journal in run.journals}
            self.fact("ranks", f"{len(run.ranks)} on {plural(len(nodes), 'node')}")

    def error(self) -> None:
        verdict = self.run.verdict
        if verdict.get("reason"):
            self.fact("reason", clean(str(verdict["reason"])))
        if verdict["status"] in ("running", "finished"):
            return
        parts = [f"rank {verdict['rank']}"] if verdict.get("rank") is not None else []
        asked = verdict["status"] == "preempted"
        by = "stopped by {} (a scheduler, or kill)" if asked else "by {}"
        parts += [by.format(verdict.get("signal") or "a signal")] if asked or verdict.get("signal") else []
        parts += [f"exit code {verdict['exit_code']}"] if verdict.get("exit_code") else []
        parts += [_MEANING[verdict["status"]]] if verdict["status"] in _MEANING and not verdict.get("error") else []
        self.fact("cause", (clean(", ".join(parts)), STATUS[verdict["status"]][1]))
        text = clean(str(verdict.get("error") or ""), lines=True).rstrip().splitlines()
        for one in text if self.everything else text[-12:]:
            self.line((f"    {one}", "red"))

    def attempts(self) -> None:
        attempts = self.run.attempts
        if len(attempts) < 2:
            return
        for count, attempt in list(enumerate(attempts, 1))[slice(None) if self.everything else slice(-8, None)]:
            verdict = attempt.verdict()
            symbol, colour = STATUS.get(verdict["status"], ("?", "white"))
            began = attempt.started / 1e9
            signal = f" by {verdict['signal']}" if verdict.get("signal") else ""
            self.fact(f"attempt {count}", (f"{symbol} {verdict['status']}{clean(signal)}", colour),
                      f", {age(began)}, {duration(seen(attempt) - began)}, {plural(len(attempt.mains), 'rank')}")  # fmt: skip

    # What it is

    def settings(self) -> None:
        self._pairs("config", self.run.config)
        for name, value in (("tags", ", ".join(self.run.tags)), ("group", self.run.group), ("notes", self.run.notes)):
            if value:
                self.fact(name, short(str(value), self.width - 14))

    def _pairs(self, title: str, values: dict[str, Any]) -> None:
        pairs = list(flat(values).items())
        shown = self._cut(pairs, SETTINGS)
        cells = [f"{short(str(name), 40)} {short(value, 40)}" for name, value in shown]
        more = [f"and {len(pairs) - len(shown)} more (--all)"] if len(shown) < len(pairs) else []
        for place, text in enumerate(_wrapped(cells + more, self.width - 14)):
            self.fact(title if not place else "", text)

    def origin(self) -> None:
        facts = self.run.facts
        command = facts.get("command") or facts.get("argv")
        if command:
            words = command if isinstance(command, str) else " ".join(map(str, command))
            self.fact("command", short(words, self.width - 14))
        git = facts.get("git")
        if isinstance(git, dict):
            dirty = (" (with changes)", "yellow") if git.get("dirty") and git.get("commit") else ""
            branch = f" on {short(str(git['branch']), 40)}" if git.get("branch") else ""
            commit = clean(str(git["commit"]))[:12] if git.get("commit") else "nothing committed"
            self.fact("git", commit, branch, dirty)
        if kept := _code(facts.get("code")):
            self.fact("code", short(kept, self.width - 14))
        machine = ", ".join(_machine(facts))
        if machine:
            self.fact("on", short(machine, self.width - 14))
        self.fact("files", clean(self.run.place))

    # Its numbers

    def chosen(self) -> list[str]:
        return self.run.keys() if self.keys is None else self.keys

    def figures(self) -> None:
        keys = self.chosen()
        shown = list(self._cut(keys, FIGURES)) if self.keys is None else keys
        if not shown:
            return
        rows = [(key, _figures(self._series(key)), chart.spark(self._series(key).values)) for key in shown]
        whose = f"rank {self.rank}" if self.rank is not None else "mean over ranks" if len(self.run.ranks) > 1 else ""
        wide = max(len(whose), min(max(len(clean(key)) for key in shown), max(12, self.width - 62)))
        self.line()
        self.line((f"  {whose:<{wide}}  {'last':>10}  {'min':>10}  {'max':>10}  {'points':>8}", "dim"))
        for key, row, spark in rows:
            name = f"{short(key, wide):<{wide}}"
            cells = "  ".join(f"{number(row[word]):>10}" for word in ("last", "min", "max"))
            self.line("  ", (name, "bold"), f"  {cells}  {row['count']:>8,}  ", (spark, "cyan"))
        if len(shown) < len(keys):
            self.line((f"  and {len(keys) - len(shown)} more keys (--all, or --key)", "dim"))

    def summary(self) -> None:
        """Print what the user put into the summary; the rest of it is the figures above."""
        assigned = self.run.assigned
        if assigned:
            self.line()
            self._pairs("summary", assigned)

    def curves(self) -> None:
        keys = self.chosen()
        if self.keys is None:
            keys = [key for key in curve_order(keys[:200]) if _moves(self._series(key).values)]
            keys = list(self._cut(keys, CHARTS))
        columns = 2 if self.width >= 96 and len(keys) > 1 else 1
        wide = min((self.width - 4) // columns - 2, 100)
        blocks = [self._block(key, wide) for key in keys]
        for at in range(0, len(blocks), columns):
            self.line()
            for parts in zip(*_level(blocks[at : at + columns]), strict=True):
                *before, (text, style) = parts
                self.line("  ", *((f"{part:<{wide + 2}}", look) for part, look in before), (text, style))

    def _block(self, key: str, wide: int) -> list[tuple[str, str]]:
        series = self._series(key)
        drawn = chart.draw(series.steps if series.steps[-1] >= 0 else series.times - series.times[0], series.values,
                           width=wide, height=6, log=self.log)  # fmt: skip
        ranks = int(series.count.max()) if series.count is not None else 1
        notes = [f"mean of {ranks} ranks"] if ranks > 1 else []
        notes += ["log scale"] if self.log else []
        notes += [f"{plural(drawn.left_out, 'value')} not drawn"] if drawn.left_out else []
        title = short(key, wide - 30) + (f"  ({', '.join(notes)})" if notes else "")
        return [(title, "bold"), *((line, "cyan") for line in drawn.lines)]

    # Everything else

    def rest(self) -> None:
        self.line()
        self.system()
        media = {key: self.run.media(key) for key in self.run.keys("media")}
        if media:
            words = [f"{short(key, 30)} ({_kinds(points)})" for key, points in media.items()]
            self._listed("media", words)
        texts = self.run.keys("text")
        if texts:
            self._listed("texts", [f"{short(key, 30)}: {short(self.run.latest.get(key, ''), 40)!r}" for key in texts])
        self.alerts()
        self.artifacts()

    def alerts(self) -> None:
        for alert in self._cut(self.run.alerts[::-1], LINES):
            level = short(str(alert.get("level")), 10)
            colour = {"error": "red", "warning": "yellow"}.get(level, "blue")
            text = f": {short(str(alert['text']), self.width)}" if alert.get("text") else ""
            title = (short(str(alert.get("title")), 80), "bold")
            self.fact("alert", (f"{level}  ", colour), title, text, (short(f"  step {alert.get('s')}"), "dim"))
        self._more(self.run.alerts, "alerts")

    def artifacts(self) -> None:
        for one in self._cut(self.run.artifacts, LINES):
            files = [file for file in one.get("files") or () if isinstance(file, dict)]
            total = sum(file["size"] for file in files if isinstance(file.get("size"), int))
            name, kind = short(str(one.get("name")), 60), short(str(one.get("kind")), 20)
            self.fact("artifact", (name, "bold"), f"  {kind}, {plural(len(files), 'file')}, {size(total)}")
        self._more(self.run.artifacts, "artifacts")
        for one in self._cut(self.run.files[::-1], LINES):
            step = f", step {one['s']}" if isinstance(one.get("s"), int) else ""
            step += f", rank {one['rank']}" if len(self.run.ranks) > 1 and isinstance(one.get("rank"), int) else ""
            folder, _, name = str(one.get("path")).rpartition("/")  # the name first: a long path is cut at its end
            where = f"  in {short(folder, 80)}" if folder else ""
            self.fact("saved", (short(name, 60), "bold"), f"{where}  {size(_count(one.get('size')))}{step}")
        self._more(self.run.files, "files")

    def _listed(self, name: str, words: list[str]) -> None:
        shown = list(self._cut(words, 8))
        more = [f"and {len(words) - len(shown)} more"] if len(shown) < len(words) else []
        for place, text in enumerate(_wrapped(shown + more, self.width - 14)):
            self.fact(name if not place else "", text)

    def system(self) -> None:
        latest = self.run.latest
        words = [say(latest[key]) for key, say in _SYSTEM.items() if isinstance(latest.get(key), float)]
        words += list(_gpus(latest))
        if words:
            self.fact("system", ", ".join(words[:12]))

    def problems(self) -> None:
        """Say what is missing; a run that is whole has no such lines."""
        run = self.run
        if run.dropped:
            self.fact("dropped", (f"{plural(run.dropped, 'log call')} could not be written (disk full?)", "yellow"))
        if run.damaged:
            self.fact("damaged", (f"{size(run.damaged)} of the journals cannot be read; the rest is shown", "yellow"))
        lost = run.lost_values
        if lost:
            why = Counter(str(one.get("why")) for one in lost).most_common(1)[0][0]
            self.fact("lost", (f"{plural(len(lost), 'value')} never arrived: {short(why, 80)}", "yellow"))
        for cursor in cursors(run.path):
            if cursor.restarts:
                again = f"the relay to {clean(cursor.tracker)} died and was started again {plural(cursor.restarts, 'time')}"
                self.fact("relay", (again, "yellow"))


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
    """Tell whether there is a curve to draw at all."""
    return len(values) > 1 and bool((values != values[0]).any())


def _code(code: Any) -> str:
    """Name the source files that were kept with the run because no commit has them."""
    files = code.get("files") if isinstance(code, dict) else None
    if not isinstance(files, list) or not files:
        return ""
    names = [str(file.get("path")) for file in files if isinstance(file, dict)]
    more = len(names) - 3 + (code.get("left_out") or 0) if len(names) > 3 else code.get("left_out")
    return f"kept {', '.join(names[:3])}" + (f" and {more} more" if more else "")


def _machine(facts: dict[str, Any]) -> Iterator[str]:
    """Name where a run ran: node, GPUs, Python, torch."""
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


def _kinds(points: Sequence[Any]) -> str:
    counts = Counter(clean(point.kind) for point in points)
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())


def _wrapped(cells: Sequence[str], width: int) -> list[str]:
    """Join cells by dots into lines no wider than `width`."""
    lines: list[str] = []
    for cell in cells:
        if lines and len(lines[-1]) + 3 + len(cell) <= width:
            lines[-1] += " · " + cell
        else:
            lines.append(cell)
    return lines


def _level(blocks: list[list[tuple[str, str]]]) -> list[list[tuple[str, str]]]:
    """Make blocks that stand side by side equally tall."""
    tall = max(map(len, blocks))
    return [block + [("", "")] * (tall - len(block)) for block in blocks]


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
