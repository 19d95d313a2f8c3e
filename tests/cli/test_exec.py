"""`fanfold exec`: any command as a run, seen from outside: what it prints, how it ends, what is stored."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fanfold

FANFOLD = [sys.executable, "-m", "fanfold"]


def execute(*command: str, options: tuple[str, ...] = (), **how) -> subprocess.CompletedProcess[str]:
    words = [*FANFOLD, "exec", "-q", *options, "--", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, **how)


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *arguments)


def newest() -> fanfold.store.StoredRun:
    return fanfold.open("-")


def started(*command: str) -> subprocess.Popen[str]:
    """Start a command that prints a line when it is ready, and wait for that line."""
    process = subprocess.Popen(
        [*FANFOLD, "exec", "-q", "--", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready")
    return process


def test_output_is_shown_and_kept_and_the_exit_code_passed_on(runs_dir):
    done = execute("bash", "-c", "echo one; echo two >&2; exit 3", options=("--project", "sh", "--name", "job", "--tag", "t"))
    assert (done.returncode, done.stdout, done.stderr) == (3, "one\n", "two\n")
    run = newest()
    assert (run.project, run.name, run.tags, run.status) == ("sh", "job", ["t"], "failed")
    assert sorted(run.console().splitlines()) == [b"one", b"two"]
    assert (run.verdict["exit_code"], run.error) == (3, "the command ended with exit code 3")
    assert run.config["command"] == "bash -c 'echo one; echo two >&2; exit 3'"


def test_output_arrives_while_the_command_runs(runs_dir):
    process = started(*python("import sys; print('ready', flush=True); sys.stdin.readline(); print('over')"))
    assert newest().status == "running"
    process.kill()
    process.communicate()


def test_input_reaches_the_command(runs_dir):
    assert execute("tr", "a-z", "A-Z", input="hello\n").stdout == "HELLO\n"


def test_options_are_config_and_secrets_are_masked(runs_dir):
    execute("true", "--lr", "0.1", "--fast", "--epochs=3", "model.dim=64", "--api-key", "hunter2secret", "--neg", "-1")
    config = newest().config
    assert config["args"] | {"api-key": None} == {
        "lr": 0.1, "fast": True, "epochs": 3, "model.dim": 64, "api-key": None, "neg": -1,
    }  # fmt: skip
    assert "hunter2secret" not in json.dumps(config)


def test_a_signal_reaches_the_command_which_decides(runs_dir):
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('ready', flush=True); time.sleep(60)"
    process = started(*python(code))
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 7
    assert newest().status == "failed"


def child_of(process):
    """Return the process id of the command."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[-1])


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, "preempted"), (signal.SIGINT, "killed"), (signal.SIGHUP, "killed")]
)
def test_a_command_that_a_signal_ends_ends_us_the_same_way(runs_dir, number, status):
    process = started("bash", "-c", "trap - INT; echo ready; exec sleep 60")
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child_of(process)}/comm").read_text() != "sleep\n" and time.monotonic() < deadline:
        time.sleep(0.01)  # until then it is bash, which may exit with 130 instead
    process.send_signal(number)
    assert process.wait(30) == -number
    assert (newest().status, newest().verdict["signal"]) == (status, number.name)


def test_kill_9_of_the_command_is_a_killed_run(runs_dir):
    done = execute("bash", "-c", "kill -9 $$")
    assert done.returncode == -signal.SIGKILL
    assert (newest().status, newest().verdict["signal"]) == ("killed", "SIGKILL")


def test_a_crash_is_a_failed_run(runs_dir):
    assert execute("bash", "-c", "ulimit -c 0; kill -SEGV $$").returncode == -signal.SIGSEGV
    assert (newest().status, newest().error) == ("failed", "the command crashed: SIGSEGV")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends the child of a process that was killed")
def test_kill_9_of_the_process_around_ends_both(runs_dir):
    process = started(*python("import os, time; print('ready', os.getpid(), flush=True); time.sleep(60)"))
    child = child_of(process)
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
    assert newest().status == "killed"


INSIDE = """
import sys, fanfold
run = fanfold.init("other", config={"inner": 1}, console=True)
run.log({"loss": 0.5}, step=3)
print("printed inside")
second = fanfold.init("other", name="second")
second.log({"x": 1.0})
if len(sys.argv) > 1:
    raise ValueError(sys.argv[1])
"""


def test_a_program_that_uses_fanfold_records_into_the_same_run(runs_dir):
    done = execute(*python(INSIDE), options=("--project", "p", "--name", "outer"))
    assert done.stdout == "printed inside\n"
    assert "its run is in project 'p', not in 'other'" in done.stderr
    run = fanfold.open("outer")
    assert (run.status, len(run.attempts), run.ranks, run.latest["loss"]) == ("finished", 1, [0], 0.5)
    assert (run.config["inner"], "python" in run.config["command"]) == (1, True)
    assert run.console().count(b"printed inside\n") == 1
    assert [one.name for one in fanfold.runs("other")] == ["second"]


def test_the_error_of_a_program_inside_is_the_cause(runs_dir):
    assert execute(*python(INSIDE, "no such layer"), options=("--name", "outer")).returncode == 1
    run = fanfold.open("outer")
    assert run.status == "failed"
    assert run.error.rstrip().endswith("ValueError: no such layer")


def test_every_rank_of_a_launcher_inside_joins(runs_dir, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import fanfold\nrun = fanfold.init()\nrun.log({'rank': run.rank}, step=1)\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = execute(*launcher, options=("--name", "ddp"))
    assert done.returncode == 0, done.stderr
    run = fanfold.open("ddp")
    assert (run.ranks, len(run.attempts), run.status) == ([0, 1], 1, "finished")
    assert [run.series("rank", rank=rank).values.tolist() for rank in (0, 1)] == [[0], [1]]
    assert len(fanfold.runs()) == 1


def test_a_second_program_inside_has_a_run_of_its_own(runs_dir, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys, fanfold\nfanfold.init('own').log({'x': int(sys.argv[1])})\n")
    execute(
        "bash", "-c", f"{sys.executable} {script} 1; {sys.executable} {script} 2", options=("--name", "outer", "--project", "p")
    )
    assert fanfold.open("outer").latest["x"] == 1
    assert [run.latest["x"] for run in fanfold.runs("own")] == [2]


def test_a_program_inside_a_resumed_run_records_into_it_again(runs_dir, monkeypatch):
    monkeypatch.setenv("FANFOLD_RESUME", "auto")
    for attempt in (1, 2):
        execute(*python(f"import fanfold\nfanfold.init().log({{'x': {attempt}}})\nraise SystemExit(3)"))
    (run,) = fanfold.runs("default")
    assert (len(run.attempts), run.series("x", raw=True).values.tolist()) == (2, [1.0, 2.0])


def test_json_is_the_verdict_and_nothing_else(runs_dir):
    done = execute("bash", "-c", "echo noise; exit 4", options=("--json",))
    answer = json.loads(done.stdout)
    assert (answer["status"], answer["exit_code"], done.returncode) == ("failed", 4, 4)
    assert answer["used"]["seconds"] > 0
    assert "noise" in done.stderr


def test_time_and_memory_of_everything_below_are_recorded(runs_dir):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'x = bytearray(300 << 20); x[::4096] = x[::4096]'])"
    execute(*python(code))
    latest = newest().latest
    assert latest["system/command/max_rss_gb"] > 0.3
    assert latest["system/command/cpu_seconds"] > 0


def test_commands_that_cannot_be_started_make_no_run(runs_dir, tmp_path):
    (tmp_path / "plain").write_text("not a program")
    assert execute("no-such-program").returncode == 127
    assert execute(str(tmp_path / "plain")).returncode == 126
    assert execute("true", options=("--dir", str(tmp_path / "plain" / "below"))).returncode == 125
    assert fanfold.runs() == []


def test_a_disabled_fanfold_only_runs_the_command(runs_dir, monkeypatch):
    monkeypatch.setenv("FANFOLD_MODE", "disabled")
    done = execute("bash", "-c", "echo hi; exit 5")
    assert (done.returncode, done.stdout, runs_dir.exists()) == (5, "hi\n", False)


def test_a_terminal_stays_a_terminal_and_ctrl_c_arrives_once(runs_dir):
    code = (
        "import os, signal, sys, time\nhits = []\nsignal.signal(signal.SIGINT, lambda *_: hits.append(1))\n"
        "print('tty', os.isatty(1), flush=True)\nend = time.time() + 3\n"
        "while time.time() < end: time.sleep(0.05)\nprint('hits', len(hits), flush=True)"
    )
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [*FANFOLD, "exec", "-q", "--", *python(code)])
    seen = b""
    while b"tty True" not in seen:
        seen += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    while b"hits" not in seen:
        seen += os.read(terminal, 1024)
    assert b"hits 1" in seen
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


def test_diagnose_tells_the_last_words_of_a_failed_command(runs_dir, capsys):
    from fanfold.cli import main

    execute(*python("raise ValueError('no such file: data.bin')"))
    assert main(["diagnose", "-"]) == 3
    assert "It printed last: ValueError: no such file: data.bin" in capsys.readouterr().out


def test_closed_streams_are_not_replaced_by_files_of_ours(runs_dir):
    command = " ".join([*FANFOLD, "exec", "-q", "--", "sh", "-c", "'cat; echo out; echo err >&2'"])
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        assert subprocess.run(["bash", "-c", f"{command} {closed}"], stdin=subprocess.DEVNULL).returncode == 0
        assert newest().status == "finished"
        assert sorted(newest().console().split()) == [b"err", b"out"]


def test_a_command_without_dashes_is_explained(runs_dir):
    done = subprocess.run([*FANFOLD, "exec", "python", "-c", "print(1)"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "fanfold exec -- python train.py" in done.stderr


def test_a_command_goes_on_when_nobody_reads_its_output(runs_dir):
    command = " ".join([*FANFOLD, "exec", "-q", "--", "seq", "200000"])
    assert subprocess.run(["bash", "-c", f"{command} | head -n 1"], capture_output=True).stdout == b"1\n"
    deadline = time.monotonic() + 60
    while newest().status == "running" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert newest().status == "finished"
    assert newest().console().endswith(b"200000\n")
