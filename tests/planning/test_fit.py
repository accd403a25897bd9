import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import ModelSpec, ServiceConfig, load
from serving.errors import ConfigError, PlanError, ServingError
from serving.planning import Plan, plan
from serving.planning.alternatives import slices_that_fit
from serving.planning.compiled import result_of
from serving.planning.engine_sizes import engine_sizes
from serving.planning.fit import RESIDENT_BYTES
from serving.planning.known_models import CONFIGS, EMBED
from serving.planning.service import plan_service
from serving.planning.shapes import shape_of
from serving.planning.summary import sequences_at_once

pytestmark = pytest.mark.unit

GIB = 2**30
DEPLOYMENTS = Path(__file__).parents[2] / "deployments"
SHORT = {"max_model_len": 4096}
# An fp8 checkpoint of whatever model it is.
FP8 = {"hf_overrides": {"quantization_config": {"quant_method": "fp8"}}, "kv_cache_dtype": "fp8"}


def spec(model: str, slice_: str, engine: dict[str, Any] | None = None, **more: Any) -> ModelSpec:
    generation, topology, *hosts = slice_.split()
    shape = {"generation": generation, "topology": topology, **({"hosts": int(hosts[0])} if hosts else {})}
    return ModelSpec.model_validate({"model": model, "slice": shape, "engine": engine or {}, **more})


# Boot logs of tpu-inference that were published: tokens of cache and, where it is said, GiB. The first held 2.8 GiB more beside
# its cache than the others, and does not say of what.
@pytest.mark.parametrize(
    ("slice_", "utilization", "tokens", "off"),
    [
        ("v6e 1x1", 0.9, 16.3 * GIB / 18432, 0.18),  # 28.12 GiB budget, 16.3 GiB of cache at 18 KiB a token
        ("v6e 1x1", 0.92, 1_151_744, 0.02),
        ("v5e 1x1", 0.92, 321_376, 0.03),
    ],
)
def test_cache_tokens_are_near_what_was_measured(
    slice_: str, utilization: float, tokens: float, off: float
) -> None:
    engine = {**SHORT, "gpu_memory_utilization": utilization}
    predicted = plan(spec("google/gemma-4-E2B-it", slice_, engine)).fit.cache_tokens
    print(
        f"{slice_} at {utilization}: {predicted:,} predicted, {tokens:,.0f} measured, {predicted / tokens - 1:+.1%}"
    )
    assert predicted == pytest.approx(tokens, rel=off)


# Gemma 4 on v6e chips by third parties' boot logs of 2026, GiB in use on all devices and tokens of cache at vLLM's 0.92.
@pytest.mark.parametrize(
    ("model", "slice_", "engine", "used_gib", "tokens"),
    [
        ("google/gemma-4-31B-it", "v6e 2x2", {"max_model_len": 32768}, 58.4, 67_392),
        ("google/gemma-4-31B-it", "v6e 2x4 1", {"max_model_len": 32768}, None, 187_136),
        ("google/gemma-4-12B-it", "v6e 1x1", {"max_num_seqs": 16}, 24.56, None),
        (
            "google/gemma-4-12B-it",
            "v6e 1x1",
            {"max_num_seqs": 16, "hf_overrides": {"architectures": ["Gemma4ForCausalLM"]}},
            22.18,
            None,
        ),
    ],
)
def test_gemma_4_is_near_what_boot_logs_say(
    model: str, slice_: str, engine: dict[str, Any], used_gib: float | None, tokens: int | None
) -> None:
    found = plan(spec(model, slice_, SHORT | engine))
    if used_gib:
        assert found.fit.weight_bytes * found.slice.devices / GIB == pytest.approx(used_gib, rel=0.02)
    if tokens:
        assert found.fit.cache_tokens == pytest.approx(tokens, rel=0.01)


def test_a_device_of_v7x_holds_of_qwen3_vl_what_its_boot_log_says() -> None:
    """tpu-inference issue 2803: 16.58 GiB in use on the one device, 465,664 tokens of cache at 0.85."""
    asked = {"max_model_len": 4096, "gpu_memory_utilization": 0.85}
    one_device_each = {"tensor": 1, "data": 2}
    fit = plan(spec("Qwen/Qwen3-VL-8B-Instruct", "v7x 1x1x1", asked, parallel=one_device_each)).fit
    assert (fit.weight_bytes + RESIDENT_BYTES) / GIB == pytest.approx(16.58, rel=0.01)
    assert fit.cache_tokens / 2 == pytest.approx(465_664, rel=0.01)


# vLLM's models with heads of two sizes. Boot log of a third party's v6e-4; concurrency of 16,384 tokens in tpu-inference PR 3408,
# whose model is named by the figures alone.
@pytest.mark.parametrize(
    ("model", "slice_", "engine", "tokens"),
    [
        ("google/gemma-4-12B-it", "v6e 2x2", {"max_model_len": 65536}, 242_944),
        ("google/gemma-4-26B-A4B-it", "v7x 2x2x1", {"gpu_memory_utilization": 0.98}, 153 * 16384),
        ("google/gemma-4-26B-A4B-it", "v7x 2x2x1", {"gpu_memory_utilization": 0.9}, 140 * 16384),
    ],
)
def test_caches_of_vllm_s_gemma_4_hold_what_was_published(
    model: str, slice_: str, engine: dict[str, Any], tokens: int
) -> None:
    asked = {"max_model_len": 16384, "max_num_batched_tokens": 4096, "model_impl": "vllm"} | engine
    assert plan(spec(model, slice_, asked)).fit.cache_tokens == pytest.approx(tokens, rel=0.02)


@pytest.mark.parametrize(("length", "boots"), [(8192, True), (16384, False), (32768, False), (65536, False)])
def test_gemma_4_12b_starts_on_a_v6e_chip_with_the_lengths_that_were_published(
    length: int, *, boots: bool
) -> None:
    engine = {"max_model_len": length, "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.9}
    with contextlib.nullcontext() if boots else pytest.raises(PlanError, match="up to 1"):
        plan(spec("google/gemma-4-12B-it", "v6e 1x1", engine))


def test_sequences_at_once_are_those_whose_pages_the_cache_holds() -> None:
    paged = plan(
        spec(
            "meta-llama/Llama-3.1-8B-Instruct", "v6e 1x1", {**SHORT, "block_size": 256, "max_num_seqs": 1024}
        )
    )
    pages = paged.fit.cache_tokens // 256
    assert sequences_at_once(paged, 250, 20, 1000) == sequences_at_once(paged, 500, 20, 1000) == pages // 2
    assert sequences_at_once(paged, 512, 20, 1000) == pages // 3


def test_weights_of_a_large_model_are_within_two_percent_of_what_was_measured() -> None:
    """Qwen3.5-397B-FP8 on v7x-8 logged 374.57 GiB in use and 307.6 GiB left over eight devices."""
    engine = {"max_model_len": 2048, "max_num_seqs": 8, "gpu_memory_utilization": 0.9}
    fit = plan(spec("Qwen/Qwen3.5-397B-A17B-FP8", "v7x 2x2x1", engine)).fit
    assert fit.weight_bytes * 8 / GIB == pytest.approx(374.57, rel=0.02)
    assert (fit.cache_bytes + fit.state_bytes) * 8 / GIB == pytest.approx(307.6, rel=0.03)


@pytest.mark.parametrize("slice_", ["v6e 2x2", "v6e 2x4 1", "v6e 2x4 2"])
def test_gemma_4_26b_fits_four_chips_of_v6e(slice_: str) -> None:
    """tpu-recipes trillium/Gemma4: verified, at least four chips."""
    notes = plan(spec("google/gemma-4-26B-A4B-it", slice_, {"max_model_len": 16384})).fit.notes
    assert all("experts are padded" in note for note in notes)


def test_cache_tokens_of_llama_8b_on_four_v6e_chips_are_those_of_its_boot_log() -> None:
    tokens = plan(spec("meta-llama/Llama-3.1-8B-Instruct", "v6e 2x2")).fit.cache_tokens
    assert tokens == pytest.approx(811_008, rel=0.01)


GPT_OSS = {"max_num_seqs": 2048, "max_num_batched_tokens": 16384, "kv_cache_dtype": "fp8"}
COPIES = {"parallel": {"tensor": 2, "data": 4}}


def test_a_start_that_ran_out_of_memory_with_an_older_engine_is_warned_of() -> None:
    """tpu-recipes issue 151: jit__multi_slice, "reserve 6.14G", for four copies of 2048 sequences; 64% of starts failed at 0.93."""
    risky = plan(
        spec("openai/gpt-oss-120b", "v7x 2x2x1", {**GPT_OSS, "gpu_memory_utilization": 0.93}, **COPIES)
    )
    (note,) = risks(risky)
    assert "start-up may run out of HBM with tpu-inference before 0.13" in note
    assert "they take 6.14 GiB" in note
    recipe = {**GPT_OSS, "gpu_memory_utilization": 0.86}
    assert plan(spec("openai/gpt-oss-120b", "v7x 2x2x1", recipe, **COPIES)).fit.notes == ()


def risks(found: Plan) -> list[str]:
    return [note for note in found.fit.notes if "run out of HBM" in note]


@pytest.mark.parametrize("path", sorted(DEPLOYMENTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_file_of_deployments_is_said_to_run_out_of_memory(path: Path) -> None:
    """Most are published recipes: Llama 3.3 70B runs on v6e 2x4 at 0.98."""
    pools = [
        spec
        for service in load(path).services.values()
        for model in service.models
        for spec in model.per_pool()
    ]
    assert [risks(plan(pool)) for pool in pools] == [[]] * len(pools)


# tpu-inference's daily runs at release 0.26.0 (.buildkite/benchmark/cases/daily), at the highest utilisations.
@pytest.mark.parametrize(
    ("model", "slice_", "sequences", "tokens", "length", "utilization", "more"),
    [
        ("Qwen/Qwen3-4B", "v7x 1x1x1", 512, 4096, 10240, 0.98, {}),
        ("Qwen/Qwen3-32B", "v7x 1x1x1", 256, 4096, 10240, 0.98, {}),
        ("meta-llama/Llama-3.3-70B-Instruct", "v7x 1x1x1", 1024, 4096, 10240, 0.92, {}),
        (
            "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",
            "v7x 2x2x1",
            64,
            8192,
            10240,
            0.95,
            {"kv_cache_dtype": "fp8"},
        ),
        ("openai/gpt-oss-120b", "v7x 1x1x1", 1024, 8192, 9216, 0.95, {"kv_cache_dtype": "fp8"}),
        ("Qwen/Qwen3-4B", "v6e 1x1", 128, 8192, 5120, 0.9, {"kv_cache_dtype": "fp8"}),
    ],
)
def test_a_run_of_the_engine_s_own_benchmarks_is_not_said_to_run_out_of_memory(
    model: str,
    slice_: str,
    sequences: int,
    tokens: int,
    length: int,
    utilization: float,
    more: dict[str, Any],
) -> None:
    engine = {
        "max_num_seqs": sequences,
        "max_num_batched_tokens": tokens,
        "max_model_len": length,
        "model_impl": "vllm",
    }
    assert risks(plan(spec(model, slice_, {**engine, "gpu_memory_utilization": utilization, **more}))) == []


@pytest.mark.parametrize(("utilization", "boots"), [(0.92, True), (0.95, False)])
def test_gemma_4_e2b_starts_on_a_v5e_chip_at_what_was_published(utilization: float, *, boots: bool) -> None:
    """A third party's boots of 2026-08: at 0.95 its last program, that of grammars, lacked 37 MiB."""
    engine = {"max_model_len": 16384, "max_num_batched_tokens": 4096, "gpu_memory_utilization": utilization}
    assert (risks(plan(spec("google/gemma-4-E2B-it", "v5e 1x1", engine))) == []) is boots


@pytest.mark.parametrize("model", ["google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it"])
def test_programs_of_gemma_4_by_vllm_are_warned_of(model: str) -> None:
    """tpu-inference PR 3408: out of HBM at 0.95, none at 0.90, none at 0.98 by tpu-inference's own implementation."""
    by_vllm = {"max_model_len": 4096, "model_impl": "vllm"}
    risky = plan(spec(model, "v7x 2x2x1", {**by_vllm, "gpu_memory_utilization": 0.95}))
    assert risky.environment["MODEL_IMPL_TYPE"] == "vllm"
    assert any("programs may take 6.00 GiB" in reason for reason in risky.reasons)
    safe = plan(spec(model, "v7x 2x2x1", {**by_vllm, "gpu_memory_utilization": 0.9}))
    own = plan(spec(model, "v7x 2x2x1", {"max_model_len": 4096, "gpu_memory_utilization": 0.98}))
    assert not any("run out" in note for note in (*safe.fit.notes, *own.fit.notes))


def test_programs_of_vllm_s_models_are_as_large_as_tpu_inference_s_own() -> None:
    """By the compiler, of two models of 64 layers and 33 billion parameters on v6e-4; both recipes are published at 0.98."""
    by_vllm, own = (
        plan(next(iter(load(DEPLOYMENTS / f"{name}-v6e-4.yaml").services.values())).models[0])
        for name in ("qwen2.5-32b", "qwen3-32b")
    )
    assert [found.sizes.by_vllm for found in (by_vllm, own)] == [True, False]
    assert risks(by_vllm) == risks(own) == []
    kept = [result_of(found.version) for found in (by_vllm, own)]
    code = [result.program_bytes for result in kept if result and result.program_bytes]
    assert code[0] == pytest.approx(code[1], rel=0.05)


# tpu-inference PR 2512: how large a batch of prefill needs how low a utilisation.
@pytest.mark.parametrize(
    ("tokens", "utilization"), [(8192, 0.9), (16384, 0.85), (32768, 0.75), (65536, 0.55)]
)
def test_a_published_batch_of_experts_fits_what_its_utilisation_leaves(
    tokens: int, utilization: float
) -> None:
    assert plan(spec("Qwen/Qwen3.5-397B-A17B-FP8", "v7x 2x2x1", prefill(tokens, utilization))).fit.notes == ()


def test_a_batch_whose_experts_do_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(PlanError, match=r"a step of 65536 tokens takes about 23\.\d GiB") as refusal:
        plan(spec("Qwen/Qwen3.5-397B-A17B-FP8", "v7x 2x2x1", prefill(65536, 0.9)))
    assert "GiB of it for experts" in refusal.value.message
    assert "engine.max_num_batched_tokens up to 32768 fits here" in refusal.value.message


def prefill(tokens: int, utilization: float) -> dict[str, Any]:
    return {
        "max_num_batched_tokens": tokens,
        "gpu_memory_utilization": utilization,
        "max_num_seqs": 8,
        "max_model_len": 10240,
        "enable_expert_parallel": True,
        "kv_cache_dtype": "fp8",
    }


# tpu-inference's tests mark these "not enough HBM" on v6e-8 (support_matrices/nightly/v6e/default). They mark Gemma 4 26B so
# too, which they never run there (.buildkite/models/google_gemma-4-26B-A4B-it.yml) and tpu-recipes verified on four chips.
@pytest.mark.parametrize(
    "model",
    [
        "openai/gpt-oss-120b",
        "deepseek-ai/DeepSeek-R1",
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",
        "Qwen/Qwen3.5-397B-A17B",
        "Qwen/Qwen3.5-397B-A17B-FP8",
        "moonshotai/Kimi-K2.6",
    ],
)
@pytest.mark.parametrize("hosts", [1, 2])
def test_what_the_engines_own_tests_can_not_hold_is_refused(model: str, hosts: int) -> None:
    with pytest.raises(PlanError, match="does not fit v6e 2x4") as refusal:
        plan(spec(model, f"v6e 2x4 {hosts}", {**SHORT, "enable_expert_parallel": True}))
    assert "as it is it fits" in refusal.value.message


# Each published recipe on half its slice, or the next smaller one that is sold; as the facts' arithmetic judges them.
@pytest.mark.parametrize(
    ("model", "slice_", "engine", "fits"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "v6e 2x2", {"max_model_len": 2048}, False),
        ("meta-llama/Llama-3.3-70B-Instruct", "v6e 2x2", {"max_model_len": 2048, **FP8}, True),
        ("Qwen/Qwen3-32B", "v6e 1x1", SHORT, False),
        ("Qwen/Qwen2.5-32B", "v6e 1x1", SHORT, False),
        ("google/gemma-4-31B-it", "v6e 2x2", {"max_model_len": 16384}, True),  # "min 4 chips"
        ("google/gemma-4-31B-it", "v6e 1x1", SHORT, False),
        ("openai/gpt-oss-120b", "v7x 1x1x1", {"max_model_len": 10240, "kv_cache_dtype": "fp8"}, True),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "v7x 1x1x1", SHORT, False),
        ("Qwen/Qwen3.5-397B-A17B-FP8", "v7x 1x1x1", SHORT, False),
        ("deepseek-ai/DeepSeek-R1", "v7x 1x1x1", SHORT, False),
        ("Qwen/Qwen3-30B-A3B", "v7x 2x2x1", SHORT, True),
    ],
)
def test_a_recipe_on_half_its_slice(model: str, slice_: str, engine: dict[str, Any], fits: bool) -> None:
    if fits:
        assert plan(spec(model, slice_, engine)).fit.sequences >= 1
    else:
        with pytest.raises(PlanError, match="does not fit"):
            plan(spec(model, slice_, engine))


@pytest.mark.parametrize(
    ("model", "engine", "smallest"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", {}, {"v6e": "1x1", "v5e": "2x2"}),
        ("Qwen/Qwen3-8B", FP8, {"v6e": "1x1"}),
        ("google/gemma-3-27b-it", {}, {"v6e": "2x2"}),
        ("Qwen/Qwen3-32B", {}, {"v6e": "2x2", "v7x": "1x1x1"}),
        ("Qwen/Qwen3-32B", FP8, {"v6e": "2x2", "v7x": "1x1x1"}),
        ("meta-llama/Llama-3.3-70B-Instruct", {}, {"v6e": "2x4"}),
        ("meta-llama/Llama-3.3-70B-Instruct", FP8, {"v6e": "2x2", "v7x": "1x1x1"}),
        ("openai/gpt-oss-120b", {}, {"v5p": "2x2x1", "v7x": "1x1x1"}),
        ("openai/gpt-oss-120b", {"enable_expert_parallel": True}, {"v6e": "4x4", "v7x": "1x1x1"}),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", {}, {"v6e": "2x4"}),
        ("Qwen/Qwen3-235B-A22B", {}, {"v7x": "2x2x1"}),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", {}, {"v6e": "4x8", "v7x": "2x2x2"}),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", FP8, {"v6e": "4x4", "v7x": "2x2x1"}),
        ("meta-llama/Llama-3.1-405B-Instruct", {}, {"v6e": "4x8", "v7x": "2x2x2"}),
        ("meta-llama/Llama-3.1-405B-Instruct", FP8, {"v6e": "4x4", "v7x": "2x2x1"}),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", {}, {"v7x": "2x2x2"}),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", FP8, {"v7x": "2x2x1"}),
    ],
)
def test_the_smallest_slice_of_a_model_is_the_one_known(
    model: str, engine: dict[str, Any], smallest: dict[str, str]
) -> None:
    shape = shape_of(model, engine.get("hf_overrides"))
    sizes = engine_sizes({"max_model_len": 8192, "gpu_memory_utilization": 0.95, **engine}, shape)
    found: dict[str, str] = {}
    for candidate in sorted(slices_that_fit(shape, sizes), key=lambda one: one.slice.chips):
        found.setdefault(candidate.slice.generation, candidate.slice.topology)
    assert {generation: found[generation] for generation in smallest} == smallest


def test_a_refusal_says_by_how_much_and_what_would_fit() -> None:
    with pytest.raises(PlanError) as refusal:
        plan(spec("meta-llama/Llama-3.1-8B-Instruct", "v6e 1x1"))
    message = refusal.value.message
    assert "one sequence of 131072 tokens takes 16.0 GiB of a device's cache, 2.34 GiB more than" in message
    assert "engine.max_model_len up to 111872 fits here" in message
    assert "it fits here with engine.kv_cache_dtype: fp8" in message
    assert "v5e 2x2 (1 host x 4 chips) at $4.80/h" in message
    shorter = spec("meta-llama/Llama-3.1-8B-Instruct", "v6e 1x1", {"max_model_len": 111872})
    assert plan(shorter).fit.sequences == 1


@pytest.mark.parametrize(
    ("engine", "says", "fits"),
    [
        (
            {"num_gpu_blocks_override": 64, "block_size": 16},
            "num_gpu_blocks_override leaves 0.12 GiB, 64 blocks of 16",
            "max_model_len up to 1024",
        ),
        (
            {"max_model_len": 2048, "max_num_seqs": 1 << 20},
            "GiB to run them",
            "engine.max_num_seqs up to 8192",
        ),
    ],
)
def test_a_refusal_s_advice_fits(engine: dict[str, Any], says: str, fits: str) -> None:
    model = ("meta-llama/Llama-3.1-8B-Instruct", "v6e 1x1")
    with pytest.raises(PlanError) as refusal:
        plan(spec(*model, engine))
    message = refusal.value.message
    assert says in message
    assert f"{fits} fits here" in message
    assert message.count("max_model_len up to") == ("max_model_len" in fits)
    option, _, number = fits.removeprefix("engine.").partition(" up to ")
    assert plan(spec(*model, engine | {option: int(number)})).fit.sequences >= 1


def test_a_refusal_s_slices_cost_what_the_service_says() -> None:
    service = {
        "prices": {"v6e": {"on-demand": 5}},
        "models": [
            {
                "name": "m",
                "model": "meta-llama/Llama-3.1-8B-Instruct",
                "slice": {"generation": "v6e", "topology": "1x1"},
            }
        ],
    }
    with pytest.raises(PlanError, match=r"v6e 2x2 \(1 host x 4 chips\) at \$20\.00/h"):
        plan_service(ServiceConfig.model_validate(service))


def test_the_length_may_be_left_to_the_plan() -> None:
    found = plan(spec("meta-llama/Llama-3.1-8B-Instruct", "v6e 1x1", {"max_model_len": -1}))
    assert found.engine["max_model_len"] == found.fit.longest == 111872


def test_latent_attention_gets_what_the_engine_refuses_to_run_without() -> None:
    found = plan(spec("deepseek-ai/DeepSeek-R1", "v7x 2x2x2", {**SHORT, "kv_cache_dtype": "fp8"}))
    strategy = found.engine["additional_config"]["sharding"]["sharding_strategy"]
    assert strategy == {"enable_dp_attention": True}
    assert found.environment == {"NEW_MODEL_DESIGN": "1"}
    assert found.layout.attention_data == found.tensor == 16
    assert (
        "attention_data=16: a token's one latent vector fills 1 of the 16 tensor devices" in found.reasons[0]
    )


def test_groups_that_share_attention_by_requests_hold_what_heads_cut_whole() -> None:
    """vLLM's layers are cut over the axes of heads alone (layers/vllm/quantization/configs.py), experts over all."""
    engine = {**SHORT, "kv_cache_dtype": "fp8", "enable_expert_parallel": True, "max_num_seqs": 64}
    cut = plan(spec("Qwen/Qwen3.5-397B-A17B-FP8", "v7x 2x2x1", engine)).fit
    shared = plan(
        spec("Qwen/Qwen3.5-397B-A17B-FP8", "v7x 2x2x1", engine, parallel={"attention_data": "auto"})
    ).fit
    copies = {group.name: group.copies for group in shared.groups}
    assert copies["attention"] == copies["shared experts"] == copies["linear attention"] == 8
    assert copies["experts"] == copies["embedding"] == 1
    assert shared.weight_bytes > cut.weight_bytes
    assert shared.cache_tokens > 3 * cut.cache_tokens  # no KV head is held by more than one device


# GiB of weights on a device as tpu-inference 0.26 lays them out: `serving compile` builds its runner without a TPU.
BUILT_GIB = {
    "qwen3-4b-v6e-1": 7.492,
    "qwen3-32b-v6e-4": 16.344,  # the head whole on every device
    "qwen3-32b-v7x-2": 16.711,
    "qwen3-30b-v7x-16": 7.372,  # experts of 48 columns a device, padded to 128
    "qwen3-coder-480b-v7x-8": 56.282,
    "qwen3.5-397b-v7x-8": 52.951,
    "gpt-oss-120b-v7x-2": 32.980,  # both sides of experts padded to blocks of 512
    "deepseek-r1-v7x-8": 53.453,
}


@pytest.mark.parametrize("name", BUILT_GIB)
def test_weights_of_a_device_are_within_one_percent_of_what_the_engine_lays_out(name: str) -> None:
    found = plan(deployed(name)).fit.weight_bytes / GIB
    assert found == pytest.approx(BUILT_GIB[name], rel=0.01)


def test_a_head_that_is_left_whole_lies_on_every_device() -> None:
    """tpu-inference's own Qwen makes its head without a partition; vLLM's cuts it."""
    own = plan(spec("Qwen/Qwen3-32B", "v6e 2x2", SHORT)).fit
    by_vllm = plan(spec("Qwen/Qwen3-32B", "v6e 2x2", {**SHORT, "model_impl": "vllm"})).fit
    head, rotary = 151936 * 5120 * 2, 40960 * 128 * 2
    assert own.weight_bytes - by_vllm.weight_bytes == head - head // 4 - rotary
    tied = plan(spec("Qwen/Qwen3-4B", "v6e 2x2", SHORT)).fit
    assert {group.copies for group in tied.groups if group.name == "embedding"} == {1}


def test_qwen2_with_a_head_of_its_own_runs_as_vllm_s() -> None:
    """tpu-inference 0.26's own Qwen2 ends at start: it looks for text_config in a config that has none."""
    whole = plan(spec("Qwen/Qwen2.5-32B", "v6e 2x2", SHORT))
    assert (whole.sizes.by_vllm, whole.environment) == (True, {"MODEL_IMPL_TYPE": "vllm"})
    tied = plan(spec("Qwen/Qwen2.5-1.5B-Instruct", "v6e 1x1", SHORT))
    assert (tied.sizes.by_vllm, tied.environment) == (False, {})


def test_experts_cut_over_many_devices_are_padded_on_each() -> None:
    cut = plan(spec("Qwen/Qwen3-30B-A3B", "v7x 2x2x2", SHORT)).fit
    whole = plan(spec("Qwen/Qwen3-30B-A3B", "v7x 2x2x2", {**SHORT, "enable_expert_parallel": True})).fit
    padding = {
        name: next(group.padding for group in fit.groups if group.name == "experts")
        for name, fit in (("cut", cut), ("whole", whole))
    }
    # 768 columns over 16 devices are 48, which take 128: 2048 columns in all.
    assert padding == {"cut": pytest.approx((2 * 2048 / 768 + 1) / 3), "whole": 1}


def test_experts_in_a_format_of_their_own_take_its_bytes() -> None:
    """The published recipe of DeepSeek R1 on one VM: without it its weights are more than the slice has."""
    found = plan(deployed("deepseek-r1-v7x-8"))
    experts = next(group for group in found.fit.groups if group.name == "experts")
    assert experts.format == "fp4-g512"
    assert experts.bytes == pytest.approx(experts.params * (0.5 + 4 / 512))
    with pytest.raises(PlanError, match=r"more than the 94\.8 GiB of a device"):
        plan(found.model.model_copy(update={"engine_env": {}}))


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"MOE_REQUANTIZE_WEIGHT_DTYPE": "fp3"}, "one of fp4, float4_e2m1fn, fp8, fp8_e4m3"),
        (
            {"MOE_REQUANTIZE_WEIGHT_DTYPE": "fp4", "MOE_REQUANTIZE_BLOCK_SIZE": "x"},
            "a whole number of at least 1",
        ),
    ],
)
def test_a_format_of_experts_that_is_none_is_refused(variables: dict[str, str], says: str) -> None:
    model = deployed("deepseek-r1-v7x-8").model_copy(update={"engine_env": variables})
    with pytest.raises(ConfigError, match=says):
        plan(model)


def deployed(name: str) -> ModelSpec:
    (service,) = load(DEPLOYMENTS / f"{name}.yaml").services.values()
    return service.models[0]


def test_copies_of_a_model_in_one_slice_hold_more_requests_of_fewer_tokens() -> None:
    engine = {"max_model_len": 8192, "kv_cache_dtype": "fp8", "enable_expert_parallel": True}
    whole = plan(spec("openai/gpt-oss-120b", "v7x 2x2x1", engine))
    copies = plan(spec("openai/gpt-oss-120b", "v7x 2x2x1", engine, parallel={"tensor": 2, "data": 4}))
    assert (copies.tensor, copies.data, copies.most_sequences) == (2, 4, 4 * whole.most_sequences)
    assert copies.fit.weight_bytes > 3 * whole.fit.weight_bytes
    assert copies.environment == {"TPU_MULTIPROCESS_DP": "0"}
    with pytest.raises(PlanError, match="data=2 needs a slice of one host"):
        plan(spec("Qwen/Qwen3-4B", "v6e 4x4", parallel={"tensor": 8, "data": 2}))


def test_adapters_of_experts_are_refused_and_those_of_attention_are_not() -> None:
    lora = {**SHORT, "enable_lora": True}
    with pytest.raises(ConfigError, match=r"set engine\.lora_target_modules to the projections of attention"):
        plan(spec("Qwen/Qwen3-30B-A3B", "v6e 2x4 1", lora))
    with pytest.raises(ConfigError, match="no LoRA for experts"):
        plan(spec("Qwen/Qwen3-30B-A3B", "v6e 2x4 1", lora | {"lora_target_modules": ["q_proj", "experts"]}))
    plan(spec("Qwen/Qwen3-30B-A3B", "v6e 2x4 1", lora | {"lora_target_modules": ["q_proj", "o_proj"]}))


def test_adapters_are_counted_and_refused_where_the_engine_has_none() -> None:
    lora = {**SHORT, "enable_lora": True, "max_lora_rank": 64, "max_loras": 8}
    found = plan(spec("meta-llama/Llama-3.1-8B-Instruct", "v6e 1x1", lora))
    adapters = [group for group in found.fit.groups if group.name.startswith("LoRA")]
    assert (
        sum(group.params for group in adapters) == 8 * 167_772_160
    )  # rank 64 over all projections, as PEFT counts it
    with pytest.raises(PlanError, match="no LoRA with data parallelism"):
        plan(spec("Qwen/Qwen3-8B", "v7x 2x2x1", lora, parallel={"tensor": 2, "data": 4}))


def test_every_device_holds_the_inner_halves_of_adapters_whole() -> None:
    lora = {**SHORT, "enable_lora": True, "max_lora_rank": 64, "max_loras": 8}
    base = {**SHORT, "model_impl": "vllm"}
    added = [
        plan(spec("meta-llama/Llama-3.1-8B-Instruct", "v6e 2x2", engine)).fit.weight_bytes
        for engine in (lora, base)
    ]
    assert added[0] - added[1] > 0.6 * 8 * 167_772_160 * 2


def test_a_model_with_adapters_runs_as_vllm_s() -> None:
    found = plan(spec("meta-llama/Llama-3.1-8B-Instruct", "v6e 1x1", {**SHORT, "enable_lora": True}))
    assert (found.sizes.by_vllm, found.environment["MODEL_IMPL_TYPE"]) == (True, "vllm")


def test_the_engine_is_told_how_many_sequences_the_plan_counts_with() -> None:
    found = plan(spec("Qwen/Qwen3-4B", "v6e 1x1", {"max_model_len": 4096}))
    assert found.options["max_num_seqs"] == found.most_sequences == 256
    assert found.options["max_num_batched_tokens"] == found.sizes.batched_tokens == 2048


@pytest.mark.parametrize(
    ("options", "sequences", "tokens"),
    [
        ({"max_num_batched_tokens": 128}, 128, 128),
        ({"max_num_seqs": 4096}, 4096, 4096),  # vLLM's own default of 2048 tokens would end the start
        ({"performance_mode": "throughput"}, 512, 4096),
        ({"performance_mode": "throughput", "max_num_seqs": 64}, 64, 4096),
        ({"enable_chunked_prefill": False, "max_model_len": 8192}, 256, 8192),
        ({"max_num_seqs": 1, "max_model_len": 512}, 1, 512),
    ],
)
def test_sizes_of_a_batch_are_those_that_vllm_takes(
    options: dict[str, Any], sequences: int, tokens: int
) -> None:
    found = plan(spec("Qwen/Qwen3-4B", "v6e 1x1", {"max_model_len": 4096, **options}))
    assert (found.sizes.sequences, found.sizes.batched_tokens) == (sequences, tokens)


def test_a_step_smaller_than_a_prompt_that_is_read_at_once_is_refused() -> None:
    """vLLM ends such a start (SchedulerConfig.verify_max_model_len)."""
    at_once = {"enable_chunked_prefill": False, "max_model_len": 4096}
    with pytest.raises(
        ConfigError, match="2048 is below max_model_len, 4096, and prompts are not read in chunks"
    ):
        plan(spec("Qwen/Qwen3-4B", "v6e 1x1", {**at_once, "max_num_batched_tokens": 2048}))
    assert plan(spec("Qwen/Qwen3-4B", "v6e 1x1", at_once)).sizes.batched_tokens == 4096


@pytest.mark.parametrize(
    ("model", "engine", "says"),
    [
        ("BAAI/bge-m3", {"runner": "generate"}, "runner: the model embeds or scores texts and writes none"),
        ("google/gemma-3-1b-it", {"dtype": "half"}, "dtype: vLLM runs no Gemma3ForCausalLM in float16"),
        (
            "Qwen/Qwen3-4B",
            {"enable_lora": True, "max_loras": 8, "max_cpu_loras": 2},
            "max_cpu_loras: 2 is below max_loras, 8",
        ),
        (
            "Qwen/Qwen3-4B",
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 3,
                    "prompt_lookup_min": 5,
                    "prompt_lookup_max": 2,
                }
            },
            "prompt_lookup_min, 5, is more than prompt_lookup_max, 2",
        ),
    ],
)
def test_what_vllm_refuses_of_a_model_at_its_start_is_refused(
    model: str, engine: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(spec(model, "v6e 1x1", {"max_model_len": 2048, **engine}))


def test_a_cache_of_inputs_in_shared_memory_is_for_slices_of_one_host() -> None:
    shared = {"max_model_len": 2048, "mm_processor_cache_type": "shm"}
    with pytest.raises(
        ConfigError, match="mm_processor_cache_type: vLLM shares this cache with workers of one host alone"
    ):
        plan(spec("google/gemma-4-31B-it", "v6e 4x4", shared))
    assert plan(spec("google/gemma-4-31B-it", "v6e 2x2", shared))
    assert plan(spec("google/gemma-4-31B-it", "v6e 4x4", {**shared, "mm_processor_cache_type": "lru"}))
    assert plan(spec("Qwen/Qwen3-32B", "v6e 4x4", shared))  # no inputs beside texts: vLLM does not read it


def test_a_step_smaller_than_a_video_that_is_kept_whole_is_refused() -> None:
    """A guide to Gemma 4 on v6e met it at 2,048: accelerated-platforms, online-inference-tpu, patch-vllm-args.yaml."""
    engine = {"max_model_len": 16384, "disable_chunked_mm_input": True}
    refused = {**engine, "max_num_batched_tokens": 2048}
    with pytest.raises(ConfigError, match="2048 is below the 2496 of a video"):
        plan(spec("google/gemma-4-31B-it", "v6e 2x2", refused))
    for more in (
        {"max_num_batched_tokens": 4096},
        {},
        {"max_num_batched_tokens": 2048, "limit_mm_per_prompt": {"video": 0}},
    ):
        assert plan(spec("google/gemma-4-31B-it", "v6e 2x2", engine | more))


@pytest.mark.parametrize(
    ("model", "slice_", "length", "utilization"),
    [
        ("google/gemma-3-1b-it", "v5e 1x1", 1024, 0.9),
        ("google/gemma-3-4b-it", "v5e 2x2", 1024, 0.9),
        ("google/gemma-3-27b-it", "v5e 2x4 1", 1024, 0.9),
        ("Qwen/Qwen3-32B", "v5e 2x4 1", 32768, 0.95),
        ("google/gemma-3-27b-it", "v6e 2x4 1", 16384, 0.95),
        ("google/gemma-4-26B-A4B-it", "v6e 2x2", 16384, 0.95),
        ("google/gemma-4-31B-it", "v6e 2x2", 16384, 0.95),
        ("google/gemma-4-31B-it", "v6e 2x4 1", 131072, 0.95),
        ("Qwen/Qwen3-32B", "v6e 2x2", 32768, 0.95),
        ("Qwen/Qwen3-32B-FP8", "v6e 2x2", 32768, 0.95),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "v6e 1x1", 16384, 0.98),
    ],
)
def test_what_published_guides_deploy_fits(model: str, slice_: str, length: int, utilization: float) -> None:
    """GoogleCloudPlatform/accelerated-platforms (online-inference-tpu) and tpu-recipes, which no plan was made with."""
    engine = {"max_model_len": length, "gpu_memory_utilization": utilization}
    found = plan(spec(model, slice_, engine))
    assert found.fit.sequences >= 1
    assert not risks(found)


def test_blocks_have_the_size_that_the_yaml_gives() -> None:
    engine = {"max_model_len": 2048, "num_gpu_blocks_override": 64, "block_size": 32}
    assert plan(spec("Qwen/Qwen3-4B", "v6e 1x1", engine)).fit.cache_tokens == 64 * 32


def test_gemma_4_s_audio_tower_stays_in_the_checkpoint_unless_vllm_s_model_loads_it() -> None:
    gemma = spec("google/gemma-4-E2B-it", "v6e 1x1 1", {"max_model_len": 8192, "max_num_seqs": 64})
    loaded = 9_631_988_294  # as the engine lays it out, by `serving compile`
    assert plan(gemma).fit.weight_bytes == pytest.approx(loaded, rel=0.002)
    by_vllm = spec(
        "google/gemma-4-E2B-it",
        "v6e 1x1 1",
        {"max_model_len": 8192, "max_num_seqs": 64, "model_impl": "vllm"},
    )
    assert plan(by_vllm).fit.weight_bytes - plan(gemma).fit.weight_bytes > GIB // 2


def test_a_way_out_of_padded_experts_is_named() -> None:
    model, short = "Qwen/Qwen3-Next-80B-A3B-Instruct", {"max_model_len": 2048}
    padded = plan(spec(model, "v6e 4x4", short))
    assert any("engine.enable_expert_parallel: true saves 18.0 GiB" in reason for reason in padded.reasons)
    apart = plan(spec(model, "v6e 4x4", {**short, "enable_expert_parallel": True}))
    assert not any("padded" in reason for reason in apart.reasons)
    with pytest.raises(PlanError, match=r"it fits here with engine\.enable_expert_parallel: true"):
        plan(spec(model, "v6e 4x4", {"max_model_len": 65536}))


def test_towers_that_no_request_may_use_are_not_loaded_by_vllm_s_models() -> None:
    none = {**SHORT, "limit_mm_per_prompt": {"image": 0, "video": 0}}
    assert plan(spec("Qwen/Qwen3-VL-8B-Instruct", "v6e 1x1", SHORT)).sizes.towers
    assert not plan(spec("Qwen/Qwen3-VL-8B-Instruct", "v6e 1x1", none)).sizes.towers
    assert plan(
        spec("Qwen/Qwen2.5-VL-7B-Instruct", "v6e 1x1", none)
    ).sizes.towers  # tpu-inference's own has no such rule


def test_a_classifier_runs_as_vllm_s() -> None:
    found = plan(spec("Qwen/Qwen3-8B", "v6e 1x1", {**SHORT, "convert": "classify"}))
    assert found.environment == {"MODEL_IMPL_TYPE": "vllm"}
    assert not plan(spec("Qwen/Qwen3-8B", "v6e 1x1", {**SHORT, "convert": "embed"})).sizes.by_vllm


@pytest.mark.parametrize("name", ["ENABLE_QUANTIZED_MATMUL_KERNEL", "REQUANTIZE_BLOCK_SIZE"])
def test_variables_that_end_a_start_alone_are_refused(name: str) -> None:
    both = {"ENABLE_QUANTIZED_MATMUL_KERNEL": "1", "REQUANTIZE_BLOCK_SIZE": "512"}
    plan(spec("Qwen/Qwen3-235B-A22B-FP8", "v7x 2x2x1", SHORT, engine_env=both))
    with pytest.raises(ConfigError, match="go together for FP8 weights"):
        plan(spec("Qwen/Qwen3-235B-A22B-FP8", "v7x 2x2x1", SHORT, engine_env={name: both[name]}))


def test_gemma_4_s_experts_are_padded_on_every_device() -> None:
    # A start on v5e logs "w13_weight_w1 shape after padding: (128, 2816, 1024)" of experts 704 wide (tpu-inference issue 2453).
    gemma = "google/gemma-4-26B-A4B-it"
    with pytest.raises(PlanError, match="does not fit v5e 2x2"):
        plan(spec(gemma, "v5e 2x2", SHORT))
    apart = plan(spec(gemma, "v6e 2x2", {**SHORT, "enable_expert_parallel": True}))
    cut = plan(spec(gemma, "v6e 2x2", SHORT))
    padding = 30 * 128 * 2 * 2816 * (1024 - 768) * 2 / 4
    assert cut.fit.weight_bytes - apart.fit.weight_bytes == pytest.approx(padding, rel=0.001)
    assert not any("enable_expert_parallel has no effect" in reason for reason in apart.reasons)
    with pytest.raises(PlanError, match=r"experts of width 704 do not divide by 128 devices"):
        plan(
            spec(
                gemma,
                "v7x 4x4x4",
                {**SHORT, "hf_overrides": {"text_config": {"num_attention_heads": 128}}},
                parallel={"tensor": 128},
            )
        )


def test_experts_in_mxfp4_are_cut_by_whole_blocks() -> None:
    """Of width 2,880 they have 6 blocks, with a scale each: tpu-inference's loader ends where devices can't share them."""
    with pytest.raises(
        PlanError, match="2880, 6 blocks of 512 in MXFP4, do not divide by 4 devices; set engine"
    ):
        plan(spec("openai/gpt-oss-20b", "v6e 2x2", SHORT))
    assert plan(spec("openai/gpt-oss-20b", "v6e 2x2", {**SHORT, "enable_expert_parallel": True})).tensor == 4
    assert plan(spec("openai/gpt-oss-20b", "v7x 1x1x1", SHORT)).tensor == 2


def test_towers_are_counted_unless_they_are_not_loaded() -> None:
    with_towers = plan(spec("google/gemma-3-27b-it", "v6e 2x4 1", SHORT))
    without = plan(spec("google/gemma-3-27b-it", "v6e 2x4 1", {**SHORT, "language_model_only": True}))
    assert with_towers.fit.weight_bytes > without.fit.weight_bytes


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"max_model_len": 1_000_000}, "beyond the model's 131072 positions"),
        ({"max_model_len": "long"}, "engine.max_model_len: a whole number (got 'long')"),
        ({"max_num_seqs": 300, "max_num_batched_tokens": 256}, "engine.max_num_batched_tokens: 256 is below"),
        ({"max_num_seqs": 0}, "engine.max_num_seqs: a whole number"),
        ({"gpu_memory_utilization": 1.2}, "engine.gpu_memory_utilization: a number above 0 and at most 1"),
        ({"quantization": "awq"}, "'awq' needs a checkpoint in that format, this one is bfloat16"),
        ({"additional_config": "x"}, "engine.additional_config: a mapping"),
        ({"additional_config": {"sharding": 3}}, "engine.additional_config.sharding: a mapping (got 3)"),
        ({"additional_config": {"sharding": {"sharding_strategy": 3}}}, "engine.additional_config.sharding"),
        ({"speculative_config": "ngram"}, "engine.speculative_config: a mapping"),
        ({"hf_overrides": "x"}, "engine.hf_overrides: a mapping"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_by_name(engine: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match="engine") as refusal:
        plan(spec("meta-llama/Llama-3.1-8B-Instruct", "v6e 2x2", engine))
    assert says in str(refusal.value)


def test_ngrams_need_no_draft_model() -> None:
    engine = {**SHORT, "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    assert plan(spec("Qwen/Qwen3-4B", "v6e 1x1", engine)).sizes.draft is None


def qwix(weight: str, **more: Any) -> dict[str, Any]:
    rules = [{"module_path": ".*", "weight_qtype": weight}]
    return {**SHORT, "additional_config": {"quantization": {"qwix": {"rules": rules, **more}}}}


def test_weights_quantised_while_loading_must_fit_at_full_size_unless_they_never_are() -> None:
    model = "meta-llama/Llama-3.3-70B-Instruct"
    with pytest.raises(PlanError, match=r"at full size they take 32\.9 GiB of the 31\.2 GiB of a device"):
        plan(spec(model, "v6e 2x2", qwix("int8")))
    found = plan(spec(model, "v6e 2x2", qwix("int8", use_abstract_model=True)))
    assert found.fit.weight_bytes < 18 * GIB
    assert plan(spec(model, "v6e 2x4 1", qwix("int8"))).fit.weight_bytes < 9 * GIB


def test_a_format_the_engines_own_models_lack_runs_as_vllms() -> None:
    awq = {"hf_overrides": {"quantization_config": {"quant_method": "awq", "group_size": 128}}}
    assert plan(spec("Qwen/Qwen3-8B", "v6e 1x1", {**SHORT, **awq})).environment == {"MODEL_IMPL_TYPE": "vllm"}
    assert plan(spec("Qwen/Qwen3-32B-FP8", "v6e 2x2", SHORT)).environment == {}
    assert plan(spec("Qwen/Qwen3-8B", "v6e 1x1", qwix("int8"))).environment == {}


def test_encoders_are_cut_as_heads_are_unless_each_device_takes_pictures_of_its_own() -> None:
    def held(model: str, **additional: str) -> float:
        engine = SHORT | {"additional_config": additional}
        groups = plan(spec(model, "v6e 2x2", engine)).fit.groups
        return next(group.held_bytes / group.bytes for group in groups if group.name == "multimodal towers")

    assert (held("google/gemma-4-31B-it"), held("Qwen/Qwen3-VL-8B-Instruct")) == (1, 1)
    assert held("google/gemma-4-31B-it", **{"mm-encoder-tp-mode": "data"}) == 4


@pytest.mark.parametrize(
    ("model", "options"), [("Qwen/Qwen3-30B-A3B", {}), ("Qwen/Qwen3-32B", {"model_impl": "vllm"})]
)
def test_quantising_while_loading_is_said_to_do_nothing_where_it_does(
    model: str, options: dict[str, Any]
) -> None:
    """tpu-inference's own daily benchmark runs Qwen3-32B so on v7x."""
    rules = plan(spec(model, "v7x 2x2x1", {**qwix("int8"), **options}))
    assert any("qwix is of no effect on Qwen3" in reason for reason in rules.reasons)
    assert rules.fit.weight_bytes == plan(spec(model, "v7x 2x2x1", {**SHORT, **options})).fit.weight_bytes


def test_a_program_that_quantises_holds_weights_twice() -> None:
    """Gemma 4 E2B in int8 ended at start on a v5e chip, whose bf16 weights take 8.97 GiB there: 16.23 GiB of 15.75."""
    model = "google/gemma-4-E2B-it"
    with pytest.raises(
        PlanError, match=r"at full size and quantised, 16\.2 GiB of the 15\.8 GiB of a device"
    ):
        plan(spec(model, "v5e 1x1", qwix("int8")))
    plan(spec(model, "v5e 1x1", qwix("int8", use_abstract_model=True)))
    plan(spec(model, "v6e 1x1", qwix("int8")))


def test_little_room_for_programs_is_said() -> None:
    engine = {"max_model_len": 2048, "gpu_memory_utilization": 0.99, "max_num_batched_tokens": 8192}
    notes = plan(spec("meta-llama/Llama-3.1-8B-Instruct", "v6e 1x1", engine)).reasons
    assert any("start-up may run out of HBM" in note for note in notes)


def test_fp8_is_said_to_be_no_faster_where_it_is_not() -> None:
    assert any("not time" in note for note in plan(spec("Qwen/Qwen3-32B-FP8", "v6e 2x2", SHORT)).reasons)
    assert not any(
        "not time" in note for note in plan(spec("Qwen/Qwen3-32B-FP8", "v7x 1x1x1", SHORT)).reasons
    )


def test_a_draft_model_is_counted_with_its_cache() -> None:
    large = {**SHORT, "gpu_memory_utilization": 0.9}
    small = {"method": "eagle3", "model": "Qwen/Qwen3-4B", "num_speculative_tokens": 4}
    alone = plan(spec("Qwen/Qwen3-32B", "v6e 2x4 1", {**large, "model_impl": "vllm"})).fit
    helped = plan(spec("Qwen/Qwen3-32B", "v6e 2x4 1", {**large, "speculative_config": small})).fit
    assert helped.weight_bytes - alone.weight_bytes == pytest.approx(8.04e9 / 8 + 40960 * 128 * 2, rel=0.01)
    assert alone.cache_tokens * 256 / 1024 > helped.cache_tokens * (256 + 144) / 1024
    with pytest.raises(PlanError, match="speculative_config"):
        plan(
            spec(
                "Qwen/Qwen3-32B", "v6e 2x4 1", {**large, "speculative_config": small | {"model": "/nowhere"}}
            )
        )
    spelt = {"spec_method": "eagle3", "spec_model": "Qwen/Qwen3-4B", "spec_tokens": 4}
    assert plan(spec("Qwen/Qwen3-32B", "v6e 2x4 1", large | spelt)).fit == helped


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"spec_model": "Qwen/Qwen3-0.6B", "spec_tokens": 3}, "without a method"),
        ({"spec_method": "suffix"}, "drafts by ngram"),
        (
            {"spec_method": "ngram", "speculative_config": {"method": "ngram"}},
            "spec_method: speculative_config has method",
        ),
        ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens: a whole number"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, "at least 1"),
        ({"speculative_config": []}, "speculative_config: a mapping"),
        ({"speculative_config": {"method": "ngram", 3: 4}}, r"speculative_config.3: keys are text"),
        ({"additional_config": {"sharding": {True: 1}}}, r"additional_config.sharding.True: keys are text"),
        ({"num_gpu_blocks_override": 10**7}, "num_gpu_blocks_override: 10000000 blocks of 256 tokens are"),
    ],
)
def test_what_the_engine_refuses_at_start_is_refused_by_the_plan(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=says):
        plan(spec("Qwen/Qwen3-4B", "v6e 1x1", {**SHORT, **options}))


def test_the_blocks_that_the_yaml_gives_are_the_cache() -> None:
    few = plan(spec("Qwen/Qwen3-4B", "v6e 1x1", {"max_model_len": 2048, "num_gpu_blocks_override": 64})).fit
    assert (few.cache_tokens, few.sequences) == (64 * 128, 4)
    with pytest.raises(PlanError, match="one sequence of 2048 tokens"):
        plan(spec("Qwen/Qwen3-4B", "v6e 1x1", {"max_model_len": 2048, "num_gpu_blocks_override": 4}))


@pytest.mark.parametrize(("name", "layers"), [("LlamaForCausalLMEagle3", 1), ("DFlashDraftModel", 5)])
def test_draft_models_of_their_own_kind_are_counted(name: str, layers: int, tmp_path: Path) -> None:
    draft = CONFIGS["Qwen/Qwen3-4B"] | {"architectures": [name], "num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(draft))
    speculative = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 4}
    found = plan(spec("Qwen/Qwen3-32B", "v6e 2x4 1", {**SHORT, "speculative_config": speculative}))
    assert found.sizes.draft is not None
    assert found.sizes.draft.layers == layers


BY_VLLM = {"MODEL_IMPL_TYPE": "vllm", "DRAFT_MODEL_IMPL_TYPE": "vllm"}


@pytest.mark.parametrize(
    ("target", "draft", "environment"),
    [
        ("Qwen/Qwen3-8B", "LlamaForCausalLM", {}),  # vLLM names it Eagle3LlamaForCausalLM
        ("Qwen/Qwen3-8B", "LlamaForCausalLMEagle3", BY_VLLM),  # a name that tpu-inference does not know
        ("Qwen/Qwen3-30B-A3B", "LlamaForCausalLM", BY_VLLM),
    ],
)
def test_target_and_draft_are_of_one_implementation(
    target: str, draft: str, environment: dict[str, str], tmp_path: Path
) -> None:
    config = CONFIGS["Qwen/Qwen3-4B"] | {"architectures": [draft], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    speculative = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 4}
    found = plan(spec(target, "v6e 2x4 1", {**SHORT, "speculative_config": speculative}))
    assert found.environment == environment


def test_a_checkpoint_that_drafts_by_its_own_layers_runs_as_vllm_s() -> None:
    own = {**SHORT, "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    for model, slice_ in (("deepseek-ai/DeepSeek-R1", "v7x 2x2x2"), ("zai-org/GLM-4.5-Air", "v7x 2x2x1")):
        assert plan(spec(model, slice_, own)).environment.items() >= BY_VLLM.items()


@pytest.mark.parametrize(
    ("model", "speculative", "says"),
    [
        (
            "meta-llama/Llama-3.1-8B-Instruct",
            {"method": "mtp"},
            "needs a checkpoint with layers for multi-token",
        ),
        ("meta-llama/Llama-3.1-8B-Instruct", {"method": "qwen3_next_mtp"}, "use ngram, or eagle3"),
        (
            "meta-llama/Llama-3.1-8B-Instruct",
            {"method": "medusa"},
            "tpu-inference drafts by ngram, eagle, eagle3",
        ),
        ("meta-llama/Llama-3.1-8B-Instruct", {"method": "eagle3"}, "eagle3 needs a draft model"),
    ],
)
def test_a_way_to_draft_that_is_not_there_is_refused(
    model: str, speculative: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(spec(model, "v6e 2x2", {**SHORT, "speculative_config": speculative}))


def test_a_checkpoints_own_draft_layers_are_counted_where_they_draft() -> None:
    own = {**SHORT, "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    drafting = plan(spec("deepseek-ai/DeepSeek-R1", "v7x 2x2x2", own)).fit
    alone = plan(spec("deepseek-ai/DeepSeek-R1", "v7x 2x2x2", SHORT)).fit
    layers = next(group for group in drafting.groups if group.name == "draft layers")
    assert layers.params == pytest.approx(11.6e9, rel=0.01)
    assert drafting.weight_bytes > alone.weight_bytes


def test_a_model_that_pools_has_no_output_head_and_samples_nothing() -> None:
    texts = {**SHORT, "runner": "pooling"}
    fit = plan(spec("Qwen/Qwen3-8B", "v6e 1x1", texts)).fit
    assert sum(group.params for group in fit.groups) == pytest.approx(7.57e9, rel=0.002)
    assert fit.workspace.sampling_bytes == 0


def test_weights_in_a_bucket_need_a_config_from_elsewhere() -> None:
    with pytest.raises(PlanError, match=r"give engine\.hf_config_path"):
        plan(spec("gs://weights/qwen3-30b", "v7x 2x2x2", SHORT))
    engine = {**SHORT, "hf_config_path": "Qwen/Qwen3-30B-A3B", "load_format": "runai_streamer"}
    assert plan(spec("gs://weights/qwen3-30b", "v7x 2x2x2", engine)).shape.experts is not None


def test_what_fits_nowhere_is_said_to() -> None:
    with pytest.raises(PlanError, match="it fits no slice of up to 256 chips"):
        plan(spec("meta-llama/Llama-3.1-8B-Instruct", "v6e 2x2", {**SHORT, "gpu_memory_utilization": 0.001}))


OPTIONS = {
    "additional_config",
    "dtype",
    "enable_lora",
    "gpu_memory_utilization",
    "hf_config_path",
    "hf_overrides",
    "kv_cache_dtype",
    "max_lora_rank",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "quantization",
    "speculative_config",
}
LEAVES = st.none() | st.booleans() | st.integers(-2, 10**7) | st.floats() | st.text(max_size=4)
KEYS = st.sampled_from(
    [
        "sharding",
        "sharding_strategy",
        "quantization",
        "qwix",
        "rules",
        "module_path",
        "model",
    ]
)
JUNK = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


@given(
    st.dictionaries(st.sampled_from(sorted(OPTIONS)), JUNK, max_size=3),
    st.sampled_from(["Qwen3-4B", "Qwen3-30B-A3B"]),
)
def test_options_of_any_kind_are_planned_or_refused(engine: dict[str, Any], model: str) -> None:
    with pytest.MonkeyPatch.context() as environment, contextlib.suppress(ServingError):
        environment.setenv("HF_HUB_OFFLINE", "1")
        plan(spec(f"Qwen/{model}", "v6e 2x2", engine))


def test_a_model_of_sentence_transformers_embeds_where_no_runner_is_set(tmp_path: Path) -> None:
    assert {name for name in CONFIGS if "Embedding" in name} == EMBED
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen/Qwen3-4B"]))
    assert not plan(spec(str(tmp_path), "v6e 1x1", SHORT)).sizes.pools
    (tmp_path / "modules.json").write_text("[]")
    for model in (str(tmp_path), *EMBED):
        found = plan(spec(model, "v6e 1x1", SHORT))
        assert found.sizes.pools
        assert found.options["runner"] == "pooling"
    assert not plan(spec(str(tmp_path), "v6e 1x1", {**SHORT, "runner": "generate"})).sizes.pools


def test_what_tpu_inference_would_take_for_another_model_is_told_to_be_vllm_s() -> None:
    scout = plan(spec("meta-llama/Llama-4-Scout-17B-16E-Instruct", "v7x 2x2x1", SHORT))
    assert scout.environment["MODEL_IMPL_TYPE"] == "vllm"


@pytest.mark.parametrize(
    ("options", "by_vllm"), [({"load_format": "runai_streamer"}, True), ({"load_format": "auto"}, False)]
)
def test_what_a_streamer_reads_runs_as_vllm_s_where_our_engine_s_own_can_t_stream(
    options: dict[str, Any], by_vllm: bool
) -> None:
    assert plan(spec("Qwen/Qwen3-4B", "v6e 1x1", SHORT | options)).sizes.by_vllm is by_vllm
    assert not plan(spec("meta-llama/Llama-3.1-8B-Instruct", "v6e 1x1", SHORT | options)).sizes.by_vllm
    bucket = SHORT | {"hf_config_path": "Qwen/Qwen3-4B"}
    assert plan(spec("gs://bucket/model", "v6e 1x1", bucket, name="qwen")).sizes.by_vllm
    quantised = plan(spec("gs://bucket/model", "v6e 1x1", bucket | qwix("int8"), name="qwen"))
    assert any("of no effect" in reason for reason in quantised.reasons)


def test_stages_of_deepseek_are_vllm_s() -> None:
    parallel = {"tensor": 8, "pipeline": 2}
    found = plan(spec("deepseek-ai/DeepSeek-R1", "v7x 2x2x2", {"max_model_len": 2048}, parallel=parallel))
    assert (found.sizes.by_vllm, found.environment["MODEL_IMPL_TYPE"]) == (True, "vllm")


def test_copies_on_one_host_are_offered_where_heads_can_t_be_cut_over_all_of_it() -> None:
    with pytest.raises(PlanError, match="tensor=4 data=2 works"):
        plan(spec("Qwen/Qwen2.5-7B-Instruct", "v7x 2x2x1", SHORT))
    shape = shape_of("Qwen/Qwen2.5-7B-Instruct")
    found = {str(one.slice): one.layout for one in slices_that_fit(shape, engine_sizes(SHORT, shape))}
    assert any(layout.data == 2 for layout in found.values())
