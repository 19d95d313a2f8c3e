"""Metrics of live runs for monitoring systems: scraped from the gateway and the forwarder, pushed to an OpenTelemetry collector."""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from prometheus_client import parser
from starlette.testclient import TestClient

import fanfold
from fanfold.cli import main
from fanfold.errors import SettingError
from fanfold.fleet import push
from fanfold.fleet.intake import DirectoryIntake
from fanfold.fleet.push import Pusher
from fanfold.fleet.scrape import Scraped
from fanfold.fleet.tokens import FILE_NAME, Tokens
from fanfold.server.gateway import app
from fanfold.store import monitoring
from fanfold.store.query import LocalStore
from fleet_tools import Gateway, Process


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Read Prometheus text with Prometheus' own library."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@pytest.fixture
def live(tmp_path: Path):
    """A run that runs, in a project of its own, and one that another project has."""
    run = fanfold.init("llm", dir=tmp_path / "runs", id="live", name='odd "name" \\ with\nlines', quiet=True, system=False)
    run.log({"train/loss": 0.25, "step": 7, "bad": float("nan"), "high": float("inf"), "on": True, "note": "text"}, step=7)
    other = fanfold.init("vision", dir=tmp_path / "runs", id="elsewhere", quiet=True, system=False)
    other.log({"loss": 2.0}, step=1)
    yield tmp_path / "runs"
    run.finish()
    other.finish()


def ask(url: str, token: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


# Scraped


def test_prometheus_reads_the_metrics_of_live_runs(live):
    found = samples(monitoring.prometheus(*monitoring.collect(monitoring.live(LocalStore(live)), monitoring.WHAT)))
    values = {labels["key"]: value for labels, value in found["fanfold_metric"] if labels["run"] == "live"}
    assert values.pop("bad") != values["on"] and math.isinf(values.pop("high"))
    assert values == {"train/loss": 0.25, "step": 7.0, "on": 1.0}
    assert ({"project": "llm", "run": "live", "name": 'odd "name" \\ with\nlines', "group": ""}, 1.0) in found["fanfold_run_info"]
    assert [labels["status"] for labels, value in found["fanfold_run_status"] if value] == ["running", "running"]
    parts = {labels["part"]: value for labels, value in found["fanfold_goodput_seconds"] if labels["run"] == "live"}
    assert sum(parts.values()) > 0 and "checkpoint" in parts


def test_runs_that_ended_long_ago_are_not_shown(live):
    fanfold.open("live", dir=live)
    old = fanfold.init("llm", dir=live, id="old", quiet=True, system=False)
    old.finish()
    assert {run.id for run in monitoring.live(LocalStore(live))} == {"live", "elsewhere", "old"}
    later = monitoring.live(LocalStore(live), now=time.time() + 3600)
    assert {run.id for run in later} == {"live", "elsewhere"}


def test_a_run_with_countless_keys_is_cut_and_counted(tmp_path):
    with fanfold.init("p", dir=tmp_path, quiet=True, system=False) as run:
        run.log({f"k{number}": 1.0 for number in range(monitoring.MOST_KEYS + 5)})
    found = samples(monitoring.prometheus(*monitoring.collect(monitoring.live(LocalStore(tmp_path)))))
    assert len(found["fanfold_metric"]) == monitoring.MOST_KEYS
    assert found["fanfold_series_left_out"] == [({}, 5.0)]


def test_the_gateway_is_scraped_with_its_tokens(live):
    tokens = Tokens(live / FILE_NAME)
    _, one = tokens.create("one", projects=["llm"], scopes=["read"])
    _, everything = tokens.create("all", projects=["*"], scopes=["read"])
    _, writer = tokens.create("writer", projects=["llm"], scopes=["write"])
    http = TestClient(app(DirectoryIntake(live, power=False), store=LocalStore(live), tokens=tokens))

    def get(path: str, token: str | None):
        return http.get(path, headers={"authorization": f"Bearer {token}"} if token else {})

    assert get("/metrics/runs", None).status_code == 401
    assert get("/metrics/runs", writer).status_code == get("/metrics/runs?project=llm", writer).status_code == 403
    assert get("/metrics/runs", one).status_code == get("/metrics/runs?project=vision", one).status_code == 403
    mine = samples(get("/metrics/runs?project=llm", one).text)
    assert {labels["run"] for labels, _ in mine["fanfold_run_info"]} == {"live"}
    whole = samples(get("/metrics/runs?what=metrics,goodput", everything).text)
    assert {labels["run"] for labels, _ in whole["fanfold_metric"]} == {"live", "elsewhere"}
    assert "fanfold_goodput_seconds" in whole and "fanfold_goodput_seconds" not in mine
    refused = get("/metrics/runs?what=secrets", everything)
    assert (refused.status_code, "secrets" in refused.json()["error"]) == (400, True)


def test_a_node_is_scraped_at_its_forwarder(live):
    served = Scraped(LocalStore(live), "127.0.0.1", 0, token="ffk_word", project="llm")
    url = f"http://127.0.0.1:{served.server_address[1]}/metrics"
    with served.beside():
        assert ask(url)[0] == ask(url, "wrong")[0] == 401
        assert ask(url.replace("metrics", "other"), "ffk_word")[0] == 404
        assert ask(f"{url}?what=nothing", "ffk_word")[0] == 400
        code, text = ask(f"{url}?what=metrics,goodput,ops", "ffk_word")
    assert code == 200
    assert {labels["run"] for labels, _ in samples(text)["fanfold_metric"]} == {"live"}


def test_a_forwarder_without_a_token_answers_this_machine_only(live):
    with pytest.raises(SettingError, match="can be reached from elsewhere"):
        Scraped(LocalStore(live), "0.0.0.0", 0)
    served = Scraped(LocalStore(live), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{served.server_address[1]}/metrics"
    with served.beside():
        assert ask(url)[0] == 200
        foreign = urllib.request.Request(url, headers={"host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(foreign, timeout=30)


# Pushed


class Collector(http.server.ThreadingHTTPServer):
    """An OpenTelemetry collector's HTTP receiver, made of OpenTelemetry's own messages: it refuses what they cannot read."""

    def __init__(self) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.code = 200
        super().__init__(("127.0.0.1", 0), _Receiver)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def values(self, name: str) -> list[tuple[dict[str, str], dict[str, str], float]]:
        """Return the gauges of a name, each with its run's and its own attributes."""
        found = []
        for request in self.requests:
            for resource in request.resource_metrics:
                about = {one.key: one.value.string_value for one in resource.resource.attributes}
                metrics = [metric for scope in resource.scope_metrics for metric in scope.metrics if metric.name == name]
                points = [point for metric in metrics for point in metric.gauge.data_points]
                found += [(about, {a.key: a.value.string_value for a in one.attributes}, one.as_double) for one in points]
        return found


class _Receiver(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        code = self.server.code if self.path == "/v1/metrics" else 404
        if code == 200:
            self.server.requests.append(json_format.Parse(body, ExportMetricsServiceRequest()))
            self.server.headers.append(dict(self.headers))
        answer = json_format.MessageToJson(ExportMetricsServiceResponse()).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector():
    made = Collector()
    yield made
    made.shutdown()
    made.server_close()


def test_a_collector_receives_what_live_runs_logged(live, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc, x-team=ml")
    assert Pusher(LocalStore(live), collector.url, what=monitoring.WHAT).push() == 2
    values = {own["key"]: value for about, own, value in collector.values("fanfold.metric") if about["fanfold.run"] == "live"}
    assert math.isnan(values.pop("bad")) and math.isinf(values.pop("high"))
    assert values == {"train/loss": 0.25, "step": 7.0, "on": 1.0}
    assert {own["part"] for _, own, _ in collector.values("fanfold.goodput_seconds")} >= {"productive", "restart"}
    assert collector.headers[0]["authorization"] == "Basic abc" and collector.headers[0]["x-team"] == "ml"


def test_a_collector_that_is_down_is_tried_again_and_reported_once(live, collector, caplog):
    caplog.set_level("INFO", "fanfold.push")
    pusher = Pusher(LocalStore(live), collector.url)
    collector.code = 503
    pusher.attempt()
    pusher.attempt()
    collector.code = 200
    pusher.attempt()
    words = [record.getMessage() for record in caplog.records if record.name == "fanfold.push"]
    assert len(words) == 2 and "503" in words[0] and "pushed again" in words[1]
    assert collector.requests


@pytest.mark.parametrize("url", ["ftp://host", "http://user:secret@host", "http://host:0", "http://"])
def test_an_address_that_is_none_is_refused_without_its_password(live, url):
    with pytest.raises(SettingError, match="not the address of an OpenTelemetry collector") as error:
        Pusher(LocalStore(live), url)
    assert "secret" not in str(error.value)


def test_headers_that_would_break_a_request_are_refused(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "a=b%0d%0aevil: 1")
    with pytest.raises(SettingError, match="OTEL_EXPORTER_OTLP_HEADERS"):
        push.headers()


def test_gateway_and_forwarder_push_and_are_scraped_as_processes(live, collector, tmp_path):
    """The whole way: a forwarder ships a live run, the gateway shows and pushes it, and so does the forwarder."""
    with contextlib.ExitStack() as stack:
        gateway = Gateway(tmp_path / "store", "--otlp", collector.url, "--otlp-every", "1", log=tmp_path / "gateway.log")
        stack.callback(gateway.close)
        forwarder = Process(
            "server", "forward", "--to", gateway.url, "--dir", str(live), "--metrics-port", "0", "--otlp", collector.url,
            "--otlp-every", "1", log=tmp_path / "forwarder.log",
        )  # fmt: skip
        stack.callback(forwarder.close)
        assert forwarder.popen.stdout is not None
        address = forwarder.popen.stdout.readline().decode().strip()
        assert {labels["run"] for labels, _ in samples(ask(address)[1])["fanfold_metric"]} == {"live", "elsewhere"}
        deadline = time.monotonic() + 60
        while "live" not in ask(f"{gateway.url}/metrics/runs")[1]:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        collector.requests.clear()
        while len(collector.values("fanfold.run_ranks")) < 4:  # two runs, from both
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert forwarder.terminate() == 0 and gateway.terminate() == 0


def test_a_taken_metrics_port_is_reported_before_anything_is_sent(live, tmp_path, capsys):
    taken = Scraped(LocalStore(live), "127.0.0.1", 0)
    port = str(taken.server_address[1])
    words = ["server", "forward", "--to", "http://127.0.0.1:9", "--dir", str(live), "--once", "--metrics-port", port]
    assert main(words) == 2
    taken.server_close()
    assert f"port {port}" in capsys.readouterr().err


def test_ops_profile_of_a_live_run_is_scraped_and_pushed(tmp_path, collector):
    import torch

    run = fanfold.init("p", dir=tmp_path, id="profiled", quiet=True, system=False, ops={"every": 1, "window": 1})
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight])
    for _ in range(20):
        (weight * 2).sum().backward()
        optimizer.step()
    run.ops()
    store = LocalStore(tmp_path)
    found = samples(monitoring.prometheus(*monitoring.collect(monitoring.live(store), ("ops",))))
    assert any(labels["op"] == "aten::mul" for labels, _ in found["fanfold_op_observed_calls_total"])
    Pusher(store, collector.url, what=("ops",)).push()
    run.finish()
    names = {m.name for r in collector.requests for x in r.resource_metrics for s in x.scope_metrics for m in s.metrics}
    assert {"fanfold.op.observed_calls", "fanfold.run_status"} <= names
    assert json.loads(json_format.MessageToJson(collector.requests[0]))
