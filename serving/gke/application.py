"""One application as Kubernetes needs it: names within their limits, its pools, and where each host's weights come from."""

import hashlib
import posixpath
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from serving.config import CapacityType, Doors, GkeSpec, RouterSpec, StoreSpec
from serving.errors import ConfigError
from serving.gke.storage import STORE, WEIGHTS, Storage, asks_the_hub, folders, is_mounted, storage_of
from serving.planning.engine_environment import instead_of_pods
from serving.planning.plan import Plan

# KubeRay's MaxRayServiceNameLength: it makes longer names of it, which end at 63.
_LONGEST_NAME = 47
# The TPU webhook takes the last 50 characters of NAME-xxxxx-headless for the Service by which hosts of a slice find each other.
# KubeRay's own Service has the whole name, so that with a longer one no host is found.
_LONGEST_NAME_OF_HOSTS = 50 - len("-xxxxx-headless")
# GKE's limit of a node pool's name. Host names, which end at 63, are made of the group's name and two numbers.
_LONGEST_POOL = 40
_LONGEST_ACCOUNT = 50
_LONGEST_LABEL = 63
# A StatefulSet's: Kubernetes labels its pods with the name and a hash, and labels end at 63.
_LONGEST_SET = 52
# How KubeRay ends the names of the Services that it makes of a RayService's name.
_OF_KUBERAY = ("-head-svc", "-serve-svc", "-headless")
_MODEL_LETTERS = 30
# Kubelets refuse capitals anywhere but in the registry's name and in the tag.
_FOLDER = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[a-zA-Z0-9.-]+(?::\d+)?/)?{_FOLDER}(?:/{_FOLDER})*(?::\w[\w.-]*)?(?:@[a-z0-9]+:[0-9a-f]{{32,}})?",
    re.ASCII,
)
# A secret that is mounted there would hide what the image or another volume has.
_NO_FOLDER_OF_KEYS = (
    "/app",
    "/bin",
    "/dev",
    "/etc/ssl",
    "/lib",
    "/lib64",
    "/proc",
    "/sbin",
    "/sys",
    "/usr",
    WEIGHTS,
)
# What the webhook sets for TPUs in each pod, and what keys of the YAML set.
_NOT_IN_ENV = {
    "TPU_NAME": "Google's TPU webhook sets it",
    "TPU_WORKER_ID": "Google's TPU webhook sets it",
    "TPU_WORKER_HOSTNAMES": "Google's TPU webhook sets it",
    "TPU_PROCESS_ADDRESSES": "Google's TPU webhook sets it",
    "TPU_PROCESS_PORT": "Google's TPU webhook sets it",
    "HF_TOKEN": "name a secret in gke.token_secret",
    "PGPASSWORD": "name a secret in gke.database_secret",
    "SERVING_CLUSTER_SECRET": "name a secret in gke.cluster_secret",
    "SERVING_KEYS": "name a file in router.keys_file, and its secret in gke.keys_secret",
    "OTEL_EXPORTER_OTLP_HEADERS": "name a secret in gke.tracing_secret",
    "RAY_AUTH_TOKEN": "KubeRay makes it",
    **dict.fromkeys(
        ("FQ_RAY_IP", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_CLUSTER_NAME", "RAY_PORT"), "KubeRay sets it"
    ),
    **dict.fromkeys(
        ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"), "an engine has all chips of its slice's hosts"
    ),
    **dict.fromkeys(
        ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"), "name a Redis in gke.control_store"
    ),
    "RAY_enable_autoscaler_v2": "the manifest sets it",
    "HOST_INDEX": "the manifest sets it",
    "NODE_IP": "the manifest sets it",
}


@dataclass(frozen=True)
class Pool:
    """A worker group: its name, the plan of one slice, and what its hosts store.

    Applications that share a GKE cluster may serve one model: what is not within the RayService is named by `owned`.
    """

    name: str
    plan: Plan
    storage: Storage
    owned: str

    @property
    def node_pool(self) -> str:
        """Name of its node pools, before their number."""
        return _within(_LONGEST_POOL - len("-999"), self.owned, _shape(self.plan))

    @property
    def compute_class(self) -> str:
        return _within(_LONGEST_LABEL, self.owned, _shape(self.plan))


@dataclass(frozen=True)
class Application:
    """An application that can be rendered. `label` is its name as Kubernetes takes it: of the RayService, and with a suffix of the rest.

    No label has two hyphens in a row. Where a suffix alone could make the name of another application, `own` puts two before it.
    """

    name: str
    label: str
    image: str
    port: int
    gke: GkeSpec
    router: RouterSpec
    pools: tuple[Pool, ...]
    store: StoreSpec | None = None
    route_prefix: str = "/"

    @property
    def namespace(self) -> str:
        return self.gke.namespace

    @property
    def head_pool(self) -> str:
        """Name of the head's node pool, within GKE's limit."""
        return _within(_LONGEST_POOL, f"{_owner(self.label, self.gke)}-head", "-head")

    @property
    def head_account(self) -> str:
        """The head's service account. KubeRay clips names of more than 50 characters, and then finds no account."""
        return _within(_LONGEST_ACCOUNT, f"{self.label}-head", "-head")

    @property
    def slice_account(self) -> str:
        return _within(_LONGEST_ACCOUNT, f"{self.label}-slice", "-slice")

    @property
    def priority_class(self) -> str:
        """Its name, which is of the whole Kubernetes cluster."""
        return f"serving-{self.namespace}--{self.label}"

    @property
    def folders_of_the_image(self) -> list[str]:
        """Paths that engines read and no volume holds."""
        read = {path for pool in self.pools for path in folders(pool.plan)}
        return sorted(path for path in read if not is_mounted(path))

    @property
    def asks_the_hub(self) -> bool:
        """Whether something of a model comes from Hugging Face's site, which may ask for a token."""
        return any(asks_the_hub(pool.plan) for pool in self.pools)


def own(label: str, name: str) -> str:
    """The name of an object of an application, which no object of another one has, whatever that is called."""
    return _within(_LONGEST_SET, f"{label}--{name}", f"--{name}")


def application(
    name: str,
    gke: GkeSpec,
    plans: Sequence[Plan],
    *,
    port: int = 8000,
    router: RouterSpec | None = None,
    store: StoreSpec | None = None,
    route_prefix: str = "/",
) -> Application:
    """Check what Kubernetes, KubeRay and GKE would refuse later; raises ConfigError."""
    router = router or RouterSpec()
    if not gke.image:
        raise ConfigError(
            "gke.image names no image; build one with this repository's Dockerfile, push it, and name it in gke.image or with --image"
        )
    if not _IMAGE.fullmatch(gke.image):
        raise ConfigError(
            f"gke.image {gke.image!r} is no reference of an image; write HOST/FOLDER/NAME:TAG, without https:// and blanks"
        )
    _check_environment(gke, plans)
    if any(_is_not_sold(plan) for plan in plans):
        raise ConfigError(
            "Google sells no flex-start of v4; leave flex-start out of slice.capacity, or take another generation"
        )
    if router.door is Doors.DIRECT:
        raise ConfigError(
            "router.door is direct, and the manifest's Service leads to HAProxy alone, which answers while a router restarts; leave it out"
        )
    if router.keys_file and not _is_of_its_own(router.keys_file):
        raise ConfigError(
            f"router.keys_file is {router.keys_file}; a secret is mounted as a folder of its own: take a path such as /etc/serving/keys.yaml"
        )
    for key, path in _written_on_the_head(router, store).items():
        if not _has_a_volume(path, gke):
            raise ConfigError(
                f"{key} is {path}, which no volume of the head's pod holds; take a path in {STORE} and name a "
                f"PersistentVolumeClaim in gke.store_claim, or take one in /tmp, which goes with the pod"
            )
    storages = [storage_of([other for other in plans if other.slice == plan.slice], gke) for plan in plans]
    mounted = [path for plan in plans for path in folders(plan) if is_mounted(path)]
    if mounted and not gke.weights_bucket:
        raise ConfigError(
            f"{mounted[0]} is read from {WEIGHTS}, where gke.weights_bucket is mounted; name a bucket there"
        )
    label = label_of(name)
    if len(label) > _LONGEST_NAME_OF_HOSTS and any(plan.slice.hosts > 1 for plan in plans):
        raise ConfigError(
            f"application name {name!r} has {len(label)} characters; with slices of several hosts it may have {_LONGEST_NAME_OF_HOSTS}, "
            "for Google's TPU webhook clips longer names and the hosts don't find each other: shorten it"
        )
    return Application(
        name=name,
        label=label,
        image=gke.image,
        port=port,
        gke=gke,
        router=router,
        pools=tuple(
            Pool(pool, plan, storage, f"{_owner(label, gke)}--{pool}")
            for pool, plan, storage in zip(_pool_names(plans), plans, storages, strict=True)
        ),
        store=store,
        route_prefix=route_prefix,
    )


def _is_not_sold(plan: Plan) -> bool:
    """Of https://docs.cloud.google.com/kubernetes-engine/docs/concepts/dws."""
    return plan.slice.generation == "v4" and CapacityType.FLEX_START in plan.model.slice.capacity


def _check_environment(gke: GkeSpec, plans: Sequence[Plan]) -> None:
    for variable, way in _NOT_IN_ENV.items():
        for key, variables in {"env": gke.env, "head_env": gke.head_env}.items():
            if variable in variables:
                raise ConfigError(f"gke.{key} sets {variable}; leave it out: {way}")
    for plan in plans:
        if derived := sorted(gke.env.keys() & plan.environment.keys()):
            raise ConfigError(
                f"gke.env sets {derived[0]}, which the plan of {plan.model.name} derives; leave it out"
            )
    for variable in sorted(gke.env):
        if instead := instead_of_pods(variable):
            raise ConfigError(f"gke.env sets {variable}; {instead}")


def _is_of_its_own(file: str) -> bool:
    """Whether a secret can be mounted as the file's folder, and hides nothing there."""
    folder = posixpath.dirname(file)
    below = (f"{folder}/".startswith(f"{taken}/") for taken in _NO_FOLDER_OF_KEYS)
    return (
        posixpath.normpath(file) == file
        and re.fullmatch(r"/[^/:]+/[^:]+", folder) is not None
        and folder != STORE
        and not any(below)
    )


def _written_on_the_head(router: RouterSpec, store: StoreSpec | None) -> dict[str, str]:
    """Paths by the key that names them."""
    paths = {
        "router.responses_store": router.responses_store and router.responses_store.path,
        "store.folder": store and store.folder,
        "store.files": store and store.files,
    }
    return {key: path for key, path in paths.items() if path and "://" not in path}


def _has_a_volume(path: str, gke: GkeSpec) -> bool:
    volumes = ["/tmp", *([STORE] if gke.store_claim else [])]  # noqa: S108
    return any(f"{posixpath.normpath(path)}/".startswith(f"{volume}/") for volume in volumes)


def label_of(name: str) -> str:
    """The name of an application's RayService and of its Service; raises ConfigError."""
    label = _slug(name)
    if not label:
        raise ConfigError(f"application name {name!r} has neither letters nor digits; give it some")
    if not label[0].isalpha():
        raise ConfigError(
            f"application name {name!r} starts with no letter, as names of services do; change it"
        )
    if len(label) > _LONGEST_NAME:
        raise ConfigError(
            f"application name {name!r} has {len(label)} characters; KubeRay takes {_LONGEST_NAME}: shorten it"
        )
    if label == "kubernetes":
        raise ConfigError(
            f"application name {name!r} is that of Kubernetes' own Service, which would lead to the head; change it"
        )
    if label.endswith(_OF_KUBERAY):
        raise ConfigError(
            f"application name {name!r} ends as names of KubeRay's own Services do ({', '.join(_OF_KUBERAY)}); change it"
        )
    return label


def _pool_names(plans: Sequence[Plan]) -> list[str]:
    """Names of worker groups and node pools: stable, distinct, and with two numbers behind them within GKE's limit."""
    taken: Counter[str] = Counter()
    names = []
    for plan in plans:
        shape = _shape(plan)
        room = min(_MODEL_LETTERS, _LONGEST_POOL - len(shape) - len("-p9-99"))
        name = _slug(plan.model.name)[:room].strip("-") + shape
        if not name[0].isalpha():
            name = f"m{name}"[: len(shape) + room]
        # A number alone stands for a slice: NAME-1 is the node pool of the first pool's second slice.
        names.append(f"{name}-p{taken[name] + 1}" if taken[name] else name)
        taken[name] += 1
    return names


def _shape(plan: Plan) -> str:
    return f"-{plan.slice.generation}-{plan.slice.topology}"


def _owner(label: str, gke: GkeSpec) -> str:
    """The application among all of the GKE cluster: names of two namespaces may be equal. A letter is first, as GKE asks for."""
    return label if gke.namespace == "default" else f"{label}--{gke.namespace}"


def _within(most: int, name: str, end: str) -> str:
    """The name, or its beginning, a mark of all of it and the given end where it has too many characters."""
    if len(name) <= most:
        return name
    mark = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{name[: most - len(mark) - len(end) - 1].rstrip('-')}-{mark}{end}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
