from typing import Any

import pytest

from serving.config import ModelSpec
from serving.errors import ConfigError
from serving.scaling.capacity import Lengths, capacity, pool_of, whole_slices, with_room
from serving.scaling.sizing import Offer, Workload, offers, read_workload

pytestmark = pytest.mark.unit

LOAD = Workload(1024, 256, 20)


def model(**more: Any) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "model": "meta-llama/Llama-3.3-70B-Instruct",
            "slice": {"generation": "v6e", "topology": "2x4", "hosts": 1},
            "engine": {"max_model_len": 4096},
            **more,
        }
    )


def own(spec: ModelSpec, workload: Workload = LOAD) -> Offer:
    return offers(spec, workload, {})[0]


def test_a_workload_is_read() -> None:
    assert read_workload("in=1024,out=256,rate=20") == Workload(1024, 256, 20.0)
    assert read_workload(" rate=0.5, in=8,out=1") == Workload(8, 1, 0.5)
    assert read_workload("in=8,rate=2") == read_workload("in=8,out=0,rate=2") == Workload(8, 0, 2.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "in=1.5,out=256,rate=1",
            "in is a whole number of tokens, above 0 and at most 1,000,000 (got '1.5')",
        ),
        ("in=1024,out=x,rate=1", "out is a whole number of tokens"),
        ("in=1024,out=-1,rate=1", "out is a whole number of tokens"),
        ("in=0,out=1,rate=1", "in is a whole number of tokens"),
        ("in=1024,out=256,rate=-1", "rate is requests a second, above 0 and at most 1,000,000 (got '-1')"),
        (
            "in=1024,out=256,rate=1e12",
            "rate is requests a second, above 0 and at most 1,000,000 (got '1e12')",
        ),
        ("in=1024,out=256,rate=inf", "rate is requests a second"),
        ("in=inf,out=256,rate=1", "in is a whole number"),
        ("in=1024,out=256", "rate is missing; write in=1024,out=256,rate=20"),
        ("in=1024,in=8,out=256,rate=1", "a key is there twice"),
        ("", "'' is none of in, out, rate"),
        ("input=1024", "'input' is none of in, out, rate; write in=1024,out=256,rate=20"),
    ],
)
def test_a_workload_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_workload(text)
    assert says in refusal.value.message


def test_slices_are_those_that_scaling_would_buy() -> None:
    offer = own(model())
    pool = pool_of(offer.plan, 0.0, context=LOAD.prompt + LOAD.answer // 2)
    one = capacity(pool, Lengths(1024.0, 256.0))
    assert offer.slices == whole_slices(with_room(20, one), one.requests_per_s)
    assert offer.least is not None
    assert offer.most is not None
    assert offer.least <= offer.slices <= offer.most


def test_a_tighter_target_takes_more_slices_and_keeps_it() -> None:
    many = Workload(1024, 256, 200)
    loose, tight = own(model(), many), own(model(slo={"itl_s": 0.05}), many)
    assert loose.slices is not None
    assert tight.slices is not None
    assert tight.slices > loose.slices
    assert tight.itl_s <= 0.0501


def test_more_requests_take_more_slices() -> None:
    counts = [own(model(), Workload(1024, 256, rate)).slices for rate in (1, 20, 200)]
    assert counts == sorted(counts, key=lambda count: count or 0)
    assert counts[0] != counts[-1]


def test_a_target_that_a_shape_misses_leaves_it_without_slices() -> None:
    found = offers(model(slo={"itl_s": 0.02}), LOAD, {})
    missed = [offer for offer in found if offer.slices is None]
    assert missed
    assert all("slo.itl_s is 0.02 s, a request alone takes" in offer.missed for offer in missed)
    assert any(offer.slices for offer in found)


def test_own_pools_come_first_and_others_by_price() -> None:
    pools = [
        {"slice": {"generation": "v6e", "topology": "4x4"}},
        {"slice": {"generation": "v6e", "topology": "2x4", "hosts": 1}},
    ]
    spec = ModelSpec.model_validate(
        {
            "model": "meta-llama/Llama-3.3-70B-Instruct",
            "engine": {"max_model_len": 4096},
            "pools": pools,
        }
    )
    found = offers(spec, LOAD, {"v6e": {"on-demand": 0.01}})
    assert [offer.plan.slice.topology for offer in found if offer.own] == ["4x4", "2x4"]
    costs = [offer.slices * offer.dollars_per_hour for offer in found if not offer.own and offer.slices]
    assert costs == sorted(costs)
    assert found[2].plan.slice.generation == "v6e"


def test_a_request_longer_than_the_model_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"4000\+256 tokens is longer than max_model_len, 4096"):
        offers(model(), Workload(4000, 256, 1), {})


def test_a_model_that_embeds_is_sized_for_prompts_alone() -> None:
    embedding = model(model="Qwen/Qwen3-Embedding-8B", engine={"max_model_len": 4096})
    of_prompts, with_answers = (own(embedding, Workload(4000, answer, 5)) for answer in (1, 4000))
    assert vars(of_prompts) | {"plan": None} == vars(with_answers) | {"plan": None}
    assert of_prompts.slices == 1


def test_a_workload_without_answers_is_for_models_that_write_none() -> None:
    embedding = model(model="Qwen/Qwen3-Embedding-8B", engine={"max_model_len": 4096})
    assert own(embedding, Workload(4000, 0, 5)).slices == 1
    with pytest.raises(
        ConfigError, match=r"out is missing, and meta-llama/Llama-3\.3-70B-Instruct writes answers"
    ):
        own(model(), Workload(1024, 0, 20))
