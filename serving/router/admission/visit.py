"""A request as a visit: it begins with its headers, which say whose it is, and counts for its key until it is over."""

from starlette.responses import Response

from serving.errors import Refusal
from serving.router.admission.rate_limit import Account


class Visit:
    """One request of a key, from its headers to its end. `refusal`: why it may not come now. `fills`: only a free seat is for it.

    `times`: how often it has made room for other requests.
    """

    def __init__(
        self, account: Account, refusal: Refusal | None, now_s: float, *, fills: bool = False, times: int = 0
    ) -> None:
        self.account = account
        self.fills = fills
        self.times = times
        self.refusal = refusal
        self.owner = account.key.name
        self.body_bytes = 0
        self._since_s = now_s
        self._over = refusal is not None

    def leave(self, now_s: float) -> None:
        """The request is over; a second call changes nothing."""
        if not self._over:
            self._over = True
            self.account.leave(now_s - self._since_s)


class RefusedError(Exception):
    """A request is refused before its body was read; `response` says why, and when to come back."""

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        self.response = response
