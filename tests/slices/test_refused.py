"""What Serve refuses to deploy is told to the store once, until it has taken something."""

from types import SimpleNamespace
from typing import Any

import pytest

from serving.slices import refused
from serving.state.records import RefusedDeploy

pytestmark = pytest.mark.unit
WHY = "Deploying app 'a' failed with exception:\nmodels.0.slcie: unknown key"


class Kept:
    """A store of one kind of record, which may fail."""

    def __init__(self) -> None:
        self.records: dict[str, str] = {}
        self.calls = 0
        self.fails = False

    def put_refused_deploy(self, entry: RefusedDeploy) -> None:
        self._called()
        self.records[entry.application] = entry.reason

    def delete_refused_deploy(self, application: str) -> None:
        self._called()
        self.records.pop(application, None)

    def _called(self) -> None:
        self.calls += 1
        if self.fails:
            raise OSError("the head is gone")


def application(kept: Kept) -> tuple[Any, list[str]]:
    """An application as Serve keeps it, and the statuses that it was given."""
    given: list[str] = []

    class ApplicationState:
        _name = "a"
        _target_state = SimpleNamespace(deployment_infos=None)

        def _update_status(self, status: Any, message: str = "") -> None:
            given.append(f"{status.name} {message}".strip())

    refused.install(ApplicationState, lambda: kept)
    return ApplicationState(), given


def status(name: str) -> Any:
    return SimpleNamespace(name=name)


def test_a_refused_deployment_is_told_once_and_taken_back_with_the_next_status() -> None:
    kept = Kept()
    state, given = application(kept)
    for _ in range(3):
        state._update_status(status("DEPLOY_FAILED"), WHY)
    assert kept.records == {"a": "models.0.slcie: unknown key"}
    assert kept.calls == 1
    state._update_status(status("DEPLOYING"))
    assert kept.records == {}
    assert given == [f"DEPLOY_FAILED {WHY}"] * 3 + ["DEPLOYING"]


def test_engines_that_do_not_start_are_no_refusal() -> None:
    kept = Kept()
    state, _ = application(kept)
    state._target_state.deployment_infos = {"llama": None}
    state._update_status(status("DEPLOY_FAILED"), "Failed to update the deployments ['llama'].")
    assert kept.records == {}


def test_a_store_that_fails_is_told_again_and_serve_goes_on() -> None:
    kept = Kept()
    state, given = application(kept)
    kept.fails = True
    state._update_status(status("DEPLOY_FAILED"), WHY)
    kept.fails = False
    state._update_status(status("DEPLOY_FAILED"), WHY)
    assert kept.records == {"a": "models.0.slcie: unknown key"}
    assert len(given) == 2


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (WHY, "models.0.slcie: unknown key"),
        (
            "Deploying app 'a' failed with exception:\nTraceback (most recent call last):\n  x\nImportError: no",
            "ImportError: no",
        ),
        ("one line", "one line"),
        ("", ""),
        ("first:\n" + "x" * 900, "x" * 500),
    ],
)
def test_of_serve_s_message_the_words_that_say_why_are_kept(message: str, words: str) -> None:
    assert refused.last_words(message) == words


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # Ray's
def test_serve_s_own_application_is_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private.application_state import ApplicationState, ApplicationStatus

    kept = Kept()
    monkeypatch.setattr(ApplicationState, refused.POINT, ApplicationState._update_status)
    refused.install(ApplicationState, lambda: kept)
    state = object.__new__(ApplicationState)
    state._name, state._status_msg = "a", ""
    state._target_state = SimpleNamespace(deployment_infos=None)
    state._update_status(ApplicationStatus.DEPLOY_FAILED, WHY)
    assert kept.records == {"a": "models.0.slcie: unknown key"}
    assert (state._status, state._status_msg) == (ApplicationStatus.DEPLOY_FAILED, WHY)
    state._update_status(ApplicationStatus.DEPLOYING)
    assert kept.records == {}
