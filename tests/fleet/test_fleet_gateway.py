"""The gateway's doors: who gets in where, what is refused before it costs anything, and what it says of itself."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client import parser
from starlette.testclient import TestClient

from fanfold.cli import main
from fanfold.fleet import logs
from fanfold.fleet.audit import FILE_NAME as AUDIT
from fanfold.fleet.audit import AuditFile
from fanfold.fleet.intake import DirectoryIntake
from fanfold.fleet.limits import Rates
from fanfold.fleet.tokens import FILE_NAME, Token, Tokens
from fanfold.fleet.wire import LENGTH, Piece, encode
from fanfold.server.gateway import DOORS, Limits, app
from fanfold.store.query import LocalStore
from fleet_tools import kept, pieces_of, write_run

BLOB = b"picture"
NAME = hashlib.sha256(BLOB).hexdigest()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return write_run(tmp_path / "node", 20)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def client(store: Path, tokens: Tokens | None = None, *, base: str = "http://127.0.0.1", **limits) -> TestClient:
    intake = DirectoryIntake(store, power=False)
    audit = AuditFile(store / AUDIT)
    served = app(intake, store=LocalStore(store), audit=audit, tokens=tokens, limits=Limits(**limits), allow_delete=True)
    return TestClient(served, base_url=base)


def append(http: TestClient, piece: Piece, project: str = "llm", **headers: str):
    body, length = encode([piece])
    given = {LENGTH: str(length), **{name.replace("_", "-"): value for name, value in headers.items()}}
    return http.post("/v1/append", params={"project": project}, content=body, headers=given)


def knock(http: TestClient, door: str, project: str, piece: Piece, word: str | None) -> int:
    """Ask for what a door is there for, with that token; return the status."""
    headers = {} if word is None else {"authorization": f"Bearer {word}"}
    query: dict[str, object] = {"project": project, "run": "r1"}
    if door == "/v1/run":
        return http.delete(door, params={**query, "run": "r2"}, headers=headers).status_code
    if door == "/v1/append":
        return append(http, piece, project, **headers).status_code
    if door == "/v1/missing":
        return http.post(door, params=query, content=json.dumps([NAME]), headers=headers).status_code
    if door == "/v1/blob":
        place = {"name": NAME, "offset": 0, "total": len(BLOB)}
        return http.post(door, params={**query, **place}, content=BLOB, headers=headers).status_code
    if door == "/v1/tell":
        return http.post(door, params=query, content=json.dumps({"action": "stop"}), headers=headers).status_code
    if door == "/v1/requests":
        return http.post(door, params=query, content=json.dumps({"runs": ["r1"]}), headers=headers).status_code
    if door == "/v1/answer":
        query["id"] = "0123456789abcdef-01234567"
    return http.get(door, params={**query, "journal": piece.journal}, headers=headers).status_code


# Which of the tokens below opens which door; every door of the gateway has to be in here.
OPENS = {
    "/healthz": {"none", "wrong", "read", "write", "other", "all", "revoked"},
    "/readyz": {"none", "wrong", "read", "write", "other", "all", "revoked"},
    "/metrics": {"all"},
    "/metrics/runs": {"read", "all"},
    "/v1/runs": {"read", "all"},
    "/v1/run": {"write"},
    "/v1/offset": {"read", "write", "all"},
    "/v1/append": {"write"},
    "/v1/missing": {"write"},
    "/v1/blob": {"write"},
    "/v1/tell": {"write"},
    "/v1/answer": {"read", "write", "all"},
    "/v1/requests": {"write"},
}


def test_every_door_opens_to_the_right_tokens_and_to_no_other(journal, store):
    tokens = Tokens(store / FILE_NAME)
    words: dict[str, str | None] = {"none": None, "wrong": "ffk_00000000_" + "x" * 43}
    for name, projects, scopes in (
        ("read", ["llm"], ["read"]),
        ("write", ["llm"], ["write"]),
        ("other", ["vision"], ["read", "write"]),
        ("all", ["*"], ["read"]),
        ("revoked", ["*"], ["read", "write"]),
    ):
        token, words[name] = tokens.create(name, projects=projects, scopes=scopes)
    tokens.revoke(token.id)
    http = client(store, tokens)
    http.app.state.gateway.strangers = Rates(1e6, 1e6)
    write_run(store, 3, id="r2")  # what a delete is for
    (piece,) = pieces_of(journal)
    seen = {door.path: {name: knock(http, door.path, "llm", piece, word) for name, word in words.items()} for door in DOORS}
    assert {door: {name for name, status in row.items() if status == 200} for door, row in seen.items()} == OPENS
    for row in seen.values():
        assert {row[name] for name in ("none", "wrong", "revoked")} <= {200, 401}
        assert {row[name] for name in ("read", "write", "other", "all")} <= {200, 403}
    assert kept(store, journal).read_bytes() == journal.read_bytes()
    other = words["other"]
    assert http.get("/v1/runs", params={"project": "vision"}, headers={"authorization": f"Bearer {other}"}).json() == {"runs": []}
    assert http.get("/v1/runs", headers={"authorization": f"Bearer {other}"}).status_code == 403
    assert http.get("/v1/runs", params={"project": "*"}, headers={"authorization": f"Bearer {other}"}).status_code == 403
    assert http.get("/nothing").status_code == 404


def test_a_token_in_the_address_opens_nothing(journal, store):
    tokens = Tokens(store / FILE_NAME)
    _, word = tokens.create("x", projects=["*"], scopes=["read", "write"])
    http = client(store, tokens)
    assert http.get("/v1/runs", params={"project": "llm", "token": word}).status_code == 401


def test_tokens_that_others_can_read_let_nobody_in(journal, store):
    tokens = Tokens(store / FILE_NAME)
    _, word = tokens.create("x", projects=["llm"], scopes=["write"])
    (store / FILE_NAME).chmod(0o640)
    (piece,) = pieces_of(journal)
    answer = append(client(store, Tokens(store / FILE_NAME)), piece, authorization=f"Bearer {word}")
    assert answer.status_code == 503
    assert "chmod 600" in answer.json()["error"]


def test_one_who_guesses_tokens_is_slowed_down_and_others_are_not(journal, store):
    tokens = Tokens(store / FILE_NAME)
    _, word = tokens.create("x", projects=["llm"], scopes=["write"])
    http = client(store, tokens)
    guesses = [http.get("/metrics", headers={"authorization": f"Bearer ffk_x_{n}"}) for n in range(30)]
    assert guesses[0].status_code == 401
    assert guesses[0].headers["www-authenticate"] == "Bearer"
    assert guesses[-1].status_code == 429
    assert int(guesses[-1].headers["retry-after"]) >= 1
    (piece,) = pieces_of(journal)
    assert append(http, piece, authorization=f"Bearer {word}").status_code == 200


def test_without_tokens_no_web_page_and_no_foreign_name_gets_in(journal, store):
    (piece,) = pieces_of(journal)
    assert append(client(store), piece, origin="https://evil.example").status_code == 403
    assert append(client(store, base="http://evil.example"), piece).status_code == 400
    assert append(client(store), piece).status_code == 200


def test_a_door_that_is_not_named_exactly_is_found_by_the_router(journal, store):
    (piece,) = pieces_of(journal)
    body, length = encode([piece])
    http = client(store)
    query, headers = {"project": "llm"}, {LENGTH: str(length)}
    wrong = http.get("/v1/append", params=query)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    moved = http.post("/v1/append/", params=query, content=body, headers=headers, follow_redirects=False)
    assert (moved.status_code, moved.headers["location"]) == (307, "http://127.0.0.1/v1/append?project=llm")
    assert [http.head(path).status_code for path in ("/healthz", "/v1/append", "/v1/nothing")] == [200, 405, 404]
    below = TestClient(http.app, base_url="http://127.0.0.1", root_path="/v1")  # a proxy serves us under another path
    assert below.post("/v1/append", params=query, content=body, headers=headers).status_code == 404
    below = TestClient(http.app, base_url="http://127.0.0.1", root_path="/gateway")
    assert below.post("/gateway/v1/append", params=query, content=body, headers=headers).status_code == 200
    assert http.post("/v1/%61ppend", params=query, content=body, headers=headers).status_code == 409


def test_of_two_headers_with_one_name_the_first_counts(journal, store):
    tokens = Tokens(store / FILE_NAME)
    _, word = tokens.create("x", projects=["llm"], scopes=["write"])
    (piece,) = pieces_of(journal)
    body, length = encode([piece])
    http = client(store, tokens)

    def post(*headers: tuple[str, str]) -> int:
        return http.post("/v1/append", params={"project": "llm"}, content=body, headers=headers).status_code

    right, wrong, size = ("authorization", f"Bearer {word}"), ("authorization", "Bearer ffk_x_y"), (LENGTH, str(length))
    assert post(wrong, right, size) == 401
    assert post(right, size, ("origin", "https://evil.example"), ("origin", "http://127.0.0.1")) == 403
    assert post(right, (LENGTH, "1"), size) == 400
    assert post(("Authorization", right[1]), wrong, size, (LENGTH, "1")) == 200


def test_each_piece_has_its_own_answer(journal, store):
    first, second, third = pieces_of(journal, 2, 5)
    http = client(store)
    body, length = encode([first, third, Piece("r1", "nonsense", 0, 0, b"x"), second])
    answer = http.post("/v1/append", params={"project": "llm"}, content=body, headers={LENGTH: str(length)})
    assert answer.status_code == 409
    assert [one["status"] for one in answer.json()["pieces"]] == [200, 409, 400, 200]
    assert answer.json()["pieces"][1]["offset"] == len(first.data)
    assert append(http, third).json() == {"pieces": [{"status": 200, "offset": journal.stat().st_size}]}
    where = {"project": "llm", "run": "r1", "journal": journal.stem}
    assert http.get("/v1/offset", params=where).json() == {"offset": journal.stat().st_size}
    (run,) = http.get("/v1/runs", params={"project": "llm"}).json()["runs"]
    assert (run["id"], run["status"], run["ranks"]) == ("r1", "finished", 1)


def test_bodies_too_long_too_many_or_not_as_announced_are_refused(journal, store):
    (piece,) = pieces_of(journal)
    body, length = encode([piece])
    http = client(store)

    def post(content, **headers) -> int:
        return http.post("/v1/append", params={"project": "llm"}, content=content, headers=headers).status_code

    assert post(body) == 400
    assert post(body, **{LENGTH: "many"}) == 400
    assert post(body, **{LENGTH: str(1 << 40)}) == 413
    assert post(body, **{LENGTH: str(length - 1)}) == 400
    assert post(iter([body]), **{LENGTH: str(length)}) == 411
    assert post(b"garbage", **{LENGTH: "7"}) == 400
    assert http.post("/v1/blob", params={"project": "llm"}, content=bytes(3 << 20)).status_code == 413
    assert http.post("/v1/missing", params={"project": "llm", "run": "r"}, content=b"{}").status_code == 400
    assert http.post("/v1/append", content=body, headers={LENGTH: str(length)}).status_code == 400
    assert list(store.rglob("*.ffj")) == []


def test_a_project_over_its_rate_is_told_when_to_come_again(journal, store):
    first, second, third = pieces_of(journal, 2, 5)
    http = client(store, rate=1.0, burst=1.0)
    assert append(http, first).status_code == 200
    answer = append(http, second)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= len(first.data) - 10
    assert append(http, second, project="vision").status_code == 409  # its own bucket, and no such journal there
    assert kept(store, journal).read_bytes() == first.data
    assert third.data


def test_a_full_gateway_says_so_instead_of_growing(journal, store):
    (piece,) = pieces_of(journal)
    http = client(store, memory=1000)
    gateway = http.app.state.gateway
    with gateway.budget.reserve(900):
        answer = append(http, piece)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
    assert append(http, piece).status_code == 200
    assert gateway.budget.used == 0


def test_a_store_that_cannot_be_written_is_not_ready_and_loses_nothing(journal, store, monkeypatch):
    (piece,) = pieces_of(journal)
    http = client(store)
    assert http.get("/readyz").status_code == 200
    (store / "llm").write_text("a file in the place of the project's folder")
    answer = append(http, piece)
    assert answer.json()["pieces"][0]["status"] == 503
    http.app.state.gateway.closing = True
    assert (http.get("/readyz").status_code, http.get("/healthz").status_code) == (503, 200)
    http.app.state.gateway.closing = False
    http.app.state.gateway.intake.root = store / "gone"
    assert http.get("/readyz").status_code == 503


def test_metrics_are_as_prometheus_reads_them(journal, store):
    (piece,) = pieces_of(journal)
    http = client(store)
    append(http, piece)
    append(http, piece)
    families = {one.name: one for one in parser.text_string_to_metric_families(http.get("/metrics").text)}
    stored = {tuple(sample.labels.values()): sample.value for sample in families["fanfold_gateway_pieces"].samples}
    assert stored == {("stored",): 1, ("conflict",): 1}
    (bytes_stored,) = families["fanfold_gateway_bytes"].samples
    assert bytes_stored.value == journal.stat().st_size


def test_logs_are_json_lines_without_tokens_and_no_name_forges_one(journal, store):
    stream = io.StringIO()
    with logs.to_stream("debug", stream):
        tokens = Tokens(store / FILE_NAME)
        token, word = tokens.create("x", projects=["llm"], scopes=["write"])
        http = client(store, tokens)
        (piece,) = pieces_of(journal)
        append(http, piece, authorization=f"Bearer {word}")
        append(http, piece, project='a\n{"level": "forged"}', authorization=f"Bearer {word}")
        http.get("/metrics", headers={"authorization": f"Bearer {word[:-2]}"})
    assert logging.getLogger("fanfold").propagate
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["status"] for line in lines if line.get("event") == "request"] == [200, 403, 401]
    assert lines[0]["event"] == "journal"
    assert lines[1]["token"] == token.id
    assert word[:-2] not in stream.getvalue()
    assert "forged" not in {line["level"] for line in lines}


def test_tokens_are_made_listed_and_revoked_from_the_command_line(store, capsys):
    assert (
        main(["token", "create", "cluster", "--store", str(store), "--for", "llm", "--for", "vision", "--scope", "write", "-q"])
        == 0
    )
    word = capsys.readouterr().out.strip()
    assert main(["token", "list", "--store", str(store), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["projects"], row["scopes"]) == ("cluster", ["llm", "vision"], ["write"])
    found = Tokens(store / FILE_NAME).find(word)
    assert found is not None
    assert main(["token", "revoke", row["id"], "--store", str(store), "-q"]) == 0
    assert Tokens(store / FILE_NAME).find(word) is None
    assert main(["token", "list", "--store", str(store), "-q"]) == 1
    assert main(["token", "create", "x", "--store", str(store), "--scope", "read"]) == 2
    assert "--for PROJECT" in capsys.readouterr().err


def test_the_first_token_tells_to_restart_an_open_gateway(store, capsys):
    for restart in (True, False):
        assert main(["token", "create", "a", "--store", str(store), "--for", "llm", "--scope", "read"]) == 0
        assert ("Restart it" in capsys.readouterr().err) == restart


def test_a_gateway_open_to_others_does_not_start_without_tokens(store, capsys):
    assert main(["serve", "--store", str(store), "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "fanfold server token create" in capsys.readouterr().err
    assert main(["serve", "--store", "magic://x"]) == 2
    assert main(["forward", "--dir", str(store)]) == 2
    assert "FANFOLD_SERVER" in capsys.readouterr().err


class FarTokens(Tokens):
    """Tokens that are looked up far away: slowly, and not by each request."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.looked = 0

    def recent(self) -> dict[str, Token]:
        self.looked += 1
        time.sleep(0.5)
        return super().recent()


def test_requests_that_wait_for_the_list_of_tokens_wait_for_one_lookup(store, journal):
    tokens = FarTokens(store / FILE_NAME)
    _, word = tokens.create("a", projects=["llm"], scopes=["read"])

    async def knock_all() -> list[int]:
        served = client(store, tokens).app
        transport = httpx.ASGITransport(app=served)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            headers = {"authorization": f"Bearer {word}"}
            asked = [http.get("/v1/runs", params={"project": "llm"}, headers=headers) for _ in range(20)]
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    assert asyncio.run(knock_all()) == [200] * 20
    assert tokens.looked <= 2
