"""A service as Kubernetes objects for GKE with KubeRay: one stream for `kubectl apply -f -`, or a base for kustomize.

A pool is a worker group and a slice is one of its replicas, of `numOfHosts` pods, which KubeRay makes and deletes
together. The head has no TPU and carries the router. What only `gcloud` can make stands in comments on top.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import yaml

from serving.config import ON_DISK, OWN_REDIS
from serving.gke import access, nodepools, pods, redis, serve_config
from serving.gke.application import Application
from serving.gke.storage import buckets
from serving.tpu import POD_TYPE_LABEL, POOL_LABEL, pool_label

RAY_VERSION = "2.60.0"

KUSTOMIZATION = "kustomization.yaml"

_IDLE_S = 600  # a slice takes minutes to get and to load
# What kubectl and KubeRay take for a boolean or a number where PyYAML sees text, and writes no quotes: y, 0o17, 08, 1e3.
_NO_TEXT_IN_GO = re.compile(
    r"[yYnN]|[-+]?(0_*[oOxX][\da-fA-F_]+|([\d_]+\.?[\d_]*|\.[\d_]+)([eE]_*[-+]?[\d_]+)?)"
)
# Limits of Ray's autoscaler that hold for pods and are wrong for slices:
_AUTOSCALER = {
    # Ray asks for 10 pods at once; the part of a slice among them is ordered nowhere.
    "AUTOSCALER_MAX_CONCURRENT_LAUNCHES": "10000",
    # Ray deletes pods that have waited for an hour, and with them their place in the queue for hardware.
    "RAY_AUTOSCALER_RECONCILE_ALLOCATE_STATUS_TIMEOUT_S": str(30 * 24 * 3600),
    # Ray's KubeRay provider ignores a repeated request. Until the last repeat has timed out (40 minutes at Ray's 3), the
    # pods of an order for part of a slice count as coming.
    "RAY_AUTOSCALER_RECONCILE_MAX_NUM_RETRY_REQUEST_TO_ALLOCATE": "0",
    "HOME": "/tmp",  # noqa: S108  the root file system is read-only
}
_MEMBER = (
    "principal://iam.googleapis.com/projects/$PROJECT_NUMBER/locations/global/workloadIdentityPools/$PROJECT.svc.id.goog"
    "/subject/ns/{namespace}/sa/{account}"
)


def render(app: Application, document: dict[str, Any]) -> str:
    """The manifest of an application as text; `document` is Serve's config file."""
    head = f"# {app.name}: serving manifest FILE | kubectl apply -f -\n{_before(app)}"
    return head + "".join(f"---\n{_text(resource)}" for resource in _objects(app, document))


def kustomize(app: Application, document: dict[str, Any]) -> dict[str, str]:
    """The same objects as a base for kustomize: file names to texts, one file a kind."""
    files: dict[str, str] = {}
    for resource in _objects(app, document):
        file = f"{resource['kind'].lower()}.yaml"
        files[file] = f"{files[file]}---\n" if file in files else ""
        files[file] += _text(resource)
    base = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": sorted(files),
    }
    return {KUSTOMIZATION: f"{base_mark(app)}\n{_before(app)}{_text(base)}", **files}


def base_mark(app: Application) -> str:
    """The first line of a base's kustomization.yaml: whose it is, and that it is not to be edited."""
    return f"# {app.name}: written by `serving manifest FILE --kustomize DIR`; change it in an overlay."


def _objects(app: Application, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for pool in app.pools:
        if nodepools.falls_back(pool.plan):
            yield nodepools.compute_class(pool, app.gke)
    for pool in app.pools:
        if nodepools.needs_network_claims(pool.plan, app.gke):
            yield nodepools.network_claims(pool.owned, app.namespace)
    yield from access.objects(app)
    if app.gke.control_store == OWN_REDIS:
        yield from redis.objects(app)
    yield ray_service(app, document)


def _before(app: Application) -> str:
    """What has to be there before the objects are: nodes, rights on buckets, secrets."""
    lines = [nodepools.head_line(app.head_pool, app.gke)]
    lines += [line for pool in app.pools for line in nodepools.gcloud_lines(pool, app.gke)]
    text = "# Nodes first:\n" + _comments(lines)
    if rights := list(_bucket_rights(app)):
        text += "# Rights on buckets:\n" + _comments(rights)
    if paths := app.folders_of_the_image:
        text += f"# In the image, for no volume of the manifest holds them: {', '.join(paths)}\n"
    if app.gke.kueue_queue:
        text += (
            "# KubeRay 1.6.1 or 1.6.2: 1.7 leaves what Kueue has admitted suspended (docs/guides/gke.md)\n"
        )
    return f"{text}# Secrets in the namespace {app.namespace}: {', '.join(_secrets(app))}\n"


def _comments(lines: list[str]) -> str:
    return "".join(f"#   {line}\n" for line in lines)


def _bucket_rights(app: Application) -> Iterator[str]:
    """Least rights: slices write what they compiled to the mounted bucket and only read what is streamed, the head writes files."""
    wanted: dict[tuple[str, str, str], None] = {}
    if bucket := app.gke.weights_bucket:
        wanted[bucket, "objectUser", app.slice_account] = None
        wanted[bucket, "objectViewer", app.head_account] = None
    scheme, _, path = (app.store.files_at if app.store else "").partition("://")
    if scheme == "gs":
        wanted[path.partition("/")[0], "objectUser", app.head_account] = None
    for bucket in (bucket for pool in app.pools for bucket in buckets(pool.plan)):
        wanted[bucket, "objectViewer", app.slice_account] = None
        # The Run:ai streamer 0.15 asks for the bucket itself first (storage.buckets.get), which readers of objects may not.
        wanted[bucket, "legacyBucketReader", app.slice_account] = None
    for bucket, role, account in wanted:
        member = _MEMBER.format(namespace=app.namespace, account=account)
        yield f'gcloud storage buckets add-iam-policy-binding gs://{bucket} --role=roles/storage.{role} --member="{member}"'


def _secrets(app: Application) -> Iterator[str]:
    yield f"{app.gke.cluster_secret} (key secret)"
    if app.asks_the_hub and app.gke.token_secret:
        yield f"{app.gke.token_secret} (key token)"
    if app.router.keys_file:
        yield f"{app.gke.keys_secret} (key keys.yaml)"
    if app.router.private_status:
        yield f"{app.gke.metrics_secret} (key key)"
    if app.gke.redis_secret:
        yield f"{app.gke.redis_secret} (key password)"
    if app.gke.database_secret:
        yield f"{app.gke.database_secret} (key password)"
    if app.gke.tracing_secret:
        yield f"{app.gke.tracing_secret} (key headers)"
    if app.gke.gateway:
        yield f"{app.gke.gateway.certificate_secret} (kubernetes.io/tls)"


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and every list and mapping in full."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else "'" if _NO_TEXT_IN_GO.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _block)


def _text(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120)


def ray_service(app: Application, document: dict[str, Any]) -> dict[str, Any]:
    """The RayService among the manifest's objects."""
    queue = app.gke.kueue_queue
    metadata: dict[str, Any] = {"name": app.label, "namespace": app.namespace, "labels": {"app": app.label}}
    if queue:
        # Kueue admits a cluster that scales itself only as an elastic job.
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = queue
        metadata["annotations"] = {"kueue.x-k8s.io/elastic-job": "true"}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": metadata,
        "spec": {
            # KubeRay's own choice, NewCluster, takes as many slices again while an image changes, and waits for ever
            # where there are none. A changed serveConfigV2 is rolled out slice by slice without it.
            "upgradeStrategy": {"type": "None"},
            "serveConfigV2": _text(serve_config.rendered(app, document)),
            "rayClusterConfig": {
                "rayVersion": RAY_VERSION,
                # Ray's processes and its REST API ask for a token, which KubeRay makes.
                "authOptions": {"mode": "token"},
                **_control_store(app),
                "enableInTreeAutoscaling": True,
                "autoscalerOptions": {
                    "version": "v2",
                    "idleTimeoutSeconds": _IDLE_S,
                    "env": [{"name": name, "value": value} for name, value in _AUTOSCALER.items()],
                    **pods.autoscaler(app),
                },
                "headGroupSpec": pods.head(app),
                "workerGroupSpecs": _worker_groups(app),
            },
        },
    }


def _control_store(app: Application) -> dict[str, Any]:
    """With a lasting store, KubeRay's workers wait 10 minutes for a head; Ray's own minute would end their slices."""
    match app.gke.control_store:
        case None:
            return {}
        case store if store == ON_DISK:
            return {"gcsFaultToleranceOptions": {"backend": ON_DISK}}
        case store if store == OWN_REDIS:
            address, password = redis.address(app), redis.password(app)
        case store:
            address = store
            password = {"name": app.gke.redis_secret, "key": "password"} if app.gke.redis_secret else {}
    options: dict[str, Any] = {"redisAddress": address}
    if password:
        options["redisPassword"] = {"valueFrom": {"secretKeyRef": password}}
    return {"gcsFaultToleranceOptions": options}


def _worker_groups(app: Application) -> list[dict[str, Any]]:
    """One a pool. Without priorities the autoscaler alternates hosts of groups of one shape, and orders no whole slice.

    No group depends on those behind it, but for the disk of one that may get a larger model's slices: all that KubeRay adds to a
    running cluster are groups at the end of the ones it has.
    """
    before: Counter[str] = Counter()
    groups = []
    for pool in app.pools:
        counts = pool.plan.model.replicas
        group = {
            "groupName": pool.name,
            "replicas": counts.min,
            # Serve's own minimum holds its slices. A minimum here would keep as many idle hosts, of any slices.
            "minReplicas": 0,
            "maxReplicas": counts.max,
            "numOfHosts": pool.plan.slice.hosts,
            "rayStartParams": {},
            # Ray sets the first on the hosts itself; the autoscaler has to know both before there are hosts.
            "labels": {
                POD_TYPE_LABEL: pool.plan.slice.pod_type,
                POOL_LABEL: pool_label(pool.plan.pool),
            },
            "template": pods.host(app, pool),
        }
        if before[pool.plan.slice.pod_type]:
            group["priority"] = -before[pool.plan.slice.pod_type]  # the first has KubeRay's default, 0
        before[pool.plan.slice.pod_type] += 1
        groups.append(group)
    return groups
