import pytest

from serving.errors import ConfigError
from serving.planning import engine_options

pytestmark = pytest.mark.unit


def test_vllms_own_names_pass() -> None:
    engine_options.check(["max_model_len", "gpu_memory_utilization", "kv_cache_dtype", "hf_overrides"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tensor_parallel_size", "set parallel.tensor"),
        ("tensor-parallel-size", "set parallel.tensor"),
        ("pipeline_parallel_size", "set parallel.pipeline"),
        ("model", "set model beside engine"),
        ("served_model_name", "set name"),
        ("distributed_executor_backend", "remove it"),
        ("worker_cls", "remove it"),
        ("data_parallel_size", "set parallel.data"),
        ("data_parallel_rank", "set replicas"),
        ("port", "the replica chooses"),
        ("max_model_length", "did you mean 'max_model_len'?"),
        ("max-model-len", "write max_model_len"),
        (
            "tensor_parallel",
            "did you mean 'tensor_parallel_size', which is not settable: set parallel.tensor",
        ),
        ("zzz", "engine.zzz: not an option of vLLM"),
    ],
)
def test_a_derived_or_misspelt_option_names_the_right_key(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^engine\.") as refusal:
        engine_options.check([name])
    assert says in refusal.value.message


def test_every_problem_is_in_one_message() -> None:
    with pytest.raises(ConfigError, match=r"engine\.model: .*; engine\.port: "):
        engine_options.check(["port", "model", "max_num_seqs"])


def test_an_option_is_derived_or_settable_not_both() -> None:
    assert not engine_options.SETTABLE & engine_options.DERIVED.keys()
