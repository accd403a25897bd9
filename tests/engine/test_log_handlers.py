import logging
import logging.handlers
from pathlib import Path
from typing import Any

import pytest

from serving.http_server import HttpServer

pytestmark = pytest.mark.http


async def app(*_: Any) -> None:
    """Answers nothing."""


def test_serve_s_log_handlers_outlive_the_http_server_s_start(tmp_path: Path) -> None:
    """Serve gives a replica up whose handler has lost its file, once its controller restarts."""
    file = logging.FileHandler(tmp_path / "replica.log")
    handler = logging.handlers.MemoryHandler(10, target=file)
    server = HttpServer(app, "127.0.0.1")
    assert handler.target is file
    server._port.close()
    handler.close()
    file.close()
