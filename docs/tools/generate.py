"""Write the pages of the reference that follow from the code: commands, their JSON, settings, error classes.

`make docs` runs it. tests/project/test_reference.py fails when a page is not what this script writes.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fanfold import errors, settings
from fanfold.callbacks import CallbackError
from fanfold.cli import COMMANDS, schemas
from fanfold.recording.api import init

DOCS = Path(__file__).parents[1]
COMMON = ("--dir", "--project", "--json", "-q", "--quiet", "-h", "--help")

# What the table of settings adds to the sentence in the code.
MORE = {
    "blackbox": "See [black box](blackbox.md).",
    "console": "Up to 64 MB a stream; the terminal shows it unchanged.",
    "durability": "`power` costs about a millisecond a call.",
    "energy": "See [CodeCarbon](trackers/codecarbon.md).",
    "goodput": "See [goodput](goodput.md).",
    "gpus": "See [health of GPUs](system-metrics.md#health-of-gpus).",
    "hold": "See [relay](relay.md).",
    "mode": "With `disabled` there is no file and no thread, and `report_to` reports nothing either.",
    "name": "Names need not be unique; ids are.",
    "oidc_secret": "See [people](fleet.md#people).",
    "ops": "Also `ranges`, `usage`, `rows`, `native`. See [operator profile](operator-profile.md).",
    "resume": "`never`, `allow`, `must`, `auto`: the newest unfinished run of the project (and of that `name`, if given).",
    "safe_directory": "See [folders of others](#folders-of-others).",
    "server": "See [fleet](fleet.md).",
    "server_ca": "PEM.",
    "server_token": "Created with `fanfold server token create`.",
    "session_secret": "32 characters or more. See [people](fleet.md#people).",
    "spool_dir": "If another user has taken the default folder's name, another one is used, with a warning. Readers use a journal's spool "
    "only if it is in this directory: a copied run cannot name another.",
    "stamp": "See [provenance](provenance.md).",
    "system": "From the first process of each node. See [system metrics](system-metrics.md).",
    "token": "See [dashboard](dashboard.md).",
}
# Read from the environment alone, never from a file in the directory of runs.
ENVIRONMENT = frozenset(
    "cache_dir dir node oidc_secret rank run_id safe_directory session_secret spool_dir token world_size".split()
)
# Options outside of the table of settings.
OTHERS = (
    ("`FANFOLD_NOTIFY`", "`notify`", "-", "none", "Who gets [messages](notifications.md) about alerts and the end of runs."),
    ("-", "`alerts`", "-", "none", "[Rules](notifications.md#rules) that raise an alert, such as `loss is nan`."),
    ("`FANFOLD_DEBUG`", "-", "-", "off", "`1`: commands show tracebacks."),
    ("`FANFOLD_CLICKHOUSE_PASSWORD`", "-", "-", "none", "The password of a [ClickHouse store](clickhouse.md)."),
    ("`FANFOLD_LOCAL_RANK`, `FANFOLD_LOCAL_WORLD_SIZE`", "-", "-", "from the launcher", "This process among those of its node."),
)  # fmt: skip


def cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


# The command line


def commands() -> str:
    parts = [
        "# Every command and option",
        "The output of `fanfold COMMAND --help`. To get started, read the [commands by task](../cli.md).",
        "```bash\nfanfold --help\nfanfold ls --help\n```",
        (
            "`RUN` is an id, the beginning of one, a name, a run's directory, or `-` for the newest run. Every command takes `--dir DIR` "
            "(where runs are stored), `--project NAME`, `--json` and `-q`."
        ),
        *(command(name, module) for name, (module, _) in COMMANDS.items()),
    ]
    return "\n\n".join(parts) + "\n"


def command(name: str, module_name: str) -> str:
    module = importlib.import_module(f"fanfold.cli.{module_name}")
    parser = argparse.ArgumentParser(f"fanfold {name}")
    module.arguments(parser)
    rows = [(option(action), meaning(action)) for action in parser._actions if "-h" not in action.option_strings]
    about = (module.__doc__ or "").strip()
    parts = [f"## fanfold {name}", paragraphs(about)]
    if rows:
        parts.append(table(("argument", "meaning"), rows))
    example = getattr(module, "EXAMPLE", "").removeprefix("examples:\n").removeprefix("example:\n")
    if example:
        parts.append("```\n" + inspect.cleandoc("\n" + example) + "\n```")
    if name in schemas.COMMANDS:
        parts.append(f"With `--json`: [what it prints](json.md#fanfold-{name.replace(' ', '-')}).")
    return "\n\n".join(parts)


def paragraphs(text: str) -> str:
    """Return a docstring as Markdown; indented lines stay as they are."""
    blocks = []
    for block in text.split("\n\n"):
        literal = all(line.startswith("  ") for line in block.splitlines())
        blocks.append("```\n" + inspect.cleandoc("\n" + block) + "\n```" if literal else escaped(block))
    return "\n\n".join(blocks)


def escaped(text: str) -> str:
    """Return a text with `<`, `*` and `_` as they are, outside of code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([<*_])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def option(action: argparse.Action) -> str:
    if not action.option_strings:
        name = str(action.metavar or action.dest)
        return f"`{name}{'…' if action.nargs in ('*', '+') else ''}`"
    value = "" if action.nargs == 0 else f" {action.metavar or (action.dest.upper() if not action.choices else '')}".rstrip()
    return ", ".join(
        f"`{word}{value if word.startswith('--') or len(action.option_strings) == 1 else ''}`" for word in action.option_strings
    )


def meaning(action: argparse.Action) -> str:
    text = escaped((action.help or "").replace("%%", "%").replace("%(default)s", str(action.default)))
    known = ", ".join(f"`{choice}`" for choice in action.choices or ())
    return f"{text}; one of {known}" if known and not all(f"{choice}" in text for choice in action.choices or ()) else text


# The JSON of commands


def json_page() -> str:
    parts = [
        "# The JSON of commands",
        (
            "Every command prints JSON with `--json`. The format is stable: the version changes when a program could notice a difference, "
            f"and is {schemas.VERSION} now. `fanfold schema COMMAND` prints the JSON Schema."
        ),
        "```bash\nfanfold ls --json | jq '.[0].id'\nfanfold schema ls > ls.schema.json\n```",
        (
            'JSON is ASCII. Numbers that JSON cannot represent are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. Times are seconds since 1970 unless '
            "a field says otherwise. New fields may be added at any time: ignore those you do not know."
        ),
    ]
    for name, output in schemas.COMMANDS.items():
        schema = schemas.schema(name)
        kinds = schema.get("$defs", {})
        begin = f"`{kind_of(schema)}`" + (", one on each line" if output.lines else "")
        parts += [f"## fanfold {name}", f"Prints {begin}.", *(fields(title, kind) for title, kind in kinds.items())]
    return "\n\n".join(parts) + "\n"


def fields(title: str, kind: dict[str, Any]) -> str:
    needed = kind.get("required", ())
    rows = [
        (f"`{name}`" + ("" if name in needed else " (optional)"), f"`{kind_of(one)}`")
        for name, one in kind.get("properties", {}).items()
    ]
    return f"**{title}**: {kind.get('description', '')}\n\n" + table(("field", "type"), rows)


def kind_of(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind_of(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f'"{one}"' for one in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        inner = schema.get("items")
        return f"list of {kind_of(inner)}" if isinstance(inner, dict) else "list"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {kind_of(schema['additionalProperties'])}"
    return {"string": "text", "integer": "whole number", "boolean": "true or false"}.get(str(kind), str(kind))


# Settings


def settings_table() -> str:
    arguments = inspect.signature(init).parameters
    rows = []
    for name, row in sorted(settings.TABLE.items()):
        argument = f"`{row.argument}`" if row.argument in arguments or name == "mode" else "-"
        text = row.meaning if name not in MORE else f"{row.meaning} {MORE[name]}"
        file = "-" if name in ENVIRONMENT else f"`{name}`"
        rows.append((f"`{row.variable}`", argument, file, default(row.default), text))
    return table(("variable", "`init()`", "`settings.toml`", "default", "meaning"), rows + list(OTHERS))


def default(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`" if value else "-"


# Error classes


def error_classes() -> str:
    kinds = [*_below(errors.FanfoldError), CallbackError]
    rows = []
    for kind in dict.fromkeys(kinds):
        first, _, rest = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
        advice = " ".join(rest.partition("Example:")[0].split())
        name = f"fanfold.{kind.__name__}" if kind.__name__ in _public() else f"{kind.__module__}.{kind.__name__}"
        rows.append((f"`{name.replace('callbacks.failure', 'callbacks')}`", " ".join(first.split()), advice))
    return table(("class", "what happened", "what to do"), rows)


def _public() -> list[str]:
    import fanfold

    return fanfold.__all__


def _below(kind: type) -> Iterator[type]:
    """Yield the public error classes of errors.py, from the base down."""
    yield kind
    for one in kind.__subclasses__():
        if one.__module__ == errors.__name__:
            yield from _below(one)


# Writing


def between(path: Path, mark: str, text: str) -> str:
    """Return a page with the part between two marks replaced."""
    pattern = re.compile(rf"(<!-- {mark}: [^\n]*-->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    page = path.read_text(encoding="utf-8")
    if not pattern.search(page):
        raise SystemExit(f"{path} has no part marked {mark!r}.")
    return pattern.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)


def pages() -> dict[Path, str]:
    """Return what each generated page should hold."""
    return {
        DOCS / "reference" / "cli.md": commands(),
        DOCS / "reference" / "json.md": json_page(),
        DOCS / "settings.md": between(DOCS / "settings.md", "settings", settings_table()),
        DOCS / "errors.md": between(DOCS / "errors.md", "errors", error_classes()),
    }


def main() -> int:
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(DOCS.parent)} is written again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
