"""The store without a cluster: the GCS's table is a dictionary that several stores may share."""

from collections.abc import Sequence
from typing import Any

from serving.state.clock import SharedClock
from serving.state.gcs import Store


class MemoryTable:
    """Ray's key-value client, as far as the store calls it."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> bool:
        del namespace
        new = key not in self.values
        if new or overwrite:
            self.values[key] = value
        return new

    def internal_kv_get(self, key: bytes, namespace: bytes) -> bytes | None:
        del namespace
        return self.values.get(key)

    def internal_kv_multi_get(self, keys: Sequence[bytes], namespace: bytes) -> dict[bytes, bytes]:
        del namespace
        return {key: self.values[key] for key in keys if key in self.values}

    def internal_kv_keys(self, prefix: bytes, namespace: bytes) -> list[bytes]:
        del namespace
        return [key for key in self.values if key.startswith(prefix)]

    def internal_kv_del(self, key: bytes, by_prefix: bool, namespace: bytes) -> int:
        assert not by_prefix
        del namespace
        return int(self.values.pop(key, None) is not None)


class MemoryStore(Store):
    """One process's store on a table."""

    def __init__(self, table: Any) -> None:
        self.address = ""
        self._client = table
        self._told = {}
        self._clock = SharedClock()
        self._ahead_s = None
