"""Serve's own keys of a deployments/*.yaml. Serve drops keys that it does not know, and says nothing of it. Pure."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from serving.errors import ConfigError

# Of Ray 2.60's schemas; a test holds them to the installed ones.
FILE = (
    "applications",
    "proxy_location",
    "http_options",
    "grpc_options",
    "controller_options",
    "logging_config",
    "tracing_config",
    "target_capacity",
)
APPLICATION = (
    "name",
    "route_prefix",
    "import_path",
    "runtime_env",
    "host",
    "port",
    "deployments",
    "autoscaling_policy",
    "args",
    "logging_config",
    "external_scaler_enabled",
)
HTTP = (
    "host",
    "port",
    "root_path",
    "request_timeout_s",
    "keep_alive_timeout_s",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_keyfile_password",
    "ssl_ca_certs",
)
PROXY_LOCATIONS = ("HeadOnly", "EveryNode", "Disabled")
# What has Serve's controller place whole slices.
HOOK, INSTALL = "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH", "serving.slices.placement.install"
# Keys whose value is never null. Serve refuses the whole file for one that is.
_OF_FILE = ("proxy_location", "http_options", "grpc_options")
_OF_APPLICATION = ("name", "import_path", "runtime_env", "deployments", "args")
_PORTS = range(1, 65536)
# Of HAProxy, which is Serve's and not an application's.
_CERTIFICATE, _KEY = "SERVING_TLS_CERT", "SERVING_TLS_KEY"
_NOTES = "x-"  # a key that begins so is for whoever reads the file, or for YAML's anchors


def check(where: str, raw: Mapping[Any, Any], known: Collection[str], ours: Collection[str]) -> None:
    """Raises ConfigError for a key that Serve would drop; `ours` are those that stand under `args`."""
    for key in map(str, raw):
        if key in known or key.startswith(_NOTES):
            continue
        if key in ours:
            raise ConfigError(
                f"{where}: {key} stands beside args, where Serve drops it; move it under args of the application"
            )
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        raise ConfigError(f"{where}: {key}: unknown key, which Serve drops; {hint}")


def check_values(where: str, raw: Mapping[str, Any]) -> None:
    """Raises ConfigError for what Serve refuses once hosts are there: nulls, its proxy, names, paths and folders of applications."""
    _refuse_nulls(where, raw, _OF_FILE)
    location = raw.get("proxy_location")
    if location not in (None, *PROXY_LOCATIONS):
        raise ConfigError(
            f"{where}: proxy_location: {location!r} is none of Serve's; it has {', '.join(PROXY_LOCATIONS)}"
        )
    taken: set[tuple[str, str]] = set()
    for application in raw["applications"]:
        _refuse_nulls(where, application, _OF_APPLICATION)
        name = application.get("name", "default")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{where}: name: text is needed; put it into quotes (got {name!r})")
        if not name.isprintable():
            raise ConfigError(
                f"{where}: name: {name!a} has control characters; metrics and logs have the name"
            )
        _refuse_folder(f"{where}, application {name}", application)
        path = application.get("route_prefix", "/")
        if path is not None and not _is_route(path):
            raise ConfigError(
                f"{where}: route_prefix: {path!r} is no path; write / or one as /llama, without / at its end"
            )
        for what, value in (("name", name), ("route_prefix", path)):
            if value is not None and (what, value) in taken:
                raise ConfigError(f"{where}: two applications have {what}: {value}; give each its own")
            taken.add((what, value))


def _refuse_nulls(where: str, raw: Mapping[str, Any], never_null: Collection[str]) -> None:
    for key in never_null:
        if key in raw and raw[key] is None:
            raise ConfigError(
                f"{where}: {key}: nothing stands behind it, and Serve takes no null; give it a value, or leave it out"
            )


def _refuse_folder(where: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for a `working_dir` that is on this machine alone."""
    environment = options.get("runtime_env")
    folder = environment.get("working_dir") if isinstance(environment, Mapping) else None
    if isinstance(folder, str) and "://" not in folder:
        raise ConfigError(
            f"{where}: runtime_env.working_dir: {folder} is a folder of this machine, and Serve takes a URI of an archive alone; "
            "put what engines read into the image"
        )


def check_variables(where: str, options: Any) -> None:
    """Raises ConfigError for variables of a `runtime_env` that Ray refuses, and for another callback than the placement's."""
    _refuse_other_than_mappings(where, options, ("runtime_env", "env_vars"))
    variables = _variables(options)
    for name, value in variables.items():
        if not isinstance(value, str):
            raise ConfigError(
                f"{where}: runtime_env.env_vars.{name}: text is needed; write it in quotes (got {value!r})"
            )
    callback = variables.get(HOOK, INSTALL)
    if callback != INSTALL:
        raise ConfigError(
            f"{where}: runtime_env.env_vars.{HOOK}: nothing else places whole slices; write {INSTALL} (got {callback!r})"
        )


def _refuse_other_than_mappings(where: str, options: Any, keys: Sequence[str]) -> None:
    """Raises ConfigError for what is no mapping though others stand in it, as variables in Docker's way: `- NAME=value`."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where}: a mapping is needed, one `key: value` a line (got {options!r})")
    if keys:
        _refuse_other_than_mappings(f"{where}, {keys[0]}", options.get(keys[0]), keys[1:])


def check_certificates(where: str, raw: Mapping[str, Any]) -> None:
    """Raises ConfigError for certificates of applications, which would speak plain HTTP, and for one without its key, with which HAProxy ends."""
    for application in raw["applications"]:
        if named := _variables(application).keys() & {_CERTIFICATE, _KEY}:
            raise ConfigError(
                f"{where}, application {application.get('name', 'default')}: runtime_env.env_vars.{min(named)}: TLS ends in front of the "
                "applications, which would speak plain HTTP; set it in controller_options.runtime_env.env_vars"
            )
    given = _variables(raw.get("controller_options")).keys() & {_CERTIFICATE, _KEY}
    if len(given) == 1:
        other = _KEY if _CERTIFICATE in given else _CERTIFICATE
        raise ConfigError(
            f"{where}, controller_options: runtime_env.env_vars: {min(given)} stands alone; set {other} too"
        )


def _variables(options: Any) -> Mapping[str, Any]:
    variables = options
    for key in ("runtime_env", "env_vars"):
        variables = variables.get(key) if isinstance(variables, Mapping) else None
    return variables if isinstance(variables, Mapping) else {}


def _is_route(path: Any) -> bool:
    return (
        isinstance(path, str)
        and path.startswith("/")
        and (path == "/" or not path.endswith("/"))
        and not set("{}") & set(path)
    )


def is_port(port: Any) -> bool:
    """Whether a server can be told to listen there, and clients which it is."""
    return type(port) is int and port in _PORTS
