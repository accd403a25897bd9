"""All checks on one set of facts, in the order in which a cluster comes up."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from serving.doctor.cluster_checks import CLUSTER
from serving.doctor.facts import Facts
from serving.doctor.findings import Check, Finding, any_failed, failed
from serving.doctor.host_checks import HOSTS
from serving.doctor.start_checks import START

STAGES: dict[str, Sequence[Check]] = {"cluster": CLUSTER, "hosts": HOSTS, "start": START}


@dataclass(frozen=True)
class Result:
    """What one check found."""

    stage: str
    check: str
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        return any_failed(self.findings)


def examine(facts: Facts) -> list[Result]:
    """Every check, decided on the facts."""
    return [
        Result(stage, check.name, tuple(_decided(check, facts)))
        for stage, checks in STAGES.items()
        for check in checks
    ]


def _decided(check: Check, facts: Facts) -> list[Finding]:
    """What the check finds. One that the facts of a strange cluster break takes none of the others with it."""
    try:
        return check.decide(facts)
    except Exception as error:  # noqa: BLE001  facts are whatever Kubernetes, Ray and hosts tell
        return [
            failed(
                f"the check itself broke ({type(error).__name__}: {error})",
                "tell this project what the cluster is like; the other checks hold",
            )
        ]


def unreadable(why: str) -> Result:
    """The result of a file that can't be read, or whose models do not fit: there is nothing to hold the cluster against."""
    return Result(
        "file", "file", (failed(why, "mend the file; `serving plan FILE` reads it as this command does"),)
    )


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """What `--json` prints: one entry a finding."""
    return [
        {"stage": result.stage, "check": result.check, **asdict(finding)}
        for result in results
        for finding in result.findings
    ]
