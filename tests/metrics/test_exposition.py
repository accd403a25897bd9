import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.metrics import exposition, table
from serving.metrics.exposition import Engine

pytestmark = pytest.mark.unit

APPLICATION = "blue"
NODE = "10.0.0.1"
ENGINE = Engine("llama", "slice-0", 1, ("10.0.0.1", "10.0.0.2"))
AGENT = """# HELP ray_tpu_serving_requests_total Requests.
# TYPE ray_tpu_serving_requests_total counter
ray_tpu_serving_requests_total{{Component="core_worker",WorkerId="{worker}",application="blue",key="none",model="llama",outcome="ok",pool="0"}} {count}
ray_tpu_serving_requests_held{{WorkerId="{worker}",application="blue",model="llama"}} {count}
ray_tpu_serving_slices_wanted{{WorkerId="{worker}",application="blue",model="llama"}} {count}
ray_tpu_serving_ttft_seconds_bucket{{WorkerId="{worker}",application="blue",le="0.5",model="llama",pool="0"}} {count}
ray_tpu_serving_ttft_seconds_count{{WorkerId="{worker}",application="blue",model="llama",pool="0"}} {count}
ray_tpu_serving_made_up{{WorkerId="{worker}",application="blue"}} 1.0
ray_node_cpu_utilization{{ip="10.0.0.1"}} 3.0
"""
VLLM = """# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="llama"} 3.0
# HELP vllm:request_success_total Done.
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="lla\\"ma,}"} 2.0
vllm:request_success_total{model_name="llama",engine="0",finished_reason="length"} 1.0
# TYPE vllm:request_success_created gauge
vllm:request_success_created{engine="0"} 1.7e9
# TYPE python_info gauge
python_info{version="3.11"} 1.0
"""


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """By Prometheus's own reader of the format; fails where a series comes twice."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, tuple(sorted(labels.items()))]


def test_processes_of_a_node_are_added_up_or_the_highest_taken_as_the_table_says() -> None:
    agent = AGENT.format(worker="a", count=2) + AGENT.format(worker="b", count=5)
    page = exposition.page(APPLICATION, [(NODE, agent)], [], {})
    here = {"application": APPLICATION, "model": "llama", "node": NODE}
    assert value(page, "tpu_serving_requests_total", **here, key="none", outcome="ok", pool="0") == 7
    assert value(page, "tpu_serving_requests_held", **here) == 7
    assert value(page, "tpu_serving_slices_wanted", application=APPLICATION, model="llama") == 5
    assert value(page, "tpu_serving_ttft_seconds_bucket", **here, pool="0", le="0.5") == 7
    assert value(page, "tpu_serving_ttft_seconds_count", **here, pool="0") == 7


def test_another_application_of_the_same_model_on_the_same_node_is_left_out() -> None:
    blue = AGENT.format(worker="a", count=2)
    green = AGENT.format(worker="b", count=40).replace('"blue"', '"green"')
    assert exposition.page("blue", [(NODE, blue + green)], [], {}) == exposition.page(
        "blue", [(NODE, blue)], [], {}
    )
    page = exposition.page("green", [(NODE, blue + green)], [], {})
    assert value(page, "tpu_serving_requests_held", application="green", model="llama", node=NODE) == 40


def test_no_series_falls_when_a_node_goes() -> None:
    one, other = (NODE, AGENT.format(worker="a", count=2)), ("10.0.0.2", AGENT.format(worker="b", count=2))
    both, alone = (
        samples(exposition.page(APPLICATION, [one, other], [], {})),
        samples(exposition.page(APPLICATION, [one], [], {})),
    )
    assert alone.items() <= both.items()


def test_nothing_but_the_table_is_taken_from_an_agent_and_no_label_of_a_process() -> None:
    page = exposition.page(APPLICATION, [(NODE, AGENT.format(worker="a", count=1))], [], {})
    assert "made_up" not in page
    assert "node_cpu" not in page
    assert "WorkerId" not in page


def test_an_engines_metrics_carry_model_slice_and_pool_in_place_of_its_own_model_name() -> None:
    page = exposition.page(APPLICATION, [], [(ENGINE, VLLM)], {})
    where = {"application": APPLICATION, "model": "llama", "slice": "slice-0", "pool": "1", "engine": "0"}
    assert value(page, "vllm:num_requests_running", **where) == 3
    assert value(page, "vllm:request_success_total", **where, finished_reason="stop") == 2
    assert value(page, "vllm:request_success_total", **where, finished_reason="length") == 1
    assert "model_name" not in page
    assert "_created" not in page
    assert "python_info" not in page


def test_engines_share_one_head_for_each_metric() -> None:
    other = Engine("llama", "slice-1", 1)
    page = exposition.page(APPLICATION, [], [(ENGINE, VLLM), (other, VLLM)], {})
    assert page.count("# TYPE vllm:num_requests_running") == 1
    assert sum(name == "vllm:num_requests_running" for name, _ in samples(page)) == 2


def test_a_chip_that_rays_agent_reads_is_given_its_slice() -> None:
    chip = 'ray_tpu_duty_cycle{ip="10.0.0.2",TpuIndex="3",TpuDeviceName="x-3",TpuType="v6e"} 41.5\n'
    page = exposition.page(APPLICATION, [(NODE, chip)], [(ENGINE, "")], {})
    labels = {
        "application": APPLICATION,
        "model": "llama",
        "slice": "slice-0",
        "host": "10.0.0.2",
        "chip": "3",
        "simulated": "false",
    }
    assert value(page, "tpu_duty_cycle", **labels) == 41.5


def test_a_chip_of_a_host_that_serves_nothing_is_shown_all_the_same() -> None:
    chip = 'ray_tpu_duty_cycle{ip="10.9.9.9",TpuIndex="0"} 0.0\n'
    page = exposition.page(APPLICATION, [(NODE, chip)], [], {})
    labels = {
        "application": "",
        "model": "",
        "slice": "",
        "host": "10.9.9.9",
        "chip": "0",
        "simulated": "false",
    }
    assert value(page, "tpu_duty_cycle", **labels) == 0


def test_names_in_labels_are_escaped() -> None:
    page = exposition.page(APPLICATION, [], [(Engine('a"b\\c\nd', "s", 0), VLLM)], {})
    assert {dict(labels).get("model") for _, labels in samples(page)} == {'a"b\\c\nd'}


def test_an_application_and_a_model_in_any_letters_have_one_name_in_all_series() -> None:
    """Ray's metrics take ASCII alone."""
    agent = AGENT.format(worker="a", count=2).replace('"blue"', r'"bl\\xe9"').replace('"llama"', r'"l\\xe9"')
    page = exposition.page("blé", [(NODE, agent)], [(Engine("lé", "s", "0"), VLLM)], {})
    assert {(dict(labels)["application"], dict(labels)["model"]) for _, labels in samples(page)} == {
        (r"bl\xe9", r"l\xe9")
    }


def test_sources_that_could_not_be_read_are_counted() -> None:
    page = exposition.page(APPLICATION, [], [], {table.UNREACHABLE.name: 2})
    assert value(page, table.UNREACHABLE.name, application=APPLICATION) == 2
