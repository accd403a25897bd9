"""Values of arguments that several commands take: argparse refuses the others with status 2."""

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class Parser(argparse.ArgumentParser):
    """Refuses unknown arguments at the command that they were typed behind: argparse shows the usage of `serving` alone."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return options, unknown

    def _refuse(self, unknown: list[str]) -> NoReturn:
        near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number that is not below `least`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} up")
        return int(text)

    return read


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 up")
    return value


def simulation_name(text: str) -> str:
    """A folder is named so."""
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name of a simulation; write letters and digits, and `-`, `_` and `.` behind the first"
        )
    return text
