"""Serve's own options, beside `args`: what of them can't work in the manifest's pods, and what the load balancer asks for."""

import posixpath
import re
from collections.abc import Mapping
from typing import Any

from serving.errors import ConfigError
from serving.gke.application import Application
from serving.gke.pods import AGENT_PORT, DASHBOARD_PORT, GCS_PORT, METRICS_PORT
from serving.planning.engine_environment import instead_of_pods

# What listens in the head's pod beside the door.
_TAKEN = {
    GCS_PORT: "Ray's control store",
    DASHBOARD_PORT: "Ray's dashboard",
    AGENT_PORT: "Ray's agent",
    METRICS_PORT: "Ray's metrics",
    8404: "HAProxy's statistics",
    8500: "the proxy that Serve falls back to",
    9101: "HAProxy's metrics",
    10001: "Ray's clients",
    44217: "Ray's autoscaler",
    44227: "the metrics of Ray's dashboard",
}
# Serve gives its routers the first of these ports, Ray its workers the others.
_RANGES = {range(30000, 31001): "a router of Serve's", range(10002, 20000): "a worker of Ray's"}
# Google's load balancers keep connections for 600 s, and answer 502 where one that they take is being closed.
_KEPT_S, _KEEP_S = 600, 620
_LOOPBACK = ("localhost", "127.", "::1")
_HOOK, _INSTALL = "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH", "serving.slices.placement.install"
# By the key of `gke` that names the secret which they come from.
_SECRETS = {
    "HF_TOKEN": "gke.token_secret",
    "PGPASSWORD": "gke.database_secret",
    "SERVING_CLUSTER_SECRET": "gke.cluster_secret",
    "SERVING_KEYS": "gke.keys_secret, with router.keys_file",
    "OTEL_EXPORTER_OTLP_HEADERS": "gke.tracing_secret",
}
_PASSWORD = re.compile(r"\w+://([^/@]*:[^/@]+@|.*[?&]password=)")
_CERTIFICATES = ("SERVING_TLS_CERT", "SERVING_TLS_KEY")
_WRITABLE = "/tmp"  # noqa: S108  on head and slices alike


def check(app: Application, document: Mapping[str, Any]) -> None:
    """Raises ConfigError for a door that nobody reaches, and for slices that Serve would not place whole."""
    if document.get("proxy_location") == "Disabled":
        raise ConfigError(
            "proxy_location is Disabled, and nobody gets in without Serve's proxy; set HeadOnly"
        )
    ours = [entry for entry in document.get("applications") or () if entry.get("name", "default") == app.name]
    if any("route_prefix" in entry and entry["route_prefix"] is None for entry in ours):
        raise ConfigError(
            f"route_prefix of {app.name} is null, and Serve sends it no request; leave it out, or set /"
        )
    host = str((document.get("http_options") or {}).get("host") or "")
    if host.startswith(_LOOPBACK):
        raise ConfigError(
            f"http_options.host is {host}, where nobody outside the head's pod gets in; set host: 0.0.0.0"
        )
    owners = {**{port: owner for ports, owner in _RANGES.items() for port in ports}, **_TAKEN}
    if owner := owners.get(app.port):
        raise ConfigError(
            f"http_options.port is {app.port}, which {owner} has in the head's pod; take another, as 8000"
        )
    kept_s = (document.get("http_options") or {}).get("keep_alive_timeout_s")
    if app.gke.gateway and isinstance(kept_s, int) and kept_s <= _KEPT_S:
        raise ConfigError(
            f"http_options.keep_alive_timeout_s is {kept_s}, and Google's load balancer of gke.gateway keeps connections for {_KEPT_S} s: "
            f"requests would meet closed ones; leave it out, or take {_KEEP_S}"
        )
    _check_secrets(app, document)
    _check_certificates(app, document)
    _check_logs(document)
    _check_engine(document)
    variables = _variables(document.get("controller_options"))
    several = any(pool.plan.slice.hosts > 1 for pool in app.pools)
    if several and _HOOK not in {**variables, **app.gke.head_env}:
        raise ConfigError(
            f"nothing has Serve place whole slices; set controller_options.runtime_env.env_vars.{_HOOK}: {_INSTALL}"
        )


def rendered(app: Application, document: Mapping[str, Any]) -> dict[str, Any]:
    """The document, whose door keeps connections for longer than a load balancer in front of it does."""
    if not app.gke.gateway:
        return dict(document)
    return {
        **document,
        "http_options": {"keep_alive_timeout_s": _KEEP_S, **(document.get("http_options") or {})},
    }


def _check_certificates(app: Application, document: Mapping[str, Any]) -> None:
    """TLS ends at a load balancer: no volume of the head's pod holds a certificate, and probes and scrapes speak plain HTTP."""
    http = document.get("http_options") or {}
    given = {f"http_options.{key}": http[key] for key in http if key.startswith("ssl_")}
    for where, variables in (
        ("controller_options sets", _variables(document.get("controller_options"))),
        ("gke.head_env sets", app.gke.head_env),
    ):
        given |= {f"{where} {name}": variables.get(name) for name in _CERTIFICATES}
    if named := [name for name, value in given.items() if value is not None]:
        problem = named[0] if " " in named[0] else f"{named[0]} is set"
        raise ConfigError(
            f"{problem}, and the head's pod holds no certificate; leave it out, and let a load balancer speak TLS: gke.gateway"
        )


def _check_logs(document: Mapping[str, Any]) -> None:
    """Serve makes the folder of its logs when it starts, on file systems that are read-only but for volumes."""
    for options in (document, *(document.get("applications") or ())):
        logging = options.get("logging_config")
        folder = logging.get("logs_dir") if isinstance(logging, Mapping) else None
        if folder and not f"{posixpath.normpath(str(folder))}/".startswith(f"{_WRITABLE}/"):
            raise ConfigError(
                f"logging_config.logs_dir is {folder}, which no volume of the pods holds; leave it out, or take a folder in {_WRITABLE}"
            )


def _check_engine(document: Mapping[str, Any]) -> None:
    """Engines on slices of one host would take such variables, those on several would not, and no plan sees them."""
    for options in document.get("applications") or ():
        for variable in sorted(_variables(options)):
            if instead := instead_of_pods(variable):
                raise ConfigError(f"a runtime_env sets {variable}; {instead}")


def _check_secrets(app: Application, document: Mapping[str, Any]) -> None:
    """A RayService is read by whoever may look at it, and KubeRay logs the whole of Serve's file."""
    for options in (document.get("controller_options"), *(document.get("applications") or ())):
        if named := [variable for variable in _SECRETS if variable in _variables(options)]:
            raise ConfigError(
                f"a runtime_env sets {named[0]}, which would stand in the RayService and in KubeRay's log; leave it out, "
                f"and name a secret in {_SECRETS[named[0]]}"
            )
    database = app.store.database if app.store else None
    if database and _PASSWORD.match(database):
        raise ConfigError(
            "store.database has a password, which would stand in the RayService and in KubeRay's log; leave it out, "
            f"and name a secret in {_SECRETS['PGPASSWORD']}"
        )


def _variables(options: Any) -> Mapping[str, Any]:
    variables = options
    for key in ("runtime_env", "env_vars"):
        variables = variables.get(key) if isinstance(variables, Mapping) else None
    return variables if isinstance(variables, Mapping) else {}
