"""Values of arguments that several commands take: argparse refuses the others with status 2."""

import argparse
import re
from collections.abc import Callable

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number that is not below `least`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} up")
        return int(text)

    return read


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
