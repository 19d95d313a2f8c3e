"""DVCLive under the tracker contract, read back from the files it is: tables, metrics.json, params.yaml, plots."""

import csv
import json
import subprocess
from pathlib import Path

from fanfold.testing import ALL, Seen
from warm_contract import WarmContract

OFFLINE = {"DVC_NO_ANALYTICS": "1", "DVC_STUDIO_OFFLINE": "true"}


class TestDVCLive(WarmContract):
    name = "dvclive"
    holds = ALL - {"audio", "plotly", "html", "tags", "status", "metric", "alert"}

    def environment(self, folder: Path) -> dict[str, str]:
        return OFFLINE

    def own(self, folder: Path) -> Path:
        return folder / "runs" / "trackers" / self.name

    def given(self, folder: Path, body: str, run: str = "r1", where: str = "", **more: str) -> subprocess.CompletedProcess:
        """Run a script with a tracker as the relay starts it, in a folder of the user's where one is named."""
        return self.started(folder, body, run=run, **more, **({"dir": str(folder / where)} if where else {}))

    @staticmethod
    def read(folder: Path) -> Seen:
        from dvclive.serialize import load_yaml

        lives = [path.parent for path in (folder / "runs").rglob("metrics.json")]
        live = lives[0]
        seen = Seen(runs=len(lives), artifacts=[path.name for path in (live / "artifacts").glob("**/*")])
        seen.config = load_yaml(live / "params.yaml") if (live / "params.yaml").exists() else None
        seen.summary = json.loads((live / "metrics.json").read_text())
        for name, rows in tables(live).items():
            if any(number(value) is None for _, value in rows):
                seen.texts[name] = [value for _, value in rows]
            else:
                seen.scalars[name] = [(int(step), number(value)) for step, value in rows]
        for path in [*(live / "plots/images").rglob("*.*"), *(live / "plots/custom").rglob("*.json")]:
            seen.media[path.parent.name] = seen.media.get(path.parent.name, 0) + 1
        return seen

    def test_the_summary_and_dvcs_own_reader_agree_with_the_tables(self, tmp_path: Path) -> None:
        self.delivered(tmp_path, """
            run.config.update({"lr": 0.1, "deep": {"er": [1, None]}})
            for i in range(20): run.log({"loss": 1 / (i + 1), "val/acc": i}, step=i * 2)
        """)  # fmt: skip
        live = next(tmp_path.rglob("metrics.json")).parent
        assert json.loads((live / "metrics.json").read_text()) == {"loss": 1 / 20, "val": {"acc": 19}, "step": 38}
        found = self.script(tmp_path, f"""
from dvclive import Live
from dvclive.utils import parse_metrics
live = Live(dir={str(live)!r}, resume=True, save_dvc_exp=False, dvcyaml=None)
history, latest = parse_metrics(live)
print(len(history), [len(rows) for rows in history.values()], latest["step"], live._params)
""")  # fmt: skip
        assert found.stdout.strip() == "2 [20, 20] 38 {'lr': 0.1, 'deep': {'er': [1, None]}}", found.stderr

    def test_a_metric_beside_a_group_of_its_name_keeps_both(self, tmp_path: Path) -> None:
        seen = self.delivered(tmp_path, """
            for i in range(3): run.log({"a": i, "b/c": -i}, step=i)
            for i in range(3, 6): run.log({"a/x": 10.0 * i, "b": i, "a": i, "step": 7, "a/a/a": 1.0}, step=i)
        """)  # fmt: skip
        assert seen.scalars["a"] == [[i, i] for i in range(6)]
        assert seen.scalars["a/x"] == [[i, 10.0 * i] for i in range(3, 6)]
        assert seen.scalars["b/c"] == [[i, -i] for i in range(3)]
        assert seen.scalars["b"] == [[i, i] for i in range(3, 6)]
        assert seen.scalars["step_"] == [[i, 7] for i in range(3, 6)]
        latest = json.loads(next(tmp_path.rglob("metrics.json")).read_text())
        wanted = {"a": {"_": 5, "x": 50.0, "a": {"a": 1.0}}, "b": {"_": 5, "c": -2}, "step_": 7, "step": 5}
        assert latest == wanted

    def test_rows_of_a_batch_keep_their_order_even_in_a_deleted_table(self, tmp_path: Path) -> None:
        done = self.given(tmp_path, """
            values = [1.5, float("nan"), "word", 2, True, -0.0, 1e300]
            for first in (0, 10):
                tracker.write([Point({"x": value, "y": float(i)}, first + i, 1.0) for i, value in enumerate(values)])
            tracker.settle()
            Path(tracker.live.plots_dir, "metrics", "y.tsv").unlink()
            tracker.write([Point({"y": float(i)}, i, 1.0) for i in (20, 21, 22)])
        """)  # fmt: skip
        assert done.returncode == 0, done.stderr
        texts = ["1.5", "nan", "word", "2", "True", "-0.0", "1e+300"]
        assert tables(self.own(tmp_path)) == {
            "x": [[str(first + i), text] for first in (0, 10) for i, text in enumerate(texts)],
            "y": [["20", "20.0"], ["21", "21.0"], ["22", "22.0"]],
        }

    def test_names_cannot_lead_out_of_the_folder(self, tmp_path: Path) -> None:
        keys = ["../../out", "/" + str(tmp_path / "out"), "a//b", "", "100%", "%2E", "%_", "é\n", "step", "step_", "train/step"]
        done = self.given(tmp_path, f"""
            keys = {keys!r}
            tracker.write([Point({{key: 1.0 for key in keys}}, 0, 1.0)])
            assert tracker.counts() == dict.fromkeys(keys, 1), tracker.counts()
        """)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert len(list(tmp_path.rglob("*.tsv"))) == len(list((self.own(tmp_path)).rglob("*.tsv"))) == len(keys)

    def test_what_no_file_can_hold_is_refused_for_good(self, tmp_path: Path) -> None:
        done = self.given(tmp_path, """
            values = {"x" * 300: 1.0, "long": "y" * 200_000, "nul": "a\\0b"}
            assert [refusal.key for refusal in tracker.write([Point(values, 0, 1.0)])] == list(values)
            tracker.write([Point({"fine": 1.0}, 0, 1.0)])
            tracker.close("finished")
        """)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert tables(self.own(tmp_path)) == {"fine": [["0", "1.0"]]}

    def test_values_logged_beside_refused_ones_arrive_once(self, tmp_path: Path) -> None:
        seen = self.delivered(tmp_path, """
            for i in range(30):
                run.log({"before": i, **({"x" * 300: 1.0, "nul": "a\\0b"} if i % 7 == 3 else {}), "after": -i}, step=i)
        """)  # fmt: skip
        assert seen.scalars == {"before": [[i, i] for i in range(30)], "after": [[i, -i] for i in range(30)]}
        cursor = next((tmp_path / "runs" / "contract" / "contract-1" / "relay").glob("*.cursor"))
        assert json.loads(cursor.read_text())["refused"] == 8

    def test_it_goes_on_from_files_a_kill_has_torn(self, tmp_path: Path) -> None:
        body = """
            tracker.store_init_configuration({"lr": 1})
            tracker.write([Point({"x": float(i), "note": 'say "hi"\\nthere'}, i, 1.0) for i in range(3)])
            tracker.settle()
        """
        assert self.given(tmp_path, body).returncode == 0
        own = self.own(tmp_path)
        for name, torn in (("params.yaml", b""), ("metrics.json", b'{"x": 2.0, "st')):
            (own / name).write_bytes(torn)
        with (own / "plots/metrics/note.tsv").open("ab") as file:
            file.write(b'3\t"half a\ntext\n')
        again = self.given(tmp_path, """
            assert tracker.counts() == {"x": 3, "note": 3}, tracker.counts()
            tracker.store_init_configuration({"lr": 2})
            tracker.write([Point({"x": 3.0}, 3, 1.0)])
            tracker.settle()
        """)  # fmt: skip
        assert again.returncode == 0, again.stderr
        assert tables(own)["note"] == [[str(i), 'say "hi"\nthere'] for i in range(3)]
        assert json.loads((own / "metrics.json").read_text()) == {"note": 'say "hi"\nthere', "x": 3.0, "step": 3}
        assert (own / "params.yaml").read_text() == "lr: 2\n"

    def test_a_folder_of_the_users_starts_afresh_for_each_run_and_is_never_taken_back(self, tmp_path: Path) -> None:
        def run(name: str, value: float, **more: str) -> str:
            done = self.given(
                tmp_path, f"tracker.write([Point({{'x': {value}}}, 0, 1.0)]); print(tracker.remote)", name, "shared", **more
            )
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        place = run("first", 1.0)
        assert run("first", 2.0, remote=place) == place == str(tmp_path / "shared")
        assert tables(tmp_path / "shared")["x"] == [["0", "1.0"], ["0", "2.0"]]
        run("second", 3.0)
        assert tables(tmp_path / "shared")["x"] == [["0", "3.0"]]
        assert run("first", 4.0, remote=place) == str(self.own(tmp_path))
        assert tables(tmp_path / "shared")["x"] == [["0", "3.0"]]

    def test_rows_that_were_there_before_are_not_counted_as_ours(self, tmp_path: Path) -> None:
        body = "tracker.write([Point({'x': 1.0}, 0, 1.0)]); tracker.settle(); assert tracker.counts() == {'x': 1}"
        for name in ("first", "second"):
            done = self.given(tmp_path, body, name, "shared", before="tracker.init_kwargs['resume'] = True")
            assert done.returncode == 0, done.stderr
        assert len(tables(tmp_path / "shared")["x"]) == 2

    def test_media_are_what_was_logged_and_the_rest_is_said(self, tmp_path: Path) -> None:
        done = self.given(tmp_path, """
            import numpy as np, fanfold, plotly.graph_objects as go, matplotlib, PIL.Image, json
            matplotlib.use('agg')
            import matplotlib.pyplot as plt
            rng = np.random.default_rng(0)
            pixels = rng.integers(0, 255, (8, 9, 3), dtype=np.uint8)
            plt.plot([1, 2])
            tracker.write([Point({
                'image': fanfold.Image(pixels), 'images': [fanfold.Image(pixels), fanfold.Image(pixels)], 'plt': fanfold.Figure(plt),
                'film': fanfold.Video(rng.integers(0, 255, (3, 8, 8, 3), dtype=np.uint8)), 'long': fanfold.Text('many words'),
                'bins': fanfold.Histogram(np_histogram=([1, 2], [0.0, 1.0, 5.0])),
                'table': fanfold.Table(columns=['a', 'b'], data=[[1, 'x'], [2, None]]),
            }, 4, 1.0)])
            plots = Path(tracker.live.plots_dir)
            assert (np.asarray(PIL.Image.open(plots / 'images/image/4.png')) == pixels).all()
            assert len(list((plots / 'images/images').iterdir())) == 2
            assert PIL.Image.open(plots / 'images/film/4.gif').n_frames == 3
            assert PIL.Image.open(plots / 'images/plt/4.png').size == (640, 480)
            assert json.loads((plots / 'custom/bins/4.json').read_text())[1] == {'from': 1.0, 'to': 5.0, 'count': 2}
            assert json.loads((plots / 'custom/table/4.json').read_text()) == [{'a': 1, 'b': 'x'}, {'a': 2, 'b': None}]
            assert tracker.counts() == {'long': 1} and not notices.counts
            tracker.write([Point({'image': fanfold.Image(pixels), 'p': fanfold.Figure(go.Figure()), 'h': fanfold.Html('<b>')}, 4, 1.0)])
            wanted = {'dvclive:repeat:image', 'dvclive:hold this kind of figure:p', 'dvclive:hold this kind of html:h'}
            assert set(notices.counts) == wanted, notices.counts
        """)  # fmt: skip
        assert done.returncode == 0, done.stderr

    def test_many_steps_take_time_in_proportion(self, tmp_path: Path) -> None:
        done = self.given(tmp_path, """
            import time
            def seconds(first):
                begin = time.process_time()
                for i in range(first, first + 1000, 10):
                    tracker.write([Point({"x": float(j), "y": 1.0}, j, 1.0) for j in range(i, i + 10)])
                    tracker.settle()
                return time.process_time() - begin
            spent = [seconds(1000 * i) for i in range(4)]
            assert spent[3] < 2 * spent[0] + 0.2, spent
        """)  # fmt: skip
        assert done.returncode == 0, done.stderr


def tables(live: Path) -> dict:
    """Return name → [[step, value], ...] of the tables below a folder."""
    base = live / "plots" / "metrics"
    return {
        str(path.relative_to(base))[:-4]: list(csv.reader(path.open(newline=""), delimiter="\t"))[1:]
        for path in base.rglob("*.tsv")
    }


def number(text: str) -> float | None:
    try:
        return {"True": 1.0, "False": 0.0}[text] if text in ("True", "False") else float(text)
    except ValueError:
        return None
