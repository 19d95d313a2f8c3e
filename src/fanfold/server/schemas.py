"""The types of the JSON responses, for the OpenAPI document; tests check real responses against them."""

from __future__ import annotations

from typing import Any, TypedDict

Facts = dict[str, Any]


class Project(TypedDict):
    """One project: its name, number of runs, and time of last activity (seconds since 1970)."""

    name: str
    runs: int
    last: float


class _User(TypedDict, total=False):
    user: str


class Projects(_User):
    """The projects, the server's version, and whether it allows changes; `user` where people log in."""

    projects: list[Project]
    version: str
    write: bool


class Listed(TypedDict):
    """One run in the run list; times in seconds."""

    id: str
    name: str
    status: str
    created: float
    seen: float
    duration: float
    tags: list[str]
    notes: str | None
    group: str | None
    ranks: int
    attempts: int
    archived: bool
    failed: bool


class Unreadable(TypedDict):
    """A run that could not be read: its folder, and why."""

    path: str
    reason: str


class Runs(TypedDict):
    """A project's runs, its numeric keys, its media and text keys, and the columns of the run table.

    `unreadable` lists the runs that could not be read.
    """

    runs: list[Listed]
    keys: list[str]
    media: list[str]
    columns: list[str]
    unreadable: list[Unreadable]


class Passing(TypedDict):
    """The runs that pass a filter."""

    ids: list[str]


class Run(TypedDict):
    """Everything about one run except its points. `config` has flat keys such as model.dim; `values` are the latest ones."""

    id: str
    project: str
    name: str
    status: str
    verdict: Facts
    created: float
    seen: float
    tags: list[str]
    notes: str | None
    group: str | None
    archived: bool
    config: Facts
    values: Facts
    summary: Facts
    facts: Facts
    attempts: list[Facts]
    ranks: list[int]
    dropped: int
    damaged: int
    artifacts: list[Facts]
    files: list[Facts]
    alerts: list[Facts]
    path: str
    keys: dict[str, list[str]]
    console: bool


class _Words(TypedDict, total=False):
    level: str
    text: str | None


class Alert(_Words):
    """An alert: its title, its time (nanoseconds since 1970) and its run."""

    t: int
    title: str
    run: str
    name: str


class Chunk(TypedDict):
    """A piece of console output."""

    t: int
    stream: str | None
    rank: int | None
    text: str


class Console(TypedDict):
    """The end of the console output; `more`: whether there is earlier output."""

    chunks: list[Chunk]
    more: bool


class Media(TypedDict):
    """What one run logged under a key; content is fetched by blob name."""

    run: str
    points: list[Facts]
    total: int


class Table(TypedDict):
    """Some rows of a logged table, and how many there are."""

    columns: list[str]
    rows: list[list[Any]]
    total: int


class Profile(TypedDict):
    """The steps each rank took and how many of them were observed; a row per operator, scope, thread, label, rank and role."""

    steps: list[Facts]
    ops: list[Facts]


class Changed(TypedDict):
    """How many runs were changed."""

    changed: int


class Deleted(TypedDict):
    """How many runs were deleted."""

    deleted: int


Views = dict[str, str]
