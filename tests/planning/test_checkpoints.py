import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from serving import hub
from serving.errors import PlanError
from serving.planning.checkpoints import config_of
from serving.planning.known_models import CONFIGS

pytestmark = pytest.mark.http

HUB = {
    "/someone/public/resolve/main/config.json": (200, '{"hidden_size": 8}'),
    "/nvidia/old/resolve/main/config.json": (200, '{"hidden_size": 8}'),
    "/nvidia/old/resolve/main/hf_quant_config.json": (200, '{"producer": {"name": "modelopt"}}'),
    "/someone/gated/resolve/main/config.json": (401, ""),
    "/someone/typo/resolve/main/config.json": (401, ""),
    "/someone/mirrored/resolve/main/config.json": (401, ""),
    "/someone/weights/resolve/main/config.json": (404, ""),
    "/someone/strange/resolve/main/config.json": (200, "[]"),
    "/someone/broken/resolve/main/config.json": (200, "{"),
}
CODES = {"gated": "GatedRepo", "typo": "RepoNotFound", "weights": "EntryNotFound"}


class _Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = HUB.get(self.path, (404, ""))
        if self.headers["Authorization"] == "Bearer good" and status == 401:
            status, body = 200, '{"hidden_size": 9}'
        self.send_response(status)
        if code := CODES.get(self.path.split("/")[2]):
            self.send_header("X-Error-Code", code)
        if self.headers["Authorization"] == "Bearer bad":
            self.send_header("X-Error-Message", "Invalid credentials in Authorization header")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Stays silent."""


@pytest.fixture
def own_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A Hugging Face of our own, and an empty cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    yield
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.usefixtures("own_hub")
def test_an_unknown_id_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of("someone/public", hub.config_of) == {"hidden_size": 8}
    monkeypatch.setenv("HF_TOKEN", "good")
    assert config_of("someone/gated", hub.config_of) == {"hidden_size": 9}


@pytest.mark.usefixtures("own_hub")
def test_modelopt_s_file_beside_a_config_says_how_weights_are_quantised(tmp_path: Path) -> None:
    quantized = {"hidden_size": 8, "quantization_config": {"producer": {"name": "modelopt"}}}
    assert config_of("nvidia/old", hub.config_of) == quantized
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}}')
    assert config_of(str(tmp_path)) == quantized


@pytest.mark.usefixtures("own_hub")
@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("someone/gated", "it is gated at Hugging Face; accept its terms there, and set HF_TOKEN"),
        ("someone/typo", "has none of this name that may be read; see how it is spelt"),
        ("someone/weights", "its repository at Hugging Face has none"),
        ("someone/mirrored", "see how it is spelt, or set HF_TOKEN"),
        ("someone/nothing", "answers 404"),
        ("someone/strange", "its config.json is no config"),
        ("someone/broken", "can't be asked"),
    ],
)
def test_what_the_hub_can_not_give_is_asked_as_a_path(model: str, says: str) -> None:
    with pytest.raises(PlanError, match="give the path of a local checkpoint instead") as refusal:
        config_of(model, hub.config_of)
    assert says in refusal.value.message


@pytest.mark.usefixtures("own_hub")
def test_a_wrong_token_is_told_from_a_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "bad")
    with pytest.raises(PlanError, match="does not know this HF_TOKEN; set a valid one"):
        config_of("someone/mirrored", hub.config_of)


@pytest.mark.usefixtures("own_hub")
def test_a_model_of_another_size_is_refused_with_the_known_ones_of_such_a_name() -> None:
    with pytest.raises(
        PlanError, match=r"one of the known models of such a name: openai/gpt-oss-120b, openai/gpt-oss-20b$"
    ):
        config_of("openai/gpt-oss-121b", hub.config_of)


def test_offline_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PlanError, match="HF_HUB_OFFLINE=1"):
        config_of("someone/public", hub.config_of)


@pytest.mark.usefixtures("own_hub")
def test_the_newest_cached_snapshot_comes_before_the_network(tmp_path: Path) -> None:
    for age, name in enumerate(["new", "old"]):
        folder = tmp_path / "hub" / "models--someone--public" / "snapshots" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"snapshot": name}))
        os.utime(folder / "config.json", (1000 - age, 1000 - age))
    assert config_of("someone/public", hub.config_of) == {"snapshot": "new"}


def test_an_adapter_names_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.1-8B"}')
    with pytest.raises(
        PlanError, match=r"is a LoRA adapter; serve meta-llama/Llama-3\.1-8B with engine\.enable_lora"
    ):
        config_of(str(tmp_path))


def test_known_models_come_from_the_library() -> None:
    assert config_of("openai/gpt-oss-120b") is CONFIGS["openai/gpt-oss-120b"]
