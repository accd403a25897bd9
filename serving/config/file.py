"""The deployments/*.yaml as a whole, which is Serve's. Pure but for the reading."""

import difflib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.config import serve_keys, strict_yaml
from serving.config.router import Doors
from serving.config.service import ServiceConfig, parse
from serving.errors import ConfigError

# The application builder, as `import_path` of an application names it.
IMPORT_PATH = "serving.app:build"
# Files of a folder that a refusal names: a line of a terminal has no room for more.
_MOST_NAMED = 8


@dataclass(frozen=True)
class DeploymentFile:
    """A deployments/*.yaml: its services by application, the port Serve opens, and the parsed document."""

    path: Path
    port: int
    services: dict[str, ServiceConfig]
    document: dict[str, Any]

    def route_prefix(self, name: str) -> str:
        """The path below which an application is served, as Serve's config file has it."""
        application = next(
            entry for entry in self.document["applications"] if str(entry.get("name", "default")) == name
        )
        return str(application.get("route_prefix") or "/")


def load(path: Path) -> DeploymentFile:
    """Read our applications from a Serve config file; raises ConfigError."""
    raw = _read(path)
    serve_keys.check(str(path), raw, serve_keys.FILE, ServiceConfig.model_fields)
    serve_keys.check_values(str(path), raw)
    serve_keys.check_variables(f"{path}, controller_options", raw.get("controller_options"))
    serve_keys.check_certificates(str(path), raw)
    services = {}
    for application in raw["applications"]:
        if application.get("import_path") != IMPORT_PATH:
            continue  # another project's application
        name = str(application.get("name", "default"))
        where = f"{path}, application {name}"
        serve_keys.check(where, application, serve_keys.APPLICATION, ServiceConfig.model_fields)
        serve_keys.check_variables(where, application)
        try:
            services[name] = parse(application.get("args") or {})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}") from None
    if not services:
        named = " and ".join(str(application.get("import_path")) for application in raw["applications"])
        raise ConfigError(
            f"{path}: no application has import_path: {IMPORT_PATH} (got {named}); see deployments/llama.yaml"
        )
    port = _port(path, raw.get("http_options") or {})
    _check_doors(path, port, services)
    return DeploymentFile(path, port, services, raw)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = strict_yaml.load(path.read_bytes(), str(path))
    except OSError as error:
        hint = ""
        with suppress(OSError):  # of a name too long, or below a folder that is closed to this user
            hint = _files_meant(path)
        raise ConfigError(f"{path}: {error.strerror}{hint}") from None
    applications = raw.get("applications") if isinstance(raw, dict) else None
    if not isinstance(applications, list) or not applications:
        raise ConfigError(f"{path}: no applications; see deployments/llama.yaml")
    if not all(isinstance(application, dict) for application in applications):
        raise ConfigError(f"{path}: applications: each is a mapping with import_path and args")
    return dict(raw)


def _files_meant(path: Path) -> str:
    """A hint with the YAML that a misspelt name stands for, else with those of the folder.

    A folder that has a folder `deployments` is a checkout: its own YAMLs are settings of tools.
    """
    folder = path if path.is_dir() else path.parent
    if (folder / "deployments").is_dir():
        folder /= "deployments"
    names = [name for name in sorted(file.name for file in folder.glob("*.y*ml")) if not name.startswith(".")]
    if path.is_dir():
        return f"; name a file of {folder}: {_some(names)}" if names else "; name a YAML"
    if near := difflib.get_close_matches(path.name, names, n=1):
        return f"; did you mean {folder / near[0]}?"
    return f"; {folder} has {_some(names)}" if names else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")


def _check_doors(path: Path, port: int, services: Mapping[str, ServiceConfig]) -> None:
    """Routers of two applications on one port would get each other's requests."""
    taken = {port: "HAProxy has as http_options.port"}
    for name, service in services.items():
        if service.router.door is Doors.DIRECT:
            own = service.router.direct_port
            if own in taken:
                raise ConfigError(
                    f"{path}, application {name}: router.direct_port is {own}, which {taken[own]}; set another"
                )
            taken[own] = f"application {name} has too"


def _port(path: Path, http_options: Any) -> int:
    port = http_options.get("port", 8000) if isinstance(http_options, dict) else http_options
    if not isinstance(http_options, dict):
        raise ConfigError(f"{path}: http_options: host and port are needed (got {http_options!r})")
    if not serve_keys.is_port(port):
        raise ConfigError(f"{path}: http_options.port: a number from 1 to 65535 is needed (got {port!r})")
    serve_keys.check(f"{path}, http_options", http_options, serve_keys.HTTP, ())
    return int(port)
