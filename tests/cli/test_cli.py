"""The command line, as a user calls it: mostly in this process for speed, and each command once as a real process."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import pty
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanfold
from fanfold.cli import COMMANDS, GROUPS, HIDDEN, chart, doctor, entry, main, output, text
from fanfold.drawing import numbers
from fanfold.journal.bodies import as_dict
from fanfold.journal.writer import Writer
from paths import SRC

HOSTILE = "\x1b[31mred [bold]x[/bold] \u202eback\x9b2J"


@pytest.fixture
def run(runs_dir: Path) -> Any:
    """A finished run with everything a number can be."""
    with fanfold.init(
        "toy", name="first", config={"lr": 0.001, "model": {"dim": 64}, "amp": True}, tags=["a", "b"], system=False
    ) as run:
        for step in range(50):
            run.log({"loss": math.exp(-step / 10), "count": step, "odd": odd(step)}, step=step)
            if step % 10 == 0:
                run.log({"val/acc": step / 50}, step=step)
        run.log({"note": "all well"}, step=49)
        run.alert("look", "here")
    return run


def odd(step: int) -> float:
    return {3: float("nan"), 4: float("inf"), 5: float("-inf")}.get(step, 0.1 + step)


def call(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Run the command line here and return what it printed; stderr of a refusal."""
    assert main(words) == code
    out, err = capsys.readouterr()
    return out if code == 0 else out + err


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def process(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONWARNINGS": "error", **options.pop("env", {})}
    command = [sys.executable, "-m", "fanfold", *words]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL, **options
    )


def script(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    return subprocess.run([sys.executable, "-c", code, *words], env=env, capture_output=True, text=True, timeout=60, check=False)


# Every command


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["show", "-"],
        ["tail", "-"],
        ["export", "-"],
        ["prune", "--dry-run"],
        ["doctor"],
        ["rm", "-", "--yes"],
    ],
    ids=lambda words: words[0],
)
def test_command_works_as_a_process_and_speaks_json(run: Any, words: list[str]) -> None:
    plain = process(*words) if words[0] != "rm" else process("ls")
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout
    assert "\x1b" not in plain.stdout  # no colours in a pipe
    machine = process(*words, "--json")
    assert machine.returncode == 0, machine.stderr
    for document in machine.stdout.splitlines() if words[0] in ("tail", "export") else [machine.stdout]:
        json.loads(document)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command.split(), "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert f"fanfold {command}" in shown.partition("example")[2]
    assert "--json" in shown


def test_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "sho", code=2)
    assert "Did you mean show?" in said
    assert all(name.split()[0] in said for name in COMMANDS)
    said = call(capsys, "server", "tok", code=2)
    assert "Did you mean server token?" in said
    assert "server audit" in said


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    shown = call(capsys)
    assert all(what in shown for name, (_, what) in COMMANDS.items() if name.split()[0] not in GROUPS)
    for group, about in GROUPS.items():
        assert about in shown
        assert all(what in call(capsys, group) for name, (_, what) in COMMANDS.items() if name.startswith(f"{group} "))


@pytest.mark.parametrize("name", HIDDEN)
def test_names_from_before_still_work_and_are_not_listed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert f"\n  {name} " not in call(capsys)


def test_version_is_the_packages() -> None:
    assert process("--version").stdout == process("version").stdout == f"fanfold {fanfold.__version__}\n"


def test_common_options_stand_before_or_after_the_command(run: Any, capsys: pytest.CaptureFixture[str], runs_dir: Path) -> None:
    before = answer(capsys, "--dir", str(runs_dir), "--project", "toy", "ls")
    assert before == answer(capsys, "ls", "--project", "toy", "--dir", str(runs_dir))
    assert len(before) == 1


def test_options_stand_between_words_and_after_two_dashes_all_are_words(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    other = fanfold.init("toy", name="-q", system=False, quiet=True)
    other.finish()
    words = ("export", "first", other.id, "--project", "toy")
    assert call(capsys, "export", "first", "--project", "toy", other.id) == call(capsys, *words)
    assert other.id in call(capsys, "show", "--", "-q")


# Errors


def test_a_run_that_is_not_there_is_exit_code_1_without_a_traceback(run: Any) -> None:
    done = process("show", "nothing-of-that-name")
    assert done.returncode == 1
    assert done.stderr.startswith("fanfold: no run 'nothing-of-that-name'")
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(run: Any) -> None:
    assert "Traceback" in process("show", "nothing", env={"FANFOLD_DEBUG": "1"}).stderr


def test_a_bad_setting_is_exit_code_2(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Known: running" in call(capsys, "ls", "--status", "asleep", code=2)
    said = call(capsys, "export", "-", "--format", "json", code=2)
    assert "--format json is not known. Nothing was written. Did you mean jsonl? Known: csv, jsonl, parquet." in said
    for words in (["export", "-"], ["report", "-"]):
        assert "Nothing was written. Its metrics:" in call(capsys, *words, "--keys", "nope", code=1)
    said = call(capsys, "export", "-", "--fold", "nope", code=2)
    assert said.startswith("fanfold: --fold nope is not known. Nothing was written.")  # and no row before it
    for wrong in ("-1", "few"):
        with pytest.raises(SystemExit):
            main(["ls", f"--limit={wrong}"])
        assert f"'{wrong}' is not a number of runs. Write 0 for all" in capsys.readouterr().err
    assert "Known columns: id" in call(capsys, "ls", "--columns", "colour", code=2)
    assert "KEY=VALUE" in call(capsys, "ls", "--config", "lr", code=2)


def test_an_unreadable_directory_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Any) -> None:
    said = call(capsys, "export", "-", "-o", str(tmp_path / "no" / "such" / "place.csv"), code=2)
    assert said.startswith("fanfold: ")
    assert "No such file" in said


def test_a_closed_pipe_is_quiet(run: Any) -> None:
    code = "import sys; from fanfold.cli import main; sys.exit(main(['export', '-', '--long']))"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    _, said = child.communicate(timeout=60)
    assert said == b""
    assert child.returncode == entry.PIPE


def test_interrupt_is_exit_code_130(runs_dir: Path) -> None:
    live = fanfold.init("toy", system=False)
    live.log({"loss": 1.0})
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-m", "fanfold", "tail", "-f", live.id]
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # else a shell's background jobs, which ignore it, hand that on
    try:
        child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert child.stdout is not None
    assert "loss" in child.stdout.readline()  # it follows
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=30)
    live.finish()
    assert (child.returncode, said) == (entry.INTERRUPTED, "")


# ls


def test_ls_lists_newest_first_with_facts(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("old", "new"):
        with fanfold.init("toy", name=name, system=False) as made:
            made.log({"loss": 1.0})
    listed = answer(capsys, "ls")
    assert [row["name"] for row in listed] == ["new", "old"]
    assert set(listed[0]) >= {"id", "name", "project", "status", "started", "duration", "tags", "config", "summary", "path"}
    assert [row["name"] for row in answer(capsys, "ls", "--reverse", "--limit", "1")] == ["old"]


def test_ls_filters_by_status_tag_name_config_and_project(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with fanfold.init("other", name="second", config={"lr": 0.1}, system=False):
        pass

    def names(*words: str, code: int = 0) -> list[str]:
        return [row["name"] for row in answer(capsys, "ls", *words, code=code)]

    assert names("--project", "other") == ["second"]
    assert names("--tag", "a", "--tag", "b") == ["first"]
    assert names("--name", "fir*") == ["first"]
    assert names("--config", "lr=1e-3", "model.dim=64", "amp=true") == ["first"]
    assert names("--status", "finished") == ["second", "first"]
    assert names("--status", "failed", code=1) == []
    assert names("--tag", "a", "--config", "lr=0.1", code=1) == []


def test_ls_sorts_by_a_summary_and_puts_runs_without_it_last(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, loss in (("mid", 2.0), ("none", None), ("low", 1.0), ("nan", math.nan), ("high", 3.0)):
        with fanfold.init("toy", name=name, system=False) as made:
            if loss is not None:
                made.log({"loss": loss})
    upward = [row["name"] for row in answer(capsys, "ls", "--sort", "summary.loss", "--columns", "name")]
    assert upward[:3] == ["low", "mid", "high"]
    downward = [row["name"] for row in answer(capsys, "ls", "--sort", "summary.loss", "--reverse", "--columns", "name")]
    assert downward[:3] == ["high", "mid", "low"]
    assert set(upward[3:]) == set(downward[3:]) == {"none", "nan"}


@pytest.mark.parametrize(("key", "rule", "best"), [
    ("val/acc", None, "high"), ("val/loss", None, "low"), ("sentiment", None, "high"), ("step_time", None, "low"),
    ("val/acc", "min", "low"), ("odd_loss", "max", "high"),
])  # fmt: skip
def test_ls_sorts_a_metric_best_first(
    runs_dir: Path, capsys: pytest.CaptureFixture[str], key: str, rule: str | None, best: str
) -> None:
    for name, value in (("mid", 2.0), ("low", 1.0), ("high", 3.0)):
        with fanfold.init("toy", name=name, system=False) as made:
            if rule:
                made.define_metric(key, summary=rule)
            made.log({key: value})

    def names(*words: str) -> list[str]:
        return [row["name"] for row in answer(capsys, "ls", "--columns", "name", *words)]

    expected = ["high", "mid", "low"] if best == "high" else ["low", "mid", "high"]
    assert names("--sort", f"summary.{key}") == expected
    assert names("--sort", f"summary.{key}", "--reverse") == expected[::-1]
    assert names(f"--sort=-summary.{key}") == ["high", "mid", "low"]
    assert names("--sort", f"+summary.{key}") == ["low", "mid", "high"]


@pytest.mark.parametrize("key", ["loss", "-loss.min", "summary.loss", "config.lr"])
def test_ls_shows_what_it_sorts_by(key: str, runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in (2.5, 1.5):
        with fanfold.init("toy", name=f"at-{value}", config={"lr": value}, system=False) as made:
            made.log({"loss": value})
    head, *rows = call(capsys, "ls", f"--sort={key}").splitlines()
    assert head.split()[1:3] == ["name", key.lstrip("-")]
    shown = [row.split()[2:4] for row in rows]  # after the symbol and the status
    assert sorted(shown) == [["at-1.5", "1.5"], ["at-2.5", "2.5"]]
    assert head.split() == call(capsys, "ls", f"--sort={key}", "--reverse").splitlines()[0].split()
    assert "name id" in re.sub(" +", " ", call(capsys, "ls", "--sort", "name"))
    assert call(capsys, "ls", "--sort", "loss", "--columns", "name").split() == ["name", "at-1.5", "at-2.5"]


def test_ls_columns_reach_config_and_summary(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shown = call(capsys, "ls", "--columns", "name,config.lr,summary.count").splitlines()
    assert shown[0].split() == ["name", "config.lr", "summary.count"]
    assert shown[1].split() == ["first", "0.001", "49"]


def test_ls_of_an_empty_place_says_so_and_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no runs yet" in call(capsys, "ls", "--dir", str(tmp_path), code=1)
    assert answer(capsys, "ls", "--dir", str(tmp_path), code=1) == []


def test_ls_imports_neither_numpy_nor_rich_nor_torch(run: Any) -> None:
    process("ls")  # the catalogue is made
    code = "import sys; from fanfold.cli import main; main(['ls']); print(*sorted({'numpy', 'rich', 'torch'} & set(sys.modules)))"
    assert script(code).stdout.splitlines()[-1] == ""


def test_ls_on_a_terminal_fits_its_width(run: Any) -> None:
    for width in (40, 60, 100):
        lines = terminal("ls", width=width).splitlines()
        assert lines
        assert all(len(line) <= width for line in lines)
        assert any("first" in line and "✓ finished" in line for line in lines)


# Hostile names


def test_names_never_reach_the_terminal_as_commands(runs_dir: Path) -> None:
    with fanfold.init(HOSTILE, name=HOSTILE, tags=[HOSTILE], config={HOSTILE: HOSTILE}, notes=HOSTILE, system=False) as made:
        for step in range(3):
            made.log({HOSTILE: float(step), "text": HOSTILE}, step=step)
        made.alert(HOSTILE, HOSTILE)
    for words in (["ls"], ["show", "-"], ["tail", "-"], ["export", "-"], ["show", HOSTILE + "x"]):
        shown = terminal(*words, width=200, raw=True)
        assert "\x1b[31mred" not in shown, words
        assert "\x9b" not in shown, words
        assert "\u202e" not in shown, words
        if words[0] in ("ls", "show"):
            assert "red [bold]x[/bold]" in shown, words  # markup shows literally


def test_json_holds_hostile_names_exactly_and_in_ascii(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fanfold.init("toy", name=HOSTILE, system=False):
        pass
    assert main(["ls", "--json"]) == 0
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert "\x1b" not in shown
    assert json.loads(shown)[0]["name"] == HOSTILE


def test_a_project_that_looks_like_a_path_stays_inside(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fanfold.init("../x", system=False) as made:
        made.log({"loss": 1.0})
    assert made.path.parent.parent == runs_dir
    assert answer(capsys, "ls", "--project", "../x")[0]["project"] == "../x"
    call(capsys, "export", made.id, "-o", str(runs_dir.parent / "out") + os.sep, "-q")
    assert [file.parent for file in (runs_dir.parent / "out").iterdir()] == [runs_dir.parent / "out"]
    call(capsys, "rm", made.id, "--yes")
    assert not made.path.exists()


def test_clean_keeps_letters_of_every_script() -> None:
    assert text.clean("größe 数据 ✓") == "größe 数据 ✓"
    assert text.clean("a\nb\x1b") == "a\\nb\\x1b"
    assert text.clean("a\nb", lines=True) == "a\nb"


# show


def test_show_tells_status_settings_figures_and_alerts(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shown = call(capsys, "show", "first")
    for word in ("✓ first", "finished", run.id, "lr 0.001", "model.dim 64", "a, b", "val/acc", "look: here", "note: 'all well'"):
        assert word in shown
    assert re.search(r"loss +0\.007447 +0\.007447 +1 +50", shown)
    assert "⠤" in shown or "⣀" in shown  # a curve


def test_show_json_has_everything_and_no_invalid_number(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    facts = answer(capsys, "show", run.id[:6])
    assert facts["config"] == {"lr": 0.001, "model": {"dim": 64}, "amp": True}
    assert facts["keys"]["odd"] == {
        "count": 50,
        "last": 49.1,
        "last_step": 49,
        "min": "-Infinity",
        "max": "Infinity",
        "not_finite": 3,
    }
    assert facts["keys"]["count"]["last"] == 49
    assert [one["title"] for one in facts["alerts"]] == ["look"]
    assert len(facts["attempts"]) == 1
    assert (facts["dropped"], facts["damaged"], facts["lost"]) == (0, 0, [])


def test_show_of_a_failed_run_has_its_traceback(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), fanfold.init("toy", system=False) as made:
        made.log({"loss": 1 / 0})
    shown = call(capsys, "show", "-")
    assert "✗" in shown
    assert "ZeroDivisionError: division by zero" in shown
    assert "ZeroDivisionError" in answer(capsys, "show", "-")["cause"]["error"]


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [(signal.SIGKILL, "killed", "kill -9"), (signal.SIGTERM, "preempted", "rank 0, stopped by SIGTERM (a scheduler, or kill)")],
)
def test_show_names_the_cause_of_death(
    runs_dir: Path, capsys: pytest.CaptureFixture[str], number: int, status: str, words: str
) -> None:
    script(f"import fanfold, os; r = fanfold.init('toy', system=False); r.log({{'a': 1}}); os.kill(os.getpid(), {int(number)})")
    shown = call(capsys, "show", "-")
    assert status in shown
    assert words in shown
    other = "finished" if status == "killed" else "killed"
    assert [one["status"] for one in answer(capsys, "ls", "--status", f"{other}, {status}")] == [status]


def test_show_has_what_the_user_put_into_the_summary_and_sizes_people_read(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fanfold.init("toy", system=False) as made:
        made.log({"loss": 0.5, "system/process/rss_gb": 0.0421}, step=0)
        made.summary["best"] = 0.9
        made.summary["at"] = {"epoch": 3}
    shown = call(capsys, "show", "-")
    assert re.search(r"^  summary +best 0\.9 · at\.epoch 3$", shown, re.MULTILINE)
    assert "process 42.1 MB" in shown


def test_show_counts_attempts(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ending in ("os.kill(os.getpid(), 9)", "r.finish()"):
        script(f"import fanfold, os; r = fanfold.init('toy', id='job', system=False); r.log({{'a': 1}}); {ending}")
    assert [one["status"] for one in answer(capsys, "show", "job")["attempts"]] == ["killed", "finished"]
    shown = call(capsys, "show", "job")
    assert "attempt 1" in shown
    assert "attempt 2" in shown


def test_show_folds_ranks_and_shows_one_when_asked(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_ranks()
    facts = answer(capsys, "show", "job")
    assert facts["ranks"] == [0, 1]
    assert facts["keys"]["loss"]["last"] == 0.5
    assert answer(capsys, "show", "job", "--rank", "1")["keys"]["loss"]["last"] == 1.0
    assert "mean over ranks" in call(capsys, "show", "job")
    assert "mean of 2 ranks" in call(capsys, "show", "job", "--key", "loss")
    assert "rank 1" in call(capsys, "show", "job", "--rank", "1")
    assert facts["summary"]["loss"] == 0.0  # by name: rank 0's


def test_show_names_close_keys_when_one_is_unknown(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Its metrics: val/acc and 3 more." in call(capsys, "show", "-", "--key", "acc", code=1)
    assert set(answer(capsys, "show", "-", "--key", "val/*")["keys"]) == {"val/acc"}


def test_show_says_what_is_damaged(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (run.path / "journal").glob("*.ffj")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    assert "cannot be read" in call(capsys, "show", "-")
    assert answer(capsys, "show", "-")["damaged"] > 0


def test_show_lists_deliveries_of_the_run_and_of_its_reports(
    runs_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fanfold.callbacks import TensorBoardCallback

    options = {"tensorboard": {"logging_dir": str(tmp_path / "tb")}}
    made = fanfold.init("toy", trackers=["tensorboard"], tracker_kwargs=options, system=False)
    loop = fanfold.Loop(made, epochs=1, logging_steps=1, output_dir=str(tmp_path / "out"), callbacks=[TensorBoardCallback])
    with made, loop:
        for _ in loop.epochs():
            for batch in loop.steps(range(4)):
                loop.log({"loss": 1 / (batch + 1)})
    own, report = answer(capsys, "show", "-")["delivery"]
    assert (own["tracker"], own["report"], own["delivered"], own["left"]) == ("tensorboard", None, 4, 0)
    assert (report["tracker"], report["report"], report["status"]) == ("tensorboard", f"{made.id}-tensorboard", "finished")
    assert report["delivered"] >= 4
    (cursor,) = (made.path / "reports").glob("*/*/relay/*.cursor")
    cursor.write_text(json.dumps({**json.loads(cursor.read_text()), "settled": {}, "error": "no route to host"}))
    shown = call(capsys, "show", "-")
    assert re.search(r"delivery +tensorboard  4 values delivered, .*/tb/", shown)
    assert re.search(r"delivery +tensorboard \(report\)  \d+ values delivered, \d+ values left \(fanfold sync", shown)
    assert "no route to host" in shown


def test_show_of_a_run_without_numbers(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fanfold.init("toy", name="bare", system=False):
        pass
    assert "bare" in call(capsys, "show", "-")
    assert answer(capsys, "show", "-")["keys"] == {}


# Charts


def test_chart_keeps_extremes_and_leaves_out_what_is_no_number() -> None:
    values = np.zeros(10_000)
    values[5_000], values[7], values[8] = 9.0, np.nan, np.inf
    drawn = chart.draw(np.arange(10_000), values, width=60, height=4)
    assert drawn.left_out == 2
    assert drawn.lines[0].startswith("9 ┤")
    assert set(drawn.lines[0][3:]) != {"\u2800"}  # the one high point is drawn
    assert {len(line) for line in drawn.lines[:-1]} == {60}


def test_log_chart_leaves_out_what_has_no_logarithm() -> None:
    drawn = chart.draw([0, 1, 2, 3], [-1.0, 0.0, 10.0, 1000.0], width=40, height=4, log=True)
    assert drawn.left_out == 2
    assert drawn.lines[0].strip().startswith("1000")


@pytest.mark.parametrize("values", [[], [math.nan], [1.0], [2.0, 2.0], [1e308, -1e308], [5e-324, 1e308], [True, False]], ids=str)
def test_chart_draws_anything(values: list[float]) -> None:
    assert chart.draw(np.arange(len(values)), values, width=30, height=3).lines
    assert isinstance(chart.spark(values), str)


def test_a_curve_that_does_not_change_is_drawn_level() -> None:
    assert len(set(chart.spark([0.1] * 1000))) == 1
    assert chart.spark([0.0, 1.0], 2) == "▁█"


# tail


def test_tail_shows_the_last_steps_in_one_line_each(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in call(capsys, "tail", "-", "-n", "2", "--json").splitlines()]
    assert [row["step"] for row in rows] == [48, 49]
    assert rows[-1]["values"]["count"] == 49
    lines = call(capsys, "tail", "-", "-n", "3", "--key", "loss").splitlines()
    assert lines[0].split() == ["step", "loss"]
    assert [line.split()[0] for line in lines[1:]] == ["47", "48", "49"]
    values = [json.loads(line)["values"] for line in call(capsys, "tail", "-", "-n", "50", "--key", "odd", "--json").splitlines()]
    assert [row["odd"] for row in values[3:6]] == ["NaN", "Infinity", "-Infinity"]


def test_tail_reads_only_the_end_of_a_long_run(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fanfold.init("toy", system=False) as made:
        for step in range(20_000):
            made.log({"loss": 1.0}, step=step)
    stored = fanfold.open(made.path)
    from fanfold.cli.tail import Reader

    (journal,) = stored.journals
    assert journal.size - journal.back(["loss"], 10) < 50_000
    assert [row.step for row in Reader(stored, 0, None).begin(3)] == [19_997, 19_998, 19_999]


def test_tail_follows_a_live_run_to_its_end(runs_dir: Path) -> None:
    live = fanfold.init("toy", name="live", system=False)
    live.log({"loss": 0.0}, step=0)
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-m", "fanfold", "tail", "-f", live.id, "--json"]
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert json.loads(child.stdout.readline())["step"] == 0
    live.log({"loss": 1.0}, step=1)
    assert json.loads(child.stdout.readline())["values"] == {"loss": 1.0}
    live.log({"loss": 2.0}, step=2)
    live.finish()
    rest, said = child.communicate(timeout=30)
    assert [json.loads(line)["step"] for line in rest.splitlines()] == [2]
    assert child.returncode == 0
    assert "run live finished." in said


def test_tail_refuses_a_rank_that_is_not_there(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Its ranks: 0." in call(capsys, "tail", "-", "--rank", "7", code=2)


# export


def exact(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def test_csv_comes_back_exactly_with_holes_told_from_nan(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(call(capsys, "export", "-"))))
    assert list(rows[0]) == ["step", "loss", "count", "odd", "val/acc"]
    assert len(rows) == 50
    for step, row in enumerate(rows):
        assert int(row["step"]) == step
        assert float(row["loss"]) == math.exp(-step / 10)
        assert exact(float(row["odd"]), odd(step))
        assert row["val/acc"] == (repr(step / 50) if step % 10 == 0 else "")


def test_jsonl_comes_back_exactly(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        json.loads(line, parse_constant=pytest.fail) for line in call(capsys, "export", "-", "--format", "jsonl").splitlines()
    ]
    assert [row["odd"] for row in rows[3:6]] == ["NaN", "Infinity", "-Infinity"]
    assert all("val/acc" in row for row in rows[::10])
    assert "val/acc" not in rows[1]
    assert exact(float(rows[3]["odd"]), math.nan)


def test_parquet_comes_back_exactly(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow.parquet as pq

    (told,) = answer(capsys, "export", "-", "-o", str(tmp_path / "run.parquet"))
    table = pq.read_table(tmp_path / "run.parquet").to_pydict()
    assert told["rows"] == 50
    assert table["count"] == list(range(50))
    assert all(exact(value, odd(step)) for step, value in enumerate(table["odd"]))
    assert table["val/acc"][:2] == [0.0, None]
    assert list(tmp_path.glob(".run*")) == []  # nothing left aside


def test_long_export_has_every_rank_and_time(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_ranks()
    rows = list(csv.DictReader(io.StringIO(call(capsys, "export", "job", "--long"))))
    assert list(rows[0]) == ["run", "key", "rank", "step", "time", "value"]
    assert sorted((row["rank"], row["step"], row["value"]) for row in rows) == [
        (str(rank), str(step), repr(float(rank))) for rank in (0, 1) for step in range(3)
    ]
    assert abs(float(rows[0]["time"]) - time.time()) < 3600
    folded = list(csv.DictReader(io.StringIO(call(capsys, "export", "job", "--long", "--fold", "mean"))))
    assert [(row["rank"], row["value"]) for row in folded] == [("", "0.5")] * 3
    wide = list(csv.DictReader(io.StringIO(call(capsys, "export", "job", "--rank", "1"))))
    assert [row["loss"] for row in wide] == ["1.0"] * 3
    assert "Its ranks: 0, 1." in call(capsys, "export", "job", "--rank", "9", code=2)


def test_several_runs_go_into_one_file_or_a_folder(runs_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, key in (("one", "a"), ("two", "b")):
        with fanfold.init("toy", name=name, id=name, system=False) as made:
            made.log({key: 1, "run": 2.0, "step": 3.0}, step=0)
    rows = list(csv.DictReader(io.StringIO(call(capsys, "export", "one", "two"))))
    assert rows == [
        {"run": "one", "step": "0", "a": "1", "_run": "2.0", "_step": "3.0", "b": ""},
        {"run": "two", "step": "0", "a": "", "_run": "2.0", "_step": "3.0", "b": "1"},
    ]
    assert call(capsys, "export", "one", "-o", "-") == call(capsys, "export", "one")
    assert not Path("-").exists()
    call(capsys, "export", "one", "two", "-o", str(tmp_path / "out"), "--format", "jsonl", "-q")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["toy-one.jsonl", "toy-two.jsonl"]


def test_export_of_keys_without_steps_asks_for_long(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fanfold.init("toy") as made:
        made.log({"loss": 1.0})
    assert "Add --long" in call(capsys, "export", "-", "--keys", "system/memory", code=2)
    rows = list(csv.DictReader(io.StringIO(call(capsys, "export", "-", "--keys", "system/memory", "--long"))))
    assert rows
    assert {row["step"] for row in rows} == {""}
    assert "-o run.parquet" in call(capsys, "export", "-", "--format", "parquet", code=2)


def test_parquet_without_pyarrow_names_the_extra(run: Any, tmp_path: Path) -> None:
    code = ("import sys; sys.modules['pyarrow'] = None; from fanfold.cli import main; "
            f"sys.exit(main(['export', '-', '-o', {str(tmp_path / 'x.parquet')!r}]))")  # fmt: skip
    done = script(code)
    assert done.returncode == 2
    assert "pip install 'fanfold[arrow]'" in done.stderr
    assert not (tmp_path / "x.parquet").exists()


# rm


def test_rm_deletes_the_run_and_its_row(run: Any, capsys: pytest.CaptureFixture[str], runs_dir: Path) -> None:
    with fanfold.init("toy", name="stays", system=False):
        pass
    call(capsys, "ls")
    (gone,) = answer(capsys, "rm", "first", "--yes")
    assert gone["id"] == run.id
    assert not run.path.exists()
    assert [row["name"] for row in answer(capsys, "ls")] == ["stays"]
    assert list((runs_dir / "toy").glob(".*")) == []


def test_rm_without_a_terminal_wants_yes(run: Any) -> None:
    done = process("rm", run.id)
    assert done.returncode == 2
    assert "Pass --yes" in done.stderr
    assert run.path.exists()


@pytest.mark.parametrize(("typed", "stays"), [("n\n", True), ("\n", True), ("y\n", False)])
def test_rm_asks_on_a_terminal(run: Any, typed: str, stays: bool) -> None:
    assert "Delete 1 run for good?" in terminal("rm", run.id, typed=typed)
    assert run.path.exists() is stays


def test_rm_refuses_a_running_run_without_force(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = fanfold.init("toy", system=False)
    assert "still being written" in call(capsys, "rm", live.id, "--yes", code=2)
    assert live.path.exists()
    call(capsys, "rm", live.id, "--yes", "--force")
    assert not live.path.exists()
    live.finish()


def test_rm_deletes_nothing_outside_the_runs_directory(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "rm", str(run.path), "--yes", "--dir", str(tmp_path / "elsewhere"), code=2)
    assert "is not in" in said
    other = tmp_path / "elsewhere" / "toy"
    other.mkdir(parents=True)
    (other / "linked").symlink_to(run.path)
    assert "is a link" in call(capsys, "rm", str(other / "linked"), "--yes", "--dir", str(tmp_path / "elsewhere"), code=2)
    assert run.path.exists()


def test_rm_does_not_follow_links_inside_a_run(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "gold").write_text("mine")
    (run.path / "link").symlink_to(treasure)
    (run.path / "journal" / "0-0000000000000000.ffj").symlink_to(treasure / "gold")
    call(capsys, "rm", run.id, "--yes")
    assert (treasure / "gold").read_text() == "mine"


# prune


def test_prune_never_deletes_a_journal_that_holds_anything(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted((run.path / "journal").iterdir())
    told = answer(capsys, "prune")
    assert told["deleted"] == []
    assert told["kept"] == {"is too small to gain by packing": 1}
    assert sorted((run.path / "journal").iterdir()) == before


def test_prune_deletes_only_what_is_empty_and_over(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run.path / "journal"
    header = as_dict(fanfold.open(run.path).journals[0].header)
    empty = Writer(folder, {**header, "role": "worker"})
    empty.append((6, [0, 0, 0, 0]))  # a heartbeat is no data
    empty.close({"t": 0, "status": "finished"})
    failed = Writer(folder, {**header, "role": "worker"})
    failed.append((6, [0, 0, 0, 0]))
    failed.close({"t": 0, "status": "failed", "error": "out of memory"})
    live = Writer(folder, {**header, "role": "worker"})
    live.append((6, [0, 0, 0, 0]))
    hour_ago = time.time() - 7200
    (folder / "3-00000000000000ff.ffj.alive").touch()
    os.utime(folder / "3-00000000000000ff.ffj.alive", (hour_ago, hour_ago))
    (run.path / "blobs").mkdir(exist_ok=True)
    for name in (".999999999-0123abcd", f".{os.getpid()}-0123abcd", "whole"):
        (run.path / "blobs" / name).write_bytes(b"half")
        os.utime(run.path / "blobs" / name, (hour_ago, hour_ago))
    (run.path.parent / ".deleted-0123").mkdir()

    would = answer(capsys, "prune", "--dry-run")["deleted"]
    did = answer(capsys, "prune")["deleted"]
    assert would == did
    assert sorted(one["why"] for one in did) == [
        "a half-deleted run",
        "an empty journal",
        "half a blob of a process that is gone",
        "the lock of a process that is gone",
    ]
    assert len(list(folder.glob("*.ffj"))) == 3
    assert {file.name for file in (run.path / "blobs").iterdir()} >= {f".{os.getpid()}-0123abcd", "whole"}
    assert not (run.path / "blobs" / ".999999999-0123abcd").exists()
    live.close({"t": 0, "status": "finished"})


def test_prune_leaves_young_runs_alone_when_asked(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "prune", "--older-than", "1d")["kept"] == {}
    assert "12h, 30d or 8w" in call(capsys, "prune", "--older-than", "soon", code=2)


# doctor


def test_doctor_tells_places_ranks_and_libraries(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = answer(capsys, "doctor")
    found = {(one["section"], one["name"]): one for one in told["checks"]}
    assert told["healthy"] is True
    assert str(runs_dir) in found["places", "runs"]["value"]
    assert found["ranks", "rank"]["value"].startswith("0 of 1")
    assert "numpy" not in found["libraries", "trackers"]["value"]
    assert found["machine", "fanfold"]["value"] == fanfold.__version__
    assert not runs_dir.exists()  # looking makes nothing


def test_doctor_sees_the_launcher(runs_dir: Path) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "job7"}
    told = {
        one["name"]: one["value"]
        for one in json.loads(process("doctor", "--json", env=env).stdout)["checks"]
        if one["section"] == "ranks"
    }
    assert told["launcher"] == "torchrun"
    assert told["rank"].startswith("1 of 4")
    assert told["variables"] == "RANK, WORLD_SIZE, LOCAL_RANK, TORCHELASTIC_RUN_ID"
    assert told["run id"] == "from the job id of torchrun"


def test_doctor_is_exit_code_1_when_runs_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    told = answer(capsys, "doctor", "--dir", str(file), code=1)
    assert told["healthy"] is False
    assert [one["name"] for one in told["checks"] if one["level"] == "wrong"] == ["runs"]


def test_doctor_names_credentials_and_never_shows_them(runs_dir: Path, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password hunter2\n")
    env = {"WANDB_API_KEY": "s3cr3t-key", "MLFLOW_TRACKING_URI": "http://user:s3cr3t-key@x", "HOME": str(tmp_path)}
    for words in (["doctor"], ["doctor", "--json"]):
        shown = process(*words, env=env).stdout
        assert "WANDB_API_KEY" in shown
        assert "MLFLOW_TRACKING_URI" in shown
        assert "~/.netrc (api.wandb.ai)" in shown
        assert "s3cr3t" not in shown
        assert "hunter2" not in shown


def test_doctor_warns_of_settings_that_do_not_exist(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_DIRECTORY", "x")
    lines = {line.name: line for line in doctor.ranks(None)}  # type: ignore[arg-type]
    assert lines["FANFOLD_DIRECTORY"].level == "warning"
    assert lines["FANFOLD_DIR"].level == "note"


# Words


def test_ages_and_durations_read_well() -> None:
    assert [text.age(1000, 1000 + s) for s in (0, 5, 200, 7300, 86400 * 1.5, 86400 * 40)] == [
        "just now", "5 s ago", "3 min ago", "2 h ago", "1 day ago", "1 month ago",
    ]  # fmt: skip
    assert (text.age(0.0, 5.0), text.age(9.0, 5.0)) == ("unknown", "in the future")
    assert [numbers.duration(s) for s in (0.21, 42, 200, 7300, 90000 * 3)] == [
        "0.2 s",
        "42 s",
        "3 min 20 s",
        "2 h 1 min",
        "3 d 3 h",
    ]
    assert [text.size(n) for n in (5, 1234, 250_000, 7.5e9)] == ["5 B", "1.2 kB", "250 kB", "7.5 GB"]


def test_numbers_keep_what_matters() -> None:
    assert [text.number(n) for n in (0.0, 3, True, 0.00012345, 1.5e-9, 123456.7, 1e300, math.nan)] == [
        "0", "3", "True", "0.0001234", "1.500e-09", "123457", "1.000e+300", "nan",
    ]  # fmt: skip


def test_table_columns_give_way_widest_first_and_then_the_last_goes() -> None:
    assert output.fit([10, 30, 12], [True, False, True], 80) == [10, 30, 12]
    assert output.fit([10, 30, 12], [True, False, True], 46) == [10, 20, 12]
    assert output.fit([10, 30, 12], [True, False, True], 30) == [10, 18]


# Helpers


def test_usage_says_who_and_with_which_versions_on_a_narrow_terminal(runs_dir: Path) -> None:
    with fanfold.init("toy", system=False):
        fanfold.log_api_usage_once("my.old_fit")
    head, _, row, *_ = [line for line in terminal("usage", "--api", "my.*", width=80).splitlines() if line.strip()]
    assert head.split()[:4] == ["api", "run", "user", "versions"]
    assert row.startswith("my.old_fit")
    assert f"python {platform.python_version()}" in row


def test_show_says_how_many_files_it_leaves_out(runs_dir: Path, capsys) -> None:
    with fanfold.init("toy", system=False) as run:
        for step in range(9):
            run._recorder.event("saved", {"path": f"/models/{step}.pt", "size": 10, "s": step})
    assert main(["show", run.id]) == 0
    shown = capsys.readouterr().out
    assert "8.pt" in shown
    assert shown.count(".pt") + int(re.findall(r"and (\d+) more files \(--all\)", shown)[0]) == 9
    assert main(["show", run.id, "--all"]) == 0
    assert "more files" not in capsys.readouterr().out


def two_ranks() -> None:
    code = ("import fanfold, sys; r = fanfold.init('toy', id='job', system=False)\n"
            "for s in range(3): r.log({'loss': float(r.rank)}, step=s)\nr.finish()")  # fmt: skip
    for rank in "01":
        env = {**os.environ, "PYTHONPATH": str(SRC), "FANFOLD_RANK": rank, "FANFOLD_WORLD_SIZE": "2"}
        subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)


def terminal(*words: str, width: int = 100, typed: str = "", raw: bool = False) -> str:
    """Run a command on a real pseudo-terminal; return what it shows, without our own colours unless raw."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": str(width), "LINES": "50", "TERM": "xterm-256color"}
    child = subprocess.Popen([sys.executable, "-m", "fanfold", *words], env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, typed.encode())
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    child.wait(60)
    decoded = shown.decode(errors="replace").replace("\r\n", "\n")
    return decoded if raw else re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", decoded)


@pytest.mark.parametrize(
    "encoding", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}]
)
def test_every_command_prints_under_a_locale_that_lacks_characters(
    runs_dir: Path, tmp_path: Path, encoding: dict[str, str]
) -> None:
    run = fanfold.init("pröjekt", id="ü", name="größe ✓", system=False, config={"größe": "→ ●"}, tags=["ä"], notes="naïve")
    for i in range(30):
        run.log({"verlüst": 1 / (i + 1), "loss": i * 0.5, "text": "日本"}, step=i)
    run.finish()
    commands = [
        ["ls"], ["ls", "--json"], ["show", "ü"], ["show", "ü", "--json"], ["tail", "ü"], ["top", "--once"], ["top", "--json"], ["doctor"],
        ["export", "ü", "--format", "jsonl"], ["export", "ü", "--format", "csv"], ["query", "SELECT * FROM runs"], ["usage", "ü"],
        ["report", "ü", "-o", str(tmp_path / "r.html")], ["prune", "--dry-run"], ["show", "nö such rün"], ["--help"], ["ls", "--help"],
    ]  # fmt: skip
    env = {**os.environ, **encoding, "COLUMNS": "120"}
    for words in commands:
        done = subprocess.run([sys.executable, "-m", "fanfold", *words], env=env, capture_output=True, timeout=60, check=False)
        assert b"Error" not in done.stderr, (words, done.stderr)
        assert done.returncode in (0, 1), (words, done.stderr)
    shown = subprocess.run([sys.executable, "-m", "fanfold", "ls"], env=env, capture_output=True, timeout=60, check=True).stdout
    assert b"v finished" in shown


def test_tables_on_a_terminal_that_lacks_characters(run: Any) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"LC_ALL": "C", "PYTHONUTF8": "0", "TERM": "xterm", "NO_COLOR": "1"}
        os.execv(sys.executable, [sys.executable, "-m", "fanfold", "ls"])
    seen = b""
    try:
        while chunk := os.read(terminal, 4096):
            seen += chunk
    except OSError:  # its other side is closed
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, seen
    assert b"v finished" in seen


def test_the_dashboard_on_all_addresses_prints_those_a_person_can_open(runs_dir: Path) -> None:
    command = [sys.executable, "-m", "fanfold", "ui", "--host", "0.0.0.0", "--port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        addresses = json.loads(server.stdout.readline())["addresses"]
        assert addresses[0].startswith("http://localhost:")
        assert len(addresses) > 1  # one that other machines can use
        for address in addresses:
            assert "0.0.0.0" not in address
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with browser.open(address, timeout=20) as page:
                assert page.status == 200
    finally:
        server.terminate()
        server.communicate(timeout=20)
