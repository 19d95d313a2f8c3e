"""Notifications of a run: each event once, to real receivers, whoever is killed when."""

import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fanfold
from fanfold.cli import main
from fanfold.notify.ledger import FilePages
from fanfold.store import open_run
from receivers import keeper, kill, notifiers, receiving


@pytest.fixture
def receiver():
    with receiving() as found:
        yield found


TRAIN = """
import os, sys, time, fanfold
run = fanfold.init("p", id="r", dir={dir!r}, system=False, quiet=True, notify={notify!r}, **{more!r})
run.log({{"loss": 1.0}})
print("ready", flush=True)
{body}
"""


def train(tmp_path, body, notify=None, env=None, **more):
    """Start a training and return its process once it has logged something."""
    code = TRAIN.format(dir=str(tmp_path / "runs"), notify=notify, body=body, more=more)
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )
    assert child.stdout.readline() == "ready\n"
    return child


def path(tmp_path) -> Path:
    return tmp_path / "runs" / "p" / "r"


def sync(tmp_path, **env):
    command = [sys.executable, "-m", "fanfold", "sync", "r", "--dir", str(tmp_path / "runs"), "--json"]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ("run.finish()", "finished", ""),
        ("raise ValueError('the cause')", "failed", "ValueError: the cause"),
        ("os.kill(os.getpid(), 15); time.sleep(60)", "preempted", "signal SIGTERM"),
        ("os.kill(os.getpid(), 9)", "killed", "kill -9"),
    ],
)
def test_the_end_of_a_run_is_told_once_with_its_cause(tmp_path, receiver, body, status, text):
    train(tmp_path, f"run.alert('look', 'at this')\n{body}", [receiver.url]).wait(60)
    receiver.wait(lambda: len(receiver.messages) >= 2)
    assert receiver.told() == ["look", status]
    end = receiver.messages[-1]
    assert text in end["text"]
    assert end["run"]["id"] == "r"
    assert receiver.requests[-1][1]["idempotency-key"] == end["id"]
    receiver.wait(lambda: not notifiers(path(tmp_path)))
    assert len(receiver.messages) == 2


def test_a_killed_notifier_is_started_again_and_repeats_nothing(tmp_path, receiver):
    child = train(tmp_path, "run.alert('one'); sys.stdin.readline(); run.alert('two'); run.finish()", [receiver.url])
    receiver.wait(lambda: receiver.told() == ["one"])
    settled(tmp_path, "one")
    kill(notifiers(path(tmp_path))[0])
    child.communicate("\n", 60)
    receiver.wait(lambda: "finished" in receiver.told())
    assert receiver.told() == ["one", "two", "finished"]


def test_a_notifier_killed_again_right_before_the_end_still_tells_it(tmp_path, receiver):
    child = train(tmp_path, "run.alert('one'); sys.stdin.readline(); run.finish()", [receiver.url])
    receiver.wait(lambda: receiver.told() == ["one"])
    settled(tmp_path, "one")
    (first,) = notifiers(path(tmp_path))
    kill(first)
    receiver.wait(lambda: notifiers(path(tmp_path)) not in ([], [first]))
    kill(notifiers(path(tmp_path))[0])  # now training would wait a while before it starts another
    child.communicate("\n", 60)
    receiver.wait(lambda: "finished" in receiver.told())
    assert receiver.told() == ["one", "finished"]


def settled(tmp_path, title):
    """Wait until the ledger has the outcome of a message."""
    ledger = path(tmp_path) / "relay" / "notify.sent"
    for _ in range(400):
        lines = [json.loads(line) for line in ledger.read_text().splitlines()]
        ids = {line["message"] for line in lines if title in line.get("title", "")}
        if any(line["state"] == "sent" and line["message"] in ids for line in lines):
            return
        time.sleep(0.05)
    raise AssertionError(ledger.read_text())


def test_training_and_notifier_killed_together_the_next_sync_tells(tmp_path, receiver):
    child = train(tmp_path, "run.alert('one'); time.sleep(60)", None, {"FANFOLD_NOTIFY": receiver.url})
    receiver.wait(lambda: receiver.told() == ["one"])
    settled(tmp_path, "one")
    (notifier,) = notifiers(path(tmp_path))
    os.kill(notifier, signal.SIGSTOP)  # so that it cannot see the training die
    kill(child.pid)
    child.wait()
    kill(notifier)
    assert receiver.told() == ["one"]
    done = sync(tmp_path, FANFOLD_NOTIFY=receiver.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert receiver.told() == ["one", "killed"]
    sync(tmp_path, FANFOLD_NOTIFY=receiver.url)
    assert receiver.told() == ["one", "killed"]


def test_an_attempt_that_no_notifier_saw_is_told_by_sync(tmp_path, receiver, capsys):
    everybody_dies = (
        "import psutil\nfor child in psutil.Process().children(): child.kill()\nrun.alert({!r}); os.kill(os.getpid(), 9)"
    )
    for attempt in ("one", "two"):
        train(tmp_path, everybody_dies.format(attempt), None, {"FANFOLD_NOTIFY": receiver.url}).wait(60)
        assert receiver.told().count("killed") == (attempt == "two")
        show = ["notify", "show", "r", "--dir", str(tmp_path / "runs")]
        assert main(show) == 3
        assert "fanfold sync r" in capsys.readouterr().err
        assert sync(tmp_path, FANFOLD_NOTIFY=receiver.url).returncode == 0
        assert main(show) == 0
    assert receiver.told() == ["one", "killed", "two", "killed"]


def test_an_address_that_only_init_knew_is_named_by_sync(tmp_path, receiver):
    child = train(tmp_path, "run.alert('one'); time.sleep(60)", [receiver.url])
    receiver.wait(lambda: receiver.told() == ["one"])
    settled(tmp_path, "one")
    (notifier,) = notifiers(path(tmp_path))
    os.kill(notifier, signal.SIGSTOP)  # so that it cannot see the training die
    kill(child.pid)
    child.wait()
    kill(notifier)
    done = sync(tmp_path)
    assert done.returncode == 1
    assert "was named in init(), and its address is not stored" in done.stdout
    assert sync(tmp_path, FANFOLD_NOTIFY=receiver.url).returncode == 0
    assert receiver.told() == ["one", "killed"]


def test_killed_after_the_receiver_has_it_the_message_comes_again_with_its_id(tmp_path, receiver):
    """The notifier dies between sending and noting that it was sent: nobody can know, so it errs on the side of a repeat."""
    killed = []

    def kill_once(body):
        if b"one" in body and not killed:
            killed.extend(notifiers(path(tmp_path)))
            kill(killed[0])

    receiver.before = kill_once
    child = train(tmp_path, "run.alert('one'); time.sleep(5); run.finish()", [receiver.url])
    child.wait(60)
    receiver.wait(lambda: "finished" in receiver.told())
    assert killed
    assert receiver.told() == ["one", "one", "finished"]
    first, second, _ = receiver.messages
    assert (first["id"], first["repeat"]) == (second["id"], False)
    assert second["repeat"]
    assert "repeat" in second["text"]


def test_killed_before_the_message_left_it_arrives_once(tmp_path):
    """The notifier dies after it wrote down its intent: a command kills its parent before it does anything."""
    program, file, mark = tmp_path / "first.py", tmp_path / "kept.jsonl", tmp_path / "mark"
    program.write_text(
        f"import os, sys, pathlib\nmark = pathlib.Path({str(mark)!r})\n"
        f"if not mark.exists():\n    mark.touch()\n    os.kill(os.getppid(), 9)\n    os._exit(1)\n"
        f"open({str(file)!r}, 'a').write(sys.stdin.read() + '\\n')\n"
    )
    train(tmp_path, "run.alert('one'); time.sleep(5); run.finish()", [f"cmd:{sys.executable} {program}"]).wait(60)
    for _ in range(600):
        told = [json.loads(line)["event"] for line in file.read_text().splitlines()] if file.exists() else []
        if "finished" in told:
            break
        time.sleep(0.05)
    assert mark.exists()
    assert told == ["alert", "finished"]


def test_a_resumed_run_tells_what_is_new_and_asks_whether_to_tell_the_resume(tmp_path, receiver):
    train(tmp_path, "run.alert('one'); os.kill(os.getpid(), 9)", [receiver.url]).wait(60)
    receiver.wait(lambda: "killed" in receiver.told())
    train(tmp_path, "run.alert('two'); run.finish()", [receiver.url]).wait(60)
    receiver.wait(lambda: "finished" in receiver.told())
    train(tmp_path, "run.finish()", {"to": [receiver.url], "resumed": True}).wait(60)
    receiver.wait(lambda: receiver.told().count("finished") == 2)
    told = receiver.told()
    assert [one for one in told if one != "resumed"] == ["one", "killed", "two", "finished", "finished"]
    assert told.count("resumed") == 2  # both resumes, once it was asked for


def test_a_receiver_that_is_down_gets_everything_once_it_is_back(tmp_path, receiver):
    receiver.status = 503
    child = train(tmp_path, "run.alert('one'); run.finish()", [receiver.url])
    child.wait(60)
    assert receiver.messages == []
    receiver.status = 200
    receiver.wait(lambda: "finished" in receiver.told(), 60)
    assert receiver.told() == ["one", "finished"]


def test_one_service_that_fails_does_not_keep_the_others_waiting(tmp_path, receiver):
    address, file = keeper(tmp_path)
    receiver.status = 500
    train(tmp_path, "run.alert('one'); run.finish()", [receiver.url, address]).wait(60)
    for _ in range(400):
        if file.exists() and len(file.read_text().splitlines()) == 2:
            break
        time.sleep(0.05)
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["alert", "finished"]
    receiver.status = 200
    receiver.wait(lambda: len(receiver.messages) == 2, 60)
    assert len(file.read_text().splitlines()) == 2


def test_a_flood_of_alerts_becomes_one_message_with_counts(tmp_path, receiver):
    body = "[run.alert('same', str(i)) for i in range(60)]; [run.alert('other', str(i)) for i in range(40)]; run.finish()"
    train(tmp_path, body, [receiver.url]).wait(60)
    receiver.wait(lambda: receiver.messages and receiver.messages[-1]["event"] == "finished")
    assert len(receiver.messages) <= 7
    assert sum(message["count"] for message in receiver.messages) == 101
    group = max(receiver.messages, key=lambda message: message["count"])
    assert group["event"] == "group"
    assert "x same" in group["text"]
    assert "40x other" in group["text"]


def test_a_level_and_quiet_hours_hold_back_what_is_not_urgent(tmp_path, receiver):
    now = time.localtime()
    start, stop = (f"{(now.tm_hour + shift) % 24:02}:00" for shift in (-1, 2))
    options = {"to": [receiver.url], "quiet": f"{start}-{stop}"}
    train(tmp_path, "run.alert('calm'); run.alert('bad', level='error'); run.finish()", options).wait(60)
    receiver.wait(lambda: "bad" in receiver.told())
    assert receiver.told() == ["bad"]
    for pid in notifiers(path(tmp_path)):
        kill(pid)
    file = tmp_path / "config" / "fanfold" / "settings.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'[notify]\nto = ["{receiver.url}"]\n')
    file.chmod(0o600)
    assert sync(tmp_path).returncode == 0  # without quiet hours: the rest, together
    assert sorted(receiver.told()) == ["bad", "calm", "finished"]


def test_no_address_is_in_the_run_or_on_a_command_line(tmp_path, receiver):
    secret = secrets.token_hex(12)  # not in this file: a run keeps sources that no commit has
    address = receiver.url.replace("127.0.0.1", f"user:{secret}@127.0.0.1") + f"?token={secret}"
    body = "run.alert('one'); sys.stdin.readline(); run.finish()"
    child = train(tmp_path, body, None, {"FANFOLD_NOTIFY": address})
    receiver.wait(lambda: bool(receiver.messages))
    lines = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if os.access(file, os.R_OK)]
    child.communicate("\n", 60)
    receiver.wait(lambda: "finished" in receiver.told())
    assert receiver.requests[0][1]["authorization"].startswith("Basic ")
    assert not [line for line in lines if secret.encode() in line and b"fanfold.relay" in line]
    assert not [file for file in (tmp_path / "runs").rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]


def test_a_mistake_in_the_settings_is_a_warning_and_training_goes_on(tmp_path, caplog):
    run = fanfold.init("p", dir=tmp_path / "runs", system=False, quiet=True, notify=["nonsense"], alerts=["loss >> 2"])
    run.log({"loss": 1.0})
    run.finish()
    text = caplog.text
    assert "address 1 is not an address" in text
    assert "the rule has a mistake at column 7" in text
    assert open_run(run.path).status == "finished"


def test_settings_of_others_and_of_a_directory_of_runs_are_not_used(tmp_path, receiver, caplog):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "settings.toml").write_text(f'notify = ["{receiver.url}"]\n')
    with pytest.raises(fanfold.FanfoldError, match="unknown settings: notify"):
        fanfold.init("p", dir=tmp_path / "runs", system=False, quiet=True)
    (tmp_path / "runs" / "settings.toml").unlink()
    file = tmp_path / "config" / "fanfold" / "settings.toml"
    file.parent.mkdir(parents=True)
    file.write_text(f'[notify]\nto = ["{receiver.url}"]\n')
    file.chmod(0o666)
    run = fanfold.init("p", dir=tmp_path / "runs", system=False, quiet=True)
    run.finish()
    assert "only you can write to" in caplog.text
    assert not (run.path / "relay").exists()
    file.chmod(0o600)
    fanfold.init("p", id="r", dir=tmp_path / "runs", system=False, quiet=True).finish()
    receiver.wait(lambda: receiver.told() == ["finished"])


def test_a_rule_fires_once_per_crossing_and_is_an_alert_of_the_run(tmp_path, receiver):
    body = (
        "for i in range(300):\n"
        "    run.log({'val/loss': 3.0 if 50 <= i < 60 or 200 <= i < 210 else 1.0, 'loss': float('nan') if i == 100 else 1.0})\n"
        "time.sleep(2); run.finish()"
    )
    rules = ["val/loss > 2 for 3", "loss is nan", "val/loss > 100"]
    train(tmp_path, body, [receiver.url], alerts=rules).wait(60)
    receiver.wait(lambda: "finished" in receiver.told())
    assert sorted(receiver.told()) == ["finished", "loss is nan", "val/loss > 2 for 3", "val/loss > 2 for 3"]
    alerts = open_run(path(tmp_path)).alerts
    assert [(one["title"], one["s"], one["level"]) for one in alerts] == [
        ("val/loss > 2 for 3", 53, "warning"), ("loss is nan", 101, "error"), ("val/loss > 2 for 3", 203, "warning"),
    ]  # fmt: skip


def test_a_stalled_run_is_told_once_per_silence(tmp_path, receiver):
    child = train(
        tmp_path, "time.sleep(6); run.log({'loss': 1.0}); time.sleep(6); run.finish()", [receiver.url], alerts=["stalled 2s"]
    )
    child.wait(60)
    receiver.wait(lambda: "finished" in receiver.told())
    assert receiver.told() == ["stalled 2s", "stalled 2s", "finished"]


def test_rules_alone_need_no_address(tmp_path):
    train(tmp_path, "run.log({'loss': float('inf')}); run.finish()", None, alerts=["loss is not finite"]).wait(60)
    for _ in range(400):
        if open_run(path(tmp_path)).alerts:
            break
        time.sleep(0.05)
    (alert,) = open_run(path(tmp_path)).alerts
    assert (alert["rule"], alert["key"], alert["level"]) == ("loss is not finite", "loss", "error")


def test_a_line_that_a_full_disk_cuts_off_is_an_error_and_spoils_no_other(tmp_path):
    """Otherwise a message would be sent that the ledger knows nothing of, and again after a restart."""
    place = tmp_path / "relay" / "notify.sent"
    pages = FilePages(place)
    pages.append({"state": "intent", "n": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (place.stat().st_size + 5, hard))
    try:
        with pytest.raises(OSError, match="No space left"):
            pages.append({"state": "sent", "n": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    pages.append({"state": "sent", "n": 3})
    assert [line["n"] for line in pages.read()] == [1, 3]
