"""The answer to a prompt: each token is a function of the tokens before it, and of nothing else.

The next token follows from a hash of all tokens so far. So any engine continues a broken answer word for word, given the
prompt and the part that was sent, as ids or as text. Sampling options change nothing. JSON answers are recited from their
schema; a part that the prompt already ends with is left out.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, count, repeat
from typing import Literal

from serving.simulation.engine import tokenizer

_STOP, _COMMA = tokenizer.mark("."), tokenizer.mark(",")
# Sentences of 14 words on average, answers of 10 sentences.
_SENTENCE_WORDS = 14
_ANSWER_SENTENCES = 10
_COMMA_EVERY = 12
_LOGPROB_STEP = 1 / 512

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Wish:
    """How a client wants its answer cut. `continued` is the end of the prompt that already belongs to the answer."""

    most: int
    least: int = 0
    ignore_end: bool = False
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    keep_stop: bool = False
    choice: int = 0
    seed: int = 0
    continued: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """Tokens, the text that each adds, and why it ends there. The end mark is a token without text."""

    tokens: list[int]
    texts: list[str]
    finish: Finish
    stop_reason: int | str | None = None


def answer(prompt: Sequence[int], wish: Wish) -> Answer:
    """The answer in the engine's own vocabulary."""
    return _cut(_words(prompt, wish), wish)


def recite(prompt: Sequence[int], text: str, wish: Wish) -> Answer:
    """A given text as an answer, from where the prompt leaves off."""
    rest = _rest(tokenizer.decode(prompt[-4 * len(text) - 4 :]), text)
    return _cut(chain(tokenizer.encode(rest), repeat(tokenizer.END)), wish)


@lru_cache(maxsize=4096)
def text_of(token: int) -> str:
    """The text that a token adds to an answer."""
    return "" if token == tokenizer.END else tokenizer.decode((token,))


def logprob(token: int, position: int) -> float:
    """The log probability of a chosen token; `position` counts prompt and answer together."""
    return -((token * 2654435761 + position * 40503) % 256) * _LOGPROB_STEP


def alternatives(token: int, position: int, most: int) -> list[tuple[int, float]]:
    """The likeliest tokens of a position, the chosen one first."""
    chosen = logprob(token, position)
    others = [
        (tokenizer.word(token + position + 7 * rank, capital=False, space=True), chosen - rank / 2)
        for rank in range(1, most)
    ]
    return [(token, chosen), *others][:most]


def _words(prompt: Sequence[int], wish: Wish) -> Iterator[int]:
    """Endless tokens: sentences of the vocabulary's words, and the end mark after some sentences."""
    salt, key = wish.choice.to_bytes(8, "little"), wish.seed.to_bytes(8, "little")
    hasher = blake2b(array("Q", prompt).tobytes(), digest_size=8, key=key, salt=salt)
    last = prompt[-1]
    for position in count():
        number = int.from_bytes(hasher.digest(), "little")
        last = _next(last, number)
        if last == tokenizer.END and (wish.ignore_end or position < wish.least):
            last = tokenizer.word(number >> 16, capital=True, space=True)
        yield last
        hasher.update(last.to_bytes(8, "little"))


def _next(last: int, number: int) -> int:
    chance, rest = number & 0xFFFF, number >> 16
    if last == _STOP:
        ends = chance % _ANSWER_SENTENCES == 0
        return tokenizer.END if ends else tokenizer.word(rest, capital=True, space=True)
    if last <= tokenizer.BODY:
        return tokenizer.word(rest, capital=True, space=False)
    if last != _COMMA and chance % _SENTENCE_WORDS == 0:
        return _STOP
    if last != _COMMA and chance % _COMMA_EVERY == 1:
        return _COMMA
    return tokenizer.word(rest, capital=False, space=True)


def _rest(before: str, text: str) -> str:
    """The rest of a text whose beginning may end `before`."""
    for length in range(len(text), 0, -1):
        if before.endswith(text[:length]):
            return text[length:]
    return text


def _cut(source: Iterator[int], wish: Wish) -> Answer:
    tokens: list[int] = []
    texts: list[str] = []
    so_far = tokenizer.decode(token for token in wish.continued if token != tokenizer.END)
    continued = len(so_far)
    for token in source:
        tokens.append(token)
        texts.append(text_of(token))
        if token == tokenizer.END:
            return Answer(tokens, texts, "stop")
        if token in wish.stop_tokens and len(tokens) > wish.least:
            return Answer(tokens, [*texts[:-1], ""], "stop", token)
        if wish.stop:
            before = len(so_far)
            so_far += texts[-1]
            # As in vLLM, a stop string may begin within the least tokens, but not be complete within them.
            if len(tokens) > wish.least and (first_stop := _first_stop(so_far, before, wish.stop)):
                stop, at = first_stop
                kept = len(stop) if wish.keep_stop else 0
                return Answer(tokens, _shorten(texts, at + kept - continued), "stop", stop)
        if len(tokens) == wish.most:
            return Answer(tokens, texts, "length")
    raise AssertionError("a source never ends before its end mark")


def _first_stop(text: str, fresh: int, stops: tuple[str, ...]) -> tuple[str, int] | None:
    """The first of the stop strings that the last token completed, and where it begins."""
    matches = [(at, stop) for stop in stops if (at := text.find(stop, max(0, fresh - len(stop) + 1))) >= 0]
    return min(matches)[::-1] if matches else None


def _shorten(texts: list[str], length: int) -> list[str]:
    """Texts of the same tokens, cut to so many characters in all."""
    shortened = []
    for text in texts:
        shortened.append(text[: max(0, length)])
        length -= len(shortened[-1])
    return shortened
