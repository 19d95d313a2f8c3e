"""How single processes end: told apart by the black box, which leaves the program's own handlers and exit codes alone."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import fanfold
from fanfold.errors import SettingError
from fanfold.probes.cgroup import Cgroup
from fanfold.store import open_run
from fanfold.store.blackbox import RankEnd, ends, hangs, in_order, sections
from fleet_tools import Forwarder, Gateway, until
from receivers import Receiver

START = """
import ctypes, faulthandler, os, signal, sys, threading, time
import fanfold
run = fanfold.init("p", id="r", dir=sys.argv[1], quiet=True, system=False, blackbox={"hang": 3})
run.log({"loss": 1.0})
time.sleep(0.5)
"""


def started(folder, code):
    script = folder / "train.py"
    script.write_text(START + code)
    env = {**os.environ, "TEST_FOLDER": str(folder)}
    return subprocess.Popen([sys.executable, str(script), str(folder)], stderr=subprocess.DEVNULL, env=env)


def evidence_of(folder, found, seconds=60):
    """Wait for what the watcher writes after a process is gone."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(fanfold.RunError):
            seen = found(open_run(folder / "p" / "r"))
            if seen:
                return seen
        time.sleep(0.2)
    raise AssertionError("nothing was found")


def test_a_crash_is_recorded_and_the_exit_code_stays(tmp_path):
    process = started(tmp_path, "def inner():\n    os.abort()\ninner()\n")
    assert process.wait(60) == -signal.SIGABRT
    (end,) = evidence_of(tmp_path, lambda run: [one for one in ends(run) if one.stack])
    assert (end.signal, end.cause, end.first) == ("SIGABRT", "crashed with SIGABRT", True)
    assert end.line.name == "inner"


def test_a_program_with_its_own_faulthandler_keeps_it(tmp_path):
    code = START.replace("run = fanfold.init", "faulthandler.enable()\nrun = fanfold.init") + "os.abort()\n"
    script = tmp_path / "train.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False, timeout=60)
    assert "Fatal Python error: Aborted" in done.stderr
    (end,) = evidence_of(tmp_path, lambda run: [one for one in ends(run) if one.line is not None])
    assert (end.status, end.stack) == ("killed", "")


def test_a_kill_is_told_from_a_memory_error_of_the_host(tmp_path):
    process = started(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)\n")
    process.wait(60)
    (end,) = evidence_of(tmp_path, lambda run: [one for one in ends(run) if one.line is not None])
    assert (end.signal, end.cause) == ("SIGKILL", "killed from outside (SIGKILL), it left no trace")


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("os._exit(9)\n", (None, 9, "ended without a word, by os._exit() or a native library")),
        (
            "signal.signal(signal.SIGXCPU, signal.SIG_DFL)\nos.kill(os.getpid(), signal.SIGXCPU)\n",
            ("SIGXCPU", None, "crashed with SIGXCPU"),
        ),
    ],
)
def test_an_exit_that_python_does_not_see_is_no_kill(tmp_path, code, cause):
    process = started(tmp_path, code)
    try:  # the kernel keeps the status until we ask for it; from Linux 6.15 on, longer
        (end,) = evidence_of(tmp_path, lambda run: [one for one in ends(run) if one.line is not None])
    finally:
        process.wait(60)
    assert (end.signal, end.exit_code, end.cause) == cause


def test_the_rank_that_died_first_is_named_though_the_others_follow_at_once(tmp_path):
    code = "time.sleep(max(0.0, float(os.environ['AT']) + (run.rank == 0) * 0.2 - time.time()))\nos.kill(os.getpid(), signal.SIGKILL)\n"
    script = tmp_path / "train.py"
    script.write_text(START + code)
    ranks = [{"FANFOLD_RANK": str(rank), "FANFOLD_LOCAL_RANK": str(rank), "FANFOLD_WORLD_SIZE": "2"} for rank in (0, 1)]
    env = {**os.environ, "FANFOLD_RUN_ID": "r", "AT": str(time.time() + 15)}
    jobs = [subprocess.Popen([sys.executable, str(script), str(tmp_path)], env={**env, **rank}) for rank in ranks]
    for one in jobs:
        one.wait(60)
    over = evidence_of(tmp_path, lambda run: [one for one in ends(run) if one.line] if len(ends(run)) == 2 else [])
    deadline = time.monotonic() + 30
    while len(over) < 2 and time.monotonic() < deadline:
        over = [one for one in ends(open_run(tmp_path / "p" / "r")) if one.line]
    assert [(one.rank, one.first) for one in over] == [(1, True), (0, False)]


def is_watcher(process):
    with contextlib.suppress(psutil.Error):  # just ended
        return "fanfold.blackbox.watcher" in process.cmdline()
    return False


def test_a_crash_comes_before_those_that_the_launcher_ended_for_it(tmp_path):
    """The watcher is late, as on a busy machine: it looks only after the other rank has written its end."""
    code = "if run.rank == 1:\n    while not os.path.exists(os.environ['GO']): time.sleep(0.05)\n    ctypes.string_at(0)\ntime.sleep(600)\n"
    script = tmp_path / "train.py"
    script.write_text(START + code)
    ranks = [{"FANFOLD_RANK": str(rank), "FANFOLD_LOCAL_RANK": str(rank), "FANFOLD_WORLD_SIZE": "2"} for rank in (0, 1)]
    env = {**os.environ, "FANFOLD_RUN_ID": "r", "GO": str(tmp_path / "go")}
    jobs = [subprocess.Popen([sys.executable, str(script), str(tmp_path)], env={**env, **rank}) for rank in ranks]
    folder = tmp_path / "p" / "r" / "blackbox"
    assert until(lambda: len(list(folder.glob("pulse-*.json"))) == 2)
    watchers = []
    assert until(
        lambda: watchers.extend(w for job in jobs for w in psutil.Process(job.pid).children() if is_watcher(w)) or watchers
    )
    (watcher,) = watchers
    opened = Path(f"/proc/{watcher.pid}/fd")
    assert until(lambda: sum("pidfd" in os.readlink(one) for one in opened.iterdir()) == 2)  # it knows both
    watcher.suspend()
    (tmp_path / "go").touch()
    jobs[1].wait(60)
    jobs[0].terminate()
    jobs[0].wait(60)
    watcher.resume()
    over = evidence_of(tmp_path, lambda run: ends(run) if all(one.time and one.signal for one in ends(run)) else [])
    assert [(one.rank, one.first, one.signal) for one in over] == [(1, True, "SIGSEGV"), (0, False, "SIGTERM")]


def end(rank, time, cause="", *, status="failed", signal=None):
    return RankEnd(rank, time, status, cause, signal=signal)


PEER = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:50912: Connection reset by peer. This is typically caused by …"


@pytest.mark.parametrize(
    ("found", "first"),
    [
        ([end(0, 1.0, PEER), end(1, 1.4, "ended without a word", status="killed"), end(2, 1.1, PEER)], 1),
        ([end(0, 1.0, "SIGTERM", signal="SIGTERM", status="preempted"), end(1, 1.4, "killed", status="killed")], 1),
        ([end(0, 1.0, "SIGTERM", signal="SIGTERM", status="preempted"), end(1, 31.0, "killed", status="killed")], 0),
        ([end(0, 1.0, "ValueError: no"), end(1, 1.4, "killed", status="killed"), end(2, 1.2, PEER)], 0),
        ([end(0, 1.0, PEER), end(1, 1.4, PEER)], 0),
        ([end(0, 1.0, status="finished"), end(1, None, status="running")], None),
    ],
    ids=["a line broke", "the launcher said so", "a scheduler ended all", "an exception", "all lines broke", "nothing wrong"],
)
def test_those_that_may_have_followed_are_not_the_first(found, first):
    over = in_order(found)
    assert next((one.rank for one in over if one.first), None) == first
    assert first is None or over[0].rank == first
    assert [one.time is None for one in over] == sorted(one.time is None for one in over)


def test_the_evidence_reaches_a_gateway(tmp_path):
    node, store = tmp_path / "node", tmp_path / "store"
    node.mkdir()
    gateway = Gateway(store)
    process = started(node, "def inner():\n    os.abort()\ninner()\n")
    process.wait(60)
    forwarder = Forwarder(node, gateway.url)
    try:
        (end,) = evidence_of(store, lambda run: [one for one in ends(run) if one.stack])
    finally:
        forwarder.close()
        gateway.close()
    assert (end.signal, end.line.name) == ("SIGABRT", "inner")
    assert [alert["title"] for alert in open_run(store / "p" / "r").alerts] == ["Rank 0 crashed with SIGABRT"]


@contextlib.contextmanager
def limited(megabytes):
    """Yield a memory cgroup with a limit."""
    folder = next((one for one in Cgroup().folders("memory") if one.is_dir()), Path("/nowhere")) / f"fanfold-{os.getpid()}"
    try:
        folder.mkdir()
        name = "memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes"
        (folder / name).write_text(str(megabytes << 20))
    except OSError:
        pytest.skip("only root can limit the memory of a process")
    try:
        yield folder
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def test_a_job_that_the_kernel_kills_was_out_of_memory(tmp_path):
    with limited(300) as group:
        join = f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        script = tmp_path / "train.py"
        script.write_text(
            "import os\n" + join + START + "kept = []\nwhile True:\n    kept.append(bytearray(os.urandom(1 << 20)))\n"
        )
        done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, check=False, timeout=120)
        assert done.returncode == -signal.SIGKILL
        (end,) = evidence_of(tmp_path, lambda run: [one for one in ends(run) if one.line is not None])
    assert (end.signal, end.cause) == ("SIGKILL", "killed by the kernel: out of memory on the host")
    command = [sys.executable, "-m", "fanfold", "memory", "r", "--dir", str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert shown.returncode == 3
    assert "Rank 0 was killed by the kernel" in shown.stdout


def test_a_process_on_its_own_hangs_and_an_alert_goes_out(tmp_path, monkeypatch):
    receiver = Receiver()
    monkeypatch.setenv("FANFOLD_NOTIFY", receiver.url)
    process = started(tmp_path, "def fetch():\n    threading.Event().wait()\nfetch()\n")
    try:
        (hang,) = evidence_of(tmp_path, lambda run: [one for one in hangs(run) if one.ranks[0].threads])
        receiver.wait(lambda: "Training hangs" in receiver.told(), 60)
        run = open_run(tmp_path / "p" / "r")
        command = [sys.executable, "-m", "fanfold", "hang", "r", "--stacks", "--dir", str(tmp_path)]
        shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    finally:
        process.kill()
        process.wait()
        receiver.close()
    assert (hang.ranks[0].line.name, hang.culprits) == ("fetch", [0])
    assert [alert["title"] for alert in run.alerts] == ["Training hangs"]
    assert sections(run)[0]["rows"][0][4].endswith("in fetch: threading.Event().wait()")
    assert shown.returncode == 3
    assert "in fetch: threading.Event().wait()" in shown.stdout


def test_before_a_hang_is_recorded_the_command_shows_where_each_rank_is(tmp_path):
    """A function that loads something may take ten times as long as others, so for minutes nothing is recorded."""
    process = started(tmp_path, "def load_batch():\n    threading.Event().wait()\nload_batch()\n")
    command = [sys.executable, "-m", "fanfold", "hang", "r", "--dir", str(tmp_path)]

    def shown(_):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return done if "loading" in done.stdout else None

    try:
        done = evidence_of(tmp_path, shown)
    finally:
        process.kill()
        process.wait()
    assert " in load_batch: threading.Event().wait()" in done.stdout
    assert done.returncode == 0


def test_a_run_that_ends_well_leaves_no_evidence_and_no_process(tmp_path):
    process = started(tmp_path, "run.finish()\n")
    assert process.wait(60) == 0
    run = open_run(tmp_path / "p" / "r")
    assert (run.status, run.evidence, run.alerts) == ("finished", [], [])
    deadline = time.monotonic() + 60
    while _watchers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert _watchers(tmp_path) == []
    assert len(list((tmp_path / "p" / "r" / "journal").glob("*.ffj*"))) == 1


def _watchers(folder):
    """Return the watchers that have the run's folder open as their working directory or in their files."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"fanfold.blackbox.watcher" in words and str(folder).encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


@pytest.mark.parametrize("given", ["soon", {"hang": 0}, {"hang": "60"}, {"hangs": 60}, {"memory": "yes"}])
def test_options_that_make_no_sense_are_refused(given, tmp_path):
    with pytest.raises(SettingError, match="blackbox"):
        fanfold.init("p", dir=tmp_path, quiet=True, blackbox=given)
    assert not (tmp_path / "p").exists()
