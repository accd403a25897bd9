"""Models that share a budget, as a Serve controller runs them: Serve's deployments, our answers to it, and scaling, in faked time.

Slices, hardware and load are the test's. A step is a second: hardware and engines, a look of Serve, a look of scaling.
"""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import ReplicaState

from serving.scaling.capacity import Pool
from serving.scaling.policy import Room, Settings
from serving.scaling.scaler import Scaler
from serving.slices import controller
from serving.state.records import DecisionRecord, Demand, SliceRecord, SliceState, Snapshot
from support.fleet_of import STEPS
from support.serve_deployment import APPLICATION, Cluster, Deployed

_RUNNING, _STOPPING = (ReplicaState.RUNNING,), (ReplicaState.STOPPING,)
RATE = 10.0  # requests a second that a slice takes


@dataclass
class Model:
    """The load of one model, and what came of it."""

    name: str
    pools: tuple[Pool, ...]
    version: str = "a"
    rate: float = 0.0
    cool_down_s: float = 30.0
    queue: float = 0.0
    arrived: float = 0.0
    finished: float = 0.0
    abandoned: float = 0.0
    zero_s: int = 0  # seconds for which requests have waited and nothing served

    @property
    def settings(self) -> Settings:
        return Settings(self.name, self.pools, cool_down_s=self.cool_down_s)

    def deployment(self, pool: Pool) -> str:
        return f"{self.name}-{pool.key}"


class Store:
    """What scaling reads and writes."""

    def __init__(self, fleet: "ControlledFleet") -> None:
        self._fleet = fleet
        self.decisions: tuple[DecisionRecord, ...] = ()

    def read(self, _: str) -> Snapshot:
        if self._fleet.away_s > 0:
            raise ConnectionError("the head restarts")
        return Snapshot(
            slices=tuple(self._fleet.records()),
            demands=tuple(self._fleet.demands()),
            decisions=self.decisions,
        )

    def put_decisions(self, _: str, kept: Any) -> None:
        self.decisions = tuple(kept)

    def put_ordered(self, *_: Any) -> None: ...

    def delete_scaling(self, *_: Any) -> None: ...


@dataclass
class ControlledFleet:
    """An application of several models on one cluster."""

    models: list[Model]
    hardware: int = 20
    budget: int | None = None
    start_s: float = 10.0
    drain_s: float = 5.0
    process_s: float = 0.0
    away_s: int = 0  # for how long the store can't be read
    routers: int = 1
    router_away_s: int = 0
    jumped_s: float = 0.0  # scaling's clock beside Serve's
    tokens: dict[str, float] = field(default_factory=dict)
    silent: dict[str, int] = field(default_factory=dict)  # by slice, its last beat
    targets: list[dict[str, int]] = field(default_factory=list)
    ended: list[tuple[float, str]] = field(default_factory=list)  # serving slices that were stopped

    def __post_init__(self) -> None:
        self.cluster = Cluster(
            self.hardware, start_s=self.start_s, drain_s=self.drain_s, process_s=self.process_s
        )
        if self.budget is not None:
            self.cluster.budget = {"slices": self.budget}
        self.deployments = controller._INSTALLED.pop()
        self.store = Store(self)
        self.beat = 0
        self.restart()
        self.deploy()

    @property
    def now_s(self) -> float:
        return self.cluster.now_s

    def recover(self) -> None:
        """Serve's controller ends and comes back: what it, and scaling, remember is gone."""
        self.cluster.recover()
        self.deployments = controller._INSTALLED.pop()
        self.cluster.undecided = set(self.cluster.deployments)
        self.cluster.in_full.clear()
        self.cluster.counted.clear()
        self.restart()

    def restart_router(self, away_s: int) -> None:
        """It forgets what it counted, its clients' requests are lost, and for a while it is not there."""
        self.routers += 1
        self.router_away_s = away_s
        for model in self.models:
            model.arrived = model.queue = model.finished = model.abandoned = 0.0

    def restart(self) -> None:
        """Of scaling: what it remembers is gone."""
        self.scaler = Scaler(APPLICATION, lambda: self.store, lambda: self.now_s + self.jumped_s)  # type: ignore[arg-type, return-value]
        self.scaler._thread = SimpleNamespace(is_alive=lambda: True)  # type: ignore[assignment]
        self.fresh = {model.deployment(pool) for model in self.models for pool in model.pools}

    def deploy(self) -> None:
        """What the models and pools are now."""
        names = []
        for model in self.models:
            for pool in model.pools:
                name = model.deployment(pool)
                if name in self.cluster.deleted:
                    self.cluster.deleted.remove(name)
                    self.cluster.deployments.pop(name, None)
                    self.cluster.application._deployment_state_manager._deployment_states = {
                        each.id: each.state for each in self.cluster.deployments.values()
                    }
                if name not in self.cluster.deployments:
                    self.cluster.undecided.add(name)
                names.append(name)
                most = pool.max if pool.min < pool.max else 0
                self.cluster.deployed(name).deploy(
                    model.version, pool.min, pool.key, most=most, model=model.name
                )
        self.fresh |= set(names)
        self.cluster.configure(*names)

    def of(self, model: Model) -> list[Deployed]:
        return [each for each in self.cluster.deployments.values() if each.model == model.name]

    def serving(self, model: Model) -> int:
        return sum(each.serving() for each in self.of(model))

    def held(self) -> int:
        return sum(each.state._replicas.count() for each in self.cluster.deployments.values())

    def records(self) -> list[SliceRecord]:
        there = {
            replica.replica_id.unique_id
            for each in self.cluster.deployments.values()
            for replica in each.state._replicas.get()
        }
        rates = {model.name: self._per_slice(model) for model in self.models}
        return [
            replace(
                record,
                application=APPLICATION,
                running=rates.get(record.model, 0.0) if record.state is SliceState.SERVING else 0,  # type: ignore[arg-type]  # a mean
                prompt_tokens=round(self.tokens.get(record.replica, 0.0)),
                output_tokens=round(self.tokens.get(record.replica, 0.0)),
                beat=self.silent.get(record.replica, self.beat),
            )
            for record in self.cluster.records
            if record.replica in there
        ]

    def _per_slice(self, model: Model) -> float:
        serving = self.serving(model)
        return min(model.queue + model.rate, RATE * serving) / serving if serving else 0.0

    def demands(self) -> list[Demand]:
        if self.router_away_s > 0:
            return []
        return [
            Demand(
                f"router {self.routers}",
                model.name,
                application=APPLICATION,
                held=round(model.queue),
                arrived=round(model.arrived),
                abandoned=round(model.abandoned),
                in_flight=max(
                    0,
                    round(model.arrived)
                    - round(model.queue)
                    - round(model.finished)
                    - round(model.abandoned),
                ),
                beat=self.beat,
            )
            for model in self.models
        ]

    def _answer(self) -> None:
        for model in self.models:
            if self.router_away_s > 0:
                continue
            per_slice = self._per_slice(model)
            done = per_slice * self.serving(model)
            model.arrived += model.rate
            model.queue += model.rate - done
            model.finished += done
            lost = max(0.0, model.queue - 300.0)  # clients do not wait for ever
            model.queue -= lost
            model.abandoned += lost
            model.zero_s = 0 if self.serving(model) or model.queue < 1 else model.zero_s + 1
            for each in self.of(model):
                for record in self.cluster.records:
                    if record.deployment.endswith(each.id.name) and record.state is SliceState.SERVING:
                        self.tokens[record.replica] = self.tokens.get(record.replica, 0.0) + 100 * per_slice

    def step(self) -> None:
        self._answer()
        before = {
            replica.replica_id.unique_id
            for each in self.cluster.deployments.values()
            for replica in each.replicas(*_RUNNING)
        }
        self.cluster.run(1)
        after = {
            replica.replica_id.unique_id: replica
            for each in self.cluster.deployments.values()
            for replica in each.replicas(*_STOPPING)
        }
        self.ended += [(self.now_s, name) for name in before & after.keys()]
        self.beat += 1
        self.away_s = max(0, self.away_s - 1)
        self.router_away_s = max(0, self.router_away_s - 1)
        self.scaler.step()
        self._scale()

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.step()

    def _scale(self) -> None:
        wanted = {}
        room = Room(slices=self.budget)
        fixed = [model.settings for model in self.models if not model.settings.scales]
        for model in self.models:
            for pool in [pool for pool in model.pools if pool.min < pool.max]:
                name = model.deployment(pool)
                state = self.cluster.deployments[name].state
                count = self.scaler.wanted(
                    model.settings,
                    pool.key,
                    state._target_state.target_num_replicas,
                    room,
                    fixed=fixed,
                    leaving=self.deployments.leaving(APPLICATION),
                    deployed=name in self.fresh,
                )
                self.fresh.discard(name)
                in_full, self.cluster.counted[name] = self.scaler.in_full(model.name, pool.key)
                self.cluster.undecided.discard(name)
                if in_full is None:
                    self.cluster.undecided.add(name)
                else:
                    self.cluster.in_full[name] = in_full
                wanted[name] = count
                state.autoscale(count)
        self.targets.append(wanted)


def pool(
    key: str,
    least: int = 0,
    most: int = 6,
    *,
    patience_s: float = 60.0,
    price: float = 0.0,
    hardware: str = "",
) -> Pool:
    return Pool(key, key, least, most, STEPS, 1e9, 1e9, patience_s, price, hardware or key)
