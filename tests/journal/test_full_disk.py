"""A disk that is full, for a while or for good: nothing is written twice, everything is counted, facts are written later."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

import fanfold
import fault_table
from fanfold.cli import main
from marks import needs_root


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def script(code, folder, **options):
    env = {**os.environ, "FANFOLD_DIR": str(folder), "FANFOLD_SYSTEM": "0", "FANFOLD_QUIET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, env=env, **options
    )
    assert done.returncode == 0, done.stderr
    return done


def counted(what, wanted, steps, texts=None, *, dropped=0):
    """Enter calls into the fault table: each is there once, or counted as dropped."""
    texts = steps if texts is None else texts
    doubled = len(steps) - len(set(steps)) + len(texts) - len(set(texts))
    lost = max(0, wanted - dropped - len(set(steps))) + max(0, wanted - dropped - len(set(texts)))
    fault_table.record(what, points=wanted, lost=lost, doubled=doubled)


def log_under_a_limit(runs_dir, limit):
    """Log numbers and texts while each file may have so many bytes: writes are torn at every place of a frame."""
    code = f"""
        import fanfold, resource
        run = fanfold.init("p", id="limited")
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        for step in range(20_000):
            run.log({{"loss": 0.5 * step, "note": f"step {{step}}"}}, step=step)
        run.finish()
        print(run._writer.dropped)
    """
    done = script(code, runs_dir)
    stored = fanfold.open("limited", dir=runs_dir)
    texts = [point.step for point in stored.texts("note")]
    counted("writes torn by RLIMIT_FSIZE", 20_000, stored.series("loss").steps.tolist(), texts, dropped=stored.dropped)
    assert len(stored.journals) > 10  # the limit was met again and again
    assert stored.series("loss").steps.tolist() == list(range(20_000))
    assert [point.text for point in stored.texts("note")] == [f"step {step}" for step in range(20_000)]
    assert (done.stdout.split(), stored.dropped) == (["0"], 0)


def test_calls_with_numbers_and_text_are_there_once_under_a_file_size_limit(runs_dir):
    log_under_a_limit(runs_dir, 100_001)


@pytest.mark.faults
@pytest.mark.parametrize("limit", range(100_002, 100_014))
def test_calls_are_there_once_wherever_a_write_is_torn(runs_dir, limit):
    log_under_a_limit(runs_dir, limit)


def test_numbers_alone_are_there_once_under_a_file_size_limit(runs_dir):
    code = """
        import fanfold, resource
        run = fanfold.init("p", id="limited")
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_001, 50_001))
        for step in range(20_000):
            run.log({"loss": 0.5 * step, "n": step}, step=step)
        run.finish()
    """
    script(code, runs_dir)
    stored = fanfold.open("limited", dir=runs_dir)
    assert stored.series("n").values.tolist() == list(range(20_000)) and stored.dropped == 0


def log_on_a_full_disk(small_disk, ballast):
    """Log until the disk is full, and beyond."""
    code = """
        import fanfold, os
        run = fanfold.init("p", id="full")
        for step in range(20_000):
            run.log({"loss": 0.5 * step, "note": f"step {step}"}, step=step)
        assert run._writer.dropped
        os.truncate(os.environ["FANFOLD_DIR"] + "/ballast", 0)
        run.finish()
    """
    (small_disk / "ballast").write_bytes(bytes(ballast))
    script(code, small_disk)
    stored = fanfold.open("full", dir=small_disk)
    steps = stored.series("loss").steps.tolist()
    texts = [point.step for point in stored.texts("note")]
    counted("a full disk (what is dropped is counted by the run itself)", 20_000, steps, texts, dropped=stored.dropped)
    assert len(steps) == len(set(steps)) and steps == texts
    assert 0 < len(steps) < 20_000
    assert len(steps) + stored.dropped == 20_000
    assert stored.status == "finished"


@needs_root
def test_on_a_full_disk_a_call_is_either_recorded_or_counted(small_disk):
    log_on_a_full_disk(small_disk, 300_000)


@needs_root
@pytest.mark.faults
@pytest.mark.parametrize("ballast", range(100_000, 700_000, 75_000))
def test_on_disks_of_many_sizes_a_call_is_either_recorded_or_counted(small_disk, ballast):
    log_on_a_full_disk(small_disk, ballast)


FILLED = """
        import fanfold, os, numpy as np
        run = fanfold.init("p", id="filled")
        ballast = os.environ["FANFOLD_DIR"] + "/ballast"
        with open(ballast, "wb", buffering=0) as file:
            try:
                while True: file.write(bytes(64))
            except OSError: pass
        while not run._writer.dropped: run.log({"x": 1.0}, step=0)
        before = run._writer.dropped
"""


@needs_root
def test_an_image_logged_on_a_full_disk_is_counted_as_dropped_once(small_disk):
    code = (
        FILLED
        + """
        for step in range(5): run.log({"picture": fanfold.Image(np.full((64, 64, 3), step, np.uint8))}, step=step)
        for step in range(5): run.log({"y": 1.0, "picture": fanfold.Image(np.full((64, 64, 3), step, np.uint8))}, step=step)
        run.flush()
        print(run._writer.dropped - before)
        os.unlink(ballast)
        run.finish()
    """
    )
    done = script(code, small_disk)
    stored = fanfold.open("filled", dir=small_disk)
    assert int(done.stdout) == 10
    assert done.stderr.count("could not write to") == 1
    assert stored.damaged == 0 and not any((stored.path / "blobs").rglob("*.png"))


def test_an_image_that_finds_no_room_beside_its_row_is_counted_and_marked(runs_dir):
    code = """
        import fanfold, resource, numpy as np
        run = fanfold.init("p", id="limited")
        noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        for step in range(3): run.log({"y": 1.0, "picture": fanfold.Image(noise)}, step=step)
        run.finish()
    """
    done = script(code, runs_dir)
    stored = fanfold.open("limited", dir=runs_dir)
    assert (stored.dropped, len(stored.lost_values), stored.series("y").steps.tolist()) == (3, 3, [0, 1, 2])
    assert "3 log call(s)" in done.stderr and done.stderr.count("could not be recorded: File too large") == 1


@needs_root
def test_a_call_with_plain_and_device_values_on_a_full_disk_is_counted_once(small_disk):
    code = (
        FILLED
        + """
        import jax.numpy as jnp
        for step in range(7): run.log({"plain": 1.0, "late": jnp.float32(step), "count": jnp.int32(step)}, step=step)
        for step in range(7): run.log({"late": jnp.float32(step), "picture": fanfold.Image(np.zeros((8, 8, 3)))}, step=step)
        run.flush()
        print(run._writer.dropped - before)
        os.unlink(ballast)
        run.finish()
    """
    )
    done = script(code, small_disk)
    assert int(done.stdout) == 14


@needs_root
def test_facts_written_while_the_disk_is_full_are_written_when_there_is_space(small_disk):
    code = """
        import fanfold, os, time
        run = fanfold.init("p", id="later", config={"lr": 1})
        ballast = os.environ["FANFOLD_DIR"] + "/ballast"
        with open(ballast, "wb", buffering=0) as file:
            try:
                while True: file.write(bytes(4096))
            except OSError: pass
        while not run._writer.dropped: run.log({"x": 1.0}, step=0)
        run.config["lr"] = 2
        run.config["seed"] = 7
        run.tags = ["a"]; run.tags = ["b"]
        run.name = "renamed"; run.notes = "why"
        run.summary["best"] = 0.25
        run.define_metric("x", summary="min"); run.define_metric("x", summary="max")
        for n in range(5): run.alert(f"alert {n}")
        run.artifact(ballast)  # no room for a copy: one warning
        os.unlink(ballast)
        run.log({"y": 5.0}, step=1)
        until = time.monotonic() + 30
        while run._writer._held and time.monotonic() < until: time.sleep(0.05)
        os.kill(os.getpid(), 9)
    """
    env = {**os.environ, "FANFOLD_DIR": str(small_disk), "FANFOLD_SYSTEM": "0", "FANFOLD_QUIET": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == -9, done.stderr
    assert "could not store an artifact" in done.stderr and "No space left" in done.stderr
    stored = fanfold.open("later", dir=small_disk)
    assert stored.config == {"lr": 2, "seed": 7}
    assert (stored.tags, stored.name, stored.notes, stored.assigned) == (["b"], "renamed", "why", {"best": 0.25})
    assert stored.metrics["x"]["summary"] == "max" and len(stored.metrics) == 1
    assert [alert["title"] for alert in stored.alerts] == [f"alert {n}" for n in range(5)]


def test_a_fact_that_can_never_be_written_does_not_stop_the_numbers(runs_dir):
    code = """
        import fanfold, resource, time
        run = fanfold.init("p", id="large")
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        run.config["huge"] = "x" * 200_000
        run.alert("kept")
        for step in range(60):
            run.log({"x": 1.0 * step}, step=step)
            time.sleep(0.05)
        run.finish()
    """
    script(code, runs_dir)
    stored = fanfold.open("large", dir=runs_dir)
    assert stored.status == "finished" and len(stored.series("x")) > 20
    assert len(stored.series("x")) + stored.dropped == 60
    assert [alert["title"] for alert in stored.alerts] == ["kept"]
    assert len(stored.journals) < 12  # it is not tried with every call


def test_a_thousand_alerts_wait_and_no_more(tmp_path, caplog):
    from fanfold.journal import Kind, Writer

    writer = Writer(tmp_path / "journal", {"format": [1, 0], "rank": 0, "role": "main"})
    shutil.rmtree(tmp_path / "journal")
    (tmp_path / "journal").write_text("in the way")
    writer.fail(writer.sheet, OSError("gone"))
    for n in range(3000):
        writer.append((Kind.EVENT, {"event": "alert", "n": n}), keep=True)
        writer.append((Kind.INFO, {"t": n, "name": str(n)}), keep=True)
    assert len(writer._held) == 1024
    assert "The oldest are lost" in caplog.text
    os.unlink(tmp_path / "journal")
    writer._retry_at = 0.0
    assert writer.append((Kind.EVENT, {"event": "alert", "n": 3000}), keep=True)
    assert not writer._held


@needs_root
@pytest.mark.parametrize(
    ("last", "status"), [("", "finished"), ("raise RuntimeError('no')", "failed"), ("os.kill(os.getpid(), 15)", "preempted")]
)
def test_space_that_returns_just_before_the_end_is_used_without_finish(small_disk, last, status):
    code = f"""
        import fanfold, os
        run = fanfold.init("p", id="late", config={{"a": 1}})
        filler = os.environ["FANFOLD_DIR"] + "/filler"
        with open(filler, "wb", buffering=0) as file:
            try:
                while True:
                    if file.write(bytes(4096)) < 4096: break
            except OSError:
                pass
        for step in range(3000):
            run.log({{"loss": 0.5 * step}}, step=step)
        run.summary["best"] = 1
        run.config["b"] = 2
        run.alert("look here")
        os.unlink(filler)
        {last}
    """
    env = {**os.environ, "FANFOLD_DIR": str(small_disk), "FANFOLD_SYSTEM": "0", "FANFOLD_QUIET": "1"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, env=env)
    stored = fanfold.open("late", dir=small_disk)
    assert (stored.status, stored.config, stored.summary["best"]) == (status, {"a": 1, "b": 2}, 1)
    assert [alert["title"] for alert in stored.alerts] == ["look here"]
    assert len(stored.series("loss")) + stored.dropped == 3000


@needs_root
def test_a_copy_that_finds_no_room_is_not_there_and_says_so_in_a_line(small_disk, capsys):
    with fanfold.init("llm", dir=small_disk, id="r", system=False, quiet=True) as run:
        for step in range(50):
            run.log({"page": fanfold.Html(os.urandom(6_000).hex())}, step=step)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert main(["cp", "r", "--project", "other", "--dir", str(small_disk)]) != 0
    said = capsys.readouterr().err
    assert "No space left on device" in said and "There is no copy" in said and len(said) < 500
    assert [path.name for path in (small_disk / "other").iterdir()] == []
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert main(["mv", "r", "--project", "a/b ☃", "--dir", str(small_disk)]) == 0  # one rename, which needs no room
    assert fanfold.open("r", dir=small_disk).project == "a/b ☃"
