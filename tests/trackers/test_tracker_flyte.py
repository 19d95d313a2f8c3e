"""Flyte under the tracker contract, as the page a relay process writes; and as a real Deck, inside real local tasks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

from fanfold.testing import ALL, Seen
from fanfold.trackers._flyte_page import History
from warm_contract import WarmContract

NUMBER = re.compile(r"-?(\d[\d.e+-]*|inf|nan)|True|False")


def top_level(html: str, tag: str) -> list[str]:
    """Take the contents of a tag's elements, without those inside one another."""
    found, depth, start = [], 0, 0
    for match in re.finditer(rf"<(/?){tag}[ >]", html):
        depth += -1 if match[1] else 1
        if depth == 1 and not match[1]:
            start = html.index(">", match.start()) + 1
        elif depth == 0:
            found.append(html[start : match.start()])
    return found


def facts(page: str, name: str) -> dict[str, str]:
    table = re.search(rf'<table class="{name}">(.*?)</table>', page, re.DOTALL)
    pairs = re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", table[1], re.DOTALL) if table else []
    return {unescape(key): unescape(value) for key, value in pairs}


def parse(page: str) -> Seen:
    """Read a page of the tracker back."""
    run = facts(page, "run")
    seen = Seen(config=facts(page, "config"), status=run.get("status"), tags=run["tags"].split(", ") if "tags" in run else None)
    seen.summary = facts(page, "summary")
    seen.alerts = [f"{when} {text}" for when, text in facts(page, "alerts").items()]
    table = top_level(page[page.index('<table class="history">') :], "table")[0]
    rows = top_level(table, "tr")
    keys = [unescape(key) for key in top_level(rows[0], "th")][1:]
    for row in rows[1:]:
        step, *cells = top_level(row, "td")
        for key, cell in zip(keys, cells, strict=True):
            if NUMBER.fullmatch(cell):
                seen.scalars.setdefault(key, []).append((int(step), float({"True": 1, "False": 0}.get(cell, cell))))
            elif cell.startswith("<pre>"):
                seen.texts.setdefault(key, []).append(unescape(cell.removeprefix("<pre>").removesuffix("</pre>")))
            elif cell:
                seen.media[key] = seen.media.get(key, 0) + 1
    return seen


class TestFlyte(WarmContract):
    name = "flyte"
    holds = ALL - {"artifact", "metric"}

    @staticmethod
    def read(folder: Path) -> Seen:
        (page,) = (folder / "runs").rglob("trackers/flyte/deck.html")
        return parse(page.read_text())

    def test_a_relay_process_says_once_where_the_page_is(self, tmp_path: Path) -> None:
        self.delivered(tmp_path, "run.log({'x': 1.0}, step=0)")
        log = next(tmp_path.rglob("relay/flyte.log")).read_text()
        assert log.count("there is no Deck to publish") == 1
        assert "relay='thread'" in log

    def test_a_second_attempt_still_shows_the_config(self, tmp_path: Path) -> None:
        self.delivered(tmp_path, "run.config.update({'lr': 0.1})\nrun.log({'x': 1.0}, step=0)")
        seen = self.delivered(tmp_path, "run.log({'x': 2.0}, step=1)")
        assert (seen.config["lr"], seen.scalars["x"]) == ("0.1", [[0, 1.0], [1, 2.0]])

    def test_a_run_in_a_task_publishes_the_deck_with_the_whole_history(self, tmp_path: Path) -> None:
        pages = self.task(tmp_path, """
            import fanfold
            run = fanfold.init("p", dir="runs", system=False, quiet=True, trackers=["flyte"], relay="thread", config={"lr": 0.1})
            for i in range(300):
                run.log({"loss": 1 / (i + 1), "note": f"<{i}>"}, step=i)
            run.finish(timeout=60)
        """)  # fmt: skip
        seen = parse(pages[-1])
        assert seen.scalars["loss"] == [(i, 1 / (i + 1)) for i in range(300)]
        assert seen.texts["note"] == [f"<{i}>" for i in range(300)]
        assert (seen.config, seen.status) == ({"lr": "0.1"}, "finished")
        assert "Log History" in pages[-1]

    def test_by_hand_in_a_task_the_deck_is_whole_at_its_end_and_checkpoints_are_saved(self, tmp_path: Path) -> None:
        pages = self.task(tmp_path, """
            from fanfold.trackers.flyte import FlyteTracker
            tracker = FlyteTracker("by hand", deck="Losses")
            tracker.start()
            tracker.log({"loss": 0.5}, step=0)
            tracker.finish()
            tracker.log({"loss": 0.25}, step=1)
            open("model.bin", "wb").write(b"weights")
            tracker.sync_checkpoint("model.bin")
            assert tracker.tracker in flytekit.current_context().decks
        """)  # fmt: skip
        assert parse(pages[0]).scalars["loss"] == [(0, 0.5)]
        assert parse(pages[-1]).scalars["loss"] == [(0, 0.5), (1, 0.25)]
        assert ">Losses<" in pages[-1]
        saved = [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"weights"]
        assert len(saved) == 2

    def test_a_task_without_decks_is_told_so_once(self, tmp_path: Path) -> None:
        done = self.run_task(tmp_path, """
            from fanfold.trackers.flyte import FlyteTracker
            tracker = FlyteTracker("by hand")
            tracker.start()
            tracker.finish()
            tracker.finish()
        """, "enable_deck=False")  # fmt: skip
        assert done.stderr.count("Write @task(enable_deck=True)") == 1

    def test_outside_a_task_it_writes_the_page_without_importing_flytekit(self, tmp_path: Path) -> None:
        script = """
import sys
from fanfold.trackers.flyte import FlyteTracker
assert FlyteTracker.unusable()
tracker = FlyteTracker("by hand", directory=".")
tracker.start()
tracker.log({"loss": 0.5}, step=0)
tracker.finish()
assert "flytekit" not in sys.modules
"""
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=60, check=True)
        assert parse((tmp_path / "deck.html").read_text()).scalars == {"loss": [(0, 0.5)]}

    def task(self, folder: Path, body: str) -> list[str]:
        done = self.run_task(folder, body, "enable_deck=True, deck_fields=()")
        places = done.stdout.splitlines()[-1]
        found = sorted(Path(places).rglob("deck.html"), key=lambda path: path.stat().st_mtime_ns)
        return [path.read_text() for path in found]

    def run_task(self, folder: Path, body: str, options: str) -> subprocess.CompletedProcess[str]:
        lines = [
            "import flytekit",
            f"@flytekit.task({options})",
            "def train() -> str:",
            body,
            "            return str(flytekit.FlyteContextManager.current_context().file_access.local_sandbox_dir)",
            "print(train())",
        ]
        (folder / "job.py").write_text("\n".join(lines))
        done = subprocess.run(
            [sys.executable, "job.py"], cwd=folder, capture_output=True, text=True, timeout=110,
            env={**os.environ, "HOME": str(folder), "TMPDIR": str(folder), "FLYTE_SDK_RICH_TRACEBACKS": "0"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done


def test_rows_beyond_the_limit_are_counted_and_said() -> None:
    history = History(3)
    for i in range(10):
        history.add(i, float(i), {"x": str(i)})
    assert "7 earlier rows are in the journal" in history.html()
    assert [cells["x"] for cells in history.rows.values()] == ["7", "8", "9"]


def test_a_row_sent_again_is_the_same_row_and_another_value_is_another(tmp_path: Path) -> None:
    history = History(10)
    for _ in range(2):
        history.add(1, 5.0, {"x": "1.0"})
        history.add(1, 5.0, {"y": "2.0"})
        history.save(tmp_path / "history.jsonl")
    history.add(1, 5.0, {"x": "3.0"})
    history.save(tmp_path / "history.jsonl")
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('[1, 5.0, {"x": "torn')
    again = History(10)
    again.load(tmp_path / "history.jsonl")
    again.add(2, 6.0, {"x": "4.0"})
    again.save(tmp_path / "history.jsonl")
    last = History(10)
    last.load(tmp_path / "history.jsonl")
    assert list(history.rows.values()) == [{"x": "1.0", "y": "2.0"}, {"x": "3.0"}]
    assert list(last.rows.values()) == [*history.rows.values(), {"x": "4.0"}]
