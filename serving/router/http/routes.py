"""The routes of a model: one row per path. Pure.

Every route of vLLM's app that computes something has a row, and every row says how to read the work from a request: a path
without a row is refused. Routes that steer an engine (sleep, profiling, weights, adapters
loaded by hand) have none, and no client reaches them. The rows type the fields that the router looks at; every other field is
vLLM's and passes as it came.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from serving.router.http import work
from serving.router.http.work import Extractor


class Dialect(StrEnum):
    """Whose API a path follows; decides the shape of errors."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


@dataclass(frozen=True)
class Route:
    """One path that a slice answers.

    `fields` are JSON schemas of the fields that the router looks at; a body must have the `needed` ones. `operation` is
    OpenTelemetry's name of the work, `work` reads from fields what an engine has to do. Another slice can go on with a stream
    that is `continued`, whose events name tokens, and with one in `steps`, whose events don't. The first event of a stream that
    `opens` only names the role.
    """

    path: str
    work: Extractor
    summary: str
    fields: dict[str, Any]
    needed: tuple[str, ...] = ()
    dialect: Dialect = Dialect.OPENAI
    operation: str | None = None
    continued: bool = False
    steps: bool = False
    opens: bool = False
    form: bool = False

    @property
    def renders(self) -> bool:
        """Whether only a tokenizer is asked. What such an answer says of usage is what its client said, or a part of its schema."""
        return self.work is work.rendering


_TEXT = {"type": "string"}
_TOKENS = {"type": "array", "items": {"type": "integer"}}
_PROMPT = {"anyOf": [_TEXT, _TOKENS, {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}}]}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]}
_MESSAGES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"role": _TEXT, "content": _CONTENT},
        "required": ["role"],
    },
}
_COUNT = {"type": "integer", "minimum": 1}
_SAMPLING = {
    "stream": {"type": "boolean"},
    "max_tokens": _COUNT,
    "n": _COUNT,
    "temperature": {"type": "number", "minimum": 0},
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]},
    "user": _TEXT,
}
_EMBEDDED = {"input": _PROMPT}
_SCORED = {"text_1": _CONTENT, "text_2": _CONTENT}
_RANKED = {"query": _TEXT, "documents": {"type": "array", "items": _CONTENT}, "top_n": {"type": "integer"}}
# A score's two sides go by several names; a cross-encoder reads pairs of them, an embedding model each by itself.
_SCORING = work.reading("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items")
_RANKING = work.reading("query", "documents")
_GENERATED = {"generate_response": {"type": "object"}}
_SEVERAL_GENERATED = {"generate_responses": {"type": "array", "items": {"type": "object"}}}
_SPEECH = {"file": {"type": "string", "format": "binary"}}

ROUTES: dict[str, Route] = {
    route.path: route
    for route in (
        Route(
            "/v1/chat/completions",
            work.chat,
            "Chat",
            {"messages": _MESSAGES, **_SAMPLING},
            ("messages",),
            operation="chat",
            continued=True,
            opens=True,
        ),
        Route(
            "/v1/chat/completions/batch",
            work.chats,
            "Chat, several conversations at once",
            {"messages": {"type": "array", "items": _MESSAGES}},
            ("messages",),
        ),
        Route(
            "/v1/chat/completions/render",
            work.rendering,
            "The tokens of a chat",
            {"messages": _MESSAGES},
            ("messages",),
        ),
        Route(
            "/v1/chat/completions/derender",
            work.rendering,
            "A chat's answer from tokens",
            _GENERATED,
            ("generate_response",),
        ),
        Route(
            "/v1/completions",
            work.completion,
            "Complete a text",
            {"prompt": _PROMPT, **_SAMPLING},
            ("prompt",),
            operation="text_completion",
            continued=True,
        ),
        Route(
            "/v1/completions/render",
            work.rendering,
            "The tokens of a prompt",
            {"prompt": _PROMPT},
            ("prompt",),
        ),
        Route(
            "/v1/completions/derender",
            work.rendering,
            "Completions from tokens",
            _SEVERAL_GENERATED,
            ("generate_responses",),
        ),
        Route(
            "/inference/v1/generate",
            work.generation,
            "Tokens to tokens",
            {"token_ids": _TOKENS, "sampling_params": {"type": "object"}, "stream": {"type": "boolean"}},
            ("token_ids", "sampling_params"),
        ),
        Route(
            "/v1/responses",
            work.response,
            "OpenAI's Responses",
            {"input": _CONTENT, "max_output_tokens": _COUNT},
            ("input",),
            operation="chat",
            steps=True,
        ),
        Route(
            "/v1/messages",
            work.message,
            "Anthropic's Messages",
            {"messages": _MESSAGES, "max_tokens": _COUNT, "stream": {"type": "boolean"}},
            ("messages", "max_tokens"),
            dialect=Dialect.ANTHROPIC,
            operation="chat",
            steps=True,
        ),
        Route(
            "/v1/messages/count_tokens",
            work.rendering,
            "Count a message's tokens",
            {"messages": _MESSAGES},
            ("messages",),
            dialect=Dialect.ANTHROPIC,
        ),
        Route(
            "/v1/embeddings",
            work.reading("input"),
            "Embed texts",
            _EMBEDDED,
            ("input",),
            operation="embeddings",
        ),
        Route(
            "/v2/embed",
            work.reading("texts", "images", "inputs"),
            "Cohere's Embed",
            {"texts": {"type": "array", "items": _TEXT}},
            (),
        ),
        Route("/pooling", work.reading("input", "data"), "Pool hidden states", _EMBEDDED, ("input",)),
        Route("/classify", work.reading("input"), "Classify texts", _EMBEDDED, ("input",)),
        Route("/score", _SCORING, "Score pairs of texts", _SCORED, ("text_1", "text_2")),
        Route("/v1/score", _SCORING, "Score pairs of texts", _SCORED, ("text_1", "text_2")),
        Route(
            "/generative_scoring",
            work.scoring,
            "Score items by a model's next token",
            {"query": _PROMPT, "items": _PROMPT},
            ("query", "items"),
        ),
        Route("/rerank", _RANKING, "Order documents by a query", _RANKED, ("query", "documents")),
        Route("/v1/rerank", _RANKING, "Order documents by a query", _RANKED, ("query", "documents")),
        Route("/v2/rerank", _RANKING, "Order documents by a query", _RANKED, ("query", "documents")),
        Route(
            "/tokenize",
            work.rendering,
            "Text or chat to tokens",
            {"prompt": _TEXT, "messages": _MESSAGES},
            (),
        ),
        Route("/detokenize", work.rendering, "Tokens to text", {"tokens": _TOKENS}, ("tokens",)),
        Route(
            "/invocations",
            work.anything,
            "Any of these, as SageMaker asks",
            {"messages": _MESSAGES, "prompt": _PROMPT},
            (),
        ),
        Route("/v1/audio/transcriptions", work.speech, "Speech to text", _SPEECH, ("file",), form=True),
        Route("/v1/audio/translations", work.speech, "Speech to English text", _SPEECH, ("file",), form=True),
    )
}
_ANTHROPIC = "/v1/messages"


def dialect_of(path: str) -> Dialect:
    """The dialect of a path, also of one that is not served."""
    return Dialect.ANTHROPIC if path.startswith(_ANTHROPIC) else Dialect.OPENAI
