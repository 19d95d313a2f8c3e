"""The alert rules of a run, given by its program, and of a project: added in the dashboard and kept with its saved views."""

from __future__ import annotations

import time

from ..errors import SettingError
from ..store.changes import RULE, Views
from ..store.filter import number
from ..store.rules import parse
from ..store.run import StoredRun
from .options import MOST_RULES


def run_rules(run: StoredRun) -> list[str]:
    """Return the rules that a run's program gave to init(alerts=…)."""
    found = run.info.get("alerts")
    return [text for text in found[:MOST_RULES] if isinstance(text, str)] if isinstance(found, list) else []


def project_rules(views: Views, project: str) -> dict[str, float]:
    """Return a project's rules, each with the time from which on it applies: when it was added."""
    found = views.all(project, RULE)
    return {text: number(since) or 0.0 for text, since in list(found.items())[:MOST_RULES]}


def change_rule(views: Views, project: str, text: str, *, remove: bool = False) -> dict[str, float]:
    """Add or remove a rule, and return all of the project's rules; raise for a mistake in it."""
    known = project_rules(views, project)
    if remove:
        if text not in known:
            raise SettingError("there is no such rule. Nothing was changed.")
        views.save(project, text, None, RULE)
    else:
        text = parse(text).text
        if len(known) >= MOST_RULES:
            raise SettingError(f"the project has {MOST_RULES} rules. Nothing was added. Remove one first.")
        if text not in known:
            views.save(project, text, f"{time.time():.3f}", RULE)
    return project_rules(views, project)
