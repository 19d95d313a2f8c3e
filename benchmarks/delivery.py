"""Whether everything arrives, once: servers that go away, processes that are killed, ranks that are folded. Exact counts.

Each figure plays a real run and reads it back with the tracker's own reader, in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests" / "helpers"
KEYS = 10
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
Points = dict[str, list[tuple[int, float]]]


def offline(folder: Path) -> dict[str, str]:
    """Return the settings under which no library needs a network, and all write below one folder."""
    return {
        "HOME": str(folder), "WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "LINES": str(folder / "lines"),
        "GRADIO_ANALYTICS_ENABLED": "False", "FANFOLD_CACHE_DIR": str(folder / "cache"), "FANFOLD_DIR": str(folder / "runs"),
        "FANFOLD_QUIET": "1", "FANFOLD_SYSTEM": "0",
    }  # fmt: skip


class Play:
    """One run in a folder of its own: its training process, its relays, and what its trackers have in the end."""

    def __init__(self, work: Path, trackers: list[str], **env: str) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=work))
        self.trackers = trackers
        self.env = {**os.environ, **offline(self.folder), **env}
        self.run = self.folder / "runs" / "contract" / "contract-1"

    def source(self, body: str, **options: Any) -> str:
        given = {"id": "contract-1", "trackers": self.trackers, **options}
        values = f"values = lambda i: {{f'm{{k}}': i + k / 16 for k in range({KEYS})}}\n"
        head = f"import fanfold, os, sys, time\nrun = fanfold.init('contract', **{given!r})\n"
        return head + values + textwrap.dedent(body)

    def start(self, body: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", self.source(body)], env=self.env, cwd=self.folder, text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip

    def cursors(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.run.glob("relay/*.cursor"))]

    def kill_relays(self) -> None:
        for cursor in self.cursors():
            if cursor["owner"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(cursor["owner"]["pid"], signal.SIGKILL)

    def wait(self, true: Callable[[], Any], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def sync(self) -> None:
        subprocess.run([sys.executable, "-m", "fanfold", "sync", "contract-1"], env=self.env, cwd=self.folder, timeout=600,
                       check=False, capture_output=True)  # fmt: skip

    def logged(self) -> Points:
        """Return what the journal has: everything for which log() returned."""
        import fanfold

        run = fanfold.open(self.run)
        series = {f"m{k}": run.series(f"m{k}") for k in range(KEYS)}
        return {key: list(zip(one.steps.tolist(), one.values.tolist(), strict=True)) for key, one in series.items()}

    def seen(self, tracker: str) -> dict[str, Any]:
        """Return what a tracker has, by its own reader in a process of its own."""
        command = [sys.executable, str(HERE / "readers.py"), tracker, str(self.folder)]
        done = subprocess.run(command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            print(done.stderr[-2000:], file=sys.stderr)
            return {"scalars": {}, "status": "cannot be read", "runs": 0}
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def row(self, title: str, tracker: str, wanted: Points | None = None) -> list[str]:
        """Compare what was logged with what is there, point by point."""
        wanted, seen = wanted or self.logged(), self.seen(tracker)
        there = {key: Counter(map(tuple, seen["scalars"].get(key, []))) for key in wanted}
        right = {key: {(step, self.stored(tracker, value)) for step, value in points} for key, points in wanted.items()}
        missing = sum(len(right[key] - set(there[key])) for key in wanted)
        wrong = sum(count for key in wanted for point, count in there[key].items() if point not in right[key])
        twice = sum(count - 1 for key in wanted for point, count in there[key].items() if point in right[key])
        total = sum(map(len, wanted.values()))
        arrived = sum(sum(one.values()) for one in there.values())
        return [
            title,
            tracker,
            f"{total:,}",
            f"{arrived:,}",
            str(missing),
            str(twice),
            str(wrong),
            str(seen["runs"]),
            seen["status"] or "-",
        ]

    @staticmethod
    def stored(tracker: str, value: float) -> float:
        import struct

        return float(struct.unpack("f", struct.pack("f", value))[0]) if tracker == "tensorboard" else value


HEAD = ["", "tracker", "logged", "there", "missing", "twice", "wrong", "remote runs", "status"]


def outage(work: Path, quick: bool, *, relay_killed: bool) -> list[list[str]]:
    """Kill an MLflow server in the middle of a run, for 30 s; and the relay with it, if asked."""
    sys.path.insert(0, str(TESTS))
    from mlflow_server import MLflowServer

    down, steps = (4.0, 1000) if quick else (30.0, 6000)
    play = Play(work, ["mlflow"])
    server = MLflowServer(play.folder).start()
    play.env["MLFLOW_TRACKING_URI"] = server.url
    try:
        training = play.start(f"""
            for i in range({steps}):
                run.log(values(i), step=i)
                if i == {steps // 4}: print("there", flush=True)
                time.sleep(0.01)
            run.finish(timeout=300)
        """)  # fmt: skip
        assert training.stdout is not None
        training.stdout.readline()
        play.wait(lambda: any(cursor["delivered"] for cursor in play.cursors()), 120)
        server.kill()
        if relay_killed:
            play.kill_relays()
        time.sleep(down)
        server.start()
        training.communicate(timeout=600)
        play.sync()
        title = f"server gone for {down:g} s" + (", relay killed meanwhile" if relay_killed else "")
        return [play.row(title, "mlflow")]
    finally:
        server.kill()


def killed(work: Path, quick: bool, trackers: list[str], *, relay_too: bool) -> list[list[str]]:
    """Kill training in the middle of a step, and the relays with it, if asked; then see what the trackers have."""
    play = Play(work, trackers)
    training = play.start(f"""
        for i in range(1_000_000):
            run.log(values(i), step=i)
            if i == {500 if quick else 3000}: print("there", flush=True)
            time.sleep(0.001)
    """)  # fmt: skip
    assert training.stdout is not None
    training.stdout.readline()
    play.wait(lambda: len(play.cursors()) == len(trackers) and all(cursor["delivered"] for cursor in play.cursors()), 120)
    training.kill()
    if relay_too:
        play.kill_relays()
    training.communicate()
    if relay_too:
        play.sync()
    else:
        play.wait(lambda: all(cursor["closed"] and not cursor["owner"] for cursor in play.cursors()), 180)
    title = "training and relays killed, then fanfold sync" if relay_too else "training killed"
    logged = play.logged()
    return [play.row(title, tracker, logged) for tracker in trackers]


def ranks(work: Path, quick: bool, world: int) -> list[list[str]]:
    """Fold the ranks of a torchrun job into one remote run, and compare every step with the exact mean and sum."""
    steps = 100 if quick else 1000
    play = Play(work, ["tensorboard"], OMP_NUM_THREADS="1")
    script = play.folder / "train.py"
    body = (
        f"for i in range({steps}): run.log({{'m0': i + run.rank * 0.5, 'm1': i * run.rank}}, step=i)\nrun.finish(timeout=240)\n"
    )
    script.write_text(play.source(body, fold={"m0": "mean", "m1": "sum"}))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", "--rdzv-backend=c10d",
               "--rdzv-endpoint=localhost:0", str(script)]  # fmt: skip
    subprocess.run(command, env=play.env, cwd=play.folder, capture_output=True, timeout=600, check=False)
    mean, total = (world - 1) * 0.25, world * (world - 1) // 2
    wanted = {"m0": [(i, i + mean) for i in range(steps)], "m1": [(i, float(i * total)) for i in range(steps)]}
    return [play.row(f"{world} ranks folded under torchrun", "tensorboard", wanted)]


def figures(work: Path, quick: bool) -> list[list[str]]:
    """Play all of it; a figure that breaks leaves its name in the table, and the others go on."""
    trackers = list(TRACKERS)
    cases: list[tuple[str, Callable[[], list[list[str]]]]] = [
        ("outage", lambda: outage(work, quick, relay_killed=False)),
        ("outage, relay killed", lambda: outage(work, quick, relay_killed=True)),
        ("training killed", lambda: killed(work, quick, trackers, relay_too=False)),
        ("training and relays killed", lambda: killed(work, quick, trackers, relay_too=True)),
        ("2 ranks", lambda: ranks(work, quick, 2)),
        ("8 ranks", lambda: ranks(work, quick, 8)),
    ]
    rows: list[list[str]] = []
    for title, case in cases:
        try:
            rows += case()
        except (OSError, subprocess.SubprocessError, AssertionError, LookupError, ValueError) as error:
            rows.append([f"{title}: {type(error).__name__}", *["-"] * (len(HEAD) - 1)])
            print(f"{title}: {error}", file=sys.stderr)
    return rows
