"""The libraries measured beside fanfold, each behind the same four calls.

Everything is local: no server, no network. Settings are each library's defaults except for what makes it quiet, offline
and not collect anything by itself (console, hardware, git), which only makes it faster.
"""

from __future__ import annotations

import csv
import json
import os
import sqlite3
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Values = dict[str, float]


class Peer:
    """One library: open a run, log to it, finish it, and count what is on disk."""

    name = ""
    package = ""  # what to ask for its version, where it is not the name
    module = ""  # what a user imports
    calls = 5000  # cap for one latency run; lower where finish() would take minutes

    def env(self, dir: Path) -> dict[str, str]:
        """Say what to set before the library is imported."""
        return {}

    def open(self, dir: Path) -> None:
        raise NotImplementedError

    def log(self, values: Values, step: int) -> None:
        # Libraries whose own method has this signature put it here in open(): no wrapper is timed.
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    def count(self, dir: Path, key: str) -> int:
        """Count the points of one key that a reader finds on disk."""
        raise NotImplementedError


class Fanfold(Peer):
    name = package = module = "fanfold"

    def open(self, dir: Path) -> None:
        import fanfold

        self.run = fanfold.init(project="bench", dir=dir, system=False)
        self.log = self.run.log

    def finish(self) -> None:
        self.run.finish()

    def count(self, dir: Path, key: str) -> int:
        import fanfold

        return len(fanfold.runs(dir=dir)[0].series(key).steps)


class JsonLines(Peer):
    """The floor: what a careful user would write by hand, one JSON line and a flush for each call."""

    name = "JSON lines"
    module = "json"

    def open(self, dir: Path) -> None:
        self.file = (dir / "metrics.jsonl").open("a")

    def log(self, values: Values, step: int) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()

    def finish(self) -> None:
        self.file.close()

    def count(self, dir: Path, key: str) -> int:
        lines = (dir / "metrics.jsonl").read_text().splitlines(keepends=True)
        return sum(key in json.loads(line) for line in lines if line.endswith("\n"))


class Trackio(Peer):
    name = "Trackio"
    package = module = "trackio"

    def env(self, dir: Path) -> dict[str, str]:
        return {"TRACKIO_DIR": str(dir), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def open(self, dir: Path) -> None:
        import trackio

        self.run = trackio.init(project="bench", embed=False, auto_log_gpu=False, auto_log_cpu=False)
        self.log = self.run.log

    def finish(self) -> None:
        import trackio

        trackio.finish()

    def count(self, dir: Path, key: str) -> int:
        rows = (row for db in dir.glob("bench*.db") for row in query(db, "select metrics from metrics"))
        return sum(key in json.loads(text) for (text,) in rows)


class SwanLab(Peer):
    name = "SwanLab"
    package = module = "swanlab"

    def env(self, dir: Path) -> dict[str, str]:
        home = str(dir / "home")
        return {"SWANLAB_MODE": "offline", "SWANLAB_SAVE_DIR": home, "SWANLAB_TERMINAL_PROXY_TYPE": "none"}

    def open(self, dir: Path) -> None:
        import swanlab

        self.run = swanlab.init(project="bench", mode="offline", log_dir=str(dir / "log"))
        self.log = self.run.log

    def finish(self) -> None:
        import swanlab

        swanlab.finish()

    def count(self, dir: Path, key: str) -> int:
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record
        from swanlab.sdk.internal.core_python.store import DataStoreReader

        found = 0
        for file in (dir / "log").rglob("*.swanlab"):
            reader = DataStoreReader()
            reader.open(file)
            found += sum(Record.FromString(data).scalar.key == key for data in reader)
        return found


class Wandb(Peer):
    name = "wandb"
    package = module = "wandb"

    def env(self, dir: Path) -> dict[str, str]:
        places = {f"WANDB_{what}_DIR": str(dir / what.lower()) for what in ("CACHE", "CONFIG", "DATA")}
        quiet = {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB__DISABLE_STATS": "true"}
        return {"WANDB_MODE": "offline", "WANDB_DIR": str(dir), "WANDB_ERROR_REPORTING": "false", **places, **quiet}

    def open(self, dir: Path) -> None:
        import wandb

        self.run = wandb.init(project="bench")
        self.log = self.run.log

    def finish(self) -> None:
        self.run.finish()

    def count(self, dir: Path, key: str) -> int:
        from wandb.proto.wandb_internal_pb2 import Record

        records = (Record.FromString(data) for file in dir.rglob("*.wandb") for data in leveldb(file.read_bytes()))
        items = (item for record in records for item in record.history.item)
        return sum(key in (item.key, *item.nested_key) for item in items)


class MLflow(Peer):
    name = "MLflow"
    package = module = "mlflow"
    calls = 1000

    def env(self, dir: Path) -> dict[str, str]:
        return {"MLFLOW_TRACKING_URI": f"sqlite:///{dir}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true"}

    def open(self, dir: Path) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.start_run(run_name="bench")
        self.log = mlflow.log_metrics

    def finish(self) -> None:
        self.mlflow.end_run()

    def count(self, dir: Path, key: str) -> int:
        return query(dir / "mlflow.db", "select count(*) from metrics where key = ?", key)[0][0]


class MLflowAsync(MLflow):
    name = "MLflow async"

    def open(self, dir: Path) -> None:
        super().open(dir)
        del self.log

    def log(self, values: Values, step: int) -> None:
        self.mlflow.log_metrics(values, step, synchronous=False)

    def finish(self) -> None:
        self.mlflow.flush_async_logging()
        self.mlflow.end_run()


class TensorBoard(Peer):
    name = "TensorBoard"
    package = "tensorboard"
    module = "torch.utils.tensorboard"

    def open(self, dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(dir))

    def log(self, values: Values, step: int) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def finish(self) -> None:
        self.writer.close()

    def count(self, dir: Path, key: str) -> int:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(dir), size_guidance={"scalars": 0}).Reload()
        return len(events.Scalars(key)) if key in events.Tags()["scalars"] else 0


class TensorBoardX(TensorBoard):
    name = "tensorboardX"
    package = module = "tensorboardX"

    def open(self, dir: Path) -> None:
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(dir))


class Aim(Peer):
    name = "Aim"
    package = module = "aim"

    def open(self, dir: Path) -> None:
        from aim import Run

        off = {"system_tracking_interval": None, "log_system_params": False, "capture_terminal_logs": False}
        self.run = Run(repo=str(dir), experiment="bench", **off)

    def log(self, values: Values, step: int) -> None:
        self.run.track(values, step=step)

    def finish(self) -> None:
        self.run.close()

    def count(self, dir: Path, key: str) -> int:
        from aim import Repo

        Repo(str(dir))._recreate_index()  # until then no query sees a run at all
        found = Repo(str(dir)).query_metrics(f"metric.name == {key!r}", report_mode=0).iter()
        return sum(len(metric.data.numpy()[0]) for metric in found)


class DVCLive(Peer):
    name = "DVCLive"
    package = module = "dvclive"
    calls = 1000

    def env(self, dir: Path) -> dict[str, str]:
        return {"DVC_NO_ANALYTICS": "1", "DVC_STUDIO_OFFLINE": "true"}

    def open(self, dir: Path) -> None:
        from dvclive import Live

        self.live = Live(dir=str(dir / "live"), save_dvc_exp=False, dvcyaml=None, report=None, monitor_system=False)

    def log(self, values: Values, step: int) -> None:
        self.live.step = step  # not next_step(): it reads every file again each time
        for key, value in values.items():
            self.live.log_metric(key, value)

    def finish(self) -> None:
        self.live.end()

    def count(self, dir: Path, key: str) -> int:
        with (dir / "live/plots/metrics" / f"{key}.tsv").open() as file:
            return sum(1 for _ in csv.DictReader(file, delimiter="\t"))


def query(db: Path, sql: str, *args: str) -> list[tuple[Any, ...]]:
    """Read from a SQLite file as its writer left it, its write-ahead log included."""
    connection = sqlite3.connect(db)
    try:
        return connection.execute(sql, args).fetchall()
    finally:
        connection.close()


def leveldb(data: bytes, *, header: int = 7, block: int = 32768) -> Iterator[bytes]:
    """Walk the records of a wandb file (LevelDB's log format after a header); stop where the writer was cut off."""
    at, parts = header, b""
    while at + 7 <= len(data):
        room = block - at % block
        if room < 7:
            at += room
            continue
        crc, size, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + 7 : at + 7 + size]
        if zlib.crc32(bytes([kind]) + part) != crc:
            return
        at += 7 + size
        parts = part if kind in (1, 2) else parts + part  # 1 whole, 2 first, 3 middle, 4 last
        if kind in (1, 4):
            yield parts


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Fanfold(),
        JsonLines(),
        Trackio(),
        SwanLab(),
        Wandb(),
        MLflowAsync(),
        TensorBoard(),
        TensorBoardX(),
        Aim(),
        DVCLive(),
        MLflow(),
    )
}


def settle_in(peer: Peer, dir: Path) -> None:
    """Prepare this process for one library: a home of its own, and its environment."""
    dir.mkdir(parents=True, exist_ok=True)
    os.environ.update({"HOME": str(dir), **peer.env(dir)})
    os.chdir(dir)
