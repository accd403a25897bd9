"""The Serve controller deletes what the store keeps of applications that are gone and whose processes ended without a word.

It alone knows which applications Serve has: no record of those is touched, however long their routers are silent. Only this module
uses this private name of Ray Serve:

- `ray.serve._private.application_state.ApplicationState.__init__`, which is replaced, and its `_name`
"""

# ruff: noqa: SLF001  Serve has no public names for what is asked here

import logging
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any

from serving.slices import quarantine
from serving.state.abandoned import LOOK_S, Abandoned
from serving.state.gcs import Store

logger = logging.getLogger("ray.serve")

POINT = "__init__"


def applications(application_class: Any) -> Callable[[], set[str]]:
    """Listens from now on; returns what tells the names of the applications that Serve has."""
    states: weakref.WeakSet[Any] = weakref.WeakSet()
    make = getattr(application_class, POINT)

    def made(state: Any, *args: Any, **kwargs: Any) -> None:
        make(state, *args, **kwargs)
        states.add(state)

    setattr(application_class, POINT, made)
    return lambda: {state._name for state in states}


class AbandonedRecords:
    """The records of applications that Serve no longer has."""

    def __init__(
        self,
        store: Callable[[], Store],
        deployed: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deployed` names the applications that Serve has now; `clock` does not jump."""
        self._store = store
        self._deployed = deployed
        self._clock = clock
        self._abandoned = Abandoned()

    def run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            try:
                self.look()
            except Exception:
                logger.exception("records of applications that are gone stay; trying again")

    def look(self) -> None:
        """Delete the records of applications that are abandoned by now. Blocks.

        Failures on hosts stay as long as a router would keep them: the hosts serve other applications.
        """
        store = self._store()
        beats = store.beats()
        for application in self._abandoned.look(beats, self._deployed(), self._clock()):
            failures = store.read(application).slice_failures
            for key in store.keys_of(application):
                if application in self._deployed():
                    break  # it has just come back
                store.delete_key(key)
            else:
                for failed in quarantine.forgotten(failures, store.now()):
                    store.delete_slice_failures(failed)
