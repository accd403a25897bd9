"""The `serving` command."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

from serving.cli.arguments import Parser
from serving.cli.batch import add_commands as add_batch
from serving.cli.compile import add_commands as add_compiling
from serving.cli.doctor import add_commands as add_doctor
from serving.cli.interrupt import end_on_signals
from serving.cli.keys import add_commands as add_keys
from serving.cli.plan import add_commands as add_planning
from serving.cli.sim import add_commands as add_simulation
from serving.cli.slices import add_commands as add_slices
from serving.cli.status import add_commands as add_status
from serving.cli.usage import add_commands as add_usage
from serving.errors import ServingError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a refusal is one message on stderr and exit status 1, never a traceback."""
    end_on_signals()
    _print_what_can_be_printed()
    options = _parser().parse_args(arguments)
    try:
        status = options.run(options)
        print(end="", flush=True)
    except ServingError as error:
        print(f"serving: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read has enough, as `| head`
        _drop_output()
        return 1
    except OSError as error:  # a disk that is full, a folder that may not be written
        _drop_output()
        print(f"serving: {error}", file=sys.stderr)
        return 1
    return status or 0


def _print_what_can_be_printed() -> None:
    """A terminal of another encoding than UTF-8 shows question marks for what it lacks, where Python would fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    """What is left of stdout can't be written: Python would try so at its end, and say that it failed."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="serving", description="LLM inference on TPU slices.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_planning(commands)
    add_compiling(commands)
    add_doctor(commands)
    add_status(commands)
    add_slices(commands)
    add_keys(commands)
    add_usage(commands)
    add_batch(commands)
    add_simulation(commands)
    return parser
