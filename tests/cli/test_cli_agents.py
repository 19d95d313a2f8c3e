"""The commands that scripts and coding agents use: wait, points, compare, tag, note, rename, archive."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time

import pytest

import fanfold
from fanfold.cli import main
from store_data import START, Call, beat, end, write_journal, write_run


@pytest.fixture
def ask(runs_dir, capsys):
    """Run a command in this process; return its exit code and its JSON."""

    def asked(*words: str):
        code = main([*words, "--json", "-q"])
        out = capsys.readouterr().out
        return code, json.loads(out) if out else None

    return asked


def recorded(name: str, *, status: str = "finished", points: int = 100, **options):
    run = fanfold.init("llm", name=name, system=False, **options)
    for step in range(points):
        run.log({"loss": 1 / (1 + step), "spike": 99.0 if step == 37 else 0.0}, step=step)
    run.finish(status=status)
    return run


# wait


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("failed", 3), ("killed", 4), ("preempted", 4)])
def test_wait_ends_with_a_code_for_each_outcome(ask, status, code):
    recorded("a", status=status)
    got, answer = ask("wait", "a")
    assert (got, answer["outcome"], answer["runs"][0]["status"]) == (code, status, status)


def test_wait_reports_the_worst_of_several_runs(ask):
    recorded("good")
    recorded("bad", status="failed")
    code, answer = ask("wait", "good", "bad")
    assert (code, [run["outcome"] for run in answer["runs"]]) == (3, ["finished", "failed"])


def test_wait_until_a_condition_holds_or_cannot_hold_any_more(ask):
    recorded("a")
    assert ask("wait", "a", "--until", "loss<0.5")[0] == 0
    code, answer = ask("wait", "a", "--until", "loss<0.001")
    assert (code, answer["outcome"]) == (5, "not met")


def test_wait_returns_while_training_goes_on(runs_dir):
    train = (
        "import fanfold, time\nrun = fanfold.init('llm', name='live', system=False)\n"
        "for i in range(10_000):\n    run.log({'loss': 1 / (1 + i)}); time.sleep(0.02)"
    )
    process = subprocess.Popen([sys.executable, "-c", train])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fanfold", "wait", "live", "--until", "loss<0.1", "--json"], capture_output=True
        )
        assert (done.returncode, json.loads(done.stdout)["runs"][0]["status"]) == (0, "running")
        done = subprocess.run([sys.executable, "-m", "fanfold", "wait", "live", "--timeout", "1"], capture_output=True, text=True)
        assert done.returncode == 124
        assert "still running: the time is up" in done.stdout
        waiting = subprocess.Popen([sys.executable, "-m", "fanfold", "wait", "live"], stdout=subprocess.PIPE, text=True)
        time.sleep(1)
        process.kill()
        assert waiting.wait(60) == 4
        assert "killed" in waiting.communicate()[0]
    finally:
        process.kill()
        process.wait()


def test_wait_for_a_run_that_is_not_there_ends_with_one(ask, monkeypatch):
    monkeypatch.setattr("fanfold.cli.wait.APPEAR_SECONDS", 0.1)
    assert ask("wait", "nobody")[0] == 1


# points


@pytest.mark.parametrize("buckets", ["5", "50"])
def test_points_prints_names_that_a_terminal_does_not_obey(runs_dir, capsys, buckets):
    run = fanfold.init("llm", name="a", system=False)
    for step in range(20):
        run.log({"loss\x1b[31m": math.nan if step > 15 else 1.0, "x\x9b31m": float(step)}, step=step)
    run.define_metric("loss*", x="x\x9b31m")
    run.finish()
    capsys.readouterr()
    assert main(["points", "a", "*", "--buckets", buckets]) == 0
    told = "".join(capsys.readouterr())
    assert "loss\\x1b[31m" in told and not {"\x1b", "\x9b"} & set(told)


def test_points_has_every_extreme_in_few_buckets(ask):
    recorded("a", points=1000)
    _, (answer,) = ask("points", "a", "spike", "--buckets", "7")
    assert len(answer["points"]) == 7
    assert sum(row["count"] for row in answer["points"]) == answer["total"] == 1000
    (high,) = [row for row in answer["points"] if row["max"] == 99.0]
    assert high["x_max"] == 37


def test_points_around_a_step_are_all_there(ask):
    recorded("a", points=1000)
    _, (answer,) = ask("points", "a", "loss", "--around", "500")
    assert answer["every_point"]
    assert [(row["x"], row["value"]) for row in answer["points"]] == [(step, 1 / (1 + step)) for step in range(480, 521)]


def test_points_from_and_to_limit_the_curve(ask):
    recorded("a")
    _, (answer,) = ask("points", "a", "loss", "--from", "10", "--to", "12")
    assert [row["x"] for row in answer["points"]] == [10, 11, 12]


def test_points_keep_nan_and_infinity(ask):
    run = fanfold.init("llm", name="odd", system=False)
    for value in (1.0, math.nan, math.inf, -math.inf):
        run.log({"x": value})
    run.finish()
    _, (answer,) = ask("points", "odd", "x")
    assert [row["value"] for row in answer["points"]] == [1.0, "NaN", "Infinity", "-Infinity"]


@pytest.mark.parametrize("words", [("--buckets", "0"), ("--around", "3", "--to", "9"), ("--from", "nan")])
def test_points_refuses_options_that_make_no_sense(ask, words):
    recorded("a")
    assert ask("points", "a", "loss", *words)[0] == 2


# compare


def test_compare_shows_only_what_differs(ask, capsys):
    recorded("a", config={"lr": 0.1, "model": {"dim": 64}, "nan": math.nan})
    recorded("b", config={"lr": 0.2, "model": {"dim": 64}, "nan": math.nan, "more": 1}, points=50)
    _, answer = ask("compare", "a", "b")
    assert answer["config"] == {"differ": {"lr": [0.1, 0.2], "more": [None, 1]}, "same": 2}
    assert answer["metrics"]["differ"] == {"loss": [0.01, 0.02]}
    assert main(["compare", "a", "b"]) == 0
    assert "config: 2 differences, 2 the same" in capsys.readouterr().out


# Editing


def test_tags_are_added_and_removed_on_several_runs(ask):
    recorded("a", tags=["draft", "old"])
    recorded("b")
    _, answer = ask("tag", "a", "b", "--add", "paper", "--remove", "draft")
    assert [run["tags"] for run in answer] == [["old", "paper"], ["paper"]]
    assert sorted(run["name"] for run in ask("ls", "--tag", "paper")[1]) == ["a", "b"]


def test_notes_names_and_archiving_reach_every_reader(ask):
    run = recorded("a")
    ask("note", "a", "first")
    ask("note", "a", "second", "--append")
    ask("rename", "a", "best")
    assert ask("archive", "best")[1][0]["archived"] is True
    found = fanfold.open(run.id)
    assert (found.name, found.notes, found.info["archived"]) == ("best", "first\nsecond", True)
    assert ask("archive", "best", "--undo")[1][0]["archived"] is False
    assert ask("note", "best", "")[1][0]["notes"] is None


def test_notes_come_from_a_pipe(runs_dir):
    run = recorded("a")
    command = [sys.executable, "-m", "fanfold", "note", "a", "-"]
    subprocess.run(command, input="from\na pipe\n", text=True, check=True, capture_output=True, env=dict(os.environ))
    assert fanfold.open(run.id).notes == "from\na pipe"


def test_an_empty_name_is_refused(ask):
    recorded("a")
    assert ask("rename", "a", " ")[0] == 2


# diagnose


def kinds(answer) -> list[str]:
    return [finding["kind"] for finding in answer["findings"]]


def test_diagnose_finds_nothing_in_a_good_run(ask):
    recorded("good")
    assert ask("diagnose", "good") == (0, {"run": ANY_RUN, "findings": []})


class _AnyRun:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and set(other) == {"id", "name", "project", "status"}

    __hash__ = None  # type: ignore[assignment]


ANY_RUN = _AnyRun()


@pytest.mark.parametrize("points", [50, 5000])
def test_diagnose_names_the_first_nan_by_metric_and_step(ask, points):
    run = fanfold.init("llm", name="nan", system=False)
    for step in range(points):
        bad = math.nan if step >= points // 2 else 1.0
        run.log({"loss": 1.0 if step == points // 2 else bad, "grad_norm": bad, "fine": 1.0}, step=step)
    run.finish()
    code, answer = ask("diagnose", "nan")
    assert (code, kinds(answer)) == (3, ["not finite"])
    first, second = answer["findings"][0]["evidence"]["first"]
    assert (first["key"], first["step"], second["key"], second["step"]) == ("grad_norm", points // 2, "loss", points // 2 + 1)


def test_diagnose_says_why_a_run_failed(runs_dir, ask):
    code = "import fanfold\nrun = fanfold.init('llm', name='f', system=False)\nrun.log({'x': 1})\nrun.alert('odd', 'very')\nraise ValueError('no such layer')"
    subprocess.run([sys.executable, "-c", code], capture_output=True)
    _, answer = ask("diagnose", "f")
    assert kinds(answer) == ["end", "alert"]
    assert "ValueError: no such layer" in answer["findings"][0]["text"]


def test_diagnose_sees_pauses_slowness_and_growing_memory(runs_dir, ask):
    calls, clock = [], 0
    for step in range(400):
        clock = 3_000_000_000 if step >= 300 else 1_000_000_000
        calls.append(Call(0, 0, step, 200_000_000_000 if step == 100 else clock, {"loss": 1.0}))
        if step % 10 == 0:
            calls.append(Call(0, 0, None, 0, {"system/process/rss_gb": 1.0 + step / 100}))
    write_run(runs_dir, calls, project="llm", id="r")
    _, answer = ask("diagnose", "r")
    assert sorted(kinds(answer)) == ["gap", "memory", "slower"]
    (gap,) = [finding for finding in answer["findings"] if finding["kind"] == "gap"]
    assert gap["evidence"]["seconds"] == pytest.approx(200, abs=1)
    assert gap["evidence"]["step"] == 99


def test_diagnose_names_the_slow_rank_and_waits_for_data(runs_dir, ask):
    calls = [
        Call(0, rank, step, 1, {"time/compute": 2.0 if rank == 2 else 1.0, "time/step": 2.0, "time/data": 1.0})
        for step in range(5)
        for rank in range(4)
    ]
    write_run(runs_dir, calls, project="llm", id="r")
    _, answer = ask("diagnose", "r")
    assert sorted(kinds(answer)) == ["data wait", "slow rank"]
    (slow,) = [finding for finding in answer["findings"] if finding["kind"] == "slow rank"]
    assert (slow["evidence"]["rank"], slow["evidence"]["ratio"]) == (2, 2.0)


def test_diagnose_counts_points_logged_again_after_a_restart(runs_dir, ask):
    calls = [Call(0, 0, step, 1, {"loss": 1.0}) for step in range(100)] + [
        Call(1, 0, step, 1, {"loss": 1.0}) for step in range(60, 120)
    ]
    write_run(runs_dir, calls, project="llm", id="r")
    _, answer = ask("diagnose", "r")
    (again,) = [finding for finding in answer["findings"] if finding["kind"] == "repeated steps"]
    assert again["evidence"]["points"] == 40


def test_archived_runs_are_listed_only_on_request(ask):
    recorded("kept")
    recorded("old")
    ask("archive", "old")
    assert [run["name"] for run in ask("ls")[1]] == ["kept"]
    assert {run["name"]: run["archived"] for run in ask("ls", "--archived")[1]} == {"kept": False, "old": True}


def test_python_moves_a_run_to_another_project(runs_dir):
    recorded("good")
    run = fanfold.open("good")
    run.move("kept")
    assert (run.project, fanfold.open("kept/good").id) == ("kept", run.id)
    run.move("kept")  # it is there already
    assert (run.project, run.status) == ("kept", "finished")
    main(["cp", "good", "--project", "other"])
    with pytest.raises(fanfold.FanfoldError, match="has another run"):
        run.move("other")
    run.path.rename(runs_dir / "elsewhere")
    with pytest.raises(fanfold.FanfoldError, match="Another process moved or deleted it"):
        run.move("third")


def test_the_help_of_mv_says_where_the_runs_go(capsys):
    with pytest.raises(SystemExit):
        main(["mv", "--help"])
    assert "the project to move the runs to" in capsys.readouterr().out


def test_diagnose_names_the_parameter_and_rank_that_a_callback_reported(runs_dir, ask):
    import torch

    from fanfold.callbacks import NonFiniteCallback, TrainerControl, TrainerState

    run = fanfold.init("llm", name="nan", system=False)
    model, finder, state = torch.nn.Linear(2, 1), NonFiniteCallback(run=run), TrainerState(global_step=6)
    model(torch.tensor([[1.0, math.inf]])).sum().backward()
    finder.on_pre_optimizer_step(None, state, TrainerControl(), model=model)
    finder.on_train_end(None, state, TrainerControl())
    run.finish()
    _, answer = ask("diagnose", "nan")
    (finding,) = answer["findings"]
    assert finding["evidence"]["reported"] == [{"what": "gradient", "names": "weight", "step": 7, "rank": 0}]
    assert "The gradient of weight is not finite at step 7 on rank 0." in finding["text"]


def test_diagnose_tells_times_in_seconds(runs_dir, ask):
    before = time.time()
    run = recorded("bad", status="failed")
    _, answer = ask("diagnose", run.id)
    assert before <= answer["findings"][0]["evidence"]["time"] <= time.time()


def test_diagnose_sees_a_run_that_hangs(runs_dir, ask, monkeypatch):
    run = fanfold.init("llm", name="hangs", system=False)
    began = time.time()
    for step in range(30):
        run.log({"loss": 1.0}, step=step, time=began - 900 + step)
    code, answer = ask("diagnose", "hangs")
    run.finish()
    assert (code, kinds(answer)) == (3, ["stalled"])
    assert answer["findings"][0]["evidence"]["step"] == 29


def test_diagnose_finds_the_slow_stretch_of_a_run(runs_dir, ask):
    calls = [Call(0, 0, step, (5 if 400 <= step < 500 else 1) * 10**9, {"loss": 1.0}) for step in range(800)]
    write_run(runs_dir, calls, project="llm", id="r")
    _, answer = ask("diagnose", "r")
    (slower,) = answer["findings"]
    assert (slower["kind"], slower["evidence"]["from"], slower["evidence"]["to"]) == ("slower", 400, 499)
    assert slower["evidence"]["speed"] == pytest.approx(0.2)


def test_diagnose_names_the_rank_whose_memory_grows(runs_dir, ask):
    calls = [
        Call(0, rank, None, 10**9, {"system/process/rss_gb": 1.0 + (step / 50 if rank == 3 else 0.0)})
        for step in range(100)
        for rank in range(4)
    ]
    write_run(runs_dir, calls, project="llm", id="r")
    _, answer = ask("diagnose", "r")
    assert [(one["kind"], one["evidence"]["rank"]) for one in answer["findings"]] == [("memory", 3)]


# Naming runs


def test_a_copy_in_another_project_is_named_with_its_project(ask, capsys):
    run = recorded("a")
    assert ask("cp", "a", "--project", "paper")[0] == 0
    assert main(["show", run.id]) == 2
    told = capsys.readouterr().err
    assert f"llm/{run.id} (a), paper/{run.id} (a)" in told or f"paper/{run.id} (a), llm/{run.id} (a)" in told
    assert ask("show", f"paper/{run.id}")[1]["project"] == "paper"
    assert ask("show", "llm/a")[1]["project"] == "llm"
    assert fanfold.open(f"paper/{run.id}").project == "paper"


def test_errors_say_what_is_there_and_end_with_one(runs_dir, capsys):
    recorded("a")
    fanfold.init("llm", name="empty", system=False).finish()
    for words, told in {
        ("points", "a", "los"): "no numbers under 'los'. Nothing was printed. Its metrics: loss and 1 more.",
        ("points", "empty", "x"): "It has no metrics.",
        ("show", ""): "no run ''",
    }.items():
        assert main(list(words)) == 1
        assert told in capsys.readouterr().err


def test_the_newest_of_no_runs_is_said_plainly(runs_dir, capsys):
    assert main(["show", "-"]) == 1
    assert "there are no runs in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("ls", "--dir", __file__), "is a file, not a directory of runs"),
        (("export", "a", "--format", "csv", "--json"), "--json prints JSON lines"),
        (("tag", "a", "--add", " "), "cannot be ' '"),
    ],
)
def test_options_that_cannot_be_are_refused(runs_dir, capsys, words, told):
    recorded("a")
    assert main(list(words)) == 2
    assert told in capsys.readouterr().err


def test_a_bad_sort_or_limit_is_refused(runs_dir):
    from fanfold.stores import open_store

    recorded("a")
    store = open_store()
    for options in ({"limit": -1}, {"limit": 1.5}, {"limit": "x"}, {"sort": 3}, {"sort": "nonsense"}):
        with pytest.raises(fanfold.errors.SettingError, match="Nothing was read"):
            store.runs(**options)
    assert len(store.runs(sort="-loss", limit=1)) == 1


# ls


def test_runs_are_sorted_by_the_best_of_a_metric(ask):
    for name, low, high in (("a", 0.3, 0.5), ("b", 0.1, 0.9), ("c", 0.2, 0.7)):
        run = fanfold.init("llm", name=name, system=False)
        run.define_metric("cost_saved", summary="max")
        for value in (high, low, high):
            run.log({"loss": value, "cost_saved": value, "acc": value})
        run.finish()

    def order(*words: str) -> str:
        return "".join(run["name"] for run in ask("ls", *words)[1])

    assert order("--sort", "loss.min") == "bca"
    assert order("--sort", "acc.max") == "bca"
    assert order("--sort", "loss") == "acb"  # the last values
    assert order("--sort", "cost_saved.min") == "acb"  # define_metric says that high is good
    assert order("--sort", "-loss.min") == "acb"
    assert ask("ls", "--sort", "loss.min", "--columns", "name,loss.min")[1][0] == {"name": "b", "loss.min": 0.1}


def test_since_leaves_out_runs_that_were_not_active(runs_dir, ask):
    write_journal(runs_dir / "llm" / "old", 1, beat(START), end(START), started=START)
    recorded("new")
    assert [run["name"] for run in ask("ls", "--since", "1h")[1]] == ["new"]
    assert {run["id"] for run in ask("ls", "--since", "2020-01-01")[1]} >= {"old"}
    with pytest.raises(SystemExit):
        main(["ls", "--since", "soon"])


@pytest.mark.parametrize(("seconds", "told"), [(3 * 86400, "3 days ago"), (86400, "1 day ago"), (7200, "2 h ago")])
def test_ages_are_plain_english(seconds, told):
    from fanfold.cli.text import age

    assert age(1e9, 1e9 + seconds) == told
