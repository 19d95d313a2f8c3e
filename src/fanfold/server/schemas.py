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

    `goals`: whether low ("min") or high ("max") values of a metric are better, where define_metric says so. `unreadable` lists
    the runs that could not be read.

    `total` is the number of runs. `runs` has all of them, the first `count`, or, if the request names the blocks it `known`, the
    runs of the `fresh` ones. Blocks have `size` runs each, counted from the end of the list; `blocks` has their names.
    """

    runs: list[Listed]
    total: int
    size: int
    blocks: list[str]
    fresh: list[int]
    keys: list[str]
    media: list[str]
    columns: list[str]
    goals: dict[str, str]
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
    fork: Facts | None
    ranks: list[int]
    dropped: int
    damaged: int
    artifacts: list[Facts]
    files: list[Facts]
    alerts: list[Facts]
    requests: list[Facts]
    knobs: Facts
    path: str
    keys: dict[str, list[str]]
    blackbox: list[Facts]
    nodes: dict[str, int]
    console: bool


class Told(TypedDict):
    """A request that was left for a job, or refused at once, and why."""

    id: str
    state: str
    why: str


class _Words(TypedDict, total=False):
    level: str
    text: str | None
    rule: str
    key: str | None


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


class FieldImportance(TypedDict):
    """A config value (`config:lr`): rank correlation and permutation importance, each with the range it may lie in."""

    name: str
    values: int
    runs: int
    correlation: float | None
    correlation_low: float | None
    correlation_high: float | None
    importance: float
    importance_low: float
    importance_high: float


class Importance(TypedDict):
    """How much each config value matters for a metric, most important first.

    `score` is the share of the metric's variance that the forest predicts for runs it has not seen; None with too few runs.
    """

    metric: str
    runs: int
    score: float | None
    score_low: float | None
    score_high: float | None
    fields: list[FieldImportance]


class Media(TypedDict):
    """What one run logged under a key; content is fetched by blob name."""

    run: str
    points: list[Facts]
    total: int


class Table(TypedDict):
    """Some rows of a logged table: `found` match, of `total`; `numbers` counts them from 0 in the whole table.

    `media` says where there are media: row in this answer, column, kind, facts. The `cell` address serves them.
    """

    columns: list[str]
    rows: list[list[Any]]
    numbers: list[int]
    media: list[list[Any]]
    found: int
    total: int


class Sample(TypedDict):
    """A row of one logged table."""

    run: str
    step: int
    rank: int
    n: int
    row: int
    columns: list[str]
    cells: list[Any]
    media: list[list[Any]]


class Samples(TypedDict):
    """The same row of the tables logged under a key, by step; `tables` is how many there are."""

    found: list[Sample]
    tables: int


class Profile(TypedDict):
    """The steps each rank took and how many of them were observed; a row per operator, scope, thread, label, rank and role."""

    steps: list[Facts]
    ops: list[Facts]


class Goodput(TypedDict):
    """A run's wall time by part, as the mean over its ranks; `unmeasured`: what nothing was recorded about."""

    wall_seconds: float
    goodput: float
    ranks: int
    attempts: int
    steps: int
    parts: list[Facts]
    unmeasured: list[str]


class Changed(TypedDict):
    """How many runs were changed."""

    changed: int


class Deleted(TypedDict):
    """How many runs were deleted."""

    deleted: int


class Rules(TypedDict):
    """Rules of a project with the times they were added, and rules of its programs with the number of runs that have each."""

    rules: dict[str, float]
    programs: dict[str, int]


class Moved(TypedDict):
    """How many runs were moved to another project."""

    moved: int


class Added(TypedDict):
    project: str
    added: int


class Workspace(TypedDict):
    fragment: str


Views = dict[str, str]
