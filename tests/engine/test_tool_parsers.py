"""The form of a model's tool calls and thoughts: the YAML names parsers, the engine is started with them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.config import ModelSpec
from serving.engine.server import EngineSite
from serving.engine.vllm import Overrides, VllmServer
from serving.planning import plan
from serving.simulation.cpu_tpu import options
from serving.slices.held_slice import HeldSlice, SliceHost

pytestmark = pytest.mark.unit


def started_with(overrides: Overrides | None = None, **engine: Any) -> dict[str, Any]:
    host = SliceHost(worker_id=0, node_id="", ip="127.0.0.1", bundle=0)
    site = EngineSite(HeldSlice("slice-0", (host,)), group=None, gcs_address="", replica="")
    return VllmServer(plan(spec(**engine)), site, overrides)._options()


def spec(**engine: Any) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": "qwen",
            "model": "Qwen/Qwen3-4B",
            "slice": {"generation": "v6e", "topology": "1x1"},
            "engine": {"max_model_len": 2048, **engine},
        }
    )


def test_a_tool_parser_lets_the_model_choose_its_tools() -> None:
    found = started_with(tool_call_parser="hermes", reasoning_parser="qwen3")
    assert found["tool_call_parser"] == "hermes"
    assert found["reasoning_parser"] == "qwen3"
    assert found["enable_auto_tool_choice"] is True
    assert "enable_auto_tool_choice" not in started_with()


def test_a_stand_in_writes_in_no_family_s_form(tmp_path: Path) -> None:
    (tmp_path / "stand-in" / "llama-1-32q-8kv-2l").mkdir(parents=True)  # written already
    named = {"tool_call_parser": "qwen3_coder", "reasoning_parser": "qwen3"}
    found = started_with(options.overrides(plan(spec(**named)), tmp_path), **named)
    assert (found["tool_call_parser"], found["reasoning_parser"]) == ("hermes", None)
    assert options.overrides(plan(spec()), tmp_path).options["tool_call_parser"] is None


# By family: vLLM's recipes, and the cards of Qwen3, Qwen3.5 and Gemma 4. DeepSeek-R1's own chat template shows it no tools.
PARSERS = {
    "deepseek-ai/DeepSeek-R1": (None, "deepseek_r1"),
    "google/gemma-4-": ("gemma4", "gemma4"),
    "meta-llama/Llama-3.": ("llama3_json", None),
    "openai/gpt-oss-": ("openai", "openai_gptoss"),
    "Qwen/Qwen2.5-": ("hermes", None),
    "Qwen/Qwen3-Coder-": ("qwen3_coder", None),
    "Qwen/Qwen3-": ("hermes", "qwen3"),
    "Qwen/Qwen3.5-": ("qwen3_coder", "qwen3"),
}


@pytest.mark.parametrize("path", sorted(Path("deployments").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_deployment_names_its_family_s_parsers(path: Path) -> None:
    for application in yaml.safe_load(path.read_text())["applications"]:
        for model in application["args"]["models"]:
            family = next(name for name in PARSERS if model["model"].startswith(name))
            engine = model["engine"]
            assert (engine.get("tool_call_parser"), engine.get("reasoning_parser")) == PARSERS[family]


def test_one_library_compiles_all_grammars_of_an_engine_whichever_comes_first() -> None:
    """vLLM's `auto` is made up by a client's first request."""
    assert started_with()["structured_outputs_config"] == {"backend": "xgrammar"}
    mine = {"backend": "guidance", "disable_any_whitespace": True}
    assert started_with(structured_outputs_config=mine)["structured_outputs_config"] == mine
    bounded = started_with(structured_outputs_config={"disable_any_whitespace": True})
    assert bounded["structured_outputs_config"] == {"backend": "xgrammar", "disable_any_whitespace": True}


def test_grammars_that_mistral_s_parser_writes_are_not_for_xgrammar() -> None:
    assert started_with(tool_call_parser="mistral")["structured_outputs_config"] == {"backend": "auto"}
