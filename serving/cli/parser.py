"""The commands of `serving` and their arguments. The import takes about a second: `main` waits for it without a traceback."""

import argparse

from serving.cli.arguments import Parser
from serving.cli.batch import add_commands as add_batch
from serving.cli.compile import add_commands as add_compiling
from serving.cli.doctor import add_commands as add_doctor
from serving.cli.keys import add_commands as add_keys
from serving.cli.plan import add_commands as add_planning
from serving.cli.sim import add_commands as add_simulation
from serving.cli.slices import add_commands as add_slices
from serving.cli.status import add_commands as add_status
from serving.cli.usage import add_commands as add_usage


def parser() -> argparse.ArgumentParser:
    commands_of_serving = Parser(prog="serving", description="LLM inference on TPU slices.")
    commands = commands_of_serving.add_subparsers(required=True, metavar="COMMAND")

    add_planning(commands)
    add_compiling(commands)
    add_doctor(commands)
    add_status(commands)
    add_slices(commands)
    add_keys(commands)
    add_usage(commands)
    add_batch(commands)
    add_simulation(commands)
    return commands_of_serving
