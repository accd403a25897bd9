"""What a host tells of itself, read on this machine; buckets are a server on loopback."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from support.doctor_facts import llama
from support.servers import asgi_server

from serving import environment, secret
from serving.doctor import host
from serving.doctor.host import HostLook
from serving.doctor.kubernetes import endpoints_of, kubernetes
from serving.doctor.versions import locked
from serving.doctor.weights import unreadable
from serving.errors import PlanError
from serving.simulation import chips
from serving.slices import preflight

pytestmark = pytest.mark.http


def never(model: str) -> Any:
    raise AssertionError(model)


def test_a_simulated_host_tells_what_it_has_and_never_its_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chips.make(tmp_path, 4)
    variables = {environment.CHIPS: str(tmp_path), environment.HOST: "slice-0/1", "JAX_PLATFORMS": "cpu"}
    for name, value in {**variables, "TPU_NAME": "slice-0", secret.VARIABLE: "s3cret"}.items():
        monkeypatch.setenv(name, value)
    peer = HostLook("127.0.0.1")
    told = HostLook("127.0.0.1").look([llama()], [("127.0.0.1", peer.port())])
    assert len(told.devices) == 4
    assert (told.has.holders, told.has.unreached, told.simulated) == ({}, {}, True)
    assert told.environment["TPU_NAME"] == "slice-0"
    assert told.needs.disk_bytes == 0  # its weights are a stand-in model's
    assert told.versions.items() >= locked(simulated=True).items()
    assert told.secret
    assert "s3cret" not in repr(told)
    assert told.memlock_bytes in (None, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def test_a_container_s_limits_count_and_a_peer_that_is_gone_is_not_reached(tmp_path: Path) -> None:
    bound = len(os.sched_getaffinity(0))
    assert preflight.cpus(tmp_path) == bound
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert preflight.cpus(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert preflight.cpus(tmp_path) == bound
    whole = host.memory_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("1000\n")
    assert host.memory_bytes(tmp_path) == 1000
    (tmp_path / "memory.max").write_text("max\n")
    assert host.memory_bytes(tmp_path) == whole
    gone = HostLook("127.0.0.1")
    port = gone.port()
    gone._listener.close()
    assert HostLook("127.0.0.1").look([], [("127.0.0.1", port)]).has.unreached.keys() == {f"127.0.0.1:{port}"}


def test_the_kernel_s_word_for_hugepages_is_the_chosen_one(tmp_path: Path) -> None:
    file = tmp_path / "enabled"
    assert host.hugepages(file) == ""
    for word in ("always", "madvise", "never"):
        file.write_text("always madvise never\n".replace(word, f"[{word}]"))
        assert host.hugepages(file) == word


def test_a_host_without_its_address_opens_no_port() -> None:
    with pytest.raises(OSError, match="assign"):
        HostLook("192.0.2.1")


@contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store with gs://open/llama/, gs://objects/llama/, whose objects alone one may read, and gs://closed, which nobody may read."""

    async def listed(request: Request) -> Response:
        if (status := {"closed": 403, "none": 404}.get(request.path_params["bucket"])) is not None:
            return Response(status_code=status)
        there = "llama/model.safetensors".startswith(request.query_params["prefix"])
        return JSONResponse({"items": [{"name": "llama/model.safetensors"}]} if there else {})

    async def itself(request: Request) -> Response:
        return Response(status_code=200 if request.path_params["bucket"] == "open" else 403)

    routes = [Route("/storage/v1/b/{bucket}/o", listed), Route("/storage/v1/b/{bucket}", itself)]
    with asgi_server(Starlette(routes=routes)) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        yield


def test_a_bucket_is_asked_for_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch):
        assert unreadable("gs://open/llama", never) == ""
        assert unreadable("gs://open/llama/", never) == unreadable("gs://open", never) == ""
        assert unreadable("gs://open/qwen", never) == "gs://open has nothing below qwen"
        assert unreadable("gs://open/lla", never) == "gs://open has nothing below lla"
        assert unreadable("gs://none/llama", never) == "there is no bucket gs://none"
        assert "lacks storage.buckets.get" in unreadable("gs://objects/llama", never)
        assert unreadable("gs://closed/llama", never) == (
            "this host's service account may not read gs://closed (403)"
        )
    assert unreadable("gs://open/llama", never).startswith("gs://open can't be asked (")


def test_a_bucket_is_asked_with_the_service_account_s_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def token(request: Request) -> Response:
        assert request.headers["metadata-flavor"] == "Google"
        return Response(status_code=404)

    path = "/computeMetadata/v1/instance/service-accounts/default/token"
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    with asgi_server(Starlette(routes=[Route(path, token)])) as address:
        monkeypatch.setenv("GCE_METADATA_HOST", address.removeprefix("http://"))
        assert unreadable("gs://open/llama", never) == "gs://open can't be asked (HTTPStatusError)"


def test_a_folder_has_to_be_there_with_something_in_it(tmp_path: Path) -> None:
    assert unreadable(str(tmp_path), never) == f"{tmp_path} is empty"
    (tmp_path / "config.json").write_text("{}")
    assert unreadable(str(tmp_path), never) == ""
    assert f"{tmp_path}/none is not there" in unreadable(f"{tmp_path}/none", never)
    assert unreadable(f"{tmp_path}/config.json", never).endswith("config.json: Not a directory")


def test_folders_beside_the_weights_are_looked_for_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine ends at its start where an adapter is not mounted."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.delenv(environment.HOST, raising=False)
    adapter = {"name": "shop", "path": f"{tmp_path}/shop"}
    made = llama()
    model = made.model.model_copy(update={"model": str(tmp_path)})
    plan = replace(made, model=model, engine={**made.engine, "enable_lora": True, "lora_modules": [adapter]})
    told = HostLook("127.0.0.1").look([plan], [])
    assert told.weights[str(tmp_path)] == ""
    assert told.weights[f"{tmp_path}/shop"].startswith(f"{tmp_path}/shop is not there")


def test_a_home_of_nobody_s_is_a_name_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "~nobody-here/hub")
    asked: list[str] = []
    assert unreadable("~nobody-here/llama", lambda model: asked.append(model)) == ""
    assert asked == ["~nobody-here/llama"]
    assert preflight.engine_needs(llama(), "~nobody-here/llama").folder == "~nobody-here/hub/hub"
    assert preflight.free_disk_bytes("~nobody-here/hub") > 0


def test_a_repository_is_asked_for_with_the_host_s_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gated(model: str) -> Any:
        raise PlanError(f"{model} is gated: set HF_TOKEN")

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert unreadable("meta-llama/Llama-3.1-8B-Instruct", gated).endswith("is gated: set HF_TOKEN")
    assert unreadable("meta-llama/Llama-3.1-8B-Instruct", lambda _: {}) == ""


def test_addresses_that_are_not_ready_do_not_count() -> None:
    slices = {
        "items": [
            {
                "endpoints": [
                    {"addresses": ["10.0.1.1"], "conditions": {"ready": True}},
                    {"addresses": ["10.0.0.7"], "conditions": {"ready": False}},
                    {"addresses": ["10.0.1.2"], "conditions": None},
                    {"addresses": ["10.0.1.3"], "conditions": {"ready": None}},
                ]
            },
            {"endpoints": None},
        ]
    }
    found = endpoints_of("llama", slices, {"items": [{"status": {"podIP": "10.0.1.1"}}, {"status": {}}]})
    assert found.ready == ("10.0.1.1", "10.0.1.2", "10.0.1.3")
    assert found.heads == ("10.0.1.1",)


def test_kubectl_is_asked_where_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.doctor_facts import LLAMA

    from serving import config

    deployment = config.load(LLAMA)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kubernetes(deployment) == "kubectl is not here"
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho refused >&2\nexit 1\n")
    kubectl.chmod(0o755)
    assert kubernetes(deployment) == "kubectl can't tell (refused)"
    endpoint = {"items": [{"endpoints": [{"addresses": ["10.0.1.1"]}], "status": {"podIP": "10.0.1.1"}}]}
    kubectl.write_text(f"#!/bin/sh\necho '{json.dumps(endpoint)}'\n")
    (found,) = kubernetes(deployment)
    assert (found.service, found.ready, found.heads) == ("llama", ("10.0.1.1",), ("10.0.1.1",))  # type: ignore[union-attr]
