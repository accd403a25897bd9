"""Our names and defaults of architectures against those of the installed vLLM, tpu-inference and transformers."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from serving.planning.architectures import (
    ARCHITECTURES,
    DRAFTS,
    EMBEDDINGS_AS_HEADS,
    ENCODERS,
    FULL_SIZE_IN_JAX,
    JAX_MODELS,
    LEARNED_POSITIONS,
    NOT_COUNTED,
    NOT_ON_TPU,
    NOT_STAGED,
    NOT_STREAMED,
    OWN_NAMES,
    OWN_ROUTING,
    TAKEN_FOR_ANOTHER,
    WITHOUT_GATES,
    drafts_in_jax,
)

pytestmark = pytest.mark.unit


def folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def source(package: str, module: str) -> str:
    """A module's text; importing it takes half a minute."""
    return (folder(package) / module).read_text()


def registered(table: str | None = None) -> dict[str, str]:
    """vLLM's architectures, of one table or of all, with the module that implements each."""
    tables = ast.parse(source("vllm", "model_executor/models/registry.py"))
    asked = [
        node
        for node in tables.body
        if isinstance(node, ast.Assign) and table in (None, ast.unparse(node.targets[0]))
    ]
    pairs = [
        (key, value)
        for assignment in asked
        for node in ast.walk(assignment)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
    ]
    return {
        key.value: str(value.elts[0].value)
        for key, value in pairs
        if isinstance(key, ast.Constant)
        and isinstance(value, ast.Tuple)
        and isinstance(value.elts[0], ast.Constant)
    }


def models_in_jax() -> dict[str, str]:
    """The module of each of JAX_MODELS, as text."""
    loader = source("tpu_inference", "models/common/model_loader.py")
    classes = dict(re.findall(r'_MODEL_REGISTRY\[\s*"(\w+)"\s*\] = (\w+)', loader))
    texts = {}
    for name in JAX_MODELS:
        (module,) = re.findall(rf"from tpu_inference\.(\S+) import[ \\\n]+{classes[name]}\b", loader)
        texts[name] = source("tpu_inference", module.replace(".", "/") + ".py")
    return texts


def test_vllm_implements_every_architecture_that_is_counted() -> None:
    known = registered()
    assert {
        name: known.get(name) for name in ARCHITECTURES if known.get(name) in (None, "transformers")
    } == {}


def test_vllm_knows_every_architecture_that_no_tpu_serves() -> None:
    assert NOT_ON_TPU.keys() <= registered().keys()
    assert not NOT_ON_TPU.keys() & ARCHITECTURES.keys()


def test_every_decoder_of_vllm_is_counted_or_refused_with_a_reason() -> None:
    decoders = registered("_TEXT_GENERATION_MODELS")
    told = [*ARCHITECTURES, *NOT_ON_TPU, *NOT_COUNTED]
    assert len(decoders) > 100
    assert decoders.keys() <= set(told)
    assert len(told) == len(set(told))
    assert NOT_COUNTED.keys() <= decoders.keys()
    page = (Path(__file__).parents[2] / "docs/benchmarks/plans.md").read_text()
    assert [name for name in NOT_COUNTED if name not in page] == []


def test_models_in_jax_are_those_of_tpu_inference() -> None:
    loader = source("tpu_inference", "models/common/model_loader.py")
    in_jax = set(re.findall(r'_MODEL_REGISTRY\[\s*"(\w+)"\s*\]', loader))
    preferred = loader.partition("_VLLM_PREFERRED_ARCHITECTURES")[2].partition("})")[0]
    by_vllm = set(re.findall(r'"(\w+)"', preferred))
    assert {*JAX_MODELS, *TAKEN_FOR_ANOTHER} == (in_jax - by_vllm) & ARCHITECTURES.keys()
    assert '"Llama4ForConditionalGeneration"] = LlamaGuard4ForCausalLM' in loader
    assert DRAFTS.keys() - {"LlamaForCausalLMEagle3"} <= in_jax
    staged = loader.partition("_PP_DISABLED_MODELS")[2].partition("})")[0]
    assert set(NOT_STAGED) == set(re.findall(r'"(\w+)"', staged)) & set(JAX_MODELS)


def test_models_that_can_t_be_streamed_are_those_without_a_weight_loader() -> None:
    without = {name for name, text in models_in_jax().items() if "WeightLoader = " not in text}
    assert without == set(NOT_STREAMED)


def test_models_whose_layers_have_no_other_format_are_those_that_read_none() -> None:
    without = {name for name, text in models_in_jax().items() if "quant_config" not in text}
    assert without == set(FULL_SIZE_IN_JAX)


def test_the_attention_that_soft_caps_would_need_is_not_there() -> None:
    attention = source("tpu_inference", "layers/vllm/backends/flash_attn.py")
    assert attention.count("logits_soft_cap") == 3  # taken and kept, never handed to a kernel


def test_the_indexer_of_sparse_attention_has_no_tpu() -> None:
    indexer = source("vllm", "model_executor/layers/sparse_attn_indexer.py")
    assert "only implemented for" in indexer
    assert "is_tpu" not in indexer


CONFIG_CLASSES = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Cohere2ForCausalLM": "cohere2",
    "SeedOssForCausalLM": "seed_oss",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
}
NOT_IN_CLASSES = {"sliding_window_pattern", "full_attention_interval", "attn_output_gate"}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CONFIG_CLASSES)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    from transformers import CONFIG_MAPPING

    defaults = CONFIG_MAPPING[CONFIG_CLASSES[architecture]]().to_dict()
    ours = {key: value for key, value in ARCHITECTURES[architecture].items() if key not in NOT_IN_CLASSES}
    assert {key: defaults[key] for key in ours} == ours


def test_models_in_jax_have_no_adapters_and_experts_none_on_tpus() -> None:
    loader = source("tpu_inference", "models/common/model_loader.py")
    in_jax = loader.partition("def get_flax_model(")[2].partition("def get_vllm_model(")[0]
    assert "lora_manager, model = None, None" in in_jax
    assert "not routed_experts.quant_method.is_monolithic" in source("vllm", "lora/layers/fused_moe.py")
    assert "def is_monolithic(self) -> bool:\n        return True" in source(
        "tpu_inference", "layers/vllm/quantization/unquantized.py"
    )


def test_drafts_in_jax_are_those_of_tpu_inference_by_vllm_s_names() -> None:
    loader = source("tpu_inference", "models/common/model_loader.py")
    in_jax = set(re.findall(r'_MODEL_REGISTRY\[\s*"(\w+)"\s*\]', loader))
    for method, architecture, name in (
        ("eagle3", "LlamaForCausalLM", "Eagle3LlamaForCausalLM"),
        ("eagle3", "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle3"),
        ("eagle", "LlamaForCausalLM", "EagleLlamaForCausalLM"),
        ("dflash", "DFlashDraftModel", "DFlashDraftModel"),
    ):
        assert drafts_in_jax(method, architecture) == (name in in_jax)


def test_experts_that_vllm_s_models_choose_by_a_function_of_their_own_are_known() -> None:
    modules = registered()
    own = {
        name
        for name in {*ARCHITECTURES, *NOT_ON_TPU}
        if modules[name] != "transformers"
        and not modules[name].startswith("vllm.models.")
        and "custom_routing_function=" in source("vllm", f"model_executor/models/{modules[name]}.py")
    }
    # The multimodal wrappers have their decoders from gemma4.py and llama4.py.
    assert own == {
        *OWN_ROUTING,
        *(name for name, why in NOT_ON_TPU.items() if "chooses and weighs" in why),
    } - {"Gemma4ForConditionalGeneration", "Llama4ForConditionalGeneration"}
    for module in ("layers/vllm/interface/moe.py", "layers/common/moe.py", "layers/common/fused_moe_gmm.py"):
        text = source("tpu_inference", module)
        assert "custom_routing_function" not in text
        assert "topk_group" not in text


def test_names_of_a_family_s_own_are_read_by_its_model_in_vllm() -> None:
    by_a_class_of_the_checkpoint = {
        "ExaoneForCausalLM",
        "GPT2LMHeadModel",
        "GPTJForCausalLM",
        "Plamo3ForCausalLM",  # vLLM reads what this class makes of window_size
    }
    # RWConfig gives Falcon the names of today, Step 3's gives what its model does not read, Sarvam's MoE is Bailing's, Afmoe's class makes layer_types of its interval.
    elsewhere = {
        "AfmoeForCausalLM": source("transformers", "models/afmoe/configuration_afmoe.py"),
        "RWForCausalLM": source("vllm", "transformers_utils/configs/falcon.py"),
        "Step3TextForCausalLM": source("vllm", "transformers_utils/configs/step3_vl.py"),
        "SarvamMoEForCausalLM": source("vllm", "model_executor/models/bailing_moe.py"),
    }
    for architecture, names in OWN_NAMES.items():
        if architecture in by_a_class_of_the_checkpoint:
            continue
        text = source("vllm", f"model_executor/models/{registered()[architecture]}.py") + elsewhere.get(
            architecture, ""
        )
        spellings = ("config.{}", "self.{}", '"{}"')
        assert all(any(spelling.format(own) in text for spelling in spellings) for own in names.values()), (
            architecture
        )


@pytest.mark.parametrize(
    ("architecture", "of_gpus"),
    [
        ("ArcticForCausalLM", "= fused_experts("),
        ("LongcatFlashForCausalLM", "zero_expert_type=config.zero_expert_type"),
        ("MiMoV2FlashForCausalLM", "attn_backend=attn_backend"),
        ("PanguProMoEV2ForCausalLM", "attn_backend=FlashAttentionDiffKVBackend"),
    ],
)
def test_what_runs_by_kernels_of_gpus_takes_them_itself(architecture: str, of_gpus: str) -> None:
    assert of_gpus in source("vllm", f"model_executor/models/{registered()[architecture]}.py")
    assert architecture in NOT_ON_TPU


@pytest.mark.parametrize(
    ("architecture", "takes", "module", "lacks"),
    [
        ("HrmTextForCausalLM", "PrefillPrefixLMAttention(", "layers/vllm/backends/flash_attn.py", "causal"),
        (
            "IQuestLoopCoderForCausalLM",
            "global_attn(q, None, None)",
            "layers/vllm/backends/flash_attn.py",
            "key is None",
        ),
        ("Step3p5ForCausalLM", 'activation = "swiglustep"', "kernels/megablox/gmm_v2.py", "swiglustep"),
    ],
)
def test_what_a_model_asks_of_the_engine_is_not_there(
    architecture: str, takes: str, module: str, lacks: str
) -> None:
    assert takes in source("vllm", f"model_executor/models/{registered()[architecture]}.py")
    assert lacks not in source("tpu_inference", module)
    assert architecture in NOT_ON_TPU


@pytest.mark.parametrize("family", ["inkling", "minimax_m3"])
def test_what_vllm_has_for_gpus_alone_has_no_model_of_tpu_inference(family: str) -> None:
    folders = {path.name for path in (folder("vllm") / "models" / family).iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} <= {"amd", "common", "nvidia"}
    models = folder("tpu_inference") / "models"
    assert not [path for path in models.rglob("*.py") if family in path.read_text().lower()]
    assert [
        name
        for name, module in registered().items()
        if module == f"vllm.models.{family}" and name in NOT_ON_TPU
    ]


def test_models_whose_mlp_has_no_gate_are_those_of_vllm() -> None:
    modules = registered()
    layers_of = {"roberta": "bert"}
    texts = {
        name: source("vllm", f"model_executor/models/{layers_of.get(modules[name], modules[name])}.py")
        for name in ARCHITECTURES
        if not name.endswith("ForConditionalGeneration")
    }
    plain = {
        name
        for name, text in texts.items()
        if re.search(r"self\.(up_proj|fc1|fc_in|c_fc|dense_h_to_4h|dense) = ColumnParallelLinear", text)
        and not re.search(r"gate_up_proj = MergedColumn|self\.gate_proj", text)
    }
    assert plain == set(WITHOUT_GATES)


def test_heads_that_are_the_embedding_itself_are_those_of_vllm() -> None:
    modules = registered()
    texts = {name: source("vllm", f"model_executor/models/{modules[name]}.py") for name in ARCHITECTURES}
    as_heads = {name for name, text in texts.items() if "self.lm_head = self.model.embed_tokens" in text}
    of_their_own = {
        name
        for name, text in texts.items()
        if "tie_weights(" in text or "self.lm_head.weight = self.model.embed_tokens.weight" in text
    }
    assert as_heads <= set(EMBEDDINGS_AS_HEADS)
    assert not of_their_own & set(EMBEDDINGS_AS_HEADS)
    loading = source("tpu_inference", "layers/vllm/quantization/unquantized.py")
    assert "layer.weight = Parameter(torch_view(weight), requires_grad=False)" in loading


def test_positions_that_are_a_table_are_those_of_vllm() -> None:
    modules = registered()
    tables = r"(position_embeddings|wpe|embed_positions) = (VocabParallelEmbedding|nn\.Embedding|OPTLearnedPositionalEmbedding)"
    learned = {
        name
        for name in ARCHITECTURES
        if not name.endswith("ForConditionalGeneration")
        and re.search(tables, source("vllm", f"model_executor/models/{modules[name]}.py"))
    }
    assert learned == set(LEARNED_POSITIONS)
    assert "self.offset = 2" in source("vllm", "model_executor/models/opt.py")


def test_encoders_are_models_that_vllm_embeds_texts_with_and_tpu_inference_has_attention_for() -> None:
    modules = registered()
    for name in ENCODERS:
        text = source(
            "vllm", f"model_executor/models/{ {'roberta': 'bert'}.get(modules[name], modules[name]) }.py"
        )
        assert "EncoderOnlyAttention" in text, name
    assert "AttentionType.ENCODER_ONLY" in source("tpu_inference", "layers/vllm/backends/flash_attn.py")
