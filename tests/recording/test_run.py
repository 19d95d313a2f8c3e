"""What a user's verbs do: init, log, config, summary, artifacts, alerts, finish, resume, disabled."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

import fanfold
from fanfold.errors import RunError, SettingError, notices


def start(runs_dir, **options):
    return fanfold.init(options.pop("project", "p"), dir=runs_dir, **{"quiet": True, "system": False, **options})


def reopen(run):
    return fanfold.open(run.path)


def python(code: str, runs_dir, **env):
    """Run code in a fresh process, as a user's script would be."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "FANFOLD_DIR": str(runs_dir), "FANFOLD_SYSTEM": "0", **env},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_what_is_logged_is_read_back(runs_dir):
    run = start(runs_dir, config={"lr": 0.1})
    for step in range(10):
        run.log({"loss": 1.0 / (step + 1), "n": step, "ok": step % 2 == 0}, step=step)
    run.finish()
    stored = reopen(run)
    assert stored.keys() == ["loss", "n", "ok"]
    assert stored.series("loss").values.tolist() == [1.0 / (step + 1) for step in range(10)]
    assert stored.series("n").values.dtype == np.int64
    assert stored.series("ok").values.tolist() == [True, False] * 5
    assert stored.series("loss").steps.tolist() == list(range(10))
    assert (stored.status, stored.config, stored.project) == ("finished", {"lr": 0.1}, "p")


def test_a_live_run_is_read_from_another_process(runs_dir):
    run = start(runs_dir)
    run.log({"x": 1.5}, step=3)
    code = f"import fanfold; r = fanfold.open({run.id!r}); print(r.status, r.series('x').values.tolist(), r.series('x').steps.tolist())"
    assert python(code, runs_dir).stdout.strip() == "running [1.5] [3]"
    run.finish()


def test_steps_left_out_count_the_calls(runs_dir):
    run = start(runs_dir)
    for value in (10.0, 11.0, 12.0):
        run.log({"x": value})
    run.log({"x": 13.0}, step=100)
    run.log({"x": 14.0})
    run.finish()
    assert reopen(run).series("x").steps.tolist() == [0, 1, 2, 100, 101]


def test_late_repeated_and_negative_steps_are_all_kept(runs_dir):
    run = start(runs_dir)
    for step, value in [(5, 1.0), (3, 2.0), (5, 3.0), (-1, 4.0), (2**40, 5.0)]:
        run.log({"x": value}, step=step)
    run.finish()
    series = reopen(run).series("x")
    assert series.steps.tolist() == [-1, 3, 5, 5, 2**40]
    assert series.values.tolist() == [4.0, 2.0, 1.0, 3.0, 5.0]


@pytest.mark.parametrize("step", [np.int64(7), 7.0, np.float32(7), "7"])
def test_a_step_of_another_type_is_understood(runs_dir, step):
    run = start(runs_dir)
    run.log({"x": 1.0}, step=step)
    run.finish()
    assert reopen(run).series("x").steps.tolist() == [7]


@pytest.mark.parametrize(("step", "said"), [(1.5, "cut to 1"), ("soon", "not a 64-bit integer"), (2**80, "not a 64-bit integer")])
def test_a_step_that_is_none_is_said_once_and_the_value_kept(runs_dir, caplog, step, said):
    run = start(runs_dir)
    with caplog.at_level(logging.WARNING, "fanfold"):
        run.log({"x": 1.0}, step=step)
        run.log({"x": 2.0}, step=step)
    run.finish()
    assert [said in record.message for record in caplog.records] == [True]
    assert len(reopen(run).series("x")) == 2


def test_the_callers_dict_is_not_changed_and_may_be_reused_at_once(runs_dir):
    run = start(runs_dir)
    values = {"x": 0.0, "deep": {"y": 0}}
    for step in range(5):
        values["x"], values["deep"]["y"] = float(step), step
        before = {"x": values["x"], "deep": dict(values["deep"])}
        run.log(values, step=step)
        assert values == before
    run.finish()
    assert reopen(run).series("x").values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert reopen(run).series("deep/y").values.tolist() == [0, 1, 2, 3, 4]


def test_log_takes_a_dict_and_warns_about_anything_else(runs_dir, caplog):
    run = start(runs_dir)
    for wrong in ([1, 2], None, "loss", 5, [("a", 1)]):
        run.log(wrong)
    run.log({"x": 1.0})
    run.finish()
    assert caplog.text.count("log() takes a dict of values, not list. Nothing was logged") == 1
    assert reopen(run).series("x").values.tolist() == [1.0]


def test_a_strict_run_raises_if_log_gets_no_dict(runs_dir):
    run = start(runs_dir, strict=True)
    with pytest.raises(TypeError, match=r"takes a dict.*Nothing was logged"):
        run.log([1, 2])
    run.finish()


def test_module_verbs_act_on_the_current_run(runs_dir):
    first = start(runs_dir, config={"a": 1})
    second = start(runs_dir, config={"a": 2})
    assert fanfold.run is second
    assert fanfold.config["a"] == 2
    fanfold.log({"x": 1.0}, step=0)
    fanfold.config.update({"b": 3})
    fanfold.summary["best"] = 0.5
    fanfold.finish()
    first.log({"x": 9.0}, step=0)
    first.finish()
    assert reopen(second).config == {"a": 2, "b": 3}
    assert reopen(second).summary == {"x": 1.0, "best": 0.5}
    assert reopen(first).series("x").values.tolist() == [9.0]


def test_verbs_without_a_run_say_what_to_do(monkeypatch):
    monkeypatch.setattr("fanfold.recording.api._current", None)
    with pytest.raises(RunError, match=r"Call fanfold\.init"):
        fanfold.log({"x": 1})
    fanfold.finish()


def test_the_package_can_be_explored_without_a_run(runs_dir):
    code = """
        import fanfold, pydoc
        assert hasattr(fanfold, "config") and hasattr(fanfold, "summary") and fanfold.run is None
        assert "log_api_usage_once" in pydoc.plain(pydoc.render_doc(fanfold))
        from fanfold import *
        for use in (lambda: config["lr"], lambda: config.lr, lambda: len(config), lambda: fanfold.summary.update(a=1)):
            try:
                use()
            except fanfold.RunError as error:
                assert "Call fanfold.init" in str(error)
            else:
                raise SystemExit("no error")
        print(config)
        init("p", config={"lr": 0.5})
        assert config["lr"] == config.lr == fanfold.config.lr == 0.5
        config["seed"] = 1
        assert fanfold.config == {"lr": 0.5, "seed": 1}
        print(config)
    """
    done = python(code, runs_dir)
    assert done.stdout.splitlines() == ["<fanfold.config: there is no run yet>", "{'lr': 0.5, 'seed': 1}"], done.stderr


@pytest.mark.parametrize("mode", ["off", "DISABLED", "onlin", "", False])
def test_a_mode_that_is_not_known_is_refused_as_its_variable_is(runs_dir, monkeypatch, mode):
    with pytest.raises(SettingError, match="one of on, disabled, online, offline"):
        start(runs_dir, mode=mode)
    monkeypatch.setenv("FANFOLD_MODE", str(mode))
    with pytest.raises(SettingError, match="one of on, disabled, online, offline"):
        start(runs_dir)
    assert not runs_dir.exists()


def test_a_mode_is_taken_from_argument_variable_and_file(runs_dir, monkeypatch):
    assert [start(runs_dir, mode=word).status for word in ("on", "online", "offline", "disabled")] == ["running"] * 3 + [
        "disabled"
    ]
    (runs_dir / "settings.toml").write_text('mode = "disabled"')
    assert start(runs_dir).status == "disabled"
    (runs_dir / "settings.toml").unlink()
    monkeypatch.setenv("FANFOLD_MODE", "disabled")
    assert start(runs_dir, mode="online").status == "disabled"


def test_name_notes_and_group_are_stored_when_they_are_set(runs_dir):
    run = start(runs_dir, name="first", notes="one")
    run.name, run.notes, run.group = "second", "two", "sweep"
    assert (run.name, run.notes, run.group) == ("second", "two", "sweep")
    run.finish()
    stored = reopen(run)
    assert (stored.name, stored.notes, stored.group) == ("second", "two", "sweep")
    shown = subprocess.run([sys.executable, "-m", "fanfold", "show", run.id], capture_output=True, text=True, timeout=60).stdout
    assert "second" in shown and "two" in shown


def test_log_after_finish_is_said_once(runs_dir, caplog):
    run = start(runs_dir)
    run.log({"x": 1.0})
    run.finish()
    with caplog.at_level(logging.WARNING, "fanfold"):
        run.log({"x": 2.0})
        run.log({"x": 3.0})
    assert len(caplog.records) == 1
    assert "after run" in caplog.records[0].message
    assert notices.counts[f"finished:{run.id}"] == 2
    assert reopen(run).series("x").values.tolist() == [1.0]


def test_an_exception_in_the_with_block_marks_the_run_failed(runs_dir):
    with pytest.raises(ZeroDivisionError), start(runs_dir) as run:
        run.log({"x": 1.0})
        1 / 0  # noqa: B018
    assert reopen(run).status == "failed"
    assert "ZeroDivisionError" in reopen(run).error


def test_wandb_arguments_are_said_once_and_unknown_ones_refused(runs_dir, caplog):
    with caplog.at_level(logging.WARNING, "fanfold"):
        start(runs_dir, entity="team", job_type="train").finish()
        start(runs_dir, entity="team").finish()
    assert len(caplog.records) == 2
    with pytest.raises(SettingError, match=r"does not know colour\. The run was not started\. Known: project, name, .*quiet\.$"):
        start(runs_dir, colour="blue")
    with pytest.raises(SettingError, match=r"does not know nam\. .* Did you mean name\?"):
        start(runs_dir, nam="x")


def test_a_misspelt_variable_is_said_once_by_the_main_process(runs_dir, caplog, monkeypatch):
    monkeypatch.setenv("FANFOLD_PROJEKT", "llm")
    with caplog.at_level(logging.WARNING, "fanfold"):
        start(runs_dir).finish()
        start(runs_dir).finish()
        monkeypatch.setenv("FANFOLD_NAMEE", "x")
        monkeypatch.setenv("FANFOLD_RANK", "1")
        monkeypatch.setenv("FANFOLD_WORLD_SIZE", "2")
        start(runs_dir, id="two").finish()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "fanfold: no setting is called FANFOLD_PROJEKT. The run starts without it. Did you mean FANFOLD_PROJECT?"


def test_warnings_say_who_warns_where_logging_is_not_set_up(runs_dir):
    code = """
        import fanfold
        from fanfold.callbacks.events import logger as callbacks
        from fanfold.errors import logger
        run = fanfold.init("p", entity="team")
        run.log({"x": object()})
        logger.warning("of %s", "a module")
        callbacks.warning("fanfold: of a callback")
        logger.info("not shown")
    """
    lines = python(code, runs_dir).stderr.splitlines()
    assert len(lines) == 4 and [line.count("fanfold: ") for line in lines] == [1] * 4
    assert all(line.startswith("fanfold: ") for line in lines)
    assert lines[2:] == ["fanfold: of a module", "fanfold: of a callback"]


def test_config_takes_what_people_have(runs_dir):
    import argparse
    import dataclasses
    import enum
    import pathlib

    class Size(enum.Enum):
        BIG = "big"

    @dataclasses.dataclass
    class Options:
        lr: float = 0.1
        size: Size = Size.BIG

    for config in (argparse.Namespace(lr=0.1, size=Size.BIG), Options(), {"lr": 0.1, "size": Size.BIG}):
        run = start(runs_dir, config=config)
        run.finish()
        assert reopen(run).config == {"lr": 0.1, "size": "big"}

    class Silent:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    odd = {"path": pathlib.Path("/a/b"), "silent": Silent(), "set": {3, 1}, "tuple": (1, 2), "array": np.arange(3), "none": None, "big": 2**70,
           "nested": {"a": {"b": [1, {"c": 2}]}}, "fn": len, 5: "int key", "nan": float("nan")}  # fmt: skip
    run = start(runs_dir, config=odd)
    run.finish()
    got = reopen(run).config
    assert got["nested"] == {"a": {"b": [1, {"c": 2}]}}
    assert (got["path"], got["set"], got["tuple"], got["array"]) == ("/a/b", [1, 3], [1, 2], [0, 1, 2])
    assert (got["none"], got["big"], got["5"]) == (None, str(2**70), "int key")
    assert got["nan"] != got["nan"]
    assert got["silent"] == "<Silent>"


class Leaves:
    """A value that raises what ends a program when it is read."""

    def __init__(self, error):
        self.error = error

    def __repr__(self):
        raise self.error


class Stop(KeyboardInterrupt):
    pass


@pytest.mark.parametrize("error", [SystemExit(3), Stop(), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_a_value_that_wants_to_end_the_program_does_not_spoil_the_config(runs_dir, error):
    run = start(runs_dir, config={"lr": 1})
    if type(error) is KeyboardInterrupt:  # it may be the user's, so it is raised, and the change is undone
        with pytest.raises(KeyboardInterrupt):
            run.config["odd"] = Leaves(error)
        assert dict(run.config) == {"lr": 1}
    else:
        run.config["odd"] = Leaves(error)
        run.log({"x": Leaves(error), "y": 1.0}, step=0)
        run.tags = [Leaves(error)]
    run.config["lr"] = 2
    run.finish()
    stored = fanfold.open(run.path)
    assert stored.config["lr"] == 2 and stored.config.get("odd", "<").startswith("<")
    assert stored.status == "finished"


def test_a_signal_handler_may_still_end_the_program_while_a_value_is_read(runs_dir):
    class Slow:
        def __str__(self):
            signal.raise_signal(signal.SIGVTALRM)
            return "slow"

    run = start(runs_dir)
    before = signal.signal(signal.SIGVTALRM, lambda *_: sys.exit(3))
    try:
        with pytest.raises(SystemExit):
            run.config["slow"] = Slow()
    finally:
        signal.signal(signal.SIGVTALRM, before)
    run.finish()


def test_a_list_of_arrays_is_one_warning_that_says_how_to_log_images(runs_dir, caplog):
    run = start(runs_dir)
    pictures = [np.zeros((4, 4, 3), np.uint8), np.ones((4, 4, 3), np.uint8)]
    for step in range(3):
        run.log({"pictures": pictures, "loss": 1.0}, step=step)
    run.log({"pictures": [fanfold.Image(one) for one in pictures]}, step=3)
    run.finish()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "[fanfold.Image(one) for one in arrays]" in said and said.startswith("fanfold: 'pictures'")
    stored = fanfold.open(run.path)
    assert len(stored.series("loss")) == 3
    assert [(point.step, point.kind) for point in stored.media("pictures")] == [(3, "image")] * 2


def test_config_reads_by_attribute_and_records_each_change(runs_dir):
    run = start(runs_dir, config={"lr": 0.1})
    assert run.config.lr == 0.1
    run.config.epochs = 3
    run.config["seed"] = 7
    del run.config["lr"]
    with pytest.raises(AttributeError, match=r"no 'missing'.*epochs, seed"):
        run.config.missing  # noqa: B018
    run.finish()
    assert reopen(run).config == {"epochs": 3, "seed": 7}


def test_secrets_never_reach_the_disk(runs_dir):
    secret = "hunter2-very-secret-4711"
    code = f"""
        import sys, fanfold
        sys.argv += ["--api-key", "{secret}", "--url=https://user:{secret}@host/x"]
        run = fanfold.init(config={{"api_key": "{secret}", "db": {{"password": "{secret}"}}, "url": "postgres://me:{secret}@h/db"}})
        run.config.update({{"hf_token": "{secret}"}})
        run.finish()
    """
    assert python(code, runs_dir, MY_SECRET=secret, FANFOLD_NOTES="n").returncode == 0
    written = b"".join(file.read_bytes() for file in Path(runs_dir).rglob("*") if file.is_file())
    assert b"lr" in written or len(written) > 500
    assert secret.encode() not in written


def test_summary_follows_the_rules(runs_dir):
    run = start(runs_dir)
    run.define_metric("loss", summary="min")
    run.define_metric("val/*", summary="max")
    run.define_metric("hidden", summary="none")
    run.define_metric("rate", summary="mean")
    for step, value in enumerate([3.0, 1.0, float("nan"), 2.0]):
        run.log({"loss": value, "val/acc": value, "hidden": 1, "plain": value, "rate": float(step)}, step=step)
    assert run.summary["loss"] == 1.0
    run.summary["note"] = "best so far"
    run.finish()
    summary = reopen(run).summary
    assert summary == {"loss": 1.0, "val/acc": 3.0, "plain": 2.0, "rate": 1.5, "note": "best so far"}


def test_a_second_definition_of_a_metric_adds_to_the_first(runs_dir):
    run = start(runs_dir)
    run.define_metric("loss", x="epoch")
    run.define_metric("loss", summary="min")
    run.define_metric("acc", x="epoch", summary="max")
    run.define_metric("acc", x="step")
    run.log({"loss": 1.0, "acc": 0.9, "epoch": 0})
    run.log({"loss": 2.0, "acc": 0.8, "epoch": 1})
    run.finish()
    stored = reopen(run)
    assert [(stored.metric(key)["x"], stored.metric(key)["summary"]) for key in ("loss", "acc")] == [
        ("epoch", "min"),
        ("step", "max"),
    ]
    assert (stored.summary["loss"], stored.summary["acc"]) == (1.0, 0.9)


def test_alerts_tags_group_and_artifacts_are_kept(runs_dir, tmp_path):
    folder = tmp_path / "ckpt"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.bin").write_bytes(b"weights")
    (folder / "sub" / "same.bin").write_bytes(b"weights")
    run = start(runs_dir, tags=["a"], group="sweep", notes="first try")
    run.tags = ["a", "b"]
    run.alert("loss is NaN", "at step 3", level="error")
    run.artifact(folder, name="ckpt", epoch=1)
    run.finish()
    stored = reopen(run)
    assert (stored.tags, stored.group, stored.notes) == (["a", "b"], "sweep", "first try")
    assert [(a["title"], a["level"]) for a in stored.alerts] == [("loss is NaN", "error")]
    files = stored.artifacts[0]["files"]
    assert [file["path"] for file in files] == ["model.bin", "sub/same.bin"]
    assert len({file["blob"] for file in files}) == 1
    assert stored.artifact_file(files[0]["blob"]).read_bytes() == b"weights"


MISTAKES = [
    (lambda run, _: run.alert("x", level="loud"), ValueError, "Known: info, warning, error"),
    (lambda run, folder: run.artifact(folder / "missing"), FileNotFoundError, "does not exist. Nothing was stored"),
    (lambda run, _: run.define_metric("loss", summary="median"), SettingError, "Known: last, min"),
    (lambda run, _: run.config.update(3), TypeError, "config is a int"),
    (lambda run, _: run.finish(status="done"), SettingError, "Known: finished, failed"),
    (lambda run, _: setattr(run, "tags", 3), TypeError, "not iterable"),
]


@pytest.mark.parametrize(("mistake", "error", "words"), MISTAKES)
def test_a_mistake_is_one_warning_and_an_error_under_strict(runs_dir, tmp_path, caplog, mistake, error, words):
    strict = start(runs_dir, strict=True)
    with pytest.raises(error, match=words):
        mistake(strict, tmp_path)
    strict.finish()
    run = start(runs_dir)
    with caplog.at_level(logging.WARNING, "fanfold"):
        mistake(run, tmp_path)
        mistake(run, tmp_path)
    run.log({"x": 1.0})
    run.finish()
    (said,) = [record.getMessage() for record in caplog.records if words in record.getMessage()]
    assert said.startswith("fanfold: could not ") and "strict=True" in said
    assert reopen(run).status == "finished"


def test_a_resumed_run_is_one_run_whose_later_steps_win(runs_dir):
    code = """
        import fanfold, os, signal
        run = fanfold.init("p", id="job-7", config={"lr": 1})
        for step in range(10): run.log({"loss": 1.0 + step, "only_first": 1.0}, step=step)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert python(code, runs_dir).returncode == -9
    assert fanfold.open("job-7", dir=runs_dir).status == "killed"
    run = start(runs_dir, id="job-7", resume="must")
    for step in range(6, 9):
        run.log({"loss": 100.0 + step}, step=step)
    run.log({"loss": -1.0})
    run.finish()
    stored = reopen(run)
    assert stored.series("loss").steps.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert stored.series("loss").values.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 106.0, 107.0, 108.0, -1.0]
    assert len(stored.series("only_first")) == 10
    assert len(stored.series("loss", raw=True)) == 14
    assert (stored.status, len(stored.attempts), stored.config) == ("finished", 2, {"lr": 1})


def test_resume_rules_are_enforced(runs_dir):
    start(runs_dir, id="a").finish()
    with pytest.raises(RunError, match=r"exists already.*resume='never'"):
        start(runs_dir, id="a", resume="never")
    with pytest.raises(RunError, match=r"does not exist.*resume='must'"):
        start(runs_dir, id="b", resume="must")
    with pytest.raises(SettingError, match="never, allow, must, auto"):
        start(runs_dir, id="b", resume="maybe")


def test_disabled_mode_does_nothing_at_all(tmp_path):
    code = """
        import fanfold, threading, os
        before = set(threading.enumerate())
        with fanfold.init("p", config={"a": 1}) as run:
            run.log({"x": 1}); fanfold.log({"y": object()}); run.alert("a"); run.define_metric("x"); run.config["b"] = 2
            run.summary["z"] = 1; run.artifact("/nope")
        assert set(threading.enumerate()) == before
        print(run.config, os.listdir("."))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          env={**os.environ, "FANFOLD_MODE": "disabled"})  # fmt: skip
    assert done.stdout.strip() == "{'a': 1, 'b': 2} []", done.stderr


def test_runs_live_in_the_nearest_fanfold_folder_upward(tmp_path, monkeypatch):
    monkeypatch.delenv("FANFOLD_DIR", raising=False)
    (tmp_path / ".fanfold").mkdir()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "er")
    run = fanfold.init("p", quiet=True, system=False)
    run.finish()
    assert run.path.parent.parent == tmp_path / ".fanfold"


def test_a_new_folder_keeps_runs_out_of_git_and_private(tmp_path):
    run = start(tmp_path / "new")
    run.finish()
    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"
    assert run.path.stat().st_mode & 0o077 == 0


def test_hostile_names_stay_inside_the_directory(runs_dir):
    for name in ("../../etc", "a/b", ".", "..", "<img onerror=x>", "ü€🙂", "x" * 400, "-rf", "CON", ".hidden"):
        run = start(runs_dir, project=name, id=name)
        run.log({"x": 1.0})
        run.finish()
        assert Path(runs_dir).resolve() in run.path.resolve().parents
        assert len(run.path.relative_to(runs_dir).parts) == 2
        stored = fanfold.open(name, dir=runs_dir, project=name)
        assert (stored.id, stored.project, stored.status) == (name, name, "finished")


def test_an_empty_project_is_refused(runs_dir):
    with pytest.raises(SettingError, match="not a name"):
        start(runs_dir, project=" ")


def test_threads_and_hooks_are_gone_after_finish(runs_dir):
    import signal

    before = {thread.name for thread in threading.enumerate()}
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    real_exit = sys.exit
    run = start(runs_dir, system=True)
    run.log({"x": 1.0})
    run.finish()
    for thread in threading.enumerate():
        if thread.name.startswith("fanfold"):
            thread.join(5)  # told to end; a moment may pass until it has
    assert {t.name for t in threading.enumerate() if t.name.startswith("fanfold")} - before == set()
    assert {s: signal.getsignal(s) for s in handlers} == handlers
    assert sys.exit is real_exit


def test_quiet_prints_nothing_and_the_default_says_where(runs_dir):
    code = "import fanfold; r = fanfold.init('p'); r.log({'x': 1}); r.finish()"
    loud, quiet = python(code, runs_dir, FANFOLD_QUIET="0"), python(code, runs_dir, FANFOLD_QUIET="1")
    assert loud.stdout == quiet.stdout == quiet.stderr == ""
    assert "fanfold: run " in loud.stderr
    assert "fanfold show " in loud.stderr


def test_console_capture_keeps_what_was_printed_and_shows_it_unchanged(runs_dir):
    code = """
        import os, subprocess, sys, fanfold
        run = fanfold.init("p", id="c", console=True)
        print("from python"); sys.stdout.flush()
        os.write(1, b"from c\\n")
        subprocess.run(["echo", "from a child"])
        print("to stderr", file=sys.stderr)
        run.finish()
        print("after")
    """
    done = python(code, runs_dir, FANFOLD_QUIET="1")
    assert done.stdout == "from python\nfrom c\nfrom a child\nafter\n"
    assert done.stderr == "to stderr\n"
    kept = fanfold.open("c", dir=runs_dir).console().decode()
    assert sorted(kept.splitlines()) == ["from a child", "from c", "from python", "to stderr"]


def test_console_capture_keeps_no_secrets_even_cut_in_two(runs_dir):
    code = """
        import os, time, fanfold
        run = fanfold.init("p", id="s", console=True)
        os.write(1, b"key: ghp_0123456789abcd"); time.sleep(0.2); os.write(1, b"efghijABCDEFGHIJ456789\\n")
        os.write(2, b"login with password=hunter2\\n")
        os.write(1, b"-----BEGIN PRIVATE KEY-----\\nMIIEvQ\\n"); time.sleep(0.2); os.write(1, b"IBADAN\\n-----END PRIVATE KEY-----\\n")
        os.write(1, b"\\xff bytes stay, loss 1.5\\nno line end")
        run.finish()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=60, check=True,
                          env={**os.environ, "FANFOLD_DIR": str(runs_dir), "FANFOLD_QUIET": "1", "FANFOLD_SYSTEM": "0"})  # fmt: skip
    assert b"ghp_0123456789abcdefghij" in done.stdout  # the terminal shows it unchanged
    kept = fanfold.open("s", dir=runs_dir).console()
    for secret in (b"ghp_", b"hunter2", b"MIIEvQ", b"IBADAN"):
        assert secret not in kept
    assert b"key: ***\n" in kept
    assert b"\xff bytes stay, loss 1.5\nno line end" in kept


def test_tracebacks_keep_no_secrets(runs_dir, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import fanfold\nrun = fanfold.init('p', id='tb')\ndef connect(api_key): raise ValueError(f'401: {api_key}, password=hunter2')\n"
        "connect(api_key='sk-proj-' + 'a1b2c3d4e5f6g7h8i9j0')\n"
    )
    env = {**os.environ, "FANFOLD_DIR": str(runs_dir), "FANFOLD_QUIET": "1", "FANFOLD_SYSTEM": "0"}
    subprocess.run([sys.executable, str(script)], capture_output=True, timeout=60, check=False, env=env)
    error = fanfold.open("tb", dir=runs_dir).error
    assert "ValueError: 401: ***, password=***" in error
    assert "train.py" in error
    assert "connect(api_key=" in error
    assert "a1b2c3d4e5f6g7h8i9j0" not in error.replace("'a1b2c3d4e5f6g7h8i9j0'", "")


def test_console_capture_leaves_a_terminal_a_terminal(runs_dir):
    code = "import sys, fanfold; r = fanfold.init('p', id='t', console=True); print(sys.stdout.isatty(), flush=True); r.finish()"
    import pty

    master, slave = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=slave, stderr=subprocess.DEVNULL,
                             env={**os.environ, "FANFOLD_DIR": str(runs_dir), "FANFOLD_SYSTEM": "0", "FANFOLD_QUIET": "1"})  # fmt: skip
    assert child.wait(60) == 0
    os.close(slave)
    assert os.read(master, 1000) == b"True\r\n"
    assert fanfold.open("t", dir=runs_dir).console() == b"True\n"


def test_console_survives_kill_nine_of_the_process(runs_dir):
    code = "import os, signal, fanfold; fanfold.init('p', id='k', console=True); print('last words', flush=True); os.kill(os.getpid(), 9)"
    done = python(code, runs_dir, FANFOLD_QUIET="1")
    assert (done.returncode, done.stdout) == (-9, "last words\n")
    assert fanfold.open("k", dir=runs_dir).console() == b"last words\n"


def test_the_run_knows_itself(runs_dir, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import fanfold; fanfold.init('p', id='f', quiet=True, system=False).finish()")
    subprocess.run(
        [sys.executable, str(script), "--lr", "0.1"], check=True, timeout=60, env={**os.environ, "FANFOLD_DIR": str(runs_dir)}
    )
    facts = fanfold.open("f", dir=runs_dir).facts
    assert facts["command"][-2:] == ["--lr", "0.1"]
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["python"]["version"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")
