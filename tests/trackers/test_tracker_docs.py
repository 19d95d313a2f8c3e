"""The table of what each tracker holds is made from the contracts, and every tracker has its page."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

from fanfold.testing import CAPABILITIES, TrackerContract
from fanfold.trackers.registry import LOGGER_TYPE_TO_CLASS, TABLE
from paths import ROOT

PAGE = ROOT / "docs" / "trackers" / "index.md"


def contracts() -> list[type[TrackerContract]]:
    """Return one contract per built-in tracker: the first of its file, which is the one for the default backend."""
    names = {row.name for row in TABLE}
    found: dict[str, type[TrackerContract]] = {}
    for file in sorted(Path(__file__).parent.glob("test_tracker_*.py")):
        if file != Path(__file__):
            spec = importlib.util.spec_from_file_location(file.stem, file)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            for value in vars(module).values():
                if isinstance(value, type) and issubclass(value, TrackerContract) and value.__name__.startswith("Test"):
                    found.setdefault(value.name, value)
    return [contract for name, contract in found.items() if name in names]


def support_table(contracts: list[type[TrackerContract]]) -> str:
    """Return the docs' table of what each system supports, according to its contract."""
    rows = sorted(contracts, key=lambda contract: contract.name)
    head = ["tracker", *CAPABILITIES, "repeats, local or offline", "repeats, online"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for contract in rows:
        marks = ["yes" if capability in contract.holds else "no" for capability in CAPABILITIES]
        tracker = LOGGER_TYPE_TO_CLASS[contract.name]
        deliveries = [getattr(tracker, "delivery", "at least once"), getattr(tracker, "delivery_online", None) or "–"]  # noqa: RUF001 - a dash for "not applicable"
        lines.append("| " + " | ".join([f"`{contract.name}`", *marks, *deliveries]) + " |")
    return "\n".join(lines)


def test_the_table_in_the_docs_is_what_the_contracts_say():
    """Run with UPDATE_DOCS=1 to write it."""
    text = PAGE.read_text()
    made = re.sub(
        r"(<!-- support table: begin -->\n).*?(<!-- support table: end -->)",
        lambda m: m[1] + support_table(contracts()) + "\n" + m[2],
        text,
        flags=re.DOTALL,
    )
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(made)
    assert PAGE.read_text() == made


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_page_says_how_repeats_are_avoided_as_the_class_does(row):
    page = (PAGE.parent / f"{row.name}.md").read_text()
    said = set(re.findall(r"\*(\w[\w ]*)\*", page.split("**Repeats:**")[1].split("\n\n")[0].replace("\n", " ")))
    tracker = LOGGER_TYPE_TO_CLASS[row.name]
    assert {tracker.delivery, tracker.delivery_online or tracker.delivery} <= said


def test_every_tracker_has_a_contract_and_a_page():
    names = {row.name for row in TABLE}
    assert {contract.name for contract in contracts()} == names
    assert [row.name for row in TABLE if not (PAGE.parent / f"{row.name}.md").exists()] == []
