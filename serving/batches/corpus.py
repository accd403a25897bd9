"""A file of lines that is answered offline, and the file of its results, which says where an earlier run has ended.

The results are one JSON object a line, as those of a batch, in the order in which they come. A result is there once `add` has
returned. What a run that was killed has half written is cut off.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from serving.batches import lines
from serving.errors import ConfigError, StorageError

NAME = "run"  # of the batch, in the ids of its lines
MOST_LINE_BYTES = 64 << 20
_BEGINS = b'{"id": "batch_req_%s_' % NAME.encode()
_PIECE_LINES, _PIECE_BYTES = 16, 1 << 20
_MOST_PIECES = 4096

Name = str | int  # of a line: its custom_id or, where that can't be told, its number


@dataclass(frozen=True)
class Piece:
    """Lines of the input one after the other; those in `without` have a result. `number` is the first one's."""

    number: int
    start: int
    bytes: int
    lines: int
    without: frozenset[int]


class Results:
    """The file of results, of one run at a time."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError and StorageError."""
        self._path = path
        _is_file(path)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{path} can't be written ({error.strerror}); name another file with -o"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise ConfigError(
                f"another run writes {path}; wait for it, or name another file with -o"
            ) from None
        self.names: set[Name] = set()
        self.failed = 0
        self.models: Counter[str] = Counter()  # of answers that an earlier run has left
        self._end = 0
        try:
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def __len__(self) -> int:
        return len(self.names)

    def add(self, results: Sequence[str]) -> None:
        """Keep the first result of each line: all of them are on disk afterwards or, where it raises, none. Raises StorageError."""
        by_name: dict[Name, tuple[str, bool]] = {}
        for result in results:
            name, failed = _found(json.loads(result))
            if name not in self.names:  # who asks may be killed, and ask again
                by_name.setdefault(name, (result, failed))
        self._append("".join(result + "\n" for result, _ in by_name.values()).encode())
        for name, (_, failed) in by_name.items():
            self._has(name, failed=failed)

    def close(self) -> None:
        os.close(self._file)

    def _append(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._end + written)
            os.fsync(self._file)
            self._end += len(data)
        except BaseException as error:
            os.ftruncate(self._file, self._end)
            if not isinstance(error, OSError):  # an interrupt
                raise
            raise StorageError(
                f"{self._path} can't be written ({error.strerror}); results that were there stay. Make room, and run this again."
            ) from error

    def _read(self) -> None:
        ends = True
        with self._path.open("rb") as file:
            for at, text in enumerate(file, 1):
                try:
                    result = json.loads(text) if text.strip() else None  # editors leave empty lines
                    entry = _found(result) if text.strip() else None
                except (ValueError, KeyError, TypeError):
                    if not text.endswith(b"\n") and text.startswith(_BEGINS[: len(text)]):
                        break  # half a result
                    raise ConfigError(
                        f"{self._path}, line {at}, is no result of a run; name another file with -o"
                    ) from None
                if entry:
                    self._has(entry[0], failed=entry[1])
                    self.models.update(_model(result))
                self._end += len(text)
                ends = text.endswith(b"\n")
        os.ftruncate(self._file, self._end)
        if not ends:
            self._append(b"\n")

    def _has(self, name: Name, *, failed: bool) -> None:
        self.failed += failed
        self.names.add(name)


class Corpus:
    """A file of lines, and what of it a run has still to ask: `pieces`, and results of lines that are no good in `refused`."""

    def __init__(self, path: Path, model: str, results: Results) -> None:
        """Looks at every line; raises ConfigError."""
        self.path = path
        self.model = model
        self.total = 0
        self.pieces: list[Piece] = []
        self.refused: list[str] = []
        with _opened(path) as file:
            seen = self._look_at(file, results)
        if foreign := results.names - seen:
            some = next(iter(foreign))
            which = f"line {some}" if isinstance(some, int) else f"custom_id {json.dumps(some)}"
            raise ConfigError(
                f"the file of results has {len(foreign)} that are of no line of {path} as it is now, the one of {which} for "
                "example; take them out, or name another file with -o"
            )
        if not self.total:
            raise ConfigError(f"{path} has no line")

    def _look_at(self, file: IO[bytes], results: Results) -> set[Name]:
        """Sort its lines; their names."""
        seen: set[Name] = set()
        piece = _Open(1, 0)
        for number, start, text in numbered(file):
            if not text.strip():
                continue
            self.total += 1
            custom_id, refused = _looked_at(text, self.model)
            if custom_id in seen:  # a custom_id has one result, that of its first line
                message = f"An earlier line has the custom_id {json.dumps(custom_id)}."
                custom_id, refused = None, refused or lines.LineError("duplicate_custom_id", message)
            name = number if custom_id is None else custom_id
            seen.add(name)
            done = name in results.names
            if refused and not done:
                self.refused.append(lines.refused(NAME, number, custom_id, refused.code, refused.message))
            if piece.lines >= _PIECE_LINES or piece.bytes >= _PIECE_BYTES:
                self._close(piece)
                piece = _Open(number, start)
            piece.take(number, start, len(text), asks=not (refused or done))
        self._close(piece)
        return seen

    def parts(self) -> list[list[Piece]]:
        """The pieces, some together where there are very many."""
        pieces_each = -(-len(self.pieces) // _MOST_PIECES) or 1
        return [self.pieces[at : at + pieces_each] for at in range(0, len(self.pieces), pieces_each)]

    def _close(self, piece: "_Open") -> None:
        if piece.asks:
            self.pieces.append(
                Piece(piece.number, piece.start, piece.bytes, piece.asks, frozenset(piece.without))
            )


class _Open:
    """A piece that is being filled."""

    def __init__(self, number: int, start: int) -> None:
        self.number = number
        self.start = start
        self.bytes = 0
        self.lines = 0
        self.asks = 0
        self.without: list[int] = []

    def take(self, number: int, start: int, size: int, *, asks: bool) -> None:
        self.bytes = start + size - self.start
        self.lines += 1
        self.asks += asks
        if not asks:
            self.without.append(number)


def lines_of(path: Path, piece: Piece) -> Iterator[tuple[int, bytes]]:
    """The lines of a piece that are to be asked, with their numbers."""
    with path.open("rb") as file:
        file.seek(piece.start)
        at = 0
        for number, start, text in numbered(file, piece.number):
            if at >= piece.bytes:
                return
            at = start + len(text)
            if text.strip() and number not in piece.without:
                yield number, text


def read(text: bytes, model: str) -> lines.Asked:
    """A line for `model`; raises LineError."""
    if len(text) > MOST_LINE_BYTES:
        raise lines.LineError("line_too_long", f"A line has at most {MOST_LINE_BYTES} bytes.")
    return lines.asked(text, lines.ENDPOINTS, (model,), model)


def _looked_at(text: bytes, model: str) -> tuple[str | None, lines.LineError | None]:
    try:
        return read(text, model).custom_id, None
    except lines.LineError as error:
        return error.custom_id, error


def numbered(file: IO[bytes], first: int = 1) -> Iterator[tuple[int, int, bytes]]:
    """Lines with their numbers and where each starts; of one that is too long, one byte more than a line may have."""
    number, at = first, 0
    while text := file.readline(MOST_LINE_BYTES + 1):
        start, at = at, at + len(text)
        while not text.endswith(b"\n") and len(text) > MOST_LINE_BYTES and (more := file.readline(1 << 20)):
            at += len(more)
            if more.endswith(b"\n"):
                break
        yield number, start, text
        number += 1


def _is_file(path: Path) -> None:
    """Or nothing yet; raises ConfigError for what can't be read twice."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{path} is a pipe or a device; a file is needed, which a later run can read again")


def _opened(path: Path) -> IO[bytes]:
    _is_file(path)
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror})") from None


def _model(result: Any) -> list[str]:
    """The model that gave an answer, where the answer says so."""
    response = result["response"]
    answer = response.get("body") if isinstance(response, dict) else None
    model = answer.get("model") if isinstance(answer, dict) else None
    return [model] if isinstance(model, str) else []


def _found(result: Any) -> tuple[Name, bool]:
    """Of a result: its line's name, and whether it is a failure. Raises KeyError and such."""
    custom_id, error, response = result["custom_id"], result["error"], result["response"]
    if custom_id is not None and not isinstance(custom_id, str):
        raise TypeError
    name = int(error["line"]) if custom_id is None else custom_id
    return name, error is not None or response["status_code"] >= 400
