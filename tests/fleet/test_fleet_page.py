"""The dashboard behind a gateway: every address, with every kind of caller; who sees what, changes what, and deletes what."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

import fanfold
from fanfold.cli import main
from fanfold.errors import FanfoldError, Forbidden, RunNotFound, SettingError
from fanfold.fleet.audit import FILE_NAME as AUDIT
from fanfold.fleet.audit import AuditEntry, AuditFile
from fanfold.fleet.client import Client
from fanfold.fleet.forwarder import Forwarder as ShippingForwarder
from fanfold.fleet.grants import Anybody, Grants
from fanfold.fleet.intake import DirectoryIntake
from fanfold.fleet.limits import Rates
from fanfold.fleet.proxy import Proxies
from fanfold.fleet.sessions import Errand, LoginSession, Sessions
from fanfold.fleet.tokens import FILE_NAME, Tokens
from fanfold.fleet.views import ProjectsView
from fanfold.server.endpoints import ALL
from fanfold.server.gateway import app
from fanfold.server.live import STILL_HERE, notice
from fanfold.server.login import Logins
from fanfold.store.changes import DirectoryViews
from fanfold.store.query import LocalStore
from fleet_tools import Forwarder, Gateway, arrived, journals, pieces_of, until, write_run

SECRET = "one secret for all gateways of these tests"
GRANTS = ["user:ann=llm:read", "group:research=llm:write", "user:bob=vision:write", "user:cid=llm:read", "user:cid=vision:write"]
PROXY, ELSEWHERE = "10.1.2.3", "192.0.2.9"


@dataclass
class Place:
    """A store with runs of three projects, tokens, and gateways over it."""

    root: Path
    tokens: Tokens

    def token(self, name: str, project: str, *scopes: str) -> str:
        return self.tokens.create(name, projects=[project], scopes=scopes)[1]

    def served(self, *, secret: str = SECRET, delete: bool = True, clock=time.time, **logins):
        given = Logins(
            self.tokens,
            Sessions(secret, clock=clock),
            Grants(GRANTS),
            Proxies([PROXY], user="X-Forwarded-User", groups="X-Forwarded-Groups"),
            **logins,
        )
        intake, audit = DirectoryIntake(self.root, power=False), AuditFile(self.root / AUDIT)
        views = DirectoryViews(self.root)
        made = app(intake, store=LocalStore(self.root), views=views, audit=audit, logins=given, allow_delete=delete)
        made.state.gateway.strangers = Rates(1e6, 1e6)
        return made

    def client(self, served=None, *, peer: str = ELSEWHERE, **how) -> TestClient:
        made = served or self.served(**how)
        return TestClient(made, base_url="https://runs.example.org", client=(peer, 5), follow_redirects=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("recorded")
    for project, id in (("llm", "r1"), ("llm", "r2"), ("vision", "v1"), ("speech", "s1")):
        run = fanfold.init(project, dir=root, id=id, system=False, quiet=True)
        for step in range(5):
            run.log({"loss": 1 / (step + 1)}, step=step)
        run.log({"page": fanfold.Html(f"<b>{id}</b>"), "rows": fanfold.Table(["a", "b"], [[1, PIXEL]])}, step=5)
        run.finish()
    return root


@pytest.fixture
def place(recorded: Path, tmp_path: Path) -> Place:
    root = Path(shutil.copytree(recorded, tmp_path / "store"))
    return Place(root, Tokens(root / FILE_NAME))


PIXEL = fanfold.Image(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1")
# What each address is asked, about a run of the project `llm`. Every address the page's app has must be here.
ONE = {"project": "llm", "id": "r1"}
SERIES = {"project": "llm", "runs": ["r1"], "keys": ["loss"]}
REQUESTS: dict[str, tuple[str, dict]] = {
    "/": ("GET", {}),
    "/index.js": ("GET", {}),
    "/api/projects": ("GET", {}),
    "/api/openapi.json": ("GET", {}),
    "/api/runs": ("GET", {"project": "llm"}),
    "/api/passing": ("GET", {"project": "llm", "filter": "loss>0"}),
    "/api/run": ("GET", ONE),
    "/api/columns": ("POST", {"project": "llm", "names": ["metric:loss"]}),
    "/api/series": ("POST", SERIES),
    "/api/csv": ("POST", SERIES),
    "/api/parquet": ("POST", SERIES),
    "/api/alerts": ("GET", {"project": "llm"}),
    "/api/console": ("GET", ONE),
    "/api/media": ("GET", {"project": "llm", "ids": "r1", "key": "page"}),
    "/api/table": ("GET", {**ONE, "key": "rows"}),
    "/api/sample": ("POST", {"project": "llm", "runs": ["r1"], "key": "rows"}),
    "/api/importance": ("POST", {"project": "llm", "metric": "metric:loss", "runs": ["r1"]}),
    "/api/profile": ("GET", ONE),
    "/api/goodput": ("GET", ONE),
    "/api/views": ("GET", {"project": "llm"}),
    "/api/rules": ("GET", {"project": "llm"}),
    "/api/workspace": ("GET", {"project": "llm"}),
    "/api/keep": ("POST", {"project": "llm", "fragment": "s=0.5"}),
    "/media": ("GET", {"project": "llm", "run": "r1"}),
    "/html": ("GET", {"project": "llm", "run": "r1", "key": "page"}),
    "/cell": ("GET", {"project": "llm", "run": "r1", "key": "rows", "n": 0, "row": 0, "column": 1}),
    "/plot": ("GET", {}),
    "/plotly.js": ("GET", {}),
    "/api/view": ("POST", {"project": "llm", "name": "mine", "fragment": "p=llm"}),
    "/api/rule": ("POST", {"project": "llm", "rule": "loss is nan"}),
    "/api/edit": ("POST", {"project": "llm", "ids": ["r1"], "notes": "seen"}),
    "/api/move": ("POST", {"project": "llm", "ids": ["r1"], "to": "vision"}),
    "/api/delete": ("POST", {"project": "llm", "ids": ["r2"]}),
}
GENERAL = {"/", "/index.js", "/api/projects", "/api/openapi.json", "/plot", "/plotly.js"}
REFUSED = {"/api/move"}  # to everybody
WRITES = {"/api/view", "/api/rule", "/api/edit", "/api/delete", *REFUSED}
LIVE = "/api/live"  # a stream: here only those who do not get in ask for it
OTHER_TESTS = {LIVE, "/mcp", "/api/tell", "/api/examples", "/api/share", "/embed"}  # agents, running jobs, a local dashboard


def ask(http: TestClient, path: str, **headers: str) -> int:
    method, given = REQUESTS.get(path, ("GET", {}))
    if path == "/media":
        given = {**given, "blob": blob_of(http)}
    how = {"params": given} if method == "GET" else {"json": given}
    return http.request(method, f"/ui{path}", headers=headers, **how).status_code


def blob_of(http: TestClient) -> str:
    root = http.app.state.gateway.intake.root
    return next(file.name for file in (root / "llm" / "r1" / "blobs").rglob("*") if file.is_file())


def cookie(session: LoginSession | Errand, secret: str = SECRET, name: str = "__Host-fanfold-session") -> dict[str, str]:
    return {"cookie": f"{name}={Sessions(secret).sign(session)}"}


def test_the_table_of_requests_has_every_address_of_the_page(place):
    served = place.served()
    (ui,) = [route for route in served.routes if isinstance(route, Mount)]
    (gate,) = [route for route in ui.routes if isinstance(route, Mount)]
    inside = {route.path for route in gate.app.page.routes if isinstance(route, Route)}
    assert inside == (set(REQUESTS) - {"/", "/index.js"}) | OTHER_TESTS
    assert {f"/{one.path}" for one in ALL if one.writes and not one.own} - OTHER_TESTS == WRITES
    assert {route.path for route in ui.routes if isinstance(route, Route)} == {
        "/login", "/logout", "/oidc/start", "/oidc/callback"}  # fmt: skip


def test_nobody_unknown_gets_anything(place):
    revoked, word = place.tokens.create("gone", projects=["*"], scopes=["read", "write"])
    place.tokens.revoke(revoked.id)
    over, _ = place.tokens.create("over", projects=["*"], scopes=["read"], seconds=0.0)
    known, _ = place.tokens.create("known", projects=["*"], scopes=["read", "write"])
    soon = time.time() + 1000
    good = Sessions(SECRET).sign(LoginSession(soon, user="ann"))
    body, _, signature = good.partition(".")
    other = Sessions(SECRET).sign(LoginSession(soon, user="bob")).partition(".")[0]
    name = "__Host-fanfold-session"
    strangers: dict[str, dict[str, str]] = {
        "nobody": {},
        "a wrong token": {"authorization": "Bearer ffk_00000000_xxx"},
        "a token of no kind": {"authorization": f"Basic {word}"},
        "a revoked token": {"authorization": f"Bearer {word}"},
        "a session that is over": cookie(LoginSession(time.time() - 1, user="ann")),
        "a session of a revoked token": cookie(LoginSession(soon, token=revoked.id)),
        "a session of an expired token": cookie(LoginSession(soon, token=over.id)),
        "a session signed by somebody else": cookie(
            LoginSession(soon, token=known.id), "another secret, as long as the first one"
        ),
        "a session with another's body": {"cookie": f"{name}={other}.{signature}"},
        "a session without a signature": {"cookie": f"{name}={body}."},
        "a note for another purpose": cookie(Errand(soon, "x")),
        "a session under the plain name": cookie(LoginSession(soon, user="ann"), name="fanfold-session"),
        "nonsense for a session": {"cookie": f"{name}=%%%.%%%; {name}"},
        "a header of a proxy we do not trust": {"x-forwarded-user": "ann", "x-forwarded-groups": "research"},
    }
    http = place.client()
    for who, headers in strangers.items():
        assert {ask(http, path, **headers) for path in REQUESTS} == {401}, who
        assert ask(http, LIVE, **headers) == 401, who
        assert http.get("/ui/", headers={**headers, "accept": "text/html"}).status_code in (303, 401)
    assert http.get("/ui/", headers={"accept": "text/html"}).headers["location"] == "login"
    assert (
        ask(http, "/api/projects", **cookie(LoginSession(soon, user="ann"))) == 200
    )  # the same way in does work for those who may
    assert ask(http, "/api/projects", **cookie(LoginSession(soon, token=known.id))) == 200
    twice = [("x-forwarded-user", "ann"), ("x-forwarded-user", "bob")]
    assert place.client(peer=PROXY).get("/ui/api/projects", headers=twice).status_code == 401
    assert (place.root / "llm" / "r2").is_dir()


# Which callers get which answers; the rest of the addresses answer as named in the second column.
CALLERS = {
    "reader": (200, 403, ["llm"]),
    "writer": (200, 200, ["llm"]),
    "other": (403, 403, ["vision"]),
    "shipper": (403, 403, []),
    "auditor": (200, 403, ["llm", "speech", "vision"]),
    "ann": (200, 403, ["llm"]),
    "ann in research": (200, 200, ["llm"]),
    "bob": (403, 403, ["vision"]),
    "cid": (200, 403, ["llm", "vision"]),
}


@pytest.mark.parametrize("who", CALLERS)
def test_every_caller_sees_and_changes_what_they_may_and_nothing_else(place, who):
    words = {
        "reader": place.token("reader", "llm", "read"),
        "writer": place.token("writer", "llm", "read", "write"),
        "other": place.token("other", "vision", "read", "write"),
        "shipper": place.token("shipper", "llm", "write"),
        "auditor": place.token("auditor", "*", "read"),
    }
    reads, writes, projects = CALLERS[who]
    person = {"x-forwarded-user": who.split(" ")[0], **({"x-forwarded-groups": "chess, research"} if " in " in who else {})}
    headers = {"authorization": f"Bearer {words[who]}"} if who in words else person
    http = place.client(peer=PROXY)
    seen = {path: ask(http, path, **headers) for path in REQUESTS}
    expected = {path: 200 if path in GENERAL else writes if path in WRITES else reads for path in REQUESTS}
    expected |= dict.fromkeys(REFUSED, 403)
    assert seen == expected
    answer = http.get("/ui/api/projects", headers=headers).json()
    assert sorted(row["name"] for row in answer["projects"]) == projects
    assert who.split(" ")[0] in answer["user"]
    assert (place.root / "llm" / "r2").exists() == (writes != 200)
    unknown = http.get("/ui/api/runs", params={"project": "nothing"}, headers=headers)
    hidden = http.get("/ui/api/runs", params={"project": "speech"}, headers=headers)
    assert (unknown.status_code == 403) == (hidden.status_code == 403) or who == "auditor"


def test_somebody_without_a_grant_is_told_so(place):
    http = place.client(peer=PROXY)
    assert ask(http, "/api/projects", **{"x-forwarded-user": "zoe"}) == 403
    page = http.get("/ui/login", headers={"x-forwarded-user": "<zoe>"})
    assert "logged in as user &lt;zoe&gt;" in page.text
    assert "No project is open to you" in page.text


def test_a_view_of_some_projects_forgets_no_question(place):
    store, outside = LocalStore(place.root), LocalStore(place.root)
    view = ProjectsView(store, lambda project: project == "llm", changes=None)
    assert [row["name"] for row in view.projects()] == ["llm"]
    assert {row["id"] for row in view.runs()} == {"r1", "r2"}
    assert len(view.runs(limit=1)) == 1
    assert {run.id for run in view.listed()} == {"r1", "r2"} == {id for _, id in view.names()}
    assert {name for name, _ in view.changed(0)[1]} == {"llm"}
    assert view.series(view.run("llm", "r1"), "loss").total == 5
    foreign = outside.run("vision", "v1")
    for question in (
        lambda: view.runs("vision"),
        lambda: view.run("vision", "v1"),
        lambda: view.run("nothing", "v1"),
        lambda: view.names("vision"),
        lambda: view.listed("vision"),
        lambda: view.statistics(foreign.row(), "loss"),
        lambda: view.series(foreign, "loss"),
        lambda: view.series_many([(foreign, "loss")]),
    ):
        with pytest.raises(Forbidden):
            question()
    with pytest.raises(RunNotFound):
        view.run("llm", "v1")
    public = {name for name in dir(store) if not name.startswith("_")}
    assert public - vars(type(view)).keys() - vars(view).keys() == {"runs"}  # which asks listed() and statistics()


def test_notices_name_only_what_a_caller_sees():
    changed = [("llm", "a"), ("vision", "b")]
    assert json.loads(notice(changed, lambda project: project == "llm").partition(b"data: ")[2]) == {"runs": [["llm", "a"]]}
    assert notice(changed, lambda _: False) == STILL_HERE
    assert notice(None, lambda _: False) == notice(None) == b'event: changed\ndata: {"runs":null}\n\n'
    assert notice(changed) == b'event: changed\ndata: {"runs":[["llm","a"],["vision","b"]]}\n\n'


def test_a_page_gets_updates_of_its_own_runs_until_its_token_is_revoked(place, tmp_path):
    mine = place.tokens.create("mine", projects=["llm"], scopes=["read"])
    words = {"llm": mine[1], "vision": place.token("other", "vision", "read")}
    gateway = Gateway(place.root)
    try:
        streams = {}
        for name, word in words.items():
            line = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
            line.request("GET", "/ui/api/live", headers={"authorization": f"Bearer {word}"})
            streams[name] = line.getresponse()
            assert b"hello" in b"".join(streams[name].readline() for _ in range(3))
        write_run(place.root, 3, id="new", project="llm")
        told = b""
        while b"changed" not in told:
            told += streams["llm"].readline()
        assert b'"llm"' in streams["llm"].readline()
        place.tokens.revoke(mine[0].id)
        write_run(place.root, 3, id="newer", project="llm")
        while rest := streams["llm"].readline():  # it ends
            assert b"newer" not in rest
        write_run(place.root, 3, id="v2", project="vision")
        heard = b""
        while b"data: " not in heard:
            heard += streams["vision"].readline()
        assert b"llm" not in heard
        assert b"v2" in heard
        began = time.monotonic()
        assert gateway.terminate() == 0  # an open stream does not hold it
        assert time.monotonic() - began < 8
    finally:
        gateway.close()


# Logging in and out


def test_a_login_begins_a_session_at_every_gateway_and_logging_out_ends_it(place):
    word = place.token("me", "llm", "read")
    here, there, stranger = place.client(), place.client(), place.client(secret="of another fleet, which is not ours at all")
    answer = here.post("/ui/login", data={"token": word})
    assert (answer.status_code, answer.headers["location"]) == (303, "./")
    given = answer.headers["set-cookie"]
    assert given.startswith("__Host-fanfold-session=")
    assert {"httponly", "secure", "samesite=lax", "path=/"} <= set(given.lower().split("; "))
    assert word not in given
    assert here.get("/ui/api/projects").json()["user"].endswith("(me)")
    brought = {"cookie": given.partition(";")[0]}
    assert there.get("/ui/api/projects", headers=brought).status_code == 200
    assert stranger.get("/ui/api/projects", headers=brought).status_code == 401
    assert here.get("/ui/logout").status_code == 404  # only the form's own request ends a session
    assert here.get("/ui/api/projects").status_code == 200
    assert here.post("/ui/logout").status_code == 303
    assert here.get("/ui/api/projects").status_code == 401
    later = place.client(clock=lambda: time.time() + 13 * 3600)
    assert later.get("/ui/api/projects", headers=brought).status_code == 401
    place.tokens.revoke(word.split("_")[1])
    assert there.get("/ui/api/projects", headers=brought).status_code == 401


def test_the_cookie_is_secure_only_if_the_connection_or_proxy_says_tls(place):
    word = place.token("me", "llm", "read")

    def given(http: TestClient, **headers: str) -> str:
        return http.post("/ui/login", data={"token": word}, headers=headers).headers["set-cookie"]

    def plain(peer: str, **how) -> TestClient:
        return TestClient(place.served(**how), base_url="http://runs.example.org", client=(peer, 5), follow_redirects=False)

    assert "secure" not in given(plain(ELSEWHERE)).lower()
    assert "secure" not in given(plain(ELSEWHERE), **{"x-forwarded-proto": "https"}).lower()
    assert "; secure" in given(plain(PROXY), **{"x-forwarded-proto": "https"}).lower()
    assert "; secure" in given(plain(ELSEWHERE, public_url="https://runs.example.org")).lower()


def test_logins_refused_are_recorded_and_a_flood_of_them_does_not_fill_the_disk(place):
    http = place.client()
    answer = http.post("/ui/login", data={"token": "<script>"})
    assert answer.status_code == 401
    assert "This token is not valid" in answer.text
    assert "script-src" not in answer.headers["content-security-policy"]
    for _ in range(150):
        http.post("/ui/login", data={"token": "ffk_x_y"})
    found = AuditFile(place.root / AUDIT).read()
    assert {(entry.action, entry.peer) for entry in found} == {("login refused", ELSEWHERE)}
    assert 100 <= len(found) <= 110
    assert "ffk" not in (place.root / AUDIT).read_text()
    http.app.state.gateway.strangers = Rates(1.0, 5.0)
    assert [http.post("/ui/login", data={"token": "x"}).status_code for _ in range(8)][-1] == 429
    assert http.post("/ui/login", content=b"token=" + b"x" * 5000).status_code in (413, 429)


def test_another_site_logs_nobody_in_or_out_and_changes_nothing(place):
    word = place.token("me", "llm", "read", "write")
    http = place.client()
    evil = {"origin": "https://evil.example"}
    assert http.post("/ui/login", data={"token": word}, headers=evil).status_code == 403
    http.post("/ui/login", data={"token": word})
    for headers in (evil, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        assert ask(http, "/api/edit", **headers) == 403
        assert http.post("/ui/logout", headers=headers).status_code == 403
    assert ask(http, "/api/edit", origin="https://runs.example.org") == 200
    behind = place.client(peer=PROXY, public_url="https://shown.example.org/runs")
    person = {"x-forwarded-user": "ann", "x-forwarded-groups": "research"}
    assert ask(behind, "/api/edit", origin="https://shown.example.org", **person) == 200
    assert ask(behind, "/api/edit", origin="https://evil.example", **person) == 403


def test_bodies_are_bounded(place):
    word = place.token("me", "llm", "read")
    http = place.client()
    headers = {"authorization": f"Bearer {word}"}
    assert http.post("/ui/api/series", content=bytes(5 << 20), headers=headers).status_code == 413
    assert http.post("/ui/api/series", content=iter([b"{}"]), headers=headers).status_code == 411
    short = {**headers, "content-length": "10"}
    assert http.post("/ui/api/series", content=iter([bytes(1 << 20)] * 6), headers=short).status_code == 400
    assert http.app.state.gateway.budget.used == 0


def test_without_tokens_the_page_is_open_on_this_machine_and_to_no_other_page(place):
    served = app(DirectoryIntake(place.root, power=False), store=LocalStore(place.root))
    http = TestClient(served, base_url="http://127.0.0.1:8643", follow_redirects=False)
    assert http.get("/").headers["location"] == "ui/"
    assert http.get("/ui").headers["location"] == "ui/"
    assert "<title>" in http.get("/ui/").text
    assert http.get("/ui/api/projects").json()["user"] == Anybody().label
    assert http.get("/ui/api/projects", headers={"origin": "https://evil.example"}).status_code == 403
    assert TestClient(served, base_url="http://evil.example").get("/ui/api/projects").status_code == 400
    with pytest.raises(SettingError, match="forwarders not"):
        app(DirectoryIntake(place.root), logins=Logins(None, proxies=Proxies([PROXY], user="X-Forwarded-User")))


def test_tokens_that_cannot_be_read_let_nobody_in_and_say_try_again(place):
    word = place.token("me", "llm", "read")
    (place.root / FILE_NAME).unlink()
    (place.root / FILE_NAME).mkdir(mode=0o700)
    http = place.client()
    for path in ("/ui/api/projects", "/v1/runs?project=llm"):
        answer = http.get(path, headers={"authorization": f"Bearer {word}"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


# Grants and proxies


def test_grants_come_from_options_and_from_a_file_that_is_read_again(tmp_path):
    file = tmp_path / "grants.toml"
    file.write_text('everyone = ["demo:read"]\n[users]\n"ann@example.org" = ["llm:write"]\n[groups]\n"cn=x,ou=y" = ["*:read"]\n')
    grants = Grants(["group:cn=a,ou=b=speech:read"], file)
    ann = grants.person("ann@example.org")
    wanted = {("read", "demo"), ("write", "llm"), ("read", "llm")}
    assert ann.rights == wanted
    assert (ann.allows("read", "vision"), ann.may_write) == (False, True)
    assert grants.person("bob", ["cn=x,ou=y"]).allows("read", "vision")
    assert grants.person("bob", ["cn=a,ou=b"]).rights == {("read", "demo"), ("read", "speech")}
    assert grants.known(["cn=a,ou=b", "cn=x,ou=y", "chess"]) == ["cn=a,ou=b", "cn=x,ou=y"]
    file.write_text("everyone = []\n")
    assert grants.person("ann@example.org").rights == set()
    file.chmod(0o666)
    os.utime(file, (1, 1))
    with pytest.raises(SettingError, match="chmod go-w"):
        grants.person("ann@example.org")
    for bad in ("ann=llm:read", "user:=llm:read", "user:ann=llm", "user:ann=llm:admin", "user:ann=:read", "robot:x=llm:read"):
        with pytest.raises(SettingError):
            Grants([bad])
    for text in ("users = 3", "[users]\nann = 'llm:read'", "[roles]", "x = [", '[users]\nann = ["llm"]'):
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(SettingError):
            Grants([], tmp_path / "bad.toml")


def test_only_a_trusted_proxy_speaks_for_others():
    proxies = Proxies(["10.0.0.0/8", "fd00::/8", "::1"], user="X-Remote-User")
    trusted = {"10.9.8.7", "fd00::1", "::1", "::ffff:10.1.1.1", "fd00::1%eth0"}
    assert {
        peer for peer in (*trusted, "11.0.0.1", "127.0.0.1", "", "testclient", "10.0.0.1.evil") if proxies.trusts(peer)
    } == trusted
    headers = [(b"x-forwarded-for", b"1.2.3.4, 198.51.100.2, 10.0.0.1"), (b"x-remote-user", b"ann")]
    assert proxies.caller("10.0.0.2", headers) == "198.51.100.2"  # what the visitor put before it is their own word
    assert proxies.caller("10.0.0.2", []) == "10.0.0.2"
    for named, found in {
        "198.51.100.2:5555": "198.51.100.2",  # some proxies write the port: each connection would be an address of its own
        "[2001:db8::7]:5555, fd00::9": "2001:db8::7",
        "2001:db8::7, [fd00::9]:80, 10.0.0.1:80": "2001:db8::7",
        "2001:DB8::7%eth0": "2001:db8::7",
        "198.51.100.2, unknown, 10.0.0.1": "10.0.0.1",  # nobody's address: it counts for the proxy that passed it on
        "_hidden": "10.0.0.2",
        "a" * 5000: "10.0.0.2",
        "10.0.0.3:1": "10.0.0.2",
    }.items():
        assert proxies.caller("10.0.0.2", [(b"x-forwarded-for", named.encode())]) == found
    assert proxies.read(headers, proxies.user) == "ann"
    with pytest.raises(SettingError, match="--trusted-proxy"):
        Proxies([], user="X-Remote-User")
    with pytest.raises(SettingError, match="not an address"):
        Proxies(["everywhere"])


def test_a_secret_that_is_short_is_refused():
    with pytest.raises(SettingError, match="openssl rand"):
        Sessions("short")
    assert Sessions().sign(LoginSession(9e9)) != Sessions().sign(LoginSession(9e9))


# Deleting


def test_a_deleted_run_is_recorded_and_does_not_come_back(place, tmp_path, monkeypatch):
    journal = write_run(tmp_path / "node", 20, id="r9")
    (first, second) = pieces_of(journal, 5, run="r9")
    intake = DirectoryIntake(place.root, power=False)
    intake.append("llm", first)
    later = time.time() + 61  # nothing came for long
    monkeypatch.setattr(time, "time", lambda: later)
    word = place.token("me", "llm", "read", "write")
    http = place.client()
    bearer = {"authorization": f"Bearer {word}"}
    before = LocalStore(place.root).run("llm", "r9")
    known = {"name": before.name, "status": before.status}
    assert http.post("/ui/api/delete", json={"project": "llm", "ids": ["r9", "r1"]}, headers=bearer).json() == {"deleted": 2}
    lost, finished = AuditFile(place.root / AUDIT).read()
    assert (lost.action, lost.project, lost.run, lost.peer) == ("run deleted", "llm", "r9", ELSEWHERE)
    assert lost.by.endswith("(me)")
    assert lost.detail == {**known, "journals": 1, "points": 4}
    assert (finished.run, finished.detail["points"]) == ("r1", 5)
    assert {row["id"] for row in http.get("/ui/api/runs", params={"project": "llm"}, headers=bearer).json()["runs"]} == {"r2"}
    calls = {
        "append": lambda: intake.append("llm", first),
        "append later": lambda: intake.append("llm", second),
        "offset": lambda: intake.offset("llm", "r9", journal.stem),
        "missing": lambda: intake.missing("llm", "r9", ["ab" * 32]),
        "blob": lambda: intake.blob("llm", "r9", "ab" * 32, offset=0, total=1, data=b"x"),
    }
    for name, call in calls.items():
        with pytest.raises(FanfoldError, match="was deleted") as caught:
            call()
        assert caught.value.status == 410, name
    assert not (place.root / "llm" / "r9").exists()
    assert intake.deleted("llm", "r9")
    assert not intake.deleted("llm", "r2")
    intake.delete("llm", "r9", "again")
    where = {"project": "llm", "run": "r9"}
    assert http.delete("/v1/run", params=where, headers=bearer).status_code == 410
    assert http.delete("/v1/run", params={**where, "run": "nothing"}, headers=bearer).status_code == 404
    assert http.delete("/v1/run", params={**where, "run": "r2"}, headers=bearer).json() == {"deleted": 1}
    assert http.get("/ui/api/runs", params={"project": "llm"}, headers=bearer).json()["runs"] == []


def test_a_piece_in_hand_while_its_run_is_deleted_does_not_begin_it_anew(place, tmp_path, monkeypatch):
    journal = write_run(tmp_path / "node", 20, id="r9")
    (piece,) = pieces_of(journal, run="r9")
    intake, other = DirectoryIntake(place.root, power=False), DirectoryIntake(place.root, power=False)
    intake.append("llm", piece)
    check = intake._check_there

    def deleted_just_after(project: str, run: str) -> None:
        check(project, run)
        other.delete(project, run, "somebody")

    monkeypatch.setattr(intake, "_check_there", deleted_just_after)
    with pytest.raises(FanfoldError, match="was deleted"):
        intake.append("llm", piece)
    assert not (place.root / "llm" / "r9").exists()
    blob = {"offset": 0, "total": 10, "data": b"x"}
    other.delete("llm", "r9", "somebody")
    monkeypatch.setattr(intake, "_check_there", lambda *_: None)
    with pytest.raises(FanfoldError, match="was deleted"):
        intake.blob("llm", "r9", "ab" * 32, **blob)
    assert not (place.root / "llm" / "r9").exists()


def test_nothing_is_deleted_unless_allowed_recorded_and_idle(place):
    word = place.token("me", "llm", "read", "write")
    bearer = {"authorization": f"Bearer {word}"}
    question = {"project": "llm", "ids": ["r1"]}
    answer = place.client(delete=False).post("/ui/api/delete", json=question, headers=bearer)
    assert (answer.status_code, "--allow-delete" in answer.text) == (403, True)
    live = fanfold.init("llm", dir=place.root, id="live", system=False, quiet=True)
    answer = place.client().post("/ui/api/delete", json={"project": "llm", "ids": ["r1", "live"]}, headers=bearer)
    assert (answer.status_code, "may still be written" in answer.text) == (400, True)
    assert place.client().delete("/v1/run", params={"project": "llm", "run": "live"}, headers=bearer).status_code == 409
    live.finish()
    (place.root / AUDIT).mkdir()  # nothing can be recorded
    answer = place.client().post("/ui/api/delete", json=question, headers=bearer)
    assert (answer.status_code, "no change goes unrecorded" in answer.text) == (400, True)
    assert (place.root / "llm" / "r1").is_dir()
    assert not place.served().state.gateway.intake.deleted("llm", "r1")


def test_edits_and_views_go_through_the_gateway(place):
    word = place.token("me", "llm", "read", "write")
    http = place.client()
    bearer = {"authorization": f"Bearer {word}"}
    changed = http.post("/ui/api/edit", json={"project": "llm", "ids": ["r1"], "name": "best", "tags": ["x"]}, headers=bearer)
    assert changed.json() == {"changed": 1}
    run = fanfold.open("r1", dir=place.root)
    assert (run.name, run.tags, run.status) == ("best", ["x"], "finished")
    assert run.series("loss").steps.tolist() == [0, 1, 2, 3, 4]
    view = {"project": "llm", "name": "mine", "fragment": "p=llm"}
    assert http.post("/ui/api/view", json=view, headers=bearer).json() == {"mine": "p=llm"}
    assert http.post("/ui/api/view", json={**view, "fragment": None}, headers=bearer).json() == {}


def test_each_caller_keeps_a_workspace_of_their_own_with_read_access_only(place):
    alice, bob, stranger = (
        place.token("alice", "llm", "read"),
        place.token("bob", "llm", "read"),
        place.token("eve", "vision", "read"),
    )
    http = place.client()
    for word, text in ((alice, "s=0.1"), (alice, "s=0.2"), (bob, "s=0.9")):
        kept = http.post("/ui/api/keep", json={"project": "llm", "fragment": text}, headers={"authorization": f"Bearer {word}"})
        assert kept.json() == {"fragment": text}
    seen = [
        http.get("/ui/api/workspace?project=llm", headers={"authorization": f"Bearer {word}"}) for word in (alice, bob, stranger)
    ]
    assert [answer.json().get("fragment") for answer in seen] == ["s=0.2", "s=0.9", None]
    assert seen[2].status_code == 403
    assert (
        http.post(
            "/ui/api/keep", json={"project": "llm", "fragment": ""}, headers={"authorization": f"Bearer {stranger}"}
        ).status_code
        == 403
    )
    long = {"project": "llm", "fragment": "x" * 20_001}
    assert http.post("/ui/api/keep", json=long, headers={"authorization": f"Bearer {alice}"}).status_code == 400
    folder = place.root / "llm" / ".views" / "workspaces"
    assert sorted(file.stat().st_size for file in folder.iterdir()) == [5, 5]  # a file per user, however often it changes


def test_a_forwarder_lets_go_of_a_run_that_was_deleted_and_goes_on_with_the_others(place, tmp_path):
    node, store = tmp_path / "node", tmp_path / "fleet"
    runs = [fanfold.init("llm", dir=node, id=id, system=False, quiet=True) for id in ("goes", "stays")]
    for run in runs:
        run.log({"loss": 1.0}, step=0)
        run.flush()
    gateway = Gateway(store, "--allow-delete")
    forwarder = Forwarder(node, gateway.url)
    try:
        assert until(lambda: arrived(store, node))
        runs[0].finish()
        assert until(lambda: fanfold.open("goes", dir=store).status == "finished")
        line = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
        line.request("DELETE", "/v1/run?project=llm&run=goes")
        answer = line.getresponse()
        assert answer.status == 200, answer.read()
        line.close()
        late = fanfold.init("llm", dir=node, id="goes", system=False, quiet=True)  # the run continues, on its node
        late.log({"loss": 2.0}, step=1)
        runs[1].log({"loss": 2.0}, step=1)
        runs[1].finish()
        assert until(lambda: fanfold.open("stays", dir=store).status == "finished")
        assert until(lambda: "goes is not forwarded any more" in forwarder.log.read_text())
        late.log({"loss": 3.0}, step=2)
        late.finish()
        assert until(lambda: json.loads(next((node / "llm" / "goes" / "forward").iterdir()).read_text())["deleted"])
        assert forwarder.terminate() == 0
        # What it recorded after its deletion exists only here.
        assert main(["forward", "--once", "--prune", "--dir", str(node), "--to", gateway.url, "-q"]) == 1
        assert {name.split("/")[1] for name in journals(store)} == {"stays"}
        assert len([name for name in journals(node) if "/goes/" in name]) == 2  # kept where they were written
        assert forwarder.log.read_text().count("goes is not forwarded any more") == 1
        in_the_middle_of_a_journal(tmp_path / "other", store, gateway.url)
    finally:
        forwarder.close()
        gateway.close()


def in_the_middle_of_a_journal(node: Path, store: Path, url: str) -> None:
    """Delete a run whose journal is being shipped: the next piece of it is refused, and that is the end of it."""
    run = fanfold.init("llm", dir=node, id="live", system=False, quiet=True)
    shipping = ShippingForwarder(node, Client(url))
    run.log({"loss": 1.0}, step=0)
    assert until(lambda: shipping.round() or arrived(store / "llm" / "live", run.path))
    DirectoryIntake(store).delete("llm", "live", "somebody at another gateway")
    run.log({"loss": 2.0}, step=1)
    assert until(lambda: not shipping.round() and not shipping.runs, 10)
    assert not (store / "llm" / "live").exists()
    run.finish()


# The record


def test_the_record_survives_a_torn_line_and_is_printed(place, capsys):
    audit = AuditFile(place.root / AUDIT)
    audit.write(AuditEntry(1.0, "run deleted", "me", "here", "llm", "r1", {"points": 3}))
    with (place.root / AUDIT).open("ab") as file:
        file.write(b'{"time": 2.0, "act')
    audit.write(AuditEntry(3.0, "login", "evil\x1b[2J\n", "there"))
    assert [entry.time for entry in audit.read()] == [1.0, 3.0]
    assert [entry.time for entry in audit.read(1)] == [3.0]
    assert oct((place.root / AUDIT).stat().st_mode)[-3:] == "600"
    store = ["--store", str(place.root)]
    assert main(["token", "create", "cluster", *store, "--for", "llm", "--scope", "write", "-q"]) == 0
    word = capsys.readouterr().out.strip()
    assert main(["token", "revoke", word.split("_")[1], *store, "-q"]) == 0
    assert main(["audit", *store, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["action"] for line in lines] == ["run deleted", "login", "token created", "token revoked"]
    assert lines[2]["detail"]["name"] == "cluster"
    assert word.split("_", 2)[2] not in json.dumps(lines)
    assert main(["audit", *store, "--project", "llm"]) == 0
    printed = capsys.readouterr().out
    assert "points 3" in printed
    assert main(["audit", *store]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert main(["audit", "--store", str(place.root / "empty"), "-q"]) == 1
