"""Comet's offline archives: reading them, and building them from what a killed process left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..atomic import replace_text, replacing
from .tools import cut_torn_end, read_json

MESSAGES = "messages.json"
TAGS = "tags.json"
EMPTY = 22  # size in bytes of an archive without files


def has_key() -> bool:
    """Return whether one of Comet's own config files holds an API key."""
    places = (os.environ.get("COMET_CONFIG"), "./.comet.config", "~/.comet.config")
    files = [Path(place).expanduser() for place in places if place]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file()]
    return any(re.search(r"^\s*api_key\s*[=:]\s*\S", text, re.MULTILINE | re.IGNORECASE) for text in texts)


def messages(folder: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yield every message of an experiment's archives."""
    for path in sorted(folder.glob(f"{key}*.zip")):
        try:
            with zipfile.ZipFile(path) as archive:
                data = archive.read(MESSAGES)
        except (zipfile.BadZipFile, KeyError):
            continue  # killed while writing: seal() has built another one from the same messages
        yield from lines(data)


def lines(data: bytes) -> list[dict[str, Any]]:
    """Parse messages, leaving out a line that is still being written."""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def keep_tags(folder: Path, tags: Sequence[str]) -> None:
    """Save the tags of the open experiment."""
    replace_text(folder / TAGS, json.dumps({"tags": list(tags)}))


def key_of(message: dict[str, Any]) -> str | None:
    """Return the key whose point a message completes: a metric, or the last of the media logged together."""
    payload = message["payload"]
    if message["type"] == "metric_msg":
        return str(payload["metric"]["metricName"])
    facts = payload.get("metadata") or {}
    if message["type"] == "file_upload" and "items" in facts and facts["item"] == facts["items"]:
        return str(facts["key"])
    return None


def seal(folder: Path, target: Path, key: str, *, project: str, workspace: str | None) -> None:
    """Archive what killed processes left in `folder`, each exactly once, even if this is killed repeatedly."""
    for left in sorted(path for path in folder.iterdir() if path.is_dir()):
        path = left / MESSAGES
        if cut_torn_end(path) and zlib.crc32(path.read_bytes()) not in _sums(target, key):
            _archive(left, target / f"{key}-{left.name}.zip", key, project, workspace)
        shutil.rmtree(left)
    for path in target.glob(f"{key}*.zip"):
        if not zipfile.is_zipfile(path) or path.stat().st_size == EMPTY:  # torn, or the empty one Comet starts with
            path.unlink()


def _sums(target: Path, key: str) -> set[int]:
    """Return the checksums of archived messages: Comet may have been killed between archiving and cleanup."""
    sums = set()
    for path in target.glob(f"{key}*.zip"):
        try:
            with zipfile.ZipFile(path) as archive:
                sums.add(archive.getinfo(MESSAGES).CRC)
        except (zipfile.BadZipFile, KeyError):
            continue
    return sums


def _archive(left: Path, target: Path, key: str, project: str, workspace: str | None) -> None:
    from comet_ml.offline_utils import write_experiment_meta_file

    began, tags = left.stat().st_ctime, (read_json(left.parent / TAGS) or {}).get("tags", [])
    write_experiment_meta_file(
        tempdir=str(left), experiment_key=key, workspace=workspace, project_name=project,
        start_time=int(began * 1000), stop_time=int((left / MESSAGES).stat().st_mtime * 1000), tags=tags,
        resume_strategy="get_or_create", user_provided_experiment_key=True, comet_start_sourced=True,
    )  # fmt: skip
    with replacing(target) as file, zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for path in sorted(left.iterdir()):
            if path.is_file():
                archive.write(path, path.name)
