"""Which slice gives wrong tokens: a greedy answer, asked again of other slices and compared. Pure.

A greedy answer is a function of the request and the weights, but for ties: chips round sums in another order in another batch, and two
tokens almost as likely change places. From there on the answers have nothing in common. So answers are compared up to their first
difference. The logprobs of the second answer tell whether the difference is a near-tie or a fault.

One difference accuses nobody. A third slice is asked, and the odd one is asked again: a slice is wrong that differs from two others that
agree, and does so twice. With fewer than three slices of one engine nobody is found wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any

from serving.config import SENTINEL_LOGPROBS

# Nats by which two slices put the distance of two tokens otherwise, above which that is no rounding: bfloat16 rounds a logit of
# 30 by up to 0.06, a sum over layers by a few times that.
NEAR_TIE_NATS = 1.0
MOST_TOKENS = 64  # of an answer that is asked again: a wrong weight shows in few
_WHOLE_ANSWERS = (
    "prompt_logprobs",
    "echo",
    "use_beam_search",
    "kv_transfer_params",
    "ec_transfer_params",
    "truncate_prompt_tokens",  # the prompt may be cut to the room that max_tokens leaves
)


@dataclass(frozen=True)
class Answer:
    """The first tokens of an answer. `tops` has the logprobs of the likeliest tokens of each position, by id; or nothing."""

    tokens: tuple[int, ...]
    tops: tuple[Mapping[int, float], ...] = ()


class Found(StrEnum):
    """What a comparison of two answers finds."""

    SAME = auto()
    NEAR_TIE = auto()
    DIFFERENT = auto()


def compare(first: Answer, other: Answer) -> Found:
    """SAME where either begins with the other; NEAR_TIE where rounding explains their first difference, or no logprobs are there.

    Each answer's own token leads the other's there. What one leads by and what the other leads by add up to what their slices
    disagree by.
    """
    for at, (token, instead) in enumerate(zip(first.tokens, other.tokens, strict=False)):
        if token != instead:
            leads = [
                _lead(answer.tops[at], own, its)
                for answer, own, its in ((first, token, instead), (other, instead, token))
                if at < len(answer.tops)
            ]
            return Found.DIFFERENT if sum(leads) >= NEAR_TIE_NATS else Found.NEAR_TIE
    return Found.SAME


def _lead(top: Mapping[int, float], own: int, instead: int) -> float:
    """By how many nats a token leads another, at least: a token that is not among the likeliest is behind the last of them."""
    least = min(top.values(), default=0.0)
    return top.get(own, least) - top.get(instead, least)


def is_greedy(fields: Mapping[str, Any]) -> bool:
    """Whether one answer follows from a request's fields."""
    several = fields.get("n") not in (None, 1) or fields.get("best_of") not in (None, 1)
    prompt = fields.get("prompt")
    prompts = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
    whole = any(fields.get(name) for name in _WHOLE_ANSWERS)
    return fields.get("temperature") == 0 and not several and not prompts and not whole


def again(fields: Mapping[str, Any], tokens: int, *, chat: bool) -> dict[str, Any]:
    """The body that asks for the first tokens of the same answer once more, with their ids and logprobs."""
    left_out = ("stream", "stream_options", "max_completion_tokens", "stop", "logprobs", "top_logprobs")
    body = {name: value for name, value in fields.items() if name not in left_out}
    logprobs = (
        {"logprobs": True, "top_logprobs": SENTINEL_LOGPROBS} if chat else {"logprobs": SENTINEL_LOGPROBS}
    )
    most = min(tokens, MOST_TOKENS)
    if fields.get("min_tokens"):
        body["min_tokens"] = min(fields["min_tokens"], most)
    return {
        **body,
        **logprobs,
        "max_tokens": most,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def read(body: Mapping[str, Any]) -> Answer | None:
    """The tokens of an answer to `again`; None where it has none."""
    choices = body.get("choices") or [{}]
    tokens = choices[0].get("token_ids")
    if not tokens:
        return None
    logprobs = choices[0].get("logprobs") or {}
    if "content" in logprobs:
        tops = [
            {_id(top["token"]): top["logprob"] for top in position["top_logprobs"]}
            for position in logprobs["content"] or ()
        ]
    else:
        tops = [
            {_id(token): value for token, value in (top or {}).items()}
            for top in logprobs.get("top_logprobs") or ()
        ]
    return Answer(tuple(tokens[:MOST_TOKENS]), tuple(tops[:MOST_TOKENS]))


def _id(token: str) -> int:
    """Of token_id:7, as vLLM writes it on `return_tokens_as_token_ids`."""
    return int(token.removeprefix("token_id:"))


@dataclass(frozen=True)
class Ask:
    """Ask this replica for the answer."""

    replica: str


@dataclass(frozen=True)
class Wrong:
    """One replica differs from two others."""

    replica: str
    others: tuple[str, str]


@dataclass
class Case:
    """One answer that is being looked into: what each replica gave, the first of them to the client.

    `confirms` is the answer of the odd one, asked once more.
    """

    answers: dict[str, Answer]
    odd: str = ""
    confirms: Answer | None = None

    def take(self, replica: str, answer: Answer) -> None:
        """Note what a replica gave when `next` said to ask it."""
        if replica in self.answers:
            self.confirms = answer
        else:
            self.answers[replica] = answer

    def next(self, others: Sequence[str]) -> Ask | Wrong | None:
        """What to do now; `others` are further replicas that may be asked, the best first. None: nobody is found wrong."""
        replicas = list(self.answers)
        if len(replicas) == 1:
            return Ask(others[0]) if others else None
        if self._differ(replicas[0], replicas[1]):
            if len(replicas) == 2:
                return Ask(others[0]) if others else None
            return self._judge(*replicas)
        return None

    def _judge(self, first: str, second: str, third: str) -> Ask | Wrong | None:
        if self._differ(first, third) == self._differ(second, third):
            return None  # all three differ, or ties hide who does
        odd, other = (first, second) if self._differ(first, third) else (second, first)
        if compare(self.answers[other], self.answers[third]) is not Found.SAME:
            return None
        if self.confirms is None:
            self.odd = odd
            return Ask(odd)
        differs = [compare(self.confirms, self.answers[name]) is Found.DIFFERENT for name in (other, third)]
        return Wrong(odd, (other, third)) if all(differs) else None

    def _differ(self, replica: str, other: str) -> bool:
        return compare(self.answers[replica], self.answers[other]) is Found.DIFFERENT

    @property
    def differing(self) -> list[tuple[str, str]]:
        """Pairs of replicas that gave different answers."""
        names = list(self.answers)
        pairs = [(replica, other) for at, replica in enumerate(names) for other in names[at + 1 :]]
        return [(replica, other) for replica, other in pairs if self._differ(replica, other)]
