"""Real engines on slices of two hosts, tensor parallel over both, through the front door."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from support.leases import Leases
from support.reference import answers, greedy
from support.service import MODEL, ROOT, Service, two_replicas

from serving.simulation import stand_in
from serving.simulation.cluster import cache_directory
from serving.simulation.processes import called
from serving.state.records import SliceState

pytestmark = pytest.mark.engine
LONG = 1500
BORROWS = "two hosts, 3"


@pytest.fixture
def running(leases: Leases) -> Service:
    return two_replicas(leases)


@pytest.fixture
def client(running: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.address}/v1", api_key="none", max_retries=0, timeout=120)


def worker_seconds(running: Service) -> dict[str, list[float]]:
    """Of each slice's two workers."""
    found: dict[str, list[float]] = {}
    for entry in running.serving():
        for host in (0, 1):
            (worker,) = called("RayWorkerProc", running.cluster.processes(entry.slice, host))
            times = worker.cpu_times()
            found.setdefault(entry.slice, []).append(times.user + times.system)
    return found


def says(worker: psutil.Process) -> str:
    """Its own output: what Ray brings of it to the driver comes late now and then, after another test has begun."""
    return "".join(Path(f"/proc/{worker.pid}/fd/{number}").read_text(errors="replace") for number in (1, 2))


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_greedy_tokens_equal_hugging_face_s(running: Service) -> None:
    """Three times over, six prompts at once: a buffer overwritten too early shows only now and then."""
    expected = greedy(stand_in.ensure(running.plan().shape, cache_directory()))

    for _ in range(3):
        assert answers(running) == expected


def test_both_hosts_hold_half_of_the_devices_and_do_half_of_the_work(running: Service) -> None:
    for entry in running.serving():
        for number, host in enumerate(entry.hosts):
            (worker,) = called("RayWorkerProc", running.cluster.processes(entry.slice, number))
            found = re.findall(r"simulated host (\S+): worker (\d), (\d) of (\d) devices", says(worker))
            assert set(found) == {(host, str(number), "4", "8")}

    before = worker_seconds(running)
    running.post("/v1/completions", prompt="work", max_tokens=64, ignore_eos=True)
    spent = {
        slice_: [after - start for after, start in zip(times, before[slice_], strict=True)]
        for slice_, times in worker_seconds(running).items()
    }
    print(f"seconds of CPU for 64 tokens, by slice and host: {spent}")
    assert min(max(spent.values(), key=sum)) > 0


def test_models_tell_the_slice_and_that_it_is_simulated(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [MODEL]
    card = client.models.retrieve(MODEL).model_dump()
    assert card["simulated"] is True
    assert card["slice"] == "v6e 2x4 (2 hosts x 4 chips)"
    assert card["parallel"] == {"tensor": 8, "pipeline": 1}


def test_chat_answers_with_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=chat("Hello"), max_tokens=8, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
    assert answer.choices[0].message.content


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "messages": chat("Tell me a story"), "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**request)
    chunks = list(
        client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 10


def test_completions_give_logprobs_and_several_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="A river", max_tokens=6, logprobs=2, n=3, temperature=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert all(value is None or value <= 0 for value in logprobs.token_logprobs)


def test_an_answer_ends_before_its_stop_text(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "prompt": "The clock", "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**request).choices[0].text
    stop = text[len(text) // 2 :][:3]
    cut = client.completions.create(**request, stop=[stop]).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"


def test_a_json_schema_is_kept(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ready": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
        "required": ["ready", "colour"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=chat("Is it ready?"),
        max_tokens=64,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "state", "schema": schema, "strict": True},
        },
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert value["colour"] in {"red", "green"}
    assert isinstance(value["ready"], bool)


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL) as refused:
        client.chat.completions.create(model="gpt-9", messages=chat("Hello"))
    assert refused.value.code == "model_not_found"


def test_other_endpoints_of_the_engine_are_reached_by_model_name(running: Service) -> None:
    tokens = running.post("/tokenize", prompt="a slice").json()["tokens"]
    assert running.post("/detokenize", tokens=tokens).json()["prompt"] == "a slice"
    answer = running.post("/v1/responses", input="Hello", max_output_tokens=4)
    assert answer.json()["object"] == "response"
    message = running.post("/v1/messages", messages=chat("Hello"), max_tokens=4).json()
    assert message["type"] == "message"


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/chat/completions", b"", 400),
        ("POST", "/v1/chat/completions", b"{not json", 400),
        ("POST", "/v1/chat/completions", b"[1, 2]", 400),
        ("POST", "/v1/chat/completions", b'{"model": 7, "messages": []}', 404),
        ("POST", "/v1/chat/completions", b'{"messages": "hello"}', 400),
        ("GET", "/v1/chat/completions", b"", 405),
        ("DELETE", "/v1/models", b"", 405),
        ("GET", "/v1/models/none", b"", 404),
        ("GET", "/nowhere", b"", 404),
        ("POST", "/v1/nowhere", b"{}", 404),
    ],
)
def test_bad_requests_get_an_error_that_openai_clients_parse(
    running: Service, method: str, path: str, content: bytes, status: int
) -> None:
    answer = httpx.request(
        method,
        running.address + path,
        content=content,
        headers={"content-type": "application/json"},
        timeout=30,
    )
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"]
    assert "Traceback" not in answer.text


def test_cancelling_a_stream_frees_the_engine(running: Service, client: openai.OpenAI) -> None:
    before = written(running)
    stream = client.completions.create(
        model=MODEL, prompt="Long", max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    running.until(lambda: requests(running) == 1, "the request to run")
    stream.close()
    until_aborted(running, before)


def test_a_client_that_hangs_up_on_a_whole_answer_frees_the_engine(running: Service) -> None:
    before = written(running)
    with pytest.raises(httpx.ReadTimeout):
        running.post("/v1/completions", prompt="Long", max_tokens=LONG, ignore_eos=True, timeout_s=1)
    until_aborted(running, before)


def until_aborted(running: Service, before: int) -> None:
    """The engine runs nothing, and has not written the answer to its end."""
    running.until(lambda: not requests(running), "the request to be aborted")
    assert 0 < written(running) - before < LONG


def requests(running: Service) -> int:
    return sum(entry.running for entry in running.serving())


def written(running: Service) -> int:
    return sum(entry.output_tokens for entry in running.serving())


def test_status_shows_the_slice(running: Service) -> None:
    shown = subprocess.run(
        [str(Path(sys.executable).parent / "serving"), "status"],
        env=running.cluster.environment | {"COLUMNS": "160"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert running.serving()[0].slice in shown
    assert "serving" in shown


@pytest.mark.slow
def test_no_engine_process_survives_a_killed_replica_and_the_service_comes_back(running: Service) -> None:
    entry = running.serving()[0]
    engine = [
        process
        for host in (0, 1)
        for name in ("EngineCore", "RayWorkerProc")
        for process in called(name, running.cluster.processes(entry.slice, host))
    ]
    assert len(engine) == 3
    for replica in called(
        f"ServeReplica:{running.application}:{MODEL}", running.cluster.processes(entry.slice, 0)
    ):
        replica.kill()
    killed = time.monotonic()
    _, alive = psutil.wait_procs(engine, timeout=15)
    assert alive == [], f"still there after {time.monotonic() - killed:.0f} s"
    running.until(
        lambda: entry.replica not in {one.replica for one in running.serving()}, "the loss to be noticed"
    )
    running.until_serving(2)
    assert running.post("/v1/completions", prompt="a", max_tokens=2).is_success
    assert all(one.state is not SliceState.DRAINING for one in running.entries())
