"""Attempts are told apart also where a launcher's key repeats, and where the journals of earlier ones are gone from their node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fanfold
from fanfold.journal import format as fmt
from store_data import START, write_journal

SECOND = 10**9
TRAIN = """
import sys, fanfold
run = fanfold.init("llm", dir=sys.argv[1], system=False, quiet=True)
first, last, value = map(int, sys.argv[2:])
for step in range(first, last):
    run.log({"loss": float(value)}, step=step)
run.finish()
"""
LIVES = ((0, 20, 1), (10, 30, 2), (15, 35, 3))  # first step, end, value


def launched(folder: Path, rank: int, life: tuple[int, int, int]) -> subprocess.Popen[bytes]:
    """Start a rank of a job on two nodes, as torchrun does; only the starts of rank 0 tell its restarts apart."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29501}
    names = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "127.0.0.1"}
    ours = {"FANFOLD_RUN_ID": "r1", "FANFOLD_RESUME": "allow", "FANFOLD_NODE": f"node{rank}"}
    env = {**os.environ, **{name: str(value) for name, value in place.items()}, **names, **ours}
    return subprocess.Popen([sys.executable, "-c", TRAIN, str(folder), *map(str, life)], env=env)


@pytest.mark.parametrize("pruned", [False, True])
def test_restarts_of_a_job_on_several_nodes_stay_apart_without_the_journals_before(tmp_path, pruned):
    store = tmp_path / "store"
    for number, life in enumerate(LIVES):
        node = tmp_path / (f"life{number}" if pruned else "node")
        ranks = [launched(node / str(rank), rank, life) for rank in (0, 1)]
        assert [rank.wait(60) for rank in ranks] == [0, 0]
        for rank in (0, 1):
            shutil.copytree(node / str(rank), store, dirs_exist_ok=True)
    run = fanfold.open("r1", dir=store)
    assert [attempt.key.rpartition(".")[2] for attempt in run.attempts] == ["1", "2", "3"]
    assert [sorted(journal.header.rank for journal in attempt.journals) for attempt in run.attempts] == [[0, 1]] * 3
    for rank in (0, 1):
        found = run.series("loss", rank=rank)
        assert found.steps.tolist() == list(range(35))
        assert found.values.tolist() == [1.0] * 10 + [2.0] * 5 + [3.0] * 20


def test_every_journal_of_a_start_is_in_its_attempt(tmp_path):
    folder = tmp_path / "p" / "r"
    end = (fmt.Kind.END, {"t": START, "status": "finished"})
    for life in (0, 1):
        at = START + life * 1000 * SECOND
        common = {"ordinal": 1, "process": f"main{life}"}
        write_journal(folder, 10 * life + 1, end, started=at, launcher="fanfold exec", **common)
        write_journal(folder, 10 * life + 2, end, started=at + SECOND, launcher="python", ordinal=1, process=f"inside{life}")
        write_journal(folder, 10 * life + 3, end, started=at + 990 * SECOND, follows=f"{10 * life + 1:016x}", **common)
        write_journal(folder, 10 * life + 4, end, started=at + 900 * SECOND, role="worker", ordinal=1, process=f"worker{life}")
        write_journal(folder, 10 * life + 5, end, started=at + 5 * SECOND, rank=1, ordinal=1, process=f"other{life}")
    attempts = fanfold.open(folder).attempts
    found = [sorted(int(journal.id, 16) for journal in attempt.journals) for attempt in attempts]
    assert found == [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15]]
