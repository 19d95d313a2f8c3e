"""One very large frame on its way to a gateway: it is taken, and everybody else is answered meanwhile."""

from __future__ import annotations

import http.client
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from fanfold.cli import main
from fanfold.fleet.client import Client
from fanfold.fleet.wire import LENGTH, Piece, encode
from fanfold.journal import Kind
from fanfold.journal import format as fmt
from fanfold.stores import open_store
from fleet_tools import Gateway, pieces_of, write_run

SIZE = 17 << 20
PATIENCE = 120.0  # seconds until a gateway counts as stuck, on a machine that may be busy
ID = "00f0e1d2c3b4a596"
SEED = fmt.seed_of(ID)


@pytest.fixture(params=["directory", "clickhouse"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Gateway, str]]:
    """A real gateway, and where its runs are."""
    store = str(tmp_path / "store")
    if request.param == "clickhouse":
        store = request.getfixturevalue("clickhouse").url
        assert main(["server", "db", "migrate", "--store", store, "--quiet"]) == 0
    gateway = Gateway(store, log=tmp_path / "gateway.log")
    yield gateway, store
    gateway.close()


def text_frame() -> bytes:
    """A text that does not compress."""
    return fmt.frame(Kind.VALUES, fmt.pack({"s": 1, "t": 2, "v": {"note": random.Random(1).randbytes(SIZE // 2).hex()}}), SEED)


def shape_frame() -> bytes:
    """A shape of more keys than one may have: damage, which is stored as it is and names nothing."""
    keys = [f"{at:06x}" for at in range(SIZE // 8)]
    return fmt.frame(Kind.SHAPE, msgspec.msgpack.encode([0, 0, "?" * len(keys), keys, ""]), SEED)


def request_of(frame: bytes) -> tuple[bytes, int, int]:
    """Return the body of a request with one piece, how long it is unpacked, and how long the journal is then."""
    header = {"format": [1, 0], "journal": ID, "run": "large", "project": "heavy", "rank": 0, "role": "main"}
    data = fmt.frame(Kind.HEADER, fmt.pack(header), 0) + frame
    return *encode([Piece("large", f"0-{ID}", 0, 0, data)]), len(data)


def append(url: str, project: str, piece: Piece) -> int:
    """Send a piece for another project; return the gateway's status for it."""
    client = Client(url, timeout=PATIENCE)
    try:
        return client.append(project, [piece])[0].status
    finally:
        client.close()


@pytest.mark.parametrize("frame", [text_frame, shape_frame], ids=["text", "shape"])
def test_a_frame_of_17_mb_is_taken_and_other_projects_are_answered_meanwhile(served, tmp_path, frame):
    gateway, store = served
    small = {name: pieces_of(write_run(tmp_path / "node", 50, project=name))[0] for name in "abcdef"}
    body, length, end = request_of(frame())
    assert length > SIZE
    large = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE)
    large.putrequest("POST", "/v1/append?project=heavy")
    for name, value in ((LENGTH, length), ("content-length", len(body))):
        large.putheader(name, str(value))
    large.endheaders(body[:-1])
    with ThreadPoolExecutor(3) as senders:
        first = [senders.submit(append, gateway.url, name, small[name]) for name in "abc"]
        assert [one.result(PATIENCE) for one in first] == [200, 200, 200]  # while all but a byte of it is here
        large.send(body[-1:])
        second = [senders.submit(append, gateway.url, name, small[name]) for name in "def"]
        assert [one.result(PATIENCE) for one in second] == [200, 200, 200]
    answer = large.getresponse()
    assert (answer.status, msgspec.json.decode(answer.read())["pieces"]) == (200, [{"status": 200, "offset": end}])
    large.close()
    reader = open_store(store)
    for name in small:
        assert reader.run(name, "r1").series("loss").steps.tolist() == list(range(50))
    run = reader.run("heavy", "large")
    if frame is text_frame:
        assert [len(point.text) for point in run.texts("note")] == [SIZE]
    else:
        assert run.journals[0].damaged >= SIZE and run.keys() == []
