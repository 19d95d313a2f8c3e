"""MCP: the official library's own client, over stdio and HTTP, against real servers with real runs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import httpx2
import jsonschema
import numpy as np
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

import fanfold
from fanfold.journal import requests
from fanfold.tools.shorten import MAX_BYTES, fitted
from fanfold.tools.table import TOOLS
from paths import DOCS
from tell_tools import Job

READING = {"list", "find", "show", "points", "compare", "diagnose", "wait", "query", "media"}
WRITING = {"tell", "tag", "note", "rename", "archive", "move"}


@pytest.fixture
def runs(runs_dir):
    for name, lr in (("good", 0.1), ("better", 0.2)):
        with fanfold.init("llm", name=name, config={"lr": lr}, system=False) as run:
            for step in range(1000):
                run.log({"loss": lr / (1 + step), "spike": 99.0 if step == 370 else 0.0}, step=step)
            run.log({"odd": math.nan, "up": math.inf, "words": "hello"})
            run.log({"picture": fanfold.Image(np.zeros((4, 4, 3), np.uint8)), "rows": fanfold.Table(["a"], [[1], [2]])})
    with pytest.raises(ValueError, match="layer"), fanfold.init("llm", name="bad", system=False) as run:
        run.log({"loss": 1.0})
        run.alert("hot")
        raise ValueError("no such layer")
    with fanfold.init("secret", name="hidden", system=False) as run:
        run.log({"loss": 0.0})


@asynccontextmanager
async def on_stdio(*options: str) -> AsyncIterator[Client]:
    parameters = StdioServerParameters(command=sys.executable, args=["-m", "fanfold", "mcp", *options], env=dict(os.environ))
    async with Client(stdio_client(parameters)) as client:
        yield client


@asynccontextmanager
async def over_http(url: str, token: str = "") -> AsyncIterator[Client]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
        async with Client(streamable_http_client(url, http_client=http)) as client:
            yield client


async def ask(client: Client, tool: str, **arguments):
    """Call a tool; return its result, which must be the same in both forms, or raise its error."""
    answer = await client.call_tool(tool, arguments)
    if answer.is_error:
        raise ValueError(answer.content[0].text)
    assert json.loads(answer.content[0].text) == answer.structured_content
    assert len(answer.content[0].text) <= MAX_BYTES + 2_000
    return answer.structured_content["result"]


@contextlib.contextmanager
def served(*words: str) -> Iterator[str]:
    """A real server in a process of its own; its address."""
    command = [sys.executable, "-m", "fanfold", *words, "--port", "0", "--json", "-q"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.terminate()
        process.wait(30)


async def use_every_tool(client: Client) -> None:
    names = [run["name"] for run in (await ask(client, "list", project="llm"))["runs"]]
    assert names == ["bad", "better", "good"]
    found = await ask(client, "find", project="llm", filter="status=finished", sort="loss.min")
    assert ([run["name"] for run in found["runs"]], found["total"]) == (["good", "better"], 2)
    shown = await ask(client, "show", run="llm/good")
    assert (shown["summary"]["odd"], shown["summary"]["up"], shown["config"]) == ("NaN", "Infinity", {"lr": 0.1})
    failed = await ask(client, "show", run="bad")
    assert failed["created"] <= failed["cause"]["time"] <= failed["seen"] + 1 and failed["alerts"][0]["time"] > 1e9
    (curve,) = await ask(client, "points", run="good", keys=["spike"], buckets=5)
    assert max(one["max"] for one in curve["points"]) == 99.0
    differ = (await ask(client, "compare", a="good", b="better"))["config"]["differ"]
    assert differ == {"lr": [0.1, 0.2]}
    finding = (await ask(client, "diagnose", run="bad"))["findings"][0]
    assert finding["kind"] == "end" and "no such layer" in finding["text"]
    assert (await ask(client, "wait", runs=["good", "bad"], timeout=0))["outcome"] == "failed"
    answer = await ask(client, "query", sql="SELECT run, min(value) AS low FROM points WHERE key = 'loss' GROUP BY run")
    assert answer["columns"] == ["run", "low"]
    media = await client.call_tool("media", {"run": "good", "key": "picture"})
    assert [one.type for one in media.content] == ["text", "image"]
    assert (await ask(client, "media", run="good", key="words"))["points"][0]["text"] == "hello"
    assert (await ask(client, "media", run="good", key="rows"))["points"][0]["rows"] == [["1"], ["2"]]


def test_every_tool_answers_on_stdio_and_only_reads(runs):
    async def play() -> None:
        async with on_stdio("--project", "llm") as client:
            tools = (await client.list_tools()).tools
            assert {tool.name for tool in tools} == READING
            for tool in tools:
                jsonschema.Draft202012Validator.check_schema(tool.input_schema)
                assert (tool.input_schema["type"], tool.annotations.read_only_hint) == ("object", True)
            await use_every_tool(client)
            with pytest.raises(ValueError, match="only reading is allowed"):
                await ask(client, "tag", runs=["good"], add=["x"])
            with pytest.raises(ValueError, match="not open to you"):
                await ask(client, "find", project="secret")
            assert (await ask(client, "query", sql="SELECT DISTINCT project FROM runs"))["rows"] == [["llm"]]

    anyio.run(play)
    assert fanfold.open("good").tags == []


def test_with_write_access_runs_are_tagged_and_annotated(runs):
    async def play() -> None:
        async with on_stdio("--write") as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == READING | WRITING
            await ask(client, "tag", runs=["good", "bad"], add=["seen"])
            await ask(client, "note", run="good", text="one")
            await ask(client, "note", run="good", text="two", append=True)
            with pytest.raises(ValueError, match="cannot be ''"):
                await ask(client, "tag", runs=["good"], add=[""])

    anyio.run(play)
    assert (fanfold.open("good").tags, fanfold.open("good").notes, fanfold.open("bad").tags) == (["seen"], "one\ntwo", ["seen"])


def test_with_write_access_a_running_job_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("FANFOLD_DIR", str(tmp_path))

    async def play(job: Job) -> None:
        async with on_stdio() as client:
            with pytest.raises(ValueError, match="only reading is allowed"):
                await ask(client, "tell", run="-", action="stop")
        async with on_stdio("--write") as client:
            assert [tool.name for tool in (await client.list_tools()).tools if tool.annotations.destructive_hint] == ["tell"]
            answer = await ask(client, "tell", run=job.run.id, action="set", values={"lr": 0.5})
            assert (answer["state"], answer["values"], answer["by"]) == ("done", {"lr": 0.5}, requests.asker())
            answer = await ask(client, "tell", run="-", action="set", values={"lr": 2})
            assert (answer["state"], answer["why"]) == ("refused", "lr cannot be 2: it is between 0 and 1")
            asked = await ask(client, "tell", run="-", action="save", timeout=0)
            assert (asked["state"], asked["action"]) == ("asked", "save")
            later = await ask(client, "tell", run="-", id=asked["id"])
            assert (later["id"], later["action"], later["state"]) == (asked["id"], "save", "done")
            for wrong, told in (({"action": "explode"}, "Known: stop"), ({"id": "../x"}, "not the id of a request")):
                with pytest.raises(ValueError, match=told):
                    await ask(client, "tell", run="-", **wrong)
            assert (await ask(client, "tell", run="-", action="stop"))["state"] == "done"
            job.ends()
            answer = await ask(client, "tell", run="-", action="stop")
            assert (answer["state"], answer["why"]) == ("refused", "the run is not running: it is finished")

    with Job(tmp_path, "alone") as job:
        anyio.run(play, job)
    assert [(one["action"], one["state"]) for one in job.run.requests] == [
        ("set", "done"), ("set", "refused"), ("save", "done"), ("stop", "done"),
    ]  # fmt: skip


def test_mistakes_are_explained_and_the_server_goes_on(runs):
    async def play() -> None:
        async with on_stdio() as client:
            for tool, arguments, told in (
                ("show", {"run": "nobody"}, "no run 'nobody'"),
                ("show", {}, "run"),
                ("show", {"run": "good", "more": 1}, "more"),
                ("points", {"run": "good", "keys": ["los"]}, "Its metrics: loss"),
                ("points", {"run": "good", "keys": ["loss"], "buckets": 0}, "buckets"),
                ("find", {"filter": "loss<"}, "column 6"),
                ("find", {"sort": "nonsense"}, "to sort by"),
                ("query", {"sql": "DROP TABLE runs"}, "one SELECT"),
                ("query", {"sql": "SELECT * FROM read_csv('/etc/passwd')"}, "Nothing was changed"),
                ("media", {"run": "good", "key": "none"}, "picture"),
                ("wait", {"runs": ["good"], "timeout": 9999}, "timeout"),
                ("nonsense", {}, "does not exist"),
            ):
                with pytest.raises(ValueError, match=told):
                    await ask(client, tool, **arguments)
            assert await ask(client, "list")

    anyio.run(play)


def test_the_dashboard_answers_over_http_with_its_token(runs, monkeypatch):
    monkeypatch.setenv("FANFOLD_TOKEN", "open-sesame-open-sesame")

    async def play(address: str) -> None:
        async with over_http(f"{address}/mcp", "open-sesame-open-sesame") as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == READING
            await use_every_tool(client)
        async with httpx2.AsyncClient(headers={"authorization": "Bearer wrong"}) as http:
            assert (await http.post(f"{address}/mcp", json={})).status_code == 401

    with served("ui") as address:
        anyio.run(play, address.partition("?")[0].rstrip("/"))


def token(name: str, *options: str) -> str:
    command = [sys.executable, "-m", "fanfold", "server", "token", "create", name, *options, "--json", "-q"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["token"]


def test_a_gateway_answers_over_http_with_the_rights_of_a_token(runs, runs_dir):
    reader = token("reader", "--for", "llm", "--scope", "read")
    writer = token("writer", "--for", "llm", "--scope", "read", "--scope", "write")

    async def play(address: str) -> None:
        async with over_http(f"{address}/mcp", reader) as client:
            await use_every_tool(client)
            with pytest.raises(ValueError, match="not open to you"):
                await ask(client, "find", project="secret")
            with pytest.raises(ValueError, match="no run 'hidden'"):
                await ask(client, "show", run="hidden")
            with pytest.raises(ValueError, match="only reading is allowed"):
                await ask(client, "tag", runs=["good"], add=["x"])
            assert (await ask(client, "query", sql="SELECT DISTINCT project FROM runs"))["rows"] == [["llm"]]
        async with over_http(f"{address}/mcp", writer) as client:
            await ask(client, "tag", runs=["good"], add=["from-afar"])
        async with httpx2.AsyncClient() as http:
            assert (await http.post(f"{address}/mcp", json={})).status_code == 401
            assert (await http.get(f"{address}/mcp", headers={"authorization": f"Bearer {reader}"})).status_code == 405

    with served("server", "start", "--store", str(runs_dir)) as address:
        anyio.run(play, address)
    assert fanfold.open("good").tags == ["from-afar"]


def test_commands_reach_the_runs_of_a_gateway(runs, runs_dir, monkeypatch):
    writer = token("writer", "--for", "llm", "--scope", "read", "--scope", "write")
    reader = token("reader", "--for", "llm", "--scope", "read")

    def command(address: str, *words: str, word: str = writer) -> tuple[int, str]:
        environment = {**os.environ, "FANFOLD_SERVER_TOKEN": word}
        line = [sys.executable, "-m", "fanfold", *words, "--dir", address, "--json"]
        done = subprocess.run(line, capture_output=True, text=True, env=environment)
        return done.returncode, done.stdout or done.stderr

    with served("server", "start", "--store", str(runs_dir)) as address:
        assert json.loads(command(address, "tag", "good", "--project", "llm", "--add", "far")[1])[0]["tags"] == ["far"]
        command(address, "note", "llm/good", "seen")
        command(address, "rename", "better", "best")
        command(address, "archive", "bad")
        code, text = command(address, "diagnose", "bad", word=reader)
        assert code == 3 and "no such layer" in json.loads(text)["findings"][0]["text"]
        assert json.loads(command(address, "compare", "good", "best")[1])["config"]["differ"] == {"lr": [0.1, 0.2]}
        assert command(address, "tag", "good", "--add", "x", word=reader)[0] == 2
        code, text = command(address, "diagnose", "hidden")
        assert code == 1 and "no run 'hidden'" in text
        assert command(address, "diagnose", "good", word="wrong")[0] == 2
        code, text = command(address, "wait", "good", "bad", "--project", "llm", word=reader)
        assert (code, [one["outcome"] for one in json.loads(text)["runs"]]) == (3, ["finished", "failed"])
        assert command(address, "wait", "good", "--until", "loss<0", word=reader)[0] == 5
        code, text = command(address, "points", "good", "spike", "--buckets", "3", word=reader)
        assert (code, max(one["max"] for one in json.loads(text)[0]["points"])) == (0, 99.0)
        for words, told in (
            (("mv", "good", "--project", "other"), "you may not read project 'other'"),
            (("mv", "good", "--project", "other", "--force"), "--force is for a directory of runs"),
            (("cp", "good", "--project", "other"), "Run it where the runs are recorded"),
        ):
            code, text = command(address, *words)
            assert code == 2 and told in text
    good = fanfold.open("good")
    assert (good.tags, good.notes, fanfold.open("best").config, fanfold.open("bad").archived) == (
        ["far"],
        "seen",
        {"lr": 0.2},
        True,
    )


def test_python_changes_the_runs_of_a_gateway(runs, runs_dir, monkeypatch):
    monkeypatch.setenv("FANFOLD_SERVER_TOKEN", token("writer", "--for", "llm", "--scope", "read", "--scope", "write"))
    here = fanfold.open("good")
    here.tags = ["old"]
    with served("server", "start", "--store", str(runs_dir)) as address:
        there = fanfold.open("good", dir=address, project="llm")
        assert (there.id, there.status, there.config, there.tags) == (here.id, "finished", {"lr": 0.1}, ["old"])
        assert math.isnan(there.summary["odd"]) and there.duration == pytest.approx(here.duration, abs=0.01)
        there.tags, there.notes, there.name, there.archived = ["a", "b"], "seen", "best", True
        assert (there.tags, there.notes, there.name, there.archived) == (["a", "b"], "seen", "best", True)
        there.notes = None
        assert there.tell("stop").why == "the run is not running: it is finished"
        for change, told in (
            (lambda: setattr(there, "tags", "text"), "Nothing was changed"),
            (lambda: setattr(there, "group", "study"), "cannot be changed through a gateway"),
            (lambda: there.series("loss"), "fanfold points --dir"),
            (lambda: there.move("elsewhere"), "you may not read project 'elsewhere'"),
            (lambda: fanfold.open("hidden", dir=address), "no run 'hidden'"),
        ):
            with pytest.raises(fanfold.FanfoldError, match=told):
                change()
        assert [run.name for run in fanfold.runs("llm", filter="status=finished", dir=address)] == ["better", "best"]
    here.refresh()
    assert (here.tags, here.notes, here.name, here.archived) == (["a", "b"], None, "best", True)


def test_waiting_returns_when_a_metric_is_reached(runs_dir):
    train = "import fanfold, time\nrun = fanfold.init('llm', name='live', system=False)\nfor i in range(10_000):\n    run.log({'loss': 1 / (1 + i)}); time.sleep(0.02)"
    process = subprocess.Popen([sys.executable, "-c", train])

    async def play() -> None:
        async with on_stdio() as client:
            for _ in range(100):
                with contextlib.suppress(ValueError):
                    answer = await ask(client, "wait", runs=["live"], until="loss<0.05", timeout=20)
                    break
                await anyio.sleep(0.1)
            assert (answer["outcome"], answer["runs"][0]["status"]) == ("met", "running")
            assert (await ask(client, "wait", runs=["live"], timeout=0.2))["outcome"] == "timeout"

    try:
        anyio.run(play)
    finally:
        process.kill()
        process.wait()


def test_long_answers_are_cut_and_say_so(runs_dir):
    for place in range(120):
        with fanfold.init("many", name=f"run-{place}", system=False, config={f"key{n}": "x" * 50 for n in range(40)}) as run:
            run.log({"loss": float(place)})

    async def play() -> None:
        async with on_stdio() as client:
            answer = await client.call_tool("find", {"project": "many", "limit": 200})
            assert len(answer.content[0].text) <= MAX_BYTES + 2_000
            assert answer.structured_content["result"]["total"] == 120
            assert any("items" in line for line in answer.structured_content["left_out"])

    anyio.run(play)


@pytest.mark.parametrize("value", ["x" * 10**6, list(range(10**5)), {str(n): n for n in range(10**5)}, [["y" * 999] * 99] * 99])
def test_anything_can_be_made_to_fit(value):
    result, left_out = fitted(value)
    assert len(json.dumps(result)) <= 2 * MAX_BYTES
    assert left_out
    assert fitted(math.nan) == ("NaN", [])


def test_every_tool_is_documented():
    page = (DOCS / "agents.md").read_text()
    assert all(f"`{name}`" in page for name in TOOLS)
