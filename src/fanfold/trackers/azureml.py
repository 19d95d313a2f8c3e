"""Azure Machine Learning (SDK v1): metrics of the job this process belongs to. Outside a job its Run only prints."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..errors import notices
from .base import Identity, Point, flat_config
from .destination import Destination, Item
from .face import Tracker

LONGEST_TAG = 1000
LONGEST_TABLE = 250  # rows of a table metric; longer tables are files


class AzureML(Destination):
    """Log to `azureml_run`, or to the current job's run. The job's status is left to the platform."""

    name: ClassVar[str] = "azure_ml"
    delivery: ClassVar[str] = "at least once"
    delivery_online: ClassVar[str | None] = "at least once"

    def __init__(self, run_name: str, azureml_run: Any = None) -> None:
        super().__init__(run_name)
        self.azureml_run = azureml_run

    @classmethod
    def unusable(cls) -> str | None:
        return None if os.environ.get("AZUREML_RUN_ID") else "not inside an Azure Machine Learning job"

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        del identity, remote
        if self.azureml_run is None:
            from azureml.core.run import Run

            self.azureml_run = Run.get_context()
        self.run = self.azureml_run
        self._steps = "step" in inspect.signature(self.run.log).parameters
        self._offline = not hasattr(self.run, "get_metrics")
        if self._offline:
            self.warn(
                "offline",
                "This process is not part of an Azure Machine Learning job, so its Run prints what it is given, without steps, "
                "and keeps nothing. The journal has everything. Run it in a job to log there.",
            )

    @property
    def remote(self) -> str:
        return str(self.run.id)

    def set_config(self, values: dict[str, Any]) -> None:
        """Store the config as tags: unlike properties they can change, and unlike files they can be set twice."""
        self.run.set_tags({f"config.{key}": _tag(f"config.{key}", value) for key, value in flat_config(values).items()})

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        words = {"fanfold.name": name, "fanfold.notes": notes, "fanfold.group": group}
        found = {key: _tag(key, value) for key, value in words.items() if value} | dict.fromkeys(tags, "")
        if found:
            self.run.set_tags(found)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        self.run.set_tags({f"summary.{key}": _tag(f"summary.{key}", value) for key, value in flat_config(values).items()})

    def number(self, key: str, value: float | str, point: Point) -> None:
        step = {"step": point.step} if self._steps else {}
        self.run.log(key, value, **step, **point.kwargs)

    def take_text(self, item: Item) -> None:
        self.number(item.key, item.text, item.point)

    def take_table(self, item: Item) -> None:
        columns = _columns(item.value)
        if columns and _fits(columns):
            self.run.log_table(item.key, columns)
        else:
            self._add_file(item, json.dumps(columns, default=str).encode(), "json")

    take_histogram = take_table

    def take_file(self, item: Item) -> None:
        self._add_file(item, *item.content)

    def _add_file(self, item: Item, data: bytes, ext: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{item.step}{f'-{item.at}' if item.at else ''}.{ext}"
            path.write_bytes(data)
            if ext == "png":
                self.run.log_image(item.key, path=str(path))
            else:
                self._upload(f"logged/{item.key}/{path.name}", path)

    def _upload(self, name: str, path: Path) -> None:
        """Upload a file once: the service accepts a name only once, and a relay that was killed sends again."""
        if self._offline or name not in self.run.get_file_names():
            self.run.upload_file(name, str(path))

    def artifact(self, path: Path, name: str) -> None:
        self._upload(f"artifacts/{name}", path)

    def settle(self) -> None:
        """Wait until the service has all metrics; offline, until the printed lines are flushed."""
        if self._offline:
            sys.stdout.flush()
        else:
            self.run.flush()

    def close(self, status: str) -> None:
        """Record the run's status as a tag, and leave the job's own status alone: the script may continue."""
        self.run.tag("fanfold.status", status)
        self.finish()

    def finish(self) -> None:
        self.settle()


class AzureMLTracker(Tracker):
    """Log to `azureml_run`, or to the current job's run."""

    destination_class = AzureML


def _tag(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > LONGEST_TAG:
        notices.once(
            f"azure_ml:tag:{key}",
            f"Azure Machine Learning has {LONGEST_TAG} characters for a tag, so {key!r} is cut there. The journal has it whole.",
        )
    return text[:LONGEST_TAG]


def _columns(value: Any) -> dict[str, list[Any]]:
    """Return a table or histogram as lists by column."""
    if value.kind == "histogram":
        return {"from": value.edges[:-1].tolist(), "to": value.edges[1:].tolist(), "count": value.counts.tolist()}
    return {str(name): [row[i] for row in value.rows] for i, name in enumerate(value.columns)}


def _fits(columns: dict[str, list[Any]]) -> bool:
    """Return whether a table metric can hold it: few rows, only numbers and texts."""
    cells = [cell for column in columns.values() for cell in column]
    plain = all(isinstance(cell, (bool, int, str)) or (isinstance(cell, float) and math.isfinite(cell)) for cell in cells)
    return plain and all(len(column) <= LONGEST_TABLE for column in columns.values())
