"""Kubeflow's reporting callback: a TrainJob's progress. Only the latest status counts, so nothing is stored or resent."""

from __future__ import annotations

import json
import math
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...errors import SettingError, notices
from ..events import TrainerCallback

URL, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
SECONDS = 5.0  # between two updates, and the timeout of one


class KubeflowCallback(TrainerCallback):
    """Report progress, remaining seconds and the latest metrics to the TrainJob this process belongs to.

    The job's controller sets `KUBEFLOW_TRAINER_SERVER_URL`, and `…_CA_CERT` and `…_TOKEN`, which are file paths.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not os.environ.get(URL):
            raise SettingError(
                f"{URL} is not set, so there is no TrainJob to report to and nothing was started. Kubeflow sets it in a TrainJob "
                "with TrainJobRuntimeStatus enabled; elsewhere leave kubeflow out of report_to."
            )
        self._clock = clock
        self._begun: float | None = None
        self._first_step = 0
        self._said = -math.inf
        self._metrics: dict[str, float] = {}
        self._outgoing: dict[str, Any] | None = None  # the latest status, until it is sent
        self._sender: threading.Thread | None = None  # while it is sending
        self._lock = threading.Lock()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._begun, self._first_step, self._metrics = self._clock(), state.global_step, {}
            self._say(0, None, _steps(state))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._metrics |= {key: value for key, value in (logs or {}).items() if isinstance(value, (int, float))}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = self._begun is not None and self._clock() - self._said >= SECONDS
        if self._begun is None or not due or self._sender is not None:  # wait for an update that is being sent
            return
        percent, left = None, None
        if 0 < state.max_steps < math.inf:
            percent = min(99, int(100 * state.global_step / state.max_steps))  # 100 is reported at the end
            each = (self._clock() - self._begun) / max(1, state.global_step - self._first_step)
            left = int(each * (state.max_steps - state.global_step))
        epoch = {} if state.epoch is None else {"current_epoch": round(state.epoch, 2)}
        self._say(percent, left, {**self._metrics, "current_step": state.global_step, **_steps(state), **epoch})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._begun is not None:
            self._begun = None
            self._say(100, 0, self._metrics)
            self.wait(2 * SECONDS)

    def on_exception(self, args: Any, state: Any, control: Any, exception: BaseException, **kwargs: Any) -> None:
        self._begun = None  # the exit code tells how the job ended

    def _say(self, percent: int | None, left: int | None, metrics: dict[str, Any]) -> None:
        self._said = self._clock()
        known = {"progressPercentage": percent, "estimatedRemainingSeconds": left}
        status: dict[str, Any] = {key: value for key, value in known.items() if value is not None}
        status["lastUpdatedTime"] = datetime.now(timezone.utc).isoformat()
        status["metrics"] = [{"name": str(key), "value": str(value)} for key, value in metrics.items()]
        with self._lock:
            self._outgoing = {"trainerStatus": status}
            if self._sender is None:
                self._sender = threading.Thread(target=self._send, name="fanfold-kubeflow", daemon=True)
                self._sender.start()

    def _send(self) -> None:
        while True:
            with self._lock:
                body, self._outgoing = self._outgoing, None
                if body is None:
                    self._sender = None
                    return
            _post(body)

    def wait(self, timeout: float) -> None:
        """Wait until the latest status is sent or refused."""
        if (sender := self._sender) is not None:
            sender.join(timeout)


def _steps(state: Any) -> dict[str, Any]:
    return {"total_steps": state.max_steps} if 0 < state.max_steps < math.inf else {}


def _post(body: dict[str, Any]) -> None:
    try:
        token = Path(os.environ[TOKEN]).read_text(encoding="utf-8").strip()  # each time: the platform renews it
        head = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(os.environ[URL], json.dumps(body).encode(), head, method="POST")  # noqa: S310 - the job's own server
        trusted = os.environ.get(CERTIFICATE)
        context = ssl.create_default_context(cafile=trusted) if trusted else None
        urllib.request.urlopen(request, timeout=SECONDS, context=context).close()  # noqa: S310 - as above
    except (OSError, KeyError) as error:
        notices.once(
            "kubeflow:post",
            f"the progress of training was not reported to Kubeflow: {type(error).__name__}: {error}. Training continues, and "
            f"the next report follows in {SECONDS:g} s. Check {URL} and the file that {TOKEN} names.",
        )
