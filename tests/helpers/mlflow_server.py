"""A real MLflow server on a local port, which tests may kill and restart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class MLflowServer:
    """One server over one folder, on the same port each time it starts."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder = folder
        self.prefix = prefix
        self.url = f"http://127.0.0.1:{_free_port()}{prefix}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> MLflowServer:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"]
        command += ["--port", self.url.split(":")[2].split("/")[0]]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        command += ["--static-prefix", self.prefix] if self.prefix else []
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **QUIET}, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        self._wait()
        return self

    def _wait(self) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise AssertionError((self.folder / "server.log").read_text()[-3000:])

    def kill(self) -> None:
        """Kill the server and its workers, as in a crash."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
