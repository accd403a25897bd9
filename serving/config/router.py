"""The HTTP front: keys, limits, failover, affinity. Pure."""

import re
from enum import StrEnum
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from serving.config.spec import Spec, without_tilde


class FailoverSpec(Spec):
    """What becomes of requests whose slice fails under them."""

    continue_streams: bool = Field(
        default=True, description="Whether a stream that breaks off goes on on another slice."
    )
    retries: int = Field(
        default=3, ge=0, description="Times a request is tried again before it has got anything new."
    )
    wait_s: float = Field(
        default=30, ge=0, description="Seconds that a request whose slice failed waits for another."
    )


class PreemptionSpec(Spec):
    """Running streams that make room for requests of keys with a higher `priority`, and go on when there is a seat again.

    No word is lost: it takes `failover.continue_streams`. Lines of batches make room for every request; they are asked again.
    """

    most: int = Field(default=2, ge=0, description="Times that one request makes room; 0 turns it off.")
    longest_s: float = Field(
        default=30,
        gt=0,
        description="Seconds that a stream is paused in all; then the next free seat is for it, before every priority.",
    )


class Affinity(StrEnum):
    """What decides between slices beside their load."""

    PREFIX = "prefix"
    NONE = "none"


class Doors(StrEnum):
    """Who takes connections of clients."""

    HAPROXY = "haproxy"
    DIRECT = "direct"


class Seeds(StrEnum):
    """What becomes of a request with a seed of its own, which no TPU engine draws tokens by."""

    REFUSE = "refuse"
    IGNORE = "ignore"


SENTINEL_LOGPROBS = 20  # of a token: as many as vLLM gives by default


class SentinelSpec(Spec):
    """Greedy answers that are asked again of other slices, to find a slice that gives wrong tokens."""

    share: float = Field(
        default=0,
        ge=0,
        le=1,
        description="Share of greedy answers, as 0.001; 0 is off. It takes three slices of one engine to find the wrong one.",
    )


_ANY_ORIGIN = "*"
# As browsers write it: in lower case, without a path and without a scheme's own port.
_ORIGIN = re.compile(r"(?!http://[^/]*:80$|https://[^/]*:443$)[a-z][a-z0-9+.-]*://[][a-z0-9._:-]+")

_MOST = 10**12  # of any limit: headers tell it in full, and sums of it stay exact


class KeyLimits(Spec):
    """What a key may use. A limit that is left out does not exist."""

    requests_per_minute: float | None = Field(
        default=None, gt=0, le=_MOST, allow_inf_nan=False, description="Requests a minute, over all routers."
    )
    tokens_per_minute: float | None = Field(
        default=None, gt=0, le=_MOST, allow_inf_nan=False, description="Tokens a minute, prompt and answer."
    )
    concurrency: int | None = Field(default=None, ge=1, le=_MOST, description="Requests under way.")
    tokens_per_day: float | None = Field(
        default=None, gt=0, le=_MOST, allow_inf_nan=False, description="Tokens a day of UTC; wants `store`."
    )
    dollars_per_month: float | None = Field(
        default=None,
        gt=0,
        le=_MOST,
        allow_inf_nan=False,
        description="Dollars a month of UTC; wants `store`.",
    )
    priority: int = Field(
        default=0, ge=-100, le=100, description="Requests of a higher priority go before all of a lower one."
    )
    weight: float = Field(
        default=1, ge=0.001, le=1000, allow_inf_nan=False, description="Share within a priority."
    )

    @property
    def has_budget(self) -> bool:
        return self.tokens_per_day is not None or self.dollars_per_month is not None


class OidcRule(KeyLimits):
    """What tokens with these claims may use."""

    where: dict[str, str] = Field(
        default_factory=dict,
        description="Claims and the value that each has, or has in its list; without any, every token.",
    )


def is_encrypted(url: str) -> bool:
    """Whether what is asked at a URL is encrypted, or stays on this host."""
    return bool(re.match(r"https://[^/]|http://(localhost|127\.0\.0\.1)(:\d+)?(/|\Z)", url))


class OidcSpec(Spec):
    """Tokens of an OpenID Connect issuer, beside API keys."""

    issuer: str = Field(description="As the claim `iss` has it; its keys are looked up below this URL.")
    audience: str = Field(min_length=1, description="As the claim `aud` has it: this service's name there.")
    jwks_url: str | None = Field(
        default=None, description="Where the issuer's keys are, where it publishes no openid-configuration."
    )
    name: str = Field(
        default="sub",
        min_length=1,
        description="Claim that tells whose token it is; each has limits of its own.",
    )
    rules: tuple[OidcRule, ...] = Field(
        default=(),
        description="The first that fits a token; one that none fits is refused. Without any, every token lets in, without limits.",
    )

    @field_validator("issuer", "jwks_url")
    @classmethod
    def _encrypted(cls, url: str | None) -> str | None:
        if url is None or is_encrypted(url):
            return url
        raise ValueError("an https URL is needed: who answers there says whose requests these are")


class KeysSpec(Spec):
    """What holds of every API key."""

    isolated_cache: bool = Field(
        default=False,
        description="Whether one key's prompts find nothing of another's in the engines' prefix caches.",
    )
    stored: bool = Field(
        default=False,
        description="Whether keys of the store let in, as `serving keys add` puts them there; beside those of a file.",
    )


class ResponsesStoreSpec(Spec):
    """A file in which routers of one host keep answers of /v1/responses, each for the key that asked. A path may stand alone."""

    path: str = Field(min_length=1, description="SQLite file, made where there is none.")
    max_responses: int = Field(
        default=100_000, ge=1, description="Beyond so many the oldest go of the key that has the most."
    )
    max_bytes: int = Field(default=1 << 30, ge=1 << 10, description="The same, in bytes of text.")
    max_age_s: float = Field(default=30 * 86400, gt=0, description="Seconds that a response stays.")

    _without_tilde = field_validator("path")(without_tilde)


class RouterSpec(Spec):
    """The HTTP front."""

    replicas: int = Field(default=1, ge=1, description="Router processes behind HAProxy.")
    door: Doors = Field(
        default=Doors.HAPROXY,
        description="haproxy: clients come by HAProxy, on the port of `http_options`. direct: the routers of each host listen on "
        "`direct_port` themselves too, which saves HAProxy's share of time and CPU, and its TLS.",
    )
    direct_port: int = Field(
        default=8080,
        ge=1,
        le=65535,
        description="What the routers of a host share with `door: direct`; another one for each application.",
    )
    keys_file: str | None = Field(
        default=None, description="File of API keys on the routers' hosts, as `serving keys new` writes it."
    )
    keys: KeysSpec = Field(default=KeysSpec(), description="What holds of every API key.")
    oidc: OidcSpec | None = Field(
        default=None, description="An issuer whose tokens let in, beside API keys; none by default."
    )
    private_status: bool = Field(
        default=False,
        description="Whether /status.json and /metrics want an API key too; /health and /v1/models then tell strangers no reasons.",
    )
    max_body_bytes: int = Field(default=32 << 20, ge=1 << 10, description="Largest request body.")
    body_timeout_s: float = Field(default=60, gt=0, description="Seconds a client may take to send a body.")
    max_n: int = Field(default=128, ge=1, description="Most answers to one prompt (`n`, `best_of`).")
    request_log: bool = Field(default=True, description="One JSON line a request, without its words.")
    log_content: bool = Field(default=False, description="Prompts and answers too in the request log.")
    cors: tuple[str, ...] = Field(
        default=(),
        description="Origins whose pages may ask by a browser, as https://app.example; * is all of them, where keys are asked for.",
    )
    seed: Seeds = Field(
        default=Seeds.REFUSE,
        description="What becomes of a client's `seed`, by which no TPU engine draws: refuse answers 400, ignore answers without it and "
        "says so in a header. A greedy request (temperature 0) may have one.",
    )
    responses_store: ResponsesStoreSpec | None = Field(
        default=None,
        description="Where answers of /v1/responses stay, for `previous_response_id` and GET; none by default.",
    )
    affinity: Affinity = Field(
        default=Affinity.PREFIX,
        description="prefix: prompts, sessions and adapters go back to the slice that had them, as far as its load allows.",
    )
    share: bool = Field(
        default=True,
        description="Whether routers, where there are several, tell each other which prompts they sent to which slice. Off, each "
        "knows its own alone.",
    )
    slices_tls: bool = Field(
        default=False,
        description="Whether routers ask slices, and each other, by TLS. Each makes itself a certificate, and is trusted by that alone.",
    )
    failover: FailoverSpec = Field(default=FailoverSpec(), description="Retries and continuation.")
    preemption: PreemptionSpec = Field(
        default=PreemptionSpec(), description="Streams that make room for a higher priority."
    )
    sentinel: SentinelSpec = Field(default=SentinelSpec(), description="Search for wrong tokens.")

    _without_tilde = field_validator("keys_file")(without_tilde)

    @field_validator("responses_store", mode="before")
    @classmethod
    def _path_alone(cls, raw: Any) -> Any:
        return {"path": raw} if isinstance(raw, str) else raw

    @field_validator("cors")
    @classmethod
    def _as_browsers_write_them(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != _ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin as browsers write it; take https://app.example or http://localhost:5173: in lower "
                    "case, without a path or the scheme's own port"
                )
        return origins

    @model_validator(mode="after")
    def _strangers_have_no_browsers(self) -> Self:
        if _ANY_ORIGIN in self.cors and not (self.keys_file or self.keys.stored or self.oidc):
            raise ValueError(
                "cors: * without keys lets every page that somebody in this network opens use the service; name origins, or "
                "ask for keys (keys_file, keys.stored or oidc)"
            )
        return self
