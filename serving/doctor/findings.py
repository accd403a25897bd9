"""What a check finds, and what all findings come to."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from serving.doctor.facts import Facts
from serving.slices.tpu_hosts import listed


class Verdict(StrEnum):
    """OK is said of what was looked at alone."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_YET = "not yet"
    NOT_LOOKED_AT = "not looked at"


@dataclass(frozen=True)
class Finding:
    """One thing that a check found: what is, and what to do where that is not right."""

    verdict: Verdict
    said: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """One check: what it looks at, in a sentence, and the decision on the facts."""

    name: str
    about: str
    decide: Callable[[Facts], list[Finding]]


def ok(message: str) -> Finding:
    return Finding(Verdict.OK, message)


def warning(message: str, remedy: str) -> Finding:
    return Finding(Verdict.WARNING, message, remedy)


def failed(message: str, remedy: str) -> Finding:
    return Finding(Verdict.FAILED, message, remedy)


def not_yet(message: str) -> Finding:
    return Finding(Verdict.NOT_YET, message)


def not_looked_at(message: str) -> Finding:
    return Finding(Verdict.NOT_LOOKED_AT, message)


def together(named: Iterable[tuple[str, Finding | None]], message: str) -> list[Finding]:
    """One finding for each thing that some of the named show, with their names; OK, as `message`, where none shows any."""
    names: dict[Finding, list[str]] = {}
    for name, finding in named:
        if finding:
            names.setdefault(finding, []).append(name)
    findings = [
        Finding(finding.verdict, f"{listed(of)}: {finding.said}", finding.remedy)
        for finding, of in names.items()
    ]
    return findings or [ok(message)]


def any_failed(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict is Verdict.FAILED for finding in findings)
