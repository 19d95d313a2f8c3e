"""Settings: one table, one order (argument, environment, file, default), clear errors, all documented."""

from pathlib import Path

import pytest

from fanfold import settings
from fanfold.errors import SettingError

DOCS = Path(__file__).parents[1] / "docs" / "settings.md"


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
        "FANFOLD_LOCAL_RANK",
        "FANFOLD_LOCAL_WORLD_SIZE",
    }
    found = set()
    for file in (Path(__file__).parents[1] / "src").rglob("*.py"):
        found |= set(re.findall(r"FANFOLD_[A-Z_]+[A-Z]", file.read_text()))
    assert found <= known
