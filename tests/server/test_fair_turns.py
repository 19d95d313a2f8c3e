"""One caller who asks for much, or for something that never ends, leaves the server to the others."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from test_server_load import large_run

import fanfold
from answers import serving
from clickhouse_tools import Fleet
from fanfold.clickhouse.gateway_tables import TokenTable
from fanfold.fleet.tokens import FILE_NAME, TokenBook, Tokens
from fanfold.journal import blobs
from fanfold.server.live import LiveNotices
from fanfold.server.turns import EACH, THREADS, WAITING
from fleet_tools import Gateway
from store_data import Call, write_run

PATIENCE = 50  # seconds: below the time a server gives one question, so that waiting for it to end does not pass


def request(path: str, **headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


@contextlib.contextmanager
def lines(port: int, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """Hold so many connections, with a request sent on each."""
    found = []
    try:
        for _ in range(count):
            found.append(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
            found[-1].sendall(sent)
        yield found
    finally:
        for line in found:
            line.close()


def answer(port: int, path: str, *, source: str = "127.0.0.1", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE, source_address=(source, 0))
    try:
        connection.request("GET", path, headers={"host": "localhost", **headers})
        found = connection.getresponse()
        return found.status, found.read()
    finally:
        connection.close()


def stuck_store(root: Path, cache: Path) -> Path:
    """Write a small project, and one whose reading does not end until somebody writes to the pipe that is returned."""
    write_run(root, [Call(0, 0, step, 1, {"loss": float(step)}) for step in range(5)], project="quick", id="small")
    pipe = cache / "index" / f"{large_run(root)}.idx"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    return pipe


@pytest.mark.parametrize(
    "path", ["/ui/api/runs?project=slow", "/v1/runs?project=slow", "/ui/media?project=slow&run=large&blob=a"]
)
def test_one_token_that_holds_every_question_leaves_threads_to_the_others(path, tmp_path, monkeypatch, ends):
    store, cache = tmp_path / "store", tmp_path / "cache"
    pipe = stuck_store(store, cache)
    words = {name: Tokens(store / FILE_NAME).create(name, projects=["*"], scopes=["read"])[1] for name in ("greedy", "other")}
    monkeypatch.setenv("FANFOLD_CACHE_DIR", str(cache))
    gateway = ends(Gateway(store))
    held = request(path, authorization=f"Bearer {words['greedy']}")
    with lines(gateway.port, 3 * THREADS, held), pipe.open("wb"):
        time.sleep(1.0)  # until the others have arrived, too
        bearer = {"authorization": f"Bearer {words['other']}"}
        status, body = answer(gateway.port, "/ui/api/runs?project=quick", **bearer)
        assert (status, [run["id"] for run in json.loads(body)["runs"]]) == (200, ["small"])
        assert answer(gateway.port, "/v1/runs?project=quick", **bearer)[0] == 200


def test_one_address_that_holds_every_question_leaves_threads_to_the_others(tmp_path):
    root, cache = tmp_path / "runs", tmp_path / "cache"
    pipe = stuck_store(root, cache)
    with serving(root, cache) as address:
        port = int(address.rpartition(":")[2])
        with lines(port, EACH + WAITING, request("/api/runs?project=slow")), pipe.open("wb"):
            time.sleep(1.0)
            assert answer(port, "/api/runs?project=quick", source="127.0.0.2")[0] == 200
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            connection.request("GET", "/api/runs?project=quick", headers={"host": "localhost"})
            refused = connection.getresponse()
            assert (refused.status, int(refused.headers["retry-after"]) > 0) == (429, True)
            assert "Try again" in json.loads(refused.read())["error"]
            connection.close()


def test_streams_that_begin_together_cost_one_look_at_the_store():
    """A look takes a thread that forwarders need, and waits for the looks before it."""
    looks = []

    async def changed(since: object) -> tuple[int, list[object]]:
        looks.append(since)
        await asyncio.sleep(0.05)
        return 1, []

    async def hear() -> None:
        notices = LiveNotices(changed, interval=60.0)
        streams = [notices.stream() for _ in range(50)]
        hellos = await asyncio.gather(*(anext(stream) for stream in streams))
        assert all(b"hello" in hello for hello in hellos)
        for stream in streams:
            await stream.aclose()
        notices._watcher.cancel()

    asyncio.run(hear())
    assert looks == [None]


# Filters


LONG = "a" * 60_000
HEAVY = " or ".join(f"name~*{'a?' * 5}b{number}*" for number in range(150))
FILTERS = {
    "thirty stars": "*".join("a" * 31) + "b",
    "stars and question marks": "name~" + "*?a" * 30 + "b",
    "question marks alone": "name~" + "?" * 3000 + "b",
    "alternation": " or ".join(f"name~{'a?' * 10}*{number}" for number in range(100)),
    "nested": "(" * 90 + "name~*a?b*" + ")" * 90,
    "long text": "name~" + "ab" * 1900,
    "config": "config.text~*a?b*?a*b or config.text!~*b?*",
    "statistics": " or ".join(f"loss.max>{number}" for number in range(100)),
}


def hostile_runs(root: Path, count: int) -> None:
    for number in range(count):
        run = fanfold.init("llm", dir=root, id=f"r{number}", name=LONG, config={"text": LONG}, system=False, quiet=True)
        run.log({"loss": 1.0}, step=0)
        run.finish()


class Place(NamedTuple):
    """A store with runs of very long names: what names it on the command line, and its tokens."""

    name: str
    tokens: TokenBook


@pytest.fixture(params=["directory", "clickhouse"])
def place(request, tmp_path) -> Iterator[Place]:
    store = tmp_path / "store"
    hostile_runs(store, 40)
    if request.param == "directory":
        yield Place(str(store), Tokens(store / FILE_NAME))
        return
    fleet = Fleet(request.getfixturevalue("clickhouse"))
    fleet.ship(store)
    yield Place(fleet.url, TokenTable(fleet.database))
    fleet.close()


@contextlib.contextmanager
def heavy_filters(place, tmp_path, ends):
    """Let one reader ask for filters that take as long as they are allowed; give its first connection, and another reader's way in."""
    words = {name: place.tokens.create(name, projects=["*"], scopes=["read"])[1] for name in ("greedy", "other")}
    gateway = ends(Gateway(place.name, log=tmp_path / "gateway.log"))
    greedy, other = ({"authorization": f"Bearer {words[name]}"} for name in ("greedy", "other"))
    asked = [f"/ui/api/passing?project=llm&filter={urllib.parse.quote(text)}" for text in (HEAVY, *FILTERS.values())]
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(lines(gateway.port, 3, request(path, **greedy))) for path in asked]
        yield held[0][0], lambda path: json.loads(answer(gateway.port, path, **other)[1])


def test_filters_of_one_reader_keep_nobody_else_waiting(place, tmp_path, ends):
    with heavy_filters(place, tmp_path, ends) as (_, ask):
        for _ in range(3):
            assert len(ask("/ui/api/runs?project=llm")["runs"]) == 40
            assert len(ask("/ui/api/passing?project=llm&filter=loss%3E0%20and%20name~a*a")["ids"]) == 40


@pytest.mark.faults
@pytest.mark.timeout(900)  # each heavy filter may take the server's whole minute
def test_the_heaviest_filter_ends_in_time(place, tmp_path, ends):
    with heavy_filters(place, tmp_path, ends) as (line, _):
        line.settimeout(4 * PATIENCE)
        ended = line.recv(1 << 16)
        if b" 400 " in ended:
            ended += line.recv(1 << 16)
    assert ended.startswith(b"HTTP/1.1 200") or b"took too long" in ended


# Media


def test_a_blob_swapped_for_a_link_while_it_is_asked_for_is_never_followed(tmp_path):
    run = fanfold.init("llm", dir=tmp_path / "runs", id="r1", system=False, quiet=True)
    run.log({"page": fanfold.Image(np.zeros((64, 64, 3), np.uint8))})
    run.finish()
    blob = blobs.path_of(run.path, fanfold.open(run.path).media("page")[0].entry["blob"])
    (tmp_path / "secret").write_text("somebody's secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "own").write_bytes(blob.read_bytes())
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for kind in ("link", "own"):
                aside = tmp_path / f"aside-{kind}"
                os.link(tmp_path / kind, aside, follow_symlinks=False)
                aside.replace(blob)

    with serving(tmp_path / "runs", tmp_path / "cache") as address:
        port = int(address.rpartition(":")[2])
        swapper = threading.Thread(target=swap)
        swapper.start()
        try:
            found = [answer(port, f"/media?project=llm&run=r1&blob={blob.name}") for _ in range(400)]
        finally:
            stop.set()
            swapper.join()
    assert {status for status, _ in found} <= {200, 404}
    assert any(status == 200 for status, _ in found)
    assert not any(b"secret" in body for _, body in found)
