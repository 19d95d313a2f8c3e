"""A run of 2,000 ranks is listed, shown, folded and drawn by processes that may open 256 files."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from answers import asked, decode, serving
from fanfold.journal import format as fmt

RANKS, STEPS, START = 2000, 5, 1_790_000_000_000_000_000
LIMIT = 256
FOLD = """
import sys, fanfold
run = fanfold.open(sys.argv[1])
folded = run.series("loss", fold="mean")
print(len(run.ranks), folded.values.tolist(), folded.max_rank.tolist(), folded.count.tolist())
"""


def journal(rank: int, run: str) -> tuple[str, bytes]:
    """Return the name and bytes of the journal that one rank writes."""
    id = f"{rank:016x}"
    seed = fmt.seed_of(id)
    shape = fmt.Shape(1, 0, "d", ("loss",))
    header = {"format": [fmt.MAJOR, fmt.MINOR], "journal": id, "run": run, "project": "big", "name": run, "attempt": "a",
              "role": "main", "rank": rank, "world": RANKS, "started": START, "ordinal": 1, "node": "elsewhere"}  # fmt: skip
    frames = [fmt.frame(fmt.Kind.HEADER, fmt.pack(header), 0), fmt.frame(fmt.Kind.SHAPE, shape.body(), seed)]
    for step in range(STEPS):
        body = fmt.struct.pack(shape.codes, 1, START + step * 10**9, step, float(rank + step))
        frames.append(fmt.frame(fmt.Kind.ROW, body, seed))
    frames.append(fmt.frame(fmt.Kind.END, fmt.pack({"t": START + STEPS * 10**9, "status": "finished"}), seed))
    return f"{rank}-{id}{fmt.SUFFIX}", b"".join(frames)


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("many")
    folder = root / "big" / "wide" / "journal"
    folder.mkdir(parents=True)
    for rank in range(RANKS):
        name, data = journal(rank, "wide")
        (folder / name).write_bytes(data)
    return root


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))


def limited(*words: str, cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, preexec_fn=few_files,
        env={**os.environ, "FANFOLD_CACHE_DIR": str(cache)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_thousand_ranks_are_listed_shown_and_folded_with_256_descriptors(big, tmp_path):
    (listed,) = json.loads(limited("-m", "fanfold", "ls", "--json", "--dir", str(big), cache=tmp_path))
    assert (listed["id"], listed["ranks"], listed["status"]) == ("wide", RANKS, "finished")
    shown = json.loads(limited("-m", "fanfold", "show", "wide", "--json", "--dir", str(big), cache=tmp_path))
    assert (shown["status"], shown["summary"]["loss"]) == ("finished", STEPS - 1.0)
    mean = [step + (RANKS - 1) / 2 for step in range(STEPS)]
    expected = f"{RANKS} {mean} {[RANKS - 1] * STEPS} {[RANKS] * STEPS}\n"
    assert limited("-c", FOLD, str(big / "big" / "wide"), cache=tmp_path) == expected


def test_two_thousand_ranks_are_asked_in_sql_with_256_descriptors(big, tmp_path):
    query = "SELECT count(DISTINCT rank) AS ranks, count(*) AS points FROM points WHERE key = 'loss'"
    answer = limited("-m", "fanfold", "query", "--json", query, "--dir", str(big), cache=tmp_path)
    assert json.loads(answer) == [{"ranks": RANKS, "points": RANKS * STEPS}]


def test_two_thousand_ranks_are_drawn_by_a_server_with_256_descriptors(big, tmp_path):
    with serving(big, tmp_path, preexec_fn=few_files) as address:
        listed = json.loads(asked(f"{address}/api/runs?project=big"))
        assert [run["ranks"] for run in listed["runs"]] == [RANKS]
        assert listed["unreadable"] == []
        query = {"project": "big", "runs": ["wide"], "keys": ["loss"], "fold": "mean"}
        _, (drawn,) = decode(asked(f"{address}/api/series", query))
    assert np.allclose(drawn["columns"]["y"], [step + (RANKS - 1) / 2 for step in range(STEPS)])
    assert drawn["columns"]["highRank"].tolist() == [RANKS - 1] * STEPS
