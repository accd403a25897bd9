"""Who reaches the service, as whom it runs, and what keeps it running: everything beside the RayService itself."""

from collections.abc import Iterator
from typing import Any

from serving.config import GatewaySpec
from serving.gke.application import Application, own
from serving.gke.pods import DASHBOARD_PORT, METRICS_PORT

# Above the pods that say nothing of their priority (0), below Kubernetes' own (2e9).
_PRIORITY = 1_000_000
# KubeRay asks the head how Serve is. This label is its pod's by chart and by kustomize; Google's comes by kube-system.
_OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}
# Of Google's managed Prometheus: where GKE runs it, and where it is installed by hand.
_COLLECTORS = ["gke-gmp-system", "gmp-system"]
# A load balancer of Google's ends answers after 30 s by itself; a stream may go on for long.
_LONGEST_ANSWER_S = 3600


def objects(app: Application) -> Iterator[dict[str, Any]]:
    """All of them, in the order in which they are applied."""
    yield _priority_class(app)
    yield _service_account(app, app.head_account)
    yield _service_account(app, app.slice_account)
    yield from _network_policies(app)
    yield from _disruption_budgets(app)
    yield _service(app)
    if app.gke.gateway:
        yield from _gateway(app, app.gke.gateway)
    yield from _monitoring(app)


def named(app: Application, name: str) -> dict[str, Any]:
    return {"name": name, "namespace": app.namespace, "labels": {"app": app.label}}


def _head(app: Application) -> dict[str, str]:
    return {"app": app.label, "ray.io/node-type": "head"}


def _priority_class(app: Application) -> dict[str, Any]:
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": app.priority_class},
        "value": _PRIORITY,
        "globalDefault": False,
        "description": f"{app.label} in {app.namespace}: inference, before batch work",
    }


def _service_account(app: Application, name: str) -> dict[str, Any]:
    """Without rights in Kubernetes. KubeRay gives the head's what its autoscaler needs; IAM knows both by their names."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": named(app, name),
        "automountServiceAccountToken": False,
    }


def _network_policies(app: Application) -> Iterator[dict[str, Any]]:
    """Head and slices talk to each other; everybody else reaches the door, and Google's collectors the metrics."""
    ours = {"from": [{"podSelector": {"matchLabels": {"app": app.label}}}]}
    collectors = {
        "from": [_pods_of_namespaces(_COLLECTORS)],
        "ports": [_tcp(METRICS_PORT)],
    }
    operator = {
        "from": [
            {"namespaceSelector": {}, "podSelector": {"matchLabels": _OPERATOR}},
            _pods_of_namespaces(["kube-system"]),
        ],
        "ports": [_tcp(DASHBOARD_PORT)],
    }
    door = {"ports": [_tcp(app.port)]}
    for suffix, kind, ingress in (
        ("head", "head", [ours, door, operator, collectors]),
        ("slices", "worker", [ours, collectors]),
    ):
        yield {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": named(app, f"{app.label}-{suffix}"),
            "spec": {
                "podSelector": {"matchLabels": {"app": app.label, "ray.io/node-type": kind}},
                "policyTypes": ["Ingress"],
                "ingress": ingress,
            },
        }


def _pods_of_namespaces(names: list[str]) -> dict[str, Any]:
    key = "kubernetes.io/metadata.name"
    return {"namespaceSelector": {"matchExpressions": [{"key": key, "operator": "In", "values": names}]}}


def _tcp(port: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": port}


def only_from_ours(app: Application, name: str, labels: dict[str, str]) -> dict[str, Any]:
    """A policy that lets pods with these labels be reached by the application's own alone."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": named(app, name),
        "spec": {
            "podSelector": {"matchLabels": labels},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": app.label}}}]}],
        },
    }


def _disruption_budgets(app: Application) -> Iterator[dict[str, Any]]:
    """Who drains nodes leaves the head, and of each pool the slices that always serve, whole."""
    yield disruption_budget(app, f"{app.label}-head", _head(app), 1)
    for pool in app.pools:
        labels = {"app": app.label, "ray.io/group": pool.name}
        pods = pool.plan.model.replicas.min * pool.plan.slice.hosts
        # One of 0 too: `kubectl apply` would leave that of a minimum which is no more.
        yield disruption_budget(app, f"{app.label}--{pool.name}", labels, pods)


def disruption_budget(app: Application, name: str, labels: dict[str, str], pods: int) -> dict[str, Any]:
    """Who drains nodes leaves so many of the pods with these labels."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": named(app, name),
        "spec": {"minAvailable": pods, "selector": {"matchLabels": labels}},
    }


def _service(app: Application) -> dict[str, Any]:
    """The door. KubeRay's own NAME-serve-svc also has slices for endpoints, where nothing listens (kuberay#4994)."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": named(app, app.label),
        "spec": {
            "type": "ClusterIP",
            "selector": _head(app),
            "ports": [{"name": "http", "port": app.port, "targetPort": "serve", "protocol": "TCP"}],
        },
    }


def _gateway(app: Application, spec: GatewaySpec) -> Iterator[dict[str, Any]]:
    """TLS ends at Google's load balancer, which reaches the head's pod by itself."""
    service = {"group": "", "kind": "Service", "name": app.label}
    certificate = {"group": "", "kind": "Secret", "name": spec.certificate_secret}
    yield {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "Gateway",
        "metadata": named(app, app.label),
        "spec": {
            "gatewayClassName": spec.class_name,
            "listeners": [
                {
                    "name": "https",
                    "hostname": spec.hostname,
                    "port": 443,
                    "protocol": "HTTPS",
                    "tls": {"mode": "Terminate", "certificateRefs": [certificate]},
                    "allowedRoutes": {"namespaces": {"from": "Same"}},
                }
            ],
        },
    }
    yield {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": named(app, app.label),
        "spec": {
            "parentRefs": [{"name": app.label, "sectionName": "https"}],
            "hostnames": [spec.hostname],
            "rules": [{"backendRefs": [{"name": app.label, "port": app.port}]}],
        },
    }
    # HAProxy's own answer: /health fails while no slice serves, and clients should get our 503 with its Retry-After.
    check = {"type": "HTTP", "httpHealthCheck": {"port": app.port, "requestPath": "/-/healthz"}}
    yield {
        "apiVersion": "networking.gke.io/v1",
        "kind": "HealthCheckPolicy",
        "metadata": named(app, app.label),
        "spec": {"default": {"config": check}, "targetRef": service},
    }
    yield {
        "apiVersion": "networking.gke.io/v1",
        "kind": "GCPBackendPolicy",
        "metadata": named(app, app.label),
        "spec": {"default": {"timeoutSec": _LONGEST_ANSWER_S}, "targetRef": service},
    }


def _monitoring(app: Application) -> Iterator[dict[str, Any]]:
    """Scrapes of the service's page, once, at the head, and of Ray's own metrics on every pod."""
    page = f"{app.route_prefix.rstrip('/')}/metrics"
    door: dict[str, Any] = {"port": "serve", "path": page, "interval": "30s"}
    if app.router.private_status:
        key = {"secret": {"name": app.gke.metrics_secret, "key": "key"}}
        door["authorization"] = {"type": "Bearer", "credentials": key}
        yield from _collectors_read(app, app.gke.metrics_secret)
    for name, labels, endpoint in (
        (app.label, _head(app), door),
        (own(app.label, "ray"), {"app": app.label}, {"port": "metrics", "interval": "30s"}),
    ):
        yield {
            "apiVersion": "monitoring.googleapis.com/v1",
            "kind": "PodMonitoring",
            "metadata": named(app, name),
            "spec": {"selector": {"matchLabels": labels}, "endpoints": [endpoint]},
        }


def _collectors_read(app: Application, secret: str) -> Iterator[dict[str, Any]]:
    """The right of Google's collectors to read one secret."""
    name = f"{app.label}-metrics-key"
    rule = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [secret], "verbs": ["get"]}
    yield {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": named(app, name),
        "rules": [rule],
    }
    yield {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": named(app, name),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [
            {"kind": "ServiceAccount", "name": "collector", "namespace": namespace}
            for namespace in _COLLECTORS
        ],
    }
