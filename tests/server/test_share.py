"""Share links and the page for one chart: one project, read-only, and nothing without a link."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

import fanfold
from answers import LOCAL
from fanfold.server import app
from fanfold.server.share import share_token, shared_project

TOKEN = "the dashboard's own"


@pytest.fixture
def http(tmp_path):
    for project in ("open", "secret"):
        with fanfold.init(project, dir=tmp_path, id=f"{project}-run", system=False, quiet=True) as run:
            run.log({"loss": 1.0}, step=0)
    with fanfold.init("open", dir=tmp_path, id="fork", fork="secret/secret-run@0", system=False, quiet=True) as run:
        run.log({"loss": 2.0}, step=1)
    return TestClient(app(tmp_path, token=TOKEN, write=True), base_url=LOCAL)


def bearer(word: str) -> dict[str, str]:
    return {"authorization": f"Bearer {word}"}


def test_a_share_link_reads_its_project_and_nothing_else(http):
    share = http.get("api/share", params={"project": "open"}, headers=bearer(TOKEN)).json()["share"]
    own = bearer(share)
    assert [one["name"] for one in http.get("api/projects", headers=own).json()["projects"]] == ["open"]
    assert http.get("api/projects", headers=own).json()["write"] is False
    assert http.get("api/runs", params={"project": "open"}, headers=own).status_code == 200
    query = {"runs": ["open-run", "secret-run", "fork"], "keys": ["loss"]}
    assert http.post("api/series", json={"project": "open", **query}, headers=own).status_code == 200
    refused = [
        http.get("api/runs", params={"project": "secret"}, headers=own),
        http.get("api/run", params={"project": "secret", "id": "secret-run"}, headers=own),
        http.post("api/series", json={"project": "secret", **query}, headers=own),
        http.get("media", params={"project": "secret", "run": "secret-run", "blob": "0" * 64}, headers=own),
        http.get("api/share", params={"project": "secret"}, headers=own),
        http.get("api/share", params={"project": "open"}, headers=own),
    ]
    assert {answer.status_code for answer in refused} == {403}
    for path, body in (("edit", {"archived": True}), ("delete", {})):
        assert http.post(f"api/{path}", json={"project": "open", "ids": ["open-run"], **body}, headers=own).status_code in (
            400,
            403,
        )
    fork = http.get("api/run", params={"project": "open", "id": "fork"}, headers=own).json()["fork"]
    assert fork["name"] is None and "not in this store" in fork["missing"]  # its parent is in a project that is not shared


def test_a_link_that_was_not_made_here_opens_nothing(http):
    good = share_token(TOKEN, "open")
    name, proof = good.split(".")
    other = share_token("another dashboard", "open")
    forged = f"{share_token(TOKEN, 'secret').split('.')[0]}.{proof}"
    for word in (other, forged, name, f"{name}.", f".{proof}", "x.y", "é.é", "a" * 10_000 + ".b", good[:-4]):
        assert (
            http.get("api/runs", params={"project": "open"}, headers={"authorization": f"Bearer {word}".encode()}).status_code
            == 401
        )
    assert shared_project(TOKEN, good) == "open"
    assert shared_project(TOKEN, share_token(TOKEN, "p.q/ü")) == "p.q/ü"


def test_the_page_for_one_chart_may_be_framed_and_no_other_page(http):
    page = http.get("embed")
    assert page.status_code == 200
    assert "frame-ancestors *" in page.headers["content-security-policy"]
    script = re.search(r'src="\./(index\.js)"', page.text)[1]
    assert http.get(script).status_code == 200
    for path in ("", "index.html", "api/projects", "api/runs?project=open", "plot", "api/share?project=open"):
        assert http.get(path).status_code == 401, path
    whole = http.get("index.html", headers=bearer(TOKEN))
    assert "frame-ancestors 'self'" in whole.headers["content-security-policy"]
