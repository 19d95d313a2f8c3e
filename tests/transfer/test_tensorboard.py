"""Event files come back value by value: written by TensorBoard's own writers, by fanfold's tracker, damaged, and growing."""

import random
import struct
import time

import numpy as np
import pytest

import fanfold
from fanfold.cli import main
from fanfold.transfer import tfrecord
from fanfold.transfer.importing import import_runs
from fanfold.transfer.tensorboard import TensorBoardImporter
from fanfold.transfer.tfrecord import _chained, _walked, crc32c, masked

TIME = 1_700_000_000.25


@pytest.fixture
def writer(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    return lambda name="runs/exp", **options: SummaryWriter(tmp_path / name, **options)


def bring(tmp_path, source="runs"):
    accounts = import_runs(tmp_path / source, dir=tmp_path / "store")
    return [fanfold.open(one.run, dir=tmp_path / "store") for one in accounts], accounts


def test_scalars_are_exact_whatever_their_steps(writer, tmp_path):
    values = np.random.default_rng(1).normal(size=400).astype(np.float32)
    values[:4] = np.nan, np.inf, -np.inf, 0.0
    steps = [*range(300), *(2**31 + n for n in range(50)), *(2**40 + n for n in range(50))]
    log = writer()
    for place, (step, value) in enumerate(zip(steps, values, strict=True)):
        log.add_scalar("loss", value, step, walltime=TIME + place)
        if place % 3 == 0:
            log.add_scalar("a/much/longer/name of a metric", value, step, walltime=TIME + place)
    log.add_scalar("once", 0.5, -3, walltime=TIME)
    log.close()
    (run,), (account,) = bring(tmp_path)
    series = run.series("loss")
    np.testing.assert_array_equal(series.values, values.astype(np.float64))
    assert series.steps.tolist() == steps
    np.testing.assert_allclose(series.times, TIME + np.arange(400), atol=1e-6, rtol=0)
    np.testing.assert_array_equal(run.series("a/much/longer/name of a metric").values, values[::3].astype(np.float64))
    assert run.series("once").steps.tolist() == [-3]
    assert (account.points, account.left, run.damaged) == (400 + 134 + 1, [], 0)
    assert (run.name, run.project) == ("exp", "runs")


def test_every_plugin_is_carried_or_named(writer, tmp_path):
    rng = np.random.default_rng(2)
    picture = (rng.random((3, 5, 7)) * 255).astype(np.uint8)
    log = writer()
    log.add_text("note", "hello *world*", 3, walltime=TIME)
    log.add_image("pic", picture, 1, walltime=TIME)
    log.add_images("pics", np.stack([picture, picture]) / 255.0, 1, walltime=TIME)
    log.add_histogram("weights", rng.normal(size=1000), 2, walltime=TIME)
    log.add_histogram_raw("raw", 0.0, 3.0, 6, 9.0, 17.0, [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 2, walltime=TIME)
    log.add_audio("sound", rng.random(800) * 2 - 1, 1, 8000, walltime=TIME)
    log.add_pr_curve("curve", rng.integers(0, 2, 100), rng.random(100), 1, num_thresholds=11, walltime=TIME)
    log.add_hparams({"lr": 0.1, "layers": 3, "name": "adam"}, {"hparam/accuracy": 0.75})
    log.add_custom_scalars({"x": {"y": ["Multiline", ["loss"]]}})
    log.add_mesh("mesh", np.zeros((1, 3, 3)), global_step=1)
    log.close()
    (run,), (account,) = bring(tmp_path)
    assert [point.text for point in run.texts("note")] == ["hello *world*"]
    np.testing.assert_array_equal(run.media("pic")[0].load().array(), picture.transpose(1, 2, 0))
    assert run.media("pics")[0].load().array().shape[-1] == 3
    assert run.media("weights")[0].load().count == 1000
    raw = run.media("raw")[0].load()
    assert (raw.counts.tolist(), raw.edges.tolist()) == ([1, 2, 3], [0, 1, 2, 3])
    assert run.media("sound")[0].load().sample_rate == 8000
    table = run.table("curve")
    assert table.columns[0] == "threshold" and len(table.rows) == 11
    assert run.config == {"lr": 0.1, "layers": 3, "name": "adam"}
    assert run.series("hparam/accuracy").values.tolist() == [0.75]
    assert {left.what for left in account.left} == {"3D mesh", "layout of custom charts"}


def test_a_writer_that_starts_again_is_the_next_attempt(writer, tmp_path):
    log = writer()
    for step in range(10):
        log.add_scalar("loss", 1.0, step, walltime=TIME + step)
    log.close()
    log = writer(purge_step=5)
    for step in range(5, 12):
        log.add_scalar("loss", 2.0, step, walltime=TIME + 100 + step)
    log.close()
    (run,), _ = bring(tmp_path)
    assert run.series("loss").values.tolist() == [1.0] * 5 + [2.0] * 7
    assert len(run.attempts) == 2 and len(run.series("loss", raw=True)) == 17


def test_tensorflows_way_of_writing_scalars(tmp_path):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util.tensor_util import make_tensor_proto

    (tmp_path / "runs").mkdir()
    log = EventFileWriter(str(tmp_path / "runs" / "tf"))
    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))
    for step in range(50):
        for tag, dtype in (("loss", np.float32), ("wide", np.float64)):
            value = Summary.Value(tag=tag, tensor=make_tensor_proto(dtype(0.1 * step)), metadata=plugin if step % 2 else None)
            if not step:
                value.metadata.CopyFrom(plugin)
            log.add_event(Event(wall_time=TIME + step, step=step, summary=Summary(value=[value])))
    log.close()
    (run,), (account,) = bring(tmp_path)
    assert run.series("loss").values.tolist() == [float(np.float32(0.1 * step)) for step in range(50)]
    assert run.series("wide").values.tolist() == [0.1 * step for step in range(50)]
    assert account.left == []


def test_tensorboardx_files(tmp_path):
    from tensorboardX import SummaryWriter

    log = SummaryWriter(str(tmp_path / "runs" / "x"))
    for step in range(30):
        log.add_scalar("loss", step / 7, step, walltime=TIME + step)
    log.add_text("note", "hi", 1)
    log.close()
    (run,), _ = bring(tmp_path)
    assert run.series("loss").values.tolist() == [float(np.float32(step / 7)) for step in range(30)]
    assert run.texts("note")[0].text == "hi"


def test_importing_again_adds_only_new_points(writer, tmp_path):
    log = writer()
    log.add_scalar("loss", 1.0, 0)
    log.flush()
    (run,), _ = bring(tmp_path)
    log.add_scalar("loss", 2.0, 1)
    log.close()
    (again,), (account,) = bring(tmp_path)
    assert (again.id, account.outcome, account.points) == (run.id, "updated", 1)
    assert again.series("loss").values.tolist() == [1.0, 2.0]
    assert bring(tmp_path)[1][0].outcome == "unchanged"


def test_sync_to_tensorboard_and_back(tmp_path, capsys):
    rng = np.random.default_rng(3)
    run = fanfold.init("p", dir=tmp_path / "mine", quiet=True, system=False, config={"lr": 0.1, "deep": {"n": 3}})
    values = {"loss": rng.normal(size=60), "acc": rng.random(60)}
    for step in range(60):
        run.log({key: column[step] for key, column in values.items()}, step=step * 3)
    run.log({"note": "text", "pic": fanfold.Image((rng.random((4, 4, 3)) * 255).astype(np.uint8))}, step=200)
    run.log({"hist": fanfold.Histogram(np_histogram=([1, 2], [0.0, 1.0, 2.0]))}, step=200)
    run.finish()
    folder = tmp_path / "tb"
    kwargs = f'{{"logging_dir": "{folder}"}}'
    assert main(["sync", run.id, "--dir", str(tmp_path / "mine"), "--to", "tensorboard", "--kwargs", kwargs]) == 0
    assert import_runs(folder, dir=tmp_path / "mine")[0].outcome == "known"
    (account,) = import_runs(folder, dir=tmp_path / "store")
    mine, back = fanfold.open(run.id, dir=tmp_path / "mine"), fanfold.open(run.id, dir=tmp_path / "store")
    assert (account.outcome, back.id) == ("imported", run.id)
    for key in values:
        np.testing.assert_array_equal(back.series(key).values, mine.series(key).values.astype(np.float32))
        np.testing.assert_array_equal(back.series(key).steps, mine.series(key).steps)
        np.testing.assert_allclose(back.series(key).times, mine.series(key).times, atol=1e-6, rtol=0)
    assert back.texts("note")[0].text == "text"
    np.testing.assert_array_equal(back.media("pic")[0].load().array(), mine.media("pic")[0].load().array())
    assert back.media("hist")[0].load().counts.tolist() == [1, 2]
    assert back.media("hist")[0].load().edges.tolist() == [0.0, 1.0, 2.0]
    assert back.config["lr"] == 0.1 and back.config["deep"] == {"n": 3}


def test_truncated_files_give_what_is_whole_and_then_the_rest(writer, tmp_path):
    log = writer()
    for step in range(100):
        log.add_scalar("loss", float(step), step, walltime=TIME + step)
    log.close()
    (file,) = (tmp_path / "runs" / "exp").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - 60])
    (run,), _ = bring(tmp_path)
    known = len(run.series("loss"))
    assert 95 <= known < 100
    file.write_bytes(whole)
    (run,), (account,) = bring(tmp_path)
    assert account.points == 100 - known
    assert run.series("loss").values.tolist() == list(range(100))


def test_damage_costs_only_the_records_it_hits(writer, tmp_path):
    log = writer()
    for step in range(1000):
        log.add_scalar("loss", float(step), step, walltime=TIME + step)
    log.close()
    (file,) = (tmp_path / "runs" / "exp").iterdir()
    data = bytearray(file.read_bytes())
    for at in (5000, 20000, 30001):
        data[at] ^= 0x55
    data[10000:10300] = b"\xff" * 300
    file.write_bytes(data)
    (run,), (account,) = bring(tmp_path)
    values = run.series("loss").values
    assert 980 <= len(values) < 1000
    assert set(values.tolist()) <= set(range(1000))
    assert account.left


@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_files_never_stop_an_import(tmp_path, seed, writer):
    chance = random.Random(seed)
    log = writer("original")
    for step in range(30):
        log.add_scalar("loss", float(step), step, walltime=TIME + step)
    log.add_text("note", "hello", 1)
    log.add_image("pic", np.zeros((3, 4, 4), np.uint8), 1)
    log.add_hparams({"lr": 0.1}, {"m": 1.0})
    log.close()
    (file,) = (path for path in (tmp_path / "original").iterdir() if path.is_file())
    whole = file.read_bytes()
    for number in range(250):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 12)):
            kind, at = chance.randrange(4), chance.randrange(12, len(data))
            if kind == 0:
                data[at] = chance.randrange(256)
            elif kind == 1:
                del data[at : at + chance.randrange(1, 200)]
            elif kind == 2:
                data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 40)))
            else:
                data = data[: max(at, 12)]
            if len(data) < 20:
                break
        if number % 3 == 0:
            data = resealed(bytes(data), chance)
        folder = tmp_path / "runs" / f"{number:03}"
        folder.mkdir(parents=True)
        (folder / f"events.out.tfevents.17{number:08}.node.{number}").write_bytes(data)
        (folder / f"events.out.tfevents.1700000000.node.{number}").write_bytes(b"")
        for found in TensorBoardImporter().find(folder):
            assert all(event is not None for event in TensorBoardImporter().read(found))  # damage is never an exception
    accounts = import_runs(tmp_path / "runs", dir=tmp_path / "store")
    assert len(accounts) > 200
    assert {one.outcome for one in accounts} <= {"imported", "skipped"}
    assert all(run.damaged == 0 for run in fanfold.runs(dir=tmp_path / "store"))


def resealed(data: bytes, chance: random.Random) -> bytes:
    """Change bytes inside records and give them valid checksums, as a hostile writer would."""
    starts, lengths, _, _ = tfrecord._records(data)
    made = b""
    for place, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        body = bytearray(data[start : start + length])
        if place and body and chance.random() < 0.5:
            body[chance.randrange(len(body))] = chance.randrange(256)
        made += struct.pack("<QI", len(body), tfrecord.head_of(len(body))) + body
        made += struct.pack("<I", tfrecord.masked(tfrecord.crc32c(bytes(body))))
    return made


def test_links_are_not_followed(writer, tmp_path):
    log = writer("elsewhere/exp")
    log.add_scalar("loss", 1.0, 0)
    log.close()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "elsewhere" / "exp")
    assert import_runs(tmp_path / "runs", dir=tmp_path / "store") == []


def test_a_file_at_rest_is_a_finished_run(writer, tmp_path):
    import os

    log = writer()
    log.add_scalar("loss", 1.0, 0, walltime=TIME)
    log.add_scalar("loss", 1.0, 1, walltime=TIME + 60)
    log.close()
    (file,) = (tmp_path / "runs" / "exp").iterdir()
    (run,), _ = bring(tmp_path)
    os.utime(file, (time.time() - 3600, time.time() - 3600))
    (run,), _ = bring(tmp_path)
    assert (run.status, run.started) == ("finished", pytest.approx(TIME, abs=1e9))
    assert len(run.series("loss")) == 2


def test_the_tenth_file_of_a_process_comes_after_its_ninth(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for number in (9, 10):
        log = SummaryWriter(tmp_path / "other")
        log.add_scalar("loss", float(number), number)
        log.close()
        (path,) = (tmp_path / "other").iterdir()
        (tmp_path / "runs" / "a").mkdir(parents=True, exist_ok=True)
        path.rename(tmp_path / "runs" / "a" / f"events.out.tfevents.1700000000.node.77.{number}")
    (found,) = TensorBoardImporter().find(tmp_path / "runs" / "a")
    assert [path.suffix for path in found.paths] == [".9", ".10"]


def test_records_found_together_are_those_found_one_by_one():
    """Heads are searched all at once; cut, damaged and nested records must give what a walk gives."""
    rng = random.Random(3)

    def record(data):
        head = struct.pack("<Q", len(data))
        return head + struct.pack("<I", masked(crc32c(head))) + data + struct.pack("<I", masked(crc32c(data)))

    together = 0
    for _ in range(300):
        parts = [record(rng.randbytes(rng.choice([0, 1, 30, 31, 256, 300, 3000]))) for _ in range(rng.randrange(1, 60))]
        if rng.random() < 0.2:
            parts.insert(rng.randrange(len(parts)), record(record(b"inside") * rng.randrange(1, 4)))
        data = b"".join(parts)
        if rng.random() < 0.5:
            data = data[: rng.randrange(len(data))]
        if rng.random() < 0.3 and data:
            at = rng.randrange(len(data))
            data = data[:at] + bytes(rng.randrange(20)) + data[at + rng.randrange(20) :]
        found, walked = _chained(data) if len(data) > 12 else None, _walked(data)
        if found is not None:
            together += 1
            assert (found[0].tolist(), found[1].tolist(), *found[2:]) == walked
    assert together > 50
