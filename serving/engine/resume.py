"""Lets vLLM go on with an answer that another engine began. The ids so far come in `vllm_xargs` and are not shown again.

The ids go behind the prompt, so the model sees what it would have seen. They also go through the detokenizer and through the
parser of thoughts and tools, with the results dropped. So both stand where the other engine's stood: a detokenizer may hold
half a character or the beginning of a stop string. For streams alone: a whole answer is run anew. vLLM has no such option;
the three places below were read in 0.26.0.
"""

import copy
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from serving.engine.protocol import CONTINUED


def install(state: Any) -> None:
    """Teach this to an app that vLLM built; `state` is its app.state."""
    _teach_detokenizer()
    if chat := getattr(state, "openai_serving_chat", None):
        chat.render_chat_request = _with_continued_ids(
            chat.render_chat_request, chat, lambda rendered: rendered[1]
        )
        if chat.parser_cls is not None:
            chat.parser_cls = continuing_parser(chat.parser_cls)
    if completion := getattr(state, "openai_serving_completion", None):
        completion.render_completion_request = _with_continued_ids(
            completion.render_completion_request, completion, lambda rendered: rendered
        )


def continued_ids(extra: Any) -> list[int]:
    """The ids of a request's `vllm_xargs`, or of its sampling parameters' `extra_args`."""
    ids = (extra or {}).get(CONTINUED) or []
    return ids if isinstance(ids, list) else [ids]


def _with_continued_ids(render: Any, serving: Any, inputs_of: Any) -> Any:
    async def rendering(request: Any) -> Any:
        rendered = await render(request)
        ids = continued_ids(request.vllm_xargs)
        if not ids or hasattr(rendered, "error"):
            return rendered
        inputs = inputs_of(rendered)
        if not all(type(token) is int and token >= 0 for token in ids):
            return _refusal(serving, f"{CONTINUED} are ids of tokens.")
        if not request.stream or len(inputs) != 1 or (request.n or 1) != 1:
            return _refusal(serving, f"{CONTINUED} goes with a stream of one answer to one prompt.")
        if "prompt_token_ids" not in inputs[0]:
            return _refusal(serving, f"{CONTINUED} goes with a prompt of tokens.")
        inputs[0]["prompt_token_ids"] = [*inputs[0]["prompt_token_ids"], *ids]
        _take_off_defaults(serving, request, len(ids))
        return rendered

    return rendering


def _take_off_defaults(serving: Any, request: Any, had: int) -> None:
    """Bound the rest of an answer by what generation_config leaves of it; the router takes `had` off the client's own bound."""
    name = (
        "max_tokens" if getattr(request, "max_completion_tokens", None) is None else "max_completion_tokens"
    )
    asked = getattr(request, name)
    limits = [serving.override_max_tokens]
    if asked is None:
        limits.append(serving.default_sampling_params.get("max_tokens"))
    left = [limit - had for limit in limits if limit is not None]
    if left:
        setattr(request, name, max(1, min(left if asked is None else [*left, asked])))


def _refusal(serving: Any, message: str) -> Any:
    return serving.create_error_response(message, status_code=HTTPStatus.BAD_REQUEST, param="vllm_xargs")


def _teach_detokenizer() -> None:
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer  # noqa: PLC0415  only a process that serves loads vLLM

    if getattr(IncrementalDetokenizer, "serving_continues", False):
        return
    from_new_request = IncrementalDetokenizer.from_new_request

    def continuing(tokenizer: Any, request: Any) -> Any:
        ids = continued_ids(request.sampling_params.extra_args)
        if not ids or tokenizer is None:
            return from_new_request(tokenizer, request)
        before = copy.copy(request)
        before.prompt_token_ids = request.prompt_token_ids[: -len(ids)]
        detokenizer = from_new_request(tokenizer, before)
        for _ in replayed(detokenizer, ids):
            pass
        return detokenizer

    IncrementalDetokenizer.from_new_request = staticmethod(continuing)
    IncrementalDetokenizer.serving_continues = True


def replayed(detokenizer: Any, ids: Sequence[int]) -> Iterator[str]:
    """The text that each token added in the other engine. Afterwards the detokenizer counts from zero."""
    least = detokenizer.min_tokens
    detokenizer.min_tokens = len(ids)  # no stop string ended the answer then
    for token in ids:
        detokenizer.update([token], stop_terminated=False)
        yield detokenizer.get_next_output_text(finished=False, delta=True)
    detokenizer.min_tokens = least
    if hasattr(detokenizer, "prompt_len"):
        detokenizer.prompt_len += len(ids)
    else:
        detokenizer.token_ids.clear()


def continuing_parser(parser_cls: Any) -> Any:
    """A parser that reads the other engine's tokens before the first new one."""

    class ContinuingParser(parser_cls):  # type: ignore[misc]
        _has_read = False

        def parse_delta(
            self,
            delta_text: str,
            delta_token_ids: list[int],
            request: Any,
            prompt_token_ids: list[int] | None = None,
            *,
            finished: bool,
        ) -> Any:
            ids = continued_ids(getattr(request, "vllm_xargs", None))
            if ids and prompt_token_ids is not None:
                prompt_token_ids = prompt_token_ids[: -len(ids)]
            if ids and not self._has_read:
                self._has_read = True
                detokenizer = _detokenizer(self.model_tokenizer, request, prompt_token_ids or [])
                for token, text in zip(ids, replayed(detokenizer, ids), strict=True):
                    super().parse_delta(text, [token], request, prompt_token_ids, finished=False)
            return super().parse_delta(
                delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
            )

    return ContinuingParser


def _detokenizer(tokenizer: Any, request: Any, prompt_token_ids: list[int]) -> Any:
    from vllm.sampling_params import SamplingParams  # noqa: PLC0415
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer  # noqa: PLC0415

    params = SamplingParams(
        stop=request.stop,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens,
    )
    stub = SimpleNamespace(
        request_id="", prompt_token_ids=prompt_token_ids, prompt_embeds=None, sampling_params=params
    )
    return IncrementalDetokenizer.from_new_request(tokenizer, stub)
