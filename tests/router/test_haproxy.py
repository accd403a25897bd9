"""What HAProxy answers where no router is: the real one, started as Serve starts it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from ray.serve._private import haproxy_templates
from support import quick_http as http
from support.servers import free_address, until

pytestmark = pytest.mark.http

NOT_FOUND = """    http-request return status 404 content-type text/plain lf-string "Path '%[path]' not found. Ping http://.../-/routes for available routes."
"""


def config(folder: Path, port: str, rules: str) -> Path:
    """The parts of Serve's config that matter here."""
    (folder / "500.http").write_text("HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\n\r\nno")
    path = folder / "haproxy.cfg"
    path.write_text(
        "defaults\n    mode http\n    timeout connect 1s\n    timeout client 5s\n    timeout server 5s\n"
        + "".join(f"    errorfile {status} {folder}/500.http\n" for status in (502, 503, 504))
        + f"frontend door\n    bind 127.0.0.1:{port}\n{rules}    default_backend default_backend\n"
        + f"backend default_backend\n{NOT_FOUND}"
        + f"backend http-llama\n    server gone {free_address().removeprefix('http://')}\n"
    )
    return path


@contextmanager
def door(folder: Path, rules: str = "") -> Iterator[str]:
    address = free_address()
    path = config(folder, address.rpartition(":")[2], rules)
    command = [str(Path(sys.executable).parent / "serving-haproxy"), "-db", "-f", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as haproxy:
        try:
            until(lambda: haproxy.poll() is not None or _listens(address), "HAProxy", 5)
            assert haproxy.poll() is None, haproxy.stderr and haproxy.stderr.read()
            yield address
        finally:
            haproxy.kill()


def _listens(address: str) -> bool:
    try:
        return bool(http.get(address))
    except httpx.TransportError:
        return False


def test_these_are_serve_s_own_lines() -> None:
    template = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    assert NOT_FOUND.strip() in template
    assert "errorfile 503 {{ config.error_file_path }}" in template
    assert "use_backend {{ backend.name or 'unknown' }} if" in template


@pytest.mark.parametrize(
    "rules", ["", "    use_backend http-llama if TRUE\n"], ids=["no application", "no router"]
)
def test_clients_are_to_come_again(rules: str, tmp_path: Path) -> None:
    with door(tmp_path, rules) as address:
        answer = http.post(f"{address}/v1/chat/completions", json={})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "no_router_ready"


def test_a_path_outside_the_application_is_not_found(tmp_path: Path) -> None:
    with door(tmp_path, "    use_backend http-llama if { path_beg /llama }\n") as address:
        assert http.get(f"{address}/else").status_code == 404
