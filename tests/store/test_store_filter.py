"""The filter language: every rule by example, shared with other implementations through a fixture file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fanfold
from fanfold.store import deadline
from fanfold.store.filter import Filter, FilterError, length, matcher, moment, number, sort_rows
from paths import DATA

FIXTURE = json.loads((DATA / "filter_cases.json").read_text())


def numbers(value):
    """JSON has no NaN: the fixture writes it as text."""
    if isinstance(value, dict):
        return {key: numbers(one) for key, one in value.items()}
    return float("nan") if value == "NaN" else value


ROWS = [{**row, **{name: numbers(row[name]) for name in ("summary", "latest")}} for row in FIXTURE["rows"]]


@pytest.mark.parametrize("case", FIXTURE["cases"], ids=lambda case: case["filter"] or "empty")
def test_a_filter_keeps_what_the_fixture_says(case):
    wanted = Filter(case["filter"])
    assert [row["id"] for row in ROWS if wanted.matches(row, now=FIXTURE["now"])] == case["ids"]


@pytest.mark.parametrize("case", FIXTURE["errors"], ids=lambda case: case["filter"])
def test_an_error_points_at_the_column(case):
    with pytest.raises(FilterError, match=case["says"]) as raised:
        Filter(case["filter"])
    assert raised.value.column == case["column"]
    *_, shown, pointer = str(raised.value).splitlines()
    assert pointer.index("^") - 2 == case["column"] - 1 <= len(shown)


@given(st.text(alphabet="ab.=<>!~()'\"\\ :tagndor0129é", max_size=30))
def test_any_text_is_a_filter_or_an_error_with_a_column(text):
    try:
        wanted = Filter(text)
    except FilterError as error:
        assert 1 <= error.column <= len(text) + 1
    else:
        for row in ROWS:
            wanted.matches(row, now=FIXTURE["now"])


def test_brackets_without_end_are_refused_and_do_not_exhaust_the_stack():
    with pytest.raises(FilterError, match="nested more than 100"):
        Filter("(" * 1500 + "a" + ")" * 1500)
    with pytest.raises(FilterError, match="nested more than 100"):
        Filter("not " * 900 + "a")


def test_a_filter_of_endless_length_or_conditions_is_refused():
    with pytest.raises(FilterError, match="4001 characters, and at most 4000"):
        Filter("a" * 4001)
    with pytest.raises(FilterError, match="more than 200 conditions"):
        Filter("a " * 201)
    assert Filter("a " * 200).matches({"name": "banana", "id": "x"})


class Steps:
    """Counts the lines of Python that run in the filter's module."""

    def __enter__(self):
        self.count = 0
        sys.settrace(self._called)
        return self

    def _called(self, frame, _event, _argument):
        return self._line if frame.f_globals.get("__name__") == "fanfold.store.filter" else None

    def _line(self, _frame, event, _argument):
        self.count += event == "line"
        return self._line

    def __exit__(self, *_):
        sys.settrace(None)


THIRTY_STARS = """
from fanfold.store.filter import Filter
wanted = Filter("*".join("a" * 31) + "b")
print(sum(wanted.matches({"id": f"r{i}", "name": "a" * 100}) for i in range(1000)))
"""


def test_thirty_stars_cost_one_step_for_each_letter_of_a_name():
    # In a process of its own: what takes for ever there must end by the limit, not hang the tests.
    done = subprocess.run([sys.executable, "-c", THIRTY_STARS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "0\n"
    steps = {}
    for stars in (1, 30, 300):
        wanted = Filter("*".join("a" * (stars + 1)) + "b")
        with Steps() as counted:
            for number in range(1000):
                assert not wanted.matches({"id": f"r{number}", "name": "a" * 100})
        steps[stars] = counted.count
    assert steps[300] == steps[30] == steps[1] < 1000 * 100 * 5


def test_stars_in_long_texts_cost_no_step_for_each_letter():
    wanted = Filter(" ".join(["notes~*a*b*a*"] * 190))
    with Steps() as counted:
        assert wanted.matches({"id": "r", "notes": "ab" * 20_000})
    assert counted.count < 190 * 100


@pytest.mark.parametrize("text", ["notes~*a?b*c", "notes~abc", "abc", "lr<1", "tags~x*y"])
def test_a_filter_whose_time_is_over_stops_at_the_next_condition(text):
    with deadline.within(-1), pytest.raises(deadline.TookTooLong):
        Filter(text)._test({"id": "r", "notes": "ab" * 10, "lr": 2, "tags": ["x"]}, 0.0, lambda *_: None)


def test_the_clock_is_looked_at_while_one_long_text_is_matched(monkeypatch):
    looks = []
    monkeypatch.setattr(deadline, "check", lambda: looks.append(1))
    assert not Filter("notes~*a?b*c").matches({"id": "r", "notes": "ab" * 32_000})
    assert len(looks) > 4


@pytest.mark.parametrize("text", ["name~*a?b*", "*a?b*", "config.text~?*", "name!~*a?b*"])
def test_question_marks_are_not_tried_on_endless_texts(text):
    """Whoever hands a run on chooses its names: each character takes a step, so a listing would take as long as they like."""
    long = "a" * 4_000_000
    with Steps() as counted:
        assert Filter(text).matches({"id": "r", "name": long, "config": {"text": long}}) == ("!~" in text)
    assert counted.count < 1000
    assert Filter("name~*a?b*").matches({"id": "r", "name": "a" * 60_000 + "xb"})


@given(st.text(alphabet="ab?*", max_size=8), st.text(alphabet="abA?*[", max_size=8))
def test_a_pattern_matches_what_a_regular_expression_would(pattern, text):
    expected = re.compile("".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in pattern), re.DOTALL | re.IGNORECASE)
    if "*" in pattern or "?" in pattern:
        assert matcher(pattern)(text) == (expected.fullmatch(text) is not None)


def test_a_text_too_long_to_be_a_number_is_not_read_as_one():
    assert number("1" * 400) == float("1" * 400)
    assert number("1" * 401) is None


def test_statistics_are_asked_for_only_where_the_answer_hangs_on_them():
    asked = []

    def stats(row, key):
        asked.append((row["id"], key))
        return {"min": 0.05}

    rows = [{**row, "stats": {}} for row in ROWS]
    wanted = Filter("status=running and loss.min<0.2")
    assert [row["id"] for row in rows if wanted.matches(row, now=0, stats=stats)] == ["aa11"]
    assert asked == [("aa11", "loss")]


def test_names_no_run_has_are_told():
    assert Filter("lr<1 and lrr<2 and loss.minn<3").unknown(ROWS) == ["lrr", "loss.minn"]


def test_lengths_and_moments_are_read_as_people_write_them():
    assert [length(text) for text in ("90", "1.5m", "2h", "1d", "1w", "2x", "h", "-1s")] == [
        90,
        90,
        7200,
        86400,
        604800,
        None,
        None,
        None,
    ]
    assert moment("1970-01-02") == (86400.0, 86400.0)
    assert moment("1970-01-01T01:00+01:00") == (0.0, 1.0)
    assert moment("yesterday") is None


def test_sorting_puts_runs_without_the_value_last_either_way():
    assert [row["id"] for row in sort_rows(ROWS, "loss")] == ["aa11", "bb22", "cc33", "dd44"]
    assert [row["id"] for row in sort_rows(ROWS, "-loss")] == ["bb22", "aa11", "cc33", "dd44"]
    assert [row["id"] for row in sort_rows(ROWS, "-created")] == ["aa11", "bb22", "cc33", "dd44"]
    assert [row["id"] for row in sort_rows(ROWS, "name")] == ["cc33", "aa11", "bb22", "dd44"]


def test_python_and_the_command_line_filter_alike(runs_dir):
    for lr in (0.1, 0.001):
        run = fanfold.init("p", config={"lr": lr, "model": {"dim": 8}}, tags=("base",), system=False, name=f"lr-{lr}")
        for step, loss in enumerate((3.0, lr, 2.0)):
            run.log({"loss": loss}, step=step)
        run.finish()
    text = "lr<0.01 and status=finished and tag:base and loss.min<0.05 and loss=2 and model.dim=8"
    assert [run.name for run in fanfold.runs(filter=text)] == ["lr-0.001"]
    command = [sys.executable, "-m", "fanfold", "ls", "--json", "--filter"]
    done = subprocess.run([*command, text], capture_output=True, text=True, env=dict(os.environ), timeout=60)
    assert [run["name"] for run in json.loads(done.stdout)] == ["lr-0.001"]
    done = subprocess.run([*command, "lr<<"], capture_output=True, text=True, env=dict(os.environ), timeout=60)
    assert done.returncode == 2
    assert "column 4" in done.stderr
    done = subprocess.run([*command, "lrr<1"], capture_output=True, text=True, env=dict(os.environ), timeout=60)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "no run has lrr, so none matches the filter. Fields: " in done.stderr
