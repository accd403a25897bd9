"""`serving plan` and `serving manifest`: their arguments, what they print and the status they end with.

Status 0: everything fits. 1: a model was refused. 2: the file can't be read as asked.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from serving import hub
from serving.cli.plan_view import offer_summary, show_candidates, show_offers, show_plans
from serving.config import DeploymentFile, ModelSpec, ServiceConfig, load, strict_yaml
from serving.errors import ConfigError, PlanError, ServingError, TopologyError
from serving.gke import serve_config
from serving.gke.application import application
from serving.gke.manifest import KUSTOMIZATION, base_mark, kustomize, render
from serving.planning import engine_options
from serving.planning.alternatives import slices_that_fit
from serving.planning.engine_sizes import engine_sizes
from serving.planning.plan import Plan, plan
from serving.planning.prices import Prices
from serving.planning.prices import check as check_prices
from serving.planning.service import check, every_plan
from serving.planning.shapes import shape_of
from serving.planning.summary import candidate_summary, summary
from serving.scaling.sizing import Offer, Workload, offers, read_workload

OK, REFUSED, UNREADABLE = 0, 1, 2
_OTHER_KUSTOMIZATIONS = ("kustomization.yml", "Kustomization")  # kustomize takes one file of the three


def add_commands(commands: Any) -> None:
    """Add both commands to the subparsers of `serving`; their `run` returns the status."""
    planning = commands.add_parser(
        "plan", help="does a YAML's every model fit its slice, how fast, at what price"
    )
    subject = planning.add_mutually_exclusive_group(required=True)
    subject.add_argument("yaml", nargs="?", help="a file of deployments/")
    subject.add_argument(
        "--what-fits", metavar="MODEL", help="list the slices a model fits instead, cheapest first"
    )
    planning.add_argument(
        "--engine", action="append", default=[], metavar="KEY=VALUE", help="an engine option for --what-fits"
    )
    planning.add_argument(
        "--workload",
        metavar="in=TOKENS,out=TOKENS,rate=REQUESTS_A_SECOND",
        help="how many slices of which shape a load takes within slo, at what price, instead of the plans; without out= for models that embed or score",
    )
    planning.add_argument("--json", action="store_true", help="print every figure as JSON")
    planning.set_defaults(run=_plan)
    manifest = commands.add_parser(
        "manifest", help="a YAML as Kubernetes objects for GKE and KubeRay, on stdout"
    )
    manifest.add_argument("yaml", help="a file of deployments/")
    manifest.add_argument("--image", help="image of head and slices, in place of gke.image")
    manifest.add_argument(
        "--kustomize",
        metavar="DIR",
        type=Path,
        help="write a base for kustomize there instead, one file a kind",
    )
    manifest.set_defaults(run=_manifest)


def _plan(options: Namespace) -> int:
    mismatch = ""
    if options.what_fits is not None and options.workload is not None:
        mismatch = "--workload goes with a file, whose slo and pools it is about; give one, or leave it out"
    elif options.yaml and options.engine:
        mismatch = "--engine goes with --what-fits; a file has its own options under engine:"
    if mismatch:
        return _fail(Console(), ConfigError(mismatch), as_json=options.json)
    if options.what_fits is not None:
        return what_fits(options.what_fits, Console(), engine=options.engine, as_json=options.json)
    if options.workload is not None:
        return workload_file(options.yaml, options.workload, Console(), as_json=options.json)
    return plan_file(options.yaml, Console(), as_json=options.json)


def _manifest(options: Namespace) -> int:
    return manifest_file(
        options.yaml, sys.stdout, Console(stderr=True), image=options.image, base=options.kustomize
    )


def plan_file(path: str, console: Console, *, as_json: bool = False) -> int:
    """Plan every model of a file on each of its pools; a refused model does not keep the others from being shown."""
    try:
        services = load(Path(path)).services.values()
        for service in services:
            check_prices(service.prices)
    except ConfigError as error:
        return _fail(console, error, as_json=as_json)
    summaries = [entry for service in services for entry in _planned(service)]
    refused = [entry for entry in summaries if not entry["fits"]]
    if as_json:
        console.print_json(json.dumps(summaries))
    else:
        show_plans(console, [entry for entry in summaries if entry["fits"]])
        for entry in refused:
            _refuse(console, entry["error"])
    return REFUSED if refused else OK


def workload_file(path: str, text: str, console: Console, *, as_json: bool = False) -> int:
    """How many slices of its pools, and of others, every model of a file takes for a workload."""
    try:
        workload = read_workload(text)
        services = load(Path(path)).services.values()
        for service in services:
            check_prices(service.prices)
        offered = [
            (spec.name, offers(spec, workload, service.prices, hub.config_of))
            for service in services
            for spec in service.models
        ]
        _check_answers(workload, offered)
    except (PlanError, TopologyError) as error:
        _refuse(console, error.message)
        return REFUSED
    except ConfigError as error:
        return _fail(console, error, as_json=as_json)
    if as_json:
        console.print_json(
            json.dumps(
                [
                    {"model": name, "offers": [offer_summary(offer) for offer in rows]}
                    for name, rows in offered
                ]
            )
        )
    else:
        for name, rows in offered:
            show_offers(console, name, workload, rows)
    return OK if all(rows[0].slices for _, rows in offered) else REFUSED


def _check_answers(workload: Workload, offered: Sequence[tuple[str, Sequence[Offer]]]) -> None:
    """Refuse output tokens that no model of the file writes."""
    if workload.answer and offered and all(rows[0].plan.sizes.pools for _, rows in offered):
        raise ConfigError(
            f"--workload: out is {workload.answer}, and {offered[0][0]} embeds or scores texts, which has no output tokens; leave out= away"
        )


def what_fits(model: str, console: Console, *, engine: Sequence[str] = (), as_json: bool = False) -> int:
    """List the slices a model fits, cheapest first. `engine` holds KEY=VALUE engine options."""
    try:
        options = _options(engine)
        engine_options.check(options)
        shape = shape_of(model, options.get("hf_overrides"), hub.config_of)
        rows = [
            candidate_summary(candidate, {})
            for candidate in slices_that_fit(shape, engine_sizes(options, shape, hub.config_of, model=model))
        ]
    except ServingError as error:
        return _fail(console, error, as_json=as_json)
    if as_json:
        console.print_json(json.dumps(rows))
    elif rows:
        show_candidates(console, model, rows)
    else:
        _refuse(
            console,
            f"{model} fits no slice of up to 256 chips; set a shorter max_model_len or smaller formats",
        )
    return OK if rows else REFUSED


def manifest_file(
    path: str, output: TextIO, console: Console, *, image: str | None = None, base: Path | None = None
) -> int:
    """Write the manifest of a file's one application, or nothing of it where a model is refused.

    kubectl reads `output`; messages go to `console`. With `base` the objects go into that folder, for kustomize.
    """
    try:
        deployment = load(Path(path))
        name, service = _only(deployment)
        gke = service.gke.model_copy(update={"image": image}) if image else service.gke
        plans = every_plan([service], hub.config_of)
        app = application(
            name,
            gke,
            plans,
            port=deployment.port,
            router=service.router,
            store=service.store,
            route_prefix=deployment.route_prefix(name),
        )
        serve_config.check(app, deployment.document)
        if base is None:
            output.write(render(app, deployment.document))
        else:
            _write_base(base, kustomize(app, deployment.document), base_mark(app))
    except (PlanError, TopologyError) as error:
        _refuse(console, error.message)
        return REFUSED
    except ConfigError as error:
        return _fail(console, error, as_json=False)
    return OK


def _write_base(folder: Path, files: dict[str, str], mark: str) -> None:
    """A base that was written there before is written again; what somebody else wrote stays as it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = [name for name in (*files, *_OTHER_KUSTOMIZATIONS) if (folder / name).exists()]
        if there and not _begins_with(folder / KUSTOMIZATION, mark):
            raise ConfigError(
                f"--kustomize {folder} has a {there[0]} that is not of this application's base; name a folder of its own"
            )
        for name, text in files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise ConfigError(
            f"--kustomize {folder}: {error.strerror}; name a folder that can be written"
        ) from None


def _begins_with(file: Path, mark: str) -> bool:
    return file.exists() and file.read_text(errors="replace").startswith(mark)


def _only(deployment: DeploymentFile) -> tuple[str, ServiceConfig]:
    if len(deployment.services) > 1:
        raise ConfigError(
            f"a manifest is of one application, {deployment.path} has {len(deployment.services)}"
        )
    return next(iter(deployment.services.items()))


def _planned(service: ServiceConfig) -> list[dict[str, Any]]:
    """Each model on each of its pools; where all fit, what keeps them from being one service, which is no single model's."""
    made = [[_plan_of(spec, service.prices) for spec in model.per_pool()] for model in service.models]
    entries = [
        summary(entry, service.prices) if isinstance(entry, Plan) else entry
        for pools in made
        for entry in pools
    ]
    fitting = [[entry for entry in pools if isinstance(entry, Plan)] for pools in made]
    if fitting == made:
        try:
            check(service, fitting)
        except ConfigError as error:
            entries.append(_refusal(None, error))
    return entries


def _plan_of(spec: ModelSpec, prices: Prices) -> Plan | dict[str, Any]:
    try:
        return plan(spec, hub.config_of, prices=prices)
    except ConfigError as error:
        return _refusal(spec.name, error)


def _refusal(model: str | None, error: ConfigError) -> dict[str, Any]:
    return {"model": model, "fits": False, "code": error.code, "error": error.message}


def _options(pairs: Sequence[str]) -> dict[str, Any]:
    split = [pair.partition("=") for pair in pairs]
    if wrong := [name for name, equals, _ in split if not (name and equals)]:
        raise ConfigError(f"--engine {wrong[0]}: write KEY=VALUE")
    return {
        name: strict_yaml.load(value.encode(errors="surrogateescape"), f"--engine {name}")
        for name, _, value in split
    }


def _fail(console: Console, error: ServingError, *, as_json: bool) -> int:
    if as_json:
        console.print_json(json.dumps([{"fits": False, "code": error.code, "error": error.message}]))
    else:
        _refuse(console, error.message)
    return UNREADABLE


def _refuse(console: Console, message: str) -> None:
    """Print the reason on the first line and one way out on each further line."""
    first, *ways = message.split("; ")
    console.print(Text.assemble(("refused ", "bold red"), first), soft_wrap=True)
    for way in ways:
        console.print(Text(f"  - {way}"), soft_wrap=True)
