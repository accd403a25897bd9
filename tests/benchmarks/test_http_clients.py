import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks import http_clients

pytestmark = pytest.mark.http


@pytest.fixture
def address() -> Iterator[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.instant"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin
    assert server.stdout
    try:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}/"
    finally:
        server.stdin.close()
        server.wait()


@pytest.mark.parametrize("client", http_clients.CLIENTS)
async def test_each_client_reads_every_answer_to_its_end(client: str, address: str) -> None:
    assert await http_clients.CLIENTS[client](address, lambda ask: http_clients.many(ask, 40, 3)) >= 40
