"""Requests to a job reach it through a gateway and its forwarder, and the answer comes back with the journal."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

import fanfold
from clickhouse_tools import Fleet
from fanfold.fleet.client import Client
from fanfold.fleet.wire import Telling
from fleet_tools import Forwarder, Gateway, until
from tell_tools import Job


def cli(*words, token="", code=0):
    env = {**os.environ, "FANFOLD_SERVER_TOKEN": token}
    command = [sys.executable, "-m", "fanfold", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout


def token_for(store, name, *scopes):
    given = [word for scope in scopes for word in ("--scope", scope)]
    return cli("server", "token", "create", name, "--store", str(store), "--for", "tell", *given, "-q").split()[-1]


def post(url, path, body, token):
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.parametrize("kind", ["directory", "clickhouse"])
def test_a_gateway_passes_requests_to_the_job_and_answers_back(tmp_path, ends, kind, request):
    node, store = tmp_path / "node", tmp_path / "store"
    node.mkdir()
    place = store if kind == "directory" else ends(Fleet(request.getfixturevalue("clickhouse"))).url
    writer, reader = token_for(place, "ann", "read", "write"), token_for(place, "bob", "read")
    gateway = ends(Gateway(place, log=tmp_path / "gateway.log"))
    with Job(node, "alone", "pace=0.01") as job:
        ends(Forwarder(node, gateway.url, FANFOLD_SERVER_TOKEN=writer))
        known = Client(gateway.url, writer)
        assert until(lambda: _running(gateway.url, reader))
        there = ["--to", gateway.url, "--project", "tell"]
        assert "lr=0.5: done after step" in cli("tell", job.run.id, "set", "lr=0.5", *there, token=writer)
        assert "lr=0.6: done after step" in cli("tell", job.run.name, "set", "lr=0.6", "--dir", gateway.url, token=writer)
        said = cli("tell", job.run.id, "set", "nothing=1", *there, token=writer, code=3)
        assert "nothing is not adjustable. Adjustable: layers, lr" in said
        with pytest.raises(urllib.error.HTTPError, match="403"):
            post(gateway.url, f"/v1/tell?project=tell&run={job.run.id}", {"action": "stop"}, reader)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            post(gateway.url, "/ui/api/tell", {"project": "tell", "id": job.run.id, "action": "stop"}, reader)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(gateway.url, f"/v1/tell?project=tell&run={job.run.id}", {"action": "explode"}, writer)
        assert job.process.poll() is None
        post(gateway.url, "/ui/api/tell", {"project": "tell", "id": job.run.id, "action": "save"}, writer)
        assert until(lambda: [one["state"] for one in job.run.refresh().requests][3:] == ["done"])
        asked = {"run": job.run.id, "action": "evaluate"}  # what an agent says over MCP
        assert known.tool("tell", asked)["state"] == "done"
        with pytest.raises(fanfold.FanfoldError, match="only reading is allowed"):
            Client(gateway.url, reader).tool("tell", asked)
        stop = known.tell("tell", job.run.id, Telling("stop"))
        assert until(lambda: known.answer("tell", job.run.id, stop.id).state == "done")
        job.ends()
        assert all(one["by"].endswith("(ann)") for one in job.run.requests), "who asked is recorded"
        if kind == "directory":
            assert until(lambda: list((store / "tell" / job.run.id / "requests").iterdir()) == [])
        assert known.answer("tell", job.run.id, stop.id).step == job.run.requests[-1]["step"]
        assert until(lambda: known.tell("tell", job.run.id, Telling("stop")).state == "refused")


def _running(url, token):
    request = urllib.request.Request(f"{url}/v1/runs?project=tell", headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return [run["status"] for run in json.load(answer)["runs"]] == ["running"]


def test_the_directory_of_a_gateway_can_be_asked_on_its_own_machine(tmp_path, ends):
    node, store = tmp_path / "node", tmp_path / "store"
    node.mkdir()
    gateway = ends(Gateway(store, log=tmp_path / "gateway.log"))
    with Job(node, "alone", "pace=0.01") as job:
        ends(Forwarder(node, gateway.url))
        assert until(lambda: [run.status for run in fanfold.runs("tell", dir=store)] == ["running"])
        assert fanfold.open(job.run.id, dir=store).tell("stop", timeout=60).state == "done"
        job.ends()
