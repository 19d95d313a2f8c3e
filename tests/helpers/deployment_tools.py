"""Helpers for the tests of deploy/: charts rendered by the real helm, parsed compose files, and parsed fanfold command lines."""

from __future__ import annotations

import copy
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fanfold.cli import COMMANDS, GROUPS, entry
from paths import ROOT

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart"
PAGE = ROOT / "docs" / "operations.md"
BIN = Path(sys.executable).parent

YOURS = {"enabled": False, "host": "ch.example.org", "existingSecret": "ch"}
SETS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "a ClickHouse of yours": {
        "clickhouse": {
            **YOURS, "port": 8443, "tls": True, "ca": {"secretName": "ch-ca"}, "cluster": "main", "replicated": True, "days": 90,
            "nodes": ["ch-2.example.org:8443"],
        },
        "forwarder": {"server": "https://runs.example.org/base", "ca": {"secretName": "ca"}, "token": {"existingSecret": "nodes"}},
        "gateway": {
            "session": {"existingSecret": "session"}, "service": {"port": 443}, "publicUrl": "https://runs.example.org",
            "login": {"proxy": {"networks": ["10.0.0.0/8"], "header": "X-Forwarded-User", "groups": "X-Forwarded-Groups"}},
        },
    },
    "everything": {
        "image": {"repository": "registry.example.org/fanfold", "tag": "0.1.0-rc.1_x", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "pull"}],
        "gateway": {
            "extraArgs": ["--session-hours", "8"], "extraEnv": [{"name": "FANFOLD_QUIET", "value": "1"}], "rate": 12.5,
            "allowDelete": True, "tls": {"secretName": "tls"}, "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
            "ingress": {"enabled": True, "className": "nginx", "host": "runs.example.org", "tlsSecretName": "front"},
            "login": {
                "grants": ["group:research=llm:read", "*=demo:read"],
                "oidc": {"issuer": "https://id.example.org", "client": "fanfold", "existingSecret": "oidc"},
            },
            "podAnnotations": {"a": "b"}, "nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
        },
        "forwarder": {"prune": True, "allUsers": True, "interval": 0.5, "nodeSelector": {"gpu": "yes"}},
        "clickhouse": {"backups": {"claim": "nas"}, "storage": {"size": "1Ti", "className": "fast"}, "days": 30},
        "networkPolicy": {
            "from": [{"namespaceSelector": {}}],
            "gatewayEgress": [{"ports": [{"port": 443}]}], "clickhouseEgress": [{"ports": [{"port": 443}]}],
        },
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "token": {"existingSecret": "prometheus"}},
    },
    "as little as possible": {
        "gateway": {"autoscaling": {"enabled": False}, "disruptionBudget": {"enabled": False}},
        "forwarder": {"enabled": False}, "migrate": {"enabled": False}, "networkPolicy": {"enabled": False},
    },
}  # fmt: skip


def run(*words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120, **more)


def helm(verb: str, values: dict[str, Any], *words: str, chart: Path = CHART) -> subprocess.CompletedProcess[str]:
    return run(BIN / "helm", verb, *words, chart, "--values", "-", input=yaml.safe_dump(values))


@cache
def _rendered(name: str, *words: str) -> list[dict[str, Any]]:
    done = helm("template", SETS[name], "r", "--namespace", "ns", *words)
    assert done.returncode == 0, done.stderr
    return [thing for thing in yaml.load_all(done.stdout, yaml.CSafeLoader) if thing]


def rendered(name: str, *words: str) -> list[dict[str, Any]]:
    """Return the objects of the chart as release `r`, with one set of values."""
    return copy.deepcopy(_rendered(name, *words))


def rendered_in_every_way() -> list[dict[str, Any]]:
    return [thing for name in SETS for thing in rendered(name)]


def of_kind(things: list[dict[str, Any]], *kinds: str, part: str | None = None) -> list[dict[str, Any]]:
    return [thing for thing in things if thing["kind"] in kinds and part in (None, part_of(thing["metadata"]))]


def part_of(metadata: dict[str, Any]) -> str:
    return str(metadata["labels"]["app.kubernetes.io/component"])


def pods(things: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each pod's metadata and spec."""
    for thing in things:
        if thing["kind"] == "Pod":
            yield thing["metadata"], thing["spec"]
        elif thing["kind"] in ("Deployment", "DaemonSet", "StatefulSet", "Job"):
            template = thing["spec"]["template"]
            claims = [{"name": claim["metadata"]["name"]} for claim in thing["spec"].get("volumeClaimTemplates", ())]
            yield template["metadata"], {**template["spec"], "volumes": [*template["spec"].get("volumes", ()), *claims]}


def containers(things: list[dict[str, Any]], name: str | None = None) -> list[dict[str, Any]]:
    return [one for _, spec in pods(things) for one in spec["containers"] if name in (None, one["name"])]


@cache
def compose(*files: str) -> dict[str, Any]:
    """Return the services of compose files, later files overriding earlier ones, with every variable at its default."""
    services: dict[str, Any] = {}
    for file in files or ("compose.yaml",):
        text = (DEPLOY / file).read_text()
        text = re.sub(r"\$\{\w+(?::([-?])([^}]*))?\}", lambda found: found[2] if found[1] == "-" else "given", text)
        for name, service in yaml.safe_load(text)["services"].items():
            services[name] = {**services.get(name, {}), **service}
    return services


def parsed(words: list[str]) -> Any:
    """Parse a fanfold command line as the command would; options must not be abbreviated."""
    length = 2 if words[0] in GROUPS else 1
    name, rest = " ".join(words[:length]), words[length:]
    parser = entry.parser_of(name, importlib.import_module(f"fanfold.cli.{COMMANDS[name][0]}"))
    for word in rest:
        assert not word.startswith("--") or word.partition("=")[0] in parser._option_string_actions, word
    return parser.parse_args(rest)
