"""`serving doctor`: would the service of a YAML start and run on this cluster, and what to change where not.

Status 0: ok or warnings. 1: a check failed. 2: the file can't be read, or its models do not fit.
"""

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from serving import hub
from serving.cli.arguments import seconds
from serving.cli.status import add_address, address_of
from serving.config import load
from serving.errors import ConfigError, SimulationError
from serving.planning.service import every_plan

if TYPE_CHECKING:
    from serving.doctor.examination import Result

OK, FAILED, UNREADABLE = 0, 1, 2
_COLOURS = {
    "ok": "green",
    "warning": "yellow",
    "failed": "bold red",
    "not yet": "cyan",
    "not looked at": "dim",
}


def add_commands(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what of a YAML's service would break on this cluster, before, during and after `serve run`",
    )
    doctor.add_argument("yaml", help="a file of deployments/")
    doctor.add_argument(
        "--limit", type=seconds, default=60, metavar="SECONDS", help="for all hosts to answer (default: 60)"
    )
    doctor.add_argument("--json", action="store_true", help="print every finding as JSON")
    add_address(doctor)
    doctor.set_defaults(run=_doctor)


def _doctor(options: Namespace) -> int:
    from serving.doctor.examination import examine, summary, unreadable
    from serving.doctor.gather import gather, unreached

    console = Console()
    try:
        deployment = load(Path(options.yaml))
        plans = every_plan(deployment.services.values(), hub.config_of)
    except ConfigError as error:
        Console(stderr=True).print(f"serving: {error.message}", markup=False, highlight=False, soft_wrap=True)
        if options.json:
            console.print_json(json.dumps(summary([unreadable(error.message)])))
        return UNREADABLE
    errors = Console(stderr=True)
    with errors.status("looking at the cluster") as status:
        on_step = status.update if errors.is_terminal else errors.print
        try:
            facts = gather(address_of(options), deployment, plans, options.limit, on_step)
        except SimulationError as error:
            facts = unreached(error.message, deployment, plans, on_step)
    results = examine(facts)
    if options.json:
        console.print_json(json.dumps(summary(results)))
    else:
        show(console, results)
    return FAILED if any(result.failed for result in results) else OK


def show(console: Console, results: "Sequence[Result]") -> None:
    """A table with a row for each finding, and how many there are of each verdict."""
    table = Table("check", "", "what is", box=box.SIMPLE_HEAD)
    stage = ""
    for result in results:
        if result.stage != stage:
            stage = result.stage
            table.add_section()
        for at, finding in enumerate(result.findings):
            message = Text(finding.said)
            if finding.remedy:
                message.append(f"\n→ {finding.remedy}", "italic")
            colour = _COLOURS[finding.verdict]
            table.add_row(result.check if at == 0 else "", Text(finding.verdict, colour), message)
    console.print(table)
    counts = Counter(finding.verdict.value for result in results for finding in result.findings)
    console.print(", ".join(f"{counts[name]} {name}" for name in _COLOURS if counts[name]), highlight=False)
