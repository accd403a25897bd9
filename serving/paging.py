"""What a client asks of a list: how many entries, in which order. Pure."""

import re

from serving.errors import BadRequestError


def limit_of(asked: str | None, usual: int, most: int) -> int:
    """The entries of a page; raises BadRequestError."""
    if asked is None:
        return usual
    if not re.fullmatch(r"[0-9]{1,9}", asked) or not 1 <= int(asked) <= most:
        raise BadRequestError(f"limit is not a whole number from 1 to {most}.")
    return int(asked)


def newest_first(order: str | None) -> bool:
    """Raises BadRequestError."""
    if order not in (None, "asc", "desc"):
        raise BadRequestError("order is neither asc nor desc.")
    return order != "asc"
