"""Helpers of the importers' tests: a random run, comparable content of a run, imports into a fresh directory, damaged files."""

from __future__ import annotations

import math
import random
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

import fanfold
from fanfold.store import StoredRun
from fanfold.transfer import events
from fanfold.transfer.importers import importer_of
from fanfold.transfer.importing import Import


def random_run(root: Path, seed: int = 0, project: str = "p", **options: Any) -> fanfold.Run:
    """Log numbers of every type, text and images at random steps, and finish."""
    rng = random.Random(seed)
    run = fanfold.init(project, dir=root, system=False, console=False, quiet=True, **options)
    for step in range(40):
        values: dict[str, Any] = {"loss": rng.gauss(0, 1), "val/acc": rng.random() * 10.0 ** rng.randrange(-300, 300)}
        if rng.random() < 0.3:
            values |= {"count": rng.randrange(1 << 40), "odd": rng.choice([math.nan, math.inf, -math.inf, 0.1])}
        run.log(values, step=step)
    run.log({"note": "hällo\n\"quoted\", 'yes'"}, step=3)
    run.log({"picture": fanfold.Image(np.full((4, 5, 3), seed, np.uint8))}, step=4)
    run.finish()
    return run


def numbers(run: StoredRun) -> dict[str, Any]:
    """Return the steps and values of each metric, with NaN as a string so that it equals itself."""
    series = map(run.series, run.keys())
    return {one.key: list(zip(one.steps.tolist(), map(_shown, one.values.tolist()), strict=True)) for one in series}


def _shown(value: Any) -> Any:
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def imported(*sources: Path, into: Path, kind: str | None = None) -> tuple[list[StoredRun], list[Any]]:
    """Import sources into a directory; return its runs and their accounts."""
    accounts = Import([str(source) for source in sources], kind=kind, dir=into).once()
    return list(fanfold.runs(dir=into)), accounts


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return damaged bytes: truncated, flipped, inserted, deleted, or with a value replaced."""
    odd = [b"null", b"[]", b"{}", b"1e999", b'"x"', b"-1", b"9" * 23, b"NaN", b"[[" * 500, b"\n", b"\t", b",", b'"../../x"']
    at, how = rng.randrange(len(data) + 1), rng.randrange(6)
    if how == 0:
        return data[:at]
    if how == 1:
        return bytes(byte if rng.random() > 0.01 else rng.randrange(256) for byte in data)
    if how == 2:
        return data[:at] + rng.randbytes(rng.randrange(1, 50)) + data[at:]
    if how == 3:
        return data[:at] + data[at + rng.randrange(1, 200) :]
    if how == 4:
        return data[:at] + rng.choice(odd) + data[at:]
    places = list(re.finditer(rb'"[^"]{1,40}"|\d+(?:\.\d+)?|true|null', data))
    if not places:
        return data[:at]
    place = rng.choice(places)
    return data[: place.start()] + rng.choice(odd) + data[place.end() :]


def damage(path: Path, rng: random.Random) -> None:
    """Damage one file; for an archive, half of the time one of its members."""
    if path.suffix != ".zip" or rng.random() < 0.5:
        path.write_bytes(mutated(path.read_bytes(), rng))
        return
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice([name for name in members if name.endswith(("json", "jsonl"))])
    members[name] = mutated(members[name], rng)
    with zipfile.ZipFile(path, "w") as archive:
        for one, content in members.items():
            archive.writestr(one, content)


def survives_damage(kind: str, source: Path, scratch: Path, times: int = 150) -> tuple[float, float]:
    """Read a randomly damaged source many times; return how often, as shares, a run was still found, and reported what is missing.

    Importers never raise: they report what they cannot read as `Left`.
    """
    importer, found, told = importer_of(kind), 0, 0
    for seed in range(times):
        rng = random.Random(seed)
        place = scratch / source.name
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        if source.is_dir():
            shutil.copytree(source, place)
        else:
            shutil.copyfile(source, place)
        files = [one for one in place.rglob("*") if one.is_file()] if place.is_dir() else [place]
        damage(rng.choice([one for one in files if one.stat().st_size < 1 << 20]), rng)
        for one in importer.find(place):
            found += 1
            read = list(importer.read(one))
            told += any(isinstance(event, events.Left) for event in read)
    return found / times, told / times
