"""Fixtures every test may use: a place for runs, and a process that says everything anew."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import fanfold
from fanfold import errors

settings.register_profile("fanfold", deadline=None)  # a busy machine is not a failure
settings.load_profile("fanfold")
# Set before torch and numpy are imported, here and in every program: the threads of a small product spin while they wait for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Under nohup the first is ignored, in the background of a shell the second, and so they would be in every process we start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that take long go first: with whole files handed to test processes, a long one at the end would be waited for alone.
LONG = (
    "test_reporting_loops", "test_relay", "test_web", "test_examples", "test_reporting_kill", "test_tell", "test_docs", "test_web_axe",
    "test_launchers", "test_web_pages", "test_web_truth", "test_accelerate", "test_trainer", "test_tutorials", "test_reporting",
    "test_tracker_clearml", "test_tracker_neptune", "test_tracker_mlflow", "test_tracker_aim", "test_framework_transformers",
    "test_clickhouse_fleet", "test_web_workspace", "test_offline_sessions", "test_framework_lightning", "test_tracker_comet", "test_ops",
    "test_web_controls", "test_web_table", "test_tracker_mlflow_server", "test_follow",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Take no setting from the outside, and keep derived data out of the user's cache."""
    for name in [name for name in os.environ if name.startswith("FANFOLD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FANFOLD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    errors.notices.counts.clear()


@pytest.fixture
def runs_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder where init() puts its runs, and so do child processes."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("FANFOLD_DIR", str(folder))
    monkeypatch.setenv("FANFOLD_QUIET", "1")
    return folder


@pytest.fixture
def in_a_framework(runs_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A folder of its own to train in; runs that a framework's callback leaves open are ended after the test."""
    monkeypatch.setenv("FANFOLD_SYSTEM", "0")
    monkeypatch.chdir(tmp_path)
    yield
    from fanfold.frameworks import _session

    for run in list(_session._opened):
        run.finish(1.0)
    if fanfold.run is not None:
        fanfold.run.finish(1.0)


@pytest.fixture
def ends() -> Iterator[Any]:
    """What a test starts, it ends."""
    with ExitStack() as stack:
        yield lambda one: (stack.callback(one.close), one)[1]


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """Two nodes without a shared filesystem."""
    return [tmp_path / "node-a", tmp_path / "node-b"]


@pytest.fixture(scope="session")
def clickhouse_server(tmp_path_factory):
    """A real ClickHouse, one for each test process."""
    import clickhouse_server as real

    server = real.Server(tmp_path_factory.mktemp("clickhouse")).start()
    yield server
    server.stop()


@pytest.fixture
def clickhouse(clickhouse_server):
    """A database of the test's own."""
    import uuid

    import clickhouse_server as real

    database = real.Database([clickhouse_server], f"t{uuid.uuid4().hex[:12]}")
    yield database
    database.drop()


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Print what `make faults` counted; without a failure, write it to docs/guarantees.md.

    `make faults` replaces the tables; `pytest -m faults FILE …` replaces the rows that these files record.
    """
    import datetime
    import platform

    import fault_table

    found = fault_table.lines()
    if not found:
        return
    terminalreporter.write_sep("-", "faults")
    for line in found:
        terminalreporter.write_line(line)
    whole = config.args_source.name != "ARGS"
    part = config.option.keyword or any("::" in one for one in config.args)
    if config.option.markexpr == "faults" and exitstatus == 0 and not part:
        today = datetime.datetime.now(datetime.timezone.utc).date()
        fault_table.write(f"{today}, Python {platform.python_version()}, {os.cpu_count()} cores", whole=whole)
