"""What MLflow holds of a run becomes events, the same from a folder, a database and a server."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..errors import outcome
from ..media import Audio, Image, Media, Table, Text, Video, decode
from .events import Artifact, End, Event, Facts, Found, Left, Start, Values
from .reading import Account, read_document, read_media

LONGEST_TAG = 64
STATUSES = {3: "finished", 4: "failed", 5: "killed", "FINISHED": "finished", "FAILED": "failed", "KILLED": "killed"}
# MLflow 3 writes `+` between the parts and `~` for a slash, MLflow 2 `%` and `#`.
_PICTURE = re.compile(r"images/(.+)([+%])step[+%](-?[0-9]{1,18})[+%]timestamp[+%]([0-9]{1,18})[+%][^/]*\.(?:png|webp)$")
_PREVIEW = re.compile(r"[+%]compressed\.[a-z]+$")
_OURS = re.compile(
    r"(texts|tables|histograms|figures|audio|video|html)/(.+)/(-?[0-9]{1,19})-([0-9]{1,18})-[0-9a-f]{8}\.([a-z0-9]+)$"
)
_ASIDE = re.compile(r"[0-9]+ characters: see the artifact (tags/.+\.txt)$")
TRACES = "fanfold has no traces"
SOURCE_RUN = "mlflow.sourceRun"
_MS = 1_000_000


class MLflowFacts(Struct, kw_only=True):
    """What a store holds of a run, apart from its points."""

    info: dict[str, Any]  # as in meta.yaml
    params: dict[str, str]
    tags: dict[str, str]
    experiment: str
    parent: str = ""  # its name
    datasets: list[dict[str, Any]]
    archived: bool = False
    latest: Any = None  # what a server's list of runs says of it


def found_of(run_id: str, kept: MLflowFacts, paths: tuple[Path, ...], form: str) -> Found:
    """Return how a run is known to imports."""
    ours = kept.tags.get("fanfold.run_id")
    project = kept.tags.get("fanfold.project") if ours else None
    return Found(
        kind="mlflow", id=run_id, paths=paths, project=unquoted(project) if project else kept.experiment,
        name=name_of(kept), fanfold_id=unquoted(ours) if ours else None, form=form,
    )  # fmt: skip


def unquoted(text: str) -> str:
    """Undo how fanfold writes an id into a tag."""
    return text.replace("%27", "'").replace("%22", '"').replace("%60", "`")


def name_of(kept: MLflowFacts) -> str:
    """Return a run's name: older versions of MLflow have it in a tag only."""
    return str(kept.info.get("run_name") or kept.tags.get("mlflow.runName") or "")


def keys_of(kept: MLflowFacts) -> dict[str, str]:
    """Return the key of each metric that fanfold had to rename, by its name in MLflow."""
    return {name.removeprefix("fanfold.key/"): key for name, key in kept.tags.items() if name.startswith("fanfold.key/")}


def began(kept: MLflowFacts) -> Iterator[Event]:
    """Yield a run's start and facts."""
    yield Start(time_ns=nanoseconds(kept.info.get("start_time")))
    ours = {name.removeprefix("fanfold."): text for name, text in kept.tags.items() if name.startswith("fanfold.")}
    config = {key: value_of(text) for key, text in kept.params.items()}
    config |= {key.removeprefix("config/"): value_of(text) for key, text in ours.items() if key.startswith("config/")}
    summary = {key.removeprefix("summary/"): _json(text) for key, text in ours.items() if key.startswith("summary/")}
    group = ours.get("group") or _group(kept)
    notes = kept.tags.get("mlflow.note.content")
    yield Facts(
        name=name_of(kept) or None, group=group or None, tags=_tags(kept, ours), notes=notes or None,
        config=config, summary=summary or None, archived=True if kept.archived else None, facts=_facts(kept),
    )  # fmt: skip
    if left := sorted(name for name in ours if name.startswith("inf/")):
        yield Left(what="infinite values", why="an MLflow database cannot hold them", count=len(left), example=left[0][4:])


def ended(kept: MLflowFacts) -> Iterator[Event]:
    """Yield a run's end, if MLflow knows it."""
    status = STATUSES.get(kept.info.get("status", 1))
    if status is not None:
        yield End(status=status, time_ns=nanoseconds(kept.info.get("end_time")))


def nanoseconds(ms: Any) -> int | None:
    """Return a time in milliseconds as nanoseconds; None if it is missing or not a time."""
    return ms * _MS if type(ms) is int and 0 < ms < 1 << 43 else None


def value_of(text: str) -> Any:
    """Return the number, bool or None whose `str()` is this text, else the text: MLflow keeps params as texts."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    for kind in (int, float):
        try:
            value = kind(text) if len(text) < 400 else None
        except ValueError:
            continue
        if value is not None and str(value) == text:
            return value
    return text


def _json(text: str) -> Any:
    try:
        return json.loads(text) if text[:1] in "[{tfn" else text
    except (ValueError, RecursionError):
        return text


def _group(kept: MLflowFacts) -> str:
    parent = kept.tags.get("mlflow.parentRunId", "")
    return f"{kept.parent} ({parent[:8]})" if kept.parent else parent


def _tags(kept: MLflowFacts, ours: Mapping[str, str]) -> list[str] | None:
    """Return short tags of the user as `key=value`; all of them are in the facts."""
    tags = [tag for tag in ours.get("tags", "").split(", ") if tag]
    for name, text in kept.tags.items():
        if not name.startswith(("mlflow.", "fanfold.")) and "\n" not in text and len(name) + len(text) < LONGEST_TAG:
            tags.append(f"{name}={text}" if text else name)
    return tags or None


def _facts(kept: MLflowFacts) -> dict[str, Any]:
    tags = kept.tags
    git = {"commit": tags.get("mlflow.source.git.commit"), "branch": tags.get("mlflow.source.git.branch"),
           "remote": tags.get("mlflow.source.git.repoURL")}  # fmt: skip
    git = {name: text for name, text in git.items() if text}
    stored = {
        "run_id": kept.info.get("run_id"), "experiment": kept.experiment, "experiment_id": kept.info.get("experiment_id"),
        "tags": {name: text for name, text in tags.items() if not name.startswith("fanfold.")}, "datasets": kept.datasets,
    }  # fmt: skip
    found = {
        "user": tags.get("mlflow.user") or kept.info.get("user_id"), "script": tags.get("mlflow.source.name"), "git": git,
        "mlflow": {name: value for name, value in stored.items() if value},
    }  # fmt: skip
    return {name: value for name, value in found.items() if value}


def files(kept: MLflowFacts, found: Mapping[str, Path], account: Account) -> Iterator[Event]:
    """Yield the run's files: images, texts and tables with a step as values, everything else as artifacts."""
    ours = "fanfold.run_id" in kept.tags
    tables = {entry["path"] for entry in _listed(kept) if entry.get("type") == "table" and isinstance(entry.get("path"), str)}
    groups: dict[str, list[tuple[str, Path]]] = {}
    values: dict[tuple[int | None, int | None, str], list[Media]] = {}
    for name, path in sorted(found.items()):
        if _PREVIEW.search(name) and _PREVIEW.sub(".png", name) in found:
            continue  # made by MLflow for its page
        if ours and (text := next((key for key, note in kept.tags.items() if _aside(note) == name), None)):
            yield from _long_tag(text, path, account)
            continue
        placed = _placed(kept, name, path, ours=ours, tables=tables, account=account)
        if placed is None:
            groups.setdefault(name.partition("/")[0], []).append((name, path))
        else:
            values.setdefault(placed[:3], []).append(placed[3])
            if len(values) > 64:
                yield from _logged(values)
    yield from _logged(values)
    for name, members in groups.items():
        model = any(inside.endswith("/MLmodel") for inside, _ in members)
        yield Artifact(name=name, files=members, type="model" if model else "file")


def _logged(values: dict[tuple[int | None, int | None, str], list[Media]]) -> Iterator[Event]:
    for (step, time_ns, key), made in values.items():
        one = made[0].text if len(made) == 1 and type(made[0]) is Text else made if len(made) > 1 else made[0]
        yield Values(step=step, time_ns=time_ns, values={key: one})
    values.clear()


def _listed(kept: MLflowFacts) -> list[dict[str, Any]]:
    found = _json(kept.tags.get("mlflow.loggedArtifacts", "[]"))
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _aside(note: str) -> str | None:
    match = _ASIDE.match(note) if len(note) < 400 else None
    return match[1] if match else None


def _long_tag(tag: str, path: Path, account: Account) -> Iterator[Event]:
    data, error = outcome(read_document, path)
    if data is None:
        account.leave("long tags", str(error), tag)
        return
    text = data.decode("utf-8", "replace")
    if tag.startswith("fanfold.config/"):
        yield Facts(config={tag.removeprefix("fanfold.config/"): text})
    elif tag.startswith("fanfold.summary/"):
        yield Facts(summary={tag.removeprefix("fanfold.summary/"): _json(text)})
    elif tag == "mlflow.note.content":
        yield Facts(notes=text)


def _placed(
    kept: MLflowFacts, name: str, path: Path, *, ours: bool, tables: set[str], account: Account
) -> tuple[int | None, int | None, str, Media] | None:
    """Return step, time, key and value of a file that was logged as media; None for any other."""
    step: int | None
    if picture := _PICTURE.match(name):
        folder, key = "images", picture[1].replace("~" if picture[2] == "+" else "#", "/")
        step, ms = int(picture[3]), int(picture[4])
    elif ours and (logged := _OURS.match(name)):
        folder, key, step, ms = logged[1], logged[2], int(logged[3]), int(logged[4])
    elif name in tables:
        folder, key, step = "tables", name.rpartition(".")[0], None
        written, end = path.stat().st_mtime_ns // _MS, kept.info.get("end_time")
        ms = min(written, end) if isinstance(end, int) and end > 0 else written  # files of a copy are newer than the run
    else:
        return None
    made, error = outcome(_media, folder, path)
    if made is None:
        account.leave(folder, f"cannot be read, so the file is kept as it is: {error}", name)
        return None
    return step, nanoseconds(ms), keys_of(kept).get(key, key), made


def _media(folder: str, path: Path) -> Media:
    """Return a file as the object that log() takes."""
    data = read_media(path)
    if folder in ("images", "audio", "video"):
        return {"images": Image, "audio": Audio, "video": Video}[folder](data)  # type: ignore[no-any-return]
    if folder == "texts":
        return Text(data.decode())
    if folder == "html":
        return decode("html", {}, data)
    if folder == "figures":
        return decode("figure", {}, data)
    content = json.loads(data)
    if folder == "histograms":
        return decode("histogram", content, b"")
    return Table(columns=[str(column) for column in content["columns"]], data=content["data"])


def finite(value: float) -> float:
    """Return a number from a database: infinity is the largest float there."""
    return math.copysign(math.inf, value) if abs(value) >= 1.7976931348623157e308 else value
