"""deploy/ and docs/operations.md against the code: every command, variable, port, route, metric and version in them exists."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

import clickhouse_server
import fanfold
from deployment_tools import (
    BIN,
    CHART,
    DEPLOY,
    PAGE,
    ROOT,
    SETS,
    compose,
    containers,
    helm,
    of_kind,
    parsed,
    rendered,
    rendered_in_every_way,
    run,
)  # fmt: skip
from fanfold.cli import logins, serve
from fanfold.clickhouse import address as store_address
from fanfold.clickhouse import rebuild, schema
from fanfold.fleet import address, metrics
from fanfold.server.gateway import DOORS
from fanfold.settings import unknown_variables

OVER_TLS = ("compose.yaml", "compose.tls.yaml")


def notes(tmp_path: Path, name: str) -> str:
    """Render NOTES.txt, which `helm template` leaves out, through an object that quotes it."""
    chart = shutil.copytree(CHART, tmp_path / name)
    shown = '{{ include (print $.Template.BasePath "/NOTES.txt") . | quote }}'
    (chart / "templates" / "shown.yaml").write_text(f"kind: ConfigMap\nmetadata: {{name: shown}}\ndata:\n  notes: {shown}\n")
    done = helm("template", SETS[name], "r", "--namespace", "ns", "--show-only", "templates/shown.yaml", chart=chart)
    assert done.returncode == 0, done.stderr
    return str(yaml.safe_load(done.stdout)["data"]["notes"])


def spoken(text: str) -> list[list[str]]:
    """Find commands of ours in a text: what follows `fanfold`, or the compose service that runs it."""
    text = text.replace("\\\n", " ")
    found = re.findall(r"(?:^|[`\s])(?:fanfold|run --rm gateway) ((?:server|ls)\b[^`\n#)]*)", text)
    return [shlex.split(words) for words in found]


def test_every_command_line_in_the_chart_is_one_of_ours() -> None:
    lines = [container["args"] for container in containers(rendered_in_every_way()) if "args" in container]
    assert {tuple(words[:2]) for words in lines} == {("server", "start"), ("server", "forward"), ("server", "db")}
    for words in lines:
        args = parsed(words)
        if words[1] != "forward":
            assert store_address.parse(args.store).user == "fanfold"
        if words[1] == "start":
            logins.logins(args, None)


def test_every_command_line_in_compose_is_one_of_ours() -> None:
    services = {**compose(), "gateway over TLS": compose(*OVER_TLS)["gateway"]}
    lines = {name: parsed(list(service["command"])) for name, service in services.items() if "command" in service}
    assert set(lines) == {"migrate", "gateway", "forwarder", "gateway over TLS"}
    stores = {lines[name].store for name in lines if name != "forwarder"} | {services["gateway"]["environment"]["FANFOLD_DIR"]}
    assert stores == {"clickhouse://fanfold@clickhouse:8123/fanfold"}
    clickhouse = services["clickhouse"]["environment"]
    where = store_address.parse(lines["gateway"].store)
    assert (where.user, where.database) == (clickhouse["CLICKHOUSE_USER"], clickhouse["CLICKHOUSE_DB"])


def test_every_command_that_people_are_told_is_one_of_ours(tmp_path: Path) -> None:
    texts = [PAGE.read_text(), (DEPLOY / "compose.yaml").read_text(), *(notes(tmp_path, name) for name in SETS)]
    found = [spoken(text) for text in texts]
    assert all(found[:3])
    for words in (words for lines in found for words in lines):
        parsed(words)


def test_every_variable_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {variable["name"] for container in containers(rendered_in_every_way()) for variable in container.get("env", ())}
    named |= {name for service in compose(*OVER_TLS).values() for name in service.get("environment", ())}
    for file in (DEPLOY / "Dockerfile", DEPLOY / ".env.example", CHART / "templates" / "NOTES.txt", PAGE):
        named |= set(re.findall(r"\bFANFOLD_[A-Z_]+[A-Z]\b", file.read_text()))
    ours = {name for name in named if name.startswith("FANFOLD_")}
    assert {"FANFOLD_SERVER", "FANFOLD_SERVER_TOKEN", "FANFOLD_NODE", "FANFOLD_CLICKHOUSE_PASSWORD"} <= ours
    for name in ours:
        monkeypatch.setenv(name, "1")
    assert unknown_variables() == {}


def test_one_port_everywhere() -> None:
    port = serve.PORT
    for container in containers(rendered_in_every_way(), "gateway"):
        args = parsed(container["args"])
        assert ([one["containerPort"] for one in container["ports"]], args.port, args.host) == ([port], port, "0.0.0.0")
    for policy in of_kind(rendered_in_every_way(), "NetworkPolicy", part="gateway"):
        assert policy["spec"]["ingress"][0]["ports"] == [{"port": port, "protocol": "TCP"}]
    assert compose()["gateway"]["ports"] == [f"127.0.0.1:{port}:{port}"], "for this machine alone, unless told"
    assert parsed(compose()["gateway"]["command"]).port == parsed(compose(*OVER_TLS)["gateway"]["command"]).port == port
    assert f"EXPOSE {port}\n" in (DEPLOY / "Dockerfile").read_text()
    assert address.parse(compose()["forwarder"]["environment"]["FANFOLD_SERVER"]).port == port


def test_probes_ask_at_open_doors() -> None:
    asked = {
        container[probe]["httpGet"]["path"]
        for container in containers(rendered_in_every_way(), "gateway")
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert asked == {"/healthz", "/readyz"}
    assert asked <= {door.path for door in DOORS if not door.scopes}
    (monitor,) = of_kind(rendered("everything"), "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["path"] in {door.path for door in DOORS}
    (service,) = of_kind(rendered("everything"), "Service", part="gateway")
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_a_gateway_has_memory_for_what_it_may_hold() -> None:
    limits = [(one["args"], one["resources"]["limits"]["memory"]) for one in containers(rendered("as it comes"), "gateway")]
    limits.append((compose()["gateway"]["command"], compose()["gateway"]["deploy"]["resources"]["limits"]["memory"]))
    for words, limit in limits:
        assert int(re.sub(r"(Gi|g)$", "", limit)) << 30 >= 4 * (parsed(words).memory << 20)


def test_images_have_versions_and_ours_is_this_one() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == fanfold.__version__
    images = {one["image"] for one in [*containers(rendered("as it comes")), *compose().values()]}
    versions = dict(image.rsplit(":", 1) for image in images)
    assert len(versions) == len(images) == 2, "compose and the chart run the same"
    assert versions["fanfold"] == fanfold.__version__
    assert clickhouse_server.VERSION.startswith(versions["clickhouse/clickhouse-server"] + "."), "the one that the tests run on"
    for text in ((DEPLOY / "Dockerfile").read_text(), PAGE.read_text()):
        assert set(re.findall(r"\bfanfold:(\S+)", text)) == {fanfold.__version__}


def test_metrics_and_alerts_speak_of_what_is_measured() -> None:
    known = {f"fanfold_gateway_{name}" for name in metrics._HELP}
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"][0]["rules"]
    for rule in rules:
        assert set(re.findall(r"fanfold_\w+", rule["expr"])) <= known
        assert rule["annotations"].keys() == {"summary"}
    assert set(re.findall(r"`(fanfold_gateway_\w+)`", PAGE.read_text())) == known
    (shipped,) = of_kind(rendered("everything"), "PrometheusRule")
    assert shipped["spec"]["groups"][0]["rules"] == rules


def test_the_page_says_of_every_table_whether_it_needs_a_backup() -> None:
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    record, books, derived = [set(row) for row in rows if {"pieces", "tokens", "points"} & set(row)]
    assert derived == set(rebuild.DERIVED)
    assert record | books | derived == {table.name for table in schema.TABLES} | {"meta"}


# Compose and the image


@pytest.mark.parametrize("file", OVER_TLS)
def test_a_compose_file_is_what_the_specification_says(file: str) -> None:
    whole = yaml.safe_load((DEPLOY / file).read_text())
    jsonschema.validate(whole, get_builtin_schema("vendor.compose-spec"))
    whole["services"]["gateway"]["comand"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(whole, get_builtin_schema("vendor.compose-spec"))


def test_compose_services_find_what_they_name() -> None:
    whole = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in whole["services"].values():
        assert set(service.get("depends_on", ())) <= set(whole["services"])
        assert set(service["networks"]) <= set(whole["networks"])
        sources = {mount.partition(":")[0] for mount in service.get("volumes", ()) if not mount.startswith("${")}
        assert all(source in whole["volumes"] or (DEPLOY / source).is_file() for source in sources)
    assert whole["networks"]["store"] == {"internal": True}
    assert "ports" not in whole["services"]["clickhouse"]
    needed = {name for file in OVER_TLS for name in re.findall(r"\$\{(\w+)", (DEPLOY / file).read_text())}
    assert needed == set(re.findall(r"^#?(\w+)=", (DEPLOY / ".env.example").read_text(), re.MULTILINE))


def test_hadolint_finds_nothing_to_say() -> None:
    done = run(BIN / "hadolint", "--failure-threshold", "style", DEPLOY / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_installs_extras_that_exist() -> None:
    (extras,) = re.findall(r"fanfold\[([\w,]+)\] @", (DEPLOY / "Dockerfile").read_text())
    declared = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= set(declared)
