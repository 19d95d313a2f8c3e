"""`fanfold nodes`: slow nodes and GPUs are found over runs, and only those."""

import json
import os
import random
import sys

import pytest

import fanfold
import warm_python
from clickhouse_tools import Fleet
from fanfold.cli import main
from fanfold.journal import Writer
from fanfold.journal import format as fmt
from fanfold.store.nodes import slow_places
from paths import HELPERS

START = 1_790_000_000_000_000_000


def write_run(root, id, nodes, *, per_node=2, slow=(), seed=0, hiccup=None, logs=("time/compute", "time/data", "time/step")):
    """Write a run of some nodes, as StragglerCallback does. slow: by node or GPU, how many times as long it computes."""
    dice = random.Random(f"{id}{seed}")
    base = dice.choice([0.05, 0.2, 1.5])  # every run has a model of its own
    for rank in range(len(nodes) * per_node):
        node, local = nodes[rank // per_node], rank % per_node
        times = dict(slow).get(node, 1.0) * dict(slow).get(f"{node}:{local}", 1.0)
        header = {
            "format": [fmt.MAJOR, fmt.MINOR], "rank": rank, "role": "main", "attempt": "a", "run": id, "project": "p", "ordinal": 1,
            "node": node, "local_rank": local, "world": len(nodes) * per_node,
        }  # fmt: skip
        writer = Writer(root / "p" / id / "journal", header)
        for step in range(50, 1050, 50):
            own = base * times * dice.gauss(1.0, 0.01) * (3.0 if hiccup == (node, step) else 1.0)
            values = {"time/compute": own, "time/data": base * 0.02, "time/step": base * 1.3}
            kept = {key: value for key, value in values.items() if key in logs}
            writer.row(kept or {"loss": 1.0}, "d" * max(1, len(kept)), time_ns=START + step * 10**9, step=step)
        writer.close({"status": "finished", "t": START + 2000 * 10**9})


@pytest.fixture
def fleet(tmp_path):
    """Twelve runs on four of eight nodes each. n5 is slow by a tenth; so is the second GPU of n2, and n1 once, by chance."""
    dice = random.Random(1)
    for number in range(12):
        nodes = ["n5", "n2", *dice.sample(["n1", "n3", "n4", "n6", "n7", "n8"], 2)]
        dice.shuffle(nodes)
        slow = {"n5": 1.1, "n2:1": 1.1} | ({"n1": 1.6} if number == 3 else {})
        write_run(tmp_path, f"run{number:02}", nodes, slow=slow.items(), hiccup=(nodes[0], 500))
    return tmp_path


def test_slow_nodes_and_gpus_are_found_and_no_others(fleet):
    found = slow_places(fanfold.runs("p", dir=fleet))
    assert [place.name for place in found.nodes if place.verdict == "slow"] == ["n5"]
    slowest = found.nodes[0]
    assert slowest.ratio == pytest.approx(1.09, abs=0.03) and slowest.runs == slowest.slower == 12 and slowest.sure
    guilty = {place.name for place in found.gpus if place.verdict == "slow"}
    assert guilty == {"n5:0", "n5:1", "n2:1"}
    assert (found.compared, found.alone, found.unmeasured) == (12, 0, 0)


def test_a_few_runs_are_not_enough_to_accuse_a_node(tmp_path):
    for number in range(2):
        write_run(tmp_path, f"run{number}", ["n1", "n2", "n3"], slow={"n3": 1.5}.items())
    found = slow_places(fanfold.runs("p", dir=tmp_path))
    assert next((place.name, place.verdict) for place in found.nodes) == ("n3", "too few runs")
    assert {place.verdict for place in found.nodes} == {"too few runs"}
    assert [place.name for place in slow_places(fanfold.runs("p", dir=tmp_path), least=2).nodes if place.verdict == "slow"] == [
        "n3"
    ]


def test_healthy_nodes_stay_unsuspected(tmp_path):
    for number in range(30):
        write_run(tmp_path, f"run{number:02}", random.Random(number).sample([f"n{one}" for one in range(10)], 4))
    found = slow_places(fanfold.runs("p", dir=tmp_path))
    assert {place.verdict for place in (*found.nodes, *found.gpus)} <= {"ok", "too few runs"}


def test_the_command_names_them_and_its_exit_code_says_so(fleet, capsys):
    assert main(["nodes", "--dir", str(fleet)]) == 3
    seen = capsys.readouterr()
    lines = [line for line in seen.out.splitlines() if "slow," in line]
    assert [line.split()[:2] for line in lines] == [["node", "n5"], ["GPU", "n2:1"]]
    assert "12 runs compared" in seen.err
    assert main(["nodes", "--dir", str(fleet), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["nodes"][0]["name"] == "n5"
    assert main(["nodes", "--dir", str(fleet), "--since", "1h"]) == 3  # the times in their headers are now
    assert main(["nodes", "--dir", str(fleet), "--since", "soon"]) == 2
    assert "not a duration" in capsys.readouterr().err


def test_runs_that_recorded_no_waits_are_counted_and_accuse_nobody(tmp_path, capsys):
    for number in range(4):
        write_run(tmp_path, f"run{number}", ["n1", "n2"], slow={"n2": 2.0}.items(), logs=())
    with fanfold.init("p", dir=tmp_path, quiet=True, system=False):
        pass
    found = slow_places(fanfold.runs("p", dir=tmp_path))
    assert (found.nodes, found.compared, found.unmeasured, found.alone) == ([], 0, 4, 1)
    assert main(["nodes", "--dir", str(tmp_path)]) == 1
    assert "add StragglerCallback" in capsys.readouterr().err


def test_clickhouse_answers_the_same(fleet, clickhouse):
    database = Fleet(clickhouse)
    try:
        database.ship(fleet)
        here, there = slow_places(fanfold.runs("p", dir=fleet)), slow_places(fanfold.runs("p", dir=database.url))
        assert [(one.name, one.verdict, round(one.ratio, 9)) for one in there.gpus] == [
            (one.name, one.verdict, round(one.ratio, 9)) for one in here.gpus
        ]
        assert main(["nodes", "--dir", database.url]) == 3
    finally:
        database.close()


def test_a_real_training_with_a_slow_rank_is_evidence_and_its_waits_are_known(tmp_path):
    """Four processes of a real DistributedDataParallel training, of which rank 2 computes 60 ms longer in every step."""
    from fanfold.store.goodput import timelines

    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=3",
        "--standalone",
        HELPERS / "straggler_train.py",
    ]
    env = {**os.environ, "FANFOLD_DIR": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
    warm_python.run(
        [*command, tmp_path, "compute", "2"], libraries="torch", env=env, check=True, timeout=300, capture_output=True
    )
    (run,) = fanfold.runs(dir=tmp_path / "runs")
    waits = {one.rank: one.ns["ranks"] / 1e9 for one in timelines(run)}
    assert waits[2] < 0.5 * min(waits[0], waits[1])
    assert min(waits[0], waits[1]) > 0.7 * 56 * 0.06
    places = slow_places([run], least=1).gpus
    assert places[0].name.endswith(":2") and places[0].ratio > 1.5
