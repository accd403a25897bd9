import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from serving import config
from serving.config import serve_keys
from serving.errors import ConfigError

pytestmark = pytest.mark.unit

DEPLOYMENTS = sorted((Path(__file__).parent.parent / "deployments").glob("*.yaml"))
ARGS: dict[str, Any] = {
    "models": [
        {
            "name": "llama",
            "model": "meta-llama/Llama-3.1-8B-Instruct",
            "slice": {"generation": "v6e", "topology": "2x4", "hosts": 2},
        }
    ]
}

LISTED = b"applications:\n  - {import_path: serving.app:build, args: {models: [{model: m, slice: *v6e}]}}\n"
ONE = b"applications: [{import_path: serving.app:build, args: {models: [{model: m, slice: {generation: v6e, topology: 2x2}}]}}]\n"
LISTED_TWICE = b"applications:\n" + 2 * (
    b"  - {import_path: serving.app:build, args: {models: [{model: m, slice: {generation: v6e, topology: 2x2}}]}}\n"
)


def args(**changes: Any) -> dict[str, Any]:
    changed = copy.deepcopy(ARGS)
    changed["models"][0] |= changes
    return changed


def without(*path: str) -> dict[str, Any]:
    changed = copy.deepcopy(ARGS)
    parent = changed["models"][0]
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    return changed


def refusal(raw: Any) -> str:
    with pytest.raises(ConfigError) as error:
        config.parse(raw)
    return error.value.message


def test_what_is_left_out_has_its_default() -> None:
    model = config.parse(ARGS).models[0]
    assert (model.replicas.min, model.replicas.max) == (1, 1)
    assert (model.parallel.tensor, model.parallel.pipeline) == (None, None)
    assert (model.engine, model.drain_s, model.stall_s) == ({}, 60, 30)
    assert config.parse(ARGS).router.replicas == 1


def test_a_model_without_a_name_is_called_by_its_id() -> None:
    assert config.parse(without("name")).models[0].name == "meta-llama/Llama-3.1-8B-Instruct"
    assert config.parse(args(name="")).models[0].name == "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    ("replicas", "found"), [(3, (3, 3)), ({"min": 0, "max": 4}, (0, 4)), ({"max": 2}, (1, 2))]
)
def test_replicas_are_a_number_or_a_range(replicas: Any, found: tuple[int, int]) -> None:
    spec = config.parse(args(replicas=replicas)).models[0].replicas
    assert (spec.min, spec.max) == found


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (ARGS | {"modles": []}, "modles: unknown key; did you mean 'models'?"),
        (ARGS | {"router": {"replica": 2}}, "router.replica: unknown key; did you mean 'replicas'?"),
        (args(replica=1), "models.0.replica: unknown key; did you mean 'replicas'?"),
        (
            args(slice={"generation": "v6e", "topolgy": "2x4"}),
            "models.0.slice.topolgy: unknown key; did you mean 'topology'?",
        ),
        (args(replicas={"mim": 1}), "models.0.replicas.mim: unknown key; did you mean 'min'?"),
        (args(parallel={"tensors": 8}), "models.0.parallel.tensors: unknown key; did you mean 'tensor'?"),
        (
            args(gpu=8),
            "models.0.gpu: unknown key; known here: cool_down_s, drain_s, engine, engine_env, model, name",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(raw: Any, says: str) -> None:
    assert says in refusal(raw)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({}, "models: missing"),
        (without("model"), "models.0.model: missing"),
        (without("slice"), "models.0.slice: missing"),
        (without("slice", "topology"), "models.0.slice.topology: missing"),
        ({"models": []}, "models: no model is listed; give at least one"),
    ],
)
def test_a_missing_key_is_named(raw: Any, says: str) -> None:
    assert says in refusal(raw)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ([], "args: a mapping is needed, one `key: value` a line (got [])"),
        ({"models": {"name": "llama"}}, "models: a list is needed, one `- ` an entry (got"),
        (args(model=8), "models.0.model: text is needed, in quotes where"),
        (args(model=None), "(got nothing)"),
        ({**ARGS, "store": "~/data"}, "store.folder: ~ is for shells"),
        ({**ARGS, "router": {"keys_file": "~/keys.yaml"}}, "router.keys_file: ~ is for shells"),
        (args(model=""), "models.0.model: "),
        (args(model="~/llama"), "models.0.model: ~ is for shells"),
        (args(engine={"tokenizer": "~nobody/llama"}), "models.0.engine: tokenizer is ~nobody/llama; write"),
        ({**ARGS, "gke": {"kueue_queue": "q" * 64}}, "gke.kueue_queue: at most 63 characters are taken"),
        (args(name="a\nb"), "models.0.name: 'a\\nb' has control characters"),
        (args(engine=["max_model_len"] * 20), "'max_model…)"),
        (args(slice="2x4"), "models.0.slice: a mapping is needed"),
        (
            args(slice={"generation": "v6e", "topology": "2x4", "capacity": "spotty"}),
            "one of 'reserved', 'flex",
        ),
        (args(slice={"generation": "v6e", "topology": 24}), "models.0.slice.topology: "),
        (args(slice={"generation": "v6e", "topology": "2x4", "hosts": 0}), "models.0.slice.hosts: "),
        (args(engine=["max_model_len"]), "models.0.engine: "),
        (args(replicas=0), "models.0.replicas.max: "),
        (args(replicas=True), "models.0.replicas: "),
        (
            args(replicas="2"),
            "models.0.replicas: a whole number of slices is needed, or a mapping with min and max",
        ),
        (args(replicas=10**9), "models.0.replicas.max: at most 10000 is needed"),
        (args(replicas={"min": 3, "max": 2}), "models.0.replicas: min 3 is above max 2"),
        (args(drain_s=-1), "models.0.drain_s: at least 0 is needed (got -1)"),
        (args(drain_s=float("inf")), "models.0.drain_s: a finite number is needed (got inf)"),
        (args(stall_s=float("nan")), "models.0.stall_s: a"),
        (args(stall_s=0), "models.0.stall_s: "),
        (
            args() | {"gke": {"control_store": "etcd"}},
            "gke.control_store: this is neither redis, rocksdb nor host:port of a Redis (got 'etcd')",
        ),
        (
            args() | {"gke": {"control_store": "rocksdb", "redis_secret": "redis"}},
            "gke: redis_secret is of a Redis of yours, and control_store names none; set it to host:port of the Redis",
        ),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_place(raw: Any, says: str) -> None:
    assert says in refusal(raw)


def test_every_problem_is_told_at_once() -> None:
    said = refusal(args(model=8, replica=1))
    assert "models.0.model: " in said
    assert "models.0.replica: " in said


def test_two_models_need_two_names() -> None:
    raw = {"models": [*ARGS["models"], *ARGS["models"]]}
    assert "two models are named 'llama'; give each its own name" in refusal(raw)


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config.parse(ARGS).models[0].name = "other"


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_every_deployment_of_the_repository_loads(path: Path) -> None:
    assert config.load(path).services


def test_a_file_has_a_port_and_services_by_application(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        "http_options: {port: 9000}\n"
        "applications:\n"
        "  - {name: one, route_prefix: /one, import_path: serving.app:build, args: {models: [{model: m, slice: {generation: v6e, topology: 2x2}}]}}\n"
        "  - {import_path: serving.app:build, args: {models: [{model: n, slice: {generation: v6e, topology: 2x2}}]}}\n"
    )
    found = config.load(path)
    assert found.port == 9000
    assert {name: [model.model for model in one.models] for name, one in found.services.items()} == {
        "one": ["m"],
        "default": ["n"],
    }


BESIDE = "beside args, where Serve drops it; move it under args of the application"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ONE + b"router: {keys_file: /etc/serving/keys.yaml}\n", f"one.yaml: router stands {BESIDE}"),
        (ONE.replace(b"{import", b"{store: /var/lib, import"), f"application default: store stands {BESIDE}"),
        (
            ONE + b"controler_options: {}\n",
            "controler_options: unknown key, which Serve drops; did you mean 'controller_options'?",
        ),
        (
            ONE + b"http_options: {prot: 1}\n",
            "http_options: prot: unknown key, which Serve drops; did you mean 'port'?",
        ),
        (ONE + b"1: 2\n", "1: unknown key, which Serve drops; known here: applications"),
    ],
)
def test_a_key_that_serve_would_drop_is_refused(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "one.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as refusal:
        config.load(path)
    assert says in refusal.value.message


def test_keys_of_other_applications_and_of_readers_are_let_be(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    other = b"  - {name: other, route_prefix: /other, import_path: other:app, args: {}, store: x}\n"
    path.write_bytes(b"x-shape: &v6e {generation: v6e, topology: 2x2}\n" + LISTED + other)
    assert list(config.load(path).services) == ["default"]


def test_serve_s_keys_are_those_of_the_installed_serve() -> None:
    from ray.serve import schema

    for known, theirs in (
        (serve_keys.FILE, schema.ServeDeploySchema),
        (serve_keys.APPLICATION, schema.ServeApplicationSchema),
        (serve_keys.HTTP, schema.HTTPOptionsSchema),
    ):
        assert set(known) == set(theirs.model_fields)
    one = {"name": "a", "import_path": "a:b"}
    for kind, keys, sound in (
        (schema.ServeDeploySchema, serve_keys._OF_FILE, {"applications": [one]}),
        (schema.ServeApplicationSchema, serve_keys._OF_APPLICATION, one),
    ):
        kind.model_validate(sound)
        for key in keys:
            with pytest.raises(ValidationError, match=key):
                kind.model_validate(sound | {key: None})
    assert set(serve_keys.PROXY_LOCATIONS) == {location.value for location in schema.ProxyLocation}


def doors(**ports: int) -> bytes:
    """A file of applications whose routers listen themselves."""
    applications = [
        {
            "name": name,
            "import_path": "serving.app:build",
            "route_prefix": f"/{name}",
            "args": {**args(), "router": {"door": "direct", "direct_port": port}},
        }
        for name, port in ports.items()
    ]
    return yaml.safe_dump({"applications": applications}).encode()


def test_routers_of_two_applications_have_doors_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_bytes(doors(a=8080, b=8081))
    assert len(config.load(path).services) == 2


def test_what_an_anchor_brings_may_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "anchors.yaml"
    path.write_bytes(
        b"x-a: {b: {c: &first {<<: &small {generation: v6e, topology: 2x2}, topology: 2x4, hosts: 2}}}\n"
        + LISTED.replace(b"*v6e", b"{<<: *first, hosts: 1}")
    )
    (service,) = config.load(path).services.values()
    assert (service.models[0].slice.topology, service.models[0].slice.hosts) == ("2x4", 1)


def test_the_callback_is_that_of_the_placement() -> None:
    from serving.slices import placement

    assert serve_keys.INSTALL == placement.CALLBACK


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file or directory"):
        config.load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("lama.yaml", "folder/lama.yaml: No such file or directory; did you mean folder/llama.yaml?"),
        ("other", "folder/other: No such file or directory; folder has llama.yaml, qwen.yml"),
        (".", "folder: Is a directory; name a file of folder: llama.yaml, qwen.yml"),
        ("none/llama.yaml", "folder/none/llama.yaml: No such file or directory"),
    ],
)
def test_a_misspelt_file_is_refused_with_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("folder")
    folder.mkdir()
    for name in ("llama.yaml", "qwen.yml", "notes.txt"):
        (folder / name).touch()
    with pytest.raises(ConfigError) as refused:
        config.load(folder / asked)
    assert refused.value.message == says


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("llama.yaml", "llama.yaml: No such file or directory; did you mean deployments/llama.yaml?"),
        ("other", "other: No such file or directory; deployments has llama.yaml, qwen.yml"),
        (".", ".: Is a directory; name a file of deployments: llama.yaml, qwen.yml"),
    ],
)
def test_in_a_checkout_a_refusal_names_the_files_of_deployments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deployments").mkdir()
    for name in ("mkdocs.yml", ".pre-commit-config.yaml", "deployments/llama.yaml", "deployments/qwen.yml"):
        Path(name).touch()
    with pytest.raises(ConfigError) as refused:
        config.load(Path(asked))
    assert refused.value.message == says


def test_of_many_files_a_refusal_names_some(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.yaml").touch()
    with pytest.raises(ConfigError, match=r"has 00\.yaml, .*, 07\.yaml, \.\.\.$"):
        config.load(tmp_path / "service")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"applications: [", "is not YAML"),
        (
            b"a: 1\n\tb: 2\n",
            "line 2, column 1: found character '\\t' that cannot start any token; YAML is indented with spaces",
        ),
        (b"a: [x]\n b: 2\n", "look whether this line is indented as its neighbours are"),
        (b"a: 1\n---\na: 1\n", "expected a single document in the stream, but found another document"),
        (b"a: *b\n", "undefined alias 'b'; an anchor"),
        (b"a: caf\xe9\n", "save the file as UTF-8 text"),
        (b"applications: " + b"[\n" * 2000 + b"]" * 2000, "in each other too deeply"),
        (
            b"a: 1\nb: 2026-02-30\n",
            "line 2, column 4: '2026-02-30' reads as a YAML timestamp and is none; quote it",
        ),
        (b"a: 0x_\n", "'0x_' reads as a YAML int and is none"),
        (b"a: !!bool perhaps\n", "'perhaps' reads as a YAML bool and is none"),
        (b"a: " + b"9" * 5000, f"'{'9' * 40}' reads as a YAML int and is none"),
        (b"a: 0x" + b"f" * 5000, "reads as a YAML int of more than 63 bits; quote it"),
        (b"a: &a {b: [1, *a]}\n", "line 1, column 15: *a stands inside of &a; write out what is meant"),
        (b"a: &a [*a]\n", "*a stands inside of &a"),
        (ONE + ONE, "line 2, column 1: applications stands twice in one mapping, first in line 1"),
        (ONE[:-2].replace(b"app:build", b"app.build") + b"]", "(got serving.app.build)"),
        (
            ONE + b"controller_options: {runtime_env: {env_vars: {RAY_SERVE_ENABLE_HA_PROXY: 1}}}",
            r"controller_options: runtime_env.env_vars.RAY_SERVE_ENABLE_HA_PROXY: text is needed; write it in quotes",
        ),
        (
            ONE + b"controller_options: {runtime_env: {env_vars: [A=1]}}",
            "controller_options, runtime_env, env_vars: a mapping is needed, one `key: value` a line (got ['A=1'])",
        ),
        (ONE[:-3] + b", runtime_env: []}]", "runtime_env: a mapping is needed"),
        (ONE[:-3] + b', name: "a\\nb"}]', "name: 'a\\nb' has control characters"),
        (
            ONE
            + b"controller_options: {runtime_env: {env_vars: {%s: serving.slices.placement:install}}}"
            % serve_keys.HOOK.encode(),
            "nothing else places whole slices; write serving.slices.placement.install",
        ),
        (
            ONE[:-3]
            + b", runtime_env: {env_vars: {SERVING_TLS_KEY: /tls.key, SERVING_TLS_CERT: /tls.crt}}}]",
            "env_vars.SERVING_TLS_CERT: TLS ends in front of the applications, which would speak plain HTTP; set it in controller_options",
        ),
        (
            ONE + b"controller_options: {runtime_env: {env_vars: {SERVING_TLS_CERT: /tls.crt}}}",
            "SERVING_TLS_CERT stands alone; set SERVING_TLS_KEY too",
        ),
        (b"\xff\xfe\x00applications", "is not YAML"),
        (b"", "no applications; see deployments/llama.yaml"),
        (b"just words", "no applications"),
        (b"applications: {}", "no applications"),
        (b"applications: [llama]", "applications: each is a mapping with import_path and args"),
        (b"applications: [{name: a, import_path: serving.app:build, args: [1]}]", "application a: args: "),
        (
            b"applications: [{name: a, import_path: serving.app:build, args: {models: []}}]",
            "application a: models: no model is listed",
        ),
        (b"applications: [{name: a, import_path: serving.app:build}]", "application a: models: missing"),
        (ONE + b"http_options: 8000", "http_options: host and port are needed (got 8000)"),
        (
            ONE + b"http_options: {port: many}",
            "http_options.port: a number from 1 to 65535 is needed (got 'many')",
        ),
        (
            ONE + b"http_options: {port: 70000}",
            "http_options.port: a number from 1 to 65535 is needed (got 70000)",
        ),
        (
            ONE + b"http_options: {port: yes}",
            "http_options.port: a number from 1 to 65535 is needed (got True)",
        ),
        (
            ONE + b"proxy_location: headonly",
            "proxy_location: 'headonly' is none of Serve's; it has HeadOnly,",
        ),
        (
            ONE.replace(b"{import", b"{route_prefix: llama, import"),
            "route_prefix: 'llama' is no path; write / or",
        ),
        (ONE.replace(b"{import", b"{route_prefix: /a/, import"), "route_prefix: '/a/' is no path"),
        (ONE + b"http_options:", "http_options: nothing stands behind it, and Serve takes no null"),
        (ONE.replace(b"{import", b"{runtime_env: , import"), "runtime_env: nothing stands behind it"),
        (
            ONE.replace(b"{import", b"{name: 123, import"),
            "name: text is needed; put it into quotes (got 123)",
        ),
        (ONE.replace(b"{import", b"{name: '', import"), "name: text is needed"),
        (
            ONE.replace(b"{import", b"{runtime_env: {working_dir: .}, import"),
            "runtime_env.working_dir: . is a folder of this machine",
        ),
        (LISTED_TWICE, "two applications have name: default; give each its own"),
        (
            LISTED_TWICE.replace(b"{import", b"{name: second, import", 1),
            "two applications have route_prefix: /; give each its own",
        ),
        (
            doors(a=8000),
            "application a: router.direct_port is 8000, which HAProxy has as http_options.port; set another",
        ),
        (
            doors(a=8080, b=8080),
            "application b: router.direct_port is 8080, which application a has too; set another",
        ),
    ],
)
def test_a_file_that_can_not_be_read_as_a_deployment(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as error:
        config.load(path)
    assert str(path) in error.value.message
    assert says in error.value.message


def test_a_budget_below_what_always_runs_is_refused() -> None:
    assert "budget.slices is 1, and replicas.min of all pools ask for 2" in refusal(
        {**args(replicas=2), "budget": {"slices": 1}}
    )


def test_a_sentinel_that_engines_would_refuse_is_refused_itself() -> None:
    """It would ask, get a 400 for every answer, and find nothing for ever."""
    looks = {"router": {"sentinel": {"share": 0.001}}}
    said = refusal({**args(engine={"max_logprobs": 5}), **looks})
    assert "router.sentinel asks for 20 logprobs of a token" in said
    for most in (20, -1):
        config.ServiceConfig.model_validate({**args(engine={"max_logprobs": most}), **looks})
    config.ServiceConfig.model_validate(args(engine={"max_logprobs": 5}))


@pytest.mark.parametrize("budget", [{"slices": 0}, {"dollars_per_hour": 0}])
def test_a_budget_of_nothing_is_refused(budget: dict[str, int]) -> None:
    assert "budget" in refusal({**args(), "budget": budget})


def test_a_list_is_not_called_too_short_for_an_entry_that_was_refused() -> None:
    said = refusal(args(slice={"generation": "v6e", "topology": "2x4", "capacity": ["spotty"]}))
    assert said.count("capacity") == 1
