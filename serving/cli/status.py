"""`serving status`: the slices of every model on a cluster, from the store alone, so that no router has to answer."""

import argparse
import os
import time
from typing import Any

from rich.console import Console

from serving import environment
from serving.cli.sim import directory_of

# Of the last 200, which the store keeps.
_DECISIONS = 10


def add_commands(commands: Any) -> None:
    status = commands.add_parser("status", help="the slices of every model on a cluster")
    add_address(status)
    status.add_argument("--watch", action="store_true", help="draw it anew every second, until Ctrl-C")
    status.set_defaults(run=_status)


def add_address(command: argparse.ArgumentParser) -> None:
    command.add_argument("--address", help="Ray address; the simulation on this machine, else RAY_ADDRESS")
    command.add_argument("--name", default="sim", help="name of the simulation (default: sim)")


def _status(options: argparse.Namespace) -> None:
    from serving.state.gcs import Store
    from serving.status import terminal
    from serving.status.document import quarantined, told

    store = Store(address_of(options))
    if options.watch:
        from serving.status.watch import watch

        watch(store, Console())
    snapshot = store.read()
    Console().print(terminal.slices(snapshot.wanted, snapshot.slices))
    for line in terminal.quarantine(quarantined(snapshot.slice_failures, time.time())):
        Console().print(line)
    if made := snapshot.decisions[-_DECISIONS:]:
        several = len({record.application for record in snapshot.wanted}) > 1
        Console().print(terminal.decisions(told(reversed(made)), time.time(), several=several))


def address_of(options: argparse.Namespace) -> str:
    """The cluster that a command's --address and --name mean; raises SimulationError where there is none."""
    from serving.errors import SimulationError
    from serving.simulation.cluster import SimulatedCluster
    from serving.state.gcs import show_token

    if options.address or os.environ.get("RAY_ADDRESS"):
        return options.address or os.environ["RAY_ADDRESS"]
    try:
        cluster = SimulatedCluster.attach(directory_of(options))
    except SimulationError as error:
        raise SimulationError(
            f"{error.message}; for another cluster set RAY_ADDRESS or give --address"
        ) from None
    environment.write(cluster.environment)
    show_token(cluster.environment)
    return cluster.address
