"""The processes of a benchmark: each is a module, prints lines of JSON, answers lines of its input, and ends with it."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any


async def until_input_ends(answer: Callable[[], object]) -> None:
    """Answer every line of standard input with one of JSON, until it ends."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        for _ in sys.stdin:
            print(json.dumps(answer()), flush=True)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()


def child(*arguments: str, nice: int = 0) -> "subprocess.Popen[str]":
    """A benchmark's own process, by `python -m` and its arguments."""
    command = [*(["nice", "-n", str(nice)] if nice else []), sys.executable, "-m", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told(process: "subprocess.Popen[str]") -> Any:
    """The next line that a child prints."""
    assert process.stdout is not None  # noqa: S101  it was asked for
    return json.loads(process.stdout.readline())


def asked(process: "subprocess.Popen[str]") -> Any:
    """What a child answers."""
    assert process.stdin is not None  # noqa: S101  it was asked for
    process.stdin.write("\n")
    process.stdin.flush()
    return told(process)


def ended(process: "subprocess.Popen[str]") -> None:
    """End a child by its input, and wait for it."""
    process.communicate(timeout=60)
