"""The check of what Serve says of the applications: a deployment that it refused leaves what ran before, and every slice looks well."""

from collections.abc import Mapping
from typing import Any

from serving.doctor.facts import Application, Deployed, Facts
from serving.doctor.findings import Finding, failed, not_looked_at, not_yet, ok
from serving.slices.refused import last_words

_FAILED = "DEPLOY_FAILED", "UNHEALTHY"


def serve(facts: Facts) -> list[Finding]:
    """Whether Serve has taken the applications of the file as they were deployed last."""
    known = facts.serve
    if isinstance(known, str):
        of_kubernetes = in_kubernetes(facts.deployed)
        if of_kubernetes is None:
            return [not_looked_at(known)]
        known = of_kubernetes
    return [_of(name, known.get(name)) for name in facts.models]


def in_kubernetes(deployed: Deployed | str) -> dict[str, Application] | None:
    """What KubeRay last heard from Serve; None where Kubernetes has no RayService."""
    if isinstance(deployed, str) or deployed.service is None:
        return None
    status = (deployed.service.get("status") or {}).get("activeServiceStatus") or {}
    return {
        name: Application(
            application.get("status") or "", application.get("message") or "", _deployments(application)
        )
        for name, application in (status.get("applicationStatuses") or {}).items()
    }


def _deployments(application: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with an application's deployments, by name."""
    deployments = application.get("serveDeploymentStatuses") or {}
    return {
        name: entry.get("message") or ""
        for name, entry in deployments.items()
        if entry.get("status") in _FAILED
    }


def _of(name: str, application: Application | None) -> Finding:
    if application is None:
        return not_yet(f"Serve has no application {name}")
    state = f"Serve calls {name} {application.status}"
    if application.status == "RUNNING":
        return ok(state)
    if application.status not in _FAILED:
        return not_yet(state)
    wrong = [application.message, *(f"{of}: {message}" for of, message in application.deployments.items())]
    reasons = "; ".join(filter(None, map(last_words, wrong))) or "it does not say why"
    if application.deployments:
        return failed(f"{state}: {reasons}", "see `service`, and Serve's log on the head")
    return failed(f"{state}: {reasons}", "change the YAML and deploy it again; what ran before runs on")
