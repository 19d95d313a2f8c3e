"""`fanfold top`: a real terminal, real keys, and runs that are really being written."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from rich.cells import cell_len

import fanfold
from fanfold.cli.screen import keys
from fanfold.cli.top import LiveRuns, age_text, pace, rate_text
from fanfold.store.query import LocalStore
from store_data import START, Call, end, write_journal, write_run

HOSTILE = "<img>\x1b[2J日本"
TRAINING = """
import fanfold, math, sys, threading
run = fanfold.init("vision", name="alpha", config={"lr": 0.1}, quiet=True, system=False)
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
step = 0
while not over.wait(0.02):
    run.log({"train/loss": 2 / (1 + step / 50), "lr": 0.1, "system/gpu/0/util": 97.0}, step=step)
    step += 1
    if step == 2: print("going", flush=True)
run.finish()
"""
WAIT = 60.0  # seconds; the machine may be busy, and nothing here is about speed


class Terminal:
    """A command on a terminal of 80 by 24: what its screen shows now, and keys for it."""

    def __init__(self, *words: str, columns: int = 80) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        env = {**os.environ, "TERM": "xterm-256color"}
        env.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fanfold", *words], stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        self.raw = ""

    def press(self, letters: str) -> None:
        os.write(self.master, letters.encode())

    def read(self) -> None:
        if select.select([self.master], [], [], 0.1)[0]:
            self.raw += os.read(self.master, 1 << 16).decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        """The last frame that is whole: each begins at the top left corner."""
        frames = self.raw.split("\x1b[H")
        return [
            re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip() for line in (frames[-2] if len(frames) > 1 else "").split("\r\n")
        ]

    def until(self, pattern: str) -> list[str]:
        end = time.monotonic() + WAIT
        while not re.search(pattern, "\n".join(self.lines)):
            assert time.monotonic() < end, f"{pattern!r} never came:\n" + "\n".join(self.lines) + repr(self.raw[-500:])
            self.read()
        return self.lines

    def end(self) -> int:
        deadline = time.monotonic() + WAIT
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read()
        after = termios.tcgetattr(self.slave)
        os.close(self.slave)
        os.close(self.master)
        assert after == self.before, "the terminal was not put back"
        return self.process.wait(1)


@pytest.fixture
def training(runs_dir):
    process = subprocess.Popen([sys.executable, "-c", TRAINING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "going\n"
    yield process
    process.stdin.close()
    assert process.wait(WAIT) == 0
    process.stdout.close()


def ended(name: str, project: str = "llm", status: str = "finished", **options) -> str:
    run = fanfold.init(project, name=name, system=False, quiet=True, **options)
    for step in range(3):
        run.log({"loss": 3.0 - step}, step=step)
    run.finish(status=status)
    return run.id


def test_a_terminal_shows_runs_live_and_obeys_keys(training, runs_dir):
    ended("done-run")
    ended(HOSTILE, status="failed")
    screen = Terminal("top", "--interval", "0.1")
    lines = screen.until(r"● running +alpha +vision +\d+ +\d+(\.\d)?/s +[\d.]+ [▁-█ ]+\d+s +G97%")
    assert lines[0].startswith("fanfold top  1 failed  1 running  1 finished  sort: trouble")
    assert [line.split()[1] for line in lines[2:5]] == ["failed", "running", "finished"]
    assert all(cell_len(line) <= 80 for line in lines)
    assert r"<img>\x1b[2" in lines[2]

    step = int(re.search(r"vision +(\d+)", "\n".join(lines))[1])
    screen.until(rf"vision +(?!{step}\b)\d+")  # it lives

    screen.press("s")
    screen.until("sort: newest")
    screen.press("/name=~\r")
    screen.until("the filter has a mistake at column 6")
    screen.press("\x15name~alp\r")
    lines = screen.until("filter: name~alp\n")
    assert [line.split()[2] for line in lines[2:3]] == ["alpha"] and not any("done-run" in line for line in lines)
    screen.press("/\x15\r")
    screen.until("done-run")
    screen.press("gj")
    screen.press("\x1b[A\x1b[B\x1b[B")  # arrows: one up, two down
    screen.press("\r")
    lines = screen.until("config +lr 0.1")
    assert "alpha  running" in "\n".join(lines)
    screen.press("q")
    screen.until("sort: newest")
    training.stdin.close()
    screen.until("✓ finished +alpha")
    screen.press("q")
    assert screen.end() == 0
    assert "\x1b[?1049l" in screen.raw and "\x1b[?25h" in screen.raw  # back from the other screen, with a cursor


def test_without_a_terminal_one_table_is_printed(runs_dir):
    command = [sys.executable, "-m", "fanfold", "top"]
    nothing = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (nothing.returncode, nothing.stdout) == (1, "") and "no runs to watch" in nothing.stderr
    ended("good")
    bad = ended("bad", status="failed")
    write_journal(runs_dir / "p" / "old", 1, end(START), started=START)
    table = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert [line.split()[2] for line in table[1:]] == ["bad", "good"]
    rows = json.loads(subprocess.run([*command, "--all", "--json"], capture_output=True, timeout=60, check=True).stdout)
    assert [row["name"] for row in rows] == ["bad", "good", "old"]
    assert {name: rows[0][name] for name in ("id", "status", "step", "rate", "key", "value", "gpu")} == {
        "id": bad, "status": "failed", "step": 2, "rate": None, "key": "loss", "value": 1.0, "gpu": None}  # fmt: skip
    wrong = subprocess.run([*command, "--filter", "lr<<"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and "column" in wrong.stderr
    once = Terminal("top", "--once", columns=100)
    assert once.end() == 0 and "good" in once.raw and "\x1b[?1049h" not in once.raw


def test_a_silent_run_is_stalled_and_listed_before_running_ones(runs_dir):
    quick = fanfold.init("p", name="quick", system=False, quiet=True)
    slow = fanfold.init("p", name="slow", system=False, quiet=True)
    quick.log({"loss": 1.0}, step=0)
    slow.log({"loss": 1.0}, step=0)
    watcher = LiveRuns(LocalStore(), project=None, since=1.0, key=None)
    now = time.time()
    assert [look.status for look in watcher.looks(now=now)] == ["running", "running"]
    quick.log({"loss": 0.5}, step=1)
    looks = watcher.looks(now=now + 59)
    assert [look.status for look in looks] == ["running", "running"]
    looks = watcher.looks(now=time.time() + 61)
    assert {look.row["name"]: (look.status, look.rate) for look in looks} == {"quick": ("stalled", 0.0), "slow": ("stalled", 0.0)}
    quick.finish()
    assert [look.row["name"] for look in watcher.looks()] == ["slow", "quick"]
    assert [look.row["name"] for look in watcher.looks(now=time.time() + 5)] == ["slow"]  # ended longer ago than asked for
    slow.finish()


def test_a_run_that_steps_rarely_is_not_stalled(runs_dir):
    calls = [Call(0, 0, step, 100_000_000_000, {"loss": 1.0}) for step in range(5)]
    write_run(runs_dir, calls)
    run = fanfold.open("r")
    step, rate, silent, pause = pace(run, "loss", run.series("loss").times[-1] + 70.0)
    assert (step, rate, silent, pause) == (4, pytest.approx(0.01), pytest.approx(70.0), pytest.approx(100.0))


@pytest.mark.parametrize("steps", [3, 500])
def test_the_value_of_several_ranks_is_their_last_mean(runs_dir, steps):
    calls = [Call(0, rank, step, 1000, {"loss": float(rank) + step}) for step in range(steps) for rank in range(2)]
    write_run(runs_dir, calls)
    write_run(runs_dir, [*calls, *(Call(0, rank, steps, 1000, {"loss": [1.0, math.nan][rank]}) for rank in range(2))], id="nan")
    watcher = LiveRuns(LocalStore(), project=None, since=None, key=None)
    for _ in range(2):  # the second time from what it kept
        values = {look.row["id"]: watcher.whole(look).value for look in watcher.looks()}
        assert values == {"r": steps - 0.5, "nan": pytest.approx(math.nan, nan_ok=True)}


def test_keys_are_told_from_what_terminals_send():
    assert list(keys(b"\x1b[A\x1bOBx\r\x1b")) == ["up", "down", "x", "enter", "escape"]
    assert list(keys("é/日".encode())) == ["é", "/", "日"]
    assert list(keys(b"\x1b[15~\x1b[1;5Cq")) == ["q"]  # F5 and Ctrl-right are not for us
    assert list(keys(b"\xff\x00\x7f\x15")) == ["back", "clear"]


def test_speeds_and_ages_fit_their_columns():
    assert [rate_text(rate) for rate in (None, 0.0, 123456.0, 250.4, 12.34, 0.5, 0.002, 1e-9)] == [
        "", "0/s", "123k/s", "250/s", "12.3/s", "30.0/m", "7.2/h", "0.0/h"]  # fmt: skip
    assert [age_text(age) for age in (0.4, 59, 61, 7200, 10**6)] == ["0s", "59s", "1m", "2h", "11d"]
