"""The energy probe, with the real CodeCarbon: its figures reach the run and every tracker, and nothing of it reaches training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fanfold
from fanfold.errors import SettingError
from fanfold.probes.energy import EnergyProbe
from paths import SRC as SOURCE

TOTALS = {"energy/kwh", "energy/cpu_kwh", "energy/ram_kwh", "energy/emissions_kg"}
POWERS = {"energy/cpu_w", "energy/ram_w"}


def until(true: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


def script(folder: Path, body: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script in which every attempt of any process to reach a network is written down."""
    (folder / "spy").mkdir(exist_ok=True)
    (folder / "spy" / "sitecustomize.py").write_text(textwrap.dedent(f"""
        import socket, sys
        def spy(event, args):
            if event == "socket.connect" and args[0].family != socket.AF_UNIX:
                with open({str(folder / "network")!r}, "a") as file: file.write(repr(args[1]) + "\\n")
        sys.addaudithook(spy)
    """))  # fmt: skip
    settings = {
        "PYTHONPATH": f"{folder / 'spy'}{os.pathsep}{SOURCE}", "FANFOLD_DIR": str(folder / "runs"), "FANFOLD_QUIET": "1",
        "FANFOLD_SYSTEM": "0", "HOME": str(folder), "TMPDIR": str(folder / "tmp"),
    }  # fmt: skip
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", "import fanfold, os, signal, sys, time\n" + textwrap.dedent(body)],
        env={**os.environ, **settings, **env}, cwd=folder, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def tensorboard(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (path for path in (run / "trackers" / "tensorboard").iterdir() if path.is_dir())
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_figures_reach_the_run_and_every_tracker_and_nothing_else_changes(tmp_path):
    done = script(tmp_path, """
        import random, threading, logging
        def state():
            return [random.getstate(), sys.stdout, sys.stderr, sys.excepthook, [signal.getsignal(n) for n in signal.valid_signals()],
                    logging.getLogger("codecarbon").handlers, "codecarbon" in sys.modules, dict(os.environ)]
        before = None
        run = fanfold.init("p", id="plain")
        before = state()
        run.finish()
        run = fanfold.init("p", id="r", trackers=["codecarbon", "tensorboard"],
                           tracker_kwargs={"codecarbon": {"measure_power_secs": 1, "country_iso_code": "FRA"}})
        assert run.trackers == ["tensorboard"]
        began, step = time.monotonic(), 0
        while len(run.summary) == 0 or "energy/kwh" not in fanfold.open(run.path).keys("system"):
            run.log({"loss": 1 / (step + 1)}, step=step); step += 1
            time.sleep(0.05)
            assert time.monotonic() - began < 60
        assert state() == before
        run.finish(timeout=60)
        print("same")
    """)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "same\n", "")
    run = fanfold.open(tmp_path / "runs" / "p" / "r")
    assert set(run.keys("system")) >= TOTALS | POWERS
    energy = run.series("energy/kwh").values.tolist()
    assert len(energy) >= 2  # at an interval, and at the end
    assert energy == sorted(energy)
    assert energy[0] > 0
    seen = tensorboard(run.path)
    for key in TOTALS | POWERS:
        series = run.series(key)
        assert sorted(step for step, _ in seen[key]) == sorted(series.steps.tolist())
        assert sorted(value for _, value in seen[key]) == pytest.approx(sorted(series.values.tolist()))
    assert max(step for step, _ in seen["energy/kwh"]) == max(step for step, _ in seen["loss"])
    assert not (tmp_path / "network").exists()
    assert (
        sorted(path.name for path in tmp_path.iterdir() if path.name not in ("runs", "spy", "tmp", ".cache", "cache", "config"))
        == []
    )
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_sums_are_those_of_the_parts_and_emissions_follow_the_country(tmp_path):
    found: dict[str, list[dict[str, float]]] = {"FRA": [], "POL": []}
    for country, samples in found.items():
        probe = EnergyProbe(samples.append, interval=0.6, arguments={"country_iso_code": country}, log=tmp_path / "log")
        probe.start()
        until(lambda samples=samples: len(samples) >= 2)
        probe.stop(timeout=30)
        assert len(samples) >= 3
    for samples in found.values():
        for one in samples:
            assert one["energy/kwh"] == pytest.approx(sum(one.get(f"energy/{part}_kwh", 0.0) for part in ("cpu", "gpu", "ram")))
        assert samples[0]["energy/ram_w"] > 0
    clean, dirty = (samples[-1]["energy/emissions_kg"] / samples[-1]["energy/kwh"] for samples in found.values())
    assert 0 < clean < dirty / 3


def test_a_missing_library_is_an_error_with_the_install_line(tmp_path):
    done = script(tmp_path, """
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name == "codecarbon": raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Absent())
        try: fanfold.init("p", energy=True)
        except fanfold.errors.MissingExtra as error: print(error)
    """)  # fmt: skip
    assert "needs codecarbon, which is not installed. Run: pip install 'fanfold[codecarbon]'" in done.stdout, done.stderr
    assert not (tmp_path / "runs").exists()


def test_arguments_that_cannot_work_are_said(runs_dir, tmp_path, caplog):
    with pytest.raises(SettingError, match="cannot travel"):
        fanfold.init("p", energy=True, tracker_kwargs={"codecarbon": {"x": object()}})
    assert not runs_dir.exists()
    probe = EnergyProbe(lambda _: pytest.fail("no figures"), arguments={"country": "FRA"}, log=tmp_path / "log")
    probe.start()
    until(lambda: "CodeCarbon does not know country. Known: online" in caplog.text)
    probe.stop()


def test_the_probe_ends_with_a_killed_training_despite_a_forked_child(tmp_path):
    done = script(tmp_path, """
        from fanfold.probes.energy import EnergyProbe
        probe = EnergyProbe(print)
        probe.start()
        holder = os.fork()
        if holder == 0: os.close(1); os.close(2); time.sleep(100); os._exit(0)
        print(probe.pid, holder, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)  # fmt: skip
    assert done.returncode == -9, done.stderr
    probe, holder = map(int, done.stdout.split())
    assert Path(f"/proc/{holder}").exists()
    try:
        until(lambda: not Path(f"/proc/{probe}").exists(), 30)
    finally:
        os.kill(holder, signal.SIGKILL)


def test_one_process_of_a_node_measures(runs_dir, monkeypatch):
    monkeypatch.setenv("FANFOLD_RANK", "1")
    monkeypatch.setenv("FANFOLD_WORLD_SIZE", "2")
    monkeypatch.setenv("FANFOLD_LOCAL_RANK", "1")
    monkeypatch.setenv("FANFOLD_ENERGY", "on")
    run = fanfold.init("p", id="r", system=False)
    assert not (run.path / "probes").exists()
    run.finish()


def test_a_probe_that_hangs_is_left_behind_in_time(tmp_path, caplog):
    probe = EnergyProbe(lambda _: None, log=tmp_path / "log")
    probe.start()
    pid = probe.pid
    os.kill(pid, signal.SIGSTOP)
    probe.stop(timeout=0.2)
    assert "did not give its last figures within 0.2 s" in caplog.text
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_what_a_probe_sends_is_counted_as_left_until_it_is_delivered(runs_dir):
    from fanfold.relay import Cursor
    from fanfold.relay.process import remaining

    run = fanfold.init("p", system=False)
    run._writer.row({"energy/kwh": 1.0, "energy/cpu_w": 2.0}, "dd", time_ns=1, step=0, origin="energy")
    run._writer.row({"system/cpu": 1.0}, "d", time_ns=1, step=None, origin="system")
    assert remaining(run.path, Cursor(run.path / "relay" / "x.cursor")) == 2
    run.finish()
    assert json.dumps(fanfold.open(run.path).keys("system")) == '["system/cpu", "energy/kwh", "energy/cpu_w"]'
