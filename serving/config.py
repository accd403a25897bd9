"""What `args` of a deployments/*.yaml may say, and nothing else.

Only names are checked here; the plan decides whether a topology exists and a model fits. Every spec is frozen and
refuses unknown keys, naming the nearest known one.
"""

import difflib
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from serving import serve_keys
from serving.errors import ConfigError

# The application builder, as `import_path` of an application names it.
IMPORT_PATH = "serving.app:build"


MOST_SLICES = 10_000  # of one pool: more is a slip of the keyboard, no zone has them

_RESERVATION = re.compile(
    r"(projects/[a-z][-a-z0-9]{4,28}[a-z0-9]/reservations/)?[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
)


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CapacityType(StrEnum):
    """How a slice is bought."""

    RESERVED = "reserved"
    FLEX_START = "flex-start"
    SPOT = "spot"
    ON_DEMAND = "on-demand"


class SliceSpec(_Spec):
    """A slice shape as the user names it, and the ways to buy it, tried in order."""

    generation: str = Field(description="TPU generation: v4, v5e, v5p, v6e or v7x.")
    topology: str = Field(description="Chips along each axis of the slice, as in 2x4 or 2x2x2.")
    hosts: int | None = Field(
        default=None, ge=1, description="VMs of the slice, where the topology leaves a choice."
    )
    machine_type: str | None = Field(default=None, description="GKE machine type instead of hosts.")
    capacity: tuple[CapacityType, ...] = Field(
        default=(CapacityType.ON_DEMAND,),
        min_length=1,
        description="Ways to buy the slice, tried in order; one of them may stand alone, without a list.",
    )
    reservation: str | None = Field(
        default=None,
        description="Reservation that `reserved` capacity comes from; `projects/PROJECT/reservations/NAME` of another project.",
    )

    @field_validator("capacity", mode="before")
    @classmethod
    def _one_way(cls, raw: Any) -> Any:
        return (raw,) if isinstance(raw, str) else raw

    @field_validator("reservation")
    @classmethod
    def _is_a_reservation(cls, value: str | None) -> str | None:
        if value is None or _RESERVATION.fullmatch(value):
            return value
        raise ValueError("the name of a reservation is needed, or projects/PROJECT/reservations/NAME")

    @model_validator(mode="after")
    def _reservation_named(self) -> Self:
        if (CapacityType.RESERVED in self.capacity) != (self.reservation is not None):
            raise ValueError("capacity: reserved and reservation: NAME come together")
        return self


AUTO = "auto"


class ParallelSpec(_Spec):
    """Parallelism that overrides the derived one; it must fill the slice. Sizes count JAX devices."""

    tensor: int | None = Field(default=None, ge=1, description="Devices that attention heads are cut over.")
    pipeline: int | None = Field(default=None, ge=1, description="Pipeline stages: 1 or the number of hosts.")
    data: int | None = Field(default=None, ge=1, description="Copies of the model in one slice of one host.")
    expert: int | None = Field(
        default=None,
        ge=1,
        description="The mesh's axis for experts (expert_parallelism); the slice has tensor x expert devices then.",
    )
    attention_data: int | str | None = Field(
        default=None,
        description="Of the tensor devices, those that share attention by requests (attn_dp_size); "
        "auto: as many as have no KV head of their own. Latent attention has auto unless a number is set.",
    )
    decode_context: int | None = Field(
        default=None,
        ge=1,
        description="Of the tensor devices, those that hold different tokens of a sequence (decode_context_parallel_size).",
    )
    prefill_context: int | None = Field(
        default=None,
        ge=1,
        description="Devices beside tensor that read one prompt together (prefill_context_parallel_size).",
    )

    @field_validator("attention_data")
    @classmethod
    def _is_a_size_or_auto(cls, value: int | str | None) -> int | str | None:
        if value in (None, AUTO) or (isinstance(value, int) and value >= 1):
            return value
        raise ValueError("this is neither a whole number from 1 nor auto")


class ReplicaSpec(_Spec):
    """How many slices serve the model: between `min` and `max`, by its load."""

    min: int = Field(
        default=1, ge=0, description="Slices that serve however little there is to do; 0 lets all go."
    )
    max: int = Field(
        default=1, ge=1, le=MOST_SLICES, description="The most slices that are ordered for load."
    )
    patience_s: float = Field(
        default=600, gt=0, description="Seconds after which slices ordered here are sought in the next pool."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self

    @property
    def scales(self) -> bool:
        return self.min < self.max


class SloSpec(_Spec):
    """What nine of ten requests should see; scaling buys slices for it, and a plan that can't keep it is refused."""

    ttft_s: float | None = Field(default=None, gt=0, description="Seconds to the first token.")
    itl_s: float | None = Field(default=None, gt=0, description="Seconds between tokens.")


class PoolSpec(_Spec):
    """Slices of one shape among several that serve a model."""

    slice: SliceSpec = Field(description="The pool's slice.")
    replicas: ReplicaSpec = Field(
        default=ReplicaSpec(), description="How many of them; a number means exactly so many."
    )
    parallel: ParallelSpec = Field(
        default=ParallelSpec(), description="In place of the derived sizes, on these slices."
    )

    @field_validator("replicas", mode="before")
    @classmethod
    def _fixed_count(cls, raw: Any) -> Any:
        return _as_range(raw)


class QueueSpec(_Spec):
    """Requests that wait in a router for a slice of the model. With 0 for either key, no request waits."""

    requests: int = Field(default=512, ge=0, description="The most that wait in one router.")
    wait_s: float = Field(default=30, ge=0, description="Seconds after which a waiting request is refused.")


class RolloutSpec(_Spec):
    """How a changed engine goes through the slices: one slice first, then several at a time.

    At most `at_once` less `spare` slices fewer serve meanwhile, and one fewer where there is no spare hardware.
    """

    at_once: int | str = Field(
        default="10%", description="Slices replaced at a time: a number, or a share of them, rounded up."
    )
    spare: int = Field(
        default=1, ge=0, description="Slices among them that are ordered beyond the wanted number."
    )

    @field_validator("at_once")
    @classmethod
    def _is_a_count(cls, value: int | str) -> int | str:
        if isinstance(value, int):
            fits = value >= 1
        else:
            share = re.fullmatch(r"(\d+(?:\.\d+)?)%", value)
            fits = share is not None and 0 < float(share[1]) <= 100
        if not fits:
            raise ValueError("this is neither a number from 1 nor a share from 1% to 100%")
        return value


class ModelSpec(_Spec):
    """One model on slices of one shape, or of several in `pools`, the preferred first.

    With `pools`, the keys `slice`, `replicas` and `parallel` are the first pool's; `per_pool` has every pool's.
    """

    name: str = Field(default="", description="Name clients use; the model id where left out.")
    model: str = Field(min_length=1, description="Hugging Face id or a local path of a checkpoint.")
    slice: SliceSpec = Field(description="The slice that one replica takes whole.")
    replicas: ReplicaSpec = Field(
        default=ReplicaSpec(), description="How many slices; a number means exactly so many."
    )
    parallel: ParallelSpec = Field(default=ParallelSpec(), description="In place of the derived sizes.")
    pools: tuple[PoolSpec, ...] = Field(
        default=(),
        description="In place of slice, replicas and parallel: several slices, the preferred first.",
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine options by vLLM's names.")
    engine_env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment of the engine's processes on every host of the slice, by tpu-inference's names.",
    )
    queue: QueueSpec = Field(default=QueueSpec(), description="How many requests may wait, and how long.")
    slo: SloSpec = Field(default=SloSpec(), description="Targets that scaling buys slices for.")
    cool_down_s: float = Field(
        default=300, ge=0, description="Seconds a slice stays unneeded before it is let go."
    )
    drain_s: float = Field(
        default=60, ge=0, description="Seconds a slice may take to finish its requests when it stops."
    )
    surge_s: float = Field(
        default=30,
        ge=0,
        description="Seconds that a changed engine waits for a spare slice before an old one makes room.",
    )
    rollout: RolloutSpec = Field(
        default=RolloutSpec(), description="How many slices change their engine at a time."
    )
    stall_s: float = Field(
        default=30,
        gt=0,
        description="Seconds without an answer after which an engine counts as hung, unless it compiles a program (for up to 15 minutes).",
    )
    start_s: float = Field(
        default=1800,
        gt=0,
        description="Seconds after which a start counts as late: its stacks go to a file, and it goes on.",
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and not raw.get("name") and isinstance(raw.get("model"), str):
            return {**raw, "name": raw["model"]}
        return raw

    @field_validator("replicas", mode="before")
    @classmethod
    def _fixed_count(cls, raw: Any) -> Any:
        return _as_range(raw)

    @model_validator(mode="before")
    @classmethod
    def _first_pool(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or not raw.get("pools"):
            return raw
        if misplaced := sorted({"slice", "replicas", "parallel"} & raw.keys()):
            raise ValueError(f"pools stand in the place of {', '.join(misplaced)}; put that into each pool")
        first = raw["pools"][0] if isinstance(raw["pools"], list | tuple) else {}
        return {**raw, **(first if isinstance(first, dict) else {})}

    def per_pool(self) -> "tuple[ModelSpec, ...]":
        """One spec a pool, in order of preference; the model itself where it lists no pools."""
        return tuple(
            self.model_copy(
                update={
                    "slice": pool.slice,
                    "replicas": pool.replicas,
                    "parallel": pool.parallel,
                    "pools": (),
                }
            )
            for pool in self.pools
        ) or (self,)


ON_DISK = "rocksdb"  # KubeRay's name for a control store on the head's disk
OWN_REDIS = "redis"


_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_CLUSTER = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_BUCKET = re.compile(r"[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]")
_REGION = re.compile(r"[a-z]+-[a-z]+\d+")
_ZONE = re.compile(r"[a-z]+-[a-z]+\d+-[a-z0-9]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _object_name(value: str) -> str:
    """What Kubernetes takes as the name of an object of these kinds; raises ValueError."""
    if _OBJECT.fullmatch(value) and len(value) <= 253:
        return value
    raise ValueError(
        "names in Kubernetes have small letters, digits, hyphens and dots, and a letter or digit at both ends"
    )


class GatewaySpec(_Spec):
    """A load balancer of Google's in front of the service, with TLS (Gateway API)."""

    hostname: str = Field(min_length=1, description="Name that clients use, as in llm.example.com.")
    certificate_secret: str = Field(
        min_length=1, description="Secret of the type kubernetes.io/tls with the certificate of that name."
    )
    class_name: str = Field(
        default="gke-l7-global-external-managed",
        description="GatewayClass: this one faces the internet, gke-l7-rilb faces the VPC alone.",
    )

    @field_validator("certificate_secret", "class_name")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        return _object_name(value)

    @field_validator("hostname")
    @classmethod
    def _is_a_hostname(cls, value: str) -> str:
        if _OBJECT.fullmatch(value.removeprefix("*.")):
            return value
        raise ValueError(
            "a name as llm.example.com is needed, in small letters, without https://, port and path"
        )


class GkeSpec(_Spec):
    """Where and how `serving manifest` puts the service on GKE."""

    namespace: str = Field(default="default", description="Kubernetes namespace of every object.")
    image: str | None = Field(
        default=None,
        min_length=1,
        description="Image of head and slices, built from this repository's Dockerfile; or `serving manifest --image`.",
    )
    cluster: str | None = Field(default=None, description="Name of the GKE cluster, for gcloud.")
    zone: str | None = Field(default=None, description="Zone of the node pools, for gcloud.")
    region: str | None = Field(
        default=None, description="Region of a regional GKE cluster, for gcloud; a zonal one is in `zone`."
    )
    weights_bucket: str | None = Field(
        default=None,
        description="GCS bucket mounted at /weights by GCS FUSE: models `/weights/...`, and what XLA compiled.",
    )
    token_secret: str | None = Field(
        default="hf-token",
        description="Secret whose key `token` is HF_TOKEN, where a model, its configuration, tokenizer, draft or adapter comes from "
        "Hugging Face's site; null for none.",
    )
    cluster_secret: str = Field(
        default="serving-cluster",
        description="Secret whose key `secret` is what head and slices show each other.",
    )
    keys_secret: str = Field(
        default="serving-keys", description="Secret whose key `keys.yaml` is mounted as router.keys_file."
    )
    metrics_secret: str = Field(
        default="serving-metrics",
        description="Secret whose key `key` is an API key for the scrape, with router.private_status.",
    )
    control_store: str | None = Field(
        default=OWN_REDIS,
        description="What keeps Ray's control store, so that slices outlive the head: `redis`, one that the manifest brings; "
        "host:port of another; `rocksdb`, a disk that KubeRay gives the head; null for the head's memory.",
    )
    redis_secret: str | None = Field(
        default=None, description="Secret whose key `password` is that of the Redis at host:port."
    )
    database_secret: str | None = Field(
        default=None, description="Secret whose key `password` is PGPASSWORD, for `store.database`."
    )
    store_claim: str | None = Field(
        default=None,
        description="PersistentVolumeClaim mounted on the head at /var/lib/tpu-serving, for folders and files of `store` and "
        "`router.responses_store`.",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment of the slices' pods, as LIBTPU_INIT_ARGS: it is there before any process starts.",
    )
    head_env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment of the head's pod, with the routers, as OTEL_EXPORTER_OTLP_ENDPOINT; slices have `env`.",
    )
    tracing_secret: str | None = Field(
        default=None,
        description="Secret whose key `headers` is OTEL_EXPORTER_OTLP_HEADERS on head and slices, for a collector that asks for a key.",
    )
    run_as_user: int = Field(
        default=1000,
        ge=0,
        description="User id of every container; 0 where only root may open the TPU devices.",
    )
    capabilities: tuple[str, ...] = Field(
        default=(),
        description="Linux capabilities of the slices' containers, as SYS_RESOURCE, which may raise the limit of locked memory; with "
        "`run_as_user: 0` alone.",
    )
    kueue_queue: str | None = Field(
        default=None, description="LocalQueue of Kueue that admits the service, as an elastic job."
    )
    gateway: GatewaySpec | None = Field(
        default=None, description="A load balancer with TLS; none by default."
    )
    dranet: bool = Field(
        default=False,
        description="Whether pods claim the machines' extra network cards (DRANET). Slices do not talk to each other.",
    )

    @field_validator("namespace")
    @classmethod
    def _is_a_namespace(cls, value: str) -> str:
        if _NAMESPACE.fullmatch(value):
            return value
        raise ValueError(
            "a namespace has up to 63 small letters, digits and hyphens, and a hyphen at neither end"
        )

    @field_validator(
        "token_secret",
        "cluster_secret",
        "keys_secret",
        "metrics_secret",
        "redis_secret",
        "database_secret",
        "tracing_secret",
        "store_claim",
        "kueue_queue",
    )
    @classmethod
    def _is_an_object(cls, value: str | None) -> str | None:
        return value if value is None else _object_name(value)

    @field_validator("cluster")
    @classmethod
    def _is_a_cluster(cls, value: str | None) -> str | None:
        if value is None or _CLUSTER.fullmatch(value):
            return value
        raise ValueError("a cluster has up to 40 small letters, digits and hyphens, a letter first")

    @field_validator("zone")
    @classmethod
    def _is_a_zone(cls, value: str | None) -> str | None:
        if value is None or _ZONE.fullmatch(value):
            return value
        raise ValueError("a zone is needed, as us-east5-b; a region has several")

    @field_validator("region")
    @classmethod
    def _is_a_region(cls, value: str | None) -> str | None:
        if value is None or _REGION.fullmatch(value):
            return value
        raise ValueError("a region is needed, as us-east5; a zone, as us-east5-b, is gke.zone")

    @model_validator(mode="after")
    def _zone_is_of_the_region(self) -> Self:
        if self.region and self.zone and self.zone.rpartition("-")[0] != self.region:
            raise ValueError(f"zone {self.zone} is not in region {self.region}; set one that is")
        return self

    @field_validator("weights_bucket")
    @classmethod
    def _is_a_bucket(cls, value: str | None) -> str | None:
        if value is None or _BUCKET.fullmatch(value):
            return value
        raise ValueError("the name of a bucket is needed, without gs:// and folders")

    @field_validator("env", "head_env")
    @classmethod
    def _are_variables(cls, value: dict[str, str]) -> dict[str, str]:
        if wrong := [name for name in value if not _VARIABLE.fullmatch(name)]:
            raise ValueError(f"{wrong[0]!r} is no name of an environment variable")
        return value

    @field_validator("control_store")
    @classmethod
    def _is_a_store(cls, value: str | None) -> str | None:
        if value in (None, ON_DISK, OWN_REDIS) or re.fullmatch(r"[^\s:/]+:\d+", value or ""):
            return value
        raise ValueError("this is neither redis, rocksdb nor host:port of a Redis")

    @model_validator(mode="after")
    def _only_root_has_capabilities(self) -> Self:
        if self.capabilities and self.run_as_user:
            raise ValueError("Kubernetes gives capabilities to root alone; set run_as_user: 0 beside them")
        return self

    @model_validator(mode="after")
    def _redis_is_named(self) -> Self:
        if self.redis_secret and self.control_store in (None, ON_DISK, OWN_REDIS):
            raise ValueError(
                "redis_secret is of a Redis of yours, and control_store names none; set it to host:port of the Redis"
            )
        return self


class FailoverSpec(_Spec):
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


class PreemptionSpec(_Spec):
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


class Seeds(StrEnum):
    """What becomes of a request with a seed of its own, which no TPU engine draws tokens by."""

    REFUSE = "refuse"
    IGNORE = "ignore"


SENTINEL_LOGPROBS = 20  # of a token: as many as vLLM gives by default


class SentinelSpec(_Spec):
    """Greedy answers that are asked again of other slices, to find a slice that gives wrong tokens."""

    share: float = Field(
        default=0,
        ge=0,
        le=1,
        description="Share of greedy answers, as 0.001; 0 is off. It takes three slices of one engine to find the wrong one.",
    )


_MOST = 10**12  # of any limit: headers tell it in full, and sums of it stay exact


class KeyLimits(_Spec):
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


class OidcSpec(_Spec):
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
        if url is None or re.match(r"https://[^/]|http://(localhost|127\.0\.0\.1)[:/]", url):
            return url
        raise ValueError("an https URL is needed: who answers there says whose requests these are")


class KeysSpec(_Spec):
    """What holds of every API key."""

    isolated_cache: bool = Field(
        default=False,
        description="Whether one key's prompts find nothing of another's in the engines' prefix caches.",
    )
    stored: bool = Field(
        default=False,
        description="Whether keys of the store let in, as `serving keys add` puts them there; beside those of a file.",
    )


class ResponsesStoreSpec(_Spec):
    """A file in which routers of one host keep answers of /v1/responses, each for the key that asked. A path may stand alone."""

    path: str = Field(min_length=1, description="SQLite file, made where there is none.")
    max_responses: int = Field(
        default=100_000, ge=1, description="Beyond so many the oldest go of the key that has the most."
    )
    max_bytes: int = Field(default=1 << 30, ge=1 << 10, description="The same, in bytes of text.")
    max_age_s: float = Field(default=30 * 86400, gt=0, description="Seconds that a response stays.")


class StoreSpec(_Spec):
    """Where files, batches and usage stay. A folder on the head's disk may stand alone: the database is a file in it, as are the files."""

    folder: str | None = Field(
        default=None,
        min_length=1,
        description="Folder on a disk of the head's own, made where there is none: `store.sqlite` and `files/`.",
    )
    database: str | None = Field(
        default=None,
        description="postgresql://USER@HOST/NAME instead of SQLite, where several heads share it; the password by PGPASSWORD.",
    )
    files: str | None = Field(
        default=None,
        min_length=1,
        description="Another folder for files, or any URL of fsspec, as gs://BUCKET/FOLDER.",
    )

    @field_validator("database")
    @classmethod
    def _is_postgres(cls, value: str | None) -> str | None:
        if value is None or re.match(r"postgres(ql)?://", value):
            return value
        raise ValueError("postgresql://USER@HOST/NAME is needed; SQLite is a file in `folder`")

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        if self.folder is None and not (self.database and self.files):
            raise ValueError("name a folder, or both database and files")
        return self

    @property
    def database_at(self) -> str:
        return self.database or f"{self.folder}/store.sqlite"

    @property
    def files_at(self) -> str:
        return self.files or f"{self.folder}/files"


class BatchSpec(_Spec):
    """Limits of /v1/files and /v1/batches; they need `store`."""

    max_file_bytes: int = Field(default=200 << 20, ge=1 << 10, description="Largest file of input.")
    max_key_bytes: int = Field(
        default=10 << 30, ge=1 << 10, description="All files of one API key, results among them."
    )
    max_lines: int = Field(default=50_000, ge=1, description="Most lines of one batch.")
    max_open: int = Field(default=100, ge=1, description="Most batches of one API key that are not over.")
    max_age_s: float = Field(
        default=30 * 86400, ge=3600, description="Seconds that a file stays, and a batch that is over."
    )
    max_window_s: float = Field(
        default=7 * 86400, ge=3600, description="Longest completion window that a client may ask for."
    )
    spare: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Share of a model's seats that batches leave free, so that the next request waits for none.",
    )
    may_scale: bool = Field(
        default=False,
        description="Whether slices are ordered for batches, and woken from zero; else batches only use seats that are free.",
    )
    deadline_s: float | None = Field(
        default=None,
        gt=0,
        description="With may_scale, seconds within which a batch is to be done; its completion window where this is not set.",
    )

    @model_validator(mode="after")
    def _deadline_of_what_scales(self) -> Self:
        if self.deadline_s is not None and not self.may_scale:
            raise ValueError("deadline_s is for batches that slices are ordered for; set may_scale: true too")
        return self


class RouterSpec(_Spec):
    """The HTTP front."""

    replicas: int = Field(default=1, ge=1, description="Router processes behind HAProxy.")
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
    failover: FailoverSpec = Field(default=FailoverSpec(), description="Retries and continuation.")
    preemption: PreemptionSpec = Field(
        default=PreemptionSpec(), description="Streams that make room for a higher priority."
    )
    sentinel: SentinelSpec = Field(default=SentinelSpec(), description="Search for wrong tokens.")

    @field_validator("responses_store", mode="before")
    @classmethod
    def _path_alone(cls, raw: Any) -> Any:
        return {"path": raw} if isinstance(raw, str) else raw


class BudgetSpec(_Spec):
    """The most that all models together may hold or have on order."""

    slices: int | None = Field(default=None, ge=1, description="Slices, those on order among them.")
    dollars_per_hour: float | None = Field(
        default=None, gt=0, description="USD an hour, by `prices` or the table."
    )


class ServiceConfig(_Spec):
    """`args` of the application."""

    models: tuple[ModelSpec, ...] = Field(description="At least one, each with its own name.")
    router: RouterSpec = Field(default=RouterSpec(), description="The HTTP front in front of all models.")
    budget: BudgetSpec = Field(default=BudgetSpec(), description="The limit of all models together.")
    prices: dict[str, dict[str, Annotated[float, Field(gt=0)]]] = Field(
        default_factory=dict, description="USD a chip-hour by generation and capacity."
    )
    store: StoreSpec | None = Field(
        default=None, description="Where files, batches and usage stay; without it there are none."
    )
    batch: BatchSpec = Field(default=BatchSpec(), description="Limits of files and batches.")
    gke: GkeSpec = Field(default=GkeSpec(), description="For `serving manifest` alone.")

    @field_validator("store", mode="before")
    @classmethod
    def _folder_alone(cls, raw: Any) -> Any:
        return {"folder": raw} if isinstance(raw, str) else raw

    @model_validator(mode="after")
    def _stored_keys_have_a_store(self) -> Self:
        if self.router.keys.stored and self.store is None:
            raise ValueError("router.keys.stored: there is no store; name a place for it in `store`")
        if (
            self.store is None
            and self.router.oidc
            and any(rule.has_budget for rule in self.router.oidc.rules)
        ):
            raise ValueError("router.oidc.rules: a budget wants `store`; name a place for it")
        return self

    @model_validator(mode="after")
    def _sentinel_sees_enough(self) -> Self:
        for model in self.models:
            most = model.engine.get("max_logprobs", SENTINEL_LOGPROBS)
            if self.router.sentinel.share and isinstance(most, int) and 0 <= most < SENTINEL_LOGPROBS:
                raise ValueError(
                    f"router.sentinel asks for {SENTINEL_LOGPROBS} logprobs of a token, and {model.name}'s engines give {most}; "
                    f"set engine.max_logprobs to {SENTINEL_LOGPROBS} or more, or leave the sentinel out"
                )
        return self

    @model_validator(mode="after")
    def _within_budget(self) -> Self:
        least = sum(pool.replicas.min for model in self.models for pool in model.per_pool())
        if self.budget.slices is not None and self.budget.slices < least:
            raise ValueError(
                f"budget.slices is {self.budget.slices}, and replicas.min of all pools ask for {least}; raise one or lower the other"
            )
        return self

    @field_validator("models")
    @classmethod
    def _distinct(cls, models: tuple[ModelSpec, ...]) -> tuple[ModelSpec, ...]:
        if not models:
            raise ValueError("no model is listed; give at least one")
        names = [model.name for model in models]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two models are named {duplicates[0]!r}; give each its own name")
        return models


def _as_range(raw: Any) -> Any:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return {"min": raw, "max": raw}
    if isinstance(raw, dict | ReplicaSpec):
        return raw
    raise ValueError("a whole number of slices is needed, or a mapping with min and max")


def parse(args: dict[str, Any]) -> ServiceConfig:
    """Read the application's args; raises ConfigError with one line a problem."""
    try:
        return ServiceConfig.model_validate(args)
    except ValidationError as error:
        problems = [dict(problem) for problem in error.errors()]
        raise ConfigError("; ".join(_explain(problem) for problem in _first_causes(problems))) from None


# What pydantic's kinds of problem mean to the writer of a YAML; `{}` are the limits that it names.
_WORDS = {
    "model_type": "a mapping is needed, one `key: value` a line",
    "dict_type": "a mapping is needed, one `key: value` a line",
    "tuple_type": "a list is needed, one `- ` an entry",
    "string_type": "text is needed; put it into quotes",
    "int_type": "a whole number is needed",
    "int_parsing": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed",
    "float_parsing": "a number is needed",
    "finite_number": "a finite number is needed",
    "bool_type": "true or false is needed",
    "bool_parsing": "true or false is needed",
    "enum": "one of {expected} is needed",
    "greater_than": "a number above {gt:g} is needed",
    "greater_than_equal": "at least {ge:g} is needed",
    "less_than_equal": "at most {le:g} is needed",
    "string_too_short": "text is needed, this is empty",
    "too_short": "at least {min_length} is needed",
}


def _first_causes(problems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without lists that are too short because an entry of theirs was refused."""
    return [
        problem
        for problem in problems
        if problem["type"] != "too_short"
        or not any(
            other is not problem and other["loc"][: len(problem["loc"])] == problem["loc"]
            for other in problems
        )
    ]


def _explain(problem: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "args"
    if problem["type"] == "extra_forbidden":
        known = _keys_beside(problem["loc"])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        return f"{where}: unknown key; {hint}"
    if problem["type"] == "missing":
        return f"{where}: missing"
    words = _WORDS.get(problem["type"])
    said = words.format_map(problem.get("ctx", {})) if words else problem["msg"].removeprefix("Value error, ")
    return f"{where}: {said} (got {problem['input']!r})"


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    spec: type[BaseModel] = ServiceConfig
    for part in location[:-1]:
        if isinstance(part, str):
            spec = _spec_within(spec.model_fields[part].annotation) or spec
    return list(spec.model_fields)


def _spec_within(annotation: Any) -> type[BaseModel] | None:
    """The spec an annotation names, also inside tuple[...]."""
    spec = next((argument for argument in get_args(annotation) if argument is not ...), annotation)
    return spec if isinstance(spec, type) and issubclass(spec, BaseModel) else None


@dataclass(frozen=True)
class DeploymentFile:
    """A deployments/*.yaml: its services by application, the port Serve opens, and the parsed document."""

    path: Path
    port: int
    services: dict[str, ServiceConfig]
    document: dict[str, Any]

    def route_prefix(self, name: str) -> str:
        """The path below which an application is served, as Serve's config file has it."""
        application = next(
            entry for entry in self.document["applications"] if str(entry.get("name", "default")) == name
        )
        return str(application.get("route_prefix") or "/")


def load(path: Path) -> DeploymentFile:
    """Read our applications from a Serve config file; raises ConfigError."""
    raw = _read(path)
    serve_keys.check(str(path), raw, serve_keys.FILE, ServiceConfig.model_fields)
    services = {}
    for application in raw["applications"]:
        if application.get("import_path") != IMPORT_PATH:
            continue  # another project's application
        name = str(application.get("name", "default"))
        where = f"{path}, application {name}"
        serve_keys.check(where, application, serve_keys.APPLICATION, ServiceConfig.model_fields)
        try:
            services[name] = parse(application.get("args") or {})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}") from None
    if not services:
        raise ConfigError(
            f"{path}: no application has import_path: {IMPORT_PATH}; see deployments/llama.yaml"
        )
    return DeploymentFile(path, _port(path, raw.get("http_options") or {}), services, raw)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    applications = raw.get("applications") if isinstance(raw, dict) else None
    if not isinstance(applications, list) or not applications:
        raise ConfigError(f"{path}: no applications; see deployments/llama.yaml")
    if not all(isinstance(application, dict) for application in applications):
        raise ConfigError(f"{path}: applications: each is a mapping with import_path and args")
    return dict(raw)


def _port(path: Path, http_options: Any) -> int:
    port = http_options.get("port", 8000) if isinstance(http_options, dict) else http_options
    if not isinstance(port, int) or not isinstance(http_options, dict):
        raise ConfigError(f"{path}: http_options.port: a number is needed (got {port!r})")
    serve_keys.check(f"{path}, http_options", http_options, serve_keys.HTTP, ())
    return port
