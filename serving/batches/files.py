"""The one door to fsspec: contents of files by name, in a folder or below any URL that fsspec knows.

Every call blocks. A file is there once `Writing.close` has returned; writing it anew takes the place of what there was.
"""

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from serving.errors import ConfigError, StorageError

logger = logging.getLogger("ray.serve")

PIECE_BYTES = 1 << 20


class Folder:
    """Where contents of files stay."""

    def __init__(self, where: str) -> None:
        """`where`: a path, or a URL such as gs://BUCKET/FOLDER. Raises ConfigError."""
        try:
            self._files, self._root = fsspec.core.url_to_fs(where)
            self._is_local = "file" in (
                self._files.protocol if isinstance(self._files.protocol, tuple) else (self._files.protocol,)
            )
            if self._is_local:
                Path(self._root).mkdir(mode=0o700, parents=True, exist_ok=True)
            else:
                self._files.makedirs(self._root, exist_ok=True)
        except ImportError as error:
            raise ConfigError(
                f"store.files: {where} needs a package that is not installed: {error}"
            ) from None
        except Exception as error:  # noqa: BLE001  whatever a file system's own library raises
            raise ConfigError(
                f"store.files: {where} can't be opened ({error}); name a folder or a URL that the service may write to"
            ) from None

    def write(self, name: str) -> "Writing":
        """Raises StorageError."""
        with _translated("written"):
            if self._is_local:
                descriptor = os.open(self._path(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                return Writing(os.fdopen(descriptor, "wb"), synced=True)
            return Writing(self._files.open(self._path(name), "wb"), synced=False)

    def read(self, name: str, start: int = 0) -> "Reading":
        """An open file at `start`; raises StorageError."""
        with _translated("read"):
            raw = self._files.open(self._path(name), "rb", block_size=PIECE_BYTES)
            file = Reading(raw, PIECE_BYTES)
            if start:
                file.seek(start)
            return file

    def pieces(self, name: str, part: range) -> Iterator[bytes]:
        """These bytes of a file; raises StorageError, at once where the file is not there."""
        file = self.read(name, part.start)

        def pieces() -> Iterator[bytes]:
            left_bytes = len(part)
            with file:
                while piece := file.read(min(PIECE_BYTES, left_bytes)):
                    left_bytes -= len(piece)
                    yield piece

        return pieces()

    def delete(self, name: str) -> None:
        """A file that is not there is no error. Raises StorageError."""
        with _translated("deleted"), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


class Reading(io.BufferedReader):
    """A file that is being read: also a bucket's, whose `readline` knows no bound. Raises StorageError."""

    def read(self, size: int | None = -1, /) -> bytes:
        with _translated("read"):
            return super().read(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        with _translated("read"):
            return super().readline(size)


class Writing:
    """A file that is being written."""

    def __init__(self, file: Any, *, synced: bool) -> None:
        self._file = file
        self._synced = synced
        self.bytes = 0

    def write(self, data: bytes) -> None:
        with _translated("written"):
            self._file.write(data)
            self.bytes += len(data)

    def close(self) -> None:
        with _translated("written"):
            if self._synced:  # a row that names the file must not outlive its content in a power cut
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()

    def discard(self) -> None:
        """Stop; what was written may be there by half."""
        with contextlib.suppress(Exception):
            if hasattr(self._file, "discard"):
                self._file.discard()
            self._file.close()


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # whatever a file system's own library raises
        # A client reads it: what a bucket says names the bucket and the service's account.
        reason = error.strerror if isinstance(error, OSError) else None
        if not reason:
            logger.warning("a file can't be %s: %s", what, str(error) or type(error).__name__)
        cause = PermissionError() if _forbids(error) else error
        raise StorageError.of(f"A file can't be {what} ({reason or type(cause).__name__}).", cause) from error


def _forbids(error: Exception) -> bool:
    """Whether a bucket gives the service's account no right; gcsfs has no class for that."""
    return str(getattr(error, "code", "")) in ("401", "403") or str(error).startswith("Forbidden")
