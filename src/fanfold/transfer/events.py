"""What an importer reports about a run of another tool: a few kinds of event, the same for every source.

An importer yields `Found` for each run it recognises in a folder or file, and for each of them a stream of events. It knows
nothing of journals; `transfer/write.py` turns the events into one. Times are nanoseconds since 1970, as the source has
them. Where a source has no times, `time_ns` is None and the writer spreads them between the run's start and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec import Struct


class Found(Struct, frozen=True, kw_only=True):
    """One run at its source."""

    kind: str  # the importer's name: "tensorboard", "wandb", "mlflow", …
    id: str  # what identifies the run at its source, the same every time it is read
    paths: tuple[Path, ...]  # the files or folders it consists of
    project: str  # used unless the user names another
    name: str = ""
    fanfold_id: str | None = None  # set if fanfold itself sent this run there: import recognises it and makes no second one
    form: str = ""  # for products that keep the same run in several forms (files, a database): it is carried from one of them
    earlier_ids: tuple[str, ...] = ()  # ids that it may have had when there was less of it


class Start(Struct, frozen=True, kw_only=True):
    """An attempt begins. Without one, the run has a single attempt."""

    time_ns: int | None
    attempt: str = ""  # the same every time it is read
    rank: int = 0
    key: str | None = None  # the attempt's key in its journals: only a bundle of ours has it


class Facts(Struct, frozen=True, kw_only=True):
    """What the source knows of the run. Only what is given counts; a later event adds to an earlier one."""

    name: str | None = None
    group: str | None = None
    tags: list[str] | None = None
    notes: str | None = None
    config: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    archived: bool | None = None
    facts: dict[str, Any] | None = None  # host, user, command, python, git, packages: the names facts/collect.py uses


class Rows(Struct, frozen=True, kw_only=True):
    """Numbers in columns: row i has a step, a time and one value of each column. Many rows in one event are fast.

    A column is a numpy array of float64, float32, int64 or bool. A row that lacks a key goes into
    another `Rows`. `rank` is the process that logged them; `system` marks a machine's own metrics (they have no step).
    """

    steps: np.ndarray[Any, Any] | None  # int64; None: no steps
    times: np.ndarray[Any, Any] | None  # int64 nanoseconds
    columns: Mapping[str, np.ndarray[Any, Any]]
    rank: int = 0
    system: bool = False


class Values(Struct, frozen=True, kw_only=True):
    """Texts and media of one call: each value is a str or an object of fanfold's media classes."""

    step: int | None
    time_ns: int | None
    values: Mapping[str, Any]
    rank: int = 0


class Definition(Struct, frozen=True, kw_only=True):
    """How a metric is drawn or summarised, as define_metric() takes it."""

    key: str
    options: dict[str, Any]


class Artifact(Struct, frozen=True, kw_only=True):
    """Files that belong to the run: (name inside the artifact, where it is now)."""

    name: str
    files: Sequence[tuple[str, Path]]
    type: str = "file"
    metadata: dict[str, Any] | None = None
    step: int | None = None
    time_ns: int | None = None


class Console(Struct, frozen=True, kw_only=True):
    """Text that the program printed."""

    text: str
    time_ns: int | None = None
    stream: str = "stdout"
    rank: int = 0


class Alert(Struct, frozen=True, kw_only=True):
    """An alert that the run raised."""

    title: str
    text: str = ""
    level: str = "warn"
    step: int | None = None
    time_ns: int | None = None
    rank: int = 0


class End(Struct, frozen=True, kw_only=True):
    """The attempt is over: "finished", "failed", "killed" or "preempted". Without one, it is over when its files are at rest."""

    status: str
    time_ns: int | None = None
    cause: str = ""


class Left(Struct, frozen=True, kw_only=True):
    """Something that was not carried: what kind of thing, why, how many, and one example."""

    what: str
    why: str
    count: int = 1
    example: str = ""


class Mark(Struct, frozen=True, kw_only=True):
    """How far the source was read. `--follow` and a second import pass the last one back to `read()`."""

    position: Any  # plain data, as JSON can hold


Event = Start | Facts | Rows | Values | Definition | Artifact | Console | Alert | End | Left | Mark


class Importer(Protocol):
    """A source. `fanfold.importers` entry points name classes like this.

    An importer may also have
    `says_end = True`: its product records how a run ended, so that a run without such a record, a day later, was killed;
    `searched = False`: it is asked only about paths that the user names, because its files could be anything (CSV);
    `join(found: Found, other: Found) -> Found | None`: a run that was found in two places, with the parts of both; None if they
    are copies, and the default;
    `find_address(address: str) -> Iterator[Found]`: it is asked about sources with `://` in them, such as a server;
    `signature(found: Found) -> plain data`: changes when there is something new to read (None, and the default: sizes and
    dates of all files in `found.paths`, recursively).
    """

    kind: str
    title: str  # as people call the product: "TensorBoard"

    def find(self, path: Path) -> Iterator[Found]:
        """Yield the runs that are at this path itself (a file, or a folder and what belongs to it), by content."""

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        """Yield a run's events, from a position on. Damage ends in `Left`, never in an exception."""
