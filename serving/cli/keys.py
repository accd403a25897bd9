"""`serving keys` makes, lists, rolls and revokes API keys, `serving secret` makes the secret of a cluster."""

import argparse
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from serving.cli.arguments import number, seconds
from serving.cli.usage import add_store, database_at

_LIMITS = (
    ("--requests-per-minute", number, "N", "requests begun in a minute"),
    ("--tokens-per-minute", number, "N", "tokens of prompts and answers"),
    ("--concurrency", int, "N", "requests at once"),
    ("--tokens-per-day", number, "N", "budget of a day of UTC; it needs `store` in the YAML"),
    ("--dollars-per-month", number, "USD", "budget of a month of UTC; it needs `store` too"),
    ("--priority", int, "N", "higher goes first (default: 0)"),
    ("--weight", number, "W", "share among keys of a priority (default: 1)"),
)


def add_commands(commands: Any) -> None:
    keys = commands.add_parser("keys", help="API keys: for a file, or in the store of a running service")
    actions = keys.add_subparsers(required=True, metavar="COMMAND")
    new = actions.add_parser(
        "new",
        help="make a key for a file: its line for the file of router.keys_file on stdout, the key itself on stderr",
    )
    add = actions.add_parser(
        "add", help="make a key in the store, where router.keys.stored is true; it is shown once"
    )
    for parser, run in ((new, _new), (add, _add)):
        parser.add_argument(
            "name",
            help="whose key it is, for errors; metrics and logs have the first 12 digits of its hash",
        )
        for flag, kind, metavar, text in _LIMITS:
            parser.add_argument(flag, type=kind, metavar=metavar, help=text)
        parser.set_defaults(run=run)
    listing = actions.add_parser("list", help="the keys of the store, by the digits that name them elsewhere")
    listing.set_defaults(run=_list)
    revoke = actions.add_parser("revoke", help="let a key of the store in no more")
    revoke.set_defaults(run=_revoke)
    roll = actions.add_parser(
        "roll", help="give a key of the store a new secret; what it has used, its files and its batches stay"
    )
    roll.add_argument(
        "--grace",
        type=seconds,
        default=86400.0,
        metavar="SECONDS",
        help="for how long the secret before it lets in too (default: a day)",
    )
    roll.set_defaults(run=_roll)
    for parser in (revoke, roll):
        parser.add_argument("name", help="of the key, as `serving keys list` has it")
    for parser in (add, listing, revoke, roll):
        add_store(parser)
    commands.add_parser(
        "secret",
        help="make a secret for SERVING_CLUSTER_SECRET of every process of a cluster: slices answer nobody else",
    ).set_defaults(run=_secret)


def _secret(_: argparse.Namespace) -> None:
    from serving import secret

    print(secret.new())


def _made(options: argparse.Namespace) -> tuple[str, str]:
    from serving.router.http import auth

    limits = [flag.removeprefix("--").replace("-", "_") for flag, *_ in _LIMITS]
    return auth.new(options.name, **{limit: getattr(options, limit) for limit in limits})


def _new(options: argparse.Namespace) -> None:
    key, line = _made(options)
    print(line, flush=True)  # a key whose line was not written is not shown
    _show(key)


def _add(options: argparse.Namespace) -> None:
    import time

    from serving.router.http import auth

    key, line = _made(options)
    (made,) = auth.parse(line, "this key").keys
    limits = made.model_dump(exclude={"name", "sha256"}, exclude_defaults=True)
    _with_table(options, lambda table: table.add(made.name, made.sha256, limits, time.time()))
    _show(key)


def _list(options: argparse.Namespace) -> None:
    from datetime import UTC, datetime

    from serving.router.http.auth import Key

    rows = _with_table(options, lambda table: table.all())
    if not rows:
        print("no key is in the store; `serving keys add NAME` makes one", file=sys.stderr)
    for row in rows:
        key = Key.model_construct(sha256=row.id)  # its limits may be another version's
        since = f"{datetime.fromtimestamp(row.created_s, UTC):%Y-%m-%d}"
        name = row.name if row.name.isprintable() else ascii(row.name)  # of a version that took any
        print("  ".join([key.id, since, name, *(f"{limit}={value}" for limit, value in row.limits.items())]))


def _revoke(options: argparse.Namespace) -> None:
    _with_table(options, lambda table: table.revoke(options.name))


def _roll(options: argparse.Namespace) -> None:
    import time

    from serving.router.http import auth

    key, line = auth.new("rolled")
    (made,) = auth.parse(line, "this key").keys
    _with_table(options, lambda table: table.roll(options.name, made.sha256, time.time(), options.grace))
    _show(key)


def _show(key: str) -> None:
    print(f"The key, which is shown this once: {key}", file=sys.stderr)


def _with_table(options: argparse.Namespace, do: Callable[[Any], Awaitable[Any]]) -> Any:
    import asyncio

    from serving.database.database import Database
    from serving.metering.keys import KeyTable

    async def opened() -> Any:
        database = await Database.open(database_at(options.store), migrates=False)
        try:
            return await do(KeyTable(database))
        finally:
            await database.close()

    return asyncio.run(opened())
