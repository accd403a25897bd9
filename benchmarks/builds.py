"""Plans against engines: weights that the engine's own code lays out for each known model, built with nothing in its arrays.

python -m benchmarks.builds --docs                 # an hour of two cores; into docs/benchmarks/plans.md
python -m benchmarks.builds --only gemma-4 --docs  # some models; the rows of others stay
python -m benchmarks.builds --only none --docs     # no build: plans are made anew

Each model is built on the smallest slice of one host that holds it and on eight devices, by tpu-inference's own implementation and by
vLLM's where there are both.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.pages import between, put
from serving.compiler import libtpu, processes
from serving.compiler.records import Job
from serving.config import IMPORT_PATH, ModelSpec
from serving.errors import ServingError
from serving.planning import Plan
from serving.planning.known_models import CONFIGS
from serving.planning.plan import plan
from serving.tpu.generations import GIB

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "plans.md"
SLICES = (("v6e", "1x1"), ("v6e", "2x2"), ("v6e", "2x4"), ("v7x", "2x2x1"))
DEVICES = 8
# Few programs, which are listed while an engine is built: its weights do not depend on them.
ENGINE = {"max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 16}
LIMIT_S = 900.0
HEAD = (
    "| model | implementation | slice | planned | laid out | difference |",
    "|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Build:
    """One engine to build, and what its plan says."""

    spec: ModelSpec
    plan: Plan

    @property
    def key(self) -> str:
        implementation = "vLLM" if self.plan.sizes.by_vllm else "tpu-inference"
        slice_ = self.plan.slice
        return f"| {self.spec.model} | {implementation} | {slice_.generation} {slice_.topology} |"


def builds() -> Iterator[Build]:
    """Those of known models that plans accept; of builds that hold the same weights, as a model's and its Instruct's do, the first."""
    seen: set[tuple[str, float]] = set()
    for model in CONFIGS:
        for build in _builds(model):
            held = build.key.removeprefix(f"| {model} "), _loaded(build.plan)
            if held not in seen:
                seen.add(held)
                yield build


def _loaded(found: Plan) -> float:
    return sum(group.held_bytes for group in found.fit.groups if not group.made)


def _builds(model: str) -> Iterator[Build]:
    for engine in ({}, {"model_impl": "vllm"}):
        accepted = [build for slice_ in SLICES if (build := _planned(model, slice_, engine))]
        whole = [build for build in accepted if build.plan.slice.devices == DEVICES]
        yield from (*accepted[:1], *whole[:1])


def _planned(model: str, slice_: tuple[str, str], engine: Mapping[str, Any]) -> Build | None:
    generation, topology = slice_
    experts = {"enable_expert_parallel": True} if "gpt-oss" in model else {}
    spec = ModelSpec.model_validate(
        {
            "name": "model",
            "model": model,
            "slice": {"generation": generation, "topology": topology, "hosts": 1},
            "replicas": 1,
            "engine": {**ENGINE, **experts, **engine},
        }
    )
    try:
        found = plan(spec)
    except ServingError:
        return None
    return None if found.sizes.pools else Build(spec, found)


def laid_out(build: Build, folder: Path, running: processes.Running) -> str:
    """GiB of weights on a device of the engine, or why it can't be built."""
    stem = re.sub(r"\W+", "-", build.key)
    file = folder / f"{stem}.yaml"
    application = {
        "name": "a",
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": {"models": [build.spec.model_dump(mode="json", exclude_unset=True)]},
    }
    file.write_text(json.dumps({"applications": [application]}))
    job = Job(str(file), build.spec.name, build.plan.pool, str(libtpu.library()))
    log = folder / f"{stem}.log"
    outcome = processes.run(job, log, lambda _event: None, limit_s=LIMIT_S, running=running)
    if outcome.built is None:
        return f"not built: {' '.join(outcome.reason.split())[:200]}".replace("|", "/")
    return f"{outcome.built.weight_bytes / GIB:.3f}"


def row(build: Build, held: str) -> str:
    """A line of the table."""
    planned = build.plan.fit.weight_bytes / GIB
    difference = "" if held.startswith("not") else f"{planned / float(held) - 1:+.1%}"
    return f"{build.key} {planned:.3f} | {held} | {difference} |"


def kept(table: str) -> dict[str, str]:
    """What each build of a table laid out, by its first three cells."""
    cells = [line.split("|") for line in table.splitlines() if line.startswith("| ") and line not in HEAD]
    return {"|".join([*line[:4], ""]): line[5].strip() for line in cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="build models whose name has this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--docs", action="store_true", help="put the rows into docs/benchmarks/plans.md")
    options = parser.parse_args()
    every = [*builds()]
    wanted = [build for build in every if options.only in build.spec.model]
    held = kept(between(PAGE.read_text(), "builds"))
    running = processes.Running()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(partial(laid_out, folder=Path(folder), running=running), wanted)
        try:
            for number, (build, result) in enumerate(zip(wanted, results, strict=True), 1):
                held[build.key] = result
                print(f"{number} of {len(wanted)}: {row(build, result)}", file=sys.stderr)
        finally:
            running.end()
    rows = [row(build, held[build.key]) for build in every if build.key in held]
    table = "\n".join([*HEAD, *rows])
    print(table)
    if options.docs:
        PAGE.write_text(put(PAGE.read_text(), "builds", table))


if __name__ == "__main__":
    main()
