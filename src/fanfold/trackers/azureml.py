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
from typing import Any

from .base import Identity, Point, flat_config
from .destination import Destination, Item
from .face import Tracker
from .tools import text_of

LONGEST_TAG = 1000
LONGEST_TABLE = 250  # rows of a table metric; longer tables are files


class AzureML(Destination):
    """Log to `azureml_run`, or to the current job's run. The job's status is left to the platform."""

    name = "azure_ml"
    own_name = "azureml_run"
    delivery = delivery_online = "at least once"

    def __init__(self, run_name: str, azureml_run: Any = None) -> None:
        super().__init__(run_name)
        self.run = self.given = azureml_run

    @classmethod
    def unusable(cls) -> str | None:
        return None if os.environ.get("AZUREML_RUN_ID") else "not inside an Azure Machine Learning job"

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        super().open(identity, remote)
        self._steps = "step" in inspect.signature(self.run.log).parameters
        self._offline = not hasattr(self.run, "get_metrics")
        if self._offline:
            self.warn(
                "offline",
                "This process is not part of an Azure Machine Learning job, so its Run prints what it is given, without steps, "
                "and keeps nothing. The journal has everything. Run it in a job to log there.",
            )

    def begin(self, identity: Identity | None, remote: str | None) -> Any:
        from azureml.core.run import Run

        return Run.get_context()

    def set_config(self, values: dict[str, Any]) -> None:
        """Store the config as tags: unlike properties they can change, and unlike files they can be set twice."""
        self._tag({f"config.{key}": value for key, value in flat_config(values).items()})

    def set_summary(self, values: Mapping[str, Any]) -> None:
        self._tag({f"summary.{key}": value for key, value in flat_config(values).items()})

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        words = {"fanfold.name": name, "fanfold.notes": notes, "fanfold.group": group}
        self._tag({key: value for key, value in words.items() if value} | dict.fromkeys(tags, ""))

    def _tag(self, values: Mapping[str, Any]) -> None:
        texts = {key: text_of(value) for key, value in values.items()}
        for key in (key for key, text in texts.items() if len(text) > LONGEST_TAG):
            self.warn(f"tag:{key}", f"Azure ML tags have {LONGEST_TAG} characters, so {key!r} is cut; the journal has it whole.")
        if texts:
            self.run.set_tags({key: text[:LONGEST_TAG] for key, text in texts.items()})

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
        self.settle()

    finish = settle


class AzureMLTracker(Tracker):
    destination_class = AzureML


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
