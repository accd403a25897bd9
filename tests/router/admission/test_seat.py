import asyncio

import pytest
from support.servers import PATIENCE_S

from serving.router.admission.queue import Ticket, Where
from serving.router.admission.rate_limit import Account
from serving.router.admission.seat import AdmittedSeat
from serving.router.forwarding.seat import Preemptible
from serving.router.http.auth import ANYONE
from serving.router.telemetry.record import RequestRecord

pytestmark = pytest.mark.unit


class Paused:
    """An admission in which a paused request waits until it has a seat."""

    def __init__(self) -> None:
        self.seat = asyncio.Event()

    def runs(self, ticket: Ticket, stream: Preemptible) -> None:
        raise NotImplementedError

    def stops(self, ticket: Ticket) -> None:
        raise NotImplementedError

    def pause(self, ticket: Ticket) -> None:
        ticket.where = Where.HELD

    async def turn(self, ticket: Ticket) -> None:
        await self.seat.wait()
        ticket.where = Where.ADMITTED


def running() -> Ticket:
    return Ticket("llama", Account(ANYONE), 1.0, 1, 100, 0.0, where=Where.ADMITTED, begun=True)


async def test_a_client_is_told_of_its_pause_at_once_and_again_and_again() -> None:
    admission, record = Paused(), RequestRecord("/v1/completions")
    told = 0

    def tell() -> None:
        nonlocal told
        told += 1
        if told == 4:
            admission.seat.set()

    async with asyncio.timeout(PATIENCE_S):
        assert await AdmittedSeat(admission, running(), record, tell_s=0.001).regain(tell) is None
    assert told == 4
    assert record.preemptions == 1
    assert record.paused_s > 0


async def test_the_pause_of_a_client_that_goes_is_recorded() -> None:
    record, told = RequestRecord("/v1/completions"), asyncio.Event()
    waiting = asyncio.create_task(AdmittedSeat(Paused(), running(), record).regain(told.set))
    await told.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert record.paused_s > 0
