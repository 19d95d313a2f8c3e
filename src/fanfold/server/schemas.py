"""The forms of the JSON answers, for the OpenAPI document; the tests hold real answers against them."""

from __future__ import annotations

from typing import Any, TypedDict

Facts = dict[str, Any]


class Project(TypedDict):
    """One project: its name, how many runs it has, its newest sign of life (seconds since 1970)."""

    name: str
    runs: int
    last: float


class _User(TypedDict, total=False):
    user: str


class Projects(_User):
    """The projects, and what this server is and allows; `user` where people log in."""

    projects: list[Project]
    version: str
    write: bool


class Listed(TypedDict):
    """One run as the list shows it; times in seconds."""

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
    """A project's runs, the keys that are numbers, those that are media or texts, and the columns of the table.

    `unreadable` names the runs that should be among them and could not be read.
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
    """Everything about one run except its points. `config` is flat: model.dim; `values` are the latest ones."""

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
    """What fired, when (nanoseconds since 1970) and in which run."""

    t: int
    title: str
    run: str
    name: str


class Chunk(TypedDict):
    """Something a process printed."""

    t: int
    stream: str | None
    rank: int | None
    text: str


class Console(TypedDict):
    """The last of what was printed; `more`: there is something before it."""

    chunks: list[Chunk]
    more: bool


class Media(TypedDict):
    """What one run logged under a key; contents are fetched by the name of their blob."""

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
