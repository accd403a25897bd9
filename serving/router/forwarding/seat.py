"""What an answer under way and admission know of each other: who could make room, and who has to. Pure."""

from collections.abc import Callable
from typing import Protocol

from serving.errors import Refusal


class Preemptible(Protocol):
    """What an answer under way says of itself, and how it is told to make room for another."""

    @property
    def movable(self) -> bool:
        """Whether it could go on later with nothing lost."""

    @property
    def work(self) -> float:
        """What would have to be done again; compared with that of others of its priority."""

    def preempt(self) -> None:
        """End it at its slice. It gives its seats back soon after."""


class Seat(Protocol):
    """The seats of one request that was admitted."""

    @property
    def wanted(self) -> bool:
        """Whether the answer was told to make room and has not yet been paused."""

    def runs(self, stream: Preemptible) -> None:
        """The answer could be told to make room from now on."""

    def stops(self) -> None:
        """It could no more."""

    async def regain(self, tell: Callable[[], None]) -> Refusal | None:
        """Give the seats to whom they are wanted for, and wait for others; `tell` is called now and then.

        A refusal where no slice is left to wait for.
        """
