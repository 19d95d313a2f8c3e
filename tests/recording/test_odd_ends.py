"""Odd things programs do with a run: flush after finish, close every descriptor, take facts out of the summary, huge steps."""

import subprocess
import sys
import textwrap
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np

import fanfold


def test_flush_after_finish_returns_at_once(tmp_path):
    run = fanfold.init("p", dir=tmp_path, quiet=True, system=False)
    run.log({"picture": fanfold.Image(np.zeros((4, 4)))})
    run.finish()
    began = time.monotonic()
    assert run.flush()
    assert time.monotonic() - began < 60  # by default it would wait an hour


def test_a_daemons_closed_descriptors_cost_nobodys_file(tmp_path):
    code = """
        import fanfold, os, threading
        run = fanfold.init("p", dir="runs", id="r", quiet=True, system=False)
        for step in range(100): run.log({"loss": step}, step=step)
        for one in threading.enumerate(): one.name == "fanfold-facts" and one.join()  # it has pipes to git open meanwhile
        os.closerange(3, 200)
        mine = [open(f"mine{n}", "wb") for n in range(20)]
        for step in range(100, 300): run.log({"loss": step}, step=step)
        for file in mine: file.close()
        run.finish()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [len((tmp_path / f"mine{n}").read_bytes()) for n in range(20)] == [0] * 20
    assert fanfold.open("r", dir=tmp_path / "runs").series("loss").steps.tolist() == list(range(300))


def test_a_fact_can_be_taken_out_of_the_summary(tmp_path, caplog):
    run = fanfold.init("p", dir=tmp_path, quiet=True, system=False)
    run.log({"loss": 1.0})
    run.summary.update({"best": 1, "note": "x", "more": 2})
    del run.summary["best"]
    assert run.summary.pop("note") == "x" and run.summary.pop("absent", 7) == 7
    assert dict(run.summary) == {"loss": 1.0, "more": 2} and not caplog.records
    run.summary.clear()
    assert "cannot be removed" in caplog.text
    run.finish()
    assert dict(fanfold.open(run.id, dir=tmp_path).summary) == {"loss": 1.0}


def test_a_step_too_large_for_any_machine_is_replaced_at_once(tmp_path, caplog):
    run = fanfold.init("p", dir=tmp_path, quiet=True, system=False)
    for step in (Decimal("1e999999"), Decimal("-1e999999"), Decimal("NaN"), Fraction(10**400), 1e300, 10**4000, 3 + 4j):
        run.log({"x": 1.0}, step=step)
    run.log({"x": 2.0}, step=Decimal(41))
    run.finish()
    assert fanfold.open(run.id, dir=tmp_path).series("x").steps.tolist() == [0, 1, 2, 3, 4, 5, 6, 41]


def test_at_exit_several_open_runs_end_together(tmp_path):
    code = """
        import fanfold, os, threading
        from fanfold.trackers import GeneralTracker

        both = threading.Barrier(2)

        class Slow(GeneralTracker):
            name, requires_logging_directory, tracker = "slow", False, None
            def start(self): pass
            def store_init_configuration(self, values): pass
            def log(self, values, step=None, **kwargs): pass
            def finish(self):
                both.wait(60)  # a tracker that ends only while the other run's ends too
                os.write(1, b"finished ")

        for id in ("a", "b"):
            fanfold.init("p", dir="runs", id=id, trackers=[Slow()], relay="thread", quiet=True, system=False).log({"loss": 1.0})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished finished ", "")


def test_facts_beyond_the_size_of_a_frame_are_left_out_and_the_run_ends(runs_dir, caplog):
    run = fanfold.init("p", config={"lr": 0.1}, system=False)
    run.config["blob"] = "x" * (65 << 20)
    run.notes = "n" * (40 << 20)
    run.tags = ["kept"]
    run.log({"loss": 1.0})
    run.finish()
    stored = fanfold.open(run.id)
    assert stored.status == "finished" and list(stored.tags) == ["kept"] and list(stored.series("loss").values) == [1.0]
    assert len(stored.notes) == 40 << 20 and stored.config == {"lr": 0.1}
    assert "the config of the run is 68 MB, over the limit of 67 MB" in caplog.text
