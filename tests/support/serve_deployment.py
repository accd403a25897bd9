"""A deployment of slices as Serve's own DeploymentState keeps it, without a cluster: hardware, starts and time are the test's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from ray.serve._private.autoscaling_state import AutoscalingStateManager
from ray.serve._private.common import DeploymentID, ReplicaState
from ray.serve._private.config import DeploymentConfig, ReplicaConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.deployment_state import SLOW_STARTUP_WARNING_S, DeploymentState
from ray.serve.config import AutoscalingConfig

from serving.slices import controller
from serving.slices.quarantine import EARLY_S, failed, left_out, over
from serving.state.records import Rollout, SliceFailures, SliceRecord, SliceState, deployment

APPLICATION, MODEL = "app", "llama"
_TYPE = "v6e-8"
_ANSWERS_S = 2.0  # after which a replica that recovers shows what it is
_SCHEDULER: Any = SimpleNamespace(
    on_deployment_deployed=lambda *_args, **_kwargs: None,
    on_replica_stopping=lambda *_: None,
    on_replica_running=lambda *_: None,
)


@dataclass
class Cluster:
    """Free slices, the clock, what is published, and Serve's deployments of one application."""

    hardware: int
    start_s: float = 360.0
    drain_s: float = 10.0
    process_s: float = 0.0  # from hardware to a process on it
    now_s: float = 0.0
    jumped_s: float = 0.0  # the clock of the day beside it
    broken: set[str] = field(default_factory=set)  # versions that fail to start
    closed: set[str] = field(default_factory=set)  # pools that deliver nothing
    records: list[SliceRecord] = field(default_factory=list)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)  # versions of rolls that are to be tried again
    deployments: dict[str, "Deployed"] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)  # replicas of which it is kept that Serve stops them
    undecided: set[str] = field(default_factory=set)  # deployments for which scaling has not decided yet
    in_full: dict[str, int] = field(
        default_factory=dict
    )  # slices that scaling wants once there is room for them
    counted: dict[str, Sequence[str]] = field(default_factory=dict)  # pools that scaling counted on for that
    budget: dict[str, float] = field(default_factory=dict)  # as the YAML of the next deploys has it
    prices: dict[str, float] = field(default_factory=dict)  # dollars an hour, by pool
    held: list[tuple[int, float]] = field(default_factory=list)  # slices after each look, and what they cost

    notices: dict[str, float] = field(default_factory=dict)  # by node, when a host of it goes
    faulty: set[str] = field(default_factory=set)  # slices on which no engine starts
    dying: dict[str, float] = field(
        default_factory=dict
    )  # by slice, after how long in service its engines die
    failures: dict[str, SliceFailures] = field(default_factory=dict)  # by slice

    def __post_init__(self) -> None:
        self._install()

    def _install(self) -> None:
        # Classes of this cluster's own, so that Serve's stay as they are.
        self.state_class: Any = type("State", (DeploymentState,), {})
        application_class: Any = type("Application", (), {"_delete_deployment": self._delete})
        controller.install(
            self.state_class,
            application_class,
            bool,
            lambda: self,
            self._placed,
            lambda: self.now_s,
            self._wanted,
        )
        self.application = application_class()
        self.application._name = APPLICATION
        self.application._deployment_state_manager = SimpleNamespace(_deployment_states={})
        self.application._target_state = SimpleNamespace(deleting=False)
        self.application.target_deployments = []

    def recover(self) -> None:
        """Serve's controller ends and comes back: it knows its checkpoint, and finds what lives."""
        names = self.application.target_deployments
        self._install()
        self.configure(*names)
        for deployed in self.deployments.values():
            deployed.recover()
            self.application._deployment_state_manager._deployment_states[deployed.id] = deployed.state

    def free(self, version: str) -> list[str]:
        """Slices for an engine of a version: those without one, less those in quarantine."""
        taken = {slice_ for deployed in self.deployments.values() for slice_ in deployed.at.values()}
        there = [name for name in map(str, range(self.hardware)) if name not in taken]
        there = there[: max(0, self.hardware - len(taken))]
        out = left_out(self.failures.values(), there, _TYPE, version, self.now_s)
        # The worst order: slices on which engines fail come first.
        return sorted((name for name in there if name not in out), key=lambda name: name not in self.faulty)

    def _wanted(self, _application: str, name: str, without: str) -> int | None:
        if without in self.counted.get(name, ()):
            return None
        target: int = self.deployments[name].state._target_state.target_num_replicas
        return None if name in self.undecided else self.in_full.get(name, target)

    def _placed(self, replica: str) -> bool:
        return any(replica.endswith(name) for each in self.deployments.values() for name in each.held)

    def _delete(self, _application: Any, name: str) -> bool:
        self.deleted.append(name)
        self.deployments[name].state.delete()
        return True

    def slices(self) -> list[SliceRecord]:
        return self.records

    def rollout(self, rollout: Rollout) -> Rollout | None:
        return self.rollouts.get(rollout.deployment)

    def put_rollout(self, rollout: Rollout) -> None:
        self.rollouts[rollout.deployment] = rollout

    def delete_rollout(self, rollout: Rollout) -> None:
        self.rollouts.pop(rollout.deployment, None)

    def take_retry(self, rollout: Rollout) -> bool:
        return self.asked.pop(rollout.deployment, "") == rollout.version

    def put_stop(self, replica: str) -> None:
        self.stopped.append(replica)

    def deployed(self, name: str = MODEL) -> "Deployed":
        if name not in self.deployments:
            deployed = self.deployments[name] = Deployed(self, name)
            self.application._deployment_state_manager._deployment_states[deployed.id] = deployed.state
        return self.deployments[name]

    def configure(self, *names: str) -> None:
        """What the YAML has; Serve asks about the others at each of its looks."""
        self.application.target_deployments = list(names)

    def run(self, seconds: float, step_s: float = 1.0) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += step_s
            for deployed in self.deployments.values():
                deployed.step()
            names = self.application.target_deployments
            for name in list(self.deployments) if names else ():
                if name not in names and name not in self.deleted:
                    self.application._delete_deployment(name)
            counts = [(each.state._replicas.count(), each.price) for each in self.deployments.values()]
            self.held.append((sum(count for count, _ in counts), sum(count * each for count, each in counts)))


class Deployed:
    """One deployment."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.id = DeploymentID(name=name, app_name=APPLICATION)
        self.cluster = cluster
        self.state = cluster.state_class(self.id, None, _SCHEDULER, None, AutoscalingStateManager())
        self.held: dict[str, float] = {}  # since when each replica has its slice
        self.at: dict[str, str] = {}  # by replica, its slice
        self.versions: dict[str, Any] = {}  # of replicas that recover, which show it later
        self.stopping: dict[str, float] = {}
        self.recovers_s = -math.inf
        self.lowest = 0
        self.price = 0.0
        self.pool, self.model = "", MODEL
        self._seen: set[str] = set()

    def deploy(
        self,
        version: str,
        slices: int,
        pool: str = "pool",
        most: int = 0,
        model: str = MODEL,
        **rollout: Any,
    ) -> None:
        """A number of slices, or with `most` at least so many."""
        self.pool, self.model = pool, model
        self.price = self.cluster.prices.get(pool, 0.0)
        config = DeploymentConfig(
            num_replicas=None if most else slices,
            autoscaling_config=AutoscalingConfig(min_replicas=slices, max_replicas=most) if most else None,
            max_surge_percent=1,
            user_config={
                "version": version,
                "pool": pool,
                "name": model,
                "rollout": {"at_once": "10%", "spare": 1, "surge_s": 30, **rollout},
                "model": {},
                "budget": self.cluster.budget,
                "dollars_per_hour": self.price,
            },
        )
        self.state.deploy(
            DeploymentInfo(
                deployment_config=config,
                replica_config=ReplicaConfig.create(
                    lambda: None,
                    placement_group_bundles=[{"CPU": 0.1, pool: 1}],
                    ray_actor_options={"num_cpus": 0.1},
                ),
                start_time_ms=0,
                deployer_job_id="",
                version=version,
                actor_name=f"replica of {version}",
            )
        )
        self.lowest = slices

    def replicas(self, *states: ReplicaState) -> list[Any]:
        return list(self.state._replicas.get(list(states)))

    def serving(self, version: str | None = None) -> int:
        running = self.replicas(ReplicaState.RUNNING)
        return sum(version in (None, replica.version.code_version) for replica in running)

    def names(self, version: str) -> set[str]:
        return {
            replica.replica_id.unique_id
            for replica in self.replicas(ReplicaState.RUNNING)
            if replica.version.code_version == version
        }

    def step(self) -> None:
        """Hardware and engines for as long as a look of Serve takes, then that look."""
        self._leave()
        self._die()
        self._stop()
        self._start()
        self.state.check_curr_status()
        self.state.migrate_replicas_on_draining_nodes(self.cluster.notices)
        _, fewer = self.state.scale_deployment_replicas()
        if fewer:
            spare = self.replicas(ReplicaState.STARTING, ReplicaState.RUNNING)[: fewer.num_to_stop]
            self.state.stop_replicas({replica.replica_id for replica in spare})
        for replica in self.replicas(ReplicaState.STARTING):
            if replica.replica_id.unique_id not in self._seen:
                self._seen.add(replica.replica_id.unique_id)
                replica._start_time = self.cluster.now_s + self.cluster.jumped_s
                replica._actor.graceful_stop = lambda: self.cluster.drain_s
                replica._actor.reconfigure = partial(_reconfigured, replica)
        self.lowest = min(self.lowest, self.serving())

    def recover(self) -> None:
        """A controller that came back has the target of its checkpoint, and does not know yet how far what it finds is."""
        found, target = self.state._replicas.get(), self.state._target_state
        self.state = self.cluster.state_class(self.id, None, _SCHEDULER, None, AutoscalingStateManager())
        self.state.recover_target_state_from_checkpoint(target)
        self.recovers_s = self.cluster.now_s
        for replica in found:
            self.versions.setdefault(replica.replica_id.unique_id, replica.version)
            replica._actor._version = target.version or replica.version
            self.state._replicas.add(ReplicaState.RECOVERING, replica)

    def notice(self, replica: Any, in_s: float) -> None:
        """A host of the replica's slice is to go."""
        self.cluster.notices.setdefault(replica.actor_node_id, self.cluster.now_s + in_s)
        self._record(replica, SliceState.DRAINING)

    def _leave(self) -> None:
        """Slices whose hosts go finish what they can, and end by themselves."""
        for replica in self.replicas(ReplicaState.RUNNING, ReplicaState.PENDING_MIGRATION):
            goes_s = self.cluster.notices.get(replica.actor_node_id)
            if goes_s is not None and self.cluster.now_s >= goes_s - self.cluster.drain_s:
                self.lose(replica)

    def _die(self) -> None:
        """Engines of some slices end in the midst of their service; that of an engine which served for long acquits the slice."""
        for replica in self.replicas(ReplicaState.RUNNING):
            at = self.at.get(replica.replica_id.unique_id)
            if at is None or at not in self.cluster.dying.keys() | self.cluster.failures.keys():
                continue
            own = self._own(replica)
            served_s = self.cluster.now_s - own.since
            if served_s >= EARLY_S:
                self._acquit(own, early=True)
            if served_s >= self.cluster.dying.get(at, math.inf):
                if served_s < EARLY_S:
                    self._blame(own, early=True)
                self.lose(replica)

    def _own(self, replica: Any) -> SliceRecord:
        """The replica's record, with its slice."""
        name = replica.replica_id.unique_id
        own = next(record for record in self.cluster.records if record.replica == name)
        return replace(own, slice=self.at[name], hosts=("host",), pod_type=_TYPE)

    def _blame(self, own: SliceRecord, *, early: bool = False) -> None:
        known, there = self.cluster.failures.values(), self.state._replicas.get()
        names = {replica.replica_id.unique_id for replica in there}
        entries = [record for record in self.cluster.records if record.replica in names]
        self.cluster.failures[own.slice] = failed(
            own, "boom", self.cluster.now_s, known, entries, early=early
        )

    def _acquit(self, own: SliceRecord, *, early: bool) -> None:
        known = self.cluster.failures.get(own.slice)
        if known and over(known, own, early=early):
            del self.cluster.failures[own.slice]

    def _stop(self) -> None:
        for replica in self.replicas(ReplicaState.STOPPING, ReplicaState.RECOVERING):
            name = replica.replica_id.unique_id
            if replica.actor_details.state is ReplicaState.STOPPING:
                self.stopping.setdefault(name, self.cluster.now_s)
            since_s = self.stopping.get(name, math.inf)
            if (
                name not in self.held and since_s < math.inf
            ) or self.cluster.now_s - since_s >= self.cluster.drain_s:
                self.state._replicas.remove({replica.replica_id})
                self._give_back(name)

    def _give_back(self, name: str) -> None:
        self.held.pop(name, None)
        self.at.pop(name, None)

    def _start(self) -> None:
        waiting = self.replicas(ReplicaState.STARTING, ReplicaState.RECOVERING)
        version = str(self.state._target_state.version and self.state._target_state.version.code_version)
        free = self.cluster.free(version) if waiting and self.pool not in self.cluster.closed else []
        for replica in waiting:
            name = replica.replica_id.unique_id
            if name in self.stopping:
                continue
            if name not in self.held and free:
                self.held[name], self.at[name] = self.cluster.now_s, free.pop(0)
            held_s = self.cluster.now_s - self.held.get(name, math.inf)
            recovers = replica.actor_details.state is ReplicaState.RECOVERING
            if held_s >= self.cluster.process_s and not (recovers and held_s >= self.cluster.start_s):
                replica._actor._node_id = f"node-of-{name}"
                self._record(replica, SliceState.STARTING)
            if (
                recovers
                and name not in self.held
                and self.cluster.now_s - self.recovers_s > SLOW_STARTUP_WARNING_S
            ):
                self.state._replicas.remove({replica.replica_id})
                self.state._stop_replica(replica, graceful_stop=False)
            if held_s < self.cluster.start_s or (
                recovers and self.cluster.now_s - self.recovers_s < _ANSWERS_S
            ):
                continue
            self.state._replicas.remove({replica.replica_id})
            replica._actor._version = self.versions.pop(name, replica.version)
            if self._fails(replica):
                self.state.record_replica_startup_failure("boom")
                self.state._stop_replica(replica)
            else:
                self.state._replicas.add(ReplicaState.RUNNING, replica)
                self._record(replica, SliceState.SERVING)

    def _fails(self, replica: Any) -> bool:
        """Whether the engine does not come up, which is then remembered of its slice; one that does acquits it."""
        name = replica.replica_id.unique_id
        record = next((record for record in self.cluster.records if record.replica == name), None)
        if record is None or record.serves:
            return False
        own = self._own(replica)
        if replica.version.code_version not in self.cluster.broken and own.slice not in self.cluster.faulty:
            self._acquit(own, early=False)
            return False
        self._blame(own)
        return True

    def lose(self, replica: Any) -> None:
        self.state._replicas.remove({replica.replica_id})
        self._give_back(replica.replica_id.unique_id)
        self.state._in_transition = True

    def move(self, replicas: list[Any], state: ReplicaState) -> None:
        """As a controller that comes back does: replicas recover, and then are what they were."""
        self.state._replicas.remove({replica.replica_id for replica in replicas})
        for replica in replicas:
            self.state._replicas.add(state, replica)

    def _record(self, replica: Any, state: SliceState) -> None:
        name = replica.replica_id.unique_id
        before = next((record for record in self.cluster.records if record.replica == name), None)
        since = before.since if before and before.state is state else self.cluster.now_s
        self.cluster.records[:] = [record for record in self.cluster.records if record.replica != name]
        self.cluster.records.append(
            SliceRecord(
                name,
                self.model,
                state,
                "",
                "",
                pool=self.pool,
                tag=name,
                deployment=deployment(APPLICATION, self.id.name),
                version=replica.version.code_version,
                since=since,
            )
        )


def _reconfigured(replica: Any, version: Any, **_: Any) -> bool:
    """A replica takes its new settings at once."""
    replica._actor._version = version
    return False
