"""`serving status`: the slices of every model on a cluster, from the store alone, so that no router has to answer."""

import argparse
import os
from typing import Any

from rich.console import Console

from serving import environment
from serving.cli.arguments import simulation_name
from serving.cli.sim import NAME

# Of the last 200, which the store keeps.
_DECISIONS = 10


def add_commands(commands: Any) -> None:
    status = commands.add_parser("status", help="the slices of every model on a cluster")
    add_address(status)
    status.add_argument("--watch", action="store_true", help="draw it anew every second, until Ctrl-C")
    status.set_defaults(run=_status)


def add_address(command: argparse.ArgumentParser) -> None:
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "--address", help="Ray address (default: RAY_ADDRESS, else the simulation on this machine)"
    )
    where.add_argument(
        "--name", type=simulation_name, help="the simulation of this name, whatever RAY_ADDRESS says"
    )


def _status(options: argparse.Namespace) -> None:
    from serving.state.gcs import Store
    from serving.status import terminal
    from serving.status.document import decision_statuses, quarantined, refused_deploys

    store = Store(address_of(options))
    if options.watch:
        from serving.status.watch import watch

        watch(store, Console())
    snapshot = store.read()
    Console().print(terminal.slices(snapshot.wanted, snapshot.slices))
    for line in terminal.refused_deploys(refused_deploys(snapshot.refused_deploys, store.now())):
        Console().print(line)
    for line in terminal.quarantine(quarantined(snapshot.slice_failures, store.now())):
        Console().print(line)
    if made := snapshot.decisions[-_DECISIONS:]:
        several = len({record.application for record in snapshot.wanted}) > 1
        Console().print(terminal.decisions(decision_statuses(reversed(made)), store.now(), several=several))


def address_of(options: argparse.Namespace) -> str:
    """The cluster that a command's --address and --name mean; raises SimulationError where there is none."""
    from serving.errors import SimulationError
    from serving.simulation.cluster import SimulatedCluster, default_directory
    from serving.state.gcs import show_token

    address = options.address or os.environ.get("RAY_ADDRESS")
    if address and not options.name:
        return str(address)
    try:
        cluster = SimulatedCluster.attach(default_directory(options.name or NAME))
    except SimulationError as error:
        raise SimulationError(
            f"{error.message}; for another cluster set RAY_ADDRESS or give --address"
        ) from None
    environment.write(cluster.environment)
    show_token(cluster.environment)
    return cluster.address
