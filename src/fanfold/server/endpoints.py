"""The table of API endpoints: path, function, arguments, description. The OpenAPI document is generated from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from .._version import __version__
from ..errors import SettingError
from ..store.query import Store
from . import data, edit, export, samples, schemas, sweep


@dataclass(frozen=True)
class Argument:
    """One query parameter."""

    name: str
    type: str = "string"
    default: Any = None
    many: bool = False


@dataclass(frozen=True)
class Endpoint:
    """One API endpoint. `body` is the type of a POST's JSON; with `binary`, the response is columns (docs/dashboard.md)."""

    path: str
    function: Callable[..., Any]
    meaning: str
    query: tuple[Argument, ...] = ()
    body: type[msgspec.Struct] | None = None
    binary: bool = False
    writes: bool = False
    own: bool = False  # writes only what belongs to the caller: whoever is logged in may
    answer: Any = None  # the type of a JSON response

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"

    def arguments(self, query: Any, body: bytes) -> dict[str, Any]:
        """Parse the arguments of a request; raise an error that names an invalid one."""
        if self.body is None:
            return {one.name: _read(one, query) for one in self.query}
        try:
            return {"query": msgspec.json.decode(body, type=self.body)}
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SettingError(f"the request is malformed: {error}. Nothing was done. See api/openapi.json.") from error


def _read(one: Argument, query: Any) -> Any:
    if one.many:
        return query.getlist(one.name)
    text = query.get(one.name)
    if text is None:
        if one.default is None and one.type == "string":
            raise SettingError(f"the request lacks {one.name}=. Nothing was read. See api/openapi.json.")
        return one.default
    if one.type != "integer":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise SettingError(f"{one.name}={text[:40]!r} is not a whole number. Nothing was read.") from error


def _projects(store: Store) -> dict[str, Any]:
    return {"projects": store.projects(), "version": __version__}


PROJECT = Argument("project")
RUN = (PROJECT, Argument("id"))
ROWS = Argument("count", "integer", 100)
ALL = (
    Endpoint("api/projects", _projects, "The projects, most recently active first.", answer=schemas.Projects),
    Endpoint("api/runs", data.runs, "A project's runs that pass a filter, and which keys and columns there are.",
             (PROJECT, Argument("filter", default=""), Argument("sort", default=""), Argument("count", "integer", 0),
              Argument("known", default="")), answer=schemas.Runs),
    Endpoint("api/passing", data.passing, "The ids of a project's runs that pass a filter.", (PROJECT, Argument("filter")),
             answer=schemas.Passing),
    Endpoint("api/run", data.run, "Everything about one run except its points.", RUN, answer=schemas.Run),
    Endpoint("api/columns", data.columns, "Columns of the run table.", body=data.ColumnQuery, binary=True),
    Endpoint("api/series", data.series, "Series of many runs and keys, thinned exactly.", body=data.SeriesQuery, binary=True),
    Endpoint("api/csv", export.csv, "Every point of these series as CSV.", body=data.SeriesQuery, binary=True),
    Endpoint("api/parquet", export.parquet, "Every point of these series as a Parquet file.", body=data.SeriesQuery, binary=True),
    Endpoint("api/importance", sweep.importance, "How much each config value matters for a metric.", body=sweep.ImportanceQuery,
             answer=schemas.Importance),
    Endpoint("api/alerts", data.alerts, "Alerts of a project, newest first.", (PROJECT,), answer=list[schemas.Alert]),
    Endpoint("api/console", data.console, "Console output of a run.", (*RUN, Argument("before", "integer")),
             answer=schemas.Console),
    Endpoint("api/media", data.media, "Media and texts logged under a key.",
             (PROJECT, Argument("ids", many=True), Argument("key")), answer=list[schemas.Media]),
    Endpoint("api/table", samples.table, "Rows of a logged table that match, sorted.",
             (*RUN, Argument("key"), Argument("n", "integer", 0), Argument("start", "integer", 0), ROWS,
              Argument("search", default=""), Argument("sort", default=""), Argument("where", default="")), answer=schemas.Table),
    Endpoint("api/sample", samples.sample, "The same row of logged tables, at every step of some runs.", body=samples.SampleQuery,
             answer=schemas.Samples),
    Endpoint("api/profile", data.profile, "A run's operator profile.", RUN, answer=schemas.Profile),
    Endpoint("api/goodput", data.goodput, "Where a run's wall time went.", RUN, answer=schemas.Goodput),
    Endpoint("api/views", edit.views, "A project's saved views.", (PROJECT,), answer=schemas.Views),
    Endpoint("api/workspace", edit.workspace, "What the caller last looked at in a project.", (PROJECT,),
             answer=schemas.Workspace),
    Endpoint("api/rules", edit.rules, "The alert rules of a project, and those its programs brought.", (PROJECT,),
             answer=schemas.Rules),
    Endpoint("api/edit", edit.edit, "Rename, tag, note or archive runs.", body=edit.Edit, writes=True, answer=schemas.Changed),
    Endpoint("api/tell", edit.tell, "Ask a running job to stop, save, evaluate, log or set values.", body=edit.Tell, writes=True,
             answer=schemas.Told),
    Endpoint("api/delete", edit.delete, "Delete runs that are no longer written.", body=edit.Delete, writes=True,
             answer=schemas.Deleted),
    Endpoint("api/move", edit.move, "Move runs to another project.", body=edit.Move, writes=True, answer=schemas.Moved),
    Endpoint("api/view", edit.save_view, "Save or delete a named view.", body=edit.SaveView, writes=True, answer=schemas.Views),
    Endpoint("api/examples", edit.add_examples, "Write example runs, for a first look.", body=edit.AddExamples, writes=True,
             answer=schemas.Added),
    Endpoint("api/keep", edit.keep_workspace, "Keep what the caller looks at now, for the next time.", body=edit.KeepWorkspace,
             writes=True, own=True, answer=schemas.Workspace),
    Endpoint("api/rule", edit.save_rule, "Add or remove an alert rule of a project.", body=edit.SaveRule, writes=True,
             answer=schemas.Rules),
)  # fmt: skip


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of the endpoints."""
    schemas: dict[str, Any] = {}
    paths = {f"/{one.path}": {one.method.lower(): _operation(one, schemas)} for one in ALL}
    return {
        "openapi": "3.1.0",
        "info": {"title": "fanfold dashboard", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(one: Endpoint, schemas: dict[str, Any]) -> Mapping[str, Any]:
    kind, form = ("application/octet-stream", {}) if one.binary else ("application/json", _schema(one.answer, schemas))
    operation: dict[str, Any] = {
        "operationId": one.path.removeprefix("api/"),
        "summary": one.meaning,
        "responses": {
            "200": {"description": "the answer", "content": {kind: {"schema": form}}},
            "400": {"description": "the request is malformed, or is not allowed"},
            "404": {"description": "there is no such run"},
        },
    }
    if one.query:
        operation["parameters"] = [_parameter(argument) for argument in one.query]
    if one.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema(one.body, schemas)}}}
    return operation


def _schema(form: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a type; the schemas it refers to are added to `schemas`."""
    (schema,), found = msgspec.json.schema_components([form], ref_template="#/components/schemas/{name}")
    schemas.update(found)
    return schema


def _parameter(one: Argument) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": one.type}
    if one.many:
        schema = {"type": "array", "items": schema}
    elif one.default is not None:
        schema["default"] = one.default
    needed = one.default is None and one.type == "string" and not one.many
    return {"name": one.name, "in": "query", "required": needed, "schema": schema}
