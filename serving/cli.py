"""The `serving` command: simulated slices on this machine, and what runs on a cluster."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from serving.errors import ServingError
from serving.planning.commands import add_commands as add_planning

# Of the last 200 that are kept.
_DECISIONS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a refusal is one message on stderr and exit status 1, never a traceback."""
    # SIGINT too: a shell starts background jobs with it ignored.
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    options = _parser().parse_args(arguments)
    try:
        status = options.run(options)
    except ServingError as error:
        print(f"serving: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status or 0


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serving", description="LLM inference on TPU slices.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_planning(commands)

    status = commands.add_parser("status", help="the slices of every model on a cluster")
    status.add_argument("--address", help="Ray address; the simulation on this machine, else RAY_ADDRESS")
    status.add_argument("--name", default="sim", help="name of the simulation (default: sim)")
    status.add_argument("--watch", action="store_true", help="draw it anew every second, until Ctrl-C")
    status.set_defaults(run=_status)

    keys = commands.add_parser(
        "keys",
        help="make an API key: its line for the file of router.keys_file on stdout, the key itself on stderr",
    )
    keys.add_argument(
        "name",
        help="whose key it is, for the file and errors; metrics and logs have the first 12 digits of its hash",
    )
    keys.add_argument("--requests-per-minute", type=float, metavar="N", help="requests begun in a minute")
    keys.add_argument("--tokens-per-minute", type=float, metavar="N", help="tokens of prompts and answers")
    keys.add_argument("--concurrency", type=int, metavar="N", help="requests at once")
    keys.add_argument("--priority", type=int, metavar="N", help="higher goes first (default: 0)")
    keys.add_argument("--weight", type=float, metavar="W", help="share among keys of a priority (default: 1)")
    keys.set_defaults(run=_keys)

    simulation = commands.add_parser("sim", help="TPU slices simulated on this machine")
    simulation.add_argument(
        "--name", default="sim", help="several simulations can run side by side (default: sim)"
    )
    actions = simulation.add_subparsers(required=True, metavar="ACTION")
    run = actions.add_parser(
        "run", help="simulate the slices a YAML asks for, `serve run` it, end both on Ctrl-C"
    )
    run.add_argument("yaml", type=Path, help="a file of deployments/")
    run.add_argument("--spare", type=int, default=0, help="slices beyond those the YAML asks for")
    _engine_options(run)
    run.set_defaults(run=_sim_run)
    up = actions.add_parser("up", help="start simulated slices and leave them running")
    up.add_argument("--slices", type=int, default=1, help="how many of the shape (default: 1)")
    _shape_options(up)
    _engine_options(up)
    up.set_defaults(run=_sim_up)
    add = actions.add_parser("add", help="add one more slice")
    _shape_options(add)
    add.set_defaults(run=_sim_add)
    kill = actions.add_parser(
        "kill", help="end a host (slice-0/1) or a whole slice (slice-0) as a power cut does"
    )
    kill.add_argument("target", metavar="SLICE[/HOST]", help="as `serving sim status` names it")
    kill.set_defaults(run=_sim_kill)
    restart = actions.add_parser(
        "restart",
        help="start a killed host (slice-0/1) again, or end the head and start it again on its disk",
    )
    restart.add_argument("target", metavar="SLICE/HOST|head", help="a killed host, or the head")
    restart.set_defaults(run=_sim_restart)
    actions.add_parser("status", help="the simulated slices and their hosts").set_defaults(run=_sim_status)
    actions.add_parser("down", help="end the simulation and everything on it").set_defaults(run=_sim_down)
    return parser


def _shape_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--generation", default="v6e", help="v4, v5e, v5p, v6e or v7x (default: v6e)")
    parser.add_argument("--topology", default="2x4", help="chips along each axis (default: 2x4)")
    parser.add_argument("--hosts", type=int, help="VMs of the slice, where the topology leaves a choice")
    parser.add_argument("--machine-type", help="GKE machine type instead of --hosts")


def _engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=("vllm", "simulated"),
        default="vllm",
        help="what runs on the slices: vLLM on a tiny model, or no model and only its timing (default: vllm)",
    )
    parser.add_argument(
        "--startup",
        default="",
        metavar="PHASE=SECONDS,...",
        help="how long the simulated engine takes to start: download, load, compile, warmup (default: 0 each)",
    )


def _startup(options: argparse.Namespace) -> str:
    """The phases as they were given; raises SimulationError where nothing would go through them."""
    from serving.engine.simulator.startup import Startup
    from serving.errors import SimulationError

    Startup.parse(options.startup)
    if options.startup and options.engine != "simulated":
        raise SimulationError("--startup is for the simulated engine; add --engine simulated")
    return str(options.startup)


def _sim_run(options: argparse.Namespace) -> None:
    from serving.trial import run

    run(
        options.yaml,
        spare=options.spare,
        directory=_directory(options),
        engine=options.engine,
        startup=_startup(options),
    )


def _sim_up(options: argparse.Namespace) -> None:
    from serving import display
    from serving.slices.simulation import SimulatedCluster
    from serving.tpu import resolve

    shape = resolve(options.generation, options.topology, options.hosts, options.machine_type)
    with Console(stderr=True).status("starting") as progress:
        cluster = SimulatedCluster.up(
            [shape] * options.slices,
            directory=_directory(options),
            engine=options.engine,
            startup=_startup(options),
            report=lambda text: progress.update(text),
        )
    Console().print(display.slices(cluster.status()))
    print("\n`serve run` and `ray` reach it with:")
    for key in ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_AUTH_MODE"):
        print(f"  export {key}={cluster.environment[key]}")


def _sim_add(options: argparse.Namespace) -> None:
    from serving.slices.simulation import SimulatedCluster
    from serving.tpu import resolve

    shape = resolve(options.generation, options.topology, options.hosts, options.machine_type)
    print(SimulatedCluster.attach(_directory(options)).add_slice(shape))


def _sim_kill(options: argparse.Namespace) -> None:
    from serving.slices.simulation import SimulatedCluster

    cluster = SimulatedCluster.attach(_directory(options))
    if "/" in options.target:
        cluster.kill_host(*_host(options.target))
    else:
        cluster.kill_slice(options.target)


def _sim_restart(options: argparse.Namespace) -> None:
    from serving.slices.simulation import HEAD, SimulatedCluster

    cluster = SimulatedCluster.attach(_directory(options))
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
    from serving import display
    from serving.slices.simulation import SimulatedCluster

    Console().print(display.slices(SimulatedCluster.attach(_directory(options)).status()))


def _sim_down(options: argparse.Namespace) -> None:
    from serving.slices.simulation import SimulatedCluster

    SimulatedCluster.attach(_directory(options)).down()


def _status(options: argparse.Namespace) -> None:
    from serving import display
    from serving.router.status import told
    from serving.slices import board

    address = _address(options)
    board.connect(address)
    if options.watch:
        from serving.live import watch

        watch(address, Console())
    Console().print(display.board(board.wanted(), board.read()))
    if made := board.decisions():
        Console().print(display.decisions(told(reversed(made[-_DECISIONS:])), time.time()))


def _keys(options: argparse.Namespace) -> None:
    from serving.router import keys

    key, line = keys.new(
        options.name,
        requests_per_minute=options.requests_per_minute,
        tokens_per_minute=options.tokens_per_minute,
        concurrency=options.concurrency,
        priority=options.priority,
        weight=options.weight,
    )
    print(line)
    print(f"The key, which is shown this once: {key}", file=sys.stderr)


def _address(options: argparse.Namespace) -> str:
    from serving.errors import SimulationError
    from serving.slices.simulation import SimulatedCluster

    if options.address or os.environ.get("RAY_ADDRESS"):
        return options.address or os.environ["RAY_ADDRESS"]
    try:
        cluster = SimulatedCluster.attach(_directory(options))
    except SimulationError as error:
        raise SimulationError(
            f"{error.message}; for another cluster set RAY_ADDRESS or give --address"
        ) from None
    os.environ.update(cluster.environment)
    return cluster.address


def _directory(options: argparse.Namespace) -> Path:
    from serving.slices.simulation import default_directory

    return default_directory(options.name)
