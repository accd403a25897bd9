"""`serving status --watch`: the status document in a terminal, from the store alone, so that no router has to answer."""

import time
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console
from rich.live import Live
from rich.text import Text

from serving.errors import ClusterError
from serving.state.gcs import Store
from serving.state.liveness import Liveness
from serving.status import terminal
from serving.status.document import Status, status
from serving.status.rates import Rates

_PERIOD_S = 1.0


def watch(store: Store, console: Console) -> None:
    """Draw until interrupted, also while the cluster is away; into a file or pipe each look is one print."""
    looks = _looks(store)
    if not console.is_terminal:
        for look in looks:
            console.print(look if isinstance(look, str) else terminal.service(look))
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for look in looks:
            live.update(Text(look, "red") if isinstance(look, str) else terminal.service(look), refresh=True)


def _looks(store: Store) -> Iterator[Status | str]:
    """The document every second, or why there is none."""
    liveness, rates = Liveness(), Rates()
    while True:
        try:
            store.check()
            now_s = time.monotonic()
            snapshot = store.read()
            slices, _ = liveness.slices(snapshot.slices, now_s)
            demands, _ = liveness.routers(snapshot.demands, now_s)
            rates.observe(slices, demands, now_s)
            yield status(replace(snapshot, slices=tuple(slices), demands=tuple(demands)), rates, store.now())
        except ClusterError as error:
            yield f"{error.message}; trying again"
        time.sleep(_PERIOD_S)
