"""What Kubernetes has of an application, by kubectl, where that is there and reaches a cluster."""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from serving.config import DeploymentFile
from serving.doctor.facts import Deployed, Endpoints
from serving.errors import ConfigError
from serving.gke import redis
from serving.gke.application import application, label_of
from serving.gke.manifest import ray_service
from serving.planning import Plan

_KUBECTL_S = 10
_NODE_POOL = "cloud.google.com/gke-nodepool"
_ANY_IMAGE = "image"  # where the YAML names none, as with `serving manifest --image`


def kubernetes(deployment: DeploymentFile) -> Sequence[Endpoints] | str:
    """The Services of the file's applications; why not, where there is no kubectl or it reaches no cluster."""
    if shutil.which("kubectl") is None:
        return "kubectl is not here"
    answers = []
    for name, config in deployment.services.items():
        namespace = config.gke.namespace
        try:
            label = label_of(name)
            slices = _kubectl(namespace, "endpointslices", f"kubernetes.io/service-name={label}")
            heads = _kubectl(namespace, "pods", f"app={label},ray.io/node-type=head")
        except ConfigError as error:
            return error.message
        except (OSError, ValueError) as error:
            return f"kubectl can't tell ({error})"
        answers.append(endpoints_of(label, slices, heads))
    return answers


def endpoints_of(service: str, slices: Mapping[str, Any], heads: Mapping[str, Any]) -> Endpoints:
    """What `kubectl get -o json` says of a Service's EndpointSlices and of the heads' pods."""
    ready = [
        address
        for entry in slices["items"]
        for endpoint in entry.get("endpoints") or ()
        # By the API's own words null counts as ready.
        if (endpoint.get("conditions") or {}).get("ready") is not False
        for address in endpoint["addresses"]
    ]
    pods = [pod.get("status", {}).get("podIP", "") for pod in heads["items"]]
    # Kubernetes keeps an EndpointSlice of every Service that selects pods, if an empty one.
    return Endpoints(service, tuple(sorted(ready)), tuple(filter(None, pods)), there=bool(slices["items"]))


def deployed(deployment: DeploymentFile, plans: Sequence[Plan]) -> Deployed | str:
    """The application's RayService and RayClusters, beside what the YAML renders; why not, where that can't be told."""
    if shutil.which("kubectl") is None:
        return "kubectl is not here"
    if len(deployment.services) != 1:
        return "a manifest is of one application, and the file has several"
    ((name, config),) = deployment.services.items()
    namespace = config.gke.namespace
    kuberay, unseen = True, ""
    services, clusters = [], []
    try:
        label = label_of(name)
        try:
            services = _kubectl(namespace, "rayservices.ray.io", f"app={label}")["items"]
            of_it = f"ray.io/originated-from-cr-name={label},ray.io/originated-from-crd=RayService"
            clusters = _kubectl(namespace, "rayclusters.ray.io", of_it)["items"]
        except _NoSuchKindError:
            kuberay = False
        except ValueError as error:
            # Who may see pods may not see these: Kubernetes' own role `view` has no right on them.
            unseen = f"kubectl can't tell ({error})"
        # KubeRay's pod that empties the Redis ends by itself.
        ours = f"app in ({label},{redis.name(label)}),ray.io/node-type notin (redis-cleanup)"
        pods = _kubectl(namespace, "pods", ours)["items"]
        node_pools = _node_pools(namespace) if pods else {}
    except ConfigError as error:
        return error.message
    except (OSError, ValueError) as error:
        return f"kubectl can't tell ({error})"
    service = next((entry for entry in services if entry["metadata"]["name"] == label), None)
    gke = config.gke if config.gke.image else config.gke.model_copy(update={"image": _image(service)})
    try:
        app = application(name, gke, plans, port=deployment.port, router=config.router, store=config.store)
    except ConfigError as error:
        return error.message
    wanted = ray_service(app, deployment.document)
    return Deployed(
        label, namespace, wanted, service, tuple(clusters), tuple(pods), kuberay, unseen, node_pools
    )


def _node_pools(namespace: str) -> Mapping[str, str] | str:
    """The node pool of each TPU node; why not, where this user may not see nodes, which are in no namespace."""
    try:
        nodes = _kubectl(namespace, "nodes", "cloud.google.com/gke-tpu-accelerator")["items"]
    except ValueError as error:
        return f"kubectl can't tell ({error})"
    named = ((node["metadata"]["name"], node["metadata"].get("labels") or {}) for node in nodes)
    return {name: labels[_NODE_POOL] for name, labels in named if _NODE_POOL in labels}


def _image(service: Mapping[str, Any] | None) -> str:
    """The head's, as Kubernetes has it."""
    try:
        pod = (service or {})["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
        return str(pod["containers"][0]["image"])
    except (KeyError, IndexError, TypeError):
        return _ANY_IMAGE


class _NoSuchKindError(ValueError):
    """The cluster has no objects of the kind: who defines it is not installed."""


def _kubectl(namespace: str, kind: str, selector: str) -> Any:
    """Raises ValueError with the last line of kubectl's own words."""
    limit = f"--request-timeout={_KUBECTL_S // 2}s"
    command = ["kubectl", "get", kind, "-n", namespace, "-l", selector, "-o", "json", limit]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,  # it would ask the terminal for a user's name, unseen
            capture_output=True,
            text=True,
            timeout=_KUBECTL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"it gave no answer in {_KUBECTL_S} s") from None
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["it failed"])[-1]
        raise (_NoSuchKindError if "the server doesn't have a resource type" in words else ValueError)(words)
    answer = json.loads(done.stdout)
    if (answer.get("items") if isinstance(answer, dict) else None) is None:
        raise ValueError("it printed no list")
    return answer
