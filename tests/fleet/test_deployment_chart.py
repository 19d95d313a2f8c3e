"""The Helm chart: accepted by helm and by Kubernetes' own schemas, whole in itself, with no more rights than it needs."""

from __future__ import annotations

import json
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deployment_tools import CHART, SETS, YOURS, containers, helm, of_kind, parsed, part_of, pods, rendered
from fanfold.fleet import address

OLDEST, NEWEST = "1.25", "1.37"  # of Kubernetes: the chart's kubeVersion, and the newest whose schemas are here
OPERATOR = ("ServiceMonitor", "PrometheusRule")  # kinds that Kubernetes itself does not have
BROUGHT = {"session", "nodes", "oidc", "ch", "r-fanfold-forwarder"}  # Secrets that whoever installs makes
every_set = pytest.mark.parametrize("name", SETS)


@every_set
def test_helm_finds_nothing_to_say(name: str) -> None:
    done = helm("lint", SETS[name], "--strict")
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@every_set
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_what_kubernetes_takes(name: str, version: str) -> None:
    for thing in rendered(name):
        if thing["kind"] not in OPERATOR:
            kubernetes_validate.validate(thing, version, strict=True)


def test_a_misspelled_field_would_be_noticed() -> None:
    (gateway,) = of_kind(rendered("as it comes"), "Deployment")
    containers([gateway])[0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(gateway, NEWEST, strict=True)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gateway": {"replica": 3}}, "replica"),
        ({"gateway": {"logLevel": "loud"}}, "logLevel"),
        ({"gateway": {"ingress": {"enabled": True, "host": "h"}}}, "tlsSecretName"),
        ({"gateway": {"login": {"grants": ["ada=llm:read"]}}}, "grants"),
        ({"gateway": {"login": {"oidc": {"issuer": "https://id"}}}}, "client"),
        (
            {"gateway": {"login": {"oidc": {"issuer": "https://id", "client": "c", "existingSecret": "s"}}}},
            "publicUrl is not set",
        ),
        ({"gateway": {"login": {"proxy": {"header": "X-Forwarded-User"}}}}, "networks"),
        ({"image": {"tag": "latest"}}, "tag"),
        ({"clickhouse": {"enabled": False, "existingSecret": "s"}}, "clickhouse.host is not set"),
        ({"clickhouse": {"enabled": False, "host": "h"}}, "clickhouse.existingSecret is not set"),
        ({"clickhouse": {"replicated": True}}, "replicated"),
        ({"clickhouse": {**YOURS, "cluster": "a b"}}, "cluster"),
        ({"forwarder": {"server": "https://user:pw@host"}}, "server"),
        ({"serviceMonitor": {"enabled": True}}, "serviceMonitor.token.existingSecret is not set"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    done = helm("template", values, "r")
    assert done.returncode != 0
    assert said in done.stderr


def test_every_value_has_a_type() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(value: dict[str, Any], node: dict[str, Any], where: str) -> None:
        known = schema["definitions"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        if "properties" in known:
            assert set(value) - {"global"} == set(known["properties"]) - {"global"} or not value, where
            assert known["additionalProperties"] is False, where
            for name, inner in value.items():
                if isinstance(inner, dict):
                    compare(inner, known["properties"][name], f"{where}.{name}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "values")


@every_set
def test_services_scalers_and_policies_find_their_pods(name: str) -> None:
    things = rendered(name)
    made = [(thing["kind"], thing["metadata"]["name"]) for thing in things]
    assert len(set(made)) == len(made)
    labelled = [(metadata["labels"], spec) for metadata, spec in pods(things)]
    for service in of_kind(things, "Service"):
        (spec,) = [spec for labels, spec in labelled if service["spec"]["selector"].items() <= labels.items()]
        ports = {port["name"] for container in spec["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for budget in of_kind(things, "PodDisruptionBudget", "NetworkPolicy"):
        chosen = budget["spec"].get("selector") or budget["spec"]["podSelector"]
        assert any(chosen["matchLabels"].items() <= labels.items() for labels, _ in labelled)
    targets = [scaler["spec"]["scaleTargetRef"] for scaler in of_kind(things, "HorizontalPodAutoscaler")]
    assert {(target["kind"], target["name"]) for target in targets} <= set(made)
    rules = [rule for ingress in of_kind(things, "Ingress") for rule in ingress["spec"]["rules"]]
    assert {("Service", path["backend"]["service"]["name"]) for rule in rules for path in rule["http"]["paths"]} <= set(made)


@every_set
def test_pods_find_their_secrets_and_volumes(name: str) -> None:
    things = rendered(name)
    secrets = {secret["metadata"]["name"]: set(secret["data"]) for secret in of_kind(things, "Secret")}
    for _, spec in pods(things):
        volumes = {volume["name"] for volume in spec["volumes"]} if "volumes" in spec else set()
        for container in spec["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
            for variable in container.get("env", ()):
                wanted = variable.get("valueFrom", {}).get("secretKeyRef")
                assert wanted is None or wanted["name"] in BROUGHT or wanted["key"] in secrets[wanted["name"]]


@every_set
def test_no_pod_has_more_rights_than_it_needs(name: str) -> None:
    for metadata, spec in pods(rendered(name)):
        opens_all = part_of(metadata) == "forwarder" and SETS[name].get("forwarder", {}).get("allUsers", False)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["securityContext"].get("runAsNonRoot", False) is not opens_all
        for container in spec["containers"]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"], **({"add": ["DAC_OVERRIDE"]} if opens_all else {})}
            assert own.get("readOnlyRootFilesystem", False) is (part_of(metadata) != "clickhouse")
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert container["resources"]["limits"]["memory"]


def test_only_gateways_and_the_migration_reach_clickhouse() -> None:
    (policy,) = of_kind(rendered("as it comes"), "NetworkPolicy", part="clickhouse")
    (rule,) = policy["spec"]["ingress"]
    allowed = {peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule["from"]}
    assert allowed == {"gateway", "migrate"}
    assert rule["ports"] == [{"port": 8123, "protocol": "TCP"}]
    assert "Ingress" in policy["spec"]["policyTypes"]


def test_tables_are_made_before_gateways_need_them() -> None:
    (beside,) = of_kind(rendered("as it comes"), "Job")
    assert "annotations" not in beside["metadata"], "a first installation starts ClickHouse itself, and cannot wait for it"
    (upgrade,) = of_kind(rendered("as it comes", "--is-upgrade"), "Job")
    (yours,) = of_kind(rendered("a ClickHouse of yours"), "Job")
    for job in (upgrade, yours):
        assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert beside["metadata"]["name"] != upgrade["metadata"]["name"]
    assert parsed(containers([yours])[0]["args"]).node == ["ch-2.example.org:8443"]


@pytest.mark.parametrize(
    ("name", "place", "prunes"),
    [
        ("as it comes", "http://r-fanfold-gateway.ns.svc:8643", False),
        ("everything", "https://r-fanfold-gateway.ns.svc:8643", True),
        ("a ClickHouse of yours", "https://runs.example.org/base", False),
    ],
)
def test_a_forwarder_knows_its_node_its_folder_and_the_gateway(name: str, place: str, prunes: bool) -> None:
    (container,) = containers(rendered(name), "forwarder")
    env = {variable["name"]: variable for variable in container["env"]}
    assert address.parse(env["FANFOLD_SERVER"]["value"]).url == place
    assert env["FANFOLD_NODE"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    args = parsed(container["args"])
    assert args.dir in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert args.prune is prunes


def test_clickhouse_gets_a_disk_for_backups_only_where_one_is_named() -> None:
    for name, there in {"as it comes": False, "everything": True}.items():
        (container,) = containers(rendered(name), "clickhouse")
        paths = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert ("/backups" in paths) is ("/etc/clickhouse-server/config.d/backups.xml" in paths) is there
        (config,) = of_kind(rendered(name), "ConfigMap")
        assert {mount["subPath"] for mount in container["volumeMounts"] if "subPath" in mount} <= set(config["data"])
