"""What of a request decides which slice serves it best, and what a router remembers of the prompts it sent.

A prompt's text is cut into blocks. A hash of a block and of all before it is the block's name, so prompts with a common
beginning share names. Text and not tokens: the engine tokenises anyway, and its blocks may end elsewhere. Names are
Python's own keyed hashes: no client can make them collide, and no other router needs them. All routers must agree on a
conversation's home without talking, so a hash that is the same everywhere gives it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from serving.router.http.protocol import InferenceRequest

BLOCK_BYTES = 256
TOKEN_BYTES = 4  # of text, about, in the languages of most requests
_MOST_BYTES = 1 << 20  # of a prompt that the router looks at
_OPENING_LETTERS = 1024  # tell apart conversations that begin with the same instructions
_SESSION_HEADER = b"x-session-id"
_SESSION_FIELDS = ("prompt_cache_key", "user")


@dataclass(frozen=True)
class Trace:
    """What of a request slices may hold already. `marks`, its session and its adapter, also tie it to a slice.

    `home` is the same in every router, 0 where nothing tells this conversation from others.
    """

    blocks: tuple[int, ...] = ()
    tokens: int = 0
    session: int | None = None
    adapter: int | None = None
    home: int = 0

    @property
    def marks(self) -> tuple[int, ...]:
        return tuple(mark for mark in (self.session, self.adapter) if mark is not None)


NOTHING = Trace()


def trace(request: InferenceRequest, adapter: str | None = None) -> Trace:
    """The trace of a request as it came; the engine refuses fields of a wrong type."""
    session = _session(request)
    pieces, opening = _text(request.fields)
    data = b"\0".join(pieces)[:_MOST_BYTES]
    salt = request.fields.get("cache_salt")
    identity = session or opening
    return Trace(
        blocks=blocks(data, hash((adapter, salt if isinstance(salt, str) else None))),
        tokens=len(data) // TOKEN_BYTES,
        session=hash(("session", session)) if session else None,
        adapter=hash(("adapter", adapter)) if adapter else None,
        home=everywhere(identity) if identity else 0,
    )


def blocks(data: bytes, seed: int = 0) -> tuple[int, ...]:
    """The names of the full blocks of a text."""
    name, names = seed, []
    for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        name = hash((name, data[start : start + BLOCK_BYTES]))
        names.append(name)
    return tuple(names)


def everywhere(name: bytes) -> int:
    """A number for a name, the same in every process."""
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


class PrefixIndex:
    """Which blocks each slice was sent; it forgets the longest unused first.

    It forgets the first blocks of a prompt last, so a slice that has a block has all blocks before it.
    """

    def __init__(self, most_blocks: int) -> None:
        """`most_blocks` is for all slices together."""
        self._most_blocks = most_blocks
        self._held: dict[str, OrderedDict[int, None]] = {}

    @property
    def size(self) -> int:
        return sum(map(len, self._held.values()))

    def keep(self, slices: Collection[str]) -> None:
        """Keep these slices; what others held went with them."""
        self._held = {replica: self._held.get(replica) or OrderedDict() for replica in slices}
        for held in self._held.values():
            self._shrink(held)

    def matched(self, replica: str, names: Sequence[int]) -> int:
        """How many of these blocks, from the first on, the slice was sent."""
        held = self._held.get(replica)
        if not held:
            return 0
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if names[middle] in held:
                low = middle + 1
            else:
                high = middle
        return low

    def has(self, replica: str, mark: int | None) -> bool:
        return mark is not None and mark in self._held.get(replica, ())

    def add(self, replica: str, sent: Trace) -> None:
        held = self._held.get(replica)
        if held is None:
            return
        for name in (*reversed(sent.blocks), *sent.marks):
            held[name] = None
            held.move_to_end(name)
        self._shrink(held)

    def _shrink(self, held: OrderedDict[int, None]) -> None:
        most = self._most_blocks // len(self._held)
        while len(held) > most:
            held.popitem(last=False)


def _session(request: InferenceRequest) -> bytes:
    for name, value in request.headers:
        if name.lower() == _SESSION_HEADER and value:
            return value
    names = (request.fields.get(field) for field in _SESSION_FIELDS)
    return next((_bytes(name) for name in names if name and isinstance(name, str)), b"")


def _text(fields: Mapping[str, Any]) -> tuple[list[bytes], bytes]:
    """A request's text in the order that chat templates write it, and what tells its conversation from others."""
    before = [_bytes(fields[name]) for name in ("tools", "system", "instructions") if fields.get(name)]
    messages = fields.get("messages") or fields.get("input")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        prompt = _bytes(fields.get("prompt") or messages or "")
        return [*before, prompt], prompt[:_OPENING_LETTERS]
    opening = next((message.get("content") for message in messages if message.get("role") == "user"), "")
    return [*before, *_pieces(messages)], _bytes(opening)[:_OPENING_LETTERS]


def _pieces(messages: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    seen = 0
    for message in messages:
        if seen > _MOST_BYTES:
            return
        for value in (message.get("role"), message.get("content"), message.get("tool_calls")):
            if value:
                piece = _bytes(value)
                seen += len(piece)
                yield piece


def _bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value[:_MOST_BYTES].encode("utf-8", "surrogatepass")
    if isinstance(value, list) and value and isinstance(value[0], int):
        try:
            return array("I", value[: _MOST_BYTES // TOKEN_BYTES]).tobytes()
        except (OverflowError, TypeError):
            return b""
    return repr(value)[:_MOST_BYTES].encode("utf-8", "surrogatepass")
