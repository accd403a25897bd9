"""`serving status --watch`: the status document in a terminal, from the board alone, so that no router has to answer."""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from serving import display
from serving.errors import ClusterError
from serving.router.status import Status, status, told
from serving.router.window import Window
from serving.slices import board

_PERIOD_S = 1.0


def watch(address: str, console: Console) -> None:
    """Draw until interrupted. A cluster that went away is waited for; into a file or pipe each look is one print."""
    looks = _looks(address)
    if not console.is_terminal:
        for look in looks:
            console.print(look if isinstance(look, str) else display.service(look))
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for look in looks:
            live.update(Text(look, "red") if isinstance(look, str) else display.service(look), refresh=True)


def _looks(address: str) -> Iterator[Status | str]:
    """The document every second, or why there is none."""
    reader, window = board.Reader(), Window()
    while True:
        try:
            board.check(address)
            now_s = time.monotonic()
            entries, _ = reader.live(board.read(), now_s)
            demands, _ = reader.asking(board.demands(), now_s)
            window.observe(entries, demands, now_s)
            yield status(entries, board.wanted(), demands, told(board.decisions()), window, time.time())
        except ClusterError as error:
            yield f"{error.message}; trying again"
        time.sleep(_PERIOD_S)
