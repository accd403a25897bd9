import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from support.fleet_of import pool, settings

from serving.errors import ClusterError
from serving.scaling import scaler as scaling
from serving.scaling.policy import Decision, Room, Settings, start
from serving.scaling.scaler import Scaler, _as_told, _Model
from serving.scaling.serve import SlicePolicy
from serving.state.gcs import Store
from serving.state.records import SliceRecord, SliceState, Snapshot

pytestmark = pytest.mark.unit


ANY, SIX = Room(), Room(slices=6)


@pytest.fixture(autouse=True)
def _soon_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scaler's thread looks often, and so sees soon that nobody calls any more."""
    monkeypatch.setattr(scaling, "_EVERY_S", 0.01)


def no_cluster() -> Store:
    raise ClusterError("no cluster here: every read fails, as while the head restarts")


def test_a_store_that_cannot_be_read_leaves_serve_what_it_has() -> None:
    time_s = [0.0]
    scaler = Scaler("app", no_cluster, clock=lambda: time_s[0])
    asked = settings(pool(most=5))
    assert scaler.wanted(asked, "near", 3, ANY) == 3
    scaler.step()
    assert scaler.wanted(asked, "near", 3, ANY) == 3
    time_s[0] = 1000.0  # nobody has called for long: the thread ends
    assert scaler._thread is not None
    scaler._thread.join(timeout=60)
    assert not scaler._thread.is_alive()


def test_what_serve_is_given_comes_back_as_it_was() -> None:
    asked = settings(pool("near", patience_s=100), pool("far", least=2), ttft_s=1.0)
    sent = json.loads(json.dumps(asdict(asked)))
    assert SlicePolicy("far", sent, {"slices": None})._settings == asked


def test_a_model_that_is_served_no_more_gives_its_share_of_the_budget_back() -> None:
    time_s = [0.0]
    scaler = Scaler("app", no_cluster, clock=lambda: time_s[0])
    gone, stays = settings(pool(least=4, most=5)), replace(settings(), model="stays")
    scaler.wanted(gone, "near", 4, SIX)
    scaler.wanted(stays, "near", 1, SIX)
    assert scaler._room("stays").slices == 2
    time_s[0] = 59.0
    scaler.wanted(stays, "near", 1, SIX)
    scaler.step()
    assert scaler._room("stays").slices == 2
    time_s[0] = 61.0
    scaler.step()
    assert scaler._room("stays").slices == 6
    time_s[0] = 1000.0
    assert scaler._thread is not None
    scaler._thread.join(timeout=60)


def test_a_controller_that_stood_still_forgets_no_model() -> None:
    time_s = [0.0]
    scaler = Scaler("app", no_cluster, clock=lambda: time_s[0])
    one, other = settings(), replace(settings(pool(least=4, most=5)), model="other")
    scaler.wanted(one, "near", 1, SIX)
    scaler.wanted(other, "near", 4, SIX)
    time_s[0] = 61.0
    assert scaler._thread is not None
    scaler._thread.join(timeout=60)
    scaler.wanted(one, "near", 1, SIX)
    scaler.step()
    assert scaler._room("m").slices == 2
    time_s[0] = 1000.0
    scaler._thread.join(timeout=60)


def test_a_limit_that_binds_on_and_off_is_told_once() -> None:
    time_s = [0.0]
    scaler = Scaler("app", no_cluster, clock=lambda: time_s[0])
    model = _Model(settings(), called_s=0.0)
    told = []
    for at_s, short in ((0, False), (10, True), (11, True), (20, False), (30, True), (95, False), (96, True)):
        time_s[0] = at_s
        scaler._tell(model, Decision((1,), f"{at_s}", held=False, state=start(model.settings), short=short))
        told.append(len(scaler._kept or ()))
    assert told == [1, 2, 2, 2, 2, 2, 3]
    assert {record.application for record in scaler._kept or ()} == {"app"}
    assert {series.info["default_tags"]["application"] for series in scaler._recorder._series.values()} == {
        "app"
    }


def ended(scaler: Scaler, time_s: list[float]) -> None:
    """Let the scaler's thread end, as nobody calls any more."""
    time_s[0] += 1000.0
    assert scaler._thread is not None
    scaler._thread.join(timeout=60)


def decided(scaler: Scaler, model: str, *counts: int) -> None:
    known = scaler._models[model]
    state = start(known.settings)
    pools = tuple(replace(each, wanted=count) for each, count in zip(state.pools, counts, strict=True))
    known.state = replace(state, pools=pools)


def test_an_application_that_was_deleted_and_deployed_again_does_not_order_its_old_fleet() -> None:
    time_s = [0.0]
    scaler = Scaler("app", no_cluster, clock=lambda: time_s[0])
    asked = settings(pool(most=50))
    assert scaler.wanted(asked, "near", 1, ANY, deployed=True) == 1
    decided(scaler, "m", 50)
    assert scaler.wanted(asked, "near", 1, ANY) == 50
    assert scaler.wanted(asked, "near", 1, ANY, deployed=True) == 1
    ended(scaler, time_s)


def test_a_changed_setting_does_not_begin_anew() -> None:
    time_s = [0.0]
    scaler = Scaler("app", no_cluster, clock=lambda: time_s[0])
    scaler.wanted(settings(pool(most=50)), "near", 50, ANY, deployed=True)
    decided(scaler, "m", 50)
    assert scaler.wanted(settings(pool(most=60), cool_down_s=5), "near", 50, ANY, deployed=True) == 50
    assert scaler._models["m"].state is not None
    ended(scaler, time_s)


def test_after_a_restart_no_model_is_decided_for_before_serve_has_asked_for_all_of_its_pools() -> None:
    """A pool that Serve had not asked for yet was taken for its `min`, and its slices stopped."""
    time_s = [0.0]
    scaler = Scaler("app", no_cluster, clock=lambda: time_s[0])
    asked = settings(pool("near", least=0), pool("far", least=0))
    scaler.wanted(asked, "near", 2, ANY)
    assert not scaler._models["m"].called
    scaler.wanted(asked, "far", 7, ANY)
    assert scaler._models["m"].called
    ended(scaler, time_s)


def test_after_a_restart_models_that_are_not_decided_for_keep_what_they_have_of_the_budget() -> None:
    time_s = [0.0]
    scaler = Scaler("app", no_cluster, clock=lambda: time_s[0])
    scaler.wanted(settings(), "near", 1, SIX)
    scaler.wanted(replace(settings(pool(least=1, most=9)), model="other"), "near", 4, SIX)
    assert scaler._room("m").slices == 2
    ended(scaler, time_s)


def test_starts_that_fail_are_told_once_and_told_again_after_slices_came_up() -> None:
    scaler = Scaler("app", no_cluster, clock=lambda: 0.0)
    model = _Model(settings(), called_s=0.0)
    told = []
    for failing in (False, True, True, False, True):
        decision = Decision((1,), "why", held=False, state=start(model.settings), failing=failing)
        scaler._tell(model, decision)
        told.append(len(scaler._kept or ()))
    assert told == [1, 2, 2, 2, 3]


def test_a_pool_with_a_fixed_number_keeps_no_other_pool_from_scaling() -> None:
    """Serve calls no policy for it."""
    time_s = [0.0]
    scaler = Scaler("app", no_cluster, clock=lambda: time_s[0])
    asked = settings(pool("near", least=2, most=2), pool("far", least=0, most=4))
    scaler.wanted(asked, "far", 0, ANY)
    assert scaler._models["m"].called
    ended(scaler, time_s)


def test_a_model_that_can_not_be_decided_for_keeps_its_slices_and_no_other_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Empty:
        def read(self, _: str) -> Snapshot:
            return Snapshot()

        def put_decisions(self, *_: Any) -> None: ...

        def put_ordered(self, *_: Any) -> None: ...

        def delete_scaling(self, *_: Any) -> None: ...

    time_s = [0.0]
    scaler = Scaler("app", Empty, clock=lambda: time_s[0])  # type: ignore[arg-type]
    first, second = settings(pool(most=50)), replace(settings(pool(most=50)), model="second")
    monkeypatch.setattr(scaler, "_run", lambda: None)
    for asked in (first, second):
        scaler.wanted(asked, "near", 7, ANY)
    decide = scaling.decide

    def fails(asked: Settings, *more: Any) -> Decision:
        if asked.model == "m":
            raise ZeroDivisionError
        return decide(asked, *more)

    monkeypatch.setattr(scaling, "decide", fails)
    scaler.step()
    assert scaler.in_full("m", "near")[0] is None
    assert scaler.in_full("second", "near")[0] is not None
    assert scaler.wanted(first, "near", 7, ANY) == 7


def test_a_pool_that_is_added_while_the_store_is_away_is_held_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model was held for then, and each look ended in an error."""

    def away() -> Any:
        raise ConnectionError("the head restarts")

    scaler = Scaler("app", away, clock=lambda: 0.0)
    monkeypatch.setattr(scaler, "_run", lambda: None)
    scaler.wanted(settings(pool("near", least=0)), "near", 2, ANY)
    scaler._models["m"].state = start(settings(pool("near", least=0)), {"near": 2})
    for name in ("far", "near"):
        scaler.wanted(settings(pool("far", least=0), pool("near", least=0)), name, 2, ANY)
    scaler.step()
    assert scaler._models["m"].hold
    assert {record.pool for record in scaler._kept or ()} == {"near", "far"}


def test_a_slice_that_starts_and_is_silent_has_not_failed() -> None:
    starts = SliceRecord("a", "m", SliceState.STARTING, "loading", "")
    failed = SliceRecord("b", "m", SliceState.LOST, "", "", reason="the engine ended")
    serves = SliceRecord("c", "m", SliceState.SERVING, "", "")
    silent = [replace(entry, state=SliceState.LOST) for entry in (starts, failed, serves)]
    found = _as_told(silent, [starts, failed, serves])
    assert [entry.state for entry in found] == [SliceState.STARTING, SliceState.LOST, SliceState.LOST]


def test_routers_are_told_what_a_model_is_to_have_once_slices_of_a_pool_that_was_taken_out_have_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those count among the slices that serve: six of six serve, and not six of none."""
    told: list[dict[str, int]] = []

    class Kept:
        def read(self, _: str) -> Snapshot:
            return Snapshot()

        def put_decisions(self, *_: Any) -> None: ...

        def put_ordered(self, _: str, slices: dict[str, int]) -> None:
            told.append(dict(slices))

    scaler = Scaler("app", Kept, clock=lambda: 0.0)  # type: ignore[arg-type]
    monkeypatch.setattr(scaler, "_run", lambda: None)
    asked = settings(pool(least=0, most=6))
    for leaving in (6, 6, 5):
        scaler.wanted(asked, "near", 6, SIX, leaving=(leaving, 0.0))
        scaler.step()
    assert scaler.wanted(asked, "near", 6, SIX, leaving=(5, 0.0)) == 1
    assert told[-1] == {"m": 6}
    told.clear()
    scaler.step()
    assert told == []
