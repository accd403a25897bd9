"""What a changed key of the YAML restarts: each key is changed, both applications are built, and Serve's versions compared."""

import copy
import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from pydantic import BaseModel
from ray.serve._private.version import DeploymentVersion

from serving.app import build
from serving.config import ServiceConfig
from tools.config_page import specs_within

_INTRO = """# What a change restarts

Each key was changed in a YAML, and what `serving.app:build` makes of both was compared as Ray Serve compares it. A test walks every
key of [the configuration](config.md).

- **nothing**: no process hears of it.
- **in place**: what runs takes it over; no request notices.
- **scaling**: the number of slices may change, no slice restarts for it.
- **routers**: new routers take over; old ones end once their answers have, 20 s after the largest `drain_s` at the latest.
- **the store**: the process that keeps files, batches and usage starts anew; batches go on where they were.
- **engines in waves**: slices change their engine as [`rollout`](../guides/yaml.md#change-a-running-service) says.
- **another pool**: slices of the new pool come up, and those of the old one go as they serve.
- **another model**: the model is a new one, and the one of the old name goes at once."""

_MODEL: dict[str, Any] = {
    "name": "llama",
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "slice": {"generation": "v6e", "topology": "2x4", "hosts": 2},
    "replicas": {"min": 1, "max": 4},
}
_RESERVED = {"capacity": ["reserved"], "reservation": "one"}
_EXPERTS = {"models.model": "Qwen/Qwen3-30B-A3B"}
_STORE = {"router.responses_store.path": "/var/lib/responses.sqlite"}
_KEPT = {"store.folder": "/var/lib/tpu-serving"}
_OIDC = {
    "router.oidc": {
        "issuer": "https://issuer.example",
        "audience": "serving",
        "rules": [{"requests_per_minute": 5}],
    }
}
_GATEWAY = {"gke.gateway.hostname": "llm.example.com", "gke.gateway.certificate_secret": "tls"}

# By key: what is set beforehand, where the key needs that, and its other value.
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "models": (_KEPT, [_MODEL, {**_MODEL, "name": "second"}]),
    "models.name": (_KEPT, "other"),
    "models.model": ({}, "Qwen/Qwen3-8B"),
    "models.slice.generation": ({}, "v5e"),
    "models.slice.topology": ({"models.slice.hosts": None, "models.slice.topology": "4x4"}, "4x8"),
    "models.slice.hosts": ({}, 1),
    "models.slice.machine_type": (
        {"models.slice.hosts": None, "models.slice.machine_type": "ct6e-standard-4t"},
        "ct6e-standard-8t",
    ),
    "models.slice.capacity": ({}, ["spot"]),
    "models.slice.reservation": ({f"models.slice.{key}": value for key, value in _RESERVED.items()}, "two"),
    "models.replicas.min": ({}, 2),
    "models.replicas.max": ({}, 8),
    "models.replicas.patience_s": ({}, 60),
    "models.parallel.tensor": ({}, 4),
    "models.parallel.pipeline": ({}, 2),
    "models.parallel.data": ({"models.slice.hosts": 1}, 2),
    "models.parallel.expert": (_EXPERTS, 4),
    "models.parallel.attention_data": (_EXPERTS, "auto"),
    "models.parallel.decode_context": (_EXPERTS, 2),
    "models.parallel.prefill_context": ({**_EXPERTS, "models.engine": {"max_num_seqs": 1}}, 2),
    "models.pools": ({}, None),
    "models.engine": ({}, {"max_num_seqs": 32}),
    "models.engine_env": ({}, {"MIN_TOKEN_BUCKET": "32"}),
    "models.queue.requests": ({}, 7),
    "models.queue.wait_s": ({}, 7),
    "models.slo.ttft_s": ({}, 9),
    "models.slo.itl_s": ({}, 0.5),
    "models.cool_down_s": ({}, 7),
    "models.drain_s": ({}, 7),
    "models.surge_s": ({}, 7),
    "models.rollout.at_once": ({}, 3),
    "models.rollout.spare": ({}, 2),
    "models.stall_s": ({}, 7),
    "models.start_s": ({}, 7),
    "router.replicas": ({}, 3),
    "router.keys_file": ({}, "/keys.yaml"),
    "router.keys.isolated_cache": ({}, True),
    "router.keys.stored": (_KEPT, True),
    "router.oidc.issuer": (_OIDC, "https://elsewhere.example"),
    "router.oidc.audience": (_OIDC, "another"),
    "router.oidc.jwks_url": (_OIDC, "https://issuer.example/keys"),
    "router.oidc.name": (_OIDC, "email"),
    "router.oidc.rules": (_OIDC, [{"requests_per_minute": 7}]),
    "router.oidc.rules.where": (_OIDC, {"groups": "research"}),
    "router.oidc.rules.requests_per_minute": (_OIDC, 7),
    "router.oidc.rules.tokens_per_minute": (_OIDC, 7),
    "router.oidc.rules.concurrency": (_OIDC, 7),
    "router.oidc.rules.tokens_per_day": (_OIDC | _KEPT, 7),
    "router.oidc.rules.dollars_per_month": (_OIDC | _KEPT, 7),
    "router.oidc.rules.priority": (_OIDC, 7),
    "router.oidc.rules.weight": (_OIDC, 7),
    "router.door": ({}, "direct"),
    "router.direct_port": ({"router.door": "direct"}, 8090),
    "router.sentinel.share": ({}, 0.5),
    "router.private_status": ({}, True),
    "router.max_body_bytes": (_KEPT, 4096),
    "router.body_timeout_s": ({}, 7),
    "router.max_n": ({}, 7),
    "router.cors": ({}, ["https://app.example"]),
    "router.seed": ({}, "ignore"),
    "router.responses_store.path": ({}, "/var/lib/responses.sqlite"),
    "router.responses_store.max_responses": (_STORE, 7),
    "router.responses_store.max_bytes": (_STORE, 4096),
    "router.responses_store.max_age_s": (_STORE, 7),
    "router.request_log": ({}, False),
    "router.log_content": ({}, True),
    "router.affinity": ({}, "none"),
    "router.share": ({}, False),
    "router.slices_tls": ({}, True),
    "router.failover.continue_streams": ({}, False),
    "router.failover.retries": ({}, 7),
    "router.failover.wait_s": ({}, 7),
    "router.preemption.most": ({}, 7),
    "router.preemption.longest_s": ({}, 7),
    "budget.slices": ({}, 7),
    "budget.dollars_per_hour": ({}, 700),
    "store.folder": (_KEPT, "/var/lib/other"),
    "store.database": (_KEPT, "postgresql://serving@db/serving"),
    "store.files": (_KEPT, "gs://bucket/files"),
    "batch.max_file_bytes": (_KEPT, 4096),
    "batch.max_key_bytes": (_KEPT, 4096),
    "batch.max_lines": (_KEPT, 7),
    "batch.max_open": (_KEPT, 7),
    "batch.max_age_s": (_KEPT, 7200),
    "batch.max_window_s": (_KEPT, 7200),
    "batch.spare": (_KEPT, 0.5),
    "batch.ttft_p99_s": (_KEPT, 0.5),
    "batch.may_scale": (_KEPT, True),
    "batch.deadline_s": ({**_KEPT, "batch.may_scale": True}, 600),
    "prices": (_KEPT, {"v6e": {"on-demand": 3.0}}),
    **{
        f"gke.{key}": ({}, "other")
        for key in ("cluster", "cluster_secret", "keys_secret", "kueue_queue", "metrics_secret")
    },
    "gke.dranet": ({}, True),
    "gke.env": ({}, {"A": "b"}),
    "gke.head_env": ({}, {"A": "b"}),
    "gke.gateway.class_name": (_GATEWAY, "other"),
    "gke.gateway.hostname": (_GATEWAY, "other.example"),
    "gke.gateway.certificate_secret": (_GATEWAY, "other"),
    "gke.capabilities": ({"gke.run_as_user": 0}, ["SYS_RESOURCE"]),
    "gke.run_as_user": ({}, 7),
    "gke.namespace": ({}, "other"),
    "gke.image": ({}, "other"),
    "gke.weights_bucket": ({}, "other"),
    "gke.token_secret": ({}, "other"),
    "gke.control_store": ({}, "rocksdb"),
    "gke.database_secret": ({}, "other"),
    "gke.store_claim": ({}, "other"),
    "gke.tracing_secret": ({}, "other"),
    "gke.redis_secret": ({"gke.control_store": "redis:6379"}, "other"),
    "gke.zone": ({}, "us-east5-b"),
    "gke.region": ({}, "us-east5"),
}
_POOLS = [
    {"slice": {"generation": "v6e", "topology": "2x4", "hosts": 2}, "replicas": {"min": 1, "max": 4}},
    {"slice": {"generation": "v6e", "topology": "2x4", "hosts": 1}, "replicas": {"min": 0, "max": 4}},
]


class Effect(IntEnum):
    """What a change does, the costliest last."""

    NOTHING = 0
    IN_PLACE = 1
    SCALING = 2
    ROUTERS = 3
    STORE = 4
    ENGINES = 5
    POOL = 6
    MODEL = 7


_WORDS = {
    Effect.NOTHING: "nothing",
    Effect.IN_PLACE: "in place",
    Effect.SCALING: "scaling",
    Effect.ROUTERS: "routers",
    Effect.STORE: "the store",
    Effect.ENGINES: "engines in waves",
    Effect.POOL: "another pool",
    Effect.MODEL: "another model",
}


@dataclass(frozen=True)
class Made:
    """One deployment as Serve compares it."""

    model: str  # empty for routers and store
    version: DeploymentVersion
    config: dict[str, Any]
    is_store: bool = False


def page() -> str:
    lines = ["| key | what a change restarts |", "|---|---|"]
    lines += [f"| `{key}` | {_told(effects_of(key))} |" for key in keys()]
    lines += ["", "Beyond single keys:", "", "| change | what it restarts |", "|---|---|"]
    lines += [f"| {what} | {_told(effects(before, after))} |" for what, before, after in LISTS]
    return "\n".join([_INTRO, "", *lines])


def keys() -> list[str]:
    """Every key of the configuration that holds a value, `models` and the keys of one model among them."""
    return list(_keys("", ServiceConfig))


def _keys(path: str, spec: type[BaseModel]) -> Iterator[str]:
    for name, field in spec.model_fields.items():
        inner = list(specs_within(field.annotation))
        here = f"{path}.{name}".removeprefix(".")
        # A pool's keys are those of a model's only pool.
        if name == "pools" or not inner:
            yield here
            continue
        if any(listed for _, listed in inner):
            yield here
        for nested, _ in inner:
            yield from _keys(here, nested)


def effects_of(key: str) -> set[Effect]:
    """What follows from the key's change in CHANGES; raises LookupError where the change there changes nothing."""
    if key not in CHANGES:
        raise LookupError(f"{key} is new: give another value of it in CHANGES of tools/redeploy_page.py")
    preset, value = CHANGES[key]
    before = _with(_args(), preset)
    if key == "models.pools":
        return effects(_args(), _pools(_POOLS))
    after = {**before, "models": value} if key == "models" else _with(copy.deepcopy(before), {key: value})
    if after == before:
        raise LookupError(f"{key} of {value!r} is what it was")
    return effects(before, after)


def effects(before: dict[str, Any], after: dict[str, Any]) -> set[Effect]:
    """What Serve does when the second args are deployed where the first run."""
    old, new = made(json.dumps(before)), made(json.dumps(after))
    found: set[Effect] = set()
    for name in old.keys() | new.keys():
        if name in old and name in new:
            found |= _between(old[name], new[name])
        else:
            gone = (old if name in old else new)[name]
            both = any(each.model == gone.model for each in old.values()) and any(
                each.model == gone.model for each in new.values()
            )
            found.add(Effect.POOL if both else Effect.MODEL)
    return found or {Effect.NOTHING}


def _between(old: Made, new: Made) -> set[Effect]:
    found = set()
    if old.version.requires_actor_restart(new.version):
        found.add(Effect.ENGINES if new.model else Effect.STORE if new.is_store else Effect.ROUTERS)
    elif old.version.requires_actor_reconfigure(new.version):
        found.add(Effect.IN_PLACE)
    scaling = ("num_replicas", "autoscaling_config")
    if new.model and any(old.config[field] != new.config[field] for field in scaling):
        found.add(Effect.SCALING)
    return found


@functools.cache
def made(args: str) -> dict[str, Made]:
    """The deployments built of args in JSON by name, with the versions that serving.slices.placement gives them."""
    router = build(json.loads(args))._bound_deployment  # noqa: SLF001  Serve has no public name
    bound = [*router.init_args[1:], router.init_kwargs["store"]]
    others = [application._bound_deployment for application in bound if application]  # noqa: SLF001
    return {deployment.name: _made(deployment) for deployment in (router, *others)}


def _made(deployment: Any) -> Made:
    config, replica = deployment._deployment_config, deployment._replica_config  # noqa: SLF001
    version = DeploymentVersion(
        config.user_config["version"],
        config,
        replica.ray_actor_options,
        replica.placement_group_bundles,
        replica.placement_group_strategy,
    )
    return Made(
        config.user_config.get("name", ""), version, config.model_dump(), is_store=deployment.name == "store"
    )


def _args() -> dict[str, Any]:
    return {"models": [copy.deepcopy(_MODEL)]}


def _with(args: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The args with values set, given by key; in a list at its first entry."""
    for key, value in values.items():
        *path, last = key.split(".")
        place: Any = args
        for part in path:
            place = place.setdefault(part, {})
            if isinstance(place, list):
                place = place[0]
        place[last] = value
    return args


def _pools(pools: list[dict[str, Any]]) -> dict[str, Any]:
    model = {key: value for key, value in _MODEL.items() if key not in ("slice", "replicas")}
    return {"models": [{**model, "pools": pools}]}


def _told(found: Iterable[Effect]) -> str:
    return ", ".join(_WORDS[effect] for effect in sorted(found, reverse=True))


_TWO_MODELS = {"models": [_MODEL, {**_MODEL, "name": "second"}]}
# Changes of lists: what is done, and the args before and after.
LISTS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("a pool is added to a model's only one", _args(), _pools(_POOLS)),
    ("pools are reordered", _pools(_POOLS), _pools(_POOLS[::-1])),
    ("a pool is taken out", _pools(_POOLS), _pools(_POOLS[:1])),
    ("a model is added or taken out", _TWO_MODELS, _args()),
    ("models are reordered", _TWO_MODELS, {"models": _TWO_MODELS["models"][::-1]}),
    (
        "a fixed number of slices is changed",
        _with(_args(), {"models.replicas": 2}),
        _with(_args(), {"models.replicas": 3}),
    ),
    (
        "a fixed number of slices begins to scale",
        _with(_args(), {"models.replicas": 2}),
        _with(_args(), {"models.replicas": {"min": 2, "max": 4}}),
    ),
)
