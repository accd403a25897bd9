from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from serving.app import build

pytestmark = pytest.mark.unit


def model(name: str, *adapters: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "slice": {"generation": "v6e", "topology": "2x4", "hosts": 1},
        "engine": {
            "max_model_len": 2048,
            "enable_lora": True,
            "lora_modules": [f"{a}=/{a}" for a in adapters],
        },
    }


@pytest.mark.parametrize(
    "models",
    [[model("llama", "sql", "llama")], [model("llama", "sql"), model("other", "sql")]],
)
def test_an_adapter_with_the_name_of_another_is_refused(models: list[dict[str, Any]]) -> None:
    with pytest.raises(RayServeException, match="has the name of another; rename it"):
        build({"models": models})


def deployments(*models: dict[str, Any]) -> list[str]:
    return [one._bound_deployment.name for one in build({"models": models})._bound_deployment.init_args[1:]]


def test_a_deployment_is_named_by_model_and_pool_wherever_the_pool_stands() -> None:
    (alone,) = deployments(model("llama"))
    first = {"slice": model("llama")["slice"]}
    second = {"slice": {"generation": "v5e", "topology": "2x4", "hosts": 2}}
    without = {key: value for key, value in model("llama").items() if key not in ("slice", "replicas")}
    both = deployments(without | {"pools": [first, second]})
    assert deployments(without | {"pools": [second, first]}) == both[::-1]
    assert both[0] == alone


def test_a_deployment_s_name_is_one_that_ray_s_metrics_take_whatever_the_model_is_called() -> None:
    (name,) = deployments(model("modèle №5"))
    assert name.isascii()
    assert name.startswith("mod-le--5-v6e")


def test_slices_know_the_pools_whose_hosts_ray_would_take_for_theirs() -> None:
    def bought(capacity: str, **changes: Any) -> dict[str, Any]:
        return {"slice": model("llama")["slice"] | {"capacity": capacity} | changes}

    without = {key: value for key, value in model("llama").items() if key not in ("slice", "replicas")}
    first = without | {"pools": [bought("spot"), bought("on-demand", topology="4x4", hosts=None)]}
    second = model("other") | bought("on-demand") | {"replicas": 1}
    slices = build({"models": [first, second]})._bound_deployment.init_args[1:]
    others = [one._bound_deployment._deployment_config.user_config["other_pools"] for one in slices]
    assert others == [["v6e-2x4-1h-on-demand"], [], ["v6e-2x4-1h-spot"]]


def test_models_that_serve_would_not_tell_apart_are_refused() -> None:
    with pytest.raises(RayServeException, match="would share the Serve deployment"):
        build({"models": [model("org/llama"), model("org-llama")]})


def test_scaling_is_told_of_models_with_a_fixed_number_and_of_the_whole_budget() -> None:
    fixed = model("fixed") | {"replicas": 3}
    scaled = model("scaled") | {"replicas": {"min": 1, "max": 9}}
    application = build({"models": [fixed, scaled], "budget": {"slices": 5, "dollars_per_hour": 100}})
    slices = {
        bound.name.split("-")[0]: bound
        for bound in (one._bound_deployment for one in application._bound_deployment.init_args[1:])
    }
    assert slices["fixed"].num_replicas == 3
    policy = slices["scaled"]._deployment_config.autoscaling_config.policy
    assert policy.policy_kwargs["budget"] == {"slices": 5, "dollars_per_hour": 100}
    told = [
        (of["model"], of["pools"][0]["min"], of["pools"][0]["max"]) for of in policy.policy_kwargs["fixed"]
    ]
    assert told == [("fixed", 3, 3)]


@pytest.mark.parametrize("replicas", [3, {"min": 3, "max": 9}])
def test_a_budget_that_does_not_pay_for_the_least_slices_is_refused(replicas: Any) -> None:
    args = {"models": [model("llama") | {"replicas": replicas}], "prices": {"v6e": {"on-demand": 1.1}}}
    build(args | {"budget": {"dollars_per_hour": 26.4}})
    with pytest.raises(
        RayServeException, match=r"is 26.3, and replicas.min of all pools cost 26.40 USD an hour"
    ):
        build(args | {"budget": {"dollars_per_hour": 26.3}})
