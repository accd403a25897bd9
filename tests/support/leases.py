"""Clusters for the whole run: who tests on simulated hosts borrows them, and gives them back in order.

A host costs five seconds of a core to start, Serve ten. So there is one cluster. It is lent with exactly the slices that
are asked for: what is missing is started, what is over is ended. What was deployed is deleted when it comes back, and the
Serve controller stays. A cluster that is not in order then, or under which a test failed, is thrown away.

A real engine costs more than all of that. What is kept stays deployed for the next module that asks for the same.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
from ray._raylet import GcsClient

from serving.errors import SimulationError
from serving.simulation.cluster import SimulatedCluster, SimulatedSlice
from serving.simulation.ports import free_port
from serving.state.gcs import show_token
from serving.tpu import Slice
from support import serve_client
from support.servers import until

_RECORDS = b"tpu-serving"  # the namespace of serving.state.gcs
_GOODBYE_S = 5
T = TypeVar("T")


class Lent:
    """A running cluster, the one port of its front door, and a client of its Serve."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.log = directory.with_suffix(".log")
        self.log.touch()
        self.cluster = SimulatedCluster.up([], directory=directory)
        self._client: subprocess.Popen[str] | None = None

    def ask(self, *words: str) -> Any:
        """An order to the client (see support.serve_client), and its answer."""
        client = self._running_client()
        assert client.stdin
        assert client.stdout
        client.stdin.write(json.dumps(words) + "\n")
        client.stdin.flush()
        answer = client.stdout.readline()
        assert answer, f"the client ended at {words}\n{self.log.read_text(errors='replace')[-3000:]}"
        return json.loads(answer)

    def shape(self, slices: Sequence[Slice]) -> int:
        """Leave exactly these slices, with all of their hosts; returns how many hosts were started."""
        missing = Counter(slices)
        for found in self.cluster.status():
            if missing[found.shape] and all(found.alive):
                missing[found.shape] -= 1
            else:
                self._end(found)
        entries = [self.cluster._added(shape) for shape in missing.elements()]
        hosts = [(entry, worker_id) for entry in entries for worker_id in range(entry.hosts)]
        self.cluster._start_hosts(hosts)
        self._until_known()
        return len(hosts)

    def _until_known(self) -> None:
        """Serve would place a router on a host that Ray takes for alive, and waits for what it wants to end there."""
        there = 1 + sum(sum(entry.alive) for entry in self.cluster.status())
        until(lambda: len(self.ask("nodes")) == there, "Ray to know which hosts are there")

    def _end(self, slice_: SimulatedSlice) -> None:
        """A killed host is missed after some 15 s; one that is ended says goodbye."""
        for worker_id in range(slice_.hosts):
            for process in self.cluster.processes(slice_.name, worker_id):
                with suppress(psutil.Error):
                    if process.name() == "raylet":
                        process.terminate()
                        process.wait(_GOODBYE_S)
        self.cluster.kill_slice(slice_.name)

    def tidy(self) -> None:
        """Delete what was deployed; raises AssertionError where something of it stays."""
        self._until_known()
        self.ask("delete")
        until(lambda: not self._left(), "what was deployed to end")
        show_token(self.cluster.environment)
        records = GcsClient(address=self.cluster.address)
        for key in records.internal_kv_keys(b"", _RECORDS):
            records.internal_kv_del(key, False, _RECORDS)

    def down(self) -> None:
        if self._client:
            self._client.kill()
            self._client.wait()
        self.cluster.down()
        until(lambda: not self.cluster.processes(), "every process of the cluster to end")

    def _running_client(self) -> "subprocess.Popen[str]":
        """It ends with the head, and is started again under the new one."""
        if self._client is None or self._client.poll() is not None:
            with self.log.open("a") as output:
                self._client = subprocess.Popen(
                    [sys.executable, serve_client.__file__],
                    env=self.cluster.environment | {"COLUMNS": "200", "RAY_DEDUP_LOGS": "0"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                    start_new_session=True,
                )
        return self._client

    def _left(self) -> list[str]:
        """Processes of replicas and engines."""
        names = ("ServeReplica:", "EngineCore", "RayWorkerProc")
        found = []
        for process in self.cluster.processes():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            found += [line for name in names if name in line]
        return found


class Leases:
    """Lends the run's cluster to one at a time."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._lent: Lent | None = None
        self.clusters = self.hosts = self.times = 0
        self._busy = self.spoilt = False
        self._kept: tuple[str, Any, ExitStack] | None = None

    def keep(self, name: str, make: Callable[[], AbstractContextManager[T]]) -> T:
        """What `make` borrows the cluster for. It ends when somebody borrows for anything else, or a test has failed."""
        if self._kept and (self.spoilt or self._kept[0] != name):
            self._let_go()
        if self._kept is None:
            stack = ExitStack()
            self._kept = name, stack.enter_context(make()), stack
        kept: T = self._kept[1]
        return kept

    @contextmanager
    def lend(self, slices: Sequence[Slice]) -> Iterator[Lent]:
        """The cluster with exactly these slices, nothing deployed."""
        self._let_go()
        assert not self._busy, "the cluster is lent already: two fixtures of one test want it"
        self._busy, self.spoilt = True, False
        try:
            self.times += 1
            try:
                lent = self._shaped(slices)
            except SimulationError:  # Ray gives a host 30 s to start, which a busy machine may not have
                self.down()
                lent = self._shaped(slices)
            yield lent
            if not self.spoilt:
                lent.tidy()
        except BaseException:
            self.down()
            raise
        finally:
            self._busy = False
            if self.spoilt:
                self.down()

    def end(self) -> None:
        self.spoilt = True  # nobody borrows it again: it need not be put in order
        self._let_go()
        self.down()

    def _let_go(self) -> None:
        kept, self._kept = self._kept, None
        if kept:
            kept[2].close()

    def down(self) -> None:
        self.spoilt = False
        if self._lent:
            self._lent.down()
            self._lent = None

    def _shaped(self, slices: Sequence[Slice]) -> Lent:
        if not self._lent:
            self.clusters += 1
            self._lent = Lent(self._parent / f"c{self.clusters}")
        self.hosts += self._lent.shape(slices)
        return self._lent
