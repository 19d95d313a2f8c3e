"""Write a read-only copy of the dashboard to a folder that any web host serves, without a fanfold server.

Long series are thinned but keep every extreme; media, tables, logs and profiles are included. The folder is as private as its
host.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..drawing.numbers import plural
from ..errors import RunNotFound, SettingError
from ..publish import PublishOptions, publish
from ..store.query import find
from . import choose, output
from .text import size

EXAMPLE = """examples:
  fanfold publish llm -o public                    a whole project
  fanfold publish run-a run-b -o public --zip      two runs, as public.zip
  python -m http.server --directory public         look at it"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="PROJECT|RUN", nargs="+", help=f"a project, or a run: {choose.RUN_HELP}")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="where to write; an earlier copy is replaced")
    parser.add_argument("--zip", action="store_true", help="write FOLDER.zip instead")
    parser.add_argument("--no-media", action="store_true", help="leave out images, audio, video, tables, texts and figures")
    parser.add_argument(
        "--points", type=int, metavar="N", help="buckets of each series (default: up to 1000, fewer with many runs)"
    )


def run(args: argparse.Namespace) -> int:
    if args.points is not None and not 1 <= args.points <= 20_000:
        raise SettingError(f"--points {args.points} is not between 1 and 20000. Nothing was published. Try 2000.")
    store = choose.store(args)
    projects = {project.name for project in store.projects()} if args.project is None else {args.project}
    chosen: dict[str, set[str]] = {}
    for word in args.what:
        if word in projects:
            chosen.setdefault(word, set()).update(name[1] for name in store.names(word))
        else:
            try:
                found = find(store, word, args.project)
            except RunNotFound as error:
                known = f"Projects: {', '.join(sorted(projects)[:10])}." if projects else "There are no projects."
                raise RunNotFound(
                    f"{word!r} is neither a project nor a run in {store.place}. Nothing was published. {known}"
                ) from error
            chosen.setdefault(found.project, set()).add(found.id)
    options = PublishOptions(
        args.zip, not args.no_media, args.points, lambda questions, total: output.progress(args, questions, total, "Publishing")
    )
    facts = publish(store, {project: frozenset(ids) for project, ids in chosen.items()}, Path(args.output), options)
    if args.json:
        output.print_json(facts)
        return 0
    print(facts["path"])
    output.remark(args, f"{plural(facts['runs'], 'run')} of {plural(len(facts['projects']), 'project')}, "
                  f"{plural(facts['files'], 'file')}, {size(facts['bytes'])}.")  # fmt: skip
    for one in facts["left_out"]:
        output.remark(args, f"left out: {one['count']:,} {one['what']}")
    output.remark(
        args, "Everybody who can open the address can read it: config, names, notes, logs and facts of the runs are in it."
    )
    return 0
