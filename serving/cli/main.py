"""The `serving` command."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from serving.cli.interrupt import end_at_once_on_signals, end_on_signals
from serving.errors import ServingError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a refusal is one message on stderr and exit status 1, never a traceback."""
    end_at_once_on_signals()
    _print_what_can_be_printed()
    from serving.cli.parser import parser

    options = parser().parse_args(arguments)
    try:
        end_on_signals()
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
