"""System metrics of the nodes of a run: each node is asked for by the rank that samples it."""

from __future__ import annotations

import os
import subprocess
import sys

from fanfold.server import data, wire
from fanfold.stores import open_store

PROGRAM = """
import os, fanfold
rank = int(os.environ["FANFOLD_RANK"])
run = fanfold.init("p", id="job", system=False, quiet=True)
if rank % 2 == 0:
    for step in range(5):
        run.log({"system/cpu": 10.0 * rank + step, "system/gpu/0/util": 50.0 + rank}, step=step)
run.finish()
"""


def test_each_node_is_asked_for_by_its_rank(tmp_path):
    for rank in range(4):
        env = {**os.environ, "FANFOLD_DIR": str(tmp_path), "FANFOLD_RANK": str(rank), "FANFOLD_WORLD_SIZE": "4",
               "FANFOLD_NODE": f"node-{rank // 2}"}  # fmt: skip
        subprocess.run([sys.executable, "-c", PROGRAM], env=env, check=True, timeout=120, capture_output=True)
    store = open_store(tmp_path)
    query = data.SeriesQuery(
        project="p", runs=["job"], keys=["system/cpu", "system/cpu@0", "system/cpu@2", "system/cpu@1", "loss@2"], n=100
    )
    found = {one.key: one.last.tolist() for _, _, one in data.found_series(store, query)}
    assert found == {
        "system/cpu": [0.0, 1.0, 2.0, 3.0, 4.0],
        "system/cpu@0": [0.0, 1.0, 2.0, 3.0, 4.0],
        "system/cpu@2": [20.0, 21.0, 22.0, 23.0, 24.0],
    }
    assert data.series(store, query)[:4] == wire.encode({}, [])[:4]
    assert data.run(store, "p", "job")["nodes"] == {"node-0": 0, "node-1": 2}
