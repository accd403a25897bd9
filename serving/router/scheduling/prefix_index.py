"""What of a request decides which slice serves it best, and what a router remembers of the prompts it sent.

A prompt's text is cut into blocks: 512 bytes each for the first 8 KiB, and then twice as long each time that the text doubles.
So a text of any length has at most 72 blocks, and no match is understated by more than an eighth. A hash of a block and of
all before it is the block's name, so prompts with a common beginning share names. Text and not tokens: the engine tokenises
anyway, and its blocks may end elsewhere.

No client can make names collide: they are Python's own keyed hashes. Where routers tell each other of names, these are hashes under
a key that the routers share, which take four times as long. All routers must agree on a conversation's home, so a hash that is
the same everywhere gives it.
"""

import itertools
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from serving.router.http.protocol import InferenceRequest

BLOCK_BYTES = 512
TOKEN_BYTES = 4  # of text, about, in the languages of most requests
# Of a prompt the router looks at so much, within four milliseconds.
_MOST_BYTES = 1 << 20
_MOST_VALUES = 1 << 13
# What engines read nothing of: a part's name beside its text, marks for Anthropic's cache, which move on with each turn, and a line
# of Claude Code's that is another with each request.
_TEXT_PARTS = ("text", "input_text", "output_text")
_CACHE_MARK = "cache_control"
_BILLING = "x-anthropic-billing-header"
_OPENING_LETTERS = 1024  # tell apart conversations that begin with the same instructions
_SESSION_HEADER = b"x-session-id"
_SESSION_FIELDS = ("prompt_cache_key", "user")
_SIZES = 8  # blocks from one doubling of the text to the next
_MOST_LEFT = 256  # slices whose numbers may wait until no name has them any more


def _ends() -> Iterator[int]:
    """Where blocks end, in bytes."""
    end, size_bytes = 0, BLOCK_BYTES
    while end < _MOST_BYTES:
        if end >= 2 * _SIZES * size_bytes:
            size_bytes *= 2
        end += size_bytes
        yield end


_ENDS = tuple(_ends())


class Trace(NamedTuple):
    """What of a request slices may hold already: blocks of its text, its session and its adapter.

    `home` is the same in every router, 0 where nothing tells this conversation from others.
    """

    blocks: tuple[int, ...] = ()
    tokens: int = 0
    session: int | None = None
    adapter: int | None = None
    home: int = 0

    @property
    def names(self) -> tuple[int, ...]:
        """All that slices are remembered by."""
        if self.session is None and self.adapter is None:
            return self.blocks
        return (*self.blocks, *(mark for mark in (self.session, self.adapter) if mark is not None))


NOTHING = Trace()


def trace(request: InferenceRequest, adapter: str | None = None, key: bytes = b"") -> Trace:
    """The trace of a request as it came; the engine refuses fields of a wrong type.

    `key`: of all routers that share names; without one, names are this process's own.
    """
    session = _session(request)
    pieces, opening = _text(request.fields)
    data = b"\0".join(pieces)[:_MOST_BYTES]
    salt = request.fields.get("cache_salt")
    identity = session or opening
    salt = salt if isinstance(salt, str) else None
    home = everywhere(identity) if identity else 0
    tokens = len(data) // TOKEN_BYTES
    if key:
        seed = _keyed(repr((adapter, salt)).encode(errors="surrogatepass"), key)
        return Trace(
            blocks=shared_blocks(data, seed),
            tokens=tokens,
            session=_number(_keyed(b"session" + session, key)) if session else None,
            adapter=_number(_keyed(b"adapter" + adapter.encode(), key)) if adapter else None,
            home=home,
        )
    return Trace(
        blocks=blocks(data, hash((adapter, salt))),
        tokens=tokens,
        session=hash(("session", session)) if session else None,
        adapter=hash(("adapter", adapter)) if adapter else None,
        home=home,
    )


def blocks(data: bytes, seed: int = 0) -> tuple[int, ...]:
    """The names of the full blocks of a text."""
    name, start, names = seed, 0, []
    for end in _ENDS[: bisect_right(_ENDS, len(data))]:
        name = hash((name, data[start:end]))
        names.append(name)
        start = end
    return tuple(names)


def shared_blocks(data: bytes, seed: bytes) -> tuple[int, ...]:
    """The same, by names that are the same in every process with this seed, of 16 bytes and more."""
    name, start, names = seed, 0, []
    for end in _ENDS[: bisect_right(_ENDS, len(data))]:
        name = _keyed(data[start:end], name)
        names.append(_number(name))
        start = end
    return tuple(names)


def tokens_of(matched_blocks: int) -> int:
    """About how many tokens a prompt's first blocks have."""
    return _ENDS[matched_blocks - 1] // TOKEN_BYTES if matched_blocks else 0


def everywhere(name: bytes) -> int:
    """A number for a name, the same in every process."""
    return _number(blake2b(name, digest_size=8).digest())


def _keyed(data: bytes, key: bytes) -> bytes:
    return blake2b(data, key=key, digest_size=16).digest()


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


class PrefixIndex:
    """Which slices each block and mark was sent to: by name, the set of the slices' numbers (see bit_columns).

    It forgets what was sent longest ago: names are kept in two generations, and once the young one is full, the old one goes.
    A prompt's names are written together, so a slice that has a block has all blocks before it.
    """

    def __init__(self, most_names: int) -> None:
        """`most_names`: of all slices together, two at least."""
        self._half = most_names // 2
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._bits: list[int] = []  # shared by all names that one slice alone has
        self._known = 0
        self._free: list[int] = []
        # Numbers of slices that went: names that still have them are gone after two generations.
        self._left: deque[tuple[int, int]] = deque()
        self._generation = 0

    @property
    def size(self) -> int:
        """Names in memory; a name that is sent on is in both generations for a while."""
        return len(self._young) + len(self._old)

    def join(self) -> int:
        """A number for a new slice, of which nothing is remembered."""
        while self._left and self._left[0][0] <= self._generation:
            self._free.append(self._left.popleft()[1])
        number = self._free.pop() if self._free else len(self._bits)
        if number == len(self._bits):
            self._bits.append(1 << number)
        self._known |= self._bits[number]
        return number

    def leave(self, number: int) -> None:
        """Forget a slice."""
        self._known &= ~self._bits[number]
        self._left.append((self._generation + 2, number))
        if len(self._left) > max(_MOST_LEFT, self._known.bit_count()):
            self._turn()  # slices come and go where hardly anything is asked: sets must not grow for that

    def holders(self, name: int | None) -> int:
        """The slices that a block or mark was sent to."""
        if name is None:
            return 0
        return (self._young.get(name, 0) | self._old.get(name, 0)) & self._known

    def matches(self, names: Sequence[int], among: int) -> Iterator[tuple[int, int]]:
        """How many of these blocks, from the first on, slices were sent, and which slices: the longest match first.

        Each slice of the set `among` comes once, unless it was sent none of the blocks.
        """
        young, old, high = self._young, self._old, len(names)
        among &= self._known
        while among:
            low, holders = 0, 0
            while low < high:
                middle = (low + high + 1) // 2
                name = names[middle - 1]
                if having := (young.get(name, 0) | old.get(name, 0)) & among:
                    low, holders = middle, having
                else:
                    high = middle - 1
            if not holders:
                return
            yield low, holders
            among &= ~holders

    def drop(self, number: int, names: Sequence[int]) -> None:
        """A slice has these names no more."""
        for known in (self._young, self._old):
            for name in names:
                having = known.get(name, 0)
                if having >> number & 1:
                    if rest := having & ~self._bits[number]:
                        known[name] = rest
                    else:
                        del known[name]

    def put(self, number: int, names: Sequence[int]) -> None:
        """Note that a slice was sent names, no more than half of those that are remembered."""
        if len(self._young) + len(names) > self._half:
            self._turn()
        young, bit = self._young, self._bits[number]
        before = after = bit  # names of one prompt mostly have the same slices: one int for all of them
        for name in names:
            known = young.get(name)
            if known is None:
                young[name] = bit
            elif not known & bit:
                if known != before:
                    before, after = known, known | bit
                young[name] = after

    def _turn(self) -> None:
        self._old, self._young = self._young, {}
        self._generation += 1


def _session(request: InferenceRequest) -> bytes:
    for name, value in request.headers:
        if name == _SESSION_HEADER and value:
            return value
    for field in _SESSION_FIELDS:
        session = request.fields.get(field)
        if session and isinstance(session, str):
            return session[:_MOST_BYTES].encode(errors="surrogatepass")
    return b""


def _text(fields: Mapping[str, Any]) -> tuple[list[bytes], bytes]:
    """A request's text in the order that chat templates write it, and what tells its conversation from others."""
    read = [fields[name] for name in ("tools", "system", "instructions") if fields.get(name)]
    messages = fields.get("messages") or fields.get("input")
    if messages and isinstance(messages, str):  # which the next request of the conversation has in a list
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
        prompt = fields.get("prompt") or messages or fields.get("token_ids") or ""
        return _pieces([*read, prompt], _MOST_BYTES), _opening(prompt)
    asked: Any = None  # of the user, first
    for message in messages[:_MOST_VALUES]:
        if isinstance(message, dict):
            role, content = message.get("role"), message.get("content")
            read += (role, content, message.get("tool_calls"))
            if content is None:  # of an agent's prompt on /v1/responses the most: calls and their results
                read += (message.get("arguments"), message.get("output"))
            if role == "user" and not asked:
                asked = content
    return _pieces(read, _MOST_BYTES), _opening(asked)


def _opening(text: Any) -> bytes:
    return b"\0".join(_pieces([text], _OPENING_LETTERS))[:_OPENING_LETTERS]


def _pieces(values: Iterable[Any], most_bytes: int) -> list[bytes]:
    """The texts and token ids of JSON values at any depth, with the names they stand under, until there is enough of them."""
    pieces: list[bytes] = []
    todo, left = [iter(values)], _MOST_VALUES
    while todo:
        for value in todo[-1]:
            if not left or most_bytes <= 0:
                return pieces
            left -= 1
            if isinstance(value, dict):
                todo.append(_read_of(value))
                break
            if isinstance(value, str):
                if value.startswith(_BILLING):
                    continue
                piece = value[:most_bytes].encode(errors="surrogatepass")
            elif not isinstance(value, list):
                continue
            elif value and isinstance(value[0], int):
                piece = _packed(value[: -(-most_bytes // TOKEN_BYTES)])
            else:
                todo.append(iter(value))
                break
            pieces.append(piece)
            most_bytes -= len(piece)
        else:
            todo.pop()
    return pieces


def _read_of(part: Mapping[str, Any]) -> Iterator[Any]:
    """What engines read of an object: alike whether a client sends a text or a part with it."""
    if "text" in part and part.get("type") in _TEXT_PARTS:
        return iter((part["text"],))
    if _CACHE_MARK in part:
        part = {name: value for name, value in part.items() if name != _CACHE_MARK}
    return itertools.chain.from_iterable(part.items())


def _packed(tokens: list[int]) -> bytes:
    try:
        return array("I", tokens).tobytes()
    except (OverflowError, TypeError):
        return b""
