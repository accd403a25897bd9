"""Where `serving manifest` puts a service on GKE. Pure."""

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from serving.config.serve_keys import is_port
from serving.config.spec import Spec

ON_DISK = "rocksdb"  # KubeRay's name for a control store on the head's disk
OWN_REDIS = "redis"


_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_CLUSTER = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_BUCKET = re.compile(r"[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]")
_REGION = re.compile(r"[a-z]+-[a-z]+\d+")
_ZONE = re.compile(r"[a-z]+-[a-z]+\d+-[a-z0-9]+")
_CAPABILITY = re.compile(r"(?!CAP_)[A-Z][A-Z_]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _object_name(value: str) -> str:
    """What Kubernetes takes as the name of an object of these kinds; raises ValueError."""
    if _OBJECT.fullmatch(value) and len(value) <= 253:
        return value
    raise ValueError(
        "names in Kubernetes have small letters, digits, hyphens and dots, and a letter or digit at both ends"
    )


class GatewaySpec(Spec):
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


class GkeSpec(Spec):
    """Where and how `serving manifest` puts the service on GKE."""

    namespace: str = Field(default="default", description="Kubernetes namespace of every object.")
    image: str | None = Field(
        default=None,
        min_length=1,
        description="Image of head and slices, built from this repository's Dockerfile; or `serving manifest --image`.",
    )
    cluster: str | None = Field(default=None, description="Name of the GKE cluster, for gcloud.")
    zone: str | None = Field(
        default=None, description="Zone of the node pools, for gcloud and ComputeClasses."
    )
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
        le=2**31 - 1,
        description="User id of every container; 0 where only root may open the TPU devices.",
    )
    capabilities: tuple[str, ...] = Field(
        default=(),
        description="Linux capabilities of the slices' containers, as SYS_RESOURCE, which may raise the limit of locked memory; with "
        "`run_as_user: 0` alone.",
    )
    kueue_queue: str | None = Field(
        default=None,
        max_length=63,
        description="LocalQueue of Kueue that admits the service, as an elastic job.",
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
        if value in (None, ON_DISK, OWN_REDIS):
            return value
        address = re.fullmatch(r"[^\s:/]+:(\d{1,5})", value or "")
        if address and is_port(int(address[1])):
            return value
        raise ValueError("this is neither redis, rocksdb nor host:port of a Redis")

    @field_validator("capabilities")
    @classmethod
    def _are_capabilities(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [name for name in value if not _CAPABILITY.fullmatch(name)]:
            raise ValueError(
                f"{wrong[0]!r} is no capability to Kubernetes, which puts CAP_ in front; write it as SYS_RESOURCE"
            )
        return value

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
