import ast
import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

from serving.engine.vllm import _flags
from serving.planning import engine_options, option_values


@pytest.mark.engine
def test_the_options_are_those_of_the_installed_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert names == engine_options.SETTABLE | engine_options.DERIVED.keys()


@pytest.mark.engine
def test_the_values_of_options_are_those_of_the_installed_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    choices = {
        action.dest: {value for value in action.choices if value != "None"}
        for action in parser._actions
        if action.choices and action.dest != "collect_detailed_traces"
    }
    assert choices == {name: set(values) for name, values in engine_options.CHOICES.items()}


@pytest.mark.engine
def test_the_parsers_are_those_of_the_installed_vllm() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert {
        "tool_call_parser": tuple(sorted(ToolParserManager.list_registered())),
        "reasoning_parser": tuple(sorted(ReasoningParserManager.list_registered())),
    } == engine_options.PARSERS


def kind(annotation: object) -> str | None:
    """The kind of value that a field of vLLM's arguments takes; None for one that takes several."""
    named = getattr(annotation, "__name__", "") if isinstance(annotation, type) else str(annotation)
    plain = named.replace("typing.", "").removesuffix(" | None")
    scalars = {"bool": "switch", "int": "whole", "float": "number", "str": "text"}
    if plain in scalars:
        return scalars[plain]
    if plain.startswith(("list[", "set[", "str | list[")):
        return None if "Literal" in plain else "list"
    if plain.endswith("Config") or plain == "dict" or plain.startswith("dict["):
        return "mapping"
    return None


@pytest.mark.engine
def test_the_kinds_of_values_are_those_of_the_installed_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    found: dict[str, set[str]] = {}
    for field in dataclasses.fields(AsyncEngineArgs):
        if field.name in engine_options.SETTABLE - engine_options.CHOICES.keys():
            found.setdefault(kind(field.type) or "several", set()).add(field.name)
    checked = engine_options.PARSERS.keys() | option_values.REGISTERED.keys()
    assert found["switch"] == option_values.SWITCHES
    assert found["whole"] == option_values.WHOLE_NUMBERS
    assert found["number"] == option_values.NUMBERS
    assert found["text"] - checked == option_values.TEXTS - checked
    assert found["list"] == option_values.LISTS
    assert found["mapping"] == option_values.MAPPINGS


@pytest.mark.engine
def test_every_option_is_a_flag_of_vllm_s_server() -> None:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    flags = {action.dest for action in parser._actions}
    assert flags >= engine_options.SETTABLE | engine_options.OF_SERVER
    switches = {name: False for name in option_values.SWITCHES if name in flags}
    parsed = vars(parser.parse_args(_flags(switches)))
    assert {name: parsed[name] for name in switches} == switches


@pytest.mark.engine
def test_the_keys_of_mappings_are_those_of_the_installed_vllm() -> None:
    import vllm.config
    from vllm.config.ec_transfer import ECTransferConfig
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.config.parallel import EPLBConfig
    from vllm.config.reasoning import ReasoningConfig
    from vllm.config.weight_transfer import WeightTransferConfig

    configs = {
        "attention_config": vllm.config.AttentionConfig,
        "compilation_config": vllm.config.CompilationConfig,
        "ec_transfer_config": ECTransferConfig,
        "eplb_config": EPLBConfig,
        "ir_op_priority": IrOpPriorityConfig,
        "kernel_config": vllm.config.KernelConfig,
        "kv_events_config": vllm.config.KVEventsConfig,
        "kv_transfer_config": vllm.config.KVTransferConfig,
        "pooler_config": vllm.config.PoolerConfig,
        "profiler_config": vllm.config.ProfilerConfig,
        "reasoning_config": ReasoningConfig,
        "speculative_config": vllm.config.SpeculativeConfig,
        "structured_outputs_config": vllm.config.StructuredOutputsConfig,
        "weight_transfer_config": WeightTransferConfig,
    }
    assert {
        name: {field.name for field in dataclasses.fields(config) if field.init}
        for name, config in configs.items()
    } == {name: set(keys) for name, keys in option_values.KEYS.items()}


@pytest.mark.engine
def test_the_names_of_loaders_tokenizers_and_config_formats_are_the_installed_ones() -> None:
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
    from vllm.tokenizers.registry import _VLLM_TOKENIZERS
    from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER

    engine = importlib.util.find_spec("tpu_inference")
    assert engine is not None
    assert engine.origin is not None
    models = Path(engine.origin).parent / "models"
    modules = ("jax/utils/weight_utils.py", "vllm/vllm_model_loader.py")
    text = "".join((models / module).read_text() for module in modules)
    tpus = set(re.findall(r'@register_model_loader\("(\w+)"\)', text))
    assert set(option_values.REGISTERED["load_format"]) == _LOAD_FORMAT_TO_MODEL_LOADER.keys() | tpus
    assert set(option_values.REGISTERED["tokenizer_mode"]) == {*_VLLM_TOKENIZERS, "auto", "slow"}
    assert set(option_values.REGISTERED["config_format"]) == {*_CONFIG_FORMAT_TO_CONFIG_PARSER, "auto"}


@pytest.mark.unit
def test_connectors_and_attention_are_those_of_the_tpu_platform() -> None:
    engine = importlib.util.find_spec("tpu_inference")
    assert engine is not None
    assert engine.origin is not None
    text = (Path(engine.origin).parent / "platforms/tpu_platform.py").read_text()
    allowed = text.partition("allowed = (")[2].partition(")")[0]
    assert tuple(re.findall(r'"(\w+)"', allowed)) == option_values.CONNECTORS
    assert set(re.findall(r"AttentionBackendEnum\.(FLASH\w+)", text)) == set(
        option_values.REGISTERED["attention_backend"]
    )


@pytest.mark.unit
def test_bounds_are_those_of_vllm_s_configs() -> None:
    elsewhere = {
        "gpu_memory_utilization",  # engine_sizes
        "kv_cache_metrics_sample",  # above 0, as is the next; option_values
        "mm_encoder_fp8_scale_save_margin",
        "max_long_partial_prefills",  # 1 alone
        "max_model_len",  # engine_sizes, as are the next two
        "max_num_batched_tokens",
        "max_num_partial_prefills",  # 1 alone
        "max_num_seqs",
    }
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    fields = [
        (node.target.id, call)
        for path in (Path(spec.origin).parent / "config").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Field"
    ]
    found = {}
    for name, call in fields:
        limits = {
            keyword.arg: ast.literal_eval(keyword.value)
            for keyword in call.keywords
            if keyword.arg in ("ge", "gt", "le", "lt")
        }
        if limits and name in engine_options.SETTABLE - elsewhere:
            found[name] = (limits["ge"] if "ge" in limits else limits["gt"] + 1, limits.get("lt"))
    assert found == option_values.BOUNDS
