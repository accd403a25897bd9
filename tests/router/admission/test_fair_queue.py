from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.router.admission.fair_queue import FairQueue

pytestmark = pytest.mark.unit

FLOWS = st.sampled_from("abc")


def test_one_key_alone_is_served_in_order() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(5):
        queue.push(item, "a", cost=10 - item)
    assert [queue.pop() for _ in range(5)] == list(range(5))
    with pytest.raises(IndexError):
        queue.pop()


def test_a_key_that_floods_does_not_keep_another_waiting() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(100):
        queue.push(f"flood {index}", "flood", cost=1)
    for _ in range(10):
        queue.pop()
    queue.push("one", "quiet", cost=1)
    assert "one" in [queue.pop() for _ in range(2)]


def test_a_key_saves_nothing_up_while_it_is_idle() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(1000):
        queue.push(f"busy {index}", "busy", cost=1)
    for _ in range(500):
        queue.pop()
    for index in range(100):
        queue.push(f"late {index}", "late", cost=1)
    served = Counter(queue.pop().split()[0] for _ in range(100))
    assert abs(served["busy"] - served["late"]) <= 2


def test_what_counts_is_tokens_not_requests() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.push(f"long {len(queue)}", "long", cost=10)
        queue.push(f"short {len(queue)}", "short", cost=1)
    served = Counter(queue.pop().split()[0] for _ in range(55))
    assert served["short"] == pytest.approx(10 * served["long"], abs=10)


def test_a_higher_priority_goes_first_and_shares_only_with_its_like() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(3):
        queue.push(f"low {index}", "low", cost=1)
        queue.push(f"high {index}", "high", cost=100, priority=1)
    assert [queue.pop().split()[0] for _ in range(6)] == ["high"] * 3 + ["low"] * 3


@given(
    weights=st.fixed_dictionaries({"a": st.integers(1, 8), "b": st.integers(1, 8)}),
    costs=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=5, max_size=30),
)
def test_keys_that_both_wait_get_tokens_by_their_weights(
    weights: dict[str, int], costs: list[tuple[int, int]]
) -> None:
    """Start-time fair queueing keeps them within one request of each key of each other."""
    queue: FairQueue[tuple[str, int, int]] = FairQueue()
    for index, pair in enumerate(costs):
        for flow, cost in zip("ab", pair, strict=True):
            queue.push((flow, index, cost), flow, cost=cost, weight=weights[flow])
    served = dict.fromkeys("ab", 0.0)
    left = dict.fromkeys("ab", len(costs))
    while all(left.values()):
        flow, _, cost = queue.pop()
        served[flow] += cost / weights[flow]
        left[flow] -= 1
        assert abs(served["a"] - served["b"]) <= 50 / weights["a"] + 50 / weights["b"] + 1e-6


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), FLOWS, st.integers(1, 9), st.integers(-1, 1)),
            st.tuples(st.just("remove"), st.integers(0, 99)),
            st.just(("pop",)),
        ),
        max_size=80,
    )
)
def test_every_request_leaves_once_and_each_key_s_in_order(steps: list[tuple[object, ...]]) -> None:
    queue: FairQueue[int] = FairQueue()
    inside: dict[int, tuple[object, object]] = {}
    for number, step in enumerate(steps):
        match step:
            case ("push", str(flow), int(cost), int(priority)):
                queue.push(number, flow, cost=cost, priority=priority)
                inside[number] = (flow, priority)
            case ("remove", int(which)) if inside:
                item = list(inside)[which % len(inside)]
                queue.remove(item)
                del inside[item]
            case ("pop",) if inside:
                item = queue.pop()
                kind = inside.pop(item)
                assert all(other > item for other, its in inside.items() if its == kind)
                assert all(priority <= kind[1] for _, priority in inside.values())  # type: ignore[operator]
        assert queue.items() == list(inside)


def test_in_a_full_queue_the_newest_of_the_key_that_holds_most_makes_room() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(4):
        queue.push(f"a{index}", "a", cost=1)
    queue.push("b0", "b", cost=1)
    assert queue.heaviest("b") == "a3"
    assert queue.heaviest("a") is None
    assert queue.heaviest("b", weight=0.4) is None  # two of weight 0.4 are more than four of weight 1
    assert queue.heaviest("b", priority=-1) is None
    assert queue.heaviest("c", priority=1) == "a3"
