"""API keys: whose request it is, and what the key may use. A file of hashes, read anew when it changes.

A key is 32 random bytes, so one SHA-256 is enough: the hash makes no guess easier. The service does not keep the key, and no
error or log line repeats it. More people read metrics, log and spans than the file, so these name a key by the beginning of
its hash.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from serving.errors import ConfigError, UnauthorizedError
from serving.metrics.table import NO_KEY

# The secret itself, in the form of the file, where no file is mounted.
VARIABLE = "SERVING_KEYS"
_PREFIX = "sk-"
_MOST = 10**12  # of any limit: headers tell it in full, and sums of it stay exact
_HEX_DIGITS = 64
_ID_DIGITS = 12  # enough to tell a file's keys apart, and short in a graph's legend


class Key(BaseModel):
    """One key of the file. A limit that is left out does not exist. `priority` is strict; `weight` shares within a priority."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=100)
    sha256: str = Field(pattern=rf"^[0-9a-f]{{{_HEX_DIGITS}}}$")
    requests_per_minute: float | None = Field(default=None, gt=0, le=_MOST, allow_inf_nan=False)
    tokens_per_minute: float | None = Field(default=None, gt=0, le=_MOST, allow_inf_nan=False)
    concurrency: int | None = Field(default=None, ge=1, le=_MOST)
    tokens_per_day: float | None = Field(default=None, gt=0, le=_MOST, allow_inf_nan=False)
    dollars_per_month: float | None = Field(default=None, gt=0, le=_MOST, allow_inf_nan=False)
    priority: int = Field(default=0, ge=-100, le=100)
    weight: float = Field(default=1, ge=0.001, le=1000, allow_inf_nan=False)

    @property
    def has_budget(self) -> bool:
        return self.tokens_per_day is not None or self.dollars_per_month is not None

    @property
    def id(self) -> str:
        """The key's name for readers who do not know the file."""
        return NO_KEY if self.sha256 == ANYONE.sha256 else self.sha256[:_ID_DIGITS]


# The key of every request where the service has no keys.
ANYONE = Key(name="anyone", sha256="0" * _HEX_DIGITS)


@dataclass(frozen=True)
class KeyRing:
    """The keys of one reading of the file; `required` is false where the service has none."""

    keys: tuple[Key, ...] = ()
    required: bool = False
    _by_hash: Mapping[bytes, Key] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_hash", {_bucket(bytes.fromhex(key.sha256)): key for key in self.keys})

    def holder(self, headers: Iterable[tuple[bytes, bytes]]) -> Key:
        """The key that a request shows, as OpenAI's or Anthropic's clients do; raises UnauthorizedError."""
        if not self.required:
            return ANYONE
        shown = _shown(headers)
        if shown is None:
            raise UnauthorizedError("No API key was sent; send `Authorization: Bearer KEY`.")
        digest = hashlib.sha256(shown).digest()
        key = self._by_hash.get(_bucket(digest))
        # The time of the look-up tells at most the part of a hash that is no secret.
        if not hmac.compare_digest(digest, bytes.fromhex(key.sha256) if key else bytes(32)) or key is None:
            raise UnauthorizedError("The API key that was sent is not one of this service's.")
        return key

    def owner(self, sha256: str) -> Key:
        """The key of a hash, for work that it left here; raises UnauthorizedError where it is revoked."""
        if not self.required:
            return ANYONE
        key = self._by_hash.get(_bucket(bytes.fromhex(sha256)))
        if key is None or key.sha256 != sha256:
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
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        place = "" if line is None else f", line {line + 1}"
        raise ConfigError(f"{where}{place}: not YAML; `serving keys NAME` writes a line of it") from None
    except ValidationError as error:
        problems = "; ".join(_explain(dict(problem)) for problem in error.errors(include_input=False))
        raise ConfigError(f"{where}: {problems}; `serving keys NAME` writes a line of it") from None
    for what in ("name", "sha256"):
        values = [getattr(key, what) for key in keys]
        if twice := next((key for key in keys if values.count(getattr(key, what)) > 1), None):
            raise ConfigError(f"{where}: two keys have the {what} of {twice.name!r}")
    return KeyRing(keys, required=True)


def _explain(problem: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"]) or "the file"
    return f"{place}: {problem['msg']}"


def new(name: str, **limits: float | None) -> tuple[str, str]:
    """A fresh key, and its line for the file; raises ConfigError."""
    key = _PREFIX + secrets.token_urlsafe(32)
    given = {limit: value for limit, value in limits.items() if value is not None}
    entry = {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **given}
    line = yaml.safe_dump([entry], default_flow_style=None, sort_keys=False, width=10_000)
    parse(line, "this key")
    return key, line.strip()


class KeyFile:
    """Where the keys come from: a file, or the variable where no file is named. Keeps the last good reading."""

    def __init__(self, path: Path | None, secret: str | None = None, *, adds_up: bool = True) -> None:
        """`adds_up`: whether usage is added up, for budgets. Raises ConfigError where keys are named that can't be read."""
        if path and secret is not None:
            raise ConfigError(f"router.keys_file and {VARIABLE} are both set; unset one")
        self._path = path
        self._adds_up = adds_up
        self._version: tuple[int, ...] = ()
        self._problem = ""
        self.tell: Callable[[str, Mapping[str, Any]], None] = lambda *_: None  # of changes, to the audit log
        self.ring = self._parse(secret, VARIABLE) if secret is not None else KeyRing()
        if path:
            try:
                self._take(path)
            except OSError as error:
                raise ConfigError(f"router.keys_file {path}: {error.strerror}") from None

    @classmethod
    def of(cls, path: str | None, *, adds_up: bool = True) -> "KeyFile":
        return cls(Path(path) if path else None, os.environ.get(VARIABLE), adds_up=adds_up)

    def refresh(self) -> bool:
        """Read the file if it changed; true where there are new keys.

        A file that can't be read raises ConfigError, once: the keys stay as they were.
        """
        if not self._path:
            return False
        before = self.ring.keys
        try:
            if _version(self._path) == self._version:
                return False
            self._take(self._path)
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

    def _take(self, path: Path) -> None:
        """Take over the file's keys. Its version is kept last: a file that can't be read now is read again."""
        version = _version(path)
        self.ring = self._parse(path.read_bytes(), str(path))
        self._version = version

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
