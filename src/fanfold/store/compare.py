"""What differs between two runs: config, metrics, code, packages and environment."""

from __future__ import annotations

from typing import Any

from ..plain import equal, flat
from .run import StoredRun

_CODE = ("script", "command")
_APART = (*_CODE, "git", "packages")  # facts that are not about the environment


def compare(a: StoredRun, b: StoredRun) -> dict[str, Any]:
    """Return, by section, the values that differ as [a's, b's], and how many are the same. A missing value is None."""
    facts = [one.facts for one in (a, b)]
    return {
        "config": _differences(*(flat(one.config) for one in (a, b))),
        "metrics": _differences(*(dict(one.row().latest) for one in (a, b))),
        "code": _differences(*(_code(one) for one in facts)),
        "packages": _differences(*(dict(one.get("packages") or {}) for one in facts)),
        "environment": _differences(*(_environment(one) for one in facts)),
    }


def _differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    names = list(dict.fromkeys([*a, *b]))
    different = [name for name in names if (name in a) != (name in b) or not equal(a[name], b[name])]
    return {"differ": {name: [a.get(name), b.get(name)] for name in different}, "same": len(names) - len(different)}


def _code(facts: dict[str, Any]) -> dict[str, Any]:
    git = facts.get("git")
    known = flat(git) if isinstance(git, dict) else {}
    return known | {name: facts[name] for name in _CODE if name in facts}


def _environment(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flat(facts).items() if name.partition(".")[0] not in _APART}
