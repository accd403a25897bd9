"""API keys: whose request it is, and what the key may use. Hashes in a file that is read anew when it changes, and in the store.

A key is 32 random bytes, so one SHA-256 is enough: the hash makes no guess easier. The service does not keep the key, and no
error or log line repeats it. More people read metrics, log and spans than the file, so these name a key by the beginning of
its hash.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from serving.config import KeyLimits, strict_yaml
from serving.errors import ConfigError, StoreAwayError, UnauthorizedError
from serving.metrics.table import NO_KEY

# The secret itself, in the form of the file, where no file is mounted.
VARIABLE = "SERVING_KEYS"
_PREFIX = "sk-"
_HEX_DIGITS = 64
_DOTS_OF_TOKEN = 2  # and no key of this service has any
_ID_DIGITS = 12  # enough to tell a file's keys apart, and short in a graph's legend


class Key(KeyLimits):
    """One key, and what it may use. `sha256` is the hash of the secret it was made with, or of whom a token names."""

    name: str = Field(min_length=1, max_length=100)
    sha256: str = Field(pattern=rf"^[0-9a-f]{{{_HEX_DIGITS}}}$")

    @property
    def id(self) -> str:
        """The key's name for readers who do not know the file."""
        return NO_KEY if self.sha256 == ANYONE.sha256 else self.sha256[:_ID_DIGITS]


# The key of every request where the service has no keys.
ANYONE = Key(name="anyone", sha256="0" * _HEX_DIGITS)


class Bearers(Protocol):
    """Those whom an issuer's tokens let in, beside keys."""

    def holder(self, token: bytes) -> Key:
        """Whose token it is; raises UnauthorizedError, and IssuerAwayError while nobody knows the issuer's keys."""

    def owner(self, sha256: str) -> Key | None:
        """Who left work here under this hash; None where it is nobody's that a token named."""


@dataclass(frozen=True)
class KeyRing:
    """The keys of one reading of file and store; `required` is false where the service has none, nor `bearers`.

    `hashes`: of the secrets of stored keys, with the `sha256` of the key that each stands for. `awaited`: the store is still to
    say which keys there are.
    """

    keys: tuple[Key, ...] = ()
    required: bool = False
    hashes: Mapping[str, str] = field(default_factory=dict)
    awaited: bool = False
    bearers: Bearers | None = None
    _by_hash: Mapping[bytes, Key] = field(init=False, repr=False, compare=False)
    _by_secret: Mapping[bytes, tuple[bytes, Key]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_hash = {_bucket(bytes.fromhex(key.sha256)): key for key in self.keys}
        stored = set(self.hashes.values())
        pairs = [(key.sha256, key) for key in self.keys if key.sha256 not in stored]
        pairs += [(shown, by_hash[_bucket(bytes.fromhex(name))]) for shown, name in self.hashes.items()]
        object.__setattr__(self, "_by_hash", by_hash)
        by_secret = {_bucket(bytes.fromhex(shown)): (bytes.fromhex(shown), key) for shown, key in pairs}
        object.__setattr__(self, "_by_secret", by_secret)

    def holder(self, headers: Iterable[tuple[bytes, bytes]]) -> Key:
        """The key that a request shows, as OpenAI's or Anthropic's clients do; raises UnauthorizedError.

        Raises StoreAwayError while nobody knows which keys there are.
        """
        if not self.required:
            return ANYONE
        shown = _shown(headers)
        if shown is None:
            raise UnauthorizedError("No API key was sent; send `Authorization: Bearer KEY`.")
        if self.bearers and shown.count(b".") == _DOTS_OF_TOKEN:
            return self.bearers.holder(shown)
        digest = hashlib.sha256(shown).digest()
        expected, key = self._by_secret.get(_bucket(digest), (bytes(32), None))
        # The time of the look-up tells at most the part of a hash that is no secret.
        if not hmac.compare_digest(digest, expected) or key is None:
            if self.awaited:
                raise StoreAwayError("Which API keys there are is not known yet; try again shortly.")
            raise UnauthorizedError("The API key that was sent is not one of this service's.")
        return key

    def owner(self, sha256: str) -> Key:
        """The key of a hash, for work that it left here; raises UnauthorizedError where it is revoked."""
        if not self.required:
            return ANYONE
        if self.bearers and (bearer := self.bearers.owner(sha256)):
            return bearer
        key = self._by_hash.get(_bucket(bytes.fromhex(sha256)))
        if key is None or key.sha256 != sha256:
            if self.awaited:
                raise StoreAwayError("Which API keys there are is not known yet; try again shortly.")
            raise UnauthorizedError(
                "The API key that this was asked with is no longer one of this service's."
            )
        return key


def parse(text: str | bytes, where: str) -> KeyRing:
    """Read a list of keys; raises ConfigError with the place of each problem, never with its text.

    A text without anything in it is a problem too: a file that was cut off would otherwise revoke every key.
    """
    try:
        raw = yaml.safe_load(text)
        if raw is None:
            raise ConfigError(f"{where} is empty; write `[]` to let nobody in")
        keys = TypeAdapter(tuple[Key, ...]).validate_python(raw)
    except ValidationError as error:
        problems = "; ".join(_explain(dict(problem)) for problem in error.errors(include_input=False))
        raise ConfigError(f"{where}: {problems}; `serving keys new NAME` writes a line of it") from None
    except strict_yaml.FAILURES as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        place = "" if line is None else f", line {line + 1}"
        raise ConfigError(f"{where}{place}: not YAML; `serving keys new NAME` writes a line of it") from None
    for what in ("name", "sha256"):
        seen: dict[str, Key] = {}
        for key in keys:
            if (first := seen.setdefault(getattr(key, what), key)) is not key:
                raise ConfigError(f"{where}: two keys have the {what} of {first.name!r}")
    return KeyRing(keys, required=True)


def _explain(problem: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"]) or "the file"
    return f"{place}: {problem['msg']}"


def new(name: str, **limits: float | None) -> tuple[str, str]:
    """A fresh key, and its line for the file; raises ConfigError, also for a name that would break a line of a terminal."""
    if not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"the name {name!a} has control characters, or blanks at an end; name the key by letters that can be printed"
        )
    key = _PREFIX + secrets.token_urlsafe(32)
    given = {limit: value for limit, value in limits.items() if value is not None}
    entry = {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **given}
    try:
        Key.model_validate(entry)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(dict(problem)) for problem in error.errors())) from None
    return key, yaml.safe_dump([entry], default_flow_style=None, sort_keys=False, width=10_000).strip()


class KeyFile:
    """Where the keys come from: a file, or the variable where no file is named; and the store. Keeps the last good reading."""

    def __init__(
        self,
        path: Path | None,
        secret: str | None = None,
        *,
        adds_up: bool = True,
        stored: bool = False,
        bearers: Bearers | None = None,
    ) -> None:
        """`adds_up`: whether usage is added up, for budgets. `stored`: whether the store has keys too.

        Raises ConfigError where keys are named that can't be read.
        """
        if path and secret is not None:
            raise ConfigError(f"router.keys_file and {VARIABLE} are both set; unset one")
        if stored and not adds_up:
            raise ConfigError("router.keys.stored wants `store`; name a place for it in the YAML")
        self._path = path
        self._adds_up = adds_up
        self._bearers = bearers
        self._file_version: tuple[int, ...] = ()
        self._ahead: tuple[tuple[int, ...], KeyRing | str] | None = None
        self._problem = ""
        # Of the stored keys that are in force; None where there are none to be.
        self.version: str | None = "" if stored else None
        self._hashes: dict[str, str] = {}
        self._stored: tuple[Key, ...] = ()
        self._taken = False
        self.tell: Callable[[str, Mapping[str, Any]], None] = lambda *_: None  # of changes, to the audit log
        self._of_file = self._parse(secret, VARIABLE) if secret is not None else KeyRing(required=stored)
        self.ring = self._merged()
        if path:
            try:
                self._read(path)
            except OSError as error:
                raise ConfigError(f"router.keys_file {path}: {error.strerror}") from None

    @classmethod
    def of(
        cls, path: str | None, *, adds_up: bool = True, stored: bool = False, bearers: Bearers | None = None
    ) -> "KeyFile":
        file = Path(path) if path else None
        return cls(file, os.environ.get(VARIABLE), adds_up=adds_up, stored=stored, bearers=bearers)

    def take(self, version: str, entries: Iterable[Mapping[str, Any]]) -> None:
        """The keys that the store has now; they are in force with the next refresh."""
        keys, hashes = [], {}
        for entry in entries:
            try:
                key = Key.model_validate({name: value for name, value in entry.items() if name != "hashes"})
            except ValidationError as error:  # written by another version
                why = "; ".join(_explain(dict(problem)) for problem in error.errors(include_input=False))
                self.tell("keys_refused", {"problem": f"stored key {entry['name']!r}: {why}"})
                continue
            keys.append(key)
            hashes.update(dict.fromkeys(entry["hashes"], key.sha256))
        self._stored, self._hashes, self.version, self._taken = tuple(keys), hashes, version, True

    @property
    def behind(self) -> bool:
        """Whether the file has changed since it was read, by this or by `read_ahead`."""
        try:
            version = _version(self._path) if self._path else self._file_version
        except OSError:
            return False
        return version != self._file_version and not (self._ahead and self._ahead[0] == version)

    def read_ahead(self) -> None:
        """Read a changed file for the next `refresh`. On any thread, one at a time: a thousand keys take a second of YAML."""
        if self._path:
            with contextlib.suppress(OSError):  # which `refresh` finds too, and tells
                self._ahead = self._reading(self._path)

    def refresh(self) -> bool:
        """Take over what the store has, and read the file if it changed; true where there are new keys.

        A file that can't be read raises ConfigError, once: the keys stay as they were.
        """
        before = self.ring.keys
        if self._taken:
            self._taken = False
            self.ring = self._merged()
            self.tell("keys", _difference(before, self.ring.keys))
            return True
        if not self._path:
            return False
        try:
            if _version(self._path) == self._file_version:
                return False
            self._read(self._path)
        except (OSError, ConfigError) as error:
            problem = error.message if isinstance(error, ConfigError) else f"{self._path}: {error.strerror}"
            if problem == self._problem:
                return False
            self._problem = problem
            self.tell("keys_refused", {"problem": problem})
            raise ConfigError(problem) from None
        self._problem = ""
        self.tell("keys", _difference(before, self.ring.keys))
        return True

    def _read(self, path: Path) -> None:
        """Take over the file's keys. Its version is kept last: a file that can't be read now is read again."""
        if not self._ahead or self._ahead[0] != _version(path):
            self._ahead = self._reading(path)
        version, found = self._ahead
        if isinstance(found, str):
            raise ConfigError(found)
        self._ahead = None
        self._of_file = found
        self.ring = self._merged()
        self._file_version = version

    def _reading(self, path: Path) -> tuple[tuple[int, ...], KeyRing | str]:
        """The file's version, and its keys or what is wrong with them. Raises OSError."""
        version = _version(path)
        try:
            return version, self._parse(path.read_bytes(), str(path))
        except ConfigError as error:
            return version, error.message

    def _merged(self) -> KeyRing:
        """The file's keys, and those of the store by other names; and who comes with a token."""
        required = self._of_file.required or self._bearers is not None
        if self.version is None:
            if (required, self._bearers) == (self._of_file.required, self._of_file.bearers):
                return self._of_file
            return replace(self._of_file, required=required, bearers=self._bearers)
        taken = {key.name for key in self._of_file.keys} | {key.sha256 for key in self._of_file.keys}
        stored = tuple(key for key in self._stored if not {key.name, key.sha256} & taken)
        names = {key.sha256 for key in stored}
        hashes = {shown: name for shown, name in self._hashes.items() if name in names}
        every = (*self._of_file.keys, *stored)
        return KeyRing(every, True, hashes, awaited=not self.version, bearers=self._bearers)

    def _parse(self, text: str | bytes, where: str) -> KeyRing:
        ring = parse(text, where)
        if not self._adds_up and (limited := next((key for key in ring.keys if key.has_budget), None)):
            raise ConfigError(
                f"{where}: key {limited.name!r} has a budget, and nothing adds up what keys use; set `store` in the YAML"
            )
        return ring


def _difference(before: Iterable[Key], after: Iterable[Key]) -> dict[str, list[str]]:
    """The ids of keys that came, went, and got other limits."""
    old, new = ({key.id: key for key in keys} for keys in (before, after))
    return {
        "added": sorted(new.keys() - old.keys()),
        "removed": sorted(old.keys() - new.keys()),
        "changed": sorted(key for key in old.keys() & new.keys() if old[key] != new[key]),
    }


def _version(path: Path) -> tuple[int, ...]:
    """Changes with every way to write a file, also where a secret's symbolic link is swapped."""
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _bucket(digest: bytes) -> bytes:
    return digest[:8]


def _shown(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return None
