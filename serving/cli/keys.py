"""`serving keys` makes an API key, `serving secret` the secret of a cluster."""

import argparse
import sys
from typing import Any


def add_commands(commands: Any) -> None:
    keys = commands.add_parser(
        "keys",
        help="make an API key: its line for the file of router.keys_file on stdout, the key itself on stderr",
    )
    keys.add_argument(
        "name",
        help="whose key it is, for the file and errors; metrics and logs have the first 12 digits of its hash",
    )
    keys.add_argument("--requests-per-minute", type=float, metavar="N", help="requests begun in a minute")
    keys.add_argument("--tokens-per-minute", type=float, metavar="N", help="tokens of prompts and answers")
    keys.add_argument("--concurrency", type=int, metavar="N", help="requests at once")
    keys.add_argument(
        "--tokens-per-day",
        type=float,
        metavar="N",
        help="budget of a day of UTC; it needs `store` in the YAML",
    )
    keys.add_argument(
        "--dollars-per-month",
        type=float,
        metavar="USD",
        help="budget of a month of UTC; it needs `store` too",
    )
    keys.add_argument("--priority", type=int, metavar="N", help="higher goes first (default: 0)")
    keys.add_argument("--weight", type=float, metavar="W", help="share among keys of a priority (default: 1)")
    keys.set_defaults(run=_keys)
    commands.add_parser(
        "secret",
        help="make a secret for SERVING_CLUSTER_SECRET of every process of a cluster: slices answer nobody else",
    ).set_defaults(run=_secret)


def _secret(_: argparse.Namespace) -> None:
    from serving import secret

    print(secret.new())


def _keys(options: argparse.Namespace) -> None:
    from serving.router.http import auth

    key, line = auth.new(
        options.name,
        requests_per_minute=options.requests_per_minute,
        tokens_per_minute=options.tokens_per_minute,
        concurrency=options.concurrency,
        tokens_per_day=options.tokens_per_day,
        dollars_per_month=options.dollars_per_month,
        priority=options.priority,
        weight=options.weight,
    )
    print(line)
    print(f"The key, which is shown this once: {key}", file=sys.stderr)
