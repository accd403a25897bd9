import ast
import importlib.util
from pathlib import Path

import pytest

from serving.config import load
from serving.errors import ConfigError
from serving.planning import plan
from serving.planning.engine_environment import check
from serving.planning.vllm_variables import VARIABLES

pytestmark = pytest.mark.unit

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("NEW_MODEL_DESIGN", "engine_env.NEW_MODEL_DESIGN: not settable, it follows from parallel"),
        ("MODEL_IMPL_TYPE", "set engine.model_impl"),
        ("TPU_WORKER_ID", "it follows from the slice and its hosts"),
        ("MOE_REQUANTIZE_DTYPE", "did you mean MOE_REQUANTIZE_WEIGHT_DTYPE?"),
        (
            "MY_LIBRARY_LEVEL",
            "neither tpu-inference 0.26 nor vLLM 0.26 reads it; for other libraries set gke.env",
        ),
        ("VLLM_MAX_IMAGE_PIXEL", "nor vLLM 0.26 reads it; did you mean VLLM_MAX_IMAGE_PIXELS?"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "not settable, a forked engine would outlive its replica"),
        ("VLLM_API_KEY", "a secret does not belong into the YAML"),
        ("A B", "this is no name of an environment variable"),
    ],
)
def test_a_variable_that_the_engine_does_not_take_from_the_yaml_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check({name: "1"})
    assert says in refusal.value.message


def test_vllm_s_variables_are_those_of_the_installed_one() -> None:
    found = importlib.util.find_spec("vllm")
    assert found
    assert found.submodule_search_locations
    module = ast.parse((Path(found.submodule_search_locations[0]) / "envs.py").read_text())
    assigned = [node for node in module.body if isinstance(node, ast.AnnAssign)]
    (table,) = [node.value for node in assigned if ast.unparse(node.target) == "environment_variables"]
    assert isinstance(table, ast.Dict)
    names = {str(key.value) for key in table.keys if isinstance(key, ast.Constant)}
    assert {name for name in names if name.startswith("VLLM_")} == VARIABLES


def test_all_refused_variables_are_named_in_one_message() -> None:
    with pytest.raises(ConfigError) as refusal:
        check({"USE_2D_TP": "1", "TPU_NAME": "a", "ATTN_BUCKETIZED_NUM_REQS": "1"})
    assert refusal.value.message.count("engine_env.") == 2


def test_variables_of_a_model_are_part_of_its_engine() -> None:
    (service,) = load(DEPLOYMENTS / "qwen3.5-397b-v7x-8.yaml").services.values()
    found = plan(service.models[0])
    assert found.environment["ATTN_CUSTOM_NUM_REQS_BUCKETS"] == "8,16,32,64"
    assert found.environment["LIBTPU_INIT_ARGS"].startswith("--xla_tpu_use_minor_sharding")
    assert found.environment["NEW_MODEL_DESIGN"] == "1"  # beside those that the plan adds
    other = plan(service.models[0].model_copy(update={"engine_env": {"VLLM_MOE_CHUNK_SIZE": "512"}}))
    assert other.version != found.version  # so a change of them rolls through the slices
