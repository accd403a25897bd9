"""The streams that a router has open, and which of them to take off a slice that has fallen silent.

There is no timer per token: each stream notes when its last token came, and one task looks at all twice a second.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from serving.router.forwarding.connecting import UpstreamError
from serving.router.forwarding.slice_timing import SliceTiming
from serving.router.forwarding.upstream import SliceResponse
from serving.router.http.protocol import InferenceRequest
from serving.state.records import SliceRecord


class StalledError(UpstreamError):
    """A slice is silent, though its connection stands."""


@dataclass(eq=False, slots=True)
class Stream:
    """An answer from one slice. `trial`: it tries a slice that has failed; `watched`: its silence tells of a stall.

    `moving`: it was taken off its slice by nobody's fault, and goes on. `telling`: the client has not taken the last piece yet; until then the
    slice's silence is no stall.
    """

    entry: SliceRecord
    request: InferenceRequest
    response: SliceResponse
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

    def delivered(self, now_s: float) -> None:
        """The client has taken what was heard last."""
        if self.telling:
            self.heard_s = now_s
            self.telling = False

    def move(self) -> None:
        """Take the stream off its slice, by nobody's fault."""
        self.moving = True
        self.cut()

    def cut(self) -> None:
        """End the stream for its reader, as if the connection had broken."""
        self.response.cut(StalledError())


def stalled(
    streams: Collection[Stream], timing: SliceTiming, in_flight: Callable[[str], int], now_s: float
) -> list[Stream]:
    """Streams of slices that have been silent for too long, where another slice could go on.

    `in_flight`: all requests of a slice, also those without a stream: its engine may be reading their prompts.
    """
    of_slice: defaultdict[str, list[Stream]] = defaultdict(list)
    for stream in streams:
        if stream.watched:
            of_slice[stream.entry.replica].append(stream)
    late = []
    for replica, open_streams in of_slice.items():
        begun = [stream for stream in open_streams if stream.heard_s]
        limit_s = timing.silence_s(replica, reading=len(begun) < in_flight(replica))
        heard_s = [stream.heard_s for stream in begun if not stream.telling]
        silent = heard_s and now_s - max(*heard_s, timing.moved_s(replica)) > limit_s
        # A stream without a token is only late, unless its slice is silent or is on trial after a failure.
        late_s = timing.first_s(replica)
        late += [
            stream
            for stream in open_streams
            if stream.movable
            and not stream.telling
            and (
                silent
                or (
                    stream.trial
                    and not stream.heard_s
                    and now_s - max(stream.asked_s, timing.moved_s(replica)) > late_s
                )
            )
        ]
    return late
