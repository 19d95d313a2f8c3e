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
    from .aim import AimImporter
    from .bundle import BundleImporter
    from .clearml import ClearMLImporter
    from .comet import CometImporter
    from .csv_logger import CSVLoggerImporter
    from .dvclive import DVCLiveImporter
    from .hf_trainer import HFTrainerImporter
    from .mlflow import MLflowImporter
    from .neptune import NeptuneImporter
    from .swanlab import SwanLabImporter
    from .tables import TablesImporter
    from .tensorboard import TensorBoardImporter
    from .trackio import TrackioImporter
    from .wandb import WandbImporter

    products: list[Importer] = [
        TensorBoardImporter(),
        WandbImporter(),
        MLflowImporter(),
        TrackioImporter(),
        SwanLabImporter(),
        NeptuneImporter(),
        AimImporter(),
        CometImporter(),
        ClearMLImporter(),
    ]
    return [
        BundleImporter(),
        *products,
        DVCLiveImporter(),
        HFTrainerImporter(),
        CSVLoggerImporter(),
        TablesImporter(),
    ]  # what fits many files looks last


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
