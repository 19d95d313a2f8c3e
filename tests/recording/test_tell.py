"""`fanfold tell`: what is asked of a running job from outside is done by all its ranks after one step, and always answered."""

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import fanfold
from fanfold.errors import RunError, SettingError
from fanfold.journal import requests
from tell_tools import Job


def cli(folder, *words, code=0):
    command = [sys.executable, "-m", "fanfold", *words, "--dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.parametrize(("kind", "ranks"), [("group", 2), ("group", 8), ("apart", 2), ("apart", 8), ("trainer", 2)], ids=str)
def test_all_ranks_act_after_the_same_step(tmp_path, kind, ranks):
    with Job(tmp_path, kind, "pace=0.01", ranks=ranks) as job:
        answers = [job.run.tell(*words, timeout=60, **values) for words, values in (
            (("save",), {}), (("evaluate",), {}), (("set",), {"lr": 0.5}), (("stop",), {}))]  # fmt: skip
        job.ends()
        assert [answer.state for answer in answers] == ["done"] * 4, answers
        for action, answer in zip(("save", "evaluate"), answers, strict=False):
            assert job.steps(f"did/{action}") == [[answer.step]] * ranks
        assert job.steps("did/stop") == [[answers[3].step]] * ranks
        assert [steps[-1] for steps in job.steps("t")] == [answers[3].step] * ranks
        if kind != "trainer":  # the knob changes on all ranks right after the step of the answer
            for rank in range(ranks):
                lr = job.series("lr", rank)
                assert {lr[step] for step in lr if step <= answers[2].step} == {0.1}
                assert {lr[step] for step in lr if step > answers[2].step} == {0.5}
        assert [(one["action"], one["state"]) for one in job.run.requests] == [
            ("save", "done"), ("evaluate", "done"), ("set", "done"), ("stop", "done"),
        ]  # fmt: skip
        assert {one["by"] for one in job.run.requests} == {requests.asker()}
        assert job.run.status == "finished"


def test_a_thousand_requests_are_all_answered(tmp_path):
    with Job(tmp_path, "alone", "pace=0.001") as job:
        asked = [job.run.tell("set", wait=False, lr=number / 1000).id for number in range(1000)]
        deadline = time.monotonic() + 120
        while sum(one["state"] == "done" for one in job.run.refresh().requests) < 1000:
            assert time.monotonic() < deadline, job.run.requests[-3:]
            time.sleep(0.2)
        assert [one["id"] for one in job.run.requests] == asked
        assert list((job.run.path / "requests").iterdir()) == []
        assert job.run.tell("stop").state == "done"
        job.ends()
        assert list(job.series("lr", 0).values())[-1] == 0.999


def test_what_cannot_be_done_is_refused_with_the_reason(tmp_path):
    with Job(tmp_path, "alone") as job:
        refused = (
            ("momentum", 0.5, "momentum is not adjustable. Adjustable: layers, lr"),
            ("lr", 7, "lr cannot be 7: it is between 0 and 1"),
            ("layers", 2.5, "layers cannot be 2.5: it is a whole number"),
            ("layers", 1e30, "layers cannot be 1e+30: it is too large"),
        )
        for name, value, why in refused:
            answer = job.run.tell("set", **{name: value})
            assert (answer.state, answer.why) == ("refused", why)
        assert job.run.tell("log").why == "the program does not read run.control.should_log"
        assert "lr=False: refused (lr cannot be False: it is a number)" in cli(tmp_path, "tell", "-", "set", "lr=false", code=3)
        assert set(job.series("lr", 0).values()) == {0.1}


def test_requests_that_no_job_could_carry_out_are_not_sent(tmp_path):
    run = fanfold.init("p", dir=tmp_path, system=False, quiet=True)
    stored = fanfold.open(run.path)
    for words, values in ((("halt",), {}), (("set",), {}), (("stop",), {"lr": 1}), (("set",), {"lr": float("nan")}), (("set",), {"lr": []})):  # fmt: skip
        with pytest.raises(SettingError, match="Nothing was asked"):
            stored.tell(*words, **values)
    with pytest.raises(SettingError, match="Nothing was asked"):
        stored.tell("stop", timeout=0)
    assert not (run.path / "requests").exists()
    run.finish()


def test_a_program_that_does_not_look_lets_requests_expire(tmp_path):
    with Job(tmp_path, "deaf") as job:
        said = json.loads(cli(tmp_path, "tell", "-", "stop", "--timeout", "1", "--json", code=4))
        assert said["state"] == "expired"
        assert "the program has not looked at requests" in said["why"]
        assert job.process.poll() is None


def test_a_run_that_is_not_running_is_refused_at_once(tmp_path):
    run = fanfold.init("p", dir=tmp_path, system=False, quiet=True)
    run.finish()
    assert "stop: refused (the run is not running: it is finished)" in cli(tmp_path, "tell", run.id, "stop", code=3)
    cli(tmp_path, "tell", "nothing", "stop", code=1)
    assert not (run.path / "requests").exists()


def test_a_job_that_is_killed_before_it_answers_is_reported(tmp_path):
    with Job(tmp_path, "deaf") as job:
        command = [sys.executable, "-m", "fanfold", "tell", "-", "stop", "--dir", str(tmp_path)]
        asking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        while not job.run.refresh().requests:
            time.sleep(0.1)
        os.killpg(job.process.pid, signal.SIGKILL)
        assert "refused (the run is not running: it is killed, and did not answer)" in asking.communicate(timeout=60)[0]
        assert asking.returncode == 3


def test_requests_that_are_open_when_the_run_ends_are_answered(tmp_path):
    run = fanfold.init("p", dir=tmp_path, system=False, quiet=True)
    asked = fanfold.open(run.path).tell("save", wait=False)
    run.finish()
    (found,) = fanfold.open(run.path).requests
    assert (found["id"], found["state"], found["why"]) == (asked.id, "refused", "the run ended first")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_files_of_another_user_and_links_are_not_accepted(tmp_path, caplog):
    run = fanfold.init("p", dir=tmp_path, system=False, quiet=True)
    knob = run.knob("lr", 0.1)
    assert run.control.should_stop is False
    folder = run.path / "requests"

    def plant(name, make):
        request = requests.new("set", {"lr": 0.9})
        folder.mkdir(exist_ok=True)
        path = folder / f"{request.id}.json"
        make(path, requests.encode(request))
        assert path.is_symlink() or path.exists(), name

    def foreign(path, data):
        path.write_bytes(data)
        os.chown(path, 12345, 12345)

    def link(path, data):
        (tmp_path / "elsewhere.json").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere.json")

    def hard_link(path, data):
        (tmp_path / "second name.json").write_bytes(data)
        os.link(tmp_path / "second name.json", path)

    plant("of another user", foreign)
    plant("a link", link)
    plant("a hard link", hard_link)
    plant("a pipe", lambda path, _data: os.mkfifo(path))
    plant("too large", lambda path, data: path.write_bytes(data + b" " * requests.MAX_BYTES))
    plant("not a request", lambda path, _data: path.write_bytes(b'{"action": "explode"}'))
    run.control.look()
    assert run.control.should_stop is False
    assert knob.value == 0.1
    assert fanfold.open(run.path).requests == []
    assert sum("is not a request that this job accepts" in record.getMessage() for record in caplog.records) == 1
    assert list(folder.iterdir()) == []
    run.finish()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a run of another user")
def test_the_run_of_another_user_cannot_be_asked():
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to others
    run = fanfold.init("p", dir=folder, system=False, quiet=True)
    request, me = requests.new("stop"), os.geteuid()
    for path in (folder, run.path.parent, run.path):
        path.chmod(0o777)
    try:
        os.seteuid(12345)
        with pytest.raises(RunError, match="belongs to another user"):
            requests.leave(run.path, request)
    finally:
        os.seteuid(me)
    run.finish()
    shutil.rmtree(folder)


def test_a_loop_may_mark_its_steps_itself(tmp_path):
    run = fanfold.init("p", dir=tmp_path, system=False, quiet=True)
    stored, seen = fanfold.open(run.path), []
    for step in (10, 20, 30, 40):
        run.control.step(step)
        if step == 10:
            stored.tell("save", wait=False)
            run.control.look()
        seen.append((run.control.should_save, run.control.should_save, run.control.should_stop))
        if step == 30:
            stored.tell("stop", wait=False)
            run.control.look()
    assert seen == [(False,) * 3, (True, True, False), (False,) * 3, (False, False, True)]
    run.finish()
    assert [(one["action"], one["state"], one["step"]) for one in stored.refresh().requests] == [
        ("save", "done", 20),
        ("stop", "done", 40),
    ]


def test_who_asked_is_the_user_and_not_a_variable(monkeypatch):
    name = pwd.getpwuid(os.geteuid()).pw_name
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(variable, "the-boss")
    assert requests.asker().startswith(f"{name}@")


def test_show_prints_who_asked_what_and_the_answer(tmp_path):
    run = fanfold.init("p", dir=tmp_path, system=False, quiet=True)
    run.control.step(1)
    fanfold.open(run.path).tell("stop", wait=False)
    run.control.look()
    run.control.step(2)
    assert run.control.should_stop
    run.finish()
    shown = cli(tmp_path, "show", run.id)
    assert f"stop  done after step 2  by {requests.asker()}" in shown


def test_knobs_are_numbers_and_survive_mistakes(tmp_path, caplog):
    run = fanfold.init("p", dir=tmp_path, system=False, quiet=True)
    knob = run.knob("lr", 0.25, max=1)
    assert (float(knob), f"{knob:.1f}", run.knob("lr", 3.0) is knob) == (0.25, "0.2", True)
    assert run.knob("too high", 2.0, max=1).value == 2.0  # usable, not adjustable
    assert run.knob("odd", [1]).value == [1]
    assert len([record for record in caplog.records if "make a value adjustable" in record.getMessage()]) >= 1
    assert fanfold.open(run.path).tell("set", wait=False, odd=1).state == "asked"
    assert run.control.should_stop is False
    run.control.look()
    assert fanfold.open(run.path).requests[0]["why"] == "odd is not adjustable. Adjustable: lr"
    run.finish()


@pytest.mark.parametrize("kind", ["trainer", "transformers", "lightning", "keras"])
def test_trainings_of_every_framework_do_what_they_are_told(tmp_path, kind):
    with Job(tmp_path, kind, "pace=0.01") as job:
        answers = {action: job.run.tell(action) for action in ("save", "log", "evaluate")}
        answers["set"] = job.run.tell("set", lr=0.05)
        assert job.run.tell("set", lr="fast").why == "lr cannot be 'fast': it is a number"
        if kind != "trainer":
            assert job.run.tell("set", lr=0.9).why == "lr cannot be 0.9: it is between … and 0.8"
        answers["stop"] = job.run.tell("stop")
        job.ends()
        states = {action: answer.state for action, answer in answers.items()}
        assert states == dict.fromkeys(states, "done") | ({"evaluate": "refused"} if kind == "keras" else {}), answers
        assert job.steps("did/stop") == [[answers["stop"].step]]
        if kind == "keras":
            assert (tmp_path / "checkpoints" / f"{job.run.id}-step-{answers['save'].step}.keras").stat().st_size > 0
        else:
            assert job.steps("did/save") == [[answers["save"].step]]
            assert job.steps("did/evaluate") == [[answers["evaluate"].step]]
        assert job.run.info["knobs"]["lr"]["value"] == pytest.approx(0.05)


@pytest.mark.parametrize("kind", ["trainer", "transformers"])
def test_an_evaluation_without_data_is_refused_and_training_continues(tmp_path, kind):
    with Job(tmp_path, kind, "pace=0.01", "eval_rows=0") as job:
        answer = job.run.tell("evaluate")
        assert (answer.state, answer.why) == ("refused", "the Trainer has no eval_dataset")
        assert job.run.tell("stop").state == "done"
        job.ends()


@pytest.mark.parametrize("place", [1, -1], ids=["after", "before"])
def test_a_control_callback_of_the_user_steers_transformers(tmp_path, place):
    """It stands beside FanfoldCallback, which would steer, too."""
    with Job(tmp_path, "transformers", "pace=0.01", f"chosen={place}") as job:
        save = job.run.tell("save")
        assert job.run.tell("set", lr=0.5).why == "lr cannot be 0.5: it is between … and 0.4"
        assert [job.run.tell("set", lr=0.3).state, job.run.tell("stop").state] == ["done", "done"]
        job.ends()
        assert (save.state, job.steps("did/save")) == ("done", [[save.step]])


def test_a_checkpoint_that_cannot_be_written_is_refused_and_training_continues(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with Job(tmp_path, "keras", "pace=0.01") as job:
        answer = job.run.tell("save")
        assert answer.state == "refused" and "FileExistsError" in answer.why
        assert job.run.tell("stop").state == "done"
        job.ends()


@pytest.mark.parametrize("kind", ["transformers", "lightning"])
def test_two_ranks_of_a_framework_act_after_the_same_step(tmp_path, kind):
    with Job(tmp_path, kind, "pace=0.01", ranks=2) as job:
        answers = {action: job.run.tell(action) for action in ("save", "evaluate", "stop")}
        job.ends()
        for action, answer in answers.items():
            assert (answer.state, job.steps(f"did/{action}")) == ("done", [[answer.step]] * 2)


def test_a_process_that_does_not_look_leaves_requests_to_one_that_does(tmp_path):
    """`fanfold exec` is a second rank 0 beside the training, whose program never looks; so is an evaluation beside it."""
    with Job(tmp_path, "alone", around=("-m", "fanfold", "exec", "--project", "tell", "--dir", str(tmp_path), "--")) as job:
        asked = []
        for number in range(15):  # at any moment of the second in which each of the two looks
            asked.append(job.run.tell("save", wait=False, timeout=5).id)
            time.sleep(0.21 + number / 100)
        assert job.run.tell("stop").state == "done"
        job.ends()
        assert [(one["id"], one["state"]) for one in job.run.requests[:-1]] == [(id, "done") for id in asked]


def test_a_process_that_ends_leaves_requests_to_one_that_goes_on(tmp_path):
    with Job(tmp_path, "alone") as job:
        beside = fanfold.init("tell", dir=tmp_path, id=job.run.id, system=False, quiet=True)
        os.kill(job.process.pid, signal.SIGSTOP)  # it cannot look before the other one ends
        job.run.refresh().tell("save", wait=False)
        beside.finish()
        assert job.run.refresh().requests == []
        os.kill(job.process.pid, signal.SIGCONT)
        assert job.run.tell("stop").state == "done"
        job.ends()
        assert [one["state"] for one in job.run.requests] == ["done", "done"]
