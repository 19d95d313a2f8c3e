"""Settings: one table, one order (argument, environment, file, default), clear errors, all documented."""

import inspect
import uuid
from pathlib import Path

import numpy as np
import pytest

import fanfold
import paths
from fanfold import settings
from fanfold.errors import SettingError, shown

DOCS = paths.DOCS / "settings.md"


def test_the_argument_wins_then_the_environment_then_the_file_then_the_default(monkeypatch):
    file = {"project": "from file"}
    assert settings.resolve("project") == "default"
    assert settings.resolve("project", file=file) == "from file"
    monkeypatch.setenv("FANFOLD_PROJECT", "from env")
    assert settings.resolve("project", file=file) == "from env"
    assert settings.resolve("project", "argument", file=file) == "argument"


@pytest.mark.parametrize(
    ("name", "text", "advice"),
    [
        ("quiet", "perhaps", "one of 1, true, yes, on, 0, false, no, off"),
        ("durability", "eternal", "one of process, power"),
        ("resume", "si", "one of never, allow, must, auto"),
        ("rank", "first", "a whole number"),
        ("hold", "long", "a number"),
        ("mode", "off", "one of on, disabled, online, offline"),
        ("ops", "{x", "a JSON object, true or false .*"),
    ],
)
def test_a_value_that_cannot_be_understood_names_itself_and_ends_with_what_can_be(monkeypatch, name, text, advice):
    monkeypatch.setenv(f"FANFOLD_{name.upper()}", text)
    with pytest.raises(SettingError, match=rf"FANFOLD_{name.upper()} is '{text}'.*not started.*Give {advice}\.$"):
        settings.resolve(name)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("True", True), ("on", True), ("0", False), ("no", False), ("", False)])
def test_booleans_are_read_as_people_write_them(monkeypatch, text, value):
    monkeypatch.setenv("FANFOLD_QUIET", text)
    assert settings.resolve("quiet") is value


def test_the_file_is_toml_and_unknown_names_list_the_known(tmp_path):
    assert settings.read_file(tmp_path) == {}
    (tmp_path / "settings.toml").write_text('project = "x"\nquiet = true\ntags = ["a", "b"]\n')
    assert settings.read_file(tmp_path) == {"project": "x", "quiet": True, "tags": ["a", "b"]}
    (tmp_path / "settings.toml").write_text('colour = "x"\n')
    with pytest.raises(SettingError, match=r"unknown settings: colour.*Known: .*project"):
        settings.read_file(tmp_path)
    (tmp_path / "settings.toml").write_text("= broken")
    with pytest.raises(SettingError, match="not valid TOML"):
        settings.read_file(tmp_path)


def test_a_variable_nothing_reads_is_found_with_the_nearest_one(monkeypatch):
    for name in ("FANFOLD_PROJEKT", "FANFOLD_QQQ", "FANFOLD_LOCAL_WORLD_SIZE", "FANFOLD_DEBUG"):
        monkeypatch.setenv(name, "1")
    assert settings.unknown_variables() == {"FANFOLD_PROJEKT": "FANFOLD_PROJECT", "FANFOLD_QQQ": None}


def test_every_setting_is_documented():
    text = DOCS.read_text()
    missing = [row.variable for row in settings.TABLE.values() if f"`{row.variable}`" not in text]
    assert missing == []


def test_every_variable_the_source_reads_is_in_the_table():
    import re

    known = {row.variable for row in settings.TABLE.values()} | {
        "FANFOLD_CLICKHOUSE_PASSWORD",
        "FANFOLD_DEBUG",
        "FANFOLD_EXEC",
        "FANFOLD_LOCAL_RANK",
        "FANFOLD_LOCAL_WORLD_SIZE",
        "FANFOLD_NOTIFY",  # never from a directory's settings file, so it is not in the table: see notify/options.py
    }
    found = set()
    for file in paths.SRC.rglob("*.py"):
        found |= set(re.findall(r"FANFOLD_[A-Z_]+[A-Z]", file.read_text()))
    assert found <= known


class Odd:
    """No text, number, dict or list."""


TEXT, SWITCH = [Odd(), ["a"], {"a": 1}, b"a", True], [Odd(), 5, [], {"a": 1}, "perhaps"]
WRONG = {  # values no option of that name means, and what the error says to give
    "project": (TEXT, "a text"),
    "name": (TEXT, "a text"),
    "id": (TEXT, "a text"),
    "group": (TEXT, "a text"),
    "notes": (TEXT, "a text"),
    "tags": ([5, Odd(), {"a": 1}, b"a", [Odd()], [["a"]]], "a text or a list of texts"),
    "config": ([5, "lr", [1, 2]], "a dict, an argparse.Namespace or a dataclass"),
    "trackers": ([5, {"wandb": {}}, Odd()], "Known: "),
    "tracker_kwargs": ([5, "wandb", ["wandb"], {"wandb": 5}], "a dict of dicts"),
    "fold": ([5, ["mean"], Odd()], 'a text such as "mean", or a dict'),
    "relay": ([5, "threads", ["thread"]], "Known: process, thread"),
    "resume": ([5, "always", ["must"]], "one of never, allow, must, auto"),
    "fork": ([3, "x", "run@-", ["a"]], "Give a run and a step"),
    "dir": ([5, b"runs", ["runs"], Odd()], "a path"),
    "durability": ([5, "disk", True], "one of process, power"),
    "console": (SWITCH, "True or False|one of 1, true"),
    "system": (SWITCH, "True or False|one of 1, true"),
    "energy": (SWITCH, "True or False|one of 1, true"),
    "blackbox": ([5, Odd(), ["hang"], {"hangs": 1}], "True or False|True, or a dict"),
    "goodput": (SWITCH, "True or False|one of 1, true"),
    "ops": ([5, Odd(), ["window"], {"windows": 1}], "True or False|True, or a dict"),
    "stamp": (SWITCH, "True or False|one of 1, true"),
    "strict": (SWITCH, "True or False|one of 1, true"),
    "quiet": (SWITCH, "True or False|one of 1, true"),
    "notify": ([5, Odd(), True], "an address, a list of them, or a dict"),
    "alerts": ([5, Odd(), ["loss is nan", 5]], "a text such as 'loss is nan', or a list of them"),
    "mode": ([5, "of"], "one of on, disabled, online, offline"),
    "reinit": ([5, "foo", ["create_new"]], "True, False or one of default, return_previous, finish_previous, create_new"),
}


def test_every_option_of_init_is_in_the_table_of_wrong_values():
    named = inspect.signature(fanfold.init).parameters.values()
    assert {one.name for one in named if one.kind is not one.VAR_KEYWORD} | {"mode", "reinit"} == set(WRONG)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_of_an_option_is_one_clear_error(name, tmp_path):
    values, advice = WRONG[name]
    for value in values:
        with pytest.raises(SettingError, match=advice) as caught:
            fanfold.init(**{"dir": tmp_path / "runs", "quiet": True, "system": False, name: value})
        said = str(caught.value)
        assert f"{name}=" in said and "The run was not started." in said and shown(value)[:20] in said
        assert not (tmp_path / "runs").exists()  # found before anything was written


def test_texts_may_be_given_as_numbers_paths_and_odd_characters(tmp_path):
    given = {"name": "\ud800", "group": 7, "notes": Path("a/b"), "id": uuid.UUID(int=5), "tags": (tag for tag in ("a", 3))}
    run = fanfold.init("\ud800", dir=tmp_path, quiet=np.True_, system=0, **given)
    run.finish()
    stored = fanfold.open(run.path)
    assert (stored.name, stored.group, stored.notes, stored.id) == ("\\ud800", "7", "a/b", str(uuid.UUID(int=5)))
    assert (stored.project, list(stored.tags)) == ("\\ud800", ["a", "3"])


@pytest.mark.parametrize(
    ("line", "advice"), [("tags = 5", "a text or a list"), ("strict = 5", "True or False"), ("name = [1]", "a text")]
)
def test_a_wrong_value_in_the_settings_file_is_one_clear_error(line, advice, tmp_path):
    (tmp_path / "settings.toml").write_text(line)
    with pytest.raises(SettingError, match=rf"settings\.toml: {line.split()[0]} is .*{advice}"):
        fanfold.init("p", dir=tmp_path, quiet=True, system=False)
