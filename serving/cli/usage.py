"""`serving usage`: what keys have used, from the store."""

import argparse
import csv
import sys
from collections.abc import Sequence
from typing import Any

_BY = ("key", "model", "pool", "day")
_DECIMALS = {"slice_seconds": 1, "dollars": 4}


def add_commands(commands: Any) -> None:
    usage = commands.add_parser(
        "usage", help="what keys have used: requests, tokens, seconds of slices and dollars"
    )
    add_store(usage)
    usage.add_argument(
        "--by",
        type=_columns,
        default=("key", "model"),
        metavar="COLUMNS",
        help=f"what to add up by, of {','.join(_BY)} (default: key,model)",
    )
    usage.add_argument(
        "--start", metavar="DAY", help="first day of UTC, as 2026-11-01 (default: this month's first)"
    )
    usage.add_argument("--end", metavar="DAY", help="last day (default: today)")
    usage.add_argument("--csv", action="store_true", help="with commas and all decimals")
    usage.set_defaults(run=_usage)


def add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        required=True,
        metavar="PLACE",
        help="what `store` in the YAML names: its folder, on the head, or postgresql://USER@HOST/NAME",
    )


def database_at(store: str) -> str:
    """The database of a store that is there; raises ConfigError."""
    from pathlib import Path

    from serving.database.database import is_postgres
    from serving.errors import ConfigError

    if is_postgres(store):
        return store
    file = Path(store) / "store.sqlite"
    if not file.is_file():
        raise ConfigError(
            f"{file} is not there; --store names the folder of `store` in the YAML, on the head where the service runs"
        )
    return str(file)


def _columns(text: str) -> tuple[str, ...]:
    columns = tuple(text.split(","))
    if unknown := [column for column in columns if column not in _BY]:
        raise argparse.ArgumentTypeError(f"no column {unknown[0]!r}; there are {', '.join(_BY)}")
    return columns


def _usage(options: argparse.Namespace) -> None:
    import asyncio
    import time

    from serving.metering.ledger import AMOUNTS
    from serving.metering.service import days

    first, last = days(options.start, options.end, time.time())
    rows = asyncio.run(_sums(database_at(options.store), options.by, first, last))
    head = (*options.by, *AMOUNTS)
    if options.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([head, *rows])
    else:
        _print([head, *([_cell(name, value) for name, value in zip(head, row, strict=True)] for row in rows)])


async def _sums(where: str, by: Sequence[str], first: str, last: str) -> list[list[Any]]:
    from serving.database.database import Database
    from serving.metering.ledger import Ledger

    database = await Database.open(where, migrates=False)
    try:
        return [list(row) for row in await Ledger(database).by(by, first, last)]
    finally:
        await database.close()


def _cell(name: str, value: Any) -> str:
    return f"{value:.{_DECIMALS[name]}f}" if name in _DECIMALS else str(value)


def _print(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())
