"""Kubernetes objects held against the schemas of those who will read them; an unknown key is a problem everywhere."""

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

SCHEMAS = Path(__file__).parents[1] / "gke" / "schemas"
KUBERNETES = "v1.34.0-local-strict"  # of GKE's channels the one that Ironwood asks for


def objects_of(text: str) -> list[dict[str, Any]]:
    """The objects of a manifest, in its order."""
    return list(yaml.load_all(text, yaml.CSafeLoader))


def problems(resource: dict[str, Any]) -> list[str]:
    """What is wrong with an object, as KubeRay, Kubernetes or Google would see it."""
    key = f"{resource['apiVersion']} {resource['kind']}"
    if resource["kind"] == "RayService":
        templates = [_pod(template) for template in pod_templates(resource)]
        return [
            *_errors(_ray_service(), resource),
            *(problem for pod in templates for problem in problems(pod)),
        ]
    if key in _written():
        return _errors(_written()[key], resource)
    return _errors(_kubernetes(resource["kind"], resource["apiVersion"]), resource)


def pod_templates(service: dict[str, Any]) -> list[dict[str, Any]]:
    """The head's template, then one a worker group."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"] for group in groups]


def _pod(template: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", **template}


def _errors(validator: jsonschema.Draft202012Validator, resource: dict[str, Any]) -> list[str]:
    return [
        f"{resource['kind']}{error.json_path[1:]}: {error.message}"
        for error in validator.iter_errors(resource)
    ]


@functools.cache
def _ray_service() -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / "rayservice.json").read_text())
    # The API server knows metadata; the schema leaves it open, as it does in pod templates.
    return jsonschema.Draft202012Validator(_closed(schema))


@functools.cache
def _written() -> dict[str, jsonschema.Draft202012Validator]:
    schemas = yaml.safe_load((SCHEMAS / "written.yaml").read_text())
    for schema in schemas.values():
        schema["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
    return {key: jsonschema.Draft202012Validator(_closed(schema)) for key, schema in schemas.items()}


def _closed(schema: Any) -> Any:
    """The schema, with no key allowed that it does not name."""
    if isinstance(schema, list):
        return [_closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        closed |= {"type": "object", "additionalProperties": False}
    return closed


@functools.cache
def _kubernetes(kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    found = importlib.util.find_spec("kubernetes_validate")
    assert found
    assert found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0], "kubernetes-json-schema", KUBERNETES)
    group, _, version = api_version.rpartition("/")
    prefix = f"{group.partition('.')[0]}-" if group else ""
    schema = json.loads((folder / f"{kind.lower()}-{prefix}{version}.json").read_text())
    return jsonschema.Draft202012Validator(schema, registry=_definitions(folder))


@functools.cache
def _definitions(folder: Path) -> Registry[Any]:
    contents = json.loads((folder / "_definitions.json").read_text())
    definitions = Resource.from_contents(contents, default_specification=DRAFT202012)
    return (
        Registry().with_resource("_definitions.json", definitions).crawl()
    )  # else each reference reads it again


def defaulted(service: dict[str, Any]) -> dict[str, Any]:
    """A RayService with what KubeRay's schema writes into it where nothing stands."""
    _fill(json.loads((SCHEMAS / "rayservice.json").read_text()), service)
    return service


def _fill(schema: dict[str, Any], value: Any) -> None:
    if isinstance(value, list):
        for entry in value:
            _fill(schema.get("items", {}), entry)
    elif isinstance(value, dict):
        for key, below in schema.get("properties", {}).items():
            if "default" in below:
                value.setdefault(key, below["default"])
            if key in value:
                _fill(below, value[key])
