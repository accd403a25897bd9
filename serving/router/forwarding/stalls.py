"""The streams that a router has open, and which of them to take off a slice that has stopped speaking.

No timer a token: each stream notes when it last heard something, and one task looks at all of them twice a second.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import aiohttp

from serving.router.forwarding.slice_timing import SliceTiming
from serving.router.http.protocol import InferenceRequest
from serving.state.records import SliceRecord


class StalledError(aiohttp.ClientError):
    """A slice that says nothing, though its connection stands."""


@dataclass(eq=False, slots=True)
class Stream:
    """An answer from one slice. `trial`: it tries a slice that has failed; `watched`: its silence tells of a stall.

    `moving`: its slice leaves, and it goes on elsewhere. `telling`: its client has not taken yet what came last; that the slice is silent meanwhile says nothing of it.
    """

    entry: SliceRecord
    request: InferenceRequest
    response: aiohttp.ClientResponse
    asked_s: float
    trial: bool
    heard_s: float = 0.0
    movable: bool = True
    watched: bool = False
    telling: bool = False
    moving: bool = False

    def heard(self, timing: SliceTiming, now_s: float) -> None:
        if self.heard_s:
            timing.gap(self.entry.replica, now_s - self.heard_s)
        else:
            timing.first(self.entry.replica, now_s - self.asked_s)
        self.heard_s = now_s
        self.telling = True

    def told(self, now_s: float) -> None:
        self.heard_s = now_s
        self.telling = False

    def move(self) -> None:
        """Take it off a slice that leaves: it goes on elsewhere by nobody's fault."""
        self.moving = True
        self.cut()

    def cut(self) -> None:
        """End it for its reader, as if the connection had broken."""
        self.response.content.set_exception(StalledError())
        self.response.close()


def stalled(
    streams: Collection[Stream], timing: SliceTiming, in_flight: Callable[[str], int], now_s: float
) -> list[Stream]:
    """Streams of slices that have been silent for too long, as far as they could go on elsewhere.

    `in_flight`: all requests that a slice has, whole answers among them, which may have its engine read a prompt.
    """
    of_slice: defaultdict[str, list[Stream]] = defaultdict(list)
    for stream in streams:
        if stream.watched:
            of_slice[stream.entry.replica].append(stream)
    found = []
    for replica, those in of_slice.items():
        begun = [stream for stream in those if stream.heard_s]
        limit_s = timing.silence_s(replica, reading=len(begun) < in_flight(replica))
        heard_s = [stream.heard_s for stream in begun if not stream.telling]
        silent = heard_s and now_s - max(heard_s) > limit_s
        # What has no token yet is only late, unless it tries a slice that has failed or lies on one that is silent.
        late_s = timing.first_s(replica)
        found += [
            stream
            for stream in those
            if stream.movable
            and not stream.telling
            and (silent or (stream.trial and not stream.heard_s and now_s - stream.asked_s > late_s))
        ]
    return found
