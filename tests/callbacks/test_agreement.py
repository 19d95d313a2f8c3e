"""All ranks act after the same step although one of them asked: by threads on both kinds of board, and in real trainings."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

import fault_table
import warm_python
from paths import HELPERS

torch = pytest.importorskip("torch")

from fanfold.callbacks.control import TrainerControl  # noqa: E402
from fanfold.recording import agreement as agreements  # noqa: E402
from fanfold.recording.agreement import Agreement, Request  # noqa: E402
from fanfold.recording.boards import FolderBoard, StoreBoard  # noqa: E402

TRAIN = HELPERS / "agreement_train.py"
STOP = Request("test", ("save", "stop"), "a test")


def boards(kind, ranks, folder, store=None):
    if kind == "folder":
        made = [FolderBoard(folder / "board", rank, ranks) for rank in range(ranks)]
    else:
        made = [StoreBoard(store, "test/", rank, ranks) for rank in range(ranks)]
    for board in made:
        board.interval = 0.02
    return made


def run_ranks(made, train):
    """Run `train(rank, agreement)` in a thread for each rank; return what each returned."""
    ends = [None] * len(made)
    talks = [Agreement(board) for board in made]

    def work(rank):
        ends[rank] = train(rank, talks[rank])
        talks[rank].close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return ends


@pytest.mark.parametrize("kind", ["folder", "store"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("together", [True, False], ids=["lock-step", "each at its own pace"])
def test_ranks_stop_after_the_same_step_with_random_delays(kind, ranks, together, tmp_path):
    """The barrier stands for a collective: were a rank to stop before the others, it would break."""
    chance = random.Random(ranks)
    asked, asker = chance.randrange(5, 15), chance.randrange(ranks)
    collective = threading.Barrier(ranks, timeout=30)

    def train(rank, talk):
        mine = random.Random(rank)
        for step in range(1, 100_000):
            if together:
                collective.wait()
            time.sleep(mine.uniform(0, 0.004) if step < 20 else 0.0003)  # ten times as fast from some step on
            decisions = talk.at(step, [STOP] if step >= asked and rank == asker else [])
            if decisions:
                return step, decisions[0].missing
        raise AssertionError("never stopped")

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = run_ranks(boards(kind, ranks, tmp_path, store), train)
    assert len(set(ends)) == 1, ends
    assert ends[0][0] >= asked
    assert ends[0][1] == ()


def test_when_all_ranks_ask_after_the_same_step_they_act_after_that_step(tmp_path):
    def train(rank, talk):
        for step in range(1, 100):
            time.sleep(0.002 * (rank + 1))
            if talk.at(step, [STOP] if step == 7 else []):
                return step
        raise AssertionError("never stopped")

    assert run_ranks(boards("folder", 4, tmp_path), train) == [7, 7, 7, 7]


def test_several_ranks_may_ask_at_different_steps(tmp_path):
    collective = threading.Barrier(4, timeout=30)

    def train(rank, talk):
        for step in range(1, 100_000):
            collective.wait()
            if talk.at(step, [STOP] if step >= 5 + 2 * rank else []):
                return step
        raise AssertionError("never stopped")

    assert len(set(run_ranks(boards("folder", 4, tmp_path), train))) == 1


def test_requests_one_after_the_other_are_each_done_once_by_all(tmp_path):
    collective = threading.Barrier(3, timeout=30)

    def train(rank, talk):
        control, done = TrainerControl(), []
        for step in range(1, 100_000):
            collective.wait()
            control.should_evaluate = control.should_save = False
            if rank == 1 and len(done) < 2 and step == (done[-1] + 20 if done else 4):
                control.should_evaluate = True
            if rank == 2 and len(done) == 2 and step == done[-1] + 20:
                control.should_training_stop = True
            talk.steer(control, step)
            if control.should_evaluate:
                done.append(step)
            if control.should_training_stop:
                return step, tuple(done)
        raise AssertionError("never stopped")

    ends = run_ranks(boards("folder", 3, tmp_path), train)
    assert len(set(ends)) == 1
    assert len(ends[0][1]) == 2


def test_requests_from_outside_reach_all_ranks_before_the_actions_of_a_step(tmp_path):
    """A step has two places where ranks talk; one that acted at the second would save twice where another saves once."""
    count, ranks = 30, 3

    def train(rank, talk):
        mine, seen, sent = random.Random(rank), [], 0
        for step in range(1, 100_000):
            time.sleep(mine.uniform(0, 0.004))
            if rank == 0 and sent < count and step % 3 == 0:
                sent += 1
                threading.Timer(
                    mine.uniform(0, 0.01), talk.request, [Request("tell", ("save",), "somebody", f"number {sent}")]
                ).start()
            for late in (False, True):
                for decision in talk.at(step, late=late):
                    if not decision.applied:
                        decision.applied = True
                        seen += [(step, late, request.told) for request in decision.requests]
                time.sleep(mine.uniform(0, 0.004))
            if len(seen) == count:
                return tuple(seen)
        raise AssertionError("never told")

    ends = run_ranks(boards("folder", ranks, tmp_path), train)
    assert len(set(ends)) == 1, "each request, and at the same step on all ranks"
    assert {late for _, late, _ in ends[0]} == {False}
    assert {told for _, _, told in ends[0]} == {f"number {number}" for number in range(1, count + 1)}


def test_a_rank_that_has_just_agreed_sees_the_next_request_at_once(tmp_path):
    """An idle board would be looked at after a thousand seconds here, and rank 1 left behind."""
    made = boards("folder", 2, tmp_path)
    for board in made:
        board.interval = 1000.0
    collective = threading.Barrier(2, timeout=60)

    def train(rank, talk):
        acted = []
        for step in range(1, 10**6):
            collective.wait()
            time.sleep(0.001)
            asked = [Request("both", ("log",))] if step == 5 else []
            if rank == 0 and len(acted) == 1:
                asked = [Request("one", ("save",))]
            acted += [(one.actions, one.missing) for one in talk.at(step, asked) if one.delivered == step]
            if len(acted) == 2:
                return acted
        raise AssertionError("never done")

    assert run_ranks(made, train) == [[({"log"}, ()), ({"save"}, ())]] * 2
    names = sorted(path.name for path in (tmp_path / "board").iterdir())
    assert {name.split("-", 1)[1] for name in names} <= {"proposal", "decision", "0", "1"}, names  # no answers stay behind


def test_a_request_can_be_withdrawn_until_the_ranks_are_asked(tmp_path):
    alone = Agreement(None)
    request = Request("tell", ("stop",), "somebody", "one")
    alone.request(request)
    assert alone.withdraw(request)
    assert alone.at(1) == ()
    alone.request(request)
    assert [decision.requests for decision in alone.at(2)] == [(request,)]
    assert not alone.withdraw(request)


def test_a_request_from_another_thread_is_decided_during_a_long_step(tmp_path):
    def train(rank, talk):
        for step in range(1, 50):
            time.sleep(0.05)
            if rank == 0 and step == 3:
                threading.Timer(0.01, talk.request, [STOP]).start()
            if talk.at(step):
                return step
        raise AssertionError("never stopped")

    ends = run_ranks(boards("folder", 2, tmp_path), train)
    assert ends[0] == ends[1]


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path):
    def train(rank, talk):
        for step in range(1, 60 if rank else 5):
            time.sleep(0.01)
            if talk.at(step, [STOP] if step >= 30 and rank else []):
                return step
        return None

    began = time.monotonic()
    ends = run_ranks(boards("folder", 2, tmp_path), train)
    assert ends[0] is None
    assert ends[1] is not None
    assert time.monotonic() - began < agreements.DEADLINE_SECONDS


def test_a_silent_rank_is_left_behind_after_the_deadline(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(agreements, "DEADLINE_SECONDS", 1.0)
    first, second, _silent = boards("folder", 3, tmp_path)

    def train(rank, talk):
        for step in range(1, 100_000):
            time.sleep(0.01)
            decisions = talk.at(step, [STOP] if step >= 5 and rank == 0 else [])
            if decisions:
                return step, decisions[0].missing, talk.complete
        raise AssertionError("never stopped")

    ends = run_ranks([first, second], train)
    assert ends[0] == ends[1]
    assert ends[0][1:] == ((2,), False)
    assert "rank 2 did not answer within 1 seconds" in caplog.text


class Hangs:
    """A board whose server stopped answering without closing the connection."""

    rank, world_size, interval = 0, 2, 0.01

    def create(self, key, text):
        threading.Event().wait()

    def read(self, keys):
        threading.Event().wait()


class Fails(Hangs):
    def read(self, keys):
        raise ConnectionResetError("the store is gone")


@pytest.mark.parametrize("board", [Hangs, Fails])
def test_a_board_that_is_gone_holds_nobody_up(board, monkeypatch):
    monkeypatch.setattr(agreements, "HOLD_SECONDS", 0.5)
    talk = Agreement(board())
    assert talk.at(1) == ()
    decisions = talk.at(2, [STOP])
    assert [(decision.step, decision.missing) for decision in decisions] == [(2, (1,))]
    talk.close()


def test_alone_a_process_agrees_with_itself_at_once():
    talk, control = Agreement(None), TrainerControl(should_training_stop=True)
    talk.steer(control, 3)
    assert control.should_training_stop
    assert talk.complete


# In real trainings


def launch(folder, ranks, kind, how="trainer", expect=0, **options):
    """Train under torchrun; return where each rank ended."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(TRAIN),
        str(folder),
        kind,
    ]
    done = warm_python.run(
        [*command, *(f"{name}={value}" for name, value in options.items())], capture_output=True, text=True, timeout=300, libraries="torch",
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "FANFOLD_SYSTEM": "0", "TRAIN_HOW": how},
    )  # fmt: skip
    assert done.returncode == expect, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def check_preempted(folder, ends, asked):
    steps = {end["step"] for end in ends}
    unsaved = sum(end["saved"][-1:] != [end["step"]] for end in ends)
    fault_table.record(
        "SIGTERM to one rank of a training (points: ranks that saved the same step)", points=len(ends), lost=unsaved
    )
    assert len(steps) == 1, ends
    (step,) = steps
    assert asked <= step <= asked + 60
    assert all(end["saved"][-1] == step for end in ends)
    from safetensors.torch import load_file

    saved = folder / "out" / f"checkpoint-{step}"
    assert json.loads((saved / "trainer_state.json").read_text())["global_step"] == step
    assert set(load_file(saved / "model.safetensors")) == {"line.weight", "line.bias"}
    torch.load(saved / "optimizer.pt", weights_only=True)


def test_a_signal_to_one_rank_after_a_slow_first_step_saves_and_stops_all(tmp_path):
    ends = launch(tmp_path, 2, "preempted", first=4.0, pace=0.002, save_steps=10, at=23)
    check_preempted(tmp_path, ends, 23)


def test_a_nan_on_one_rank_stops_all_after_the_same_step(tmp_path):
    ends = launch(tmp_path, 2, "nonfinite", how="by hand", at=12)
    assert ends[0]["step"] == ends[1]["step"]
    assert 12 <= ends[0]["step"] < 200


def test_flags_set_by_a_callback_on_one_rank_act_on_all(tmp_path):
    ends = launch(tmp_path, 2, "flags", pace=0.02)
    assert ends[0] == ends[1]
    assert len(ends[0]["saved"]) == 1
    assert 20 <= ends[0]["step"] < 300


def test_early_stopping_on_all_ranks_stops_after_the_evaluation(tmp_path):
    ends = launch(tmp_path, 2, "early", pace=0.0)
    assert [end["step"] for end in ends] == [8, 8]  # one evaluation without progress, and no step more


def run_apart(folder, ranks, kind, **options):
    """Start ranks of one run without a process group; return the processes."""
    folder.mkdir(parents=True, exist_ok=True)
    options = [f"{name}={value}" for name, value in options.items()]
    return [
        warm_python.Popen(
            [sys.executable, str(TRAIN), str(folder), kind, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            libraries="torch", env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "FANFOLD_RUN_ID": "apart",
                 "TRAIN_HOW": "apart", "FANFOLD_DIR": str(folder / "runs")},
        )
        for rank in range(ranks)
    ]  # fmt: skip


def test_ranks_without_a_process_group_agree_in_the_directory_of_their_run(tmp_path):
    ranks = run_apart(tmp_path, 3, "preempted", steps=100000, at=50, signalled=2)
    for each in ranks:
        _, err = each.communicate(timeout=120)
        assert each.returncode == 0, err
    ends = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert len({end["step"] for end in ends}) == 1
    assert ends[0]["saved"] == [ends[0]["step"]]


def test_ranks_that_are_started_again_by_hand_do_not_find_what_was_agreed_before(tmp_path):
    """By the same address and id, all starts look the same to every rank but the first."""
    for steps, signalled in ((100000, 1), (300, -1)):
        for each in run_apart(tmp_path, 2, "preempted", steps=steps, at=50, signalled=signalled):
            _, err = each.communicate(timeout=120)
            assert each.returncode == 0, err
    ends = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ends == [{"step": 300, "saved": []}] * 2


def test_the_others_save_when_a_rank_is_killed_during_the_agreement(tmp_path):
    ranks = run_apart(tmp_path, 3, "killed", steps=100000, at=50, signalled=1, kill=2)
    for rank, each in enumerate(ranks):
        _, err = each.communicate(timeout=120)
        assert each.returncode == (-signal.SIGKILL if rank == 2 else 0), err
    ends = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ends[0]["step"] == ends[1]["step"]
    assert ends[0]["saved"] == ends[1]["saved"] == [ends[0]["step"]]


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("turn", range(5))
def test_every_preemption_ends_with_a_checkpoint_whatever_the_pace(ranks, turn, tmp_path):
    chance = random.Random(100 * ranks + turn)
    asked = chance.randrange(8, 40)
    options = {"first": chance.choice([0.0, 3.0]), "pace": 0.02, "jitter": 0.01, "faster_after": chance.choice([0, 10, asked]),
               "eval_steps": chance.choice([0, 7]), "save_steps": chance.choice([0, 9]), "signalled": chance.randrange(ranks)}  # fmt: skip
    check_preempted(tmp_path, launch(tmp_path, ranks, "preempted", at=asked, **options), asked)
