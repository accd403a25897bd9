import subprocess
import sys

import pytest

from benchmarks import http_clients

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("client", http_clients.CLIENTS)
async def test_each_client_reads_every_answer_to_its_end(client: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.instant"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin
    assert server.stdout
    try:
        address = f"http://127.0.0.1:{server.stdout.readline().strip()}/"
        pieces = await http_clients.CLIENTS[client](address, lambda ask: http_clients.many(ask, 40, 3))
        assert pieces >= 40
    finally:
        server.stdin.close()
        server.wait()
