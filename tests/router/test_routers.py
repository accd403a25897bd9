"""Two routers behind HAProxy, with keys, on simulated slices: what they share, and what is lost when one dies."""

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from support.leases import Leases
from support.servers import PATIENCE_S
from support.service import MODEL, Service, service

from serving.router.http.auth import new
from serving.simulation.ports import free_port
from serving.simulation.processes import called
from serving.state.records import Demand
from serving.timings import TIMINGS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
BORROWS = "one chip, 2"

ROUTERS = 2
USERS = 4
IN_A_ROW = 20
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
MINUTE = 60
DIRECT_PORT = free_port()
DIRECT = f"http://127.0.0.1:{DIRECT_PORT}"


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.yaml"


@pytest.fixture(scope="module")
def keys(keys_file: Path) -> dict[str, str]:
    """Keys by name; the file of them is where the service looks for it."""
    made = {"free": new("free"), "counted": new("counted", requests_per_minute=MINUTE)}
    lines = [line for _, line in made.values()]
    keys_file.write_text("\n".join(lines))
    return {name: key for name, (key, _) in made.items()}


@pytest.fixture(scope="module")
def running(leases: Leases, keys_file: Path, keys: dict[str, str]) -> Iterator[Service]:  # noqa: ARG001  the file is there
    with service(
        leases,
        slices=2,
        engine="simulated",
        slice={"generation": "v6e", "topology": "1x1"},
        replicas=2,
        router={
            "replicas": ROUTERS,
            "keys_file": str(keys_file),
            "private_status": True,
            "door": "direct",
            "direct_port": DIRECT_PORT,
        },
    ) as found:
        found.until(lambda: len(live_routers(found)) == ROUTERS, "both routers on the board")
        yield found


def live_routers(running: Service) -> dict[str, Demand]:
    """Those whose beat goes on."""
    before = {one.router: one.beat for one in running.records().demands}
    time.sleep(3 * TIMINGS.beat_s)
    return {one.router: one for one in running.records().demands if one.beat != before.get(one.router)}


def ask(running: Service, key: str, *, address: str = "", **more: object) -> httpx.Response:
    return httpx.post(
        (address or running.address) + CHAT,
        json=BODY | more,
        headers={"authorization": f"Bearer {key}"},
        timeout=30,
    )


def test_a_request_without_a_key_is_refused_by_either_router(running: Service, keys: dict[str, str]) -> None:
    for _ in range(2 * ROUTERS):
        assert httpx.post(running.address + CHAT, json=BODY).status_code == 401
        assert httpx.get(f"{running.address}/status.json").status_code == 401
    answer = httpx.post(
        running.address + CHAT,
        json=BODY,
        headers={"authorization": f"Bearer {keys['free']}", "x-request-id": "job-7"},
        timeout=30,
    )
    assert answer.json()["id"] == "chatcmpl-job-7"  # the engine knows it by the same id
    assert answer.headers["x-request-id"] == "job-7"


def test_the_routers_share_a_port_of_their_own(running: Service, keys: dict[str, str]) -> None:
    before = {name: one.arrived for name, one in live_routers(running).items()}
    answers = [ask(running, keys["free"], address=DIRECT) for _ in range(40)]
    assert {answer.status_code for answer in answers} == {200}
    assert httpx.post(DIRECT + CHAT, json=BODY).status_code == 401
    running.until(
        lambda: all(one.arrived > before[name] for name, one in live_routers(running).items()),
        "connections to each router",
    )


def test_both_routers_say_on_the_board_what_came_to_them(running: Service, keys: dict[str, str]) -> None:
    before = sum(one.arrived for one in live_routers(running).values())
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(running, keys["free"]), range(24)))
    assert all(answer.is_success for answer in answers)

    def counted() -> bool:
        there = live_routers(running).values()
        return sum(one.arrived for one in there) == before + 24 and all(one.arrived for one in there)

    running.until(counted, "24 more requests on the board, some with each router")
    assert all(
        one.prompt_bytes and not one.held and not one.in_flight for one in live_routers(running).values()
    )


def test_a_key_s_requests_a_minute_are_kept_by_the_routers_together(
    running: Service, keys: dict[str, str]
) -> None:
    """In a burst that is over before the routers hear of one another, each keeps to a part; the rest is there right after it."""
    begin = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(running, keys["counted"]), range(2 * MINUTE)))
    burst = sum(answer.is_success for answer in answers)

    def through() -> int:
        answers.append(ask(running, keys["counted"]))
        return sum(answer.is_success for answer in answers)

    running.until(lambda: through() >= MINUTE, "the whole minute's requests")
    flowed_in = time.monotonic() - begin
    print(f"{burst} of {2 * MINUTE} in a burst, {MINUTE} a minute allowed; {through()} in {flowed_in:.1f} s")
    assert {answer.status_code for answer in answers} == {200, 429}
    assert through() <= MINUTE + time.monotonic() - begin + ROUTERS
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-ratelimit-limit-requests"] == str(MINUTE)


def test_the_beginning_of_a_prompt_is_read_once_whichever_router_sends_it(
    running: Service, keys: dict[str, str]
) -> None:
    """By itself each router would send a beginning to the home of whoever asked first: every other one would be read twice."""
    prompts, turns = 12, 3

    def tokens() -> tuple[int, int]:
        there = running.serving()
        return sum(one.prompt_tokens for one in there), sum(one.cached_tokens for one in there)

    def read_once() -> bool:
        prompt_before, cached_before = tokens()
        arrived_before = {name: one.arrived for name, one in live_routers(running).items()}
        asked = 0
        for number in range(prompts):
            system = {"role": "system", "content": f"{uuid.uuid4()} " + f"instruction {number} " * 900}
            for turn in range(turns):
                user = {"role": "user", "content": f"{uuid.uuid4()}, question {turn}?"}
                answer = ask(running, keys["free"], messages=[system, user])
                asked += answer.json()["usage"]["prompt_tokens"]
        running.until(lambda: tokens()[0] - prompt_before == asked, "all prompts counted by the slices")
        read = asked - (tokens()[1] - cached_before)
        arrived = [one.arrived - arrived_before.get(name, 0) for name, one in live_routers(running).items()]
        print(f"{read} of {asked} tokens read, requests by router {arrived}")
        # Of what a slice has, the last block is read again: a tenth of a prompt. Two beginnings may overtake the news of them.
        return min(arrived) >= prompts and read < 0.45 * asked

    running.until(
        lambda: sum(bool(one.address) for one in live_routers(running).values()) == ROUTERS,
        "where routers tell each other what they sent",
    )
    assert running.until(read_once, "beginnings that are read once")


def test_routers_that_are_replaced_lose_neither_a_request_nor_a_stream(
    running: Service, keys: dict[str, str]
) -> None:
    """What changes their arguments replaces them: Serve waits for the requests that the old ones answer by their own door.

    Half of the users come past HAProxy. A connection that reaches a router in the instant in which it leaves the port is reset,
    and asked for again, as OpenAI's clients do.
    """
    before = set(live_routers(running))
    over = threading.Event()
    failed: list[str] = []
    reset: list[str] = []

    def answered(number: int, **more: object) -> httpx.Response:
        if number % 2:
            return ask(running, keys["free"], **more)
        try:
            return ask(running, keys["free"], address=DIRECT, **more)
        except httpx.TransportError as error:
            reset.append(repr(error))
            return ask(running, keys["free"], address=DIRECT, **more)

    def user(number: int) -> int:
        asked = 0
        while not over.is_set():
            asked += 1
            answer = answered(number, max_tokens=16, stream=bool(asked % 2))
            if not answer.is_success or (asked % 2 and not answer.text.endswith("data: [DONE]\n\n")):
                failed.append(answer.text[-300:])
        return asked

    with ThreadPoolExecutor(USERS) as pool:
        users = [pool.submit(user, number) for number in range(USERS)]
        try:
            running.deploy(queue={"requests": 999})
            running.until(
                lambda: len(there := live_routers(running)) == ROUTERS and not before & set(there),
                "two new routers in the place of the old ones",
            )
        finally:
            over.set()
        asked = sum(one.result() for one in users)
    print(f"{len(reset)} of {asked} requests were reset: {reset}")
    assert asked > USERS
    assert failed == []
    assert len(reset) <= USERS


def test_a_router_that_dies_takes_its_own_connections_with_it_and_nothing_else(
    running: Service, keys: dict[str, str]
) -> None:
    def all_routers() -> list[psutil.Process]:
        """None that was replaced before, and lingers."""
        found = called(f"ServeReplica:{running.application}:router", running.cluster.processes())
        return found if len(found) == ROUTERS else []

    routers = running.until(all_routers, "as many routers as the YAML has")
    slices = {entry.replica for entry in running.serving()}
    killed = threading.Event()
    asked = [0] * USERS
    failed = [0] * USERS

    def user(number: int) -> None:
        """Asks without a pause until so many answers in a row came after the kill."""
        in_a_row = 0
        while in_a_row < IN_A_ROW and sum(failed) <= 2 * USERS:
            asked[number] += 1
            try:
                answered = ask(running, keys["free"], max_tokens=16).is_success
            except httpx.TransportError:
                answered = False
            failed[number] += not answered
            in_a_row = in_a_row + 1 if answered and killed.is_set() else 0

    with ThreadPoolExecutor(USERS) as pool:
        users = [pool.submit(user, number) for number in range(USERS)]
        running.until(lambda: min(asked) > IN_A_ROW, "every user to have asked some times")
        assert sum(failed) == 0
        routers[0].kill()
        killed.set()
        for one in users:
            one.result()
    print(f"{sum(failed)} of {sum(asked)} requests failed")
    assert sum(failed) <= 2 * USERS  # what was with it, and what came before HAProxy had seen it
    assert {entry.replica for entry in running.serving()} == slices  # no slice was restarted
    running.until(lambda: len(live_routers(running)) == ROUTERS, "a new router in its place")
    running.until(
        lambda: len(running.records().demands) == ROUTERS,
        "what the lost one had written to be taken off the board",
    )


@pytest.mark.parametrize("name", ["haproxy -dS", "ray::HAProxyManager"])
def test_haproxy_and_what_keeps_it_come_back_beside_the_same_routers_and_slices(
    running: Service, keys: dict[str, str], name: str
) -> None:
    running.until(lambda: ask(running, keys["free"]).is_success, "the door")
    routers, slices = set(live_routers(running)), {entry.replica for entry in running.serving()}
    victims = called(name, running.cluster.processes())
    assert victims
    for victim in victims:
        victim.kill()
    psutil.wait_procs(victims, timeout=PATIENCE_S)
    began_s = time.monotonic()
    assert ask(running, keys["free"], address=DIRECT).is_success
    running.until(lambda: ask(running, keys["free"]).is_success, "the door")
    print(f"{name}: answered {time.monotonic() - began_s:.1f} s after its end")
    assert set(live_routers(running)) == routers
    assert {entry.replica for entry in running.serving()} == slices
