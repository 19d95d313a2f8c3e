"""The JSON of every command: real output against its published schema, and the schemas against the ones published before."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys

import jsonschema
import pytest

import fanfold
from fanfold.cli import COMMANDS, main, schemas
from paths import TESTS

GOLDEN = TESTS / "golden" / "schemas.json"
# What each command is called with here. The servers and the demo are started in tests of their own.
CALLS: dict[str, list[list[str]]] = {
    "ls": [["ls"], ["ls", "--archived"]],
    "top": [["top", "--once", "--all"]],
    "show": [["show", "good"], ["show", "bad"], ["show", "cmd"]],
    "tail": [["tail", "good"]],
    "points": [
        ["points", "good", "loss"],
        ["points", "good", "loss", "--buckets", "3"],
        ["points", "good", "*", "--fold", "mean"],
    ],
    "compare": [["compare", "good", "bad"]],
    "diagnose": [["diagnose", "bad"], ["diagnose", "good"]],
    "hang": [["hang", "bad"]],
    "memory": [["memory", "bad"]],
    "wait": [["wait", "good", "bad"], ["wait", "good", "--until", "loss<9"]],
    "tell": [["tell", "bad", "stop"], ["tell", "good", "set", "lr=0.1"]],
    "notify show": [["notify", "show", "good"]],
    "notify test": [["notify", "test"]],
    "goodput": [["goodput", "good"], ["goodput", "--project", "llm", "--by", "node,user,week"]],
    "nodes": [["nodes"]],
    "query": [["query", "SELECT * FROM runs"], ["query", "SELECT * FROM points LIMIT 5"]],
    "export": [["export", "good", "-o", "TMP/good.csv"]],
    "report": [["report", "good", "-o", "TMP/report.html"]],
    "publish": [["publish", "good", "-o", "TMP/published"]],
    "usage": [["usage"]],
    "ops": [["ops"]],
    "sync": [["sync", "good", "--to", "tensorboard"]],
    "inspect": [["inspect", "TMP/model.safetensors"]],
    "import": [["import", "TMP/runs.jsonl", "--project", "imported"]],
    "tag": [["tag", "good", "--add", "x"]],
    "note": [["note", "good", "text"]],
    "rename": [["rename", "good", "better"]],
    "archive": [["archive", "better"]],
    "cp": [["cp", "better", "--project", "other"]],
    "mv": [["mv", "llm/better", "--project", "third"]],
    "rm": [["rm", "other/better", "--yes"]],
    "prune": [["prune", "--older-than", "0s"]],
    "doctor": [["doctor"]],
    "server token": [["server", "token", "create", "me", "--for", "llm", "--scope", "read"], ["server", "token", "list"]],
    "server audit": [["server", "audit"]],
    "schema": [["schema"], ["schema", "ls"]],
    "skill": [["skill", "show"], ["skill", "install"]],
}
ELSEWHERE = {"ui", "demo", "exec", "server start", "server forward", "server db", "mcp", "tell"}


def closed(schema):
    """Return a schema that also refuses what it does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(one) for name, one in schema.items()}
    return found | {"additionalProperties": False} if "properties" in found else found


def check(command: str, text: str) -> None:
    schema = schemas.schema(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(closed(schema))
    documents = [json.loads(line) for line in text.splitlines()] if schemas.COMMANDS[command].lines else [json.loads(text)]
    assert documents
    for one in documents:
        validator.validate(one)


@pytest.fixture
def runs(runs_dir, tmp_path, monkeypatch):
    import numpy as np
    from safetensors.numpy import save_file

    monkeypatch.setenv("FANFOLD_NOTIFY", "")
    with fanfold.init(
        "llm", name="good", config={"lr": 0.1, "bad": math.nan}, tags=["t"], group="g", notes="n", system=True, notify=["cmd:cat"]
    ) as run:
        run.define_metric("loss", summary="min")
        for step in range(200):
            run.log({"loss": math.nan if step == 7 else 1 / (1 + step), "flag": step % 2 == 0, "n": step}, step=step)
        run.log({"text": "words", "image": fanfold.Image(np.zeros((4, 4, 3), np.uint8))})
        run.alert("hot", "very")
        fanfold.log_api_usage_once("my.api")
        save_file({"a": np.zeros(2)}, tmp_path / "model.safetensors")
        fanfold.stamp(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no"), fanfold.init("llm", name="bad", system=False) as run:
        run.log({"loss": math.inf})
        raise ValueError("no such layer")
    subprocess.run([sys.executable, "-m", "fanfold", "exec", "-q", "--name", "cmd", "--", "false"])
    (tmp_path / "runs.jsonl").write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "loss": 0.5}\n')


def test_what_every_command_prints_fits_its_schema(runs, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command, calls in CALLS.items():
        for words in calls:
            monkeypatch.setenv("FANFOLD_NOTIFY", f"cmd:cat cmd:{tmp_path}/missing")  # for `notify test`
            capfd.readouterr()
            main([word.replace("TMP", str(tmp_path)) for word in words] + ["--json", "-q"])
            check(command, capfd.readouterr().out)


def test_exec_and_servers_fit_their_schemas(runs_dir):
    done = subprocess.run([sys.executable, "-m", "fanfold", "exec", "--json", "-q", "--", "true"], capture_output=True, text=True)
    check("exec", done.stdout)
    for name, words in (("ui", ["ui"]), ("server start", ["server", "start", "--store", str(runs_dir), "--port", "0"])):
        command = [sys.executable, "-m", "fanfold", *words, "--json", "-q", *(["--port", "0"] if name == "ui" else [])]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert server.stdout is not None
            check(name, server.stdout.readline())
        finally:
            server.terminate()
            server.wait(30)


def test_every_command_that_prints_json_has_a_schema():
    assert set(schemas.COMMANDS) <= set(COMMANDS)
    assert set(COMMANDS) - set(schemas.COMMANDS) <= {"server forward", "mcp", "completion"}
    assert set(schemas.COMMANDS) <= set(CALLS) | ELSEWHERE


def test_published_schemas_change_only_with_their_version():
    """If this fails, a program that reads our JSON may break: raise schemas.VERSION unless a field was only added.

    Then write the golden file again: fanfold schema > tests/golden/schemas.json
    """
    now = {name: schemas.schema(name) for name in schemas.COMMANDS}
    assert json.loads(GOLDEN.read_text()) == now


def test_a_changed_document_is_noticed(runs, capfd):
    capfd.readouterr()
    main(["wait", "good", "--json"])
    answer = json.loads(capfd.readouterr().out)
    for change in (lambda one: one.pop("outcome"), lambda one: one["runs"][0].update(new=1), lambda one: one.update(runs={})):
        changed = copy.deepcopy(answer)
        change(changed)
        with pytest.raises(jsonschema.ValidationError):
            check("wait", json.dumps(changed))


def test_an_unknown_command_has_no_schema(capsys):
    assert main(["schema", "lss"]) == 2
    assert "Did you mean ls?" in capsys.readouterr().err
