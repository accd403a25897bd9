"""What of vLLM's app clients reach through the router, held to that app with every task and every switch on."""

from types import SimpleNamespace
from typing import get_args

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


def test_every_route_of_vllm_is_forwarded_or_kept_from_clients_on_purpose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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

    app = build_app(args, tasks, every)

    posted = {path for path, methods in app.openapi()["paths"].items() if "post" in methods}
    posted |= {route.path for route in app.routes if "POST" in getattr(route, "methods", ())}
    assert posted == ROUTES.keys() | STEERING | {HEALTH, STORED}
