"""Tokens of an issuer: a real one over HTTP, with keys of its own."""

import asyncio
import base64
import hmac
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from support.fronts import front
from support.servers import asgi_server
from support.simulated_engine import MODEL

from serving.config import OidcSpec
from serving.errors import IssuerAwayError, UnauthorizedError
from serving.router.http import oidc as oidc_of_routers
from serving.router.http.auth import KeyFile
from serving.router.http.oidc import Oidc

pytestmark = pytest.mark.http

AUDIENCE = "tpu-serving"


@dataclass
class Issuer:
    """Signs with one of its keys, and lists those that it has now."""

    address: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    asked: int = 0
    answer: bytes | None = None  # in place of all others

    def add(self, name: str, key: Any) -> None:
        self.keys[name] = key

    def token(self, name: str = "one", **claims: Any) -> bytes:
        said = {"iss": self.address, "aud": AUDIENCE, "sub": "alpha", "exp": time.time() + 60} | claims
        said = {claim: value for claim, value in said.items() if value is not None}
        key = self.keys[name]
        kind = "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256"
        return jwt.encode(said, key, kind, headers={"kid": name}).encode()

    def app(self) -> Starlette:
        async def configuration(_: Request) -> Response:
            if self.answer is not None:
                return Response(self.answer.replace(b"ISSUER", self.address.encode()))
            return JSONResponse({"issuer": self.address, "jwks_uri": f"{self.address}/keys"})

        async def keys(_: Request) -> Response:
            self.asked += 1
            if self.answer is not None:
                return Response(self.answer)
            listed = []
            for name, key in self.keys.items():
                kind = (
                    jwt.algorithms.RSAAlgorithm
                    if isinstance(key, rsa.RSAPrivateKey)
                    else jwt.algorithms.ECAlgorithm
                )
                listed.append(json.loads(kind.to_jwk(key.public_key())) | {"kid": name, "use": "sig"})
            return JSONResponse({"keys": listed})

        return Starlette(
            routes=[Route("/.well-known/openid-configuration", configuration), Route("/keys", keys)]
        )


@pytest.fixture(scope="module")
def signing() -> Any:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture
def issuer(signing: Any) -> Iterator[Issuer]:
    made = Issuer()
    made.add("one", signing)
    with asgi_server(made.app()) as address:
        made.address = address
        yield made


async def ready(issuer: Issuer, **spec: Any) -> Oidc:
    """What a router knows that has asked the issuer once."""
    oidc = Oidc(OidcSpec.model_validate({"issuer": issuer.address, "audience": AUDIENCE} | spec))
    await oidc.start()
    await oidc.close()
    return oidc


async def test_a_token_lets_in_with_the_limits_of_the_first_rule_that_fits(issuer: Issuer) -> None:
    rules = [
        {"where": {"groups": "research", "tier": "gold"}, "concurrency": 8, "priority": 5},
        {"where": {"groups": "research"}, "tokens_per_minute": 1000},
    ]
    oidc = await ready(issuer, rules=rules)
    gold = oidc.holder(issuer.token(groups=["staff", "research"], tier="gold"))
    assert (gold.concurrency, gold.priority, gold.tokens_per_minute) == (8, 5, None)
    other = oidc.holder(issuer.token(groups="research", sub="beta"))
    assert (other.concurrency, other.tokens_per_minute) == (None, 1000)
    assert gold.sha256 != other.sha256
    assert oidc.holder(issuer.token(groups="research")).sha256 == gold.sha256
    assert oidc.owner(gold.sha256)
    assert oidc.owner("0" * 64) is None
    with pytest.raises(UnauthorizedError, match=r"router\.oidc\.rules"):
        oidc.holder(issuer.token(groups="sales"))


async def test_a_token_of_a_curve_s_key_lets_in_too(issuer: Issuer) -> None:
    issuer.add("two", ec.generate_private_key(ec.SECP256R1()))
    oidc = await ready(issuer, name="email")
    assert oidc.holder(issuer.token("two", email="a@example.com")).name.startswith("a@example.com (")


@pytest.mark.parametrize(
    ("listed", "good"),
    [({}, {"RS256", "RS512", "PS256"}), ({"alg": "PS256"}, {"PS256"})],
    ids=["of any", "of one"],
)
async def test_an_rsa_key_is_good_for_the_algorithm_that_its_issuer_lists_or_for_each_of_its_kind(
    issuer: Issuer, listed: dict[str, str], good: set[str]
) -> None:
    """An issuer that lists no algorithm and signs by another than RS256 let nobody in."""
    key = issuer.keys["one"]
    public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
    issuer.answer = json.dumps({"keys": [public | {"kid": "one"} | listed]}).encode()
    oidc = await ready(issuer, jwks_url=f"{issuer.address}/keys")
    claims = {"iss": issuer.address, "aud": AUDIENCE, "sub": "alpha", "exp": time.time() + 60}
    let_in = set()
    for algorithm in ("RS256", "RS512", "PS256"):
        with suppress(UnauthorizedError):
            oidc.holder(jwt.encode(claims, key, algorithm, headers={"kid": "one"}).encode())
            let_in.add(algorithm)
    assert let_in == good


@pytest.mark.parametrize(
    ("claims", "problem"),
    [
        ({"exp": 1}, "has ended"),
        ({"exp": None}, "has no claim 'exp'"),
        ({"aud": "another"}, "for another service"),
        ({"iss": "https://elsewhere.example"}, "is not one of"),
        ({"sub": None}, "has no claim 'sub'"),
        ({"sub": ""}, "neither a key nor a good token|is no name"),
        ({"sub": "a\ud800"}, "is no name"),
        ({"sub": "a\nb\x1b[2J"}, "is no name"),
        ({"exp": "soon"}, "neither a key nor a good token"),
        ({"exp": []}, "neither a key nor a good token"),
        ({"exp": 10**400}, "neither a key nor a good token"),
        ({"nbf": 4e9}, "is not good yet"),
        ({"iat": 4e9}, "is not good yet"),
    ],
)
async def test_a_token_that_is_not_good_is_refused(
    issuer: Issuer, claims: dict[str, Any], problem: str
) -> None:
    oidc = await ready(issuer)
    token = issuer.token(**claims)
    for _ in range(2):
        with pytest.raises(UnauthorizedError, match=problem) as refused:
            oidc.holder(token)
        assert token.decode() not in refused.value.message


def forged(issuer: Issuer) -> dict[str, bytes]:
    head, claims, signature = issuer.token().split(b".")
    public = issuer.keys["one"].public_key()
    secret = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def encoded(data: bytes) -> bytes:
        return base64.urlsafe_b64encode(data).rstrip(b"=")

    def part(fields: Any) -> bytes:
        return encoded(json.dumps(fields).encode())

    shared = part({"alg": "HS256", "typ": "JWT", "kid": "one"}) + b"." + claims
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    said = json.loads(base64.urlsafe_b64decode(claims + b"=="))
    return {
        "another's claims": head + b"." + part(said | {"sub": "beta"}) + b"." + signature,
        "no signature": part({"alg": "none", "kid": "one"}) + b"." + claims + b".",
        "signed with the public key": shared + b"." + encoded(hmac.digest(secret, shared, "sha256")),
        "signed with another key": jwt.encode(said, other, "RS256", headers={"kid": "one"}).encode(),
        "nested": base64.urlsafe_b64encode(b"[" * 3000) + b".x.x",
        "dots": b"..",
        "bytes": b"\xff.\xff.\xff",
        "long": b"a" * 9000 + b".a.a",
        "a list for a key's name": part({"alg": "RS256", "kid": []}) + b"." + claims + b"." + signature,
    }


async def test_a_forged_token_is_refused(issuer: Issuer) -> None:
    oidc = await ready(issuer)
    oidc.holder(issuer.token())
    for what, token in forged(issuer).items():
        try:
            oidc.holder(token)
        except UnauthorizedError:
            continue
        pytest.fail(f"{what} lets in")


async def test_a_token_of_a_key_whose_name_another_key_has_now_is_good_no_more(issuer: Issuer) -> None:
    oidc = await ready(issuer)
    old = issuer.token()
    oidc.holder(old)
    issuer.add("one", rsa.generate_private_key(public_exponent=65537, key_size=2048))
    await oidc.start()
    await oidc.close()
    with pytest.raises(UnauthorizedError):
        oidc.holder(old)


async def test_a_new_key_of_the_issuer_is_asked_for_and_one_that_was_taken_back_is_good_no_more(
    issuer: Issuer,
) -> None:
    oidc = await ready(issuer)
    old = issuer.token()
    oidc.holder(old)
    issuer.keys = {"two": rsa.generate_private_key(public_exponent=65537, key_size=2048)}
    with pytest.raises(UnauthorizedError, match="did not list of late"):
        oidc.holder(issuer.token("two"))
    assert oidc._wanted.is_set()
    oidc.holder(old)
    await oidc.start()
    await oidc.close()
    oidc.holder(issuer.token("two"))
    with pytest.raises(UnauthorizedError):
        oidc.holder(old)


async def test_an_issuer_that_takes_its_only_key_back_lets_nobody_in(issuer: Issuer) -> None:
    oidc = Oidc(OidcSpec.model_validate({"issuer": issuer.address, "audience": AUDIENCE}))
    await oidc.start()
    token = issuer.token()
    assert oidc.holder(token)
    issuer.keys.clear()
    await oidc.refresh()
    await oidc.close()
    with pytest.raises(IssuerAwayError):
        oidc.holder(token)


async def test_an_issuer_that_does_not_answer_keeps_no_router_from_starting(issuer: Issuer) -> None:
    token = issuer.token()
    oidc = await ready(issuer, jwks_url=f"{issuer.address}/nothing")
    with pytest.raises(IssuerAwayError):
        oidc.holder(token)


ODD = b'{"keys": [{"kty": "RSA", "kid": [], "e": "AQAB", "n": "' + b"wf" * 128 + b'"}]}'
NONE = ODD.replace(b'"kid": []', b'"kid": "none", "alg": "none"')


@pytest.mark.parametrize(
    "answer",
    [
        *(b"[" * 100_000, b'{"issuer": "ISSUER"}', ODD, NONE),
        *(
            b'{"issuer": "ISSUER", "jwks_uri": "%b"}' % place
            for place in (b"//keys", b"http://issuer.example/keys")
        ),
    ],
    ids=["deep", "no place of keys", "a list for a key's name", "no algorithm", "no scheme", "not encrypted"],
)
async def test_an_issuer_that_answers_something_else_leaves_its_keys_as_they_were(
    issuer: Issuer, answer: bytes
) -> None:
    """The first such answer ended the asking for keys for good, and at the start the router."""
    found = await ready(issuer)
    straight = await ready(issuer, jwks_url=f"{issuer.address}/keys")
    issuer.answer = answer
    for oidc in (found, straight):
        await oidc.start()
        await oidc.close()
        assert oidc.holder(issuer.token()).name.startswith("alpha")


async def test_keys_are_not_fetched_from_a_place_without_encryption(
    issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever sits on the way there could give keys of their own."""
    issuer.answer = b'{"issuer": "ISSUER", "jwks_uri": "http://issuer.example/keys"}'
    await ready(issuer)
    assert "an https URL is needed" in caplog.text


async def test_a_redirect_of_an_issuer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    app = Starlette(routes=[Route("/keys", lambda _: RedirectResponse("https://elsewhere.example/keys"))])
    with asgi_server(app) as address:
        oidc = Oidc(OidcSpec(issuer=address, audience=AUDIENCE, jwks_url=f"{address}/keys"))
        await oidc.start()
        await oidc.close()
    assert "/keys answers 307" in caplog.text


@pytest.mark.parametrize(
    "issuer_url",
    [
        *("http://issuer.example", "issuer.example", "ftp://a", "http://localhost.example"),
        *("http://localhost:80@issuer.example/", "//issuer.example"),
    ],
)
def test_an_issuer_without_encryption_is_refused(issuer_url: str) -> None:
    with pytest.raises(ValidationError, match="an https URL is needed"):
        OidcSpec(issuer=issuer_url, audience=AUDIENCE)


async def test_a_router_lets_tokens_in_beside_keys_and_nobody_else(issuer: Issuer) -> None:
    oidc = await ready(issuer, rules=[{"requests_per_minute": 2}])
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
    with front(key_file=KeyFile(None, bearers=oidc)) as running:

        def ask(token: bytes | None) -> Any:
            headers = {"authorization": f"Bearer {token.decode()}"} if token else {}
            return httpx.post(f"{running.address}/v1/completions", json=body, headers=headers)

        answers = [ask(issuer.token()) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
        assert ask(issuer.token(sub="beta")).status_code == 200
        assert ask(b"sk-nothing").status_code == 401
        assert ask(forged(issuer)["no signature"]).status_code == 401
        assert ask(None).status_code == 401


def test_whoever_is_known_by_a_token_is_remembered_within_bounds(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc_of_routers, "_MOST_REMEMBERED", 2)
    known = asyncio.run(ready(issuer))
    alpha = known.holder(issuer.token(sub="a"))
    for name in "bab":
        known.holder(issuer.token(sub=name, jti=name))
    assert len(known._known) == len(known._owners) == 2
    assert known._owners[alpha.sha256] == alpha
    known.holder(issuer.token(sub="c"))
    assert len(known._known) == len(known._owners) == 2
    assert alpha.sha256 not in known._owners
