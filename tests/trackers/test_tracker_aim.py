"""Aim under the tracker contract, read back with its own Repo."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from fanfold.testing import ALL, Seen
from fanfold.trackers.base import flat_config
from warm_contract import WarmContract


class TestAim(WarmContract):
    name = "aim"
    holds = ALL - {"repeat", "metric"}

    @staticmethod
    def read(folder: Path) -> Seen:
        from aim import Repo

        where = next(folder.rglob(".aim")).parent
        Repo(str(where))._recreate_index()
        repo = Repo(str(where))
        runs = list(repo.iter_runs())
        run = runs[0]
        seen = Seen(scalars={}, runs=len(runs), tags=list(run.tags), artifacts=list(run.artifacts))
        seen.status = run.get("fanfold", {}).get("status")
        seen.summary = run.get("summary")
        records = run.get_log_records()
        seen.alerts = [record.message for record in records.values.values_list()] if records else []
        seen.config = flat_config(run.get("hparams", {}))
        for metric in run.metrics():
            steps, (values, _, _) = metric.data.numpy()
            seen.scalars[metric.name] = list(zip(steps.tolist(), values.tolist(), strict=True))
        for kind in ("texts", "images", "audios", "distributions", "figure_objects"):
            for one in getattr(repo, f"query_{kind}")("True", report_mode=0).iter_runs():
                for sequence in one:
                    values = sequence.values.values_list()
                    seen.media[sequence.name] = len(values)
                    if kind == "texts":
                        seen.texts[sequence.name] = [text.data for text in values]
        return seen

    def open(self, folder: Path, body: str, where: str = "", **more: str) -> subprocess.CompletedProcess:
        """Run a script in which `tracker` is started as the relay starts it, in a repository of the user's."""
        head = "from aim.storage.context import Context\n"
        return self.started(folder, head + textwrap.dedent(body), "p", where or str(folder / "repo"), **more)

    def given(self, folder: Path, body: str) -> dict:
        """Run such a script to its end and return name → [[steps, values, times] of each context]."""
        tail = f"""
            run_hash = tracker.writer.hash
            tracker.close('finished')
            from aim import Repo
            import json
            found = {{}}
            for metric in Repo({str(folder / "repo")!r}).get_run(run_hash).metrics():
                steps, (values, _, times) = metric.data.numpy()
                found.setdefault(metric.name, []).append([steps.tolist(), values.tolist(), times.tolist()])
            print(json.dumps(found))
        """
        done = self.open(folder, textwrap.dedent(body) + textwrap.dedent(tail))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def test_alerts_are_counted_as_aim_shows_them_and_one_sent_again_stays_one(self, tmp_path: Path) -> None:
        body = """
            from fanfold.trackers.base import Alert
            for i in range(3 + 2 * second):
                destination_of(tracker).alert(Alert("t", f"text {i}", "warning", 5, 1_790_000_000.0 + i / 1e6, str(i)))
            run_hash = tracker.writer.hash
            tracker.close("finished")
            from aim import Repo
            records = Repo(repo).get_run(run_hash).get_log_records().data.view("val").items()
            print(json.dumps([[place, one.message] for place, (one,) in records]))
        """
        for second in (0, 1):
            done = self.open(tmp_path, f"second, repo = {second}, {str(tmp_path / 'repo')!r}\n" + textwrap.dedent(body))
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout.splitlines()[-1]) == [[i, f"t: text {i}"] for i in range(3 + 2 * second)]

    def test_a_finished_run_is_found_by_queries_at_once(self, tmp_path: Path) -> None:
        done = self.play(tmp_path, "for i in range(5): run.log({'x': float(i)}, step=i)\nrun.finish(timeout=120)\n")
        assert done.returncode == 0, done.stderr
        where = next(tmp_path.rglob(".aim")).parent
        found = self.script(tmp_path, f"""
from aim import Repo
for metrics in Repo({str(where)!r}).query_metrics("metric.name == 'x'", report_mode=0).iter_runs():
    for metric in metrics:
        print(metric.run.name, metric.run.experiment, metric.run.active, metric.data.numpy()[1][0].tolist())
""")  # fmt: skip
        assert found.stdout.strip() == "contract run contract False [0.0, 1.0, 2.0, 3.0, 4.0]", found.stderr

    def test_points_keep_the_time_they_were_logged_at(self, tmp_path: Path) -> None:
        seen = self.given(tmp_path, "tracker.write([Point({'x': 1.5}, 3, 1234.25)])")
        assert seen["x"] == [[[3], [1.5], [1234.25]]]

    def test_a_batch_leaves_what_its_points_leave_one_by_one(self, tmp_path: Path) -> None:
        done = self.open(tmp_path, """
            from aim.storage.context import Context
            values = [(0, 1.5), (1, float('nan')), (2, 7), (3, -2.0), (5, 9.0), (4, 8.0), (5, 3.0), (6, float('inf')), (7, 0.0)]
            values += [(step, step / 7) for step in range(8, 300)] + [(300, True), (302, 2.0), (305, 1)]
            for name, many in (('together', [values]), ('alone', [[value] for value in values])):
                for batch in many:
                    tracker.write([Point({name: value}, step, 1.0 + step, {'context': {'of': 'val'}, 'epoch': 3}) for step, value in batch])
            idx, run = Context({'of': 'val'}).idx, tracker.writer
            def left(name):
                arrays = run.series_run_trees[2].subtree((idx, name))
                return repr([run.meta_run_tree.collect(('traces', idx, name)),
                             *(sorted(arrays.subtree(one).items()) for one in ('step', 'val', 'epoch', 'time'))])
            assert len(run.meta_run_tree.collect(('traces', idx, 'alone'))) > 6
            assert left('together') == left('alone'), (left('together'), left('alone'))
        """)  # fmt: skip
        assert done.returncode == 0, done.stderr

    def test_an_empty_name_does_not_break_the_run(self, tmp_path: Path) -> None:
        seen = self.given(tmp_path, """
            tracker.write([Point({'': 1.0, 'x': 2.0}, 0, 1.0)])
            tracker.store_init_configuration({'': {'': 1}, 'big': 2**64 - 1})
        """)  # fmt: skip
        assert seen == {"(empty)": [[[0], [1.0], [1.0]]], "x": [[[0], [2.0], [1.0]]]}

    def test_a_name_with_numbers_and_texts_keeps_both(self, tmp_path: Path) -> None:
        seen = self.given(tmp_path, """
            tracker.write([Point({'x': 1.0}, 0, 1.0), Point({'x': 'word'}, 1, 2.0), Point({'x': 3.0}, 2, 3.0)])
            assert tracker.writer.get_text_sequence('x', Context({'kind': 'text'})).values.values_list()[0].data == 'word'
        """)  # fmt: skip
        assert seen["x"] == [[[0, 2], [1.0, 3.0], [1.0, 3.0]]]

    def test_a_second_value_of_a_step_is_said_and_the_same_again_is_not(self, tmp_path: Path) -> None:
        self.given(tmp_path, """
            points = [Point({'x': float(i)}, i, 1.0) for i in range(3)]
            tracker.write(points)
            tracker.write(points)
            assert not notices.counts
            tracker.write([Point({'x': 9.0}, 1, 1.0), Point({'x': 8.0}, 1, 1.0)])
            assert notices.counts == {'aim:repeat:x': 2}
        """)  # fmt: skip

    def test_what_was_written_survives_a_kill_and_the_lock_it_leaves(self, tmp_path: Path) -> None:
        body = "tracker.write([Point({'x': float(i)}, i, 1.0) for i in range(100)]); tracker.settle()\n"
        done = self.open(tmp_path, body + "import os; os.kill(os.getpid(), 9)")
        assert done.returncode == -9, done.stderr
        lock = next(tmp_path.rglob("*.softlock"))
        lock.write_text("1\nelsewhere\n")  # killed before Aim wrote its own words into it: Aim alone would fail on it for ever
        seen = self.given(tmp_path, "tracker.write([Point({'x': 100.0}, 100, 1.0)])")
        assert seen["x"][0][0] == list(range(101))

    def test_a_relay_killed_while_it_builds_the_repository_is_delivered_by_the_next(self, tmp_path: Path) -> None:
        """Kill at the second, fourth, … file that is opened or made below the repository's folder."""
        dying = """
place, left = os.path.realpath("repo"), [{}]
def die(event, arguments):
    if event in ("open", "os.mkdir", "os.rename", "sqlite3.connect") and str(arguments[0]).startswith(place):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), 9)
sys.addaudithook(die)
"""
        killed = 0
        for number in (2, 4, 7, 12):
            folder = tmp_path / str(number)
            folder.mkdir()
            head = dying.format(number).replace("\n", "\n            ")  # as deep as the script it goes into
            done = self.open(folder, "print('built')", before=head)
            killed += done.returncode == -9
            seen = self.given(folder, "tracker.write([Point({'x': 1.5}, 3, 1234.25)])")
            assert seen["x"] == [[[3], [1.5], [1234.25]]]
            assert [path.name for path in (folder / "repo").iterdir()] == [".aim"]
        assert killed >= 3

    def test_a_repository_left_half_built_is_put_aside_and_built_again(self, tmp_path: Path) -> None:
        left = tmp_path / "repo" / ".aim" / "locks"
        left.mkdir(parents=True)
        done = self.open(tmp_path, "")
        assert "another process may be building it" in done.stderr
        for path in (left, left.parent):
            os.utime(path, (0, 0))
        assert self.given(tmp_path, "tracker.write([Point({'x': 1.0}, 0, 1.0)])")["x"] == [[[0], [1.0], [1.0]]]

    def test_steps_beyond_two_to_the_53_are_each_a_point(self, tmp_path: Path) -> None:
        steps = [2**53 - 1, *range(2**53, 2**53 + 5), 2**62, 2**62 + 1, 2**63 - 2]
        points = f"[Point({{'x': float(i)}}, step, 1.0) for i, step in enumerate({steps})]"
        seen = self.given(tmp_path, f"tracker.write({points})")
        assert seen["x"] == [[steps, [float(i) for i in range(len(steps))], [1.0] * len(steps)]]
        assert self.given(tmp_path, f"tracker.write({points})") == seen

    def test_media_are_what_was_logged(self, tmp_path: Path) -> None:
        self.given(tmp_path, """
            import numpy as np, fanfold, plotly.graph_objects as go, matplotlib
            matplotlib.use('agg')
            import matplotlib.pyplot as plt
            rng = np.random.default_rng(0)
            pixels, sound = rng.integers(0, 255, (8, 9, 3), dtype=np.uint8), rng.integers(-99, 99, 80, dtype=np.int16)
            plt.plot([1, 2])
            tracker.write([Point({
                'image': fanfold.Image(pixels, caption='c'), 'images': [fanfold.Image(pixels), fanfold.Image(pixels)],
                'audio': fanfold.Audio(sound, sample_rate=8000), 'film': fanfold.Video(rng.integers(0, 255, (3, 8, 8, 3), dtype=np.uint8)),
                'bins': fanfold.Histogram(np_histogram=([1, 2, 3], [0.0, 1.0, 2.0, 3.0])), 'plotly': fanfold.Figure(go.Figure(go.Bar(y=[7]))),
                'plt': fanfold.Figure(plt), 'empty': '', 'table': fanfold.Table(columns=['a', 'b'], data=[[1, 'x'], [2, None]]),
            }, 4, 1.0)])
            def one(kind, name):
                return getattr(tracker.writer, f'get_{kind}_sequence')(name, Context({})).values.values_list()[0]
            image = one('image', 'image')
            assert (np.asarray(image.to_pil_image()) == pixels).all() and image.caption == 'c'
            assert len(one('image', 'images')) == 2
            assert one('audio', 'audio').to_numpy()[0] == 8000 and (one('audio', 'audio').to_numpy()[1] == sound).all()
            assert one('image', 'film').to_pil_image().n_frames == 3
            weights, ranges = one('distribution', 'bins').to_np_histogram()
            assert weights.tolist() == [1, 2, 3] and ranges.tolist() == [0.0, 1.0, 2.0, 3.0]
            assert one('figure', 'plotly').to_plotly_figure().data[0].y[0] == 7
            assert one('image', 'plt').width == 640
            assert one('text', 'empty').data == '' and one('text', 'table').data.splitlines()[2] == '| 1 | x |'
            assert not notices.counts
            tracker.write([Point({'odd': fanfold.Histogram(np_histogram=([1, 2], [0.0, 1.0, 5.0]))}, 5, 1.0)])
            assert list(notices.counts) == ['aim:hold this kind of histogram:odd']
        """)  # fmt: skip

    def test_a_server_gets_the_same_and_is_gone_on_with(self, tmp_path: Path) -> None:
        (tmp_path / "repo").mkdir()
        with server(tmp_path) as address:
            first = self.open(
                tmp_path,
                "tracker.write([Point({'x': float(i)}, i, 1.0) for i in range(50)]); tracker.settle(); print(tracker.remote)",
                address,
            )
            assert first.returncode == 0, first.stderr
            remote = first.stdout.splitlines()[-1]
            body = "tracker.write([Point({'x': float(i)}, i, 1.0) for i in range(40, 60)]); tracker.close('failed')"
            second = self.open(tmp_path, body, address, remote=remote)
            assert second.returncode == 0, second.stderr
        seen = self.seen(tmp_path)
        assert (seen.runs, seen.status) == (1, "failed")
        assert seen.scalars["x"] == [[i, float(i)] for i in range(60)]

    def test_accelerates_image_method_takes_captions_and_arguments(self, tmp_path: Path) -> None:
        self.given(tmp_path, """
            import numpy as np
            tracker.log_images({'a': (np.zeros((4, 5, 3), np.uint8), 'black')}, 2, {'aim_image': {'format': 'jpeg'}, 'track': {'context': {'s': 1}}})
            image = tracker.writer.get_image_sequence('a', Context({'s': 1})).values.values_list()[0]
            assert (image.caption, image.format, image.size) == ('black', 'jpeg', (5, 4))
        """)  # fmt: skip


TAKEN_AWAY = """
import pathlib, shutil, sys, time, fanfold
run = fanfold.init("p", dir=sys.argv[1] + "/runs", system=False, trackers=["aim"], relay="thread",
                   tracker_kwargs={"aim": {"logging_dir": sys.argv[1] + "/repo"}})
for i in range(10): run.log({"x": i}, step=i)
while not list(pathlib.Path(sys.argv[1]).glob("repo/.aim/seqs/chunks/*/CURRENT")): time.sleep(0.1)
while pathlib.Path(sys.argv[1], "repo").exists(): shutil.rmtree(sys.argv[1] + "/repo", ignore_errors=True)
"""


def test_a_program_ends_though_its_repository_was_taken_away(tmp_path: Path) -> None:
    """Aim waits at exit until everything is closed, and for ever when closing one file raises."""
    done = subprocess.run([sys.executable, "-c", TAKEN_AWAY, str(tmp_path)], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Aim could not close a repository" in done.stderr


@contextlib.contextmanager
def server(folder: Path):
    """Serve the repository on a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["server", "--yes", "--repo", str(folder / "repo"), "--host", "127.0.0.1", "--port", str(port)]
    env = {"HOME": str(folder), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "aim"), *words], env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 60
        while not listening(port):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()
            time.sleep(0.1)
        yield f"aim://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
