"""deployments/*.yaml as `serve run` reads them: the applications of this project and what surrounds them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serving.config import ServiceConfig, parse
from serving.errors import ConfigError

IMPORT_PATH = "serving.app:build"


@dataclass(frozen=True)
class Service:
    """One application of a file. `document` is the whole file, which the manifest hands to Serve."""

    name: str
    config: ServiceConfig
    document: dict[str, Any]


def read_services(path: str) -> list[Service]:
    """The applications of a file that this project serves; ConfigError where there is none."""
    try:
        document = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    found = [
        Service(str(application.get("name", "default")), parse(application.get("args") or {}), document)
        for application in (applications if isinstance(applications, list) else [])
        if isinstance(application, dict) and application.get("import_path") == IMPORT_PATH
    ]
    if not found:
        raise ConfigError(f"{path} has no application with import_path: {IMPORT_PATH}")
    return found
