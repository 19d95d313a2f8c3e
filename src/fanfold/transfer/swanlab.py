"""SwanLab: a log of protobuf records for each start of a run, with its media beside it. Read without SwanLab."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import outcome
from ..journal.files import open_regular
from ..media import Audio, Image, Media, Table, Video
from . import flat_yaml
from .events import Artifact, Console, End, Event, Facts, Found, Mark, Start, Values
from .protobuf import Message, double, inner, integer, message, messages, raw, text, texts, timestamp
from .reading import UNREADABLE, Account, Gather, media_of, read_document, read_json, read_media, read_yaml
from .record_log import records

HEADER = b":SWL\xd6\xe1"
VERSION = 2
OWN = "__swanlab__."
_STATES = {1: "finished", 2: "failed", 3: "killed"}
_TYPES = {2: "image", 3: "audio", 4: "text", 5: "video", 6: "echarts", 7: "object3d", 8: "molecule", 9: "html"}
_KINDS: dict[str, Callable[..., Media]] = {"image": Image, "audio": Audio}
_SYSTEM = 2
_NAME = re.compile(r"[^/\0]{1,255}$")


class SwanLabImporter:
    """Runs of a SwanLab log folder."""

    kind = "swanlab"
    title = "SwanLab"
    says_end = True

    def find(self, path: Path) -> Iterator[Found]:
        """Yield the runs whose folders are in this folder, or the run of this folder; a resumed run has several."""
        if not path.is_dir():
            return
        logs = sorted(path.glob("run-*.swanlab")) or sorted(path.glob("run-*/run-*.swanlab"))
        runs: dict[str, tuple[Message, list[Path]]] = {}
        for log in logs:
            start = _start(log)
            if start is not None:
                runs.setdefault(text(start, 10) or log.parent.name, (start, []))[1].append(log.parent)
        for run_id, (start, folders) in runs.items():
            ours = _config(folders[0], Account()).get("FRAMEWORK") == "fanfold"
            yield Found(
                kind="swanlab", id=run_id, paths=tuple(folders), project=text(start, 1) or "swanlab", name=text(start, 4),
                fanfold_id=run_id if ours else None,
            )  # fmt: skip

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        """Yield a run's events, one attempt a folder."""
        state: dict[str, int] = copy.deepcopy(position) if isinstance(position, dict) else {}
        account = Account()
        for folder in found.paths:
            for log in sorted(folder.glob("run-*.swanlab")):
                yield from _Log(folder, log, account, ours=found.fanfold_id is not None).events(state)
        yield from account.events()
        if state != (position or {}):
            yield Mark(position=state)


def _start(log: Path) -> Message | None:
    """Return the record that a log begins with; an empty one if it cannot be read; None if this is not a log."""
    try:
        with open_regular(log) as file:
            if file.read(len(HEADER)) != HEADER:
                return None
            first = next(records(file, len(HEADER) + 1, Account()), None)
        return inner(message(first[0]), 10) if first else {}
    except OSError:
        return None
    except ValueError:
        return {}


def _config(folder: Path, account: Account) -> dict[str, Any]:
    """Return the config that a start wrote: a map of each key to its value, description and place."""
    try:
        data = read_document(folder / "files" / "config.yaml")
    except OSError:
        return {}
    try:
        found = read_yaml(data)
    except ValueError:
        found = flat_yaml.read(data.decode("utf-8", "replace"))
        if re.search(rb"^ *- (?:- |[^\n'\"]+: )", data, re.MULTILINE):
            account.leave("parts of the config", "lists of maps need PyYAML: pip install pyyaml, then import again")
    entries = found.items() if isinstance(found, dict) else ()
    return {str(key): entry["value"] for key, entry in entries if isinstance(entry, dict) and "value" in entry}


class _Log:
    """The log of one start."""

    def __init__(self, folder: Path, log: Path, account: Account, *, ours: bool) -> None:
        self.folder, self.log, self.account, self.ours = folder, log, account, ours
        self.gather = Gather()
        self.system: set[str] = set()

    def events(self, state: dict[str, int]) -> Iterator[Event]:
        """Yield the events of the records that are new."""
        name = self.folder.name
        before = state.get(name, 0)
        try:
            with open_regular(self.log) as file:
                head = file.read(len(HEADER) + 1)
                if len(head) == len(HEADER) + 1 and head[-1] != VERSION:
                    self.account.leave(
                        "runs", f"SwanLab wrote them in version {head[-1]} of its format; {VERSION} can be read", name
                    )
                    return
                if before:
                    self._columns(file, before)
                for data, after in records(file, max(before, len(head)), self.account):
                    if before == state.get(name, 0) != 0:  # the first new record
                        yield Start(time_ns=None, attempt=name)
                    yield from self.account.all_or_none(self._record(data), "records", f"in {name}")
                    state[name] = after
        except OSError as error:
            self.account.leave("runs", f"cannot be read: {error.strerror}", name)
        yield from self.gather.flush()

    def _columns(self, file: Any, before: int) -> None:
        """Read again which keys are of the machine, from the part that was read before."""
        for data, after in records(file, len(HEADER) + 1, Account()):
            if after > before:
                return
            found, _ = outcome(message, data)
            if found is not None and 12 in found:
                list(self._record(data))

    def _record(self, data: bytes) -> Iterator[Event]:
        record = message(data)
        if 13 in record:
            yield from self._scalar(inner(record, 13))
        elif 14 in record:
            yield from self.gather.flush()
            yield from self._media(inner(record, 14))
        elif 12 in record:
            column = inner(record, 12)
            if integer(column, 1) == _SYSTEM:
                self.system.add(text(column, 3))
        elif 16 in record:
            log = inner(record, 16)
            stream = "stderr" if integer(log, 2) else "stdout"
            yield Console(text=text(log, 1) + "\n", time_ns=timestamp(log, 3), stream=stream)
        elif 10 in record:
            yield from self._started(inner(record, 10), timestamp(record, 2))
        elif 11 in record:
            yield from self._finished(inner(record, 11), timestamp(record, 2))
        elif 20 in record:
            yield from self._saved(inner(record, 20), timestamp(record, 2))

    def _started(self, start: Message, recorded: int | None) -> Iterator[Event]:
        yield Start(time_ns=timestamp(start, 12) or recorded, attempt=self.folder.name)
        facts = {"job_type": text(start, 8), "workspace": text(start, 2), "color": text(start, 9)}
        yield Facts(
            name=text(start, 4) or None, group=text(start, 7) or None, tags=texts(start, 6) or None, notes=text(start, 5) or None,
            facts={"swanlab": {name: value for name, value in facts.items() if value}},
        )  # fmt: skip

    def _finished(self, finish: Message, recorded: int | None) -> Iterator[Event]:
        yield from self.gather.flush()
        state = _STATES.get(integer(finish, 1))
        if state is not None:
            yield End(status=state, time_ns=timestamp(finish, 3) or recorded, cause=text(finish, 2))

    def _scalar(self, scalar: Message) -> Iterator[Event]:
        key, time_ns, value = text(scalar, 1), timestamp(scalar, 4), double(inner(scalar, 5), 1)
        if key in self.system:
            yield from self.gather.add(None, time_ns, {key.removeprefix(OWN): value}, system=True)
        else:
            yield from self.gather.add(integer(scalar, 2), time_ns, {key: value})

    # Media and files

    def _media(self, media: Message) -> Iterator[Event]:
        key, step, kind, time_ns = text(media, 1), integer(media, 2), _TYPES.get(integer(media, 3), ""), timestamp(media, 4)
        items = list(messages(inner(media, 5), 1))
        made: list[Any] = []
        for item in items:
            value, error = outcome(self._made, kind, item)
            if isinstance(value, Path):
                yield Artifact(name=key, files=[(value.name, value)], type=kind, step=step, time_ns=time_ns)
            elif value is not None:
                made.append(value)
            else:
                self.account.leave(kind or "media", f"cannot be read: {error}", key)
        if made:
            yield Values(step=step, time_ns=time_ns, values={key: made if len(items) > 1 and len(made) > 1 else made[0]})

    def _made(self, kind: str, item: Message) -> Any:
        """Return an item as a value; a chart or a molecule as the path of its file."""
        name, caption = text(item, 1), text(item, 4) or None
        place = self.folder / "media" / kind / name
        data = raw(item, 5) or self._content(place, name)
        if kind == "text":
            return data.decode("utf-8", "replace")
        if kind == "echarts":
            return _table(data) or place
        if kind in ("object3d", "molecule"):
            return place
        if kind == "html":
            return media_of(data, "html")
        if kind == "video":
            return Video(data, caption=caption)
        return _KINDS[kind](data, caption=caption)

    def _content(self, place: Path, name: str) -> bytes:
        if not _NAME.match(name) or name in (".", ".."):
            raise ValueError("its name leads elsewhere")
        return read_media(place)

    def _saved(self, save: Message, time_ns: int | None) -> Iterator[Event]:
        kind, name = integer(save, 5), text(save, 1)
        if kind == 1:
            yield from self._configured()
        elif kind == 2:
            found = read_json(self.folder / "files" / "swanlab-metadata.json")
            if isinstance(found, dict):
                yield Facts(facts={"swanlab": {"metadata": found}})
        elif kind == 3:
            lines, _ = outcome(lambda: read_document(self.folder / "files" / "requirements.txt").decode("utf-8", "replace"))
            pairs = [line.split("==", 1) for line in (lines or "").splitlines() if "==" in line]
            yield Facts(facts={"packages": {pair[0].strip(): pair[1].strip() for pair in pairs}})
        elif kind == 0:
            place = self._copy(name, Path(text(save, 2)))
            if place is None:
                self.account.leave("files", "SwanLab only recorded where they were, and that is outside of its folder", name)
            else:
                yield Artifact(name=name, files=[(name, place)], time_ns=time_ns)

    def _copy(self, name: str, source: Path) -> Path | None:
        """Return where a saved file is, if it is in the run's folder or beside it: no log names another place to read."""
        home = self.folder.parent.resolve()
        for place in (self.folder / "files" / name, source):
            resolved = place.resolve()
            if resolved.is_file() and resolved.is_relative_to(home):
                return resolved
        return None

    def _configured(self) -> Iterator[Event]:
        config = _config(self.folder, self.account)
        if not self.ours:
            yield Facts(config=config)
            return
        tags, notes, summary = (config.pop(name, None) for name in ("fanfold.tags", "fanfold.notes", "summary"))
        config.pop("FRAMEWORK", None)
        yield Facts(
            config=config, tags=[str(tag) for tag in tags] if isinstance(tags, list) else None,
            notes=str(notes) if notes else None, summary=summary if isinstance(summary, dict) else None,
        )  # fmt: skip


def _table(data: bytes) -> Table | None:
    """Return a chart that is a table; None for any other."""
    try:
        found = json.loads(data)
    except UNREADABLE:
        return None
    if not isinstance(found, dict) or found.get("_swanLab") != "table":
        return None
    names = [str(column["field"]) for column in found["colDefs"]]
    return Table(columns=names, data=[[row.get(name) for name in names] for row in found["rowData"]])
