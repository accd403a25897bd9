"""What is asked: chats short, long and of several turns, completions, questions over retrieved documents, replays.

Every word is one token for most tokenizers (a space and a common English word), so that words stand for tokens. A shared
passage is a function of its name, so that all users on all machines share it, and with it what a prefix cache holds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any

from traces import BLOCK_TOKENS, Record

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TURNS = 6  # of a conversation, then it is over
_WORDS = """
time people water light line power point place number second house world story music field river road night morning paper
engine table window city door book sound color plan market space voice wind fire stone tree
""".split()  # noqa: SIM905  a list of its own lines would hide what it is
_SYSTEMS = 4
_DOCUMENTS = 64
_RETRIEVED = 5


@dataclass(frozen=True)
class Sizes:
    """Mean words of a short prompt, of which the longer ones are multiples, and the longest answer."""

    prompt_words: int = 100
    max_tokens: int = 64


@dataclass
class Conversation:
    messages: list[dict[str, str]]
    turns: int = 0


@dataclass(frozen=True)
class Prompt:
    """One request to be."""

    kind: str
    path: str
    body: dict[str, Any]
    conversation: Conversation | None = field(default=None, compare=False)


class Prompts:
    """Prompts in a seeded order.

    Conversations that have their answer wait here for the next turn, so that any number can be under way at a time.
    """

    def __init__(self, seed: str, sizes: Sizes) -> None:
        self._random = Random(seed)
        self._sizes = sizes
        self._waiting: list[Conversation] = []

    def short_chat(self) -> Prompt:
        return self._chat("short chat", [_user(self._words(1))])

    def long_chat(self) -> Prompt:
        return self._chat("long chat", [_user(self._words(10))])

    def turn(self) -> Prompt:
        """The next turn of a conversation; each begins with one of a few long system prompts."""
        if self._waiting:
            conversation = self._waiting.pop(self._random.randrange(len(self._waiting)))
        else:
            system = passage(f"system {self._random.randrange(_SYSTEMS)}", 5 * self._sizes.prompt_words)
            conversation = Conversation([{"role": "system", "content": system}])
        conversation.messages.append(_user(self._words(0.5)))
        conversation.turns += 1
        return self._chat("conversation", list(conversation.messages), conversation)

    def answered(self, prompt: Prompt, text: str) -> None:
        """Let a conversation go on after its answer."""
        conversation = prompt.conversation
        if conversation is not None and conversation.turns < TURNS:
            conversation.messages.append({"role": "assistant", "content": text})
            self._waiting.append(conversation)

    def completion(self) -> Prompt:
        return Prompt(
            "completion", COMPLETIONS, {"prompt": self._words(1), "max_tokens": self._sizes.max_tokens}
        )

    def rag(self) -> Prompt:
        """A few of the documents, the popular ones more often, and a question about them."""
        popular = (int(self._random.paretovariate(1)) - 1 for _ in range(_RETRIEVED))
        documents = [passage(f"document {one % _DOCUMENTS}", 6 * self._sizes.prompt_words) for one in popular]
        return self._chat("rag", [_user("\n\n".join([*documents, self._words(0.2)]))])

    def replay(self, record: Record) -> Prompt:
        """A completion as long as the record's, with its shared blocks; the answer may not end early."""
        blocks = [passage(f"block {block}", BLOCK_TOKENS) for block in record.blocks]
        words = " ".join(blocks).split()[: record.prompt_tokens]
        words += self._random.choices(_WORDS, k=record.prompt_tokens - len(words))
        body = {"prompt": " ".join(words), "max_tokens": record.output_tokens, "ignore_eos": True}
        return Prompt("replay", COMPLETIONS, body)

    def _chat(
        self, kind: str, messages: list[dict[str, str]], conversation: Conversation | None = None
    ) -> Prompt:
        return Prompt(kind, CHAT, {"messages": messages, "max_tokens": self._sizes.max_tokens}, conversation)

    def _words(self, times: float) -> str:
        mean = max(1, int(times * self._sizes.prompt_words))
        return " ".join(self._random.choices(_WORDS, k=self._random.randint(1, 2 * mean - 1)))


InferenceRequest = Callable[[Prompts], Prompt]


@lru_cache(maxsize=4096)
def passage(name: str, words: int) -> str:
    """A text by its name."""
    return " ".join(Random(name).choices(_WORDS, k=words))


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
