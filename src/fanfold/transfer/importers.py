"""The importers: one row per source. Other packages add theirs by entry points of the group `fanfold.importers`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from ..errors import SettingError, notices, outcome, suggestion
from .events import Importer

GROUP = "fanfold.importers"


def built_in() -> list[Importer]:
    """Return the importers that come with fanfold, in the order in which they look at a path.

    Each module is small and imports its libraries only where it reads.
    """
    from .aim import Aim
    from .bundle import Bundle
    from .clearml import ClearML
    from .comet import Comet
    from .csv_logger import CSVLogger
    from .dvclive import DVCLive
    from .hf_trainer import HFTrainer
    from .mlflow import MLflow
    from .neptune import Neptune
    from .swanlab import SwanLab
    from .tables import Tables
    from .tensorboard import TensorBoard
    from .trackio import Trackio
    from .wandb import Wandb

    products: list[Importer] = [TensorBoard(), Wandb(), MLflow(), Trackio(), SwanLab(), Neptune(), Aim(), Comet(), ClearML()]
    return [Bundle(), *products, DVCLive(), HFTrainer(), CSVLogger(), Tables()]  # what fits many files looks last


@lru_cache(maxsize=1)
def importers() -> tuple[Importer, ...]:
    """Return all importers: built-in ones first, then those of other packages, by name."""
    found = built_in()
    known = {importer.kind for importer in found}
    for importer in _others():
        if importer.kind not in known:
            known.add(importer.kind)
            found.append(importer)
    return tuple(found)


def _others() -> Iterator[Importer]:
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):

        def load(point: Any = point) -> Importer:
            importer: Importer = point.load()()
            return importer

        importer, error = outcome(load)
        if importer is None:
            notices.once(
                f"importer:{point.name}",
                f"the importer {point.name!r} ({point.value}) cannot be loaded: {error}. Its sources are not found. "
                "Update or remove the package it comes from.",
            )
        else:
            yield importer


def importer_of(kind: str) -> Importer:
    """Return the importer of a kind; raise SettingError if there is none."""
    for importer in importers():
        if importer.kind == kind:
            return importer
    known = sorted(importer.kind for importer in importers())
    raise SettingError(f"there is no importer {kind!r}. Nothing was imported.{suggestion(kind, known)}")
