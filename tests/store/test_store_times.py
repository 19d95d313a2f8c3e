"""When a run was alive, and for how long: its journals' frames say so, never the dates of files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fanfold
import fanfold.cli
import fanfold.settings
from fanfold.journal import Journal
from fanfold.journal import format as fmt
from fanfold.server import edit
from fanfold.store.query import LocalStore
from store_data import beat, end, write_journal

NOW = time.time_ns()  # when the tests began
SECOND = 10**9


def facts(root: Path) -> list[tuple[object, ...]]:
    names = ("id", "status", "created", "seen", "duration")
    rows = [tuple(row[name] for name in names) for row in LocalStore(root).runs()]
    runs = [(run.id, run.status, run.started, run.seen, run.duration) for run in map(fanfold.open, paths(root))]
    assert sorted(rows) == sorted(runs)
    return sorted(rows)


def paths(root: Path) -> list[Path]:
    return [path for path in root.glob("*/*") if (path / "journal").is_dir()]


def test_a_copy_or_touch_changes_no_time_and_no_status(tmp_path):
    root = tmp_path / "runs"
    with fanfold.init("p", dir=root, id="whole", system=False, quiet=True) as run:
        run.log({"loss": 1.0}, step=0)
    write_journal(root / "p" / "gone", 1, beat(NOW - 90 * SECOND), started=NOW - 100 * SECOND)
    before = facts(root)
    assert [status for _, status, *_ in before] == ["lost", "finished"]
    assert before[0][2:] == (pytest.approx(NOW / 1e9 - 100), pytest.approx(NOW / 1e9 - 90), pytest.approx(10))
    copied = tmp_path / "copied"
    subprocess.run(["cp", "-r", root, copied], check=True)
    for file in copied.rglob("*"):
        os.utime(file)
    assert facts(copied) == before
    shutil.rmtree(fanfold.settings.cache_directory())
    assert facts(copied) == before
    (project,) = LocalStore(copied).projects()
    assert project["last"] == max(seen for *_, seen, _ in before)


def test_tags_notes_and_archiving_do_not_extend_a_run(tmp_path):
    write_journal(tmp_path / "p" / "old", 1, end(NOW - 500 * SECOND), started=NOW - 600 * SECOND)
    before = facts(tmp_path)
    assert before[0][4] == pytest.approx(100)
    store = LocalStore(tmp_path)
    for change in ({"tags": ["x"]}, {"notes": "a note"}, {"archived": True}):
        edit.edit(store, edit.Edit("p", ["old"], **change))
    assert facts(tmp_path) == before
    (row,) = store.runs()
    assert (row["tags"], row["notes"], row["archived"]) == (["x"], "a note", True)


def test_time_between_attempts_is_not_run_time(tmp_path, capsys):
    folder = tmp_path / "p" / "twice"
    write_journal(folder, 1, beat(NOW - 9900 * SECOND), started=NOW - 10_000 * SECOND, attempt="first")
    write_journal(
        folder, 2, beat(NOW - 60 * SECOND), end(NOW - 50 * SECOND), started=NOW - 90 * SECOND, attempt="second", ordinal=2
    )
    assert facts(tmp_path)[0][4] == pytest.approx(100 + 40)
    assert fanfold.cli.main(["show", "twice", "--dir", str(tmp_path)]) == 0
    assert "ran 2 min 20 s" in capsys.readouterr().out
    assert fanfold.cli.main(["ls", "--json", "--dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["duration"] == pytest.approx(140)


def test_a_running_run_has_run_until_now(tmp_path):
    run = fanfold.init("p", dir=tmp_path, system=False, quiet=True)
    run.log({"loss": 1.0}, step=0)
    before = time.time()
    (row,) = LocalStore(tmp_path).runs()
    assert row["status"] == "running"
    assert before - row["created"] <= row["duration"] <= time.time() - row["created"]
    run.finish()


def test_a_process_of_another_node_lives_by_its_heartbeats_or_by_growth(tmp_path):
    path = write_journal(tmp_path / "p" / "r", 1, beat(time.time_ns() - 30 * SECOND), started=NOW - 100 * SECOND)
    os.utime(path, (1, 1))
    assert fanfold.open(path.parent.parent).status == "running"
    path = write_journal(tmp_path / "p" / "r", 1, beat(time.time_ns() - 61 * SECOND), started=NOW - 100 * SECOND)
    watched = Journal(path)
    watched.refresh()
    assert watched.status() == fanfold.open(path.parent.parent).status == "lost"
    with path.open("ab") as file:  # its clock is wrong, and yet it goes on
        file.write(fmt.frame(fmt.Kind.BEAT, fmt.pack([NOW - 3600 * SECOND, 2, 0, 0]), watched.seed))
    watched.refresh()
    assert watched.status() == "running"
    watched.grown -= 61
    assert watched.status() == "lost"


def test_a_journal_from_the_future_is_no_proof_of_life(tmp_path):
    path = write_journal(tmp_path / "p" / "r", 1, beat(NOW + 3600 * SECOND), started=NOW - 100 * SECOND)
    assert fanfold.open(path.parent.parent).status == "lost"


# A filesystem without locks

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int refused(int fd, int command) {
    char name[64], path[4096];
    const char *below = getenv("NO_LOCKS_BELOW");
    if (!below || (command != F_SETLK && command != F_SETLKW && command != F_GETLK)) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    return length > 0 && !strncmp(path, below, strlen(below));
}

#define WRAPPED(name)                                                       \
    int name(int fd, int command, ...) {                                    \
        va_list rest;                                                       \
        va_start(rest, command);                                            \
        void *argument = va_arg(rest, void *);                              \
        va_end(rest);                                                       \
        if (refused(fd, command)) { errno = ENOLCK; return -1; }            \
        int (*real)(int, int, ...) = dlsym(RTLD_NEXT, #name);               \
        return real(fd, command, argument);                                 \
    }
WRAPPED(fcntl)
WRAPPED(fcntl64)

int clock_gettime(clockid_t which, struct timespec *when) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    const char *ahead = getenv("CLOCK_AHEAD");
    int done = real(which, when);
    if (which == CLOCK_REALTIME && ahead) when->tv_sec += atol(ahead);
    return done;
}
"""
TRAINING = """
import fanfold, sys, time
run = fanfold.init("p", dir=sys.argv[1], id="victim", system=False, quiet=True)
run.log({"loss": 1.0}, step=0)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"], check=True)
    return folder / "shim.so"


def test_without_locks_killed_runs_are_killed_and_can_be_deleted(tmp_path, shim):
    env = {**os.environ, "LD_PRELOAD": str(shim), "NO_LOCKS_BELOW": str(tmp_path)}
    training = subprocess.Popen([sys.executable, "-c", TRAINING, str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True)
    assert training.stdout.readline() == "ready\n"

    def command(*words: str, ahead: int = 0) -> subprocess.CompletedProcess[str]:
        whole = [sys.executable, "-m", "fanfold", *words, "--dir", str(tmp_path)]
        return subprocess.run(whole, env={**env, "CLOCK_AHEAD": str(ahead)}, capture_output=True, text=True, timeout=120)

    def status(ahead: int = 0) -> str:
        return str(json.loads(command("ls", "--json", ahead=ahead).stdout)[0]["status"])

    assert status() == "running"
    refused = command("rm", "victim", "--yes")
    assert refused.returncode != 0 and "is still being written" in refused.stderr
    training.kill()
    training.wait(60)
    training.stdout.close()
    assert status() == "running"  # its last sign of life is a moment old
    assert status(ahead=120) == "killed"
    assert command("rm", "victim", "--yes", ahead=120).returncode == 0
    assert not (tmp_path / "p" / "victim").exists()


def test_an_attempt_that_began_without_the_earlier_journals_is_still_the_newest(tmp_path):
    aside = tmp_path / "aside"
    aside.mkdir()
    for begin, stop, value in ((0, 60, 1.0), (30, 80, 2.0), (25, 100, 3.0)):
        run = fanfold.init("p", id="r", dir=tmp_path / "runs", resume="allow", system=False, quiet=True)
        for step in range(begin, stop):
            run.log({"x": value}, step=step)
        run.finish()
        if value == 2.0:  # a forwarder that prunes deletes what its gateway has
            for file in (run.path / "journal").glob("*.ffj"):
                file.rename(aside / file.name)
    for file in aside.iterdir():
        file.rename(run.path / "journal" / file.name)
    stored = fanfold.open("p/r", dir=tmp_path / "runs")
    assert [attempt.order[0] for attempt in stored.attempts] == [1, 2, 1]
    series = stored.series("x")
    assert series.steps.tolist() == list(range(100))
    assert series.values.tolist() == [1.0] * 25 + [3.0] * 75
