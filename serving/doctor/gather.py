"""Looks at a cluster for `serving doctor`: what kubectl says, and what a process of its own finds in Ray.

Whatever can't be looked at is a sentence that says why. However the cluster behaves, each step ends within some seconds of its limit,
and nothing stays behind.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import IO

from serving.config import DeploymentFile
from serving.doctor.facts import Facts
from serving.doctor.kubernetes import deployed, kubernetes
from serving.planning import Plan

# What a process takes to start on a busy machine and to tell what it found, beside what it waits for.
_SPARE_S = 15
_SIMULATED = "the hosts are simulated"


def gather(
    address: str,
    deployment: DeploymentFile,
    plans: Sequence[Plan],
    limit_s: float,
    on_step: Callable[[str], None],
) -> Facts:
    """Everything to be known of the cluster at this address; the cluster has `limit_s` seconds for each step."""
    facts = _look(address, unreached("no cluster was reached", deployment, plans, on_step), limit_s, on_step)
    return replace(facts, endpoints=_SIMULATED, deployed=_SIMULATED) if facts.simulated else facts


def _look(address: str, facts: Facts, limit_s: float, on_step: Callable[[str], None]) -> Facts:
    step, most_s = "reading the control store", limit_s + _SPARE_S
    gone = f"the cluster at {address!r} no longer answers"
    with tempfile.TemporaryFile() as log, _process(log) as (process, reports):
        try:
            reports.send((address, facts, limit_s))
            while step:
                on_step(step)
                if not reports.poll(most_s):
                    return replace(facts, cut_short=f"{gone}: {step} took longer than {most_s:g} s")
                step, news = reports.recv()
                facts = replace(facts, **news)
        except (EOFError, ConnectionError):
            process.wait()
            return replace(facts, cut_short=f"{gone}: {step} ended with {_last_line(log)!r}")
    return facts


def unreached(
    why: str, deployment: DeploymentFile, plans: Sequence[Plan], on_step: Callable[[str], None]
) -> Facts:
    """What is to be known where no cluster is reached: what kubectl says."""
    on_step("asking kubectl")
    unseen = "no cluster was reached"
    return Facts(
        plans,
        why,
        hosts=unseen,
        head=unseen,
        snapshot=unseen,
        serve=unseen,
        endpoints=kubernetes(deployment),
        deployed=deployed(deployment, plans),
        models={
            name: [model.name for model in config.models] for name, config in deployment.services.items()
        },
    )


@contextmanager
def _process(log: IO[bytes]) -> Iterator[tuple["subprocess.Popen[bytes]", Connection]]:
    """The process that asks Ray, in a session of its own, where no Ctrl-C reaches it; it is gone when the context ends."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        command = [
            sys.executable,
            "-m",
            "serving.doctor.cluster_look",
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        try:
            yield process, ours
        finally:
            process.kill()
            process.wait()


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no word"
