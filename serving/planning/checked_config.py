"""Checked reads of a `config.json`: a wrong value is refused where it is read, with its key."""

from collections.abc import Mapping
from typing import Any

from serving.errors import PlanError

MOST = 10**12  # of any size; sums of bytes are floats, which an absurd number would overflow


class Keys:
    """Values of a config by key. None, as JSON's null, is a missing value."""

    def __init__(self, config: Any, where: str) -> None:
        if not isinstance(config, Mapping):
            raise PlanError(f"config of {where} is {config!r}, not a mapping")
        self._config = config
        self._where = where

    @property
    def where(self) -> str:
        return self._where

    def get(self, key: str, default: Any = None) -> Any:
        value = self._config.get(key)
        return default if value is None else value

    def number(self, key: str, default: Any = None, least: int = 1, most: int = MOST) -> int:
        value = self.get(key, default)
        if value is None:
            raise PlanError(missing(key, self._where))
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise PlanError(
                f"config.json of {self._where}: {key} is {value!r}, not a number of at least {least}"
            )
        if value > most:
            raise PlanError(f"config.json of {self._where}: {key} is {value}, more than {most}")
        return value

    def entries(self, key: str, layers: int | None = None) -> list[Any]:
        """A list; empty where there is none, else with an entry for each of so many layers."""
        value = self.get(key, [])
        if not isinstance(value, list | tuple):
            raise PlanError(f"config.json of {self._where}: {key} is {value!r}, not a list")
        if value and layers is not None and len(value) != layers:
            raise PlanError(
                f"config.json of {self._where}: {key} has {len(value)} layers, num_hidden_layers is {layers}"
            )
        return list(value)

    def numbers(self, key: str, layers: int) -> list[int]:
        """As `entries`, of numbers of at least 1."""
        values = self.entries(key, layers)
        if odd := [value for value in values if type(value) is not int or not 1 <= value <= MOST]:
            raise PlanError(
                f"config.json of {self._where}: {key} has {odd[0]!r}, not a number of at least 1 and at most {MOST}"
            )
        return values

    def within(self, key: str) -> "Keys | None":
        """The mapping under a key; None where there is none."""
        value = self.get(key)
        return Keys(value, f"{self._where} ({key})") if value else None


def missing(key: str, where: str) -> str:
    if key == "architectures":  # vLLM would load the class that an override names
        return f"config.json of {where} has no architectures, so neither this plan nor vLLM knows its layers; name the checkpoint of a model"
    return f"config.json of {where} has no {key}; give it as engine.hf_overrides.{key}"
