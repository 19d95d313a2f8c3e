"""A coding agent's work, played through: start, wait, diagnose, compare, tag. Once by the JSON of commands alone, once by MCP alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import anyio
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

import fanfold

TRAIN = """
import argparse, math, fanfold
options = argparse.ArgumentParser()
options.add_argument("--lr", type=float)
lr = options.parse_args().lr
run = fanfold.init(config={"lr": lr})
weight = 1.0
for step in range(60):
    weight -= lr * 2 * weight
    loss = weight * weight if abs(weight) < 1e6 else math.nan
    run.log({"loss": loss}, step=step)
    if math.isnan(loss):
        raise FloatingPointError("the loss is not finite")
"""


def fanfold_json(*words: str):
    """Run a command as an agent does: only its exit code and its JSON count."""
    options, dash, command = " ".join(words).partition(" -- ")
    line = [*options.split(), "--json", "-q", *(["--", *command.split()] if dash else [])]
    done = subprocess.run([sys.executable, "-m", "fanfold", *line], capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout)


def start(tmp_path, name: str, lr: str):
    """The one thing MCP has no tool for: commands are started by a shell."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    return fanfold_json("exec", "--project", "play", "--name", name, "--", sys.executable, str(script), "--lr", lr)


def test_by_the_json_of_commands_alone(runs_dir, tmp_path):
    code, first = start(tmp_path, "too-fast", "1.5")
    assert (code, first["status"], first["exit_code"]) == (1, "failed", 1)

    code, waited = fanfold_json("wait", first["id"])
    assert (code, waited["outcome"]) == (3, "failed")
    code, diagnosis = fanfold_json("diagnose", first["id"])
    kinds = {one["kind"]: one for one in diagnosis["findings"]}
    assert code == 3 and "the loss is not finite" in kinds["end"]["text"]
    bad = kinds["not finite"]["evidence"]["first"][0]
    assert (bad["key"], bad["value"]) == ("loss", "NaN")
    _, (curve,) = fanfold_json("points", first["id"], "loss", "--around", f"{bad['step']:g}")
    assert curve["points"][-1]["value"] == "NaN"

    code, second = start(tmp_path, "slower", "0.3")
    assert (code, second["status"]) == (0, "finished")
    assert fanfold_json("wait", second["id"], "--until", "loss<0.01")[0] == 0
    assert fanfold_json("diagnose", second["id"])[0] == 0
    _, compared = fanfold_json("compare", first["id"], second["id"])
    assert compared["config"]["differ"]["lr"] == [1.5, 0.3]
    assert compared["metrics"]["differ"]["loss"][0] == "NaN"

    fanfold_json("tag", second["id"], "--add", "keep")
    fanfold_json("archive", first["id"])
    _, kept = fanfold_json("ls", "--project", "play", "--sort", "loss.min")
    assert [(run["name"], run["tags"]) for run in kept] == [("slower", ["keep"])]


def test_by_mcp_alone(runs_dir, tmp_path):
    start(tmp_path, "too-fast", "1.5")
    start(tmp_path, "slower", "0.3")
    parameters = StdioServerParameters(command=sys.executable, args=["-m", "fanfold", "mcp", "--write"], env=dict(os.environ))

    async def play() -> None:
        async with Client(stdio_client(parameters)) as client:

            async def ask(tool: str, **arguments):
                answer = await client.call_tool(tool, arguments)
                assert not answer.is_error, answer.content[0].text
                return answer.structured_content["result"]

            runs = {run["name"]: run["id"] for run in (await ask("list", project="play"))["runs"]}
            assert (await ask("wait", runs=list(runs.values()), timeout=20))["outcome"] == "failed"
            findings = {one["kind"]: one for one in (await ask("diagnose", run=runs["too-fast"]))["findings"]}
            bad = findings["not finite"]["evidence"]["first"][0]
            (curve,) = await ask("points", run=runs["too-fast"], keys=[bad["key"]], around=bad["step"])
            assert curve["points"][-1]["value"] == "NaN"
            compared = await ask("compare", a=runs["too-fast"], b=runs["slower"])
            assert compared["config"]["differ"]["lr"] == [1.5, 0.3]
            best = (await ask("find", filter="status=finished", sort="loss.min", limit=1))["runs"][0]["id"]
            await ask("tag", runs=[best], add=["keep"])
            await ask("note", run=runs["too-fast"], text="lr 1.5 diverges")

    anyio.run(play)
    assert [run.name for run in fanfold.runs(filter="tag:keep")] == ["slower"]
    assert fanfold.open("too-fast").notes == "lr 1.5 diverges"
