"""A deployment that Serve refuses is told to the store: what ran before runs on, and looks well to whoever asks it.

Serve builds an application of a changed YAML anew. Where that fails, it keeps the replicas that it has and the words of the
failure. Only this module uses these private names of Ray Serve:

- `ray.serve._private.application_state.ApplicationState._update_status`, through which Serve sets status and message
- `_name` and `_target_state.deployment_infos` of an ApplicationState: None where Serve has refused what it is to run
"""

# ruff: noqa: SLF001  Serve has no public names for what is asked here

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from serving.state.records import RefusedDeploy

logger = logging.getLogger("ray.serve")

POINT = "_update_status"
_FAILED = "DEPLOY_FAILED"
_REASON_CHARACTERS = 500
_TRACEBACK = "Traceback (most recent call last)"


class RefusalStore(Protocol):
    def put_refused_deploy(self, refused: RefusedDeploy) -> None: ...

    def delete_refused_deploy(self, application: str) -> None: ...


def install(application_state: Any, store: Callable[[], RefusalStore]) -> None:
    """Tell the store of what Serve refuses, and that it is over, from now on."""
    update = getattr(application_state, POINT)
    published: dict[str, str] = {}

    def update_and_tell(state: Any, status: Any, message: str = "") -> None:
        update(state, status, message)
        refused = message if status.name == _FAILED and state._target_state.deployment_infos is None else ""
        if published.get(state._name) == refused:
            return
        try:
            if refused:
                store().put_refused_deploy(RefusedDeploy(state._name, last_words(refused), time.time()))
            else:
                store().delete_refused_deploy(state._name)
        except Exception:
            logger.exception("the store can't be told what became of the deployment of %s", state._name)
        else:
            published[state._name] = refused

    setattr(application_state, POINT, update_and_tell)


def last_words(message: str) -> str:
    """The words of Serve's message that say why: of a traceback the last line, else what stands behind the first line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if any(line.startswith(_TRACEBACK) for line in lines):
        lines = lines[-1:]
    elif len(lines) > 1 and lines[0].endswith(":"):
        lines = lines[1:]
    return " ".join(lines)[:_REASON_CHARACTERS]
