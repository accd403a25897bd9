from dataclasses import replace
from pathlib import Path

import pytest

from serving.compiler.compile import Wish, compile_plan
from serving.compiler.configs import checkpoint_config, quick_layers
from serving.compiler.records import Built, Compiled, Job, Program, Stage, chosen, ledger
from serving.compiler.report import available_bytes, code_bytes, extended, hbm
from serving.compiler.schedule import Schedule
from serving.config import ModelSpec
from serving.errors import CompileError
from serving.planning.fit import RESIDENT_BYTES
from serving.planning.known_models import CONFIGS
from serving.planning.plan import plan
from serving.tpu.generations import GIB

pytestmark = pytest.mark.unit

PROGRAMS = (
    *(Program("backbone", {"num_tokens": tokens, "num_reqs": 8}) for tokens in (16, 32, 64, 128)),
    *(Program("sample", {"num_reqs": 8, "do_sampling": switch}) for switch in (0, 1)),
)
BUILT = Built("flax_nnx", {"model": 4}, GIB, 2 * GIB, 100, 128, PROGRAMS, 1.0)
PLANNED = plan(
    ModelSpec.model_validate(
        {"model": "google/gemma-4-E2B-it", "slice": {"generation": "v5e", "topology": "1x1"}}
        | {"engine": {"max_model_len": 16384}}
    ),
    estimated=True,
)


def test_the_largest_of_each_name_and_the_step_that_decodes_are_compiled() -> None:
    assert chosen(PROGRAMS, sequences=32, full=False) == (1, 3, 5)
    assert chosen(PROGRAMS, sequences=128, full=False) == (3, 5)


def test_the_step_that_decodes_has_the_most_requests_of_its_tokens() -> None:
    steps = tuple(
        Program("backbone", {"num_tokens": tokens, "num_reqs": requests})
        for tokens in (256, 512, 1024)
        for requests in (64, 128, 512)
    )
    assert chosen(steps, sequences=512, full=False) == (5, 8)


def test_full_is_every_program() -> None:
    assert chosen(PROGRAMS, sequences=32, full=True) == tuple(range(len(PROGRAMS)))


def test_the_ledger_counts_programs_and_lists_their_buckets() -> None:
    counted = ledger(PROGRAMS)
    assert counted.counts == {"backbone": 4, "sample": 2}
    assert counted.buckets["backbone"] == {"num_tokens": (16, 32, 64, 128), "num_reqs": (8,)}


def test_a_program_takes_beside_weights_and_cache_what_it_does_not_give_back_in_their_place() -> None:
    step = Compiled(
        3,
        "compiled",
        argument_bytes=110,
        resident_bytes=100,
        output_bytes=70,
        aliased_bytes=60,
        temporary_bytes=5,
        code_bytes=1000,
    )
    assert step.extra_bytes == 10 + 10 + 5


def test_programs_that_were_not_compiled_count_as_the_next_larger_of_their_name() -> None:
    smaller, larger = Compiled(1, "compiled", code_bytes=3), Compiled(3, "compiled", code_bytes=5)
    assert code_bytes(Stage(BUILT, (smaller, larger))) == (3 + 5) + (3 + 5)
    assert code_bytes(Stage(BUILT, (smaller,))) == 4 * 3  # no larger one is known


def test_every_layer_adds_weights_cache_and_code_and_takes_the_buffers_of_the_last() -> None:

    def depth(layers: int) -> Compiled:
        return Compiled(
            3,
            "compiled",
            argument_bytes=100 + 7 * layers,
            temporary_bytes=2 * layers,
            code_bytes=4 + layers,
            resident_bytes=6 * layers,
            schedule=Schedule(50 * layers, 5 * layers, 3 + layers, {"all-reduce": 1 + 2 * layers}),
        )

    whole = extended(depth(1), depth(3), depths=(1, 3), layers=80)
    assert (whole.argument_bytes, whole.resident_bytes) == (100 + 7 * 80, 6 * 80)
    assert (whole.temporary_bytes, whole.code_bytes) == (depth(3).temporary_bytes, 4 + 80)
    assert whole.schedule == Schedule(50 * 80, 5 * 80, 3 + 80, {"all-reduce": 1 + 2 * 80})


def test_layers_that_take_less_code_than_fewer_of_them_are_not_counted_down() -> None:
    """A step of Gemma 4 26B on v6e 2x2 at two depths; the rest of the way down would have been less than nothing."""
    shallow, deep = Compiled(3, "compiled", code_bytes=60), Compiled(3, "compiled", code_bytes=40)
    assert extended(shallow, deep, depths=(6, 18), layers=30).code_bytes == 40


def test_what_is_needed_has_the_program_that_runs_and_not_the_code_of_all() -> None:
    small = Compiled(0, "compiled", temporary_bytes=3, code_bytes=5)
    large = Compiled(3, "compiled", temporary_bytes=30, code_bytes=50)
    lines = {line.name: line.compiler_bytes for line in hbm(PLANNED, [Stage(BUILT, (small, large))])}
    assert (lines["a step"], lines["programs, at most"]) == (30 + 50, 5 + 3 * 50)
    assert lines["all of it"] == 3 * GIB + RESIDENT_BYTES + 30 + 50


def test_logits_of_all_buckets_lie_beside_the_largest_that_runs_at_start() -> None:
    """Gemma 4 E2B on a v5e chip: 384 MiB reserved for 256 requests, 128 MiB of logits for them and 124 for the smaller buckets."""
    logits = {size: 262_144 * 2 * size for size in (8, 16, 32, 64, 128, 256)}
    programs = tuple(Program("structured_decode", {"num_reqs": size}) for size in logits)
    largest = Compiled(
        5,
        "compiled",
        argument_bytes=logits[256],
        output_bytes=logits[256],
        temporary_bytes=3 * logits[256],
    )
    built = replace(BUILT, programs=programs)
    (line,) = (line for line in hbm(PLANNED, [Stage(built, (largest,))]) if line.name == "grammars, at start")
    assert line.compiler_bytes == sum(logits.values()) + 4 * logits[256]


def test_a_refusal_at_one_depth_is_the_answer() -> None:
    refused = Compiled(3, "refused", "no")
    assert extended(Compiled(3, "compiled"), refused, depths=(1, 3), layers=80) == refused


@pytest.mark.parametrize(
    "words",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 32.40G of 31.24G hbm.",
        "XLA:TPU compile permanent error. Ran out of memory on HBM. Program (32.40G) exceeds available HBM (31.24G)",
    ],
)
def test_a_refusal_tells_what_the_chip_has(words: str) -> None:
    stage = Stage(BUILT, (Compiled(3, "refused", words),))
    assert available_bytes([stage]) == int(31.24 * GIB)


def test_nothing_is_known_of_the_chip_where_everything_compiled() -> None:
    assert available_bytes([Stage(BUILT, (Compiled(3, "compiled"),))]) is None


def test_a_job_and_an_engine_cross_a_pipe_unchanged() -> None:
    from dataclasses import asdict

    job = Job("a.yaml", "m", "v6e", "/lib", programs=(1, 2))
    assert Job.of(job.plain()) == job
    assert Built.of(asdict(BUILT)) == BUILT


@pytest.mark.parametrize(
    ("model", "depths"),
    [
        ("meta-llama/Llama-3.1-8B", (1, 3)),
        ("openai/gpt-oss-120b", (2, 6)),
        ("deepseek-ai/DeepSeek-V3", (4, 6)),
        ("google/gemma-4-31B-it", (6, 18)),
        ("Qwen/Qwen3.5-397B-A17B-FP8", (4, 12)),
        ("google/gemma-4-E2B-it", None),
    ],
)
def test_small_depths_have_every_kind_of_layer(model: str, depths: tuple[int, int] | None) -> None:
    assert quick_layers(CONFIGS[model]) == depths


def test_a_cut_config_has_as_many_kinds_as_layers() -> None:
    cut = checkpoint_config(CONFIGS["openai/gpt-oss-120b"], 2)
    assert (cut["num_hidden_layers"], len(cut["layer_types"])) == (2, 2)
    text = checkpoint_config(CONFIGS["google/gemma-4-31B-it"], 6)["text_config"]
    assert (text["num_hidden_layers"], len(text["layer_types"])) == (6, 6)


def test_a_config_without_a_type_is_refused_by_name() -> None:
    with pytest.raises(CompileError, match="NewForCausalLM: no model_type is known"):
        checkpoint_config({"architectures": ["NewForCausalLM"]})


def test_an_fp8_config_and_gemma_4_get_what_their_checkpoints_say_and_known_models_leave_out() -> None:
    fp8 = checkpoint_config(CONFIGS["deepseek-ai/DeepSeek-R1"])["quantization_config"]
    assert (fp8["activation_scheme"], fp8["weight_block_size"]) == ("dynamic", [128, 128])
    gemma = checkpoint_config(CONFIGS["google/gemma-4-E2B-it"])
    assert gemma["vision_config"]["default_output_length"] == 280


def test_a_model_that_embeds_texts_is_refused_before_a_process_starts() -> None:
    model = {"model": "BAAI/bge-m3", "slice": {"generation": "v6e", "topology": "1x1"}}
    embeds = plan(ModelSpec.model_validate(model), estimated=True)
    wish = Wish(quick=False, full=False, jobs=1, limit_s=1.0, cache=None)
    with pytest.raises(CompileError, match="moves arrays to its TPU while it loads"):
        compile_plan("a.yaml", embeds, CONFIGS["BAAI/bge-m3"], Path("libtpu.so"), wish, lambda *_: None)
