"""What a manifest says for each key of the YAML, as those who read it would understand it."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray._private.ray_constants import REQUIRE_SHM_SIZE_THRESHOLD
from support.manifests import objects_of, pod_templates, problems

from serving import tracing
from serving.config import GkeSpec, ModelSpec, RouterSpec, StoreSpec
from serving.errors import ConfigError
from serving.gke import manifest, serve_config
from serving.gke.application import Application, application
from serving.gke.manifest import kustomize, render
from serving.planning import Plan, plan

pytestmark = pytest.mark.unit

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
INSTALL = "serving.slices.placement.install"
BIG = {
    "engine": {"max_model_len": 4096},
    "slice": {"generation": "v6e", "topology": "4x4"},
    "model": "meta-llama/Llama-3.3-70B-Instruct",
}


def planned(**model: Any) -> Plan:
    plain = {
        "model": LLAMA,
        "slice": {"generation": "v6e", "topology": "4x4"},
        "engine": {"max_model_len": 4096},
    }
    return plan(ModelSpec.model_validate(plain | model))


def elsewhere(path: str) -> Plan:
    """The model from a path that is not on this machine."""
    return planned(model=path, engine={"max_model_len": 4096, "hf_config_path": LLAMA})


def with_engine(made: Plan, **engine: Any) -> Plan:
    """The plan with other options, which may name folders that only the pods have."""
    return replace(made, engine=engine)


def objects(
    *plans: Plan,
    router: RouterSpec | None = None,
    store: StoreSpec | None = None,
    port: int = 8000,
    name: str = "app",
    **gke: Any,
) -> dict[str, list[dict[str, Any]]]:
    """The objects of a manifest by kind; every one of them is valid."""
    spec = GkeSpec.model_validate({"image": "image"} | gke)
    text = render(application(name, spec, plans or [planned()], port=port, router=router, store=store), {})
    found: dict[str, list[dict[str, Any]]] = {}
    for made in objects_of(text):
        assert problems(made) == []
        found.setdefault(made["kind"], []).append(made)
    return found


def pods(found: dict[str, list[dict[str, Any]]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The templates of the head and of the first pool's hosts."""
    head, host, *_ = pod_templates(found["RayService"][0])
    return head, host


def environment(template: dict[str, Any]) -> dict[str, Any]:
    (container,) = template["spec"]["containers"]
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def mounts(template: dict[str, Any]) -> dict[str, str]:
    (container,) = template["spec"]["containers"]
    return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}


def volumes(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {volume["name"]: volume for volume in template["spec"]["volumes"]}


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda pod: pod["spec"].update(restartpolicy="Never"), "'restartpolicy' was unexpected"),
        (lambda pod: pod["spec"]["containers"][0].update(ports=[{"port": 1}]), "'port' was unexpected"),
        (lambda pod: pod["spec"]["volumes"].append({"name": "a", "emptyDir": {"size": "1G"}}), "'size' was"),
    ],
)
def test_a_key_that_nobody_reads_is_a_problem(break_it: Any, says: str) -> None:
    (service,) = objects()["RayService"]
    break_it(pod_templates(service)[1])
    assert any(says in problem for problem in problems(service))


def test_a_wrong_key_of_google_s_is_a_problem() -> None:
    (monitoring, _) = objects()["PodMonitoring"]
    monitoring["spec"]["endpoints"][0]["scheme"] = "https"
    assert problems(monitoring) == [
        "PodMonitoring.spec.endpoints[0]: Additional properties are not allowed ('scheme' was unexpected)"
    ]


# Who reaches it.


def test_the_door_is_on_the_head_alone() -> None:
    found = objects(port=9000)
    service = found["Service"][0]
    assert service["spec"]["selector"] == {"app": "app", "ray.io/node-type": "head"}
    assert service["spec"]["ports"][0]["port"] == 9000
    head, host = pods(found)
    ports = {port["name"]: port["containerPort"] for port in head["spec"]["containers"][0]["ports"]}
    assert ports[service["spec"]["ports"][0]["targetPort"]] == 9000
    assert "serve" not in {port["name"] for port in host["spec"]["containers"][0]["ports"]}
    door = found["PodMonitoring"][0]["spec"]
    assert door["selector"]["matchLabels"] == service["spec"]["selector"]
    assert door["endpoints"][0]["port"] == "serve"


def test_ray_is_closed_to_everybody_but_its_own_pods_and_kuberay() -> None:
    found = objects()
    assert found["RayService"][0]["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    by_kind = {
        policy["spec"]["podSelector"]["matchLabels"]["ray.io/node-type"]: policy["spec"]["ingress"]
        for policy in found["NetworkPolicy"]
        if "ray.io/node-type" in policy["spec"]["podSelector"]["matchLabels"]
    }
    ours = {"from": [{"podSelector": {"matchLabels": {"app": "app"}}}]}
    assert ours in by_kind["head"]
    assert ours in by_kind["worker"]
    # KubeRay labels every pod of every Ray cluster `app.kubernetes.io/name: kuberay`: that name would let all of them in.
    (dashboard,) = [
        rule for rule in by_kind["head"] if {"protocol": "TCP", "port": 8265} in rule.get("ports", [])
    ]
    assert dashboard["from"][0]["podSelector"] == {
        "matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}
    }
    everybody = [rule for rule in by_kind["head"] if "from" not in rule]
    assert everybody == [{"ports": [{"protocol": "TCP", "port": 8000}]}]
    open_ports = {port["port"] for rule in by_kind["worker"] for port in rule.get("ports", [])}
    assert open_ports == {8080}


def test_a_load_balancer_with_tls_stands_in_front_where_it_is_asked_for() -> None:
    assert "Gateway" not in objects()
    found = objects(gateway={"hostname": "llm.example.com", "certificate_secret": "llm-tls"}, port=9000)
    (listener,) = found["Gateway"][0]["spec"]["listeners"]
    assert listener["hostname"] == "llm.example.com"
    assert listener["tls"]["certificateRefs"][0]["name"] == "llm-tls"
    (rule,) = found["HTTPRoute"][0]["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "app", "port": 9000}]
    assert found["GCPBackendPolicy"][0]["spec"]["default"]["timeoutSec"] > 600
    check = found["HealthCheckPolicy"][0]["spec"]["default"]["config"]["httpHealthCheck"]
    assert check == {"port": 9000, "requestPath": "/-/healthz"}


# Secrets and rights.


def test_keys_are_mounted_as_the_file_that_the_routers_read() -> None:
    head, host = pods(objects(router=RouterSpec(keys_file="/etc/serving/keys.yaml")))
    assert mounts(head)["/etc/serving"] == "keys"
    secret = volumes(head)["keys"]["secret"]
    assert secret == {"secretName": "serving-keys", "items": [{"key": "keys.yaml", "path": "keys.yaml"}]}
    assert "keys" not in volumes(host)
    assert "keys" not in volumes(pods(objects())[0])


def test_a_private_page_is_scraped_with_a_key_that_the_collectors_may_read() -> None:
    found = objects(router=RouterSpec(private_status=True), metrics_secret="scrape")
    endpoint = found["PodMonitoring"][0]["spec"]["endpoints"][0]
    assert endpoint["authorization"]["credentials"]["secret"] == {"name": "scrape", "key": "key"}
    assert found["Role"][0]["rules"][0]["resourceNames"] == ["scrape"]
    assert found["RoleBinding"][0]["roleRef"]["name"] == found["Role"][0]["metadata"]["name"]
    namespaces = [subject["namespace"] for subject in found["RoleBinding"][0]["subjects"]]
    assert "gke-gmp-system" in namespaces  # where GKE runs them
    assert "authorization" not in objects()["PodMonitoring"][0]["spec"]["endpoints"][0]


def test_a_pod_starts_with_its_secrets_or_not_at_all() -> None:
    head, host = pods(objects(token_secret="hub", cluster_secret="ours"))
    for template in (head, host):
        variables = environment(template)
        assert variables["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
        assert variables["SERVING_CLUSTER_SECRET"] == {"secretKeyRef": {"name": "ours", "key": "secret"}}


@pytest.mark.parametrize(
    ("made", "gke"),
    [
        (
            with_engine(elsewhere("/weights/llama"), hf_config_path="/weights/llama"),
            {"weights_bucket": "bucket"},
        ),
        (with_engine(elsewhere("gs://bucket/llama"), tokenizer="gs://bucket/llama"), {}),
        (with_engine(elsewhere("gs://bucket/llama"), speculative_config={"model": "[ngram]"}), {}),
        (planned(), {"token_secret": None}),
    ],
)
def test_no_token_is_given_that_nothing_asks_for(made: Plan, gke: dict[str, Any]) -> None:
    assert all("HF_TOKEN" not in environment(template) for template in pods(objects(made, **gke)))


@pytest.mark.parametrize(
    "engine",
    [
        {"hf_config_path": LLAMA},
        {"tokenizer": LLAMA},
        {"spec_model": LLAMA},
        {"speculative_config": {"method": "eagle3", "model": LLAMA}},
        {"enable_lora": True, "lora_modules": ["sql=someone/sql-lora"]},
    ],
)
def test_what_vllm_reads_by_an_id_beside_weights_of_a_bucket_may_be_gated(engine: dict[str, Any]) -> None:
    found = objects(with_engine(elsewhere("gs://bucket/llama"), **engine))
    assert all("HF_TOKEN" in environment(template) for template in pods(found))


def test_only_the_autoscaler_may_change_the_cluster() -> None:
    found = objects()
    head, host = pods(found)
    accounts = {account["metadata"]["name"]: account for account in found["ServiceAccount"]}
    assert head["spec"]["serviceAccountName"] != host["spec"]["serviceAccountName"]
    for template in (head, host):
        assert template["spec"]["automountServiceAccountToken"] is False
        assert accounts[template["spec"]["serviceAccountName"]]["automountServiceAccountToken"] is False
    assert "autoscaler-token" not in mounts(head).values()
    options = found["RayService"][0]["spec"]["rayClusterConfig"]["autoscalerOptions"]
    token = next(
        mount
        for mount in options["volumeMounts"]
        if mount["name"] in volumes(head) and "token" in mount["name"]
    )
    assert token["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"  # where Ray reads it
    sources = volumes(head)[token["name"]]["projected"]["sources"]
    assert [next(iter(source)) for source in sources] == ["serviceAccountToken", "configMap", "downwardAPI"]


def test_containers_meet_the_restricted_pod_security_standard() -> None:
    found = objects(weights_bucket="bucket")
    head, host = pods(found)
    options = found["RayService"][0]["spec"]["rayClusterConfig"]["autoscalerOptions"]
    contexts = [options["securityContext"]]
    for template in (head, host):
        pod = template["spec"]["securityContext"]
        assert (pod["runAsNonRoot"], pod["runAsUser"], pod["seccompProfile"]) == (
            True,
            1000,
            {"type": "RuntimeDefault"},
        )
        kinds = {next(key for key in volume if key != "name") for volume in template["spec"]["volumes"]}
        assert kinds <= {"configMap", "csi", "emptyDir", "projected", "secret"}
        contexts += [container["securityContext"] for container in template["spec"]["containers"]]
    for context in contexts:
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True


def test_no_service_of_the_namespace_sets_a_variable_that_vllm_reads() -> None:
    found = objects(name="vllm")
    assert [template["spec"]["enableServiceLinks"] for template in pods(found)] == [False, False]


def test_where_only_root_may_open_the_devices_programs_are_root() -> None:
    _, host = pods(objects(run_as_user=0))
    assert host["spec"]["securityContext"]["runAsUser"] == 0
    assert host["spec"]["securityContext"]["runAsNonRoot"] is False
    assert host["spec"]["containers"][0]["securityContext"]["runAsNonRoot"] is False


def test_slices_that_need_a_capability_are_root_and_nothing_else_gets_it() -> None:
    found = objects(run_as_user=0, capabilities=["SYS_RESOURCE"])
    head, host = (template["spec"]["containers"][0] for template in pods(found))
    assert host["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_RESOURCE"]}
    assert head["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    with pytest.raises(ValidationError, match="set run_as_user: 0"):
        GkeSpec(capabilities=("SYS_RESOURCE",))


@pytest.mark.parametrize("gke", [{}, {"weights_bucket": "bucket"}])
def test_what_is_written_goes_to_volumes_that_have_a_limit(gke: dict[str, Any]) -> None:
    for template in pods(objects(elsewhere("/weights/llama") if gke else planned(), **gke)):
        variables = environment(template)
        written = {variables["HOME"], "/tmp", "/dev/shm"}  # noqa: S108
        written |= {path for name, path in variables.items() if name in ("HF_HOME", "VLLM_XLA_CACHE_PATH")}
        for path in written:
            assert any(path == mount or path.startswith(f"{mount}/") for mount in mounts(template))
        for volume in volumes(template).values():
            if "emptyDir" in volume:
                assert volume["emptyDir"]["sizeLimit"]


# Weights.


def gigabytes(size: str) -> int:
    return int(size.removesuffix("G"))


def test_downloaded_weights_have_room_on_the_host_s_disk() -> None:
    _, host = pods(objects(planned(**BIG)))
    assert gigabytes(volumes(host)["cache"]["emptyDir"]["sizeLimit"]) > 141
    resources = host["spec"]["containers"][0]["resources"]
    assert gigabytes(resources["requests"]["ephemeral-storage"]) > 150
    assert environment(host)["HF_HOME"].startswith("/cache/")


def test_mounted_weights_are_cached_in_a_volume_that_holds_them() -> None:
    head, host = pods(objects(elsewhere("/weights/llama"), weights_bucket="bucket"))
    assert mounts(host)["/weights"] == "weights"
    attributes = volumes(host)["weights"]["csi"]["volumeAttributes"]
    capacity = gigabytes(attributes["fileCacheCapacity"])
    cache = volumes(host)["gke-gcsfuse-cache"]["emptyDir"]
    assert 16 < capacity < gigabytes(cache["sizeLimit"])
    assert "max-size-mb" not in attributes["mountOptions"]
    assert (
        "uid=1000,gid=1000,file-mode=664,dir-mode=775" in attributes["mountOptions"]
    )  # who runs writes there what was compiled
    annotations = host["metadata"]["annotations"]
    assert [annotations[f"gke-gcsfuse/{of}-limit"] for of in ("cpu", "memory", "ephemeral-storage")] == [
        "0"
    ] * 3
    assert mounts(head)["/weights"] == "weights"
    assert volumes(head)["weights"]["csi"]["readOnly"] is True
    assert gigabytes(volumes(host)["cache"]["emptyDir"]["sizeLimit"]) < 16


def test_a_file_cache_that_memory_does_not_hold_is_on_disk() -> None:
    in_memory = pods(objects(elsewhere("/weights/llama"), weights_bucket="bucket"))[1]
    big = planned(
        **BIG | {"model": "/weights/big", "engine": {"max_model_len": 4096, "hf_config_path": BIG["model"]}}
    )
    on_disk = pods(objects(big, weights_bucket="bucket"))[1]
    assert volumes(in_memory)["gke-gcsfuse-cache"]["emptyDir"]["medium"] == "Memory"
    assert "medium" not in volumes(on_disk)["gke-gcsfuse-cache"]["emptyDir"]
    disk = on_disk["spec"]["containers"][0]["resources"]["requests"]["ephemeral-storage"]
    assert gigabytes(disk) > 141


def test_streamed_weights_take_rights_and_no_disk() -> None:
    text = render(application("app", GkeSpec(image="image"), [elsewhere("gs://models/llama")]), {})
    for role in ("objectViewer", "legacyBucketReader"):  # the streamer asks for the bucket itself too
        assert f"add-iam-policy-binding gs://models --role=roles/storage.{role}" in text
    assert "/subject/ns/default/sa/app-slice" in text
    assert " --disk-size=100 " in text


def test_a_tokenizer_of_another_bucket_takes_rights_on_it() -> None:
    made = with_engine(elsewhere("gs://models/llama"), tokenizer="gs://tokenizers/llama")
    text = render(application("app", GkeSpec(image="image"), [made]), {})
    for bucket in ("models", "tokenizers"):
        assert f"add-iam-policy-binding gs://{bucket} --role=roles/storage.objectViewer" in text


def test_compiled_programs_are_kept_by_version_and_host() -> None:
    _, several = pods(objects(weights_bucket="bucket"))
    _, alone = pods(objects(planned(slice={"generation": "v6e", "topology": "2x2"}), weights_bucket="bucket"))
    assert (
        environment(several)["VLLM_XLA_CACHE_PATH"]
        == "/weights/xla/tpu-inference-0.26.0/v6e-16/host-$(HOST_INDEX)"
    )
    assert environment(alone)["VLLM_XLA_CACHE_PATH"] == "/weights/xla/tpu-inference-0.26.0/v6e-4"
    order = [entry["name"] for entry in several["spec"]["containers"][0]["env"]]
    assert order.index("HOST_INDEX") < order.index(
        "VLLM_XLA_CACHE_PATH"
    )  # or Kubernetes leaves $(...) as it is


# What the head keeps.


RESPONSES = {"responses_store": {"path": "/var/lib/tpu-serving/responses.sqlite"}}


@pytest.mark.parametrize(
    ("router", "store", "key"),
    [
        (RESPONSES, None, "router.responses_store"),
        ({}, {"folder": "/var/lib/tpu-serving"}, "store.folder"),
        ({}, {"folder": "/tmp/../data"}, "store.folder"),  # noqa: S108
        ({}, {"folder": "/tmp/store", "files": "/data/files"}, "store.files"),  # noqa: S108
        ({}, {"folder": "/tmpfiles"}, "store.folder"),  # noqa: S108
        ({}, {"folder": "store"}, "store.folder"),
    ],
)
def test_a_path_that_no_volume_of_the_head_holds_is_refused(
    router: dict[str, Any], store: dict[str, Any] | None, key: str
) -> None:
    made = StoreSpec.model_validate(store) if store else None
    with pytest.raises(ConfigError, match=f"{key} is .* name a PersistentVolumeClaim in gke.store_claim"):
        objects(router=RouterSpec.model_validate(router), store=made)


def test_what_the_head_keeps_is_on_its_claim() -> None:
    made = StoreSpec(folder="/var/lib/tpu-serving")
    head, host = pods(
        objects(router=RouterSpec.model_validate(RESPONSES), store=made, store_claim="serving-store")
    )
    assert mounts(head)["/var/lib/tpu-serving"] == "store"
    assert volumes(head)["store"]["persistentVolumeClaim"] == {"claimName": "serving-store"}
    assert "store" not in volumes(host)
    assert "store" not in volumes(pods(objects(store=StoreSpec(folder="/tmp/store")))[0])  # noqa: S108


def test_a_store_in_a_database_and_a_bucket_has_a_password_and_rights() -> None:
    made = StoreSpec(database="postgresql://user@db/serving", files="gs://batch-files/x")
    text = render(
        application("app", GkeSpec(image="image", database_secret="postgres"), [planned()], store=made), {}
    )
    assert "add-iam-policy-binding gs://batch-files --role=roles/storage.objectUser" in text
    assert "/subject/ns/default/sa/app-head" in text
    assert "postgres (key password)" in text
    head, host = pods(objects(store=made, database_secret="postgres"))
    assert environment(head)["PGPASSWORD"] == {"secretKeyRef": {"name": "postgres", "key": "password"}}
    assert "PGPASSWORD" not in environment(host)


# Slices.


def test_a_compiler_has_the_host_s_cores() -> None:
    _, host = pods(objects())
    resources = host["spec"]["containers"][0]["resources"]
    assert resources["requests"]["cpu"] == "24"
    assert "cpu" not in resources["limits"]
    assert environment(host)["NUM_PRECOMPILE_WORKERS"] == "16"
    small = pods(objects(planned(slice={"generation": "v6e", "topology": "1x1"}, model="Qwen/Qwen3-4B")))[1]
    assert environment(small)["NUM_PRECOMPILE_WORKERS"] == "5"


def test_a_machine_of_unknown_size_is_asked_for_what_is_known() -> None:
    _, host = pods(objects(planned(slice={"generation": "v7x", "topology": "1x1x1"})))
    resources = host["spec"]["containers"][0]["resources"]
    assert resources["requests"] | {"ephemeral-storage": ""} == {
        "google.com/tpu": "1",
        "cpu": "6",
        "memory": "225G",
        "ephemeral-storage": "",
    }


@pytest.mark.parametrize(
    ("slice_", "least", "most"),
    [
        # GKE leaves 43.4, 698.7 and 933.9 GB of these machines to pods, its own among them.
        ({"generation": "v5e", "topology": "1x1"}, 36, 42),
        ({"generation": "v6e", "topology": "4x4"}, 680, 697),
        ({"generation": "v7x", "topology": "2x2x1"}, 900, 932),
    ],
)
def test_a_slice_has_the_memory_that_gke_leaves(slice_: dict[str, str], least: int, most: int) -> None:
    small = {"model": "Qwen/Qwen3-4B", "slice": slice_}
    _, host = pods(objects(planned(**small)))
    asked = gigabytes(host["spec"]["containers"][0]["resources"]["limits"]["memory"])
    assert least <= asked <= most
    _, mounting = pods(objects(planned(**small), weights_bucket="bucket"))
    with_cache = gigabytes(mounting["spec"]["containers"][0]["resources"]["limits"]["memory"])
    in_memory = volumes(mounting)["gke-gcsfuse-cache"]["emptyDir"].get("medium") == "Memory"
    assert with_cache == (asked - 11 if in_memory else asked)


def test_ray_s_object_store_is_in_memory_on_the_smallest_machine_too() -> None:
    """Ray takes 30% of the memory, or 10 GB where /dev/shm has less, and goes to the disk below /tmp where it has less than that."""
    _, host = pods(objects(planned(model="Qwen/Qwen3-4B", slice={"generation": "v5e", "topology": "1x1"})))
    shared = gigabytes(volumes(host)["shm"]["emptyDir"]["sizeLimit"])
    memory = gigabytes(host["spec"]["containers"][0]["resources"]["limits"]["memory"])
    assert memory > shared >= min(0.3 * memory, REQUIRE_SHM_SIZE_THRESHOLD / 10**9)


def test_the_webhook_takes_kuberay_s_number_of_a_slice_of_one_host_too() -> None:
    # It does where a pod has both of KubeRay's indices. KubeRay gives such a pod that of the slice alone.
    _, alone = pods(objects(planned(slice={"generation": "v6e", "topology": "2x2"})))
    assert alone["metadata"]["labels"] == {"app": "app", "ray.io/replica-host-index": "0"}
    _, several = pods(objects())
    assert several["metadata"]["labels"] == {"app": "app"}


def test_the_environment_is_the_pod_s_own() -> None:
    _, host = pods(objects(env={"LIBTPU_INIT_ARGS": "--xla_tpu_x=1", "NUM_PRECOMPILE_WORKERS": "2"}))
    assert environment(host)["LIBTPU_INIT_ARGS"] == "--xla_tpu_x=1"
    assert environment(host)["NUM_PRECOMPILE_WORKERS"] == "2"


def test_a_slice_may_get_the_engine_of_another_pool_of_its_shape() -> None:
    """Ray places engines on any slice of the shape: it has room for the largest, and no model's environment."""
    small = planned(name="small", engine_env={"VLLM_LOGGING_PREFIX": "x"})
    large = planned(name="large", model=BIG["model"])
    _, first, second = pod_templates(objects(small, large)["RayService"][0])
    _, alone = pods(objects(large))
    for host in (first, second):
        assert "VLLM_LOGGING_PREFIX" not in environment(host)
        assert host["spec"]["volumes"] == alone["spec"]["volumes"]
    requests = [host["spec"]["containers"][0]["resources"] for host in (first, second, alone)]
    assert requests[0] == requests[1] == requests[2]
    lines = [
        line
        for line in render(application("app", GkeSpec(image="image"), [small, large]), {}).splitlines()
        if "tpu-topology" in line
    ]
    assert len({line.partition("--disk-size=")[2].split()[0] for line in lines if line.startswith("#")}) == 1


def test_hosts_carry_the_pool_that_they_are_bought_for() -> None:
    plans = [planned(slice=BIG["slice"] | {"capacity": way}) for way in ("spot", "on-demand")]
    (service,) = objects(*plans)["RayService"]
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert [group["labels"]["tpu-serving/pool"] for group in groups] == [made.pool for made in plans]
    assert {group["labels"]["ray.io/tpu-pod-type"] for group in groups} == {"v6e-16"}


def test_values_are_what_the_yaml_says() -> None:
    """Kubernetes takes $(NAME) for another variable's value, and $$ for a $."""
    found = objects(
        env={"OF_SLICES": "$(NODE_IP) a$b"},
        head_env={"OF_THE_HEAD": "$$(x)"},
    )
    head, worker = (template["spec"]["containers"][0] for template in pod_templates(found["RayService"][0]))
    said = {entry["name"]: entry.get("value") for entry in [*head["env"], *worker["env"]]}
    assert said["OF_SLICES"] == "$$(NODE_IP) a$$b"
    assert said["OF_THE_HEAD"] == "$$$$(x)"
    assert said["VBAR_CONTROL_SERVICE_URL"].startswith("$(NODE_IP)")  # the manifest's own are references


def test_spans_of_routers_and_slices_go_to_a_collector_with_its_key() -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:4318"}
    found = objects(env=endpoint, head_env=endpoint, tracing_secret="collector")
    for template in pods(found):
        variables = environment(template)
        assert tracing.endpoint(variables) == "https://collector:4318/v1/traces"
        assert variables["OTEL_EXPORTER_OTLP_HEADERS"] == {
            "secretKeyRef": {"name": "collector", "key": "headers"}
        }
    head, host = pods(objects(head_env={"HTTPS_PROXY": "http://proxy:3128"}))
    assert "HTTPS_PROXY" in environment(head)
    assert "HTTPS_PROXY" not in environment(host)


def test_locked_memory_is_raised_before_ray_starts() -> None:
    # KubeRay puts its own command behind `&&`; `|| true` keeps a host that refuses from losing the limit of open files.
    _, host = pods(objects())
    assert host["spec"]["containers"][0]["command"] == ["{ ulimit -l 68719476736 || true; }"]


def test_a_head_fits_a_node_of_eight_vcpus() -> None:
    found = objects(weights_bucket="bucket")
    head, _ = pods(found)
    options = found["RayService"][0]["spec"]["rayClusterConfig"]["autoscalerOptions"]
    asked = float(head["spec"]["containers"][0]["resources"]["requests"]["cpu"])
    asked += int(options["resources"]["requests"]["cpu"].removesuffix("m")) / 1000
    memory = head["spec"]["containers"][0]["resources"]["limits"]["memory"]
    shared = {volume["name"]: volume for volume in head["spec"]["volumes"]}["shm"]["emptyDir"]["sizeLimit"]
    assert int(shared.removesuffix("Gi")) >= 0.3 * int(
        memory.removesuffix("Gi")
    )  # Ray's object store, else in /tmp
    assert asked + 0.25 < 7.91 - 0.7  # the FUSE sidecar's request; what GKE leaves of 8, without its own pods


def test_a_changed_image_does_not_double_the_slices() -> None:
    assert objects()["RayService"][0]["spec"]["upgradeStrategy"] == {"type": "None"}


def test_a_model_at_the_end_leaves_the_worker_groups_before_it_as_they_are() -> None:
    # KubeRay adds groups to a running cluster only then.
    plans = [planned(), planned(name="two"), planned(name="three", slice=BIG["slice"])]
    cluster = objects(*plans)["RayService"][0]["spec"]["rayClusterConfig"]
    for count in (1, 2):
        fewer = objects(*plans[:count])["RayService"][0]["spec"]["rayClusterConfig"]
        assert fewer["workerGroupSpecs"] == cluster["workerGroupSpecs"][:count]
        assert fewer["headGroupSpec"] == cluster["headGroupSpec"]
    bucket = [
        objects(*some, weights_bucket="bucket")
        for some in ([plans[0]], [plans[0], elsewhere("/weights/llama")])
    ]
    first, second = (found["RayService"][0]["spec"]["rayClusterConfig"] for found in bucket)
    assert first["headGroupSpec"] == second["headGroupSpec"]
    priorities = [group.get("priority", 0) for group in cluster["workerGroupSpecs"]]
    assert priorities == [0, -1, -2]


def test_what_serves_is_not_put_away_for_other_work() -> None:
    found = objects(planned(replicas={"min": 2, "max": 3}), planned(replicas={"min": 0, "max": 3}))
    budgets = {each["metadata"]["name"]: each["spec"] for each in found["PodDisruptionBudget"]}
    assert budgets.pop("app-head")["minAvailable"] == 1
    assert budgets.pop("app--redis") == {
        "minAvailable": 1,
        "selector": {"matchLabels": found["StatefulSet"][0]["spec"]["template"]["metadata"]["labels"]},
    }
    pool, none = budgets.values()
    assert pool["minAvailable"] == 2 * 4
    assert none["minAvailable"] == 0  # or a former minimum's would stay
    assert pool["selector"]["matchLabels"]["ray.io/group"].endswith("v6e-4x4")
    for template in pods(found):
        assert (
            template["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
        )
        assert template["spec"]["priorityClassName"] == found["PriorityClass"][0]["metadata"]["name"]


def test_kueue_admits_the_service_as_an_elastic_job() -> None:
    metadata = objects(kueue_queue="tpus")["RayService"][0]["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "tpus"
    assert metadata["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}
    assert "annotations" not in objects()["RayService"][0]["metadata"]
    app = application("app", GkeSpec(image="image", kueue_queue="tpus"), [planned()])
    assert "# KubeRay 1.6.1 or 1.6.2" in render(app, {})


@pytest.mark.parametrize(
    ("gke", "options"),
    [
        (
            {},
            {
                "redisAddress": "app--redis:6379",
                "redisPassword": {
                    "valueFrom": {"secretKeyRef": {"name": "serving-cluster", "key": "secret"}}
                },
            },
        ),
        ({"control_store": None}, None),
        ({"control_store": "rocksdb"}, {"backend": "rocksdb"}),
        ({"control_store": "redis:6379"}, {"redisAddress": "redis:6379"}),
        (
            {"control_store": "redis:6379", "redis_secret": "redis"},
            {
                "redisAddress": "redis:6379",
                "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
            },
        ),
    ],
)
def test_the_control_store_is_kept_where_it_is_asked_to(
    gke: dict[str, str], options: dict[str, Any] | None
) -> None:
    cluster = objects(**gke)["RayService"][0]["spec"]["rayClusterConfig"]
    assert cluster.get("gcsFaultToleranceOptions") == options


def test_the_manifest_brings_a_redis_that_keeps_what_it_was_told() -> None:
    found = objects()
    (store,) = found["StatefulSet"]
    (container,) = store["spec"]["template"]["spec"]["containers"]
    assert "--appendonly yes" in container["command"][-1]
    (claim,) = store["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == container["volumeMounts"][0]["name"]
    services = {service["metadata"]["name"]: service["spec"] for service in found["Service"]}
    assert services["app--redis"]["selector"] == store["spec"]["template"]["metadata"]["labels"]
    (policy,) = [each for each in found["NetworkPolicy"] if each["metadata"]["name"] == "app--redis"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": {"app": "app"}}}]}]
    for other in (None, "rocksdb", "redis.default:6379"):
        assert "StatefulSet" not in objects(control_store=other)


# What is refused.


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("???", "has neither letters nor digits"),
        ("70b", "starts with no letter"),
        ("Kubernetes", "is that of Kubernetes' own Service"),
        ("a" * 48, "has 48 characters; KubeRay takes 47"),
        ("llama-serve-svc", "ends as names of KubeRay's own Services do"),
        ("llama.head_svc", "ends as names of KubeRay's own Services do"),
    ],
)
def test_a_name_that_kubernetes_refuses_is_refused_here(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        objects(name=name)


def test_hosts_of_a_slice_find_each_other_by_a_name_that_the_webhook_does_not_clip() -> None:
    """KubeRay's Service is NAME-xxxxx-headless; the TPU webhook writes the last 50 characters of it into TPU_WORKER_HOSTNAMES."""
    several = planned(slice={"generation": "v6e", "topology": "4x4"})
    assert len(objects(several, name="a" * 35)["Service"][0]["metadata"]["name"] + "-xxxxx-headless") == 50
    with pytest.raises(ConfigError, match="has 36 characters; with slices of several hosts it may have 35"):
        objects(several, name="a" * 36)


def test_the_longest_name_fits_everywhere() -> None:
    name = "a" * 47
    one_host = {"generation": "v6e", "topology": "2x2"}
    found = objects(*[planned(name="b" * 80, slice=one_host)] * 2, name=name)
    head, _ = pods(found)
    # KubeRay clips service accounts at 50, GKE takes 40 for a node pool and says so as a label.
    assert len(head["spec"]["serviceAccountName"]) <= 50
    assert len(head["spec"]["nodeSelector"]["cloud.google.com/gke-nodepool"]) <= 40
    assert len(found["StatefulSet"][0]["metadata"]["name"]) <= 52  # a hash stands behind it in a label
    groups = [
        group["groupName"] for group in found["RayService"][0]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    ]
    assert len(set(groups)) == 2
    assert all(len(f"{group}-99") <= 40 for group in groups)


def test_an_image_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"gke\.image names no image"):
        application("app", GkeSpec(), [planned()])


def test_a_door_that_the_service_does_not_lead_to_is_refused() -> None:
    router = RouterSpec.model_validate({"door": "direct"})
    with pytest.raises(
        ConfigError, match=r"router\.door is direct, and the manifest's Service leads to HAProxy"
    ):
        application("app", GkeSpec(image="r/tpu"), [planned()], router=router)


def test_flex_start_of_v4_is_refused() -> None:
    v4 = planned(slice={"generation": "v4", "topology": "2x2x1", "capacity": ["flex-start", "spot"]})
    with pytest.raises(ConfigError, match="Google sells no flex-start of v4"):
        objects(v4)


def test_weights_on_no_bucket_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gke\.weights_bucket is mounted; name a bucket there"):
        objects(elsewhere("/weights/llama"))


@pytest.mark.parametrize(
    "engine", [{"enable_lora": True, "lora_modules": ["a=/weights/a"]}, {"tokenizer": "/weights/llama"}]
)
def test_what_a_model_reads_beside_its_weights_takes_the_bucket_too(engine: dict[str, Any]) -> None:
    made = with_engine(planned(), **engine)
    with pytest.raises(ConfigError, match=r"/weights/\w+ is read from /weights.*name a bucket there"):
        objects(made)
    assert "/weights" in mounts(pods(objects(made, weights_bucket="bucket"))[1])


def test_the_head_reads_a_configuration_from_the_bucket_beside_streamed_weights() -> None:
    made = with_engine(elsewhere("gs://bucket/llama"), hf_config_path="/weights/llama")
    head, host = pods(objects(made, weights_bucket="bucket"))
    assert ("/weights" in mounts(head), "/weights" in mounts(host)) == (True, True)


def test_folders_that_no_volume_holds_are_named_on_top() -> None:
    app = application("app", GkeSpec(image="image"), [elsewhere("/models/llama")])
    assert "# In the image, for no volume of the manifest holds them: /models/llama\n" in render(app, {})
    assert "# In the image" not in render(application("app", GkeSpec(image="image"), [planned()]), {})


def test_metrics_are_scraped_below_the_route_prefix() -> None:
    app = application("app", GkeSpec(image="image"), [planned()], route_prefix="/llm")
    scrapes = [made for made in objects_of(render(app, {})) if made["kind"] == "PodMonitoring"]
    assert scrapes[0]["spec"]["endpoints"][0]["path"] == "/llm/metrics"


HOOK = {
    "controller_options": {
        "runtime_env": {"env_vars": {"RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": INSTALL, "OTHER": "1"}}
    }
}
TLS = {"controller_options": {"runtime_env": {"env_vars": {"SERVING_TLS_CERT": "/etc/tls.crt"}}}}
LOGS = {"logging_config": {"logs_dir": "/var/log/serve"}}


@pytest.mark.parametrize(
    ("document", "port", "says"),
    [
        ({"http_options": {"host": "127.0.0.1"}}, 8000, r"host is 127\.0\.0\.1, .*set host: 0\.0\.0\.0"),
        ({"http_options": {"host": "localhost"}}, 8000, "host is localhost"),
        ({}, 8265, "port is 8265, which Ray's dashboard has"),
        ({}, 6379, "port is 6379, which Ray's control store has"),
        ({}, 8500, "port is 8500, which the proxy that Serve falls back to has"),
        ({}, 10001, "port is 10001, which Ray's clients has"),
        ({}, 44217, "port is 44217, which Ray's autoscaler has"),
        ({}, 30000, "port is 30000, which a router of Serve's has"),
        ({}, 12000, "port is 12000, which a worker of Ray's has"),
        ({"proxy_location": "Disabled"}, 8000, "proxy_location is Disabled, and nobody gets in"),
        (
            {"applications": [{"name": "app", "route_prefix": None}]},
            8000,
            "route_prefix of app is null, and Serve sends it no request",
        ),
        (TLS, 8000, "sets SERVING_TLS_CERT, and the head's pod holds no certificate"),
        (
            {"http_options": {"ssl_keyfile": "/etc/tls.key"}},
            8000,
            r"http_options\.ssl_keyfile is set, and the head's pod holds no certificate",
        ),
        (LOGS, 8000, "logs_dir is /var/log/serve, which no volume of the pods holds"),
        ({"applications": [{"name": "app", **LOGS}]}, 8000, "logs_dir is /var/log/serve"),
        ({"controller_options": {"runtime_env": None}}, 8000, f"IMPORT_PATH: {INSTALL}"),
    ],
)
def test_what_serve_can_not_do_in_the_pods_is_refused(document: dict[str, Any], port: int, says: str) -> None:
    app = application("app", GkeSpec(image="image"), [planned()], port=port)
    with pytest.raises(ConfigError, match=says):
        serve_config.check(app, HOOK | document)


def test_logs_in_a_volume_of_the_pods_are_taken() -> None:
    app = application("app", GkeSpec(image="image"), [planned()])
    folder = "/tmp/serve"  # noqa: S108
    serve_config.check(app, HOOK | {"logging_config": {"logs_dir": folder, "log_level": "INFO"}})
    serve_config.check(app, HOOK | {"logging_config": None, "http_options": {"ssl_keyfile": None}})


def test_a_certificate_that_no_volume_holds_is_refused_on_the_head_too() -> None:
    gke = GkeSpec(image="image", head_env={"SERVING_TLS_CERT": "/etc/tls.crt"})
    with pytest.raises(
        ConfigError, match=r"gke\.head_env sets SERVING_TLS_CERT, and the head's pod holds no"
    ):
        serve_config.check(application("app", gke, [planned()]), HOOK)


@pytest.mark.parametrize("place", ["controller_options", "applications"])
def test_a_token_by_value_is_refused(place: str) -> None:
    app = application("app", GkeSpec(image="image"), [planned()])
    token: Any = {"runtime_env": {"env_vars": {"HF_TOKEN": "hf_x"}}}
    document = HOOK | {place: token if place == "controller_options" else [token]}
    with pytest.raises(ConfigError, match=r"sets HF_TOKEN, .* name a secret in gke\.token_secret"):
        serve_config.check(app, document)


def test_a_variable_of_the_engine_in_a_runtime_env_is_refused() -> None:
    """Published RayServices of vLLM set some there."""
    app = application("app", GkeSpec(image="image"), [planned()])
    options = {
        "runtime_env": {"env_vars": {"TPU_MULTIHOST_BACKEND": "ray", "RAY_SERVE_ENABLE_HA_PROXY": "1"}}
    }
    with pytest.raises(
        ConfigError, match="a runtime_env sets TPU_MULTIHOST_BACKEND; it follows from the slice"
    ):
        serve_config.check(app, HOOK | {"applications": [options]})


def behind(database: str) -> Application:
    store = StoreSpec(database=database, files="gs://b/x")
    return application("app", GkeSpec(image="image"), [planned()], store=store)


@pytest.mark.parametrize("database", ["postgresql://user:p%40ss@db:5432/n", "postgres://u@db/n?password=x"])
def test_a_password_by_value_is_refused(database: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.database has a password, .*gke\.database_secret"):
        serve_config.check(behind(database), HOOK)


@pytest.mark.parametrize(
    "database", ["postgresql://user@db:5432/n", "postgresql://db:5432/n", "postgresql://u@[::1]:5432/n"]
)
def test_a_database_without_a_password_is_taken(database: str) -> None:
    serve_config.check(behind(database), HOOK)


def test_the_door_keeps_connections_for_longer_than_google_s_load_balancer() -> None:
    """Else the load balancer takes one that is being closed, and answers 502."""
    gateway = {"hostname": "llm.example.com", "certificate_secret": "tls"}
    balanced = application("app", GkeSpec.model_validate({"image": "image", "gateway": gateway}), [planned()])
    alone = application("app", GkeSpec(image="image"), [planned()])

    def rendered(app: Application, **options: Any) -> Any:
        service = manifest.ray_service(app, {"http_options": {"port": 8000} | options})
        return yaml.safe_load(service["spec"]["serveConfigV2"])["http_options"]

    assert rendered(alone) == {"port": 8000}
    assert rendered(balanced) == {"port": 8000, "keep_alive_timeout_s": 620}
    assert rendered(balanced, keep_alive_timeout_s=900)["keep_alive_timeout_s"] == 900
    short = HOOK | {"http_options": {"keep_alive_timeout_s": 90}}
    serve_config.check(alone, short)
    with pytest.raises(ConfigError, match="keep_alive_timeout_s is 90, and Google's load balancer"):
        serve_config.check(balanced, short)


@pytest.mark.parametrize(("port", "opened"), [(443, "443"), (8000, None)])
def test_a_low_port_may_be_opened_by_who_is_not_root(port: int, opened: str | None) -> None:
    head, _ = pods(objects(port=port))
    values = [sysctl["value"] for sysctl in head["spec"]["securityContext"].get("sysctls", ())]
    assert values == ([opened] if opened else [])


def test_slices_of_one_host_are_whole_without_the_hook() -> None:
    one = planned(slice={"generation": "v6e", "topology": "2x2"})
    serve_config.check(application("app", GkeSpec(image="image"), [one]), {})
    serve_config.check(application("app", GkeSpec(image="image"), [planned()]), HOOK)
    by_pod = GkeSpec(image="image", head_env={"RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": INSTALL})
    serve_config.check(application("app", by_pod, [planned()]), {})


@pytest.mark.parametrize(
    ("gke", "says"),
    [
        ({"token_secret": "My_Secret"}, "small letters, digits, hyphens and dots"),
        ({"cluster_secret": ""}, "small letters"),
        ({"store_claim": "claim/1"}, "small letters"),
        ({"kueue_queue": "my queue"}, "small letters"),
        ({"cluster": "My Cluster"}, "a cluster has up to 40 small letters"),
        (
            {"gateway": {"hostname": "https://llm.example.com", "certificate_secret": "tls"}},
            "without https://",
        ),
        ({"gateway": {"hostname": "LLM.example.com", "certificate_secret": "tls"}}, "in small letters"),
        ({"gateway": {"hostname": "llm.example.com", "certificate_secret": "a b"}}, "small letters"),
    ],
)
def test_names_that_kubernetes_does_not_take_are_refused(gke: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        GkeSpec.model_validate(gke)


def test_names_that_kubernetes_takes_are_taken() -> None:
    gateway = {"hostname": "*.llm.example.com", "certificate_secret": "tls.2026"}
    GkeSpec.model_validate({"token_secret": "a.b-1", "cluster": "c", "kueue_queue": "q", "gateway": gateway})


@pytest.mark.parametrize(
    "image",
    ["r/i 1", "https://r/i", "r/i:1\n", "r/Serving:1", "Serving", "r//i", "r/i:", "r/i@sha256:1f", "r/ï"],
)
def test_an_image_that_is_no_reference_is_refused(image: str) -> None:
    with pytest.raises(ConfigError, match="is no reference of an image"):
        application("app", GkeSpec(image=image), [planned()])


@pytest.mark.parametrize("image", ["i", "R/i", "r.io:5000/a/b__c/d--e.f:v1.0_X", f"r/i:1@sha256:{'0f' * 32}"])
def test_a_reference_of_an_image_is_taken(image: str) -> None:
    assert application("app", GkeSpec(image=image), [planned()]).image == image


@pytest.mark.parametrize(
    ("variable", "way"),
    [
        ("TPU_NAME", "Google's TPU webhook sets it"),
        ("TPU_PROCESS_ADDRESSES", "Google's TPU webhook sets it"),
        ("TPU_VISIBLE_CHIPS", "an engine has all chips of its slice's hosts"),
        ("RAY_ADDRESS", "KubeRay sets it"),
        ("RAY_AUTH_MODE", "KubeRay sets it"),
        ("HF_TOKEN", "name a secret in gke.token_secret"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "name a secret in gke.tracing_secret"),
        ("HOST_INDEX", "the manifest sets it"),
        ("NODE_IP", "the manifest sets it"),
    ],
)
@pytest.mark.parametrize("key", ["env", "head_env"])
def test_a_variable_that_others_set_is_refused(key: str, variable: str, way: str) -> None:
    with pytest.raises(ConfigError, match=f"gke.{key} sets {variable}; leave it out: {way}"):
        objects(**{key: {variable: "1"}})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("weights_bucket", "gs://my-bucket", "the name of a bucket is needed"),
        ("weights_bucket", "my-bucket/llama", "the name of a bucket is needed"),
        ("zone", "us-east5", "a zone is needed, as us-east5-b"),
        ("region", "us-east5-b", "a region is needed, as us-east5"),
        ("run_as_user", 2**31, "less than or equal to 2147483647"),
        ("kueue_queue", "q" * 64, "at most 63 characters"),
        ("control_store", "redis.example.com:66379", "neither redis, rocksdb nor host:port"),
    ],
)
def test_what_only_gke_would_refuse_is_refused_here(key: str, value: object, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        GkeSpec.model_validate({key: value})


@pytest.mark.parametrize("name", ["CAP_SYS_RESOURCE", "sys_resource", ""])
def test_a_capability_that_no_container_could_start_with_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="write it as SYS_RESOURCE"):
        GkeSpec(run_as_user=0, capabilities=(name,))


@pytest.mark.parametrize("zone", ["us-east5-b", "northamerica-northeast1-a", "us-central1-ai1a"])
def test_googles_zones_are_zones(zone: str) -> None:
    assert GkeSpec(zone=zone).zone == zone


def test_a_variable_that_the_plan_derives_is_refused() -> None:
    copies = planned(parallel={"data": 2, "tensor": 2}, slice={"generation": "v6e", "topology": "2x2"})
    assert copies.environment
    with pytest.raises(ConfigError, match=r"which the plan of .* derives; leave it out"):
        objects(copies, env=dict.fromkeys(copies.environment, "0"))


@pytest.mark.parametrize(
    ("variable", "way"),
    [
        ("MODEL_IMPL_TYPE", "set engine.model_impl"),
        ("NEW_MODEL_DESIGN", "it follows from parallel"),
        ("MOE_REQUANTIZE_WEIGHT_DTYPE", "set it in the model's engine_env, with which the plan counts"),
    ],
)
def test_a_variable_of_a_recipe_that_would_change_the_engine_behind_the_plan_is_refused(
    variable: str, way: str
) -> None:
    with pytest.raises(ConfigError, match=f"gke.env sets {variable}; {way}"):
        objects(env={variable: "1"})


@pytest.mark.parametrize(
    "folder",
    [
        "",
        "/etc",
        "/tmp",  # noqa: S108
        "/usr/bin",
        "/etc/ssl/certs",
        "/var/lib/tpu-serving",
        "/weights/keys",
        "/etc/x/..",
        "/a/b:c",
    ],
)
def test_keys_that_would_hide_what_the_pod_has_are_refused(folder: str) -> None:
    """Two volumes on one path are also refused by Kubernetes, and with them the whole pod."""
    with pytest.raises(ConfigError, match=r"take a path such as /etc/serving/keys\.yaml"):
        objects(router=RouterSpec(keys_file=f"{folder}/keys.yaml"), store_claim="claim")


@pytest.mark.parametrize(
    "text", ["y", "N", "08", "0o17", "1e3", "12E05", ".5e3", "+1e3", "1_0", "-_08", "0_x8"]
)
def test_text_stays_text_for_kubectl_and_kuberay(text: str) -> None:
    """Go's YAML sees booleans and numbers where PyYAML writes no quotes."""
    rendered = render(
        application("app", GkeSpec(image="image", env={"A": text}), [planned()]), {"args": {"b": text}}
    )
    assert rendered.count(f" value: '{text}'\n") == 1
    assert rendered.count(f" b: '{text}'\n") == 1


# Kustomize.


def test_a_base_holds_the_same_objects_one_file_a_kind() -> None:
    plans = [planned(replicas={"min": 1, "max": 2})]
    gke = GkeSpec(image="image", weights_bucket="bucket", zone="us-east5-b")
    app = application("app", gke, plans)
    whole = objects_of(render(app, {"a": 1}))
    files = kustomize(app, {"a": 1})
    base = yaml.safe_load(files["kustomization.yaml"])
    assert problems(base) == []
    assert sorted(base["resources"]) == sorted(files.keys() - {"kustomization.yaml"})
    parts = {name: objects_of(files[name]) for name in base["resources"]}
    for name, resources in parts.items():
        assert {f"{resource['kind'].lower()}.yaml" for resource in resources} == {name}
    assert sorted(map(str, (each for part in parts.values() for each in part))) == sorted(map(str, whole))
    assert "gcloud container node-pools create" in files["kustomization.yaml"]
