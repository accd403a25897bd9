"""A roll that stopped is tried again at a command; the store is a table in memory."""

from dataclasses import replace

import pytest
from support.memory_store import MemoryStore, MemoryTable

from serving.cli.slices import retry
from serving.errors import UnknownSliceError
from serving.state.records import Rollout

pytestmark = pytest.mark.unit

STOPPED = Rollout(
    "app", "app#llama", "llama", "v6e 2x4", "b", slices=3, changed=0, failed=3, stopped=True, reason="boom"
)


def test_the_controller_is_told_once_and_of_that_version_alone() -> None:
    store = MemoryStore(MemoryTable())
    store.put_rollout(STOPPED)
    assert retry(store, None) == ["llama (app) on v6e 2x4: tried again; 3 starts failed, the last one: boom"]
    assert [store.take_retry(STOPPED) for _ in range(2)] == [True, False]
    retry(store, "llama")
    assert not store.take_retry(replace(STOPPED, version="c"))
    assert not store.take_retry(STOPPED)


def test_a_roll_that_has_not_stopped_is_left_alone() -> None:
    store = MemoryStore(MemoryTable())
    with pytest.raises(UnknownSliceError, match=r"no roll of any model has stopped$"):
        retry(store, None)
    store.put_rollout(STOPPED)
    store.put_rollout(replace(STOPPED, deployment="app#qwen", model="qwen", stopped=False))
    with pytest.raises(UnknownSliceError, match=r"no roll of qwen has stopped; one of llama has$"):
        retry(store, "qwen")


def test_the_same_model_of_another_application_is_left_alone() -> None:
    store = MemoryStore(MemoryTable())
    other = replace(STOPPED, application="green", deployment="green#llama")
    for stopped in (STOPPED, other):
        store.put_rollout(stopped)
    (said,) = retry(store, "llama", "green")
    assert said.startswith("llama (green)")
    assert (store.take_retry(STOPPED), store.take_retry(other)) == (False, True)
    with pytest.raises(UnknownSliceError, match=r"no roll of any model of blue has stopped$"):
        retry(store, None, "blue")
