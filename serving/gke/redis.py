"""A Redis for Ray's control store, so that slices outlive the head: one pod, whose disk outlives it too."""

from collections.abc import Iterator
from typing import Any

from serving.gke import access
from serving.gke.application import Application, own

_IMAGE = "redis:7.2-bookworm"
_PORT = 6379
_USER = 999  # redis, in that image
_DATA = "/data"
# Each write is on disk within a second: what a head that starts again would miss at most.
_COMMAND = (
    f'exec redis-server --dir {_DATA} --appendonly yes --appendfsync everysec --requirepass "$PASSWORD"'
)


def name(label: str) -> str:
    """The name of its objects: NAME-redis may be another application's."""
    return own(label, "redis")


def address(app: Application) -> str:
    return f"{name(app.label)}:{_PORT}"


def password(app: Application) -> dict[str, str]:
    """Key of a secret: who knows the cluster's has every right in it anyhow."""
    return {"name": app.gke.cluster_secret, "key": "secret"}


def objects(app: Application) -> Iterator[dict[str, Any]]:
    """A Service, a StatefulSet with a disk, who may reach it, and that it stays where nodes are drained."""
    labels = {"app": name(app.label)}
    yield access.only_from_ours(app, name(app.label), labels)
    # Ray's control store ends with its Redis, and the head with it.
    yield access.disruption_budget(app, name(app.label), labels, 1)
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": access.named(app, name(app.label)),
        "spec": {
            "type": "ClusterIP",
            "selector": labels,
            "ports": [{"name": "redis", "port": _PORT, "protocol": "TCP"}],
        },
    }
    yield {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": access.named(app, name(app.label)),
        "spec": {
            "serviceName": name(app.label),
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": _pod(app)},
            "volumeClaimTemplates": [
                {
                    "metadata": {"name": "data"},
                    "spec": {
                        "accessModes": ["ReadWriteOnce"],
                        "resources": {"requests": {"storage": "10Gi"}},
                    },
                }
            ],
        },
    }


def _pod(app: Application) -> dict[str, Any]:
    size = {"cpu": "250m", "memory": "1Gi"}
    check = {"tcpSocket": {"port": _PORT}, "periodSeconds": 5}
    container = {
        "name": "redis",
        "image": _IMAGE,
        "command": ["sh", "-c", _COMMAND],
        "env": [{"name": "PASSWORD", "valueFrom": {"secretKeyRef": password(app)}}],
        "ports": [{"name": "redis", "containerPort": _PORT}],
        "resources": {"requests": size, "limits": {"memory": size["memory"]}},
        "securityContext": {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "data", "mountPath": _DATA}],
        "livenessProbe": {**check, "initialDelaySeconds": 30, "failureThreshold": 12},
        "readinessProbe": check,
    }
    return {
        "automountServiceAccountToken": False,
        "priorityClassName": app.priority_class,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
    }
