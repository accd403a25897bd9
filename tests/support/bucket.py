"""A bucket as fsspec's file systems of clouds are: its files can what fsspec's buffered ones can, and no more."""

from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

URL = "bucket://batches/files"


class Bucket(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """`trouble` hears of every call before it is made, and may fail or wait."""

    protocol = "bucket"
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}
    trouble: ClassVar[Callable[[str], None]] = lambda _: None

    def _open(self, path: str, mode: str = "rb", **options: Any) -> "_File":
        kept = ("block_size", "autocommit", "cache_options")
        return _File(self, path, mode, **{name: options[name] for name in kept if name in options})

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": len(self.content(path, "info")), "type": "file"}

    def rm_file(self, path: str) -> None:
        self.content(path, "delete")
        del self.objects[path]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """It has no folders."""

    def content(self, path: str, call: str) -> bytes:
        type(self).trouble(call)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]


class _File(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self._sent = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        type(self.fs).trouble("upload")
        self._sent += self.buffer.getvalue()
        if final:
            self.fs.objects[self.path] = self._sent
        return True

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.content(self.path, "download")[start:end])


fsspec.register_implementation("bucket", Bucket)
