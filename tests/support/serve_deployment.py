"""A deployment of slices as Serve's own DeploymentState keeps it, without a cluster: hardware, starts and time are the test's."""

import math
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from ray.serve._private.autoscaling_state import AutoscalingStateManager
from ray.serve._private.common import DeploymentID, ReplicaState
from ray.serve._private.config import DeploymentConfig, ReplicaConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.deployment_state import DeploymentState
from ray.serve.config import AutoscalingConfig

from serving.slices import controller
from serving.state.records import Rollout, SliceRecord, SliceState, deployment

APPLICATION, MODEL = "app", "llama"
_HAS_HARDWARE = (ReplicaState.STARTING, ReplicaState.RUNNING, ReplicaState.STOPPING)


@dataclass
class Cluster:
    """Free slices, the clock, what is published, and Serve's deployments of one application."""

    hardware: int
    start_s: float = 360.0
    drain_s: float = 10.0
    process_s: float = 0.0  # from hardware to a process on it
    now_s: float = 0.0
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
    budget: dict[str, float] = field(default_factory=dict)  # as the YAML of the next deploys has it
    prices: dict[str, float] = field(default_factory=dict)  # dollars an hour, by pool
    held: list[tuple[int, float]] = field(default_factory=list)  # slices after each look, and what they cost

    def __post_init__(self) -> None:
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

    @property
    def free(self) -> int:
        return self.hardware - sum(len(deployed.held) for deployed in self.deployments.values())

    def _wanted(self, _application: str, name: str) -> int | None:
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
        scheduler = SimpleNamespace(
            on_deployment_deployed=lambda *_args, **_kwargs: None,
            on_replica_stopping=lambda *_: None,
            on_replica_running=lambda *_: None,
        )
        self.id = DeploymentID(name=name, app_name=APPLICATION)
        self.cluster = cluster
        self.state = cluster.state_class(self.id, None, scheduler, None, AutoscalingStateManager())
        self.held: dict[str, float] = {}  # since when each replica has its slice
        self.stopping: dict[str, float] = {}
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
        self._stop()
        self._start()
        self.state.check_curr_status()
        _, fewer = self.state.scale_deployment_replicas()
        if fewer:
            spare = self.replicas(ReplicaState.STARTING, ReplicaState.RUNNING)[: fewer.num_to_stop]
            self.state.stop_replicas({replica.replica_id for replica in spare})
        for replica in self.replicas(ReplicaState.STARTING):
            if replica.replica_id.unique_id not in self._seen:
                self._seen.add(replica.replica_id.unique_id)
                replica._start_time = self.cluster.now_s
                replica._actor.graceful_stop = lambda: self.cluster.drain_s
                replica._actor.reconfigure = partial(_reconfigured, replica)
        self.lowest = min(self.lowest, self.serving())

    def _stop(self) -> None:
        for replica in self.replicas(ReplicaState.STOPPING):
            name = replica.replica_id.unique_id
            since_s = self.stopping.setdefault(name, self.cluster.now_s)
            if name not in self.held or self.cluster.now_s - since_s >= self.cluster.drain_s:
                self.state._replicas.remove({replica.replica_id})
                self.held.pop(name, None)

    def _start(self) -> None:
        for replica in self.replicas(ReplicaState.STARTING):
            name = replica.replica_id.unique_id
            if name not in self.held and self.cluster.free > 0 and self.pool not in self.cluster.closed:
                self.held[name] = self.cluster.now_s
            held_s = self.cluster.now_s - self.held.get(name, math.inf)
            if held_s >= self.cluster.process_s:
                replica._actor._node_id = f"node-of-{name}"
                self._record(replica, SliceState.STARTING)
            if held_s < self.cluster.start_s:
                continue
            self.state._replicas.remove({replica.replica_id})
            if replica.version.code_version in self.cluster.broken:
                self.state.record_replica_startup_failure("boom")
                self.state._stop_replica(replica)
            else:
                self.state._replicas.add(ReplicaState.RUNNING, replica)
                self._record(replica, SliceState.SERVING)

    def lose(self, replica: Any) -> None:
        self.state._replicas.remove({replica.replica_id})
        self.held.pop(replica.replica_id.unique_id)
        self.state._in_transition = True

    def move(self, replicas: list[Any], state: ReplicaState) -> None:
        """As a controller that comes back does: replicas recover, and then are what they were."""
        self.state._replicas.remove({replica.replica_id for replica in replicas})
        for replica in replicas:
            self.state._replicas.add(state, replica)

    def _record(self, replica: Any, state: SliceState) -> None:
        name = replica.replica_id.unique_id
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
            )
        )


def _reconfigured(replica: Any, version: Any, **_: Any) -> bool:
    """A replica takes its new settings at once."""
    replica._actor._version = version
    return False
