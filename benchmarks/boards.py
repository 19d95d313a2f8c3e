"""The dashboards measured side by side: how each gets the same data, is served, and shows that its charts hold that data.

Also a program: `python benchmarks/boards.py NAME FOLDER RUNS METRICS STEPS` writes the data of one, so that each library has its own process.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
BEGAN = 1_790_000_000
PROJECT = "bench"


@dataclass(frozen=True)
class Size:
    """How much every tool is given: the same curves, with one point out of line each way in every series."""

    runs: int = 100
    metrics: int = 20
    steps: int = 1000

    @property
    def names(self) -> list[str]:
        return [f"{('train', 'train', 'val', 'val')[i // 5 % 4]}/m{i:02d}" for i in range(self.metrics)]

    @property
    def points(self) -> int:
        return self.runs * self.metrics * self.steps

    def values(self, run: int) -> Any:
        """Return the values of one run, a row per step."""
        import numpy as np

        noise = np.random.default_rng(run)
        step, metric = np.arange(self.steps)[:, None], np.arange(self.metrics)[None, :]
        curve = (1 + 0.02 * run + 0.1 * metric) * np.exp(-step / (150 + 10 * metric)) + 0.1
        table = curve + noise.normal(scale=0.02, size=(self.steps, self.metrics))
        at = noise.permuted(np.tile(np.arange(self.steps)[:, None], (1, self.metrics)), axis=0)[:2]
        table[at[0], np.arange(self.metrics)] += 0.3
        table[at[1], np.arange(self.metrics)] -= 0.3
        return table

    def config(self, run: int) -> dict[str, float]:
        return {"lr": 1e-4 * (run + 1), "batch": 2 ** (run % 6)}


class Board:
    """One tool: its writer, its server, its address with charts, and the words by which a browser knows they are drawn."""

    name = ""
    package = ""
    drawn = ""  # JavaScript: a function of {runs, metrics, last} that returns how many visible charts hold their data
    plot = ""  # where the pointer moves
    waits = 4  # so many charts at least
    note = ""

    def write(self, dir: Path, size: Size) -> None:
        raise NotImplementedError

    def env(self, dir: Path) -> dict[str, str]:
        return {}

    def command(self, dir: Path, port: int) -> list[str]:
        raise NotImplementedError

    def url(self, base: str, size: Size) -> str:
        return base

    def ready(self, base: str, size: Size) -> bool:
        """Say whether the server has read what it must read before the first page."""
        return True


VISIBLE = "const seen = e => { const r = e.getBoundingClientRect(); return r.height > 60 && r.width > 60 && r.top < innerHeight && r.bottom > 0; };"


class Fanfold(Board):
    name = package = "fanfold"
    plot = "figure .plot"
    note = "all visible charts, all runs"
    # A chart without data is one colour, and a chart is drawn in one go: ink in its middle column means that its lines are there.
    drawn = """({runs}) => { SEEN
      const all = [...document.querySelectorAll('figure[data-key]')].filter(seen);
      const done = all.filter(figure => {
        if (figure.inked) return true; // looked at once: reading pixels back costs the page time
        if (!figure.dataset.painted || !figure.getAttribute('aria-label').includes(`: ${runs} run`)) return false;
        const canvas = figure.querySelector('canvas');
        const data = canvas.getContext('2d').getImageData(canvas.width >> 1, 0, 1, canvas.height).data;
        for (let i = 4; i < data.length; i++) if (data[i] !== data[i % 4]) return figure.inked = true;
        return false; });
      return done.length === all.length ? done.length : 0; }""".replace("SEEN", VISIBLE)

    def write(self, dir: Path, size: Size) -> None:
        import fanfold

        for run in range(size.runs):
            one = fanfold.init(
                PROJECT, dir=dir, id=f"run{run:03d}", name=f"run{run:03d}", config=size.config(run), system=False, quiet=True
            )
            for step, row in enumerate(size.values(run).tolist()):
                one.log(dict(zip(size.names, row, strict=True)), step=step)
            one.finish()

    def command(self, dir: Path, port: int) -> list[str]:
        return [str(BIN / "python"), "-m", "fanfold", "ui", "--dir", str(dir), "--port", str(port), "--quiet", "--no-token"]


class TensorBoard(Board):
    name = "TensorBoard"
    package = "tensorboard"
    plot = "scalar-card line-chart .series-view"
    note = "at least 4 charts, all runs"
    # The table beneath a chart names the last step of each run as soon as the chart has its data.
    drawn = """({last}) => { SEEN
      return [...document.querySelectorAll('scalar-card')].filter(card => seen(card) && card.querySelector('line-chart canvas, line-chart svg')
        && !card.querySelector('mat-spinner') && card.textContent.replaceAll(',', '').includes(String(last))).length; }""".replace(
        "SEEN", VISIBLE
    )

    def write(self, dir: Path, size: Size) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for run in range(size.runs):
            writer = SummaryWriter(str(dir / f"run{run:03d}"), max_queue=10_000, flush_secs=600)
            for step, row in enumerate(size.values(run).tolist()):
                for name, value in zip(size.names, row, strict=True):
                    writer.add_scalar(name, value, step, walltime=BEGAN + run * 100 + step)
            writer.close()

    def command(self, dir: Path, port: int) -> list[str]:
        return [str(BIN / "tensorboard"), "--logdir", str(dir), "--port", str(port), "--host", "127.0.0.1"]

    def ready(self, base: str, size: Size) -> bool:
        tags = json.loads(get(f"{base}data/plugin/scalars/tags") or "{}")
        return len(tags) == size.runs and all(self._last(base, run, size) == size.steps - 1 for run in tags)

    def _last(self, base: str, run: str, size: Size) -> int:
        asked = urllib.parse.urlencode({"run": run, "tag": size.names[-1]})
        rows = json.loads(get(f"{base}data/plugin/scalars/scalars?{asked}") or "[]")
        return rows[-1][1] if rows else -1


class MLflow(Board):
    name = "MLflow"
    package = "mlflow"
    plot = ".js-plotly-plot .nsewdrag"
    note = "at least 4 charts, 10 of the runs (its default)"
    drawn = """() => { SEEN
      return [...document.querySelectorAll('.js-plotly-plot')].filter(plot => seen(plot) && plot.querySelector('.trace')).length; }""".replace(
        "SEEN", VISIBLE
    )

    def env(self, dir: Path) -> dict[str, str]:
        return {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}

    def _uri(self, dir: Path) -> str:
        return f"sqlite:///{dir}/mlflow.db"

    def write(self, dir: Path, size: Size) -> None:
        """Make runs through the client, and put the points into its tables: log_batch takes eight minutes for the same rows."""
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        client = MlflowClient(self._uri(dir))
        experiment = client.create_experiment(PROJECT, artifact_location=(dir / "artifacts").as_uri())
        (dir / "experiment").write_text(experiment)
        store = SqlAlchemyStore(self._uri(dir), (dir / "artifacts").as_uri())
        for run in range(size.runs):
            id = client.create_run(experiment, run_name=f"run{run:03d}").info.run_id
            client.log_batch(id, params=[Param(name, str(value)) for name, value in size.config(run).items()])
            self._points(store, id, run, size)
            client.set_terminated(id)

    def _points(self, store: Any, id: str, run: int, size: Size) -> None:
        from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric
        from sqlalchemy import insert

        rows = [
            {
                "key": name,
                "value": value,
                "timestamp": (BEGAN + run * 100 + step) * 1000,
                "step": step,
                "is_nan": False,
                "run_uuid": id,
            }
            for step, row in enumerate(size.values(run).tolist())
            for name, value in zip(size.names, row, strict=True)
        ]
        with store.ManagedSessionMaker() as session:
            session.execute(insert(SqlMetric), rows)
            session.execute(insert(SqlLatestMetric), rows[-size.metrics :])

    def command(self, dir: Path, port: int) -> list[str]:
        return [str(BIN / "mlflow"), "server", "--backend-store-uri", self._uri(dir), "--host", "127.0.0.1", "--port", str(port)]

    def url(self, base: str, size: Size) -> str:
        return f"{base}#/experiments/{self.experiment}/runs?compareRunsMode=CHART"

    experiment = "1"


class Aim(Board):
    name = "Aim"
    package = "aim"
    plot = ".LineChart svg, .LineChart__container svg, .VisualizerArea svg, svg"
    note = "5 charts, all runs, chosen in the address"
    charts = 5
    drawn = """({runs, metrics}) => {
      const lines = document.querySelectorAll('path.Line').length;
      return lines >= runs * Math.min(5, metrics) ? Math.floor(lines / runs) : 0; }"""

    def write(self, dir: Path, size: Size) -> None:
        from aim import Run

        for run in range(size.runs):
            one = Run(
                repo=str(dir),
                experiment=PROJECT,
                system_tracking_interval=None,
                log_system_params=False,
                capture_terminal_logs=False,
            )
            one.name = f"run{run:03d}"
            one["hparams"] = size.config(run)
            for step, row in enumerate(size.values(run).tolist()):
                one.track(dict(zip(size.names, row, strict=True)), step=step)
            one.close()

    def command(self, dir: Path, port: int) -> list[str]:
        return [str(BIN / "aim"), "up", "--repo", str(dir), "--host", "127.0.0.1", "--port", str(port), "--yes"]

    def url(self, base: str, size: Size) -> str:
        """Choose the first charts in the address: its page opens empty."""
        chosen = [
            {"label": name, "group": name, "color": "#18AB6D", "type": "metrics", "value": {"option_name": name, "context": None}}
            for name in size.names[: self.charts]
        ]
        select = {"options": chosen, "query": "", "advancedMode": False, "advancedQuery": ""}
        grouping = {"color": ["run.hash"], "stroke": [], "chart": ["name"]}
        return f"{base}metrics?select={self._packed(select)}&grouping={self._packed(grouping)}"

    def _packed(self, what: Any) -> str:
        text = urllib.parse.quote(json.dumps(what, separators=(",", ":")), safe=";,/?:@&=+$-_.!~*'()#")
        return "O-" + base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


class Trackio(Board):
    name = "Trackio"
    package = "trackio"
    plot = "canvas, svg.marks"
    note = "at least 4 charts, all runs"
    drawn = "() => { SEEN return [...document.querySelectorAll('canvas, svg.marks')].filter(seen).length; }".replace(
        "SEEN", VISIBLE
    )

    def env(self, dir: Path) -> dict[str, str]:
        return {
            "TRACKIO_DIR": str(dir),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "GRADIO_ANALYTICS_ENABLED": "False",
        }

    def write(self, dir: Path, size: Size) -> None:
        from datetime import datetime, timezone

        from trackio.sqlite_storage import SQLiteStorage

        for run in range(size.runs):
            times = [datetime.fromtimestamp(BEGAN + run * 100 + step, timezone.utc).isoformat() for step in range(size.steps)]
            rows = [dict(zip(size.names, row, strict=True)) for row in size.values(run).tolist()]
            SQLiteStorage.bulk_log(
                PROJECT, f"run{run:03d}", rows, steps=list(range(size.steps)), timestamps=times, config=size.config(run)
            )

    def command(self, dir: Path, port: int) -> list[str]:
        code = f"import trackio; trackio.show({PROJECT!r}, open_browser=False, block_thread=True, host='127.0.0.1', server_port={port})"
        return [str(BIN / "python"), "-c", code]

    def url(self, base: str, size: Size) -> str:
        return f"{base}?project={PROJECT}"


BOARDS: dict[str, Board] = {board.name: board for board in (Fanfold(), MLflow(), TensorBoard(), Aim(), Trackio())}


# Writing once, serving for as long as it is looked at


def written(board: Board, data: Path, size: Size) -> tuple[Path, float]:
    """Return the folder of a board's data and the seconds of CPU its writing took; what an earlier run wrote is taken as it is."""
    dir = data / f"{board.name.lower()}-{size.runs}x{size.metrics}x{size.steps}"
    mark = dir.with_suffix(".seconds")
    if not mark.exists():
        shutil.rmtree(dir, ignore_errors=True)  # what an interrupted run left
        dir.mkdir(parents=True)
        began = _children()
        sizes = [str(one) for one in (size.runs, size.metrics, size.steps)]
        with (dir.with_suffix(".log")).open("w") as log:
            command = [sys.executable, str(Path(__file__)), board.name, str(dir), *sizes]
            subprocess.run(command, check=True, env={**os.environ, **board.env(dir)}, stdout=log, stderr=log)
        mark.write_text(f"{_children() - began:.1f}")
    return dir, float(mark.read_text())


def _children() -> float:
    """Return the CPU seconds of the processes we waited for: what else the machine does makes no difference to them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def get(url: str, timeout: float = 30) -> bytes:
    """Return what an address answers, nothing when there is no answer yet."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.read()
    except (urllib.error.URLError, OSError):
        return b""


@contextlib.contextmanager
def served(board: Board, dir: Path, size: Size | None = None, *, limit: float = 180) -> Iterator[str]:
    """Start a board's server, yield its address once it answers and has read data of this size ("" when it does not), and end it."""
    port = free_port()
    if isinstance(board, MLflow):
        board.experiment = (dir / "experiment").read_text()
    with (dir.parent / f"{dir.name}.server.log").open("w") as log:
        env = {**os.environ, **board.env(dir)}
        process = subprocess.Popen(board.command(dir, port), stdout=log, stderr=log, env=env, cwd=dir, start_new_session=True)
    try:
        base, end = f"http://127.0.0.1:{port}/", time.monotonic() + limit
        while not (get(base) and (size is None or board.ready(base, size))):
            if time.monotonic() > end or process.poll() is not None:
                base = ""
                break
            time.sleep(0.5)
        yield base
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    name, folder, *numbers = sys.argv[1:]
    BOARDS[name].write(Path(folder), Size(*map(int, numbers)))
