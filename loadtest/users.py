"""Who asks. In closed loop: users who read an answer for a moment and ask again, as many requests under way as there are users.

Each class of them asks one kind of prompt; their weights are the mix, in open loop too.
"""

import itertools
import time
from random import Random
from typing import ClassVar

from locust import FastHttpUser, task
from locust.exception import StopUser

import exchange
import keys
from figures import Slo
from prompts import InferenceRequest, Prompt, Prompts, Sizes

_numbers = itertools.count()


class AskingUser(FastHttpUser):
    """How all users ask; an abstract user is locust's own way to share it."""

    abstract = True
    api_keys: ClassVar[list[keys.Key]] = []
    slo: ClassVar[Slo] = Slo()

    def on_start(self) -> None:
        options = self.environment.parsed_options
        seed = f"{options.seed} {getattr(self.environment.runner, 'worker_index', 0)} {next(_numbers)}"
        self.random = Random(f"choices {seed}")
        self.prompts = Prompts(seed, Sizes(options.prompt_words, options.max_tokens))
        found = exchange.model(self, options.model, keys.pick(self.api_keys, self.random))
        if found is None:
            raise StopUser
        self.model = found

    def next(self, kind: InferenceRequest) -> tuple[Prompt, keys.Key | None]:
        return kind(self.prompts), keys.pick(self.api_keys, self.random)

    def send(self, prompt: Prompt, key: keys.Key | None, intended: float) -> None:
        streamed = self.random.random() < self.environment.parsed_options.streamed
        text = exchange.ask(
            self, prompt, model=self.model, streamed=streamed, key=key, slo=self.slo, intended=intended
        )
        if text is not None:
            self.prompts.answered(prompt, text)


class ClosedLoopUser(AskingUser):
    abstract = True
    kind: ClassVar[InferenceRequest]

    def wait_time(self) -> float:
        return self.random.uniform(0, 2 * self.environment.parsed_options.think_s)

    @task
    def ask(self) -> None:
        prompt, key = self.next(type(self).kind)
        self.send(prompt, key, time.perf_counter())


class ShortChat(ClosedLoopUser):
    weight = 4
    kind = Prompts.short_chat


class LongChat(ClosedLoopUser):
    weight = 1
    kind = Prompts.long_chat


class ConversationUser(ClosedLoopUser):
    """Several turns, each with the answers before it; conversations share a few system prompts."""

    weight = 3
    kind = Prompts.turn


class Completion(ClosedLoopUser):
    weight = 1
    kind = Prompts.completion


class Rag(ClosedLoopUser):
    """Long prompts of documents that others ask about too, short questions."""

    weight = 1
    kind = Prompts.rag
