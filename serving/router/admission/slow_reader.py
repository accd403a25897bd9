"""Ends the answers that their clients do not read: such an answer holds seats for nothing. Time is given."""

from serving.errors import UnreadError
from serving.router.http.downstream import Downstream
from serving.router.telemetry.record import RequestRecord

# A client that reads nothing for so long gives up its seats; one that reads on and off may take longer, by what it has read.
UNREAD_S = 30.0
_SLOWEST_BYTES_PER_S = 1024


class Reader:
    """How well one answer's client reads."""

    def __init__(self, client: Downstream, record: RequestRecord, now_s: float) -> None:
        self._client = client
        self._record = record
        self._looked_s = now_s
        self._sent_bytes = 0
        self._behind_s = 0.0
        self._cut = False

    def look(self, now_s: float) -> None:
        """Once a beat: end the answer where its client has kept it waiting for too long."""
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        read, self._sent_bytes = self._record.sent_bytes - self._sent_bytes, self._record.sent_bytes
        waited_s = 0.0
        if self._client.paused:
            waited_s, self._record.held_up = elapsed_s, True
        self._behind_s = max(0.0, self._behind_s + waited_s - read / _SLOWEST_BYTES_PER_S)
        if self._behind_s > UNREAD_S and not self._cut:
            self._cut = True
            self._record.failed(
                UnreadError(f"The client has not read its answer for {self._behind_s:.0f} s.")
            )
            self._client.cut()
