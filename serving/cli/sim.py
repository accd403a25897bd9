"""`serving sim`: TPU slices simulated on this machine."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from serving.cli.arguments import at_least, simulation_name

if TYPE_CHECKING:
    from serving.simulation.cluster import SimulatedSlice
    from serving.tpu import Slice


NAME = "sim"


def add_commands(commands: Any) -> None:
    simulation = commands.add_parser("sim", help="TPU slices simulated on this machine")
    _name_option(simulation, NAME)
    actions = simulation.add_subparsers(required=True, metavar="ACTION")
    run = actions.add_parser(
        "run", help="simulate the slices a YAML asks for, `serve run` it, end both on Ctrl-C"
    )
    run.add_argument("yaml", type=Path, help="a file of deployments/")
    run.add_argument("--spare", type=at_least(0), default=0, help="slices beyond those the YAML asks for")
    _engine_options(run)
    run.set_defaults(run=_sim_run)
    up = actions.add_parser("up", help="start simulated slices and leave them running")
    up.add_argument("--slices", type=at_least(1), default=1, help="how many of the shape (default: 1)")
    _shape_options(up)
    _engine_options(up)
    up.set_defaults(run=_sim_up)
    add = actions.add_parser("add", help="add one more slice")
    _shape_options(add)
    add.add_argument(
        "--pool",
        default="",
        metavar="KEY",
        help="the pool that it is bought for, as v6e-2x4-2h-spot; without one it serves every pool of its shape",
    )
    add.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="VARIABLE",
        help="a variable that its hosts lack, as TPU_NAME where the TPU webhook was not there",
    )
    add.set_defaults(run=_sim_add)
    kill = actions.add_parser(
        "kill", help="end a host (slice-0/1) or a whole slice (slice-0) as a power cut does"
    )
    kill.add_argument("target", metavar="SLICE[/HOST]", help="as `serving sim status` names it")
    kill.set_defaults(run=_sim_kill)
    cut = actions.add_parser(
        "cut",
        help="cut a host (slice-0/1) off the network; its processes run on (needs --network namespaces)",
    )
    cut.add_argument("target", metavar="SLICE/HOST", help="as `serving sim status` names it")
    cut.set_defaults(run=_sim_cut)
    restart = actions.add_parser(
        "restart",
        help="start a killed host (slice-0/1) again, or end the head and start it again on its disk",
    )
    restart.add_argument("target", metavar="SLICE/HOST|head", help="a killed host, or the head")
    restart.set_defaults(run=_sim_restart)
    actions.add_parser("status", help="the simulated slices and their hosts").set_defaults(run=_sim_status)
    actions.add_parser(
        "env", help="lines for a shell that is to reach the simulation; its secrets are among them"
    ).set_defaults(run=_sim_env)
    actions.add_parser("down", help="end the simulation and everything on it").set_defaults(run=_sim_down)
    for action in actions.choices.values():
        _name_option(action, argparse.SUPPRESS)  # what stands before the action holds too


def _name_option(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--name",
        type=simulation_name,
        default=default,
        help="several simulations can run side by side (default: sim)",
    )


def _shape_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--generation", default="v6e", help="v4, v5e, v5p, v6e or v7x (default: v6e)")
    parser.add_argument("--topology", help="chips along each axis (default: those of a slice of two hosts)")
    parser.add_argument(
        "--hosts", type=at_least(1), help="VMs of the slice, where the topology leaves a choice"
    )
    parser.add_argument("--machine-type", help="GKE machine type instead of --hosts")


def _engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=("vllm", "simulated"),
        default="vllm",
        help="what runs on the slices: vLLM on a tiny model, or no model and only its timing (default: vllm)",
    )
    parser.add_argument(
        "--network",
        choices=("namespaces", "loopback"),
        help="each host in a network namespace of its own, or all on the loopback (default: namespaces for root, else loopback)",
    )
    parser.add_argument(
        "--startup",
        default="",
        metavar="PHASE=SECONDS,...",
        help="how long the simulated engine takes to start: download, load, compile, warmup (default: 0 each)",
    )


def _startup(options: argparse.Namespace) -> str:
    """The phases as given; raises SimulationError for an engine that has no such phases."""
    from serving.errors import SimulationError
    from serving.simulation.engine.startup import Startup

    Startup.parse(options.startup)
    if options.startup and options.engine != "simulated":
        raise SimulationError("--startup is for the simulated engine; add --engine simulated")
    return str(options.startup)


def _sim_run(options: argparse.Namespace) -> None:
    from serving.cli.simulated_service import run

    run(
        options.yaml,
        spare=options.spare,
        directory=directory_of(options),
        engine=options.engine,
        startup=_startup(options),
        network=options.network,
    )


def _shape(options: argparse.Namespace) -> "Slice":
    """The slice that is asked for; without a topology the smallest of two hosts."""
    from serving.tpu import resolve

    topology, hosts = options.topology, options.hosts
    if topology is None:
        flat = options.generation in ("v5e", "v6e")
        topology = "2x4" if flat else "2x2x2"
        if flat and options.machine_type is None:
            hosts = hosts or 2  # it is also sold as one host
    return resolve(options.generation, topology, hosts, options.machine_type)


def _sim_up(options: argparse.Namespace) -> None:
    from serving.simulation.cluster import SimulatedCluster

    shape = _shape(options)
    with Console(stderr=True).status("starting") as progress:
        cluster = SimulatedCluster.up(
            [shape] * options.slices,
            directory=directory_of(options),
            engine=options.engine,
            startup=_startup(options),
            network_kind=options.network,
            report=lambda text: progress.update(text),
        )
    Console().print(_table(cluster.status()))
    name = "" if options.name == NAME else f" --name {options.name}"
    print(f'\n`serve run` and `ray` reach it after: eval "$(serving sim{name} env)"')


def _sim_add(options: argparse.Namespace) -> None:
    from serving.simulation.cluster import SimulatedCluster

    shape = _shape(options)
    cluster = SimulatedCluster.attach(directory_of(options))
    print(cluster.add_slice(shape, pool=options.pool, without=options.without))


def _sim_kill(options: argparse.Namespace) -> None:
    from serving.simulation.cluster import SimulatedCluster

    cluster = SimulatedCluster.attach(directory_of(options))
    if "/" in options.target:
        cluster.kill_host(*_host(options.target))
    else:
        cluster.kill_slice(options.target)


def _sim_cut(options: argparse.Namespace) -> None:
    from serving.simulation.cluster import SimulatedCluster

    SimulatedCluster.attach(directory_of(options)).cut_cable(*_host(options.target))


def _sim_restart(options: argparse.Namespace) -> None:
    from serving.simulation.cluster import HEAD, SimulatedCluster

    cluster = SimulatedCluster.attach(directory_of(options))
    if options.target == HEAD:
        cluster.restart_head()
    else:
        cluster.restart_host(*_host(options.target))


def _host(target: str) -> tuple[str, int]:
    from serving.errors import SimulationError

    name, _, host = target.partition("/")
    if not host.isdecimal():
        raise SimulationError(f"{target!r} names no host; write {name}/0")
    return name, int(host)


def _sim_status(options: argparse.Namespace) -> None:
    from serving.simulation.cluster import SimulatedCluster

    Console().print(_table(SimulatedCluster.attach(directory_of(options)).status()))


def _sim_env(options: argparse.Namespace) -> None:
    from serving.simulation.cluster import SimulatedCluster

    for name, value in SimulatedCluster.attach(directory_of(options)).access.items():
        print(f"export {name}={shlex.quote(value)}")


def _sim_down(options: argparse.Namespace) -> None:
    from serving.simulation.cluster import SimulatedCluster

    SimulatedCluster.attach(directory_of(options)).down()


def _table(simulated: "Sequence[SimulatedSlice]") -> Table:
    """Simulated slices and which of their hosts are alive."""
    table = Table("slice", "shape", "hosts", title="simulated TPU slices", title_justify="left")
    for entry in simulated:
        hosts = (
            f"{worker}: {entry.ips[worker]} {'up' if alive else '[red]down[/red]'}"
            for worker, alive in enumerate(entry.alive)
        )
        table.add_row(entry.name, str(entry.shape), "  ".join(hosts))
    return table


def directory_of(options: argparse.Namespace) -> Path:
    """Where the named simulation keeps its state."""
    from serving.simulation.cluster import default_directory

    return default_directory(options.name)
