"""The types of what each command prints with --json, published as JSON Schemas by `fanfold schema`.

A change that a reader of the JSON could notice raises VERSION. Tests check what real commands print against these types, and the
schemas against the ones that were published.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypedDict

VERSION = 1
Facts = dict[str, Any]
Number = int | float | Literal["NaN", "Infinity", "-Infinity"]
Status = Literal["running", "finished", "failed", "killed", "preempted", "lost"]


class Named(TypedDict):
    """Which run something is about."""

    id: str
    name: str
    project: str


class NamedStatus(Named):
    """Which run something is about, and its status."""

    status: Status


class ListedRun(Named):
    """One run of `fanfold ls`; times in seconds since 1970, the duration in seconds."""

    status: Status
    started: float
    seen: float
    duration: float
    tags: list[str]
    group: str | None
    notes: str | None
    ranks: int
    reason: str | None
    path: str
    archived: bool
    config: Facts
    summary: Facts


class Cause(TypedDict):
    """How a run or an attempt ended: on which rank, by which signal, with which error."""

    rank: int | None
    signal: str | None
    exit_code: int | None
    error: str | None
    reason: str | None
    time: float | None


class ForkFacts(TypedDict):
    """The run that a run continues, and the last step that both have."""

    project: str
    run: str
    step: int


class AttemptFacts(TypedDict):
    """One attempt of a run."""

    attempt: int
    key: str
    status: Status
    cause: Cause
    started: float
    seen: float
    ranks: list[int]
    nodes: list[str]


class Statistics(TypedDict):
    """Statistics of a metric; `not_finite` counts NaN and infinities, which min and max ignore."""

    count: int
    last: Number | bool
    last_step: int
    min: Number
    max: Number
    not_finite: int


class Delivery(TypedDict):
    """How much of a run has been delivered to one tracker."""

    tracker: str
    report: str | None
    delivered: int
    left: int
    status: str | None
    remote: str | None
    error: str | None
    restarts: int


class Asked(TypedDict):
    """A request to the job of a run; `asked` and `answered` are times."""

    id: str
    action: str
    state: str
    values: Facts
    by: str
    step: int | None
    why: str
    asked: float
    answered: float | None


class Shown(Named):
    """Everything about one run except its points."""

    status: Status
    started: float
    seen: float
    duration: float
    ranks: list[int]
    group: str | None
    tags: list[str]
    notes: str | None
    config: Facts
    summary: Facts
    facts: Facts
    metrics: Facts
    alerts: list[Facts]
    requests: list[Asked]
    artifacts: list[Facts]
    files: list[Facts]
    dropped: int
    damaged: int
    cause: Cause
    path: str
    now: float
    attempts: list[AttemptFacts]
    fork: ForkFacts | None
    keys: dict[str, Statistics]
    texts: list[str]
    media: dict[str, int]
    lost: list[Facts]
    delivery: list[Delivery]


class Watched(Named):
    """One run of `fanfold top`; a running run that logs nothing is `stalled`."""

    status: Literal["running", "finished", "failed", "killed", "preempted", "lost", "stalled"]
    seen: float
    created: float
    ranks: int
    path: str
    step: int | None
    rate: float | None
    key: str | None
    value: Number | str | None
    age: float
    cpu: float | None
    gpu: float | None


class TailRow(TypedDict):
    """One row of `fanfold tail`; `rank` is the requested rank."""

    step: int | None
    time: float
    rank: int | None
    values: dict[str, Number | bool | str]


class NotFinite(TypedDict):
    """A value that is not finite."""

    x: float
    value: str


class Points(TypedDict):
    """One metric's curve. With `every_point`, each point has x and value; otherwise, each is a bucket with exact extremes."""

    run: str
    key: str
    axis: str
    total: int
    every_point: bool
    points: list[dict[str, Number | bool | None]]
    restarts: list[float]
    not_finite: list[NotFinite]


class RunStatus(Named):
    """A run and its status."""

    status: Status


class Differences(TypedDict):
    """The values that differ as [A's, B's], null where one is missing, and how many are the same."""

    differ: dict[str, list[Any]]
    same: int


class Compared(TypedDict):
    """What differs between two runs."""

    runs: list[RunStatus]
    config: Differences
    metrics: Differences
    code: Differences
    packages: Differences
    environment: Differences


class FindingFacts(TypedDict):
    """One finding: a word for programs, a sentence for people, and the evidence."""

    kind: str
    severity: Literal["error", "warning", "info"]
    text: str
    evidence: Facts


class Diagnosis(TypedDict):
    """What went wrong in a run, worst first."""

    run: RunStatus
    findings: list[FindingFacts]


class HangFacts(TypedDict):
    """Where the ranks of a run hang or hung, and how each process ended."""

    run: RunStatus
    hangs: list[Facts]
    ends: list[Facts]


class MemoryFacts(TypedDict):
    """Failed allocations, processes that the system killed, and the memory before that."""

    run: RunStatus
    errors: list[Facts]
    host: list[Facts]
    curves: Any


class Became(RunStatus):
    """What became of a run; `latest` has its last values."""

    rank: int | None
    signal: str | None
    error: str | None
    duration: float
    latest: Facts


class Waited(Became):
    """The outcome of one run."""

    outcome: Literal["finished", "met", "failed", "killed", "preempted", "lost", "not met", "timeout"]


class Waiting(TypedDict):
    """The worst outcome, which sets the exit code, and the outcome of each run."""

    outcome: Literal["finished", "met", "failed", "killed", "preempted", "lost", "not met", "timeout"]
    runs: list[Waited]


class Used(TypedDict):
    """The resources of a command and everything it started and waited for."""

    seconds: float
    cpu_seconds: float
    max_rss_gb: float


class Executed(Became):
    """The outcome of a command; a negative exit code is the number of a signal."""

    exit_code: int
    used: Used
    path: str


class Edited(Named):
    """A run as it is after a change."""

    tags: list[str]
    notes: str | None
    archived: bool


class Moved(TypedDict):
    """Where a run is now."""

    id: str
    project: str
    path: str


class Removed(TypedDict):
    """A deleted run."""

    id: str
    path: str
    bytes: int


class Imported(TypedDict):
    """What `fanfold import` did."""

    runs: list[Facts]
    passed_over: int


class Exported(TypedDict):
    """One written file."""

    file: str
    format: str
    rows: int
    bytes: int


class Report(TypedDict):
    """The written report."""

    file: str
    bytes: int
    title: str
    runs: list[str]
    keys: list[str]
    points: int
    pictures: int
    sounds: int
    tables: int
    histograms: int
    texts: int
    pages: int
    views: list[str]
    left_out: list[str]


class LeftOut(TypedDict):
    """Something that was left out of a published folder, and how much of it."""

    what: str
    count: int


class Published(TypedDict):
    """The folder, or zip file, that `fanfold publish` wrote."""

    path: str
    bytes: int
    files: int
    projects: list[str]
    runs: int
    left_out: list[LeftOut]


class Delivered(TypedDict):
    """What `fanfold sync` delivered of one run to one tracker."""

    run: str
    tracker: str
    outcome: str
    values: int
    left: int
    delivered: int
    refused: int
    partial: int
    remote: str | None
    status: str | None
    error: str | None


class _InspectedMore(TypedDict, total=False):
    facts: Facts
    files: list[Facts]
    error: str


class Inspected(_InspectedMore):
    """Where a model file comes from; `files` of a checkpoint directory."""

    path: str
    format: str
    size: int
    stamp: Facts | None
    run: Facts | None


class Check(TypedDict):
    """One line of `fanfold doctor`."""

    section: str
    name: str
    value: str
    level: Literal["ok", "note", "warning", "wrong"]
    hint: str | None


class Health(TypedDict):
    """The state of this machine."""

    healthy: bool
    checks: list[Check]


class Leftover(TypedDict):
    """A deleted leftover."""

    path: str
    why: str
    bytes: int


class Packed(TypedDict):
    """A compressed journal."""

    path: str
    bytes: int
    raw: int
    packed: int


class Pruned(TypedDict):
    """What `fanfold prune` freed."""

    dry_run: bool
    bytes: int
    kept: dict[str, int]
    deleted: list[Leftover]
    packed: list[Packed]
    estimated: bool


class Merged(TypedDict):
    """What `fanfold merge` did."""

    dir: str
    runs: int
    gone: int
    segments: int
    points: int
    read: int
    written: int
    seconds: float


class ApiUse(TypedDict):
    """An API and who uses it."""

    key: str
    runs: list[str]
    processes: int
    records: int


class Address(TypedDict):
    """Where a gateway listens."""

    address: str


class Addresses(Address):
    """Where the dashboard listens."""

    addresses: list[str]


class _Word(TypedDict, total=False):
    token: str


class TokenFacts(_Word):
    """A token of a gateway; `token` itself only when it is created."""

    id: str
    name: str
    projects: list[str]
    scopes: list[str]
    created: float
    expires: float | None


class _AuditedMore(TypedDict, total=False):
    peer: str
    project: str
    run: str
    detail: Facts


class Audited(_AuditedMore):
    """One entry of a gateway's audit log."""

    time: float
    action: str
    by: str


class Told(TypedDict):
    """The outcome of a request to a running job; it was carried out after `step`."""

    id: str
    action: Literal["stop", "save", "evaluate", "log", "set"]
    state: Literal["asked", "done", "refused", "expired"]
    values: Facts
    by: str
    step: int | None
    why: str


class Notified(TypedDict):
    """One message about a run: its recipient and outcome. Addresses are shown without secrets."""

    to: str
    message: str
    title: str
    events: int
    time: float
    outcome: Literal["sent", "failed", "interrupted"]
    why: str | None


class NotifyTested(TypedDict):
    """The outcome of a test message to one address."""

    to: str
    outcome: Literal["sent", "failed"]
    seconds: float
    why: str | None


class RunGoodput(TypedDict):
    """Where the wall time of a run went: seconds and shares by part."""

    run: NamedStatus
    wall_seconds: float
    goodput: float
    ranks: int
    attempts: int
    steps: int
    seconds: dict[str, float]
    shares: dict[str, float]
    unmeasured: list[str]


class _GoodputNames(TypedDict, total=False):
    node: str
    gpu: str
    user: str
    project: str
    week: str
    run: str


class GroupGoodput(_GoodputNames):
    """Where the time of the ranks of some runs went; `names` follows --by."""

    runs: int
    rank_hours: float
    goodput: float
    rank_steps: int
    seconds: dict[str, float]
    shares: dict[str, float]


class PlaceFacts(TypedDict):
    """A node or GPU, and how slow it was compared with the others of the same runs."""

    name: str
    ratio: float
    spread: float
    runs: int
    slower: int
    seconds: float
    sigmas: Number
    verdict: str
    device: str
    sure: str


class SlowPlaces(TypedDict):
    """Nodes and GPUs, the slowest first, and how many runs were compared."""

    nodes: list[PlaceFacts]
    gpus: list[PlaceFacts]
    compared: int
    alone: int
    unmeasured: int


class Installed(TypedDict):
    """Where a skill was installed."""

    agent: str
    path: str


class SkillText(TypedDict):
    """The skill itself."""

    text: str


class Output(NamedTuple):
    """What a command prints with --json: a type, and whether there is one document per line."""

    type: Any
    lines: bool = False


COMMANDS: dict[str, Output] = {
    "ls": Output(list[ListedRun]),
    "ui": Output(Addresses, lines=True),
    "top": Output(list[Watched]),
    "show": Output(Shown),
    "tail": Output(TailRow, lines=True),
    "points": Output(list[Points]),
    "compare": Output(Compared),
    "diagnose": Output(Diagnosis),
    "hang": Output(HangFacts),
    "memory": Output(MemoryFacts),
    "wait": Output(Waiting),
    "exec": Output(Executed),
    "tell": Output(Told),
    "notify show": Output(list[Notified]),
    "notify test": Output(list[NotifyTested]),
    "goodput": Output(RunGoodput | list[GroupGoodput]),
    "nodes": Output(SlowPlaces),
    "import": Output(Imported),
    "export": Output(list[Exported]),
    "report": Output(Report),
    "publish": Output(Published),
    "query": Output(list[Facts]),
    "sync": Output(list[Delivered]),
    "ops": Output(list[Facts]),
    "usage": Output(list[ApiUse]),
    "inspect": Output(Inspected),
    "server start": Output(Address, lines=True),
    "server token": Output(list[TokenFacts] | TokenFacts),
    "server db": Output(Facts | list[Facts]),
    "server audit": Output(Audited, lines=True),
    "tag": Output(list[Edited]),
    "note": Output(list[Edited]),
    "rename": Output(list[Edited]),
    "archive": Output(list[Edited]),
    "mv": Output(list[Moved]),
    "cp": Output(list[Moved]),
    "rm": Output(list[Removed]),
    "prune": Output(Pruned),
    "doctor": Output(Health),
    "demo": Output(Shown),
    "schema": Output(Facts),
    "skill": Output(list[Installed] | SkillText),
}


def schema(command: str) -> Facts:
    """Return the JSON Schema of what a command prints with --json."""
    import msgspec

    output = COMMANDS[command]
    found: Facts = msgspec.json.schema(output.type)
    what = "each line of " if output.lines else ""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:fanfold:{VERSION}:{command.replace(' ', '-')}",
        "title": f"{what}fanfold {command} --json",
        "version": VERSION,
        **found,
    }
