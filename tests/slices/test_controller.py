"""What Serve's own DeploymentState makes of our answers: waves, failed starts, pools that are taken out."""

import gc
from dataclasses import replace

import pytest
from ray.serve._private.common import ReplicaState
from support.serve_deployment import APPLICATION, Cluster

from serving.slices import controller
from serving.state.records import Rollout, deployment

pytestmark = [
    pytest.mark.unit,
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),  # Ray's
]


def serving(slices: int, hardware: int, **cluster: float) -> Cluster:
    """A cluster on which so many slices serve version `a`."""
    there = Cluster(hardware, **cluster)  # type: ignore[arg-type]
    there.deployed().deploy("a", slices)
    there.run(there.start_s + 20, 5)
    assert there.deployed().serving("a") == slices
    return there


def test_with_a_spare_slice_no_capacity_is_lost_to_a_roll() -> None:
    there = serving(4, hardware=5)
    llama = there.deployed()
    llama.deploy("b", 4)
    there.run(4 * 400, 5)
    assert llama.serving("b") == 4
    assert llama.lowest == 4
    assert llama.state.curr_status_info.status.value == "HEALTHY"


def test_without_a_spare_slice_one_old_slice_after_the_other_makes_room() -> None:
    there = serving(4, hardware=4)
    llama = there.deployed()
    llama.deploy("b", 4)
    there.run(25, 5)
    assert llama.serving("a") == 4
    there.run(4 * 450, 5)
    assert llama.serving("b") == 4
    assert llama.lowest == 3


@pytest.mark.parametrize("jumped_s", [-3600.0, 3600.0])
def test_a_roll_goes_on_as_before_where_the_clock_jumps(jumped_s: float) -> None:
    """A clock that was put back kept it waiting for as long, and one put on had an old slice make room at once."""
    there = Cluster(hardware=4, start_s=40)
    llama = there.deployed()
    llama.deploy("a", 4)
    there.run(60)
    there.jumped_s = jumped_s
    llama.deploy("b", 4)
    there.run(20)
    assert llama.serving("a") == 4
    there.run(4 * 100)
    assert llama.serving("b") == 4


def test_a_new_slice_whose_process_is_slow_to_come_up_takes_no_old_one_s_hardware() -> None:
    there = serving(4, hardware=5, process_s=100)
    llama = there.deployed()
    there.broken = {"b"}
    llama.deploy("b", 4)
    there.run(1000, 5)
    assert llama.serving("a") == llama.lowest == 4


def test_a_start_that_a_second_deploy_ends_is_told_from_one_that_failed() -> None:
    there = serving(2, hardware=4, start_s=100)
    llama = there.deployed()
    llama.deploy("b", 2)
    there.run(50, 5)
    starting = {replica.replica_id.unique_id for replica in llama.replicas(ReplicaState.STARTING)}
    assert starting
    llama.deploy("c", 2)
    there.run(50, 5)
    assert set(there.stopped) == starting
    there.broken = {"c"}
    there.run(200, 5)
    assert set(there.stopped) == starting


def test_a_fleet_is_replaced_in_waves_and_its_progress_is_published() -> None:
    there = serving(40, hardware=41, start_s=100)
    llama = there.deployed()
    llama.deploy("b", 40, at_once=8)
    there.run(250, 5)
    (rollout,) = there.rollouts.values()
    assert (rollout.changed, rollout.slices, rollout.model, rollout.stopped) == (9, 40, "llama", False)
    there.run(8 * 120, 5)
    assert llama.serving("b") == 40
    assert llama.lowest == 33
    assert there.rollouts == {}


def test_a_roll_that_ended_while_no_controller_ran_is_shown_no_more() -> None:
    """The controller that told of it had nobody to tell that it was over."""
    there = Cluster(4)
    key = deployment(APPLICATION, "llama")
    there.rollouts[key] = Rollout(APPLICATION, key, "llama", "", "b", slices=4, changed=3)
    there.deployed().deploy("b", 4)
    there.run(there.start_s + 20, 5)
    assert there.deployed().serving("b") == 4
    assert there.rollouts == {}


def test_a_controller_that_comes_back_still_says_why_a_roll_stopped() -> None:
    """Status then said that none had failed, and `serving slices retry` that the last one had for no reason."""
    there = serving(4, hardware=6, start_s=3, drain_s=2)
    there.broken = {"b"}
    there.deployed().deploy("b", 4)
    there.run(60)
    (stopped,) = there.rollouts.values()
    assert (stopped.stopped, stopped.failed, stopped.reason) == (True, 3, "boom")
    there.recover()
    for _ in range(20):
        there.run(1)
        assert list(there.rollouts.values()) == [stopped]


def test_slices_that_a_controller_finds_in_their_start_are_no_roll() -> None:
    there = serving(3, hardware=4)
    llama = there.deployed()
    llama.move(llama.replicas(ReplicaState.RUNNING)[:1], ReplicaState.RECOVERING)
    llama.state._in_transition = True
    there.run(5)
    assert there.rollouts == {}


def test_load_that_moves_about_does_not_keep_the_roll_waiting() -> None:
    """The clock was restarted at every look at which another slice was the cheapest."""
    there = serving(10, hardware=10, start_s=60)
    llama = there.deployed()
    llama.deploy("b", 10)
    for look in range(30):
        there.records.sort(key=lambda entry: hash((entry.tag, look)))
        there.run(1)
    there.run(10)
    assert llama.serving("a") == 9


def test_a_version_that_cannot_start_stops_the_roll_says_so_and_is_undone_without_touching_the_old() -> None:
    there = serving(10, hardware=10, start_s=60)
    llama = there.deployed()
    old = llama.names("a")
    there.broken = {"b"}
    llama.deploy("b", 10)
    there.run(600, 5)
    assert llama.serving("a") == 9
    (rollout,) = there.rollouts.values()
    assert (rollout.stopped, rollout.reason) == (True, "boom")
    assert rollout.failed >= 3
    assert "rolling update" in llama.state.curr_status_info.message
    kept = llama.names("a")
    llama.deploy("a", 10)
    there.run(120, 5)
    assert llama.serving("a") == 10
    assert kept <= llama.names("a")
    assert len(old & llama.names("a")) == 9
    assert there.rollouts == {}


def test_a_roll_that_stopped_goes_on_when_somebody_asks() -> None:
    """Serve takes the same YAML, deployed once more, for done."""
    there = serving(3, hardware=4, start_s=10)
    llama = there.deployed()
    there.broken = {"b"}
    llama.deploy("b", 3)
    there.run(200, 5)
    (rollout,) = there.rollouts.values()
    assert rollout.stopped
    there.broken = set()
    llama.deploy("b", 3)
    there.asked = {rollout.deployment: "another version"}
    there.run(100, 5)
    assert llama.serving("a") == 3
    there.asked = {rollout.deployment: "b"}
    there.run(200, 5)
    assert llama.serving("b") == llama.lowest == 3
    assert there.rollouts == {}
    assert llama.state.curr_status_info.status.value == "HEALTHY"


def test_starts_that_failed_are_tried_again_after_pauses_and_serve_in_the_end() -> None:
    there = Cluster(hardware=1, start_s=10)
    llama = there.deployed()
    there.broken = {"a"}
    llama.deploy("a", 1)
    there.run(3 * 30)
    assert llama.state.curr_status_info.status.value == "DEPLOY_FAILED"
    assert "boom" in llama.state.curr_status_info.message
    there.run(1000)
    assert llama.state._replica_failure_count > 0  # it has been tried again
    there.broken = set()
    there.run(650)
    assert llama.serving() == 1
    assert llama.state.curr_status_info.status.value == "HEALTHY"


def test_a_failed_roll_that_has_lost_its_old_slices_is_tried_again() -> None:
    there = serving(1, hardware=2, start_s=10)
    llama = there.deployed()
    there.broken = {"b"}
    llama.deploy("b", 1)
    there.run(120)
    assert llama.state._terminally_failed()
    there.broken = set()
    (old,) = llama.replicas(*[replica.actor_details.state for replica in llama.state._replicas.get()])
    llama.lose(old)
    there.run(100)
    assert llama.serving("b") == 1


def test_after_a_roll_that_stopped_the_new_version_is_tried_again_only_in_place_of_a_lost_slice() -> None:
    there = serving(4, hardware=5, start_s=10)
    llama = there.deployed()
    there.broken = {"b"}
    llama.deploy("b", 4)
    there.run(2000, 5)
    assert llama.state._terminally_failed()
    assert llama.serving("a") == llama.lowest == 4
    llama.lose(llama.replicas(ReplicaState.RUNNING)[0])
    there.run(5000, 5)
    assert llama.serving("a") == llama.lowest == 3
    (rollout,) = there.rollouts.values()
    assert (rollout.stopped, rollout.reason) == (True, "boom")
    there.broken = set()
    there.run(1500, 5)
    assert llama.serving("b") == 4
    assert llama.lowest == 3
    assert there.rollouts == {}


def test_a_version_that_failed_rolls_once_its_cause_is_mended_and_it_is_deployed_after_the_old_one() -> None:
    there = serving(3, hardware=3, start_s=10)
    llama = there.deployed()
    there.broken = {"b"}
    llama.deploy("b", 3)
    there.run(2000, 5)
    llama.deploy("a", 3)
    there.run(200, 5)
    assert llama.serving("a") == 3
    there.broken = set()
    llama.deploy("b", 3)
    there.run(1000, 5)
    assert llama.serving("b") == 3


def test_another_version_after_one_that_failed_rolls_as_any_other() -> None:
    there = serving(3, hardware=3, start_s=10)
    llama = there.deployed()
    there.broken = {"b"}
    llama.deploy("b", 3)
    there.run(2000, 5)
    assert llama.serving("a") == 2
    llama.deploy("c", 3)
    there.run(1000, 5)
    assert llama.serving("c") == 3


def test_a_pool_that_is_taken_out_serves_until_its_successor_does() -> None:
    there = serving(3, hardware=6, start_s=60)
    old = there.deployed()
    there.deployed("next").deploy("b", 3, pool="other")
    there.configure("next")
    there.run(55)
    assert old.serving() == 3
    assert there.deleted == []
    there.run(60)
    assert there.deployed("next").serving() == 3
    assert there.deleted == ["llama"]


def test_a_pool_that_is_taken_out_waits_until_scaling_has_decided_for_its_successor() -> None:
    there = serving(5, hardware=10, start_s=40)
    following = there.deployed("next")
    following.deploy("b", 1, pool="other", most=10)
    there.configure("next")
    there.undecided.add("next")
    there.run(600)  # as while the store can't be read
    assert (there.deployed().serving(), following.serving()) == (4, 1)
    following.state._rescale_to(5)
    there.undecided.clear()
    there.run(30)
    assert there.deployed().serving() == 4
    there.run(60)
    assert there.deployed("next").serving() == 5
    assert there.deleted == ["llama"]


def test_a_pool_that_is_taken_out_outlives_a_controller_that_comes_back() -> None:
    """Its slices seemed to be none until they had answered the new controller: the pool was deleted."""
    there = serving(20, hardware=40, start_s=300)
    there.deployed("next").deploy("b", 20, pool="other")
    there.configure("next")
    there.run(30)
    old = there.deployed()
    found = old.replicas(ReplicaState.RUNNING)
    old.move(found, ReplicaState.RECOVERING)
    there.run(5)
    old.move(found, ReplicaState.RUNNING)
    there.run(100)
    assert there.deleted == []
    assert old.serving() == 20
    there.run(300)
    assert there.deployed("next").serving() == 20
    assert there.deleted == ["llama"]


def test_a_pool_that_was_put_back_and_is_taken_out_again_waits_again() -> None:
    there = serving(5, hardware=30, start_s=300)
    for version in "bc":
        following = there.deployed(f"next-{version}")
        following.deploy(version, 1, pool="other", most=10)
        there.undecided.add(f"next-{version}")
        there.configure(f"next-{version}")
        there.run(10)
        assert there.deployed().serving() == 5
        there.configure("llama")
        there.undecided.discard(f"next-{version}")
        there.run(60)
        assert there.deployed().serving() == 5


def test_slices_of_the_same_hardware_make_room_for_their_successor_and_those_of_another_do_not() -> None:
    for pool, left in (("pool", 2), ("other", 3)):
        there = serving(3, hardware=3, start_s=600)
        there.deployed("next").deploy("b", 3, pool=pool)
        there.configure("next")
        there.run(100)
        assert there.deployed().serving() == left


def test_a_model_that_is_taken_out_goes_at_once() -> None:
    there = serving(2, hardware=4)
    there.configure("router")
    there.run(1)
    assert there.deleted == ["llama"]


def test_a_slice_that_the_store_does_not_tell_of_is_not_taken_for_an_idle_one() -> None:
    """A store that answers in part had the roll begin with whichever slices it left out."""
    there = serving(3, hardware=3, start_s=40, drain_s=1)
    llama = there.deployed()
    missing, idle, busy = sorted(llama.names("a"))
    there.records = [
        replace(record, running=9 if record.tag == busy else 0)
        for record in there.records
        if record.tag != missing
    ]
    llama.deploy("b", 3)
    while len(left := llama.names("a")) == 3:
        there.run(1)
    assert {missing, idle, busy} - left == {idle}


def test_a_slice_on_which_engines_die_soon_after_each_start_is_left_out_while_a_spare_serves() -> None:
    """By a bad chip: each engine begins to serve, and a start that serves acquits what failed to start before."""
    there = Cluster(hardware=4, start_s=60, dying={"0": 100})
    llama = there.deployed()
    llama.deploy("a", 3)
    there.run(600, 5)
    died = there.failures["0"]
    assert (died.failures, died.early) == (2, True)
    there.run(1200, 5)
    assert llama.serving() == 3
    assert "0" not in llama.at.values()
    assert there.failures == {"0": died}


def test_engines_that_die_soon_wherever_they_start_leave_no_slice_out_while_none_is_free() -> None:
    """Of a fault of their own, or a request that nobody found guilty. Half of the time they serve."""
    there = Cluster(hardware=3, start_s=60, dying=dict.fromkeys("012", 100))
    llama = there.deployed()
    llama.deploy("a", 3)
    served = 0
    for _ in range(400):
        there.run(5, 5)
        served += llama.serving()
    assert served > 3 * 400 / 2
    assert {failed.version for failed in there.failures.values()} == {"a"}


def test_nothing_is_kept_of_deployments_that_are_gone() -> None:
    """The name of each deployment that a controller ever had stayed."""
    there = Cluster(8, start_s=3, drain_s=2)
    deployments = controller._INSTALLED.pop()
    for name in ("one", "two", "three"):
        there.configure(name)
        there.broken = {"b"}
        there.deployed(name).deploy("a", 2, name)
        there.run(20)
        there.deployed(name).deploy("b", 2, name)
        there.run(60)
        assert len(deployments._looked) == len(deployments._published) == 1
        assert there.rollouts
        there.configure("others")
        there.run(20)
        assert not there.deployed(name).replicas(ReplicaState.RUNNING)
        del there.deployments[name]
        there.application._deployment_state_manager._deployment_states.clear()
        there.rollouts.clear()
        gc.collect()
    assert not deployments._looked
    assert not deployments._published
    assert not deployments._retries
