"""Everything another party can send, write or ask, in quantity: nothing crashes, hangs, takes much memory or becomes a value.

Part of `make faults`: each test enters one line of the table in docs/guarantees.md. Short forms of most of it are in the ordinary tests, whose
generators are used here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from test_forged_frames import (
    GOOD,
    HEADER,
    ID,
    SHAPE,
    answers,
    delivered,
    differences,
    fits,
    forwarded,
    frame,
    journal_of,
)
from test_hostile_folders import odd

import fanfold
from abuse_tools import BUSY_SECONDS, TEXTS, Count, Dashboard, Watched, answer_to, counting, fuzz_api, fuzz_paths, queries, quoted
from answers import HALF
from clickhouse_tools import Fleet
from damage import damaged, points, read, renewed
from fanfold.errors import FanfoldError, notices
from fanfold.fleet.tokens import FILE_NAME, Tokens
from fanfold.fleet.wire import LENGTH, Piece, encode
from fanfold.journal import Kind, packed, packing
from fanfold.journal import format as fmt
from fanfold.journal.directory import journal_files
from fanfold.relay.feed import Feed
from fanfold.server.gateway import DOORS
from fanfold.store import catalogue
from fleet_tools import Gateway, until
from forged import WRONG, mutated
from marks import needs_root
from segment_tools import cache, files, made, merge_all, small
from segment_tools import read as read_run

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
__all__ = ["cache", "small"]  # fixtures
WAYS = ["flip", "cut", "insert", "duplicate", "zero", "remove", "swap"]


def spoiled(data: bytes, chance: random.Random) -> bytes:
    """Damage bytes in one to four ways."""
    for _ in range(chance.randrange(1, 5)):
        data = damaged(data, chance.choice(WAYS), chance.random(), chance.random(), chance.randrange(1, 256)) if data else data
    return data


@contextlib.contextmanager
def timed(count: Count, *note: Any, inputs: int = 1):
    """Count one input, the exceptions it causes, and whether it keeps this process busy."""
    count.inputs += inputs
    before = time.process_time()
    try:
        yield
    except Exception as error:
        count.crash(*note, repr(error)[:300])
    if time.process_time() - before > BUSY_SECONDS:
        count.hang(time.process_time() - before, *note)


# Frames and files


def twisted(body: Any, chance: random.Random) -> Any:
    """Forge one to three places of a body, however deep."""
    for _ in range(chance.randrange(1, 4)):
        body = _twisted(body, chance)
    return body


def _twisted(body: Any, chance: random.Random) -> Any:
    if not isinstance(body, (dict, list)) or not body or chance.random() < 0.2:
        return chance.choice(WRONG[1:])
    forged = dict(body) if isinstance(body, dict) else list(body)
    place = chance.choice(list(forged) if isinstance(forged, dict) else range(len(forged)))
    if chance.random() < 0.15:
        del forged[place]
    else:
        forged[place] = _twisted(forged[place], chance)
    return forged


def test_forged_frames_of_every_kind(tmp_path, capsys):
    chance = random.Random(1)
    expected = journal_of(tmp_path / "expected", [])
    wanted, told = answers(tmp_path / "expected", capsys), delivered(expected.parents[1])
    with counting("forged frames: every field of every kind, then several at random, for every reader") as count:
        for number, (kind, body) in enumerate([*GOOD.values(), (Kind.SHAPE, SHAPE)]):
            forged = [*mutated(body), *(twisted(body, chance) for _ in range(1000))]
            wrong = [frame(kind, one) for one in forged if not fits(kind, one)]
            fitting = [frame(kind, one) for one in forged if fits(kind, one)] if kind != Kind.SHAPE else []
            for bad, some in ((True, wrong), (False, fitting)):
                root = tmp_path / f"{number}-{bad}"
                with timed(count, kind, bad, inputs=len(some)):
                    file = journal_of(root, some)
                    found = answers(root, capsys)
                    if bad and (change := differences(found, wanted)):
                        count.invent(kind, change)
                    if bad and delivered(file.parents[1]) != told:
                        count.invent(kind, "relay")
                    Feed(file.parents[1], name="wandb").poll()
                    if bad:
                        forwarded(file, root / "store")
                shutil.rmtree(root)
        for number, one in enumerate(one for one in [*mutated(HEADER), *(twisted(HEADER, chance) for _ in range(500))]):
            file = journal_of(tmp_path / "headers" / str(number), [], header=one)
            with timed(count, "header", one), contextlib.suppress(FanfoldError):
                if read(file).column("loss").values.tolist() != [0.0, 0.5]:
                    count.invent("header", one)
        count.hangs -= sum(1 for note in count.notes if note[0] == "hang" and isinstance(note[2], int))  # thousands at a time


def real_run(folder: Path, rows: int = 120) -> Path:
    """A run as people make them: numbers, texts, media, facts, alerts; returns its journal."""
    run = fanfold.init("llm", dir=folder, id="r1", system=False, quiet=True, config={"lr": 0.1, "model": {"depth": 3}})
    for step in range(rows):
        run.log(
            {"loss": 1 / (step + 1), "acc": step, "flag": step % 2 == 0, **({"note": f"step {step}"} if step % 10 == 0 else {})},
            step=step,
        )
    run.log({"img": fanfold.Image(np.zeros((4, 4, 3), np.uint8))}, step=rows)
    run.alert("hot", "it is")
    run.tags = ["a"]
    run.summary["best"] = 1.5
    run.finish()
    (file,) = (run.path / "journal").glob("*.ffj")
    return file


def test_damaged_journals(tmp_path):
    chance = random.Random(2)
    file = real_run(tmp_path / "runs")
    data, logged = file.read_bytes(), set(points(read(file)))
    with counting("journals with bytes flipped, cut, inserted, doubled, moved or zeroed") as count:
        for number in range(4000):
            spoilt = spoiled(data, chance)
            with timed(count, number):
                journal = read(renewed(file, spoilt))
                if more := set(points(journal)) - logged:
                    count.invent(number, more)
                if number % 20 == 0:
                    stored = fanfold.open(file.parents[1])
                    stored.status, stored.summary, stored.config, stored.alerts  # noqa: B018 - to ask is the test
                    Feed(file.parents[1], name="wandb").poll()


def test_damaged_packed_journals(tmp_path):
    chance = random.Random(3)
    file = real_run(tmp_path / "runs", rows=3000)
    logged = set(points(read(file)))
    assert packing.pack(file)
    (file,) = journal_files(file.parents[1])
    assert file.suffix == fmt.PACKED
    data = file.read_bytes()
    with counting("packed journals damaged in the same ways") as count:
        for number in range(1500):
            spoilt = spoiled(data, chance)
            where = tmp_path / "unpacked" / str(number)
            with timed(count, number), contextlib.suppress(FanfoldError):
                renewed(file, spoilt)
                stored = fanfold.open(file.parents[1])
                for key in list(stored.keys()):
                    series = stored.series(key)
                    if not {
                        (key, step, value) for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True)
                    } <= {(name, step, value) for name, step, *_, value in (one for one in logged if len(one) == 4)}:
                        count.invent(number, key)
                packed.unpacked(file, where)
            shutil.rmtree(where, ignore_errors=True)
            notices.counts.clear()


def rows(root: Path) -> list[Any]:
    return [(run.row(), catalogue.statistics(run.row(), "a")) for run in fanfold.runs("p", dir=root)]


def test_damaged_caches(tmp_path, small, cache, capsys):
    """Segments, indexes and the catalogue are caches: whatever is in them, answers are the same."""
    chance = random.Random(4)
    folder = made(tmp_path / "runs", 300)
    merge_all(folder)
    wanted = read_run(tmp_path / "runs")
    (listed,) = rows(tmp_path / "runs")
    caches = [path for path in sorted(cache.rglob("*")) if path.is_file() and path.stat().st_size]
    assert files(cache) and len(caches) > 2
    kept = {path: path.read_bytes() for path in caches}
    with counting("segments, indexes and catalogue damaged in the same ways") as count:
        for number in range(800):
            for path, data in kept.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                renewed(path, spoiled(data, chance) if chance.random() < 0.5 else data)
            with timed(count, number):
                if read_run(tmp_path / "runs") != wanted or rows(tmp_path / "runs") != [listed]:
                    count.invent(number)
            notices.counts.clear()


# Requests


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    real_run(tmp_path / "runs")
    run = fanfold.init("llm", dir=tmp_path / "runs", id="r2", system=False, quiet=True)
    run.log({"page": fanfold.Html("<b>x</b>"), "t": fanfold.Table(columns=["a"], data=[[1]])}, step=0)
    run.finish()
    shutil.copytree(tmp_path / "runs" / "llm", tmp_path / "runs" / "kept")  # nobody names this one: what is in it stays
    return tmp_path / "runs"


def unchanged(count: Count, folder: Path) -> None:
    """Count values that the run did not log."""
    series = fanfold.open(folder).series("loss")
    if series.values.tolist() != [1 / (step + 1) for step in range(120)]:
        count.invent(series.values[:10])


def test_fuzzed_requests_to_the_dashboard(recorded, ends):
    with counting("requests to `fanfold ui --write`: every route, argument, field, header and method") as count:
        server = ends(Dashboard(recorded, "--write"))
        watched = Watched(server, count, server.token)
        request = urllib.request.Request(
            f"http://localhost:{server.port}/api/openapi.json", headers={"authorization": f"Bearer {server.token}"}
        )
        with urllib.request.urlopen(request) as answer:
            openapi = json.load(answer)
        assert watched.ask("GET", "/api/run?project=llm&id=r1") == 200
        fuzz_api(watched, "", openapi, random.Random(5))
        fuzz_paths(watched, "")
        watched.close("/api/projects")
        unchanged(count, recorded / "kept" / "r1")


def forged_pieces(chance: random.Random) -> list[bytes]:
    """Return requests to a gateway's door for journals, raw: fields of the wrong type, sizes that lie, bytes that are none of ours."""
    names = [text for text in TEXTS if "\ud800" not in text]  # msgpack has no half a character
    head = fmt.frame(Kind.HEADER, msgspec.msgpack.encode(HEADER), 0)
    good = ["forged", f"0-{ID}", 0, 0, head + frame(*GOOD["values"])]
    forms = [[one] for one in mutated(good)] + list(mutated([good])) + [[twisted(good, chance)] for _ in range(200)]
    forms += [[["forged", name, 0, 0, good[4]]] for name in names] + [[[name, good[1], 0, 0, good[4]]] for name in names]
    forms += [[["forged", good[1], place, gap, good[4]]] for place in (0, 1, 2**62) for gap in (0, 1, -1, 2**40, 2**62)]
    kinds = [*GOOD.values(), (Kind.SHAPE, SHAPE), (250, {"new": 1})]
    for number in range(400):
        kind, body = chance.choice(kinds)
        forms.append(
            [
                [
                    "forged",
                    f"0-{number:016x}",
                    0,
                    0,
                    head.replace(ID.encode(), f"{number:016x}".encode()) + frame(kind, twisted(body, chance)),
                ]
            ]
        )
    return [msgspec.msgpack.encode(form) for form in forms]


def fuzz_doors(watched: Watched, chance: random.Random) -> None:
    import zlib

    for door in DOORS:
        for query in queries(["project", "run", "journal", "name", "offset", "total"], chance):
            watched.ask(door.method, f"{door.path}{query}")
    for raw in forged_pieces(chance):
        body = zlib.compress(raw)
        watched.ask("POST", "/v1/append?project=llm", body, (LENGTH, str(len(raw))))
    for length in ("", "-1", "0", "1", "x", "9" * 30, str(1 << 26)):
        watched.ask("POST", "/v1/append?project=llm", zlib.compress(b"x" * 5000), (LENGTH, length))
    for _ in range(150):
        raw = chance.randbytes(chance.randrange(1, 2000))
        watched.ask("POST", "/v1/append?project=llm", raw, (LENGTH, str(chance.randrange(1, 1 << 22))))
        watched.ask("POST", "/v1/missing?project=llm&run=x", raw)
        watched.ask(
            "POST", f"/v1/blob?project=llm&run=x&name={'ab' * 32}&offset={chance.randrange(9)}&total={chance.randrange(99)}", raw
        )


def test_fuzzed_requests_to_a_gateway(recorded, tmp_path, ends):
    store = tmp_path / "store"
    shutil.copytree(recorded, store)
    _, word = Tokens(store / FILE_NAME).create("writer", projects=["llm"], scopes=["read", "write"])
    with counting(
        "requests to `fanfold server start`: every door and route, forged journals, sizes that lie, random bytes"
    ) as count:
        gateway = ends(Gateway(store, "--allow-delete", "--rate", "10000", "--memory", "64"))
        watched = Watched(gateway, count, word)
        before = {path: path.read_bytes() for path in (store / "kept").rglob("*") if path.is_file()}
        fuzz_doors(watched, random.Random(6))
        with urllib.request.urlopen(
            urllib.request.Request(f"{gateway.url}/ui/api/openapi.json", headers={"authorization": f"Bearer {word}"})
        ) as answer:
            fuzz_api(watched, "/ui", json.load(answer), random.Random(7))
        fuzz_paths(watched, "/ui")
        watched.close("/ui/api/runs?project=llm")
        if {path: path.read_bytes() for path in (store / "kept").rglob("*") if path.is_file()} != before:
            count.invent("a project that the token does not open has changed")


# Slow, half and very many requests


BEGUN = [
    b"", b"G", b"\x16\x03\x01" * 100, b"\x00" * 100, b"GET / HTTP/1.1\r\n", HALF,
    b"POST /v1/append?project=llm HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\nabc", b"POST /ui/login HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nffffff\r\nabc",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 50,
]  # fmt: skip


def test_half_requests_and_floods(recorded, tmp_path, ends):
    store = tmp_path / "store"
    shutil.copytree(recorded / "llm", store / "llm")
    with counting("half and slow requests, 40 lots of 60 lines, and a flood of whole ones beside them") as count:
        gateway = ends(Gateway(store))
        watched = Watched(gateway, count)
        whole = b"GET /v1/runs?project=llm HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        with contextlib.ExitStack() as held, concurrent.futures.ThreadPoolExecutor(8) as senders:
            for turn in range(40):
                before = watched.cpu()
                for number in range(60):
                    with contextlib.suppress(OSError):
                        line = held.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=20))
                        line.sendall(BEGUN[number % len(BEGUN)])
                    count.inputs += 1
                if watched.cpu() - before > BUSY_SECONDS:
                    count.hang("half", turn)
                flood = [*senders.map(lambda _: answer_to(gateway.port, whole), range(50))]
                count.inputs += len(flood)
                if any(status is not None and status >= 500 and status != 503 for status in flood):
                    count.crash(flood)
                if watched.ask("GET", "/v1/runs?project=llm") != 200:
                    count.hang("a whole request was not answered")
                if turn % 4 == 3:
                    held.close()
        watched.close("/healthz")
        unchanged(count, store / "llm" / "r1")


# Folders


def hostile_folder(root: Path) -> int:
    """Fill a directory of runs with everything that is not a run, or not only; return how many there are."""
    project, made = root / "llm", 0
    good = project / "r1"
    for name in [
        "a\nb",
        "-rf",
        "<script>",
        "'; --",
        "..%2f..",
        "%",
        "é" * 100,
        "a" * 255,
        " ",
        ".hidden",
        "con",
        os.fsdecode(b"\xff\xfe"),
    ]:
        shutil.copytree(good, project / name)
        (root / f"p{name}"[:255]).mkdir(exist_ok=True)
        made += 2
    for number, kind in enumerate(["pipe", "socket", "device", "link"]):
        for place in (
            "journal",
            "journal/0-1111111111111111.ffj",
            "journal/0-2222222222222222.ffz",
            "blobs",
            "relay",
            "ops",
            "forward",
        ):
            run = project / f"odd-{number}-{place.replace('/', '-')}"
            shutil.copytree(good, run)
            target = run / place
            shutil.rmtree(target, ignore_errors=True)
            odd(target, kind)
            made += 1
    (root / "loop").symlink_to(root)
    (project / "loop").symlink_to(project)
    (project / "away").symlink_to("/")
    deep = project / "deep" / "journal"
    for _ in range(60):
        deep = deep / "d" / "journal"
    deep.mkdir(parents=True)
    many = project / "many" / "journal"
    many.mkdir(parents=True)
    for number in range(3000):
        (many / f"{number}-{number:016x}.ffj").write_bytes(b"" if number % 2 else b"\xfa\xfd" * 20)
    theirs = project / "theirs"
    shutil.copytree(good, theirs)
    for path in [theirs, *theirs.rglob("*")]:
        os.chown(path, 65534, 65534)
    return made + 3005


def command(root: Path, *words: str, **options: Any) -> tuple[int | None, str, float]:
    """Run a command of ours; return its exit code (None: it did not end), what it said of errors, and its processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        named = [str(root / "llm" / "r1") if word == RUN else word for word in words]  # copies of it have the same id
        done = subprocess.run([sys.executable, "-m", "fanfold", *named, "--dir", str(root)], capture_output=True, text=True, timeout=200,
                              errors="replace", stdin=subprocess.DEVNULL, check=False, **options)  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, "", 200.0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.returncode, done.stderr + done.stdout[-300:], after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


RUN = "the run's own folder"
COMMANDS = [["ls", "--json"], ["ls"], ["show", RUN, "--json"], ["query", "SELECT * FROM runs", "--json"], ["export", RUN, "--format", "jsonl"],
            ["prune", "--dry-run", "--json"], ["usage", RUN, "--json"], ["ops", RUN, "--json"]]  # fmt: skip


@needs_root
def test_hostile_folders(recorded, tmp_path, ends):
    (tmp_path / "empty").mkdir()
    with counting("run folders with links, pipes, sockets, devices, odd names and owners, 3,000 files and deep ones") as count:
        count.inputs += hostile_folder(recorded)
        base = command(tmp_path / "empty", "ls")[2]
        for words in COMMANDS:
            code, said, cpu = command(recorded, *words)
            count.inputs += 1
            if code is None or cpu - base > 5 * BUSY_SECONDS:  # 3,000 files have to be looked at
                count.hang(words, code, cpu - base)
            if "Traceback" in said or code not in (0, 1):
                count.crash(words, code, said)
        server = ends(Dashboard(recorded))
        watched = Watched(server, count, server.token)
        for path in ("/api/projects", "/api/runs?project=llm", "/api/alerts?project=llm", "/api/run?project=llm&id=r1"):
            if watched.ask("GET", path) != 200:
                count.crash(path)
        for name in sorted(path.name for path in (recorded / "llm").iterdir()):
            for door in ("run", "console", "profile"):
                watched.ask("GET", f"/api/{door}?project=llm&id={quoted(name)}")
        watched.close("/api/projects")
        unchanged(count, recorded / "kept" / "r1")


@needs_root
def test_a_read_only_filesystem(recorded, tmp_path, ends, monkeypatch):
    place = tmp_path / "mounted"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], check=True)
    try:
        shutil.copytree(recorded, place / "runs")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        monkeypatch.setenv("FANFOLD_CACHE_DIR", str(place / "cache"))
        with counting("commands, dashboard and gateway over a read-only filesystem") as count:
            for words in [*COMMANDS, ["rm", RUN, "--yes"], ["prune"], ["sync", RUN, "--to", "tensorboard"]]:
                code, said, _ = command(place / "runs", *words)
                count.inputs += 1
                if code is None:
                    count.hang(words)
                if "Traceback" in said or code not in ((0, 1) if words in COMMANDS else (0, 1, 2, 3, 4, 5)):
                    count.crash(words, code, said)
            server = ends(Dashboard(place / "runs", "--write", log=tmp_path / "ui.log"))
            watched = Watched(server, count, server.token)
            assert watched.ask("GET", "/api/run?project=llm&id=r1") == 200
            json_type = ("content-type", "application/json")
            for path, body in (
                ("edit", {"ids": ["r1"], "name": "n"}),
                ("delete", {"ids": ["r1"]}),
                ("view", {"name": "v", "fragment": "x"}),
            ):
                watched.ask("POST", f"/api/{path}", json.dumps({"project": "llm", **body}).encode(), json_type)
            fuzz_paths(watched, "")
            watched.close("/api/projects")
            gateway = ends(Gateway(place / "runs", log=tmp_path / "gateway.log"))
            watched = Watched(gateway, count)
            assert watched.ask("GET", "/readyz") == 503
            (piece, *_) = [
                Piece("new", f"0-{ID}", 0, 0, fmt.frame(Kind.HEADER, msgspec.msgpack.encode({**HEADER, "run": "new"}), 0))
            ]
            body, length = encode([piece])
            status = watched.ask("POST", "/v1/append?project=llm", body, (LENGTH, str(length)))
            if status == 200:
                count.invent("stored where nothing can be stored")
            watched.close("/v1/runs?project=llm")
            unchanged(count, place / "runs" / "llm" / "r1")
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


# Logins by a proxy


NAMES = [
    "X-Forwarded-User",
    "x-forwarded-user",
    "X-FORWARDED-USER",
    "X_Forwarded_User",
    "X-Forwarded-User ",
    " X-Forwarded-User",
    "X-Forwarded_User",
]


def logged_in(port: int, *headers: str) -> bool:
    lines = ["GET /ui/api/projects HTTP/1.1", "host: localhost", "connection: close", *headers]
    return answer_to(port, "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n") == 200


def test_spoofed_logins_of_a_proxy(recorded, tmp_path, ends):
    proxy = [
        "--trust-header",
        "X-Forwarded-User",
        "--trust-groups",
        "X-Forwarded-Groups",
        "--grant",
        "user:ann=*:read",
        "--grant",
        "group:all=*:read",
    ]
    for name in ("far", "near"):
        shutil.copytree(recorded, tmp_path / name / "store")
    with counting("logins spoofed past a trusted proxy: names, doubled headers, forged addresses") as count:
        far = ends(Gateway(tmp_path / "far" / "store", "--trusted-proxy", "10.9.9.9", *proxy))
        near = ends(Gateway(tmp_path / "near" / "store", "--trusted-proxy", "127.0.0.1", *proxy))
        assert logged_in(near.port, "X-Forwarded-User: ann")
        assert logged_in(near.port, "X-Forwarded-Groups: all", "X-Forwarded-User: bob")
        claims = [
            "X-Forwarded-For: 10.9.9.9",
            "Forwarded: for=10.9.9.9",
            "X-Real-IP: 10.9.9.9",
            "Via: 10.9.9.9",
            "X-Forwarded-For: 127.0.0.1, 10.9.9.9",
        ]
        spoofs = [
            [f"{name}: {user}", *claim]
            for name in NAMES
            for user in ("ann", "ANN", "root", "", "ann,ann")
            for claim in ([], *([one] for one in claims))
        ]
        spoofs += [
            [f"X-Forwarded-Groups: {group}", *claim]
            for group in ("all", "all,all", "*")
            for claim in ([], *([one] for one in claims))
        ]
        for lines in spoofs:
            count.inputs += 1
            if logged_in(far.port, *lines):
                count.invent("far", lines)
        twice = [
            [f"{name}: ann", f"{other}: {user}"]
            for name in NAMES[:3]
            for other in NAMES[:3]
            for user in ("ann", "bob", "", "ann")
        ]
        others = [
            [f"X-Forwarded-User: {user}"]
            for user in (
                "bob",
                "ANN",
                "an",
                "annn",
                "a\x00nn",
                "ann\x00",
                "*",
                "user:ann",
                "ann;",
                "ännˍ",
                "group:all",
                "ann, bob",
            )
        ]
        groups = [[f"X-Forwarded-User: bob\r\nX-Forwarded-Groups: {one}"] for one in ("ALL", "al", "*", "", "all;", "group:all")]
        split = [
            ["X-Forwarded-Groups: all", "X-Forwarded-Groups: all"],
            ["X-Forwarded-User:", "X-Forwarded-Groups: none"],
            [f"{NAMES[3]}: ann"],
            [f"{NAMES[6]}: ann"],
        ]
        for lines in [*twice, *others, *groups, *split]:
            count.inputs += 1
            if logged_in(near.port, *lines):
                count.invent("near", lines)
        for gateway in (far, near):
            assert answer_to(gateway.port, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n") == 200
            if "Traceback" in gateway.log.read_text():
                count.crash(gateway.log.read_text()[-2000:])


# ClickHouse


def test_the_same_with_clickhouse(tmp_path, ends, clickhouse):
    chance = random.Random(8)
    fleet = ends(Fleet(clickhouse))
    journal = journal_of(tmp_path / "node", [])
    with counting("forged frames, names, filters and requests through a gateway into ClickHouse") as count:
        gateway = ends(Gateway(fleet.url, "--rate", "10000", log=tmp_path / "gateway.log"))
        watched = Watched(gateway, count)
        fleet.ship(tmp_path / "node")
        kinds = [*GOOD.values(), (Kind.SHAPE, SHAPE)]
        place = journal.stat().st_size
        for kind, body in kinds:
            wrong = [
                frame(kind, one) for one in [*mutated(body), *(twisted(body, chance) for _ in range(200))] if not fits(kind, one)
            ]
            request, length = encode([Piece("r1", journal.stem, place, 0, b"".join(wrong))])
            count.inputs += len(wrong) - 1
            if watched.ask("POST", "/v1/append?project=llm", request, (LENGTH, str(length))) != 200:
                count.crash(kind, "not taken")
            place += sum(map(len, wrong))
        assert until(lambda: fleet.store().run("llm", "r1").series("loss").steps.tolist() == [0, 1])
        for name in (text for text in TEXTS if 0 < len(text) < 900 and "\ud800" not in text):
            id = f"{chance.getrandbits(64):016x}"
            header = {**HEADER, "journal": id, "run": name, "project": name}
            shape = fmt.frame(Kind.SHAPE, msgspec.msgpack.encode([7, 0, "d", [name], ""]), fmt.seed_of(id))
            data = fmt.frame(Kind.HEADER, msgspec.msgpack.encode(header), 0) + shape
            request, length = encode([Piece(name, f"0-{id}", 0, 0, data)])
            watched.ask("POST", f"/v1/append?project={quoted(name)}", request, (LENGTH, str(length)), note=name)
            watched.ask("GET", f"/ui/api/runs?project={quoted(name)}")
            watched.ask("GET", f"/ui/api/run?project={quoted(name)}&id={quoted(name)}")
        with urllib.request.urlopen(f"{gateway.url}/ui/api/openapi.json") as answer:
            fuzz_api(watched, "/ui", json.load(answer), chance)
        watched.close("/ui/api/runs?project=llm")
        run = fleet.store().run("llm", "r1")
        if run.series("loss").values.tolist() != [0.0, 0.5]:
            count.invent(run.series("loss").values)
