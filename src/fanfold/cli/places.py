"""The store of a gateway, from `--store`: its runs, tokens and audit log."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..settings import find_directory, is_address

if TYPE_CHECKING:
    from ..fleet.audit import Audit
    from ..fleet.intake import Intake
    from ..fleet.tokens import TokenBook
    from ..store.query import Store


class StoreParts(NamedTuple):
    """The parts of one store, in a directory or a database."""

    intake: Intake
    store: Store
    tokens: TokenBook
    audit: Audit


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", metavar="DIR", help="where runs are stored (default: as --dir)")
    parser.add_argument("--tokens", metavar="FILE", help="the file of tokens (default: .tokens.json in the store)")


def books(args: argparse.Namespace) -> tuple[TokenBook, Audit]:
    """Open the tokens and the audit log, which is all that `fanfold server token` and `audit` need."""
    from ..fleet.audit import FILE_NAME, AuditFile
    from ..fleet.tokens import FILE_NAME as TOKENS
    from ..fleet.tokens import Tokens

    if is_address(address(args)):
        from ..clickhouse.gateway_tables import AuditTable, TokenTable
        from ..clickhouse.store import connect

        database = connect(address(args)).database
        return TokenTable(database), AuditTable(database)
    root = _root(args)
    tokens = Path(args.tokens).expanduser() if getattr(args, "tokens", None) else root / TOKENS
    return Tokens(tokens), AuditFile(root / FILE_NAME)


def place(args: argparse.Namespace, *, power: bool = True) -> StoreParts:
    """Open a store for a gateway."""
    from ..fleet.intake import DirectoryIntake
    from ..store.query import LocalStore

    if is_address(address(args)):
        from ..clickhouse.intake import ClickHouseIntake
        from ..clickhouse.store import connect

        fleet = connect(address(args))
        return StoreParts(ClickHouseIntake(fleet.database), fleet, *books(args))
    root = _root(args)
    return StoreParts(DirectoryIntake(root, power=power), LocalStore(root), *books(args))


def address(args: argparse.Namespace) -> str:
    """Return the address of the store as given."""
    return str(args.store or args.dir or os.environ.get("FANFOLD_DIR") or "")


def _root(args: argparse.Namespace) -> Path:
    return Path(args.store).expanduser().absolute() if args.store else find_directory(args.dir)
