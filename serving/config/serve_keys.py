"""Serve's own keys of a deployments/*.yaml. Serve drops keys that it does not know, and says nothing of it. Pure."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from serving.errors import ConfigError

# Of Ray 2.60's schemas; a test holds them to the installed ones.
FILE = (
    *("applications", "proxy_location", "http_options", "grpc_options", "controller_options"),
    *("logging_config", "tracing_config", "target_capacity"),
)
APPLICATION = (
    *(
        "name",
        "route_prefix",
        "import_path",
        "runtime_env",
        "host",
        "port",
        "deployments",
        "autoscaling_policy",
    ),
    *("args", "logging_config", "external_scaler_enabled"),
)
HTTP = (
    *("host", "port", "root_path", "request_timeout_s", "keep_alive_timeout_s"),
    *("ssl_keyfile", "ssl_certfile", "ssl_keyfile_password", "ssl_ca_certs"),
)
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
