"""Tokens of an OpenID Connect issuer (`router.oidc`): whose request it is, and what it may use, by the token's claims.

A router asks for the issuer's public keys when it starts, every quarter of an hour, and when a token names an unknown key. No request
waits for that. A token that was found good is remembered until it ends.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp
import jwt

from serving.config import KeyLimits, OidcRule, OidcSpec, is_encrypted
from serving.errors import IssuerAwayError, UnauthorizedError
from serving.router.http.auth import Key

logger = logging.getLogger("ray.serve")

# Signatures that the issuer's public key checks. None by a shared secret: who knows the public key could make one.
_ALGORITHMS = [f"{kind}{bits}" for kind in ("RS", "PS", "ES") for bits in (256, 384, 512)] + ["EdDSA"]
_MOST_TOKEN_BYTES = 8 << 10
_MOST_REMEMBERED = 10_000
_LEEWAY_S = 30.0  # of the issuer's clock and ours
_ASKED_AGAIN_S = 900.0
_LEAST_S = 10.0  # between two questions to the issuer
_TIMEOUT = aiohttp.ClientTimeout(total=10)
_MOST_BYTES = 1 << 20  # of an answer
# The end of the hash of everyone whom a token names: work that is left here is known by the hash alone.
_MARK = "01dc01dc"
_NAME_CHARS = 60
_LIMITS = tuple(KeyLimits.model_fields)

K = TypeVar("K")
V = TypeVar("V")


class Oidc:
    """One router's knowledge of the issuer. `clock` is a calendar's, in seconds since 1970."""

    def __init__(self, spec: OidcSpec, clock: Callable[[], float] = time.time) -> None:
        self._spec = spec
        self._clock = clock
        self._keys: Mapping[str | None, Any] = {}
        self._listed: Mapping[str, Any] = {}
        self._known: dict[bytes, tuple[Key, float]] = {}  # by the hash of a token, until when
        self._owners: dict[str, Key] = {}
        self._asked_s = -_LEAST_S
        self._wanted = asyncio.Event()
        self._problem = ""

    async def start(self) -> None:
        """Ask the issuer once, and go on asking until closed. A service without an issuer starts all the same."""
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        await self.refresh()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._session.close()

    def holder(self, token: bytes) -> Key:
        """Whose token it is; raises UnauthorizedError, and IssuerAwayError while the issuer's keys are not known."""
        digest, now_s = hashlib.sha256(token).digest(), self._clock()
        if known := self._known.get(digest):
            if now_s < known[1]:
                return known[0]
            del self._known[digest]
        claims = self._claims(token)
        key = self._key(claims)
        _remember(self._known, digest, (key, claims["exp"] + _LEEWAY_S))
        _remember(self._owners, key.sha256, key)
        return key

    def owner(self, sha256: str) -> Key | None:
        """Who left work here under this hash, with the limits of their last token here; None where it is no token's."""
        if not sha256.endswith(_MARK):
            return None
        return self._owners.get(sha256) or Key(name=f"token ({sha256[:12]})", sha256=sha256)

    async def refresh(self) -> None:
        """Ask the issuer for its keys; those that are known stay where it does not answer."""
        self._asked_s = asyncio.get_running_loop().time()
        try:
            listed = await self._fetched(await self._place())
            # None at all is an answer: the issuer has taken its last key back.
            every = jwt.PyJWKSet.from_dict(listed).keys if listed.get("keys") != [] else ()
            # PyJWT holds an RSA key without `alg`, which is optional (RFC 7517, 4.4), to RS256; without its wrapper it has any of RSA's.
            free = {
                entry.get("kid")
                for entry in listed.get("keys", ())
                if isinstance(entry, dict) and entry.get("kty") == "RSA" and not entry.get("alg")
            }
            keys = {
                key.key_id: key.key if key.key_id in free else key
                for key in every
                if key.public_key_use in (None, "sig")
            }
        except Exception as error:  # noqa: BLE001  aiohttp and PyJWT raise anything for odd answers, as AssertionError for the URL `//keys`
            problem = str(error) or type(error).__name__
            if problem != self._problem:
                logger.error("the keys of the issuer %s are not to be had: %s", self._spec.issuer, problem)  # noqa: TRY400
            self._problem = problem
            return
        self._problem = ""
        if listed != self._listed:
            self._known.clear()  # of a key that was taken back no token is good, nor of one whose name another has
        self._listed = listed
        self._keys = keys

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ASKED_AGAIN_S if self._keys else _LEAST_S):
                    await self._wanted.wait()
            since_s = asyncio.get_running_loop().time() - self._asked_s
            await asyncio.sleep(max(0.0, _LEAST_S - since_s))
            self._wanted.clear()
            await self.refresh()

    async def _place(self) -> str:
        if self._spec.jwks_url:
            return self._spec.jwks_url
        document = await self._fetched(self._spec.issuer.rstrip("/") + "/.well-known/openid-configuration")
        if document.get("issuer") != self._spec.issuer:
            raise ValueError(f"it calls itself {str(document.get('issuer'))[:200]!r}")
        if not isinstance(place := document.get("jwks_uri"), str):
            raise TypeError("it names no place of its keys (jwks_uri); set router.oidc.jwks_url")
        if not is_encrypted(place):
            raise ValueError(
                f"it names {place[:200]!r} as the place of its keys (jwks_uri), and an https URL is needed"
            )
        return place

    async def _fetched(self, url: str) -> dict[str, Any]:
        async with self._session.get(url, allow_redirects=False) as answer:
            if answer.status != HTTPStatus.OK:
                raise ValueError(f"{url} answers {answer.status}, and no redirect is followed")
            text = b""
            async for piece in answer.content.iter_chunked(_MOST_BYTES):
                text += piece
                if len(text) > _MOST_BYTES:
                    raise ValueError(f"{url} gives more than {_MOST_BYTES} bytes")
        document = json.loads(text)
        if not isinstance(document, dict):
            raise TypeError(f"{url} gives no JSON object")
        return document

    def _claims(self, token: bytes) -> dict[str, Any]:
        if len(token) > _MOST_TOKEN_BYTES:
            raise UnauthorizedError(f"The token is longer than {_MOST_TOKEN_BYTES} bytes.")
        if not self._keys:
            raise IssuerAwayError("The keys of the issuer of tokens are not known yet; try again shortly.")
        try:
            name = jwt.get_unverified_header(token).get("kid")
            # A token that names no key is of the only one.
            key = (
                next(iter(self._keys.values()))
                if name is None and len(self._keys) == 1
                else self._keys.get(name)
            )
            if key is None:
                self._wanted.set()
                raise UnauthorizedError(
                    "The token is signed with a key that its issuer did not list of late; try again shortly, or get a new one."
                )
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=_ALGORITHMS,
                audience=self._spec.audience,
                issuer=self._spec.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud", self._spec.name]},
            )
            claims["exp"] = float(claims["exp"])
        except jwt.ExpiredSignatureError:
            raise UnauthorizedError("The token has ended; get a new one from its issuer.") from None
        except jwt.ImmatureSignatureError:
            raise UnauthorizedError(
                "The token is not good yet (nbf, iat); the clocks of its issuer and of this service may differ."
            ) from None
        except jwt.InvalidAudienceError:
            raise UnauthorizedError(
                f"The token is for another service than {self._spec.audience!r}."
            ) from None
        except jwt.InvalidIssuerError:
            raise UnauthorizedError(f"The token is not one of {self._spec.issuer}.") from None
        except jwt.MissingRequiredClaimError as error:
            raise UnauthorizedError(f"The token has no claim {error.claim!r}.") from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise UnauthorizedError("The API key that was sent is neither a key nor a good token.") from None
        return claims

    def _key(self, claims: Mapping[str, Any]) -> Key:
        rules = self._spec.rules or (OidcRule(),)
        rule = next((rule for rule in rules if _fits(rule, claims)), None)
        if rule is None:
            raise UnauthorizedError(
                "The token's claims are none that this service lets in (router.oidc.rules)."
            )
        subject = claims[self._spec.name]
        if not isinstance(subject, str) or not subject or not subject.isprintable():
            raise UnauthorizedError(f"The token's claim {self._spec.name!r} is no name.")
        digest = hashlib.sha256(f"{self._spec.issuer}\0{subject}".encode()).hexdigest()
        sha256 = digest[: -len(_MARK)] + _MARK
        name = f"{subject[:_NAME_CHARS]} ({sha256[:12]})"
        return Key(name=name, sha256=sha256, **{limit: getattr(rule, limit) for limit in _LIMITS})


def _remember(known: dict[K, V], name: K, value: V) -> None:
    """The latest stands last; of too many the one goes that was remembered longest ago."""
    known.pop(name, None)
    if len(known) >= _MOST_REMEMBERED:
        del known[next(iter(known))]
    known[name] = value


def _fits(rule: OidcRule, claims: Mapping[str, Any]) -> bool:
    def has(name: str, value: str) -> bool:
        claim = claims.get(name)
        return value in claim if isinstance(claim, list) else claim == value

    return all(has(name, value) for name, value in rule.where.items())
