"""What Kubernetes has, against what the YAML renders: differences as paths, decided on plain data.

What Kubernetes and KubeRay write into an object by themselves is no difference: empty fields, a port's protocol, what admits pods.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import yaml

from serving.config import strict_yaml

# Ray's autoscaler sets replicas, Kueue the others.
_OF_OTHERS = frozenset({"replicas", "scaleStrategy", "suspend", "tolerations", "schedulingGates"})
# Kueue, GKE and people add entries of their own here, and the defaults of Kubernetes are no choice of anybody's.
_OPEN = frozenset({"labels", "annotations", "nodeSelector"})
_DEFAULTS = {"protocol": "TCP"}
_CONFIG = "serveConfigV2"
# Values below these may be secrets, or too long for a line.
_UNSHOWN = ("env[", _CONFIG)
_CLUSTER = "rayClusterConfig"
_OF_PROGRAMS = ("image", "env", "resources")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi|)")
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}


@dataclass(frozen=True)
class Difference:
    """A field by its path: what it should be and what it is, None where it is not there."""

    path: str
    wanted: Any
    found: Any

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.path} is missing"
        if self.wanted is None:
            return f"{self.path} is there still"
        if any(part in self.path for part in _UNSHOWN) or not _is_plain(self.wanted, self.found):
            return f"{self.path} is another"
        return f"{self.path} is {self.found}, not {self.wanted}"


def of_services(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[Difference]:
    """How the RayService in Kubernetes differs from the rendered one."""
    own, other = dict(wanted["spec"]), dict(found["spec"])
    config, cluster = own.pop(_CONFIG, ""), own.pop(_CLUSTER, {})
    other_config, other_cluster = other.pop(_CONFIG, ""), other.pop(_CLUSTER, {})
    return [
        *_differences(own, other, ""),
        *_differences(_parsed(config), _parsed(other_config), _CONFIG),
        *of_clusters(cluster, other_cluster),
    ]


def of_clusters(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[Difference]:
    """How a RayCluster's spec differs from a wanted one, but for the slices that its autoscaler ordered."""
    return list(_differences(wanted, found, ""))


def of_pod(template: Mapping[str, Any], pod: Mapping[str, Any]) -> list[Difference]:
    """How a pod's programs differ from those of its template. What webhooks and KubeRay add to a pod is passed over."""
    specs = [
        {
            container["name"]: {key: container.get(key) for key in _OF_PROGRAMS}
            for container in resource["spec"]["containers"]
        }
        for resource in (template, pod)
    ]
    return [
        difference
        for name, wanted in specs[0].items()
        for difference in _differences(wanted, specs[1].get(name), name)
        if difference.wanted is not None
    ]


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except strict_yaml.FAILURES:
        return text


def _differences(wanted: Any, found: Any, path: str) -> Iterator[Difference]:
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        yield from _of_mappings(wanted, found, path)
    elif (by_name := _by_name(wanted)) is not None and (others := _by_name(found)) is not None:
        for name in dict.fromkeys([*by_name, *others]):
            yield from _differences(by_name.get(name), others.get(name), f"{path}[{name}]")
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for at, pair in enumerate(zip(wanted, found, strict=True)):
            yield from _differences(*pair, path=f"{path}[{at}]")
    elif not _same(wanted, found, exact=path.startswith(_CONFIG)):
        yield Difference(path, wanted, found)


def _of_mappings(wanted: Mapping[str, Any], found: Mapping[str, Any], path: str) -> Iterator[Difference]:
    passed_over: set[str] = set()
    if not path.startswith(_CONFIG):
        passed_over = {
            key for key, value in found.items() if key not in wanted and _DEFAULTS.get(key) == value
        }
        passed_over |= _OF_OTHERS
        if path.rpartition(".")[2] in _OPEN:
            passed_over |= found.keys() - wanted.keys()
    for key in dict.fromkeys([*wanted, *found]):
        if key not in passed_over:
            below = f"{path}.{key}" if path else key
            yield from _differences(wanted.get(key), found.get(key), below)


def _by_name(entries: Any) -> dict[str, Any] | None:
    """A list whose entries have names, by these; None of anything else."""
    names = [_name(entry) for entry in entries] if isinstance(entries, list) and entries else [None]
    return None if None in names else dict(zip(map(str, names), entries, strict=True))


def _name(entry: Any) -> str | None:
    """What tells an entry from its neighbours. Volumes are mounted twice under one name."""
    if not isinstance(entry, Mapping):
        return None
    return next((str(entry[key]) for key in ("groupName", "mountPath", "name") if entry.get(key)), None)


def _same(wanted: Any, found: Any, *, exact: bool) -> bool:
    if wanted == found or exact:
        return bool(wanted == found)
    if wanted is None or wanted in ({}, [], ""):
        return _is_empty(found)
    amount = _amount(wanted)
    return amount is not None and amount == _amount(found)


def _is_empty(value: Any) -> bool:
    """Nothing, or mappings of nothing, which Go writes for what is left out."""
    return not value or (isinstance(value, Mapping) and all(_is_empty(below) for below in value.values()))


def _amount(value: Any) -> Decimal | None:
    """A quantity of Kubernetes, which may be written in several ways."""
    match = _QUANTITY.fullmatch(str(value)) if isinstance(value, str | int) else None
    if match is None:
        return None
    number, unit = Decimal(match[1]), match[2]
    if unit == "m":
        return number / 1000
    return (
        number * (Decimal(1024) if unit.endswith("i") else Decimal(1000)) ** _POWERS[unit.removesuffix("i")]
    )


def _is_plain(*values: Any) -> bool:
    return all(isinstance(value, str | int | float) and len(str(value)) < 80 for value in values)
