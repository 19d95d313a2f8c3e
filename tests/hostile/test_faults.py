"""What goes wrong in real jobs, done to real processes; every test counts exactly what was logged and what is there.

The long forms (`make faults`) repeat the same tests with more kills, more calls and more time.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanfold
import fault_table
from fanfold.journal import Kind
from fanfold.journal.directory import journal_files
from fanfold.journal.spool import Spool, recover
from fanfold.store.run import StoredRun

START = """
import fanfold, os, signal, sys, threading, time
run = fanfold.init("p", id="r", system=False)
"""


def child(script: str, *, start: str = START, **options: Any) -> subprocess.Popen[str]:
    """Start a Python process that runs `script` after opening run r of project p."""
    code = start + textwrap.dedent(script)
    options.setdefault("cwd", tempfile.gettempdir())  # no repository there whose changes would be kept with the run
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the process hung:\n{out}\n{err}")
    return process.returncode, out, err


def run_child(script: str, *, timeout: float = 60, **options: Any) -> str:
    """Run a process to its end; return what it printed."""
    code, out, err = finish(child(script, **options), timeout)
    assert code == 0, err
    assert "Traceback" not in err, err
    return out


def stored(runs_dir: Path) -> StoredRun:
    return fanfold.open(runs_dir / "p" / "r")


def assert_series(run: StoredRun, key: str, count: int) -> None:
    """Every step from 0 on exactly once, with the value that was logged for it: half the step."""
    series = run.series(key)
    assert np.array_equal(series.steps, np.arange(count))
    assert np.array_equal(series.values, np.arange(count) / 2)


# kill -9


ACKNOWLEDGE = """
import mmap, struct
with open({path!r}, "r+b") as file:
    shared = mmap.mmap(file.fileno(), 8)
run = fanfold.init("p", id="r", system=False, durability={durability!r})
for step in range(10**9):
    new = {{f"new{{step}}": 1.0}} if step % 97 == 0 else {{}}
    run.log({{"loss": step / 2, "step": step, "odd": step % 2 == 1, **new}}, step=step)
    shared[:] = struct.pack("<Q", step + 1)
    {pause}
"""


def kill_while_logging(runs_dir: Path, tmp_path: Path, *, kills: int, durability: str, pause: str, longest: float) -> None:
    luck = random.Random(f"{durability}{pause}{kills}")
    acknowledged_file = tmp_path / "acknowledged"
    for _ in range(kills):
        acknowledged_file.write_bytes(bytes(8))
        script = ACKNOWLEDGE.format(path=str(acknowledged_file), durability=durability, pause=pause)
        process = child(script, start="import fanfold, time\n")
        with acknowledged_file.open("rb") as file, mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ) as shared:
            deadline = time.monotonic() + 30
            while not any(shared[:]) and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(luck.uniform(0, longest))
            process.kill()
            code, _, err = finish(process)
            (acknowledged,) = struct.unpack("<Q", shared[:])
        assert (code, acknowledged > 0) == (-signal.SIGKILL, True), err
        run = stored(runs_dir)
        steps = run.series("loss").steps
        count = len(steps)
        pace = "full speed" if pause == FULL_SPEED else "20 calls a second"
        fault_table.record(
            f"`kill -9` while logging at {pace}, durability {durability}",
            points=acknowledged, lost=max(0, acknowledged - len(set(steps))), doubled=count - len(set(steps)),
        )  # fmt: skip
        assert acknowledged <= count <= acknowledged + 1  # the one under way may have been written
        assert_series(run, "loss", count)
        assert np.array_equal(run.series("step").values, np.arange(count))
        assert np.array_equal(run.series("odd").values, np.arange(count) % 2 == 1)
        assert (run.status, run.damaged, run.dropped) == ("killed", 0, 0)
        shutil.rmtree(runs_dir)


FULL_SPEED, TWENTY_HERTZ = "pass", "time.sleep(0.05)"


@pytest.mark.parametrize(("kills", "durability"), [(4, "process"), (2, "power")])
def test_nothing_acknowledged_is_missing_after_kill_9_at_full_speed(runs_dir, tmp_path, kills, durability):
    kill_while_logging(runs_dir, tmp_path, kills=kills, durability=durability, pause=FULL_SPEED, longest=0.4)


def test_nothing_acknowledged_is_missing_after_kill_9_at_20_hertz(runs_dir, tmp_path):
    kill_while_logging(runs_dir, tmp_path, kills=2, durability="process", pause=TWENTY_HERTZ, longest=0.6)


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("pause", [FULL_SPEED, TWENTY_HERTZ])
def test_nothing_acknowledged_is_missing_after_twenty_kills(runs_dir, tmp_path, durability, pause):
    kill_while_logging(runs_dir, tmp_path, kills=20, durability=durability, pause=pause, longest=3.0)


def test_power_durability_waits_for_the_disk_with_each_write(runs_dir):
    out = run_child(
        """
        flags = open(f"/proc/self/fdinfo/{run._writer.sheet.fd}").read().split("flags:")[1].split()[0]
        print(bool(int(flags, 8) & os.O_DSYNC))
        run.finish()
        """,
        start=START.replace("system=False", "system=False, durability='power'"),
    )
    assert out.split() == ["True"]


# Full disks


COUNT_WARNINGS = """
import logging
said = []
class Keep(logging.Handler):
    def emit(self, record): said.append(record.getMessage())
logging.getLogger("fanfold").addHandler(Keep())
"""


@contextlib.contextmanager
def small_disk(kilobytes: int) -> Iterator[Path]:
    """A filesystem of its own that is easily filled."""
    folder = Path(tempfile.mkdtemp(prefix="fanfold-small-"))
    options = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(folder)]
    if os.getuid() != 0 or subprocess.run(options, capture_output=True, check=False).returncode:
        folder.rmdir()
        pytest.skip("mounting a small filesystem needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


def test_a_full_disk_costs_what_is_said_and_logging_goes_on_when_space_returns(monkeypatch):
    with small_disk(1024) as folder:
        monkeypatch.setenv("FANFOLD_DIR", str(folder / "runs"))
        (folder / "filler").write_bytes(bytes(600_000))
        out = run_child(
            COUNT_WARNINGS
            + textwrap.dedent("""
            import json, pathlib
            from fanfold.journal import writer
            writer.RETRY_SECONDS = 0.01
            calls = 0
            def log(count):
                global calls
                for _ in range(count):
                    run.log({"loss": calls / 2}, step=calls)
                    calls += 1
            log(20_000)
            dropped_when_full = run._writer.dropped
            pathlib.Path(run.path.parent.parent.parent, "filler").unlink()
            time.sleep(0.02)
            log(3_000)
            dropped_after = run._writer.dropped
            run.finish()
            print(json.dumps([calls, dropped_when_full, dropped_after, said]))
            """)
        )
        calls, when_full, after, said = json.loads(out)
        run = fanfold.open(folder / "runs" / "p" / "r")
        series = run.series("loss")
        assert when_full > 1000
        assert when_full == after  # nothing is dropped once there is space
        assert run.dropped == after
        assert len(series) + run.dropped == calls == 23_000
        assert np.array_equal(series.values, series.steps / 2)
        assert len(set(series.steps.tolist())) == len(series)
        assert set(range(20_000, 23_000)) <= set(series.steps.tolist())
        assert (run.status, [text for text in said if "dropped and counted" not in text]) == ("finished", [])
        assert len(said) == 1


def test_a_disk_full_at_init_is_a_clear_error(monkeypatch):
    with small_disk(16) as folder:
        monkeypatch.setenv("FANFOLD_DIR", str(folder / "runs"))
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(1024)):
                pass
        with pytest.raises(fanfold.RunError, match=r"No space left on device\. The run was not started\. .* FANFOLD_DIR"):
            fanfold.init("p", id="r", system=False)
        assert list((folder / "runs").rglob("*.ffj*")) == []


def test_a_file_size_limit_only_makes_more_journals(runs_dir):
    out = run_child(
        COUNT_WARNINGS
        + textwrap.dedent("""
        import json, resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, 65_536))
        for step in range(8_000):
            run.log({"loss": step / 2}, step=step)
        run.finish()
        print(json.dumps([run._writer.dropped, said]))
        """)
    )
    dropped, said = json.loads(out)
    run = stored(runs_dir)
    assert_series(run, "loss", 8_000)
    assert (run.status, run.dropped, dropped, len(said)) == ("finished", 0, 0, 1)
    assert len(run.journals) > 4
    assert max(journal.path.stat().st_size for journal in run.journals) == 65_536


def test_what_fits_in_no_file_is_dropped_and_counted(runs_dir):
    out = run_child(
        """
        import resource
        from fanfold.journal import writer
        writer.RETRY_SECONDS = 0.0
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        for step in range(100):
            run.log({"loss": step / 2}, step=step)
        for _ in range(3):
            run.log({f"key/{number}": 1.0 for number in range(5_000)})
            run.log({"text": "x" * 50_000})
        for step in range(100, 200):
            run.log({"loss": step / 2}, step=step)
        run.finish()
        print(run._writer.dropped)
        """
    )
    run = stored(runs_dir)
    assert_series(run, "loss", 200)
    assert (int(out), run.dropped, run.status) == (6, 6, "finished")
    assert run.keys() == ["loss"]


def test_heartbeats_and_facts_are_not_counted_as_log_calls(monkeypatch):
    with small_disk(64) as folder:
        monkeypatch.setenv("FANFOLD_DIR", str(folder / "runs"))
        out = run_child(
            """
            run._ending.stoppers.clear()
            time.sleep(0.5)
            run.log({"loss": 0.0}, step=0)  # the page that holds it may be full: the next call can be the first that fails
            with open(run.path / "filler", "wb", buffering=0) as filler:
                try:
                    while filler.write(bytes(512)): pass
                except OSError: pass
            calls = 1
            while not run._writer.dropped:
                run.log({"loss": calls / 2}, step=calls)
                calls += 1
            for _ in range(5):
                run._ending.beat()
                run.alert("x")
            print(calls, run._writer.dropped)
            os._exit(0)
            """
        )
        calls, dropped = map(int, out.split())
        assert dropped == 1
        assert_series(fanfold.open(folder / "runs" / "p" / "r"), "loss", calls - 1)


# Directories that go away


@pytest.mark.parametrize("what", ["run.path.parent.parent", "run.path", "run.path / 'journal'"])
def test_a_deleted_directory_comes_back_with_everything(runs_dir, what):
    run_child(
        f"""
        import shutil
        for step in range(1000):
            run.log({{"loss": step / 2}}, step=step)
        shutil.rmtree({what})
        for step in range(1000, 2000):
            run.log({{"loss": step / 2}}, step=step)
        run.finish()
        """
    )
    run = stored(runs_dir)
    assert_series(run, "loss", 2000)
    assert (run.status, run.dropped, run.damaged) == ("finished", 0, 0)


def test_a_directory_deleted_again_and_again_comes_back_with_everything(runs_dir):
    run_child(
        """
        import shutil
        for turn in range(4):
            for step in range(1000 * turn, 1000 * turn + 1000):
                run.log({"loss": step / 2}, step=step)
            shutil.rmtree(run.path, ignore_errors=True)
            if turn != 2: run.flush()  # restores it at once; after turn 2 there may be nothing to delete
        run.finish()
        assert not [name for name in os.listdir("/proc/self/fd") if ".ffj" in os.path.realpath(f"/proc/self/fd/{name}")]
        """
    )
    run = stored(runs_dir)
    assert_series(run, "loss", 4000)
    assert (run.status, run.dropped, run.damaged) == ("finished", 0, 0)


def delete_while_threads_log(runs_dir: Path, after: float) -> None:
    out = run_child(
        COUNT_WARNINGS
        + textwrap.dedent("""
        import shutil
        def log(thread):
            for step in range(thread, 40_000, 4):
                run.log({"loss": step / 2}, step=step)
        threads = [threading.Thread(target=log, args=(number,)) for number in range(4)]
        for thread in threads: thread.start()
        time.sleep(AFTER)
        shutil.rmtree(run.path)
        run.flush()
        for thread in threads: thread.join()
        run.finish()
        print(len(said), run._writer.dropped)
        """).replace("AFTER", str(after))
    )
    run = stored(runs_dir)
    steps = run.series("loss").steps.tolist()
    unique = len(set(steps))
    fault_table.record(
        "the run's directory deleted while four threads log", points=40_000, lost=40_000 - unique, doubled=len(steps) - unique
    )
    assert_series(run, "loss", 40_000)
    assert (run.status, run.dropped, out.split()) == ("finished", 0, ["1", "0"])


def test_a_directory_deleted_while_threads_log_loses_nothing(runs_dir):
    delete_while_threads_log(runs_dir, 0.05)


@pytest.mark.faults
@pytest.mark.parametrize("turn", range(12))
def test_a_directory_deleted_at_any_moment_loses_nothing(runs_dir, turn):
    delete_while_threads_log(runs_dir, turn / 100)


def test_a_directory_that_cannot_be_made_again_yet_is_made_when_it_can(runs_dir):
    run_child(
        """
        import shutil
        from fanfold.journal import writer
        writer.RETRY_SECONDS = 0.0
        for step in range(100):
            run.log({"loss": step / 2}, step=step)
        shutil.rmtree(run.path)
        run.path.write_text("in the way")
        run.flush()
        run.log({"loss": -1.0}, step=10**6)
        run.path.unlink()
        for step in range(100, 200):
            run.log({"loss": step / 2}, step=step)
        run.finish()
        """
    )
    run = stored(runs_dir)
    assert_series(run, "loss", 200)
    assert (run.dropped, run.status) == (1, "finished")


def test_a_read_only_directory_is_a_clear_error_at_init(tmp_path):
    folder = Path(tempfile.mkdtemp(prefix="fanfold-readonly-"))
    folder.chmod(0o555)
    script = f"""
    fanfold.init("warm", dir=warm, system=False, quiet=True).finish()  # what is imported lazily may be out of nobody's reach
    if os.getuid() == 0:
        os.setuid(65534)  # nobody: the modes of files do not bind root
    try:
        fanfold.init("p", dir={str(folder / "runs")!r}, system=False)
    except fanfold.RunError as error:
        print(error)
    """
    try:
        out = run_child(textwrap.dedent(script), start=f"import fanfold, os\nwarm = {str(tmp_path / 'warm')!r}\n")
    finally:
        folder.rmdir()
    assert out.startswith("no journal can be written in ")
    assert "Permission denied. The run was not started. Make the directory writable, or choose another" in out


# Forks


def test_forks_from_a_thread_while_others_log(runs_dir):
    run_child(
        """
        import multiprocessing
        context = multiprocessing.get_context("fork")
        def log(thread):
            for step in range(thread, 20_000, 4):
                run.log({"loss": step / 2}, step=step)
        def work(number):
            for step in range(100):
                run.log({f"worker{number}": step / 2}, step=step)
        def fork():
            children = [context.Process(target=work, args=(number,)) for number in range(6)]
            for process in children: process.start()
            for process in children: process.join()
            assert [process.exitcode for process in children] == [0] * 6
        threads = [threading.Thread(target=log, args=(number,)) for number in range(4)] + [threading.Thread(target=fork)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        run.finish()
        """,
        start="import warnings; warnings.simplefilter('ignore')\n" + START,
    )
    run = stored(runs_dir)
    assert_series(run, "loss", 20_000)
    for number in range(6):
        assert_series(run, f"worker{number}", 100)
    roles = [journal.header.role for journal in run.journals]
    assert (roles.count("main"), roles.count("worker"), run.status) == (1, 6, "finished")
    for journal in run.journals:
        main = journal.header.role == "main"
        assert journal.keys() == ["loss"] if main else len(journal.keys()) == 1
        assert [record.data.status for record in journal.records(Kind.END)] == ["finished"]


def test_plain_forks_that_leave_in_every_way_do_not_end_the_run(runs_dir):
    run_child(
        """
        run.log({"loss": 0.0}, step=0)
        for how in ("run.log({'child': 0.0}, step=0); os._exit(0)",
                    "run.log({'child': 0.5}, step=1); sys.exit(0)",
                    "run.log({'child': 1.0}, step=2); run.finish(); sys.exit(0)",
                    "run.log({'child': 1.5}, step=3); os.kill(os.getpid(), signal.SIGTERM)",
                    "sys.exit(0)"):
            pid = os.fork()
            if not pid:
                exec(how)
                os._exit(0)
            os.waitpid(pid, 0)
        run.log({"loss": 0.5}, step=1)
        print(fanfold.open(run.path).status)
        run.finish()
        """
    )
    run = stored(runs_dir)
    assert_series(run, "loss", 2)
    assert_series(run, "child", 4)
    assert [journal.header.role for journal in run.journals].count("worker") == 4
    assert run.status == "finished"


def test_a_forked_child_stuck_in_c_code_still_dies_by_sigterm(runs_dir):
    run_child(
        """
        import ctypes
        pid = os.fork()
        if not pid:
            mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
            libc.pthread_mutex_lock(mutex)
            print("stuck", flush=True)
            libc.pthread_mutex_lock(mutex)
        time.sleep(0.3)
        os.kill(pid, signal.SIGTERM)
        assert os.waitpid(pid, 0)[1] == signal.SIGTERM
        run.finish()
        """
    )
    assert stored(runs_dir).status == "finished"


def test_a_forked_child_sees_whether_its_parent_lives(runs_dir):
    code, out, err = finish(
        child(
            """
            parent = os.getpid()
            if not os.fork():
                print(fanfold.open(run.path).status, flush=True)
                os.kill(parent, signal.SIGKILL)
                while os.getppid() == parent: time.sleep(0.01)
                print(fanfold.open(run.path).status, flush=True)
                os._exit(0)
            time.sleep(30)
            """
        )
    )
    assert (code, out.split()) == (-9, ["running", "killed"]), err


def test_dataloader_workers_log_too(runs_dir):
    run_child(
        """
        import torch
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 64
            def __getitem__(self, index):
                fanfold.log({"seen": index / 2}, step=index)
                return index
        for epoch in range(1):
            for step, batch in enumerate(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2)):
                run.log({"loss": step / 2}, step=step)
        """,
        start="import warnings; warnings.simplefilter('ignore')\n" + START,
    )
    run = stored(runs_dir)
    assert_series(run, "loss", 16)
    assert_series(run, "seen", 64)
    roles = [journal.header.role for journal in run.journals]
    assert (roles.count("main"), roles.count("worker"), run.status) == (1, 2, "finished")


# Threads


def log_from_threads(
    runs_dir: Path, *, threads: int, calls: int, values: str, step: str = "step", timeout: float = 60
) -> StoredRun:
    run_child(
        f"""
        gate = threading.Barrier({threads})
        def log(thread):
            gate.wait()
            for step in range(thread, {threads * calls}, {threads}):
                run.log({values}, step={step})
        workers = [threading.Thread(target=log, args=(number,)) for number in range({threads})]
        sys.setswitchinterval(1e-5)
        for worker in workers: worker.start()
        for worker in workers: worker.join()
        run.finish()
        """,
        timeout=timeout,
    )
    run = stored(runs_dir)
    assert (run.status, run.damaged, run.dropped, len(run.journals)) == ("finished", 0, 0, 1)
    return run


def test_eight_threads_on_one_run_lose_nothing(runs_dir):
    assert_series(log_from_threads(runs_dir, threads=8, calls=5_000, values='{"loss": step / 2}'), "loss", 40_000)


def test_eight_threads_with_a_new_shape_in_every_call_lose_nothing(runs_dir):
    run = log_from_threads(
        runs_dir, threads=8, calls=500, values='{"loss": step / 2, f"key{step}": step, f"same{step // 8}": True}'
    )
    assert_series(run, "loss", 4_000)
    (journal,) = run.journals
    for step in range(4_000):
        assert journal.column(f"key{step}").values.tolist() == [step]
    for number in range(500):
        assert sorted(journal.column(f"same{number}").steps.tolist()) == list(range(8 * number, 8 * number + 8))


def test_more_shapes_than_are_kept_are_declared_again(runs_dir, monkeypatch):
    monkeypatch.setattr("fanfold.journal.writer.MAX_SHAPES", 10)
    with fanfold.init("p", id="r", system=False) as run:
        for step in range(300):
            run.log({"loss": step / 2, f"key{step % 25}": 1.0}, step=step)
        assert len(run._writer.sheet.shapes) <= 10
    assert_series(stored(runs_dir), "loss", 300)


def test_threads_that_leave_out_the_step_get_different_ones(runs_dir):
    run = log_from_threads(runs_dir, threads=8, calls=2_000, values='{"n": step}', step="None")
    series = run.series("n")
    assert np.array_equal(series.steps, np.arange(16_000))
    assert np.array_equal(np.sort(series.values), np.arange(16_000))


def test_a_call_interrupted_while_it_is_counted_keeps_its_number(runs_dir):
    with fanfold.init("p", id="r", system=False) as run:
        numbers = run._recorder._auto

        class Interrupted:
            def __next__(self) -> int:
                number = next(numbers)
                run._recorder._auto = numbers
                run.log({"inner": 1.0})
                return number

        run._recorder._auto = Interrupted()
        run.log({"outer": 1.0})
        run.log({"after": 1.0})
    run = stored(runs_dir)
    assert [run.series(key).steps.tolist() for key in ("outer", "inner", "after")] == [[0], [1], [2]]


def test_threads_that_log_through_a_finish_are_kept_or_counted(runs_dir):
    out = run_child(
        """
        from fanfold.errors import notices
        done = [0] * 8
        stop = False
        def log(thread):
            while not stop:
                run.log({f"t{thread}": done[thread] / 2}, step=done[thread])
                done[thread] += 1
        threads = [threading.Thread(target=log, args=(number,)) for number in range(8)]
        for thread in threads: thread.start()
        time.sleep(0.1)
        run.finish()
        time.sleep(0.02)
        stop = True
        for thread in threads: thread.join()
        print(sum(done), notices.counts["finished:r"] + run._writer.dropped)
        """
    )
    calls, refused = map(int, out.split())
    run = stored(runs_dir)
    kept = sum(len(run.series(f"t{number}")) for number in range(8))
    assert refused > 0
    assert kept + refused == calls
    for number in range(8):
        assert_series(run, f"t{number}", len(run.series(f"t{number}")))


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_eight_threads_for_a_minute_lose_nothing(runs_dir):
    run = log_from_threads(runs_dir, threads=8, calls=1_600_000, values='{"loss": step / 2}', timeout=500)
    steps = run.series("loss").steps
    kept = len(np.unique(steps))
    fault_table.record("eight threads log into one run", points=12_800_000, lost=12_800_000 - kept, doubled=len(steps) - kept)
    assert_series(run, "loss", 12_800_000)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_memory_stays_flat_over_ten_million_calls(runs_dir):
    out = run_child(
        """
        import resource
        def log(count):
            for step in range(count):
                run.log({"loss": 0.5, "lr": 1e-3, "step": step}, step=step)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before = log(100_000)
        print(log(10_000_000) - before)
        run.finish()
        """,
        timeout=500,
    )
    assert int(out) < 4_000  # kilobytes


# Signal handlers and the last moments of a process


def test_log_from_a_signal_handler_that_interrupts_log(runs_dir):
    out = run_child(
        """
        import itertools
        rings = itertools.count()  # one handler may interrupt another, and counting must not
        def ring(number, frame):
            inside = next(rings)
            run.log({"ring": inside / 2, **({f"shape{inside}": 1} if inside % 7 == 0 else {})}, step=inside)
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        until, step = time.monotonic() + 2.0, 0
        while time.monotonic() < until:
            run.log({"loss": step / 2, **({f"new{step}": 1} if step % 50 == 0 else {})}, step=step)
            step += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        run.finish()
        print(step, next(rings))
        """
    )
    steps, rings = map(int, out.split())
    run = stored(runs_dir)
    assert rings > 300
    assert_series(run, "loss", steps)
    assert_series(run, "ring", rings)
    assert (run.damaged, run.dropped, run.status) == (0, 0, "finished")


def test_media_and_warnings_from_a_signal_handler_do_not_deadlock(runs_dir):
    out = run_child(
        """
        import itertools
        rings = itertools.count(1)
        def ring(number, frame):
            inside = next(rings)
            run.log({"text": "x" * 70_000, "odd": object(), f"odd{inside}": object()}, step=inside)
        import fanfold.media
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        until, step = time.monotonic() + 1.0, 0
        while time.monotonic() < until:
            step += 1
            run.log({"page": "y" * 70_000, "odd": object(), f"strange{step}": object()}, step=step)
        signal.setitimer(signal.ITIMER_REAL, 0)
        run.finish()
        print(step, next(rings) - 1)
        """,
        start="import logging; logging.disable()\n" + START,
    )
    steps, rings = map(int, out.split())
    run = stored(runs_dir)
    assert rings > 20
    assert (len(run.media("page")), len(run.media("text")), run.status) == (steps, rings, "finished")


def test_what_is_logged_while_the_process_leaves_is_kept(runs_dir):
    run_child(
        """
        import atexit
        def late():
            time.sleep(0.2)
            run.log({"loss": 0.5}, step=1)
        class Last:
            def __init__(self): self.run = run
            def __del__(self): self.run.log({"loss": 2.0}, step=4)
        last = Last()
        atexit.register(lambda: run.log({"loss": 1.0}, step=2))
        threading.Thread(target=late).start()
        run.log({"loss": 0.0}, step=0)
        """,
        start="import atexit\natexit.register(lambda: run.log({'loss': 1.5}, step=3))\n" + START,
    )
    run = stored(runs_dir)
    assert_series(run, "loss", 5)
    assert run.status == "finished"


ENDS = {
    "falls off its end": ("pass", 0, "finished", None),
    "sys.exit(0)": ("sys.exit(0)", 0, "finished", None),
    "sys.exit()": ("sys.exit()", 0, "finished", None),
    "sys.exit(3)": ("sys.exit(3)", 3, "failed", r"the process left by sys.exit(3)"),
    "sys.exit(text)": ("sys.exit('no data')", 1, "failed", "sys.exit"),
    "an exception": ("1 / 0", 1, "failed", "ZeroDivisionError: division by zero"),
    "an exception in a thread": ("threading.Thread(target=lambda: 1 / 0).start()", 0, "finished", None),
    "an exception inside `with`": ("with run: 1 / 0", 1, "failed", "ZeroDivisionError: division by zero"),
    "os._exit": ("os._exit(0)", 0, "killed", None),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -9, "killed", None),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", -15, "preempted", None),
    "SIGUSR1": ("os.kill(os.getpid(), signal.SIGUSR1); time.sleep(30)", -10, "preempted", None),
    "SIGHUP": ("os.kill(os.getpid(), signal.SIGHUP); time.sleep(30)", -1, "killed", None),
    # A process started in the background of a script ignores SIGINT, and so do its children: here it has the usual handler.
    "SIGINT": (
        "signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT); time.sleep(30)",
        -2,
        "killed",
        "KeyboardInterrupt",
    ),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV); time.sleep(30)", -11, "killed", None),
    "finish(status)": ("run.finish(status='preempted')", 0, "preempted", None),
    "finish(exit_code)": ("run.finish(exit_code=2)", 0, "failed", None),
}


@pytest.mark.parametrize("how", ENDS)
def test_how_a_process_ends_is_told_and_its_exit_code_is_its_own(runs_dir, how):
    script, code, status, error = ENDS[how]
    process = child("run.log({'loss': 0.0}, step=0)\n" + script)
    returned, _, err = finish(process)
    assert returned == code, err
    run = stored(runs_dir)
    assert_series(run, "loss", 1)
    assert run.status == status
    assert (error in run.error) if error else run.error is None
    assert run.verdict["signal"] == (how if how in ("SIGTERM", "SIGUSR1", "SIGHUP") else None)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_that_the_process_ignores_does_not_end_the_run(runs_dir, name):
    before = signal.signal(getattr(signal, name), signal.SIG_IGN)  # inherited by the child, as under nohup
    try:
        process = child(f"os.kill(os.getpid(), signal.{name})\nrun.log({{'loss': 0.0}}, step=0)")
    finally:
        signal.signal(getattr(signal, name), before)
    code, _, err = finish(process)
    assert code == 0, err
    run = stored(runs_dir)
    assert_series(run, "loss", 1)
    assert (run.status, run.verdict["signal"]) == ("finished", None)


def test_a_run_that_a_daemon_thread_is_finishing_at_exit_is_finished(runs_dir):
    script = """
        def trial():
            with run: run.log({"loss": 0.0}, step=0)
        threading.Thread(target=trial, daemon=True).start()
        while run.status == "running": time.sleep(0.0001)
    """
    run_child(script)
    run = stored(runs_dir)
    assert_series(run, "loss", 1)
    assert run.status == "finished"


def test_a_finish_that_was_interrupted_is_completed_at_exit(runs_dir):
    script = """
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        run.log({"loss": 0.0}, step=0)
        run._ending.stoppers.insert(0, lambda timeout: signal.setitimer(signal.ITIMER_REAL, 0.001) or time.sleep(1))
        try: run.finish(status="preempted")
        except KeyboardInterrupt: print("interrupted")
        run._ending.stoppers.pop(0)
    """
    assert run_child(script) == "interrupted\n"
    assert stored(runs_dir).status == "preempted"


def test_a_run_is_running_while_its_process_lives_and_killed_once_it_does_not(runs_dir):
    process = child("print('ready', flush=True)\nsys.stdin.read()", stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    run = stored(runs_dir)
    assert run.status == "running"
    assert stored(runs_dir).status == "running"  # to have looked does not take the lock away
    process.kill()
    finish(process)
    assert run.refresh().status == "killed"


def test_to_look_at_a_run_from_its_own_process_keeps_it_running(runs_dir):
    process = child(
        """
        assert fanfold.open(run.path).status == "running"
        assert run.summary == {}
        print("ready", flush=True)
        sys.stdin.read()
        """,
        stdin=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert stored(runs_dir).status == "running"
    process.kill()
    finish(process)


def test_a_users_own_handler_is_left_alone(runs_dir):
    out = run_child(
        """
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is mine
        run.log({"loss": 0.0}, step=0)
        run.finish()
        print(caught)
        """,
        start="import signal\ncaught = []\nmine = lambda number, frame: caught.append(number)\n"
        "signal.signal(signal.SIGTERM, mine)\n" + START,
    )
    assert out.split() == ["[15]"]
    assert stored(runs_dir).status == "finished"


def test_a_users_handler_set_after_init_stands_after_finish(runs_dir):
    out = run_child(
        """
        caught = []
        signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
        os.kill(os.getpid(), signal.SIGTERM)
        run.finish()
        os.kill(os.getpid(), signal.SIGTERM)
        print(caught)
        """
    )
    assert out.split() == ["[15,", "15]"]
    assert stored(runs_dir).status == "finished"


def test_everything_is_put_back_at_finish(runs_dir):
    run_child(
        """
        run.finish()
        for _ in range(20):
            fanfold.init("p", system=False).finish()
        assert [signal.getsignal(number) for number in numbers] == before
        assert signal.set_wakeup_fd(-1) == -1
        assert sys.exit is real_exit
        for thread in threading.enumerate()[1:]: thread.join(1.0)
        assert {thread.name for thread in threading.enumerate()} == {"MainThread"}, threading.enumerate()
        from fanfold.journal import writer
        while writer._retired: os.close(writer._retired.popleft()[1])
        assert sorted(os.listdir("/proc/self/fd")) == descriptors, os.listdir("/proc/self/fd")
        """,
        start="import os, signal, sys\nimport fanfold.recording.run, fanfold.facts.collect\n"
        "numbers = [n for n in signal.valid_signals() if n < 32]\nbefore = [signal.getsignal(number) for number in numbers]\n"
        "real_exit = sys.exit\ndescriptors = sorted(os.listdir('/proc/self/fd'))\n" + START,
    )


STUCK = """
import ctypes
mutex = ctypes.create_string_buffer(64)
libc = ctypes.{loader}(None)
libc.pthread_mutex_lock(mutex)
run.log({{"loss": 0.0}}, step=0)
print("stuck", flush=True)
{stuck}
"""


@pytest.mark.parametrize(
    ("loader", "stuck"),
    [
        ("CDLL", "libc.pthread_mutex_lock(mutex)"),  # waits for ever, without the GIL, and no signal wakes it: a hung collective
        ("CDLL", "libc.pause()"),
        ("PyDLL", "libc.sleep(30)"),  # holds the GIL; the signal ends the sleep
    ],
)
def test_a_main_thread_inside_c_code_dies_by_sigterm_as_it_would_without_us(runs_dir, loader, stuck):
    process = child(STUCK.format(loader=loader, stuck=stuck))
    assert process.stdout is not None
    assert process.stdout.readline() == "stuck\n"
    sent = time.monotonic()
    process.terminate()
    code, _, err = finish(process, timeout=20)
    assert code == -signal.SIGTERM, err
    assert time.monotonic() - sent < 4
    run = stored(runs_dir)
    assert (run.status, run.verdict["signal"]) == ("preempted", "SIGTERM")
    assert_series(run, "loss", 1)


# Clocks


def test_a_clock_set_back_does_not_disturb_the_order_of_steps(runs_dir):
    run_child(
        """
        import fanfold.recording.recorder, itertools
        real, ticks = time.time_ns, itertools.count()
        fanfold.recording.recorder.time_ns = lambda: real() - (3600 * 10**9 if next(ticks) > 500 else 0)
        for step in range(1000):
            run.log({"loss": step / 2}, step=step)
        run.finish()
        """
    )
    run = stored(runs_dir)
    assert_series(run, "loss", 1000)
    assert run.series("loss").times.min() < run.series("loss").times[0] - 3000
    assert run.latest["loss"] == 999 / 2


def test_journals_of_one_process_follow_each_other_whatever_the_clock_says(runs_dir):
    script = """
    from fanfold.journal import writer
    real = time.time_ns
    class Clock:
        def __getattr__(self, name): return getattr(time, name)
    writer.time = clock = Clock()
    for number in range(6):
        for step in range(10):
            run.log({"loss": float(number * 10 + step)}, step=5)
        clock.time_ns = lambda: real() - number * 3600 * 10**9
        run._writer.fail(run._writer.sheet, OSError("a disk error"))
    print("ready", flush=True)
    sys.stdin.read()
    """
    process = child(script, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    run = stored(runs_dir)
    assert run.series("loss").values.tolist() == [float(number) for number in range(60)]
    assert run.latest["loss"] == 59.0
    process.kill()
    finish(process)


def test_attempts_are_ordered_by_their_number_and_not_by_clocks(runs_dir):
    for attempt in range(3):
        script = f"""
        for step in range({attempt * 10}, 20 + {attempt * 10}):
            run.log({{"loss": step + {attempt} * 1000.0}}, step=step)
        os._exit(0)
        """
        clock = f"import time\nreal = time.time_ns\ntime.time_ns = lambda: real() - {attempt} * 3600 * 10**9\n"
        run_child(script, start=clock + START)
    run = stored(runs_dir)
    assert [attempt.order[0] for attempt in run.attempts] == [1, 2, 3]
    assert run.series("loss").steps.tolist() == list(range(40))
    assert run.series("loss").values.tolist() == [step + (min(step // 10, 2)) * 1000.0 for step in range(40)]
    assert len(run.series("loss", raw=True)) == 60


def test_a_damaged_header_does_not_hide_a_ranks_points(runs_dir):
    run_child("for step in range(50): run.log({'loss': step / 2}, step=step)\nrun.finish()")
    (path,) = journal_files(runs_dir / "p" / "r")
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    run = stored(runs_dir)
    assert_series(run, "loss", 50)
    assert (run.status, run.damaged > 0) == ("finished", True)


# Keys and values


def test_ten_thousand_keys_in_one_call(runs_dir):
    values = {f"group{number % 100}/key{number}": number / 2 for number in range(10_000)}
    with fanfold.init("p", id="r", system=False) as run:
        for step in range(3):
            run.log(values, step=step)
    (journal,) = stored(runs_dir).journals
    assert journal.keys() == list(values)
    for key, value in values.items():
        assert journal.column(key).values.tolist() == [value] * 3


def test_ten_thousand_keys_over_ten_thousand_calls(runs_dir):
    with fanfold.init("p", id="r", system=False) as run:
        for number in range(10_000):
            run.log({f"key{number}": number / 2, "loss": number / 2}, step=number)
    run = stored(runs_dir)
    assert_series(run, "loss", 10_000)
    assert len(run.keys()) == 10_001
    assert all(run.latest[f"key{number}"] == number / 2 for number in range(10_000))


KEYS = ["", " ", "/", "a/b", "\0", "ключ", "🔥", "a\nb", "x" * 100_000, "\u202eright", "e\u0301", "é", "%", "\x7f"]


def test_any_text_is_a_key(runs_dir):
    with fanfold.init("p", id="r", system=False) as run:
        for step in range(2):
            run.log({key: number / 2 for number, key in enumerate(KEYS)}, step=step)
            run.log({"half \ud800": 1.0, "\udfff": 2.0, "text \ud800": "value \ud800"}, step=step)
    run = stored(runs_dir)
    for number, key in enumerate(KEYS):
        assert run.series(key).values.tolist() == [number / 2] * 2
    assert run.series("half \\ud800").values.tolist() == [1.0, 1.0]
    assert run.series("\\udfff").values.tolist() == [2.0, 2.0]
    assert [point.text for point in run.texts("text \\ud800")] == ["value \\ud800"] * 2


NUMBERS = {
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "-0.0": -0.0,
    "subnormal": 5e-324,
    "largest": sys.float_info.max,
    "int64 min": -(1 << 63),
    "int64 max": (1 << 63) - 1,
    "true": True,
    "false": False,
    "third": 1 / 3,
}


def test_every_number_comes_back_bit_for_bit(runs_dir):
    with fanfold.init("p", id="r", system=False, strict=True) as run:
        for step in range(3):
            run.log(NUMBERS, step=step)
    run = stored(runs_dir)
    for key, value in NUMBERS.items():
        for found in run.series(key).values.tolist():
            assert type(found) is type(value)
            assert struct.pack("<d", found) == struct.pack("<d", value)
            assert found == value or value != value


def test_numbers_that_are_no_floats_are_taken_as_near_as_can_be(runs_dir):
    huge = Fraction(10**400)
    with fanfold.init("p", id="r", system=False) as run:
        for value in (Fraction(1, 2), huge, -huge, Fraction(3, 4)):
            run.log({"fraction": value})
        for value in (Decimal("0.5"), Decimal("sNaN"), Decimal("1e999")):
            run.log({"decimal": value})
    run = stored(runs_dir)
    assert run.series("fraction").values.tolist() == [0.5, float("inf"), float("-inf"), 0.75]
    assert str(run.series("decimal").values.tolist()) == "[0.5, nan, inf]"


def test_an_integer_beyond_64_bits_is_kept_as_a_float(runs_dir):
    with fanfold.init("p", id="r", system=False) as run:
        for value in (1, 1 << 70, -(1 << 70), 10**400, 2):
            run.log({"big": value})
    assert stored(runs_dir).series("big").values.tolist() == [1.0, float(1 << 70), -float(1 << 70), float("inf"), 2.0]


NUMPY = "float16 float32 float64 longdouble int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()


def test_numpy_scalars_of_every_type_are_exact(runs_dir):
    values = {name: np.dtype(name).type(1) for name in NUMPY}
    values |= {f"{name}/third": np.dtype(name).type(1) / np.dtype(name).type(3) for name in NUMPY[:3]}
    values |= {f"{name}/max": np.iinfo(name).max for name in NUMPY[4:11]} | {"0d": np.array(2.5), "one": np.array([7])}
    with fanfold.init("p", id="r", system=False, strict=True) as run:
        for step in range(3):
            run.log(values, step=step)
        run.log({"uint64/max": np.uint64((1 << 64) - 1)})
    run = stored(runs_dir)
    for key, value in values.items():
        found = run.series(key).values
        assert found.tolist() == [value.item() if key != "longdouble" else 1.0] * 3 if hasattr(value, "item") else [value] * 3
    assert run.series("uint64/max").values.tolist() == [float((1 << 64) - 1)]


def test_torch_scalars_of_every_type_are_exact(runs_dir):
    import torch

    floats = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
    whole = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"]
    values = {name: torch.tensor(1.25).to(getattr(torch, name)) for name in floats}
    values |= {name: torch.tensor(1).to(getattr(torch, name)) for name in whole}
    values["parameter"] = torch.nn.Parameter(torch.tensor(0.5))
    with fanfold.init("p", id="r", system=False, strict=True) as run:
        for step in range(2):
            run.log(values, step=step)
    run = stored(runs_dir)
    for name, value in values.items():
        assert run.series(name).values.tolist() == [value.item()] * 2
        assert type(run.series(name).values[0].item()) is type(value.item())


@pytest.mark.parametrize("step", [float("inf"), float("nan"), 1 << 70, -(1 << 70), "three", None, 2.5, [1], (1 << 63) - 1])
def test_no_step_stops_training(runs_dir, step):
    with fanfold.init("p", id="r", system=False) as run:
        run.log({"loss": 0.0})
        for number in range(1, 4):
            run.log({"loss": number / 2}, step=step)
        run.log({"loss": 2.0})
    series = stored(runs_dir).series("loss", raw=True)
    assert sorted(series.values.tolist()) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert series.steps[0] == 0


def test_a_call_of_more_text_than_a_frame_holds_does_not_stop_training(runs_dir):
    with fanfold.init("p", id="r", system=False) as run:
        run.log({f"text{number}": "x" * 65_000 for number in range(1100)}, step=0)
        run.log({"loss": 0.0}, step=0)
    run = stored(runs_dir)
    assert_series(run, "loss", 1)
    assert run.keys("text") == [f"text{number}" for number in range(1100)]
    assert (run.dropped, len(run.texts("text1099")[0].text)) == (0, 65_000)


# Network filesystems: the spool


SPOOLED = "os.environ['FANFOLD_SPOOL'] = 'always'\n"


@pytest.fixture
def spool_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FANFOLD_SPOOL", "always")
    monkeypatch.setenv("FANFOLD_SPOOL_DIR", str(tmp_path / "spool"))
    return tmp_path / "spool"


def test_a_spooled_journal_is_mirrored_byte_for_byte(runs_dir, spool_dir):
    out = run_child(
        """
        for step in range(500):
            run.log({"loss": step / 2}, step=step)
        run.flush()
        here = run._writer.sheet.path
        there = run.path / "journal" / here.name
        print(here)
        mirrored = there.read_bytes()  # what other threads write meanwhile comes later
        assert here.read_bytes().startswith(mirrored) and len(mirrored) > 10_000
        assert fanfold.open(run.path).status == "running"
        for step in range(500, 700):
            run.log({"loss": step / 2}, step=step)
        run.finish()
        """
    )
    assert out.startswith(str(spool_dir))
    run = stored(runs_dir)
    assert_series(run, "loss", 700)
    assert run.status == "finished"
    assert list(spool_dir.iterdir()) == []


def test_a_spool_left_by_kill_9_is_brought_home(runs_dir, spool_dir):
    process = child(
        """
        for step in range(500):
            run.log({"loss": step / 2}, step=step)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert finish(process)[0] == -9
    assert recover(spool_dir, runs=runs_dir) == 1
    run = stored(runs_dir)
    assert_series(run, "loss", 500)
    assert run.status == "killed"
    assert (recover(spool_dir, runs=runs_dir), list(spool_dir.iterdir())) == (0, [])


def test_a_mirror_that_overtakes_another_writes_nothing_twice(tmp_path, monkeypatch):
    spool = Spool(tmp_path / "spool", tmp_path / "home")
    source = spool.directory / "0-00f0e1d2c3b4a596.ffj"
    source.write_bytes(random.Random(1).randbytes(3_000_000))
    real, overtaken = os.pread, []

    def pread(*where: int) -> bytes:
        chunk = real(*where)
        if not overtaken:
            overtaken.append(True)
            spool.mirror()
        return chunk

    monkeypatch.setattr(os, "pread", pread)
    spool.mirror()
    assert (spool.target / source.name).read_bytes() == source.read_bytes()


def test_several_processes_that_bring_a_spool_home_at_once_bring_it_once(runs_dir, spool_dir):
    process = child(
        """
        for step in range(50_000):
            run.log({"loss": step / 2}, step=step)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert finish(process)[0] == -9
    gate = time.time() + 1.0
    start = f"import sys, time, pathlib\nfrom fanfold.journal import spool\ntime.sleep(max(0, {gate} - time.time()))\n"
    helpers = [
        child(f"spool.recover(pathlib.Path({str(spool_dir)!r}), runs=pathlib.Path({str(runs_dir)!r}))", start=start)
        for _ in range(4)
    ]
    assert [finish(helper)[0] for helper in helpers] == [0] * 4
    run = stored(runs_dir)
    assert_series(run, "loss", 50_000)
    assert run.damaged == 0


def test_a_living_spool_is_not_taken_away(runs_dir, spool_dir):
    process = child(
        "run.log({'loss': 0.0}, step=0)\nprint('ready', flush=True)\nsys.stdin.read()\nrun.finish()", stdin=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert recover(spool_dir, runs=runs_dir) == 0
    assert finish(process)[0] == 0
    assert_series(stored(runs_dir), "loss", 1)


def test_a_worker_that_outlives_the_run_keeps_its_spooled_points(runs_dir, spool_dir):
    run_child(
        """
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            run.log({"child": 0.0}, step=0)
            os.read(read, 1)
            run.log({"child": 0.5}, step=1)
            os._exit(0)
        while not list(run._writer.directory.glob("*.ffj"))[1:]: time.sleep(0.01)
        run.log({"loss": 0.0}, step=0)
        run.finish()
        os.write(write, b"x")
        os.waitpid(pid, 0)
        """
    )
    recover(spool_dir, runs=runs_dir)
    run = stored(runs_dir)
    assert_series(run, "loss", 1)
    assert_series(run, "child", 2)
    assert list(spool_dir.iterdir()) == []


def test_a_home_that_is_away_for_a_while_costs_nothing(runs_dir, spool_dir):
    run_child(
        """
        import pathlib, shutil
        run.log({"loss": 0.0}, step=0)
        run.flush()
        shutil.rmtree(run.path)
        run.path.write_text("in the way")
        run.log({"loss": 0.5}, step=1)
        run.flush()
        run.path.unlink()
        run.log({"loss": 1.0}, step=2)
        run.finish()
        """
    )
    run = stored(runs_dir)
    assert_series(run, "loss", 3)
    assert run.status == "finished"


@pytest.mark.parametrize("squat", ["file", "open folder", "link", "dangling link", "fifo"])
def test_a_taken_default_spool_does_not_stop_the_run(runs_dir, tmp_path, monkeypatch, squat):
    temporary = tmp_path / "temporary"
    (temporary / "theirs").mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("FANFOLD_SPOOL", "always")
    root = temporary / f"fanfold-spool-{os.getuid()}"
    if squat == "open folder":
        root.mkdir()
        root.chmod(0o777)
    elif squat.endswith("link"):
        root.symlink_to(temporary / ("theirs" if squat == "link" else "nowhere"))
    else:
        os.mkfifo(root) if squat == "fifo" else root.touch()
    code = """
        for step in range(100):
            run.log({"loss": step / 2}, step=step)
        print(run._writer.sheet.path)
    """
    process = child(textwrap.dedent(code) + "sys.stdout.flush()\nos.kill(os.getpid(), signal.SIGKILL)\n")
    out, err = process.communicate(timeout=60)
    assert process.returncode == -9, err
    (spare,) = temporary.glob(f"{root.name}-*")
    assert Path(out.strip()).is_relative_to(spare) and spare.stat().st_mode & 0o777 == 0o700
    assert err.count("is not a folder that only you can write to") == 1
    run_child(textwrap.dedent(code) + "run.finish()")  # finds the same folder, and brings home what the killed process left in it
    assert list(temporary.glob(f"{root.name}-*")) == [spare] and list(spare.iterdir()) == []
    assert list((temporary / "theirs").iterdir()) == []
    assert_series(stored(runs_dir), "loss", 100)
    assert len(stored(runs_dir).attempts) == 2


def test_a_configured_spool_that_others_can_write_to_is_refused(runs_dir, spool_dir):
    spool_dir.mkdir()
    spool_dir.chmod(0o777)
    with pytest.raises(fanfold.RunError, match="is not a folder that only you can write to"):
        fanfold.init("p", id="r", system=False)
