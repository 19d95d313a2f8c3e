"""The tracker contract: what every adapter must do with the real library, verified through that library's own reader.

Subclass `TrackerContract` in a test file, set `name` and `holds`, and write `environment`, `kwargs` and `read`; pytest does
the rest. Everything runs in separate processes, because tracker libraries change the process they run in.

`ImporterContract` does the same for importers.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import math
import os
import struct
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from .transfer.contract import ImporterContract as ImporterContract  # noqa: PLC0414 - part of this module

TIMEOUT = 180


@dataclass
class Seen:
    """What a tracker's own reader found at the destination. None if the system does not support it."""

    scalars: dict[str, list[tuple[int | None, float]]] = field(default_factory=dict)  # key → (step, value), as stored
    texts: dict[str, list[str]] = field(default_factory=dict)
    config: dict[str, Any] | None = None  # flat, keys joined by /
    media: dict[str, int] = field(default_factory=dict)  # key → how many
    artifacts: list[str] | None = None
    tags: list[str] | None = None
    summary: dict[str, Any] | None = None  # assigned to run.summary
    metrics: dict[str, dict[str, Any]] | None = None  # definitions: key → {"x": …, "summary": …}
    alerts: list[str] | None = None  # title and text, as stored
    status: str | None = None
    runs: int = 1


@dataclass
class PlayedRun:
    """A run played by the contract, and what was read back from the destination."""

    folder: Path
    seen: Seen


# What a system can store beyond numbers with steps. A contract's `holds` lists what applies; the docs' table is built from it.
CAPABILITIES = {
    "nan": "NaN as itself",
    "inf": "±Inf as themselves",
    "late": "a step lower than one before",
    "repeat": "two values of one step",
    "text": "texts",
    "config": "config",
    "image": "images",
    "histogram": "histograms",
    "table": "tables",
    "audio": "audio",
    "video": "video",
    "figure": "figures drawn with matplotlib",
    "plotly": "plotly figures",
    "html": "HTML",
    "artifact": "files",
    "tags": "tags",
    "summary": "values assigned to `run.summary`",
    "metric": "`define_metric`",
    "alert": "alerts",
    "status": "final status",
    "resume": "continuing in the same remote run",
}
ALL = frozenset(CAPABILITIES)

_CONFIG = {
    "lr": 1e-3, "layers": 4, "name": "größer", "flag": True, "none": None, "empty": {}, "nested": {"a": {"b": [1, 2, {"c": 3}]}},
    "nan": float("nan"), "inf": float("inf"), "big": 2**70, "long": "x" * 7000, "weird key=@%[]": 1, "list": [1, "two", None],
    "twin/a": 1101, "twin": {"a": 2202},
}  # fmt: skip


# One run that logs everything: each test checks its part, so that the library starts only once.
_EVERYTHING = """
    import matplotlib.figure, numpy as np, plotly.graph_objects
    run.config.update({config})
    run.tags = {tags}
    run.define_metric("val/*", x="n", summary="max")
    run.summary["best"] = 0.25
    run.summary["loss"] = 0.125
    run.summary["verdict"] = "good"
    for text in ("look at it", "and again", "once more"):
        run.alert("Loss is high", text, level="error")
    for i in range(200):
        run.log({{"loss": 1 / (i + 1), "val/acc": i * 0.1, "n": i, "ok": i % 2 == 0}}, step=i * 3)
    for i in range(10):
        run.log({{"x": float(i)}}, step=i)
    try:
        import torch
    except ImportError:
        bf16 = np.float16(1.5)
    else:
        bf16 = torch.tensor(1.5, dtype=torch.bfloat16)
    run.log({{"bf16": bf16, "f32": np.float32(0.25), "deep": {{"er": np.int64(7)}}}}, step=1)
    run.log({{"nan": float("nan"), "up": float("inf"), "down": -float("inf"), "fine": 1.0}}, step=0)
    for step, value in {back}:
        run.log({{"back": value}}, step=step)
    rng, drawn = np.random.default_rng(0), matplotlib.figure.Figure()
    drawn.subplots().plot([1, 2])
    run.log({{"essay": "many words " * 7000, "beside_essay": 1.0}}, step=3)
    run.log({{"note": "hello\\nworld",
             "image": fanfold.Image(rng.integers(0, 255, (8, 9, 3), dtype=np.uint8), caption="c"),
             "histogram": fanfold.Histogram(rng.normal(size=100)),
             "table": fanfold.Table(columns=["a", "b"], data=[[1, "x"], [2, None]]),
             "audio": fanfold.Audio(np.sin(np.arange(800) / 9).astype(np.float32), sample_rate=8000),
             "video": fanfold.Video(rng.integers(0, 255, (3, 8, 8, 3), dtype=np.uint8), fps=4),
             "figure": drawn, "plotly": plotly.graph_objects.Figure(plotly.graph_objects.Bar(y=[1, 2])),
             "html": fanfold.Html("<b>bold</b>"), "beside": 1.0}}, step=2)
    with open("model.bin", "wb") as file:
        file.write(b"weights")
    run.artifact("model.bin", name="model")
"""
_TAGS = ["one", "two words"]
_BACK = [(5, 1.0), (3, 2.0), (5, 3.0), (6, 4.0)]


class TrackerContract:
    """The tests every adapter passes. The test names state what is guaranteed.

    The runs they play log figures, so matplotlib and plotly are needed in addition to the tracker's own library; tensors are
    logged if torch is installed.
    """

    name: ClassVar[str]
    holds: ClassVar[frozenset[str]] = frozenset()
    reads: ClassVar[bool] = True  # False if the system cannot be read back offline; then only calls are checked

    # Provided by subclasses

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the library's offline settings; everything it writes must be below `folder`."""
        del folder
        return {}

    def kwargs(self, folder: Path) -> dict[str, Any]:
        """Return the tracker's arguments."""
        del folder
        return {}

    @staticmethod
    def read(folder: Path) -> Seen:
        """Read back what arrived, with the library's own reader. Runs in its own process."""
        raise NotImplementedError

    @staticmethod
    def stored(value: float) -> float:
        """Return a number as the system stores it (TensorBoard: as float32)."""
        return value

    # Helpers

    def play(self, folder: Path, body: str, *, relay: str = "process", **env: str) -> subprocess.CompletedProcess[str]:
        """Run a script in which `run` is a run sent to this tracker."""
        script = f"""
            import fanfold, json, os, signal, sys, time
            kwargs = json.loads({json.dumps(self.kwargs(folder))!r})
            run = fanfold.init(
                "contract", id="contract-1", name="contract run", dir={str(folder / "runs")!r}, system=False, quiet=True,
                trackers=[{self.name!r}], tracker_kwargs={{{self.name!r}: kwargs}}, relay={relay!r},
            )
        """
        return self.script(folder, textwrap.dedent(script) + textwrap.dedent(body), **env)

    def sync(self, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Deliver what is left, as `fanfold sync` does."""
        script = f"""
            import json, pathlib
            from fanfold.relay import serve
            kwargs = json.loads({json.dumps(self.kwargs(folder))!r})
            run = pathlib.Path({str(folder / "runs" / "contract" / "contract-1")!r})
            cursor = serve(run, {self.name!r}, kwargs, {{}}, follow=False)
            print(json.dumps({{"delivered": cursor.delivered, "closed": cursor.closed, "error": cursor.error}}))
        """
        return self.script(folder, script, **env)

    def started(
        self, folder: Path, body: str, *arguments: Any, before: str = "", run: str = "r1", remote: str | None = None,
        **kwargs: Any,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a script in which `tracker` is opened as a relay opens it, for the run `run`; `before` is executed first.

        With `remote`, an earlier value of `tracker.remote`, it continues a remote run.
        """
        place = folder / "runs" / "trackers" / self.name
        script = f"""
            import json, os, sys
            from pathlib import Path
            from fanfold.errors import notices
            from fanfold.trackers.base import Identity, Point, Refused
            from fanfold.trackers.face import destination_of
            from fanfold.trackers.registry import find_class
            kwargs = json.loads({json.dumps(kwargs)!r})
            tracker = find_class({self.name!r})(*{arguments or ("p",)!r}, **kwargs)
            {before}
            destination_of(tracker).open(Identity({run!r}, "name", "p", None, Path({str(place)!r})), {remote!r})
        """
        return self.script(folder, textwrap.dedent(script) + textwrap.dedent(body))

    def script(self, folder: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a script in the contract's environment, in `folder`."""
        settings = {"FANFOLD_CACHE_DIR": str(folder / "cache"), "HOME": str(folder / "home"), **self.environment(folder), **env}
        (folder / "home").mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], env={**os.environ, **settings}, cwd=folder,
            capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip

    @staticmethod
    def dying_relay(folder: Path, times: int = 2) -> dict[str, str]:
        """Return an environment in which relays die right before their first settle, where a repeat could occur.

        The first relay leaves a new remote run and the second one that was continued, so after two deaths nothing new is tried.
        """
        place = folder / "dying"
        place.mkdir(exist_ok=True)
        (place / "sitecustomize.py").write_text(textwrap.dedent(f"""
            import os, pathlib
            import fanfold.relay.worker as relay

            settle = relay.Worker.settle
            deaths = pathlib.Path({str(place / "died")!r})

            def die(self):
                if self._sent and (not deaths.exists() or deaths.stat().st_size < {times}):
                    with deaths.open("a") as file:
                        file.write("x")
                    os._exit(9)
                settle(self)

            relay.Worker.settle = die
        """))  # fmt: skip
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(place), *sys.path, os.environ.get("PYTHONPATH")]))}

    def seen(self, folder: Path) -> Seen:
        """Read back in a fresh process."""
        place = (inspect.getfile(type(self)), type(self).__name__, str(folder))
        path = f"import sys; sys.path += {[one for one in sys.path if one]!r}"  # a test may import helpers of its own
        done = self.script(folder, f"{path}; from fanfold.testing import _read_for; _read_for(*{place!r})")
        assert done.returncode == 0, done.stderr
        return Seen(**json.loads(done.stdout.splitlines()[-1]))

    def delivered(self, folder: Path, body: str) -> Seen:
        """Play a script, check that it and its delivery succeeded, and read back."""
        done = self.play(folder, textwrap.dedent(body) + "\nrun.finish(timeout=120)\n")
        assert done.returncode == 0, done.stderr
        cursor = next((folder / "runs" / "contract" / "contract-1" / "relay").glob("*.cursor"))
        state = json.loads(cursor.read_text())
        log = next((folder / "runs" / "contract" / "contract-1" / "relay").glob("*.log")).read_text()
        assert state["closed"] and not state["error"], f"{state}\n{log[-3000:]}"
        return self.seen(folder) if self.reads else Seen()

    def _same(self, got: list[Any], wanted: list[tuple[int, float]]) -> bool:
        """Compare points bit by bit, ordered by step (repeats in call order); return True, or raise with the first difference."""
        mine = sorted(((step, self.stored(value)) for step, value in wanted), key=lambda p: p[0])
        theirs = sorted(((step, float(value)) for step, value in got), key=lambda p: p[0])
        for (step, value), (other_step, other) in zip(mine, theirs, strict=False):
            same = (step, _bits(value)) == (other_step, _bits(other))
            assert same, f"step {step}: {value}, and not step {other_step}: {other}; see TrackerContract.stored"
        assert len(mine) == len(theirs), f"{len(theirs)} points arrived, not {len(mine)}"
        return True

    def everything(self, folder: Path) -> PlayedRun:
        """Play the run that logs everything and read it back: once per class, in the folder of the first test that needs it."""
        known = TrackerContract._lives
        if type(self) not in known:
            try:
                known[type(self)] = self._played(folder)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                known[type(self)] = str(error)
                raise
        life = known[type(self)]
        assert isinstance(life, PlayedRun), f"the run that logs everything failed in an earlier test: {life}"
        return life

    def _played(self, folder: Path) -> PlayedRun:
        missing = [library for library in ("matplotlib", "plotly") if importlib.util.find_spec(library) is None]
        assert not missing, f"the contract logs figures. Nothing was tested. Run: pip install {' '.join(missing)}"
        config = repr(_CONFIG).replace("nan,", "float('nan'),").replace("inf,", "float('inf'),")
        return PlayedRun(folder, self.delivered(folder, _EVERYTHING.format(config=config, tags=_TAGS, back=_BACK)))

    _lives: ClassVar[dict[type, PlayedRun | str]] = {}  # or why it failed

    # The tests

    def test_numbers_arrive_exactly_with_their_steps(self, tmp_path: Path) -> None:
        seen = self.everything(tmp_path).seen
        if self.reads:
            self._check_numbers(seen)

    def _check_numbers(self, seen: Seen) -> None:
        assert self._same(seen.scalars["loss"], [(i * 3, 1 / (i + 1)) for i in range(200)])
        assert self._same(seen.scalars["val/acc"], [(i * 3, i * 0.1) for i in range(200)])
        assert self._same(seen.scalars["n"], [(i * 3, float(i)) for i in range(200)])
        assert self._same(seen.scalars["ok"], [(i * 3, float(i % 2 == 0)) for i in range(200)])
        assert seen.runs == 1

    def test_tensors_arrays_and_nested_dicts_are_numbers_too(self, tmp_path: Path) -> None:
        seen = self.everything(tmp_path).seen
        if self.reads:
            for key, value in (("bf16", 1.5), ("f32", 0.25), ("deep/er", 7.0)):
                assert self._same(seen.scalars[key], [(1, value)])

    def test_nan_and_infinity_are_kept_or_said(self, tmp_path: Path) -> None:
        seen = self.everything(tmp_path).seen
        if not self.reads:
            return
        assert self._same(seen.scalars["fine"], [(0, 1.0)])
        if "nan" in self.holds:
            assert math.isnan(seen.scalars["nan"][0][1])
        if "inf" in self.holds:
            assert (seen.scalars["up"][0][1], seen.scalars["down"][0][1]) == (math.inf, -math.inf)
        for key, wanted in (("nan", math.nan), ("up", math.inf), ("down", -math.inf)):
            for _, value in seen.scalars.get(key, []):
                assert _bits(value) == _bits(wanted), f"{key} arrived as {value}: neither kept nor left out"

    def test_late_and_repeated_steps_are_kept_or_said(self, tmp_path: Path) -> None:
        seen = self.everything(tmp_path).seen
        if not self.reads:
            return
        got = sorted((step, value) for step, value in seen.scalars["back"])
        if "late" in self.holds and "repeat" in self.holds:
            assert got == sorted(_BACK)
        assert (6, 4.0) in got
        assert set(got) <= set(_BACK)
        assert ("late" not in self.holds) or (3, 2.0) in got

    def test_any_config_arrives_and_none_stops_anything(self, tmp_path: Path) -> None:
        seen = self.everything(tmp_path).seen
        if "config" in self.holds and self.reads:
            assert seen.config is not None
            assert float(seen.config["lr"]) == 1e-3
            assert str(seen.config["layers"]) == "4"
            assert seen.config["name"] == "größer"
            assert "nested/a/b" in seen.config or any(key.startswith("nested") for key in seen.config)
            held = json.dumps(seen.config)
            assert "1101" in held, "the key `twin/a` was lost beside `twin: {a: …}`"
            assert "2202" in held, "`a` in `twin: {a: …}` was lost beside the key `twin/a`"

    def test_texts_and_media_arrive_or_are_said(self, tmp_path: Path) -> None:
        seen = self.everything(tmp_path).seen
        if not self.reads:
            return
        assert self._same(seen.scalars["beside"], [(2, 1.0)])
        if "text" in self.holds:
            assert [text.replace("\r", "") for text in seen.texts["note"]] == ["hello\nworld"]
            assert self._same(seen.scalars["beside_essay"], [(3, 1.0)])
            assert seen.texts.get("essay") == ["many words " * 7000], "texts longer than 64 KiB are texts, too"
        for kind in ("image", "histogram", "table", "audio", "video", "figure", "plotly", "html"):
            if kind in self.holds:
                assert seen.media.get(kind) == 1, f"{kind}: {seen.media}"

    def test_tags_and_files_arrive_or_are_said(self, tmp_path: Path) -> None:
        seen = self.everything(tmp_path).seen
        if "tags" in self.holds and self.reads:
            assert seen.tags is not None
            assert sorted(seen.tags) == _TAGS
        if "artifact" in self.holds and self.reads:
            assert seen.artifacts is not None
            assert any("model" in name for name in seen.artifacts)

    def test_summary_metric_definitions_and_alerts_arrive_or_are_warned_about(self, tmp_path: Path) -> None:
        life = self.everything(tmp_path)
        seen, log = life.seen, next((life.folder / "runs" / "contract" / "contract-1" / "relay").glob("*.log")).read_text()
        for capability, words in (("summary", "a run summary"), ("metric", "definitions of metrics"), ("alert", "alerts")):
            warned = log.count(f"{self.name} has no place for {words}")
            assert warned == (capability not in self.holds) or not self.reads, f"{words}: warned {warned} times"
        if "summary" in self.holds and self.reads:
            assert seen.summary is not None
            assert (float(seen.summary["best"]), seen.summary["verdict"]) == (0.25, "good")
            assert float(seen.summary["loss"]) == 0.125, (
                "the user's own value for a key that is logged, too, was replaced by the last point"
            )
        if "metric" in self.holds and self.reads:
            assert seen.metrics is not None
            assert seen.metrics["val/*"] == {"x": "n", "summary": "max"}
        if "alert" in self.holds and self.reads:
            assert seen.alerts is not None
            for text in ("look at it", "and again", "once more"):
                assert sum("Loss is high" in alert and text in alert for alert in seen.alerts) == 1, seen.alerts
            assert len(seen.alerts) == 3

    def test_a_second_attempt_continues_the_same_remote_run_and_syncing_adds_nothing(self, tmp_path: Path) -> None:
        folder = self.everything(tmp_path).folder
        done = self.sync(folder)
        assert done.returncode == 0, done.stderr
        done = self.play(folder, "for i in range(10, 20): run.log({'x': float(i)}, step=i)\nraise ValueError('ill')\n")
        assert done.returncode == 1, done.stderr
        self._drained(folder, "failed")
        if not self.reads:
            return
        seen = self.seen(folder)
        if "resume" in self.holds:
            assert self._same(seen.scalars["x"], [(i, float(i)) for i in range(20)])
            self._check_numbers(seen)
        if "status" in self.holds:
            assert seen.status == "failed"

    def test_a_killed_process_is_delivered_whole_and_ends_as_killed(self, tmp_path: Path) -> None:
        done = self.play(tmp_path, """
            for i in range(300):
                run.log({"x": float(i)}, step=i)
            os.kill(os.getpid(), signal.SIGKILL)
        """)  # fmt: skip
        assert done.returncode == -9
        self._drained(tmp_path, "killed")
        if not self.reads:
            return
        seen = self.seen(tmp_path)
        assert self._same(seen.scalars["x"], [(i, float(i)) for i in range(300)])
        if "status" in self.holds:
            assert seen.status == "killed"

    def _drained(self, folder: Path, status: str) -> None:
        """Wait until the relay, which outlives its run, has closed the remote run with this status."""
        import time

        folder_of = folder / "runs" / "contract" / "contract-1" / "relay"
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            found = [json.loads(path.read_text()) for path in folder_of.glob("*.cursor")]
            if found and found[0]["closed"] == status and found[0]["owner"] is None:
                return
            time.sleep(0.2)
        raise AssertionError(f"the relay did not end: {found}\n{[path.read_text()[-2000:] for path in folder_of.glob('*.log')]}")

    def test_a_relay_killed_between_send_and_settle_repeats_nothing(self, tmp_path: Path) -> None:
        """Points are sent once, unless the adapter declares at-least-once delivery, as for a plain GeneralTracker."""
        from .trackers.registry import find_class

        delivery = getattr(find_class(self.name), "delivery", "at least once")
        body = "for i in range(100): run.log({'x': float(i), 'y': -float(i)}, step=i)"
        done = self.play(tmp_path, body + "\nrun.finish(timeout=120)\n", **self.dying_relay(tmp_path))
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "dying" / "died").exists(), done.stderr
        done = self.sync(tmp_path)
        assert done.returncode == 0, done.stderr
        if not self.reads:
            return
        seen = self.seen(tmp_path)
        wanted = [(i, float(i)) for i in range(100)]
        if delivery == "at least once":
            assert {tuple(point) for point in seen.scalars["x"]} >= set(wanted)
        else:
            assert self._same(seen.scalars["x"], wanted)
            assert self._same(seen.scalars["y"], [(i, -float(i)) for i in range(100)])
        assert seen.runs == 1 or delivery == "at least once"

    def test_refused_values_in_a_batch_leave_every_other_value_there_once(self, tmp_path: Path) -> None:
        """The batch contains media that cannot be converted; no value before or after them may be sent twice or omitted."""
        run = tmp_path / "runs" / "contract" / "contract-1"
        done = self.script(tmp_path, f"""
            import json, time
            from pathlib import Path
            from fanfold.media import Media
            from fanfold.relay.cursor import Cursor
            from fanfold.relay.custom import Custom
            from fanfold.relay.feed import Outgoing
            from fanfold.relay.process import make
            from fanfold.relay.sender import Sender
            from fanfold.trackers.base import Identity, Point, Refused
            from fanfold.trackers.face import destination_of

            class Unreadable(Media):
                kind = "image"

                def __getattr__(self, name):
                    raise Refused("its pixels cannot be read")

                array = pil = encode = caption = property(lambda self: self.pixels)

            run = Path({str(run)!r})
            run.mkdir(parents=True)
            tracker = make({self.name!r}, json.loads({json.dumps(self.kwargs(tmp_path))!r}), run)
            tracker = destination_of(tracker) or Custom(tracker)
            tracker.open(Identity("contract-1", "contract run", "contract", None, run / "trackers" / {self.name!r}))
            sender = Sender(run, tracker, Cursor(run / "test.cursor"))
            for i in range(10):
                broken = {{"broken": Unreadable()}} if i in (2, 3, 7) else {{}}
                point = Point({{"before": float(i), **broken, "after": -1.0 - i}}, i, time.time())
                sender.out.append(Outgoing(point, []))
            while sender.out:
                sender.send()
            tracker.settle()
            tracker.close("finished")
            print("\\n", sender.cursor.refused)
        """)  # fmt: skip
        assert done.returncode == 0, done.stderr
        if self.reads:
            assert int(done.stdout.split()[-1]) == (3 if "image" in self.holds else 0)
            seen = self.seen(tmp_path)
            assert self._same(seen.scalars["before"], [(i, float(i)) for i in range(10)])
            assert self._same(seen.scalars["after"], [(i, -1.0 - i) for i in range(10)])
            assert "broken" not in seen.media

    def test_it_works_by_hand_as_accelerate_uses_it(self, tmp_path: Path) -> None:
        script = f"""
            import json
            from fanfold.trackers.registry import find_class
            kwargs = json.loads({json.dumps(self.kwargs(tmp_path))!r})
            cls = find_class({self.name!r})
            where = [{str(tmp_path / "logs")!r}] if cls.requires_logging_directory else []
            tracker = cls("by-hand", *where, **kwargs)
            tracker.start()
            tracker.store_init_configuration({{"lr": 0.1, "nested": {{"a": [1, 2]}}, "none": None}})
            for i in range(5):
                tracker.log({{"loss": 1.0 / (i + 1)}}, step=i)
            assert tracker.tracker is not None
            tracker.finish()
            print("well")
        """
        done = self.script(tmp_path, script)
        assert done.stdout.strip().endswith("well"), done.stderr


def _bits(value: float) -> Any:
    return "nan" if math.isnan(value) else struct.pack("<d", value)


def _read_for(file: str, name: str, folder: str) -> None:
    """Run a contract's `read` in this process and print the result."""
    sys.path.insert(0, str(Path(file).parent))  # as pytest does: a contract's file may import helpers beside it
    spec = importlib.util.spec_from_file_location("contract_under_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["contract_under_test"] = module
    spec.loader.exec_module(module)
    seen = getattr(module, name).read(Path(folder))
    sys.stdout.flush()
    print("\n" + json.dumps(dataclasses.asdict(seen)))
