"""What of vLLM's app clients reach through the router, held to that app with every task and every switch on."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

import pydantic
import pytest

from serving.router.http.routes import ROUTES

pytestmark = pytest.mark.engine

# What steers an engine, or shows one's inside.
STEERING = {
    "/adapters",
    "/abort_requests",
    "/collective_rpc",
    "/finish_weight_update",
    "/init_weight_transfer_engine",
    "/is_scaling_elastic_ep",
    "/pause",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/sleep",
    "/start_draft_weight_update",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wake_up",
}
HEALTH = "/ping"  # as SageMaker asks; the router has /health
STORED = (
    "/v1/responses/{response_id}/cancel"  # a response kept by one engine, where vLLM is told to keep them
)


# Fields of which each item, or each count, is a sequence more for the engine.
SEQUENCES = {
    "best_of",
    "data_1",
    "data_2",
    "documents",
    "generate_responses",
    "images",
    "input",
    "inputs",
    "items",
    "messages",
    "n",
    "prompt",
    "prompt_embeds",
    "queries",
    "text_1",
    "text_2",
    "texts",
}
# Lists that are all of one sequence, or none.
ONE_SEQUENCE = {
    "allowed_token_ids",
    "assistant_tokens_mask",
    "bad_words",
    "embedding_types",
    "include",
    "logprob_token_ids",
    "previous_input_messages",
    "prompt_tokens",
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "system",
    "timestamp_granularities",
    "token_ids",
    "token_offsets",
    "tokens",
    "tools",
    "vllm_xargs",
}
BATCHES = ("/v1/chat/completions/batch", "/v1/embeddings")  # vLLM takes several conversations here, else one
SCORES = ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")


def is_one_sequence(path: str, name: str) -> bool:
    """Whether a field that makes sequences elsewhere makes none on this route."""
    match name:
        case "messages":
            return path not in BATCHES
        case "documents":  # for a chat's template
            return path not in SCORES
        case "input":
            return path == "/v1/responses"
        case "n" | "best_of":  # nothing is written
            return path.endswith("/render")
    return False


def every_route(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's app with every task and every switch on."""
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.tasks import SupportedTask
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    flags = ["--tokens-only", "--profiler-config", '{"profiler": "torch", "torch_profiler_dir": "/tmp"}']
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    tasks = tuple(task for kind in get_args(SupportedTask) for task in (get_args(kind) or (kind,)))
    every = SimpleNamespace(get_pooling_task=lambda _: "embed")  # all that is asked of a model's config
    return build_app(args, tasks, every)


def test_every_route_of_vllm_is_forwarded_or_kept_from_clients_on_purpose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = every_route(monkeypatch)
    posted = {path for path, methods in app.openapi()["paths"].items() if "post" in methods}
    posted |= {route.path for route in app.routes if "POST" in getattr(route, "methods", ())}
    assert posted == ROUTES.keys() | STEERING | {HEALTH, STORED}


def test_whatever_makes_sequences_on_a_route_of_vllm_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list in a newer vLLM's requests has to be looked at before it is served."""
    lists = set(list_fields(routes_below(every_route(monkeypatch).routes)))
    assert {name for _, name in lists} == SEQUENCES | ONE_SEQUENCE
    for path, name in lists:
        if name in SEQUENCES and not is_one_sequence(path, name):
            value = 7 if name in ("n", "best_of") else [["a"]] * 7
            assert ROUTES[path].work({name: value}, 100).sequences >= 7, (path, name)


def routes_below(routes: list[Any]) -> Iterator[Any]:
    for route in routes:
        yield route
        yield from routes_below(getattr(route, "routes", []))


def list_fields(routes: Iterator[Any]) -> Iterator[tuple[str, str]]:
    """Path and name of every field that holds a list or a count of answers."""
    for route in routes:
        if getattr(route, "path", "") in ROUTES and hasattr(route, "dependant"):
            for parameter in route.dependant.body_params:
                for model in models(parameter.field_info.annotation):
                    for name, field in model.model_fields.items():
                        if "list" in str(field.annotation) or name in ("n", "best_of"):
                            yield route.path, name


def models(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models(inner)
