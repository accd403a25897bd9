"""What an engine may fetch: nothing, but from domains that the YAML names."""

from typing import Any

import pytest

from serving.config import ModelSpec
from serving.engine.server import EngineSite
from serving.engine.vllm import VllmServer
from serving.planning import plan
from serving.slices.held_slice import HeldSlice, SliceHost

pytestmark = pytest.mark.unit


def server(**engine: Any) -> VllmServer:
    spec = {
        "name": "llama",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "slice": {"generation": "v6e", "topology": "1x1"},
        "engine": {"max_model_len": 2048, **engine},
    }
    host = SliceHost(worker_id=0, node_id="", ip="127.0.0.1", bundle=0)
    site = EngineSite(HeldSlice("slice-0", (host,)), group=None, gcs_address="", replica="")
    return VllmServer(plan(ModelSpec.model_validate(spec)), site)


@pytest.mark.parametrize("engine", [{}, {"allowed_media_domains": None}, {"allowed_media_domains": []}])
def test_an_engine_whose_yaml_names_no_domain_fetches_from_none(engine: dict[str, Any]) -> None:
    """Without the option vLLM fetches from anywhere."""
    assert server(**engine)._options()["allowed_media_domains"] == ["none.invalid"]


def test_a_domain_that_is_allowed_can_not_send_the_engine_on_to_another() -> None:
    one = server(allowed_media_domains=["example.com"])
    assert one._options()["allowed_media_domains"] == ["example.com"]
    assert one._environment()["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"


def test_an_engine_unpacks_no_picture_that_a_router_would_refuse() -> None:
    """A router does not see what an engine fetches, nor the sizes in every format."""
    assert server()._environment()["VLLM_MAX_IMAGE_PIXELS"] == str(64 << 20)
