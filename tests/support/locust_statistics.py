"""A locustfile beside the one under test: writes locust's statistics once, when the run is over.

Locust's own --csv rewrites its file every second from a greenlet that may meet the file closed at the end.
"""

import csv
import os
from pathlib import Path
from typing import Any

from locust import events
from locust.env import Environment
from locust.runners import WorkerRunner
from locust.stats import PERCENTILES_TO_REPORT, StatsCSV


@events.init.add_listener
def write_at_the_end(environment: Environment, **_: Any) -> None:
    if isinstance(environment.runner, WorkerRunner):
        return

    @environment.events.quit.add_listener
    def write(**_: Any) -> None:
        with Path(os.environ["STATISTICS"]).open("w", newline="") as table:
            StatsCSV(environment, PERCENTILES_TO_REPORT).requests_csv(csv.writer(table))
