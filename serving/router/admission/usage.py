"""What requests use in tokens: as far as is known before, while they run, and once they have ended.

A request that sets no bound to its answer is taken to write what its key's answers of late came to.
"""

from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar

from serving.router.http.validation import BYTES_PER_TOKEN, Estimate
from serving.router.http.work import Work
from serving.router.telemetry.record import RequestRecord

# Before the first answer of a model is known; the mean of public traces of chat.
_OUTPUT_TOKENS = 256.0
_TOKENS_PER_S = 30.0
_WEIGHT = 0.1
# A key that has had short answers may ask for a long one: at least so many tokens are booked for it.
_LEAST_BOOKED_TOKENS = 64.0
_MOST_KEYS = 10_000  # by model, whose answers are remembered: tokens of an issuer may name any number of them
# A shorter answer's time is its prompt's and not its tokens'.
_FEWEST_TIMED_TOKENS = 8


Name = TypeVar("Name", str, tuple[str, str])


class Usage:
    """How long answers are, by key and model, and how fast each sequence of a model writes."""

    def __init__(self) -> None:
        self._of_key: dict[tuple[str, str], float] = {}
        self._of_model: dict[str, float] = {}
        self._tokens_per_s: dict[str, float] = {}

    def output_tokens(self, key: str, model: str, longest: int) -> float:
        """About the tokens of one answer to which the request sets no bound; at most `longest`."""
        of_model = self._of_model.get(model, _OUTPUT_TOKENS)
        return min(longest, max(_LEAST_BOOKED_TOKENS, self._of_key.get((key, model), of_model)))

    def written_tokens(self, model: str, seconds: float) -> float:
        """About the tokens of one answer that nobody has seen for so long."""
        return seconds * self._tokens_per_s.get(model, _TOKENS_PER_S)

    def seconds(self, model: str, tokens: float) -> float:
        """About the time that one answer of so many tokens takes."""
        return tokens / max(1e-3, self._tokens_per_s.get(model, _TOKENS_PER_S))

    def learn(self, key: str, record: RequestRecord, work: Work) -> None:
        """Take over what an answer came to, where it is known and came to its end."""
        if record.outcome or record.output_tokens is None or record.status >= HTTPStatus.BAD_REQUEST:
            return
        per_sequence = record.output_tokens / work.sequences
        if work.generates and work.output_tokens is None:
            _average(self._of_model, record.model, per_sequence)
            _average(self._of_key, (key, record.model), per_sequence)
            self._of_key[key, record.model] = self._of_key.pop((key, record.model))  # the latest stands last
            if len(self._of_key) > _MOST_KEYS:
                del self._of_key[next(iter(self._of_key))]
        if record.leases and record.last_s > record.leases[0].at_s and per_sequence >= _FEWEST_TIMED_TOKENS:
            seconds = record.last_s - record.leases[0].at_s - record.paused_s
            _average(self._tokens_per_s, record.model, per_sequence / max(1e-3, seconds))


@dataclass
class Filled:
    """Tokens of the lines of batches that have ended."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    lines: int = 0

    def add(self, record: RequestRecord) -> None:
        self.prompt_tokens += record.prompt_tokens or 0
        self.output_tokens += record.output_tokens or 0
        self.lines += 1


def used_tokens(
    record: RequestRecord, estimate: Estimate, usage: Usage, longest: int, now_s: float
) -> tuple[float, float]:
    """Tokens that a request used of its prompt and its answer, however it ended: at a hang-up what was written until then.

    Without the engine's own count an event of a stream is a token. Of a stream that its client held up and left the engine
    wrote more than came here, and of one that it held up there are more tokens than events. What an engine refused costs nothing. `longest`: tokens that an answer to which the request
    sets no bound may come to. `now_s` is of the record's clock.
    """
    record.read_usage()
    if not record.leases:
        return 0.0, 0.0
    work = estimate.work

    def in_time(seconds: float) -> float:
        most = longest if work.output_tokens is None else work.output_tokens
        per_sequence = usage.written_tokens(record.model, seconds)
        return max(0.0, min(most, per_sequence)) * work.sequences if work.generates else 0.0

    prompt = estimate.prompt_tokens if record.prompt_tokens is None else record.prompt_tokens
    uncounted = record.outcome == "cancelled" and record.output_tokens is None
    if record.first_s and not uncounted:
        if HTTPStatus.BAD_REQUEST <= record.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return 0.0, 0.0
        unseen = record.streamed and record.held_up and (record.outcome or record.by_events)
        return prompt, max(
            _written(record, work), in_time(now_s - record.first_s - record.paused_s) if unseen else 0.0
        )
    if uncounted:
        return prompt, in_time((record.first_s or now_s) - record.leases[-1].at_s)
    # No engine refuses a request whose stream it has begun.
    began = record.streamed or record.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return prompt if began else 0.0, 0.0


def _written(record: RequestRecord, work: Work) -> float:
    """What an engine wrote that came to its end; of speech, of which it counts nothing, about what its text has."""
    if record.output_tokens is not None:
        return record.output_tokens
    return record.sent_bytes / BYTES_PER_TOKEN if work.generates else 0.0


def _average(means: dict[Name, float], name: Name, value: float) -> None:
    means[name] = means[name] + _WEIGHT * (value - means[name]) if name in means else value
