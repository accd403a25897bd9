"""JSON lines on their way to a file that rotates. A thread writes them once a beat: a slow disk costs no request anything."""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from serving.router.telemetry.rotating_file import RotatingFile, Rotation

logger = logging.getLogger("ray.serve")


class Lines:
    """The file and the lines that wait for it."""

    def __init__(self, path: Path, rotation: Rotation, most_lines: int) -> None:
        """`most_lines` wait for the next beat, or while the disk takes none; further lines are only counted."""
        self.path = path
        self.dropped = 0
        self._most_lines = most_lines
        self._file = RotatingFile(path, rotation)
        self._lines: list[bytes] = []
        self._refused = False
        self._taking = threading.Lock()  # never held while the disk is busy
        self._writing = threading.Lock()

    def put(self, fields: Mapping[str, Any]) -> None:
        encoded = to_json(fields)
        with self._taking:
            if len(self._lines) < self._most_lines:
                self._lines.append(encoded)
            else:
                self.dropped += 1

    def flush(self) -> None:
        """Write the lines that wait; those that the disk does not take stay."""
        with self._writing:
            with self._taking:
                lines, self._lines = self._lines, []
                dropped, self.dropped = self.dropped, 0
            if not lines:
                return
            notice = [b'{"dropped":%d}' % dropped] if dropped else []
            try:
                self._file.append(b"".join(text + b"\n" for text in lines + notice))
            except OSError as error:
                if not self._refused:  # once, not every beat
                    logger.warning("%s: %s; its lines wait", self.path, error.strerror)
                self._refused = True
                with self._taking:
                    waiting = lines + self._lines
                    self._lines = waiting[: self._most_lines]
                    self.dropped += dropped + len(waiting) - len(self._lines)
            else:
                self._refused = False
