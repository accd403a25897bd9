"""Whose request it is, where no slice answers it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from serving.errors import ServingError, UnauthorizedError
from serving.metrics.table import NO_KEY
from serving.router.admission.controller import AdmissionController
from serving.router.admission.visit import Visit


@asynccontextmanager
async def asked_by(admission: AdmissionController, request: Request) -> AsyncIterator[Visit]:
    """A request that no slice answers; raises UnauthorizedError and RefusedError."""
    try:
        visit = admission.arrive(request.headers.raw, costs=False)
    except ServingError as error:
        admission.tell_refused(NO_KEY, error)
        await admission.hold_up_strangers()
        raise
    try:
        if visit.refusal:
            admission.tell_refused(visit.account.key.id, visit.refusal.error)
            await admission.hold_up(visit)
            raise admission.refused(visit, body_is_over=True)
        yield visit
    finally:
        admission.leave(visit)


def check_tells(admission: AdmissionController, request: Request) -> None:
    """Raises UnauthorizedError where this client may not know how slices are."""
    try:
        admission.status_is_open_to(request.headers.raw)
    except UnauthorizedError as error:
        admission.tell_refused(NO_KEY, error)
        raise


def tells(admission: AdmissionController, request: Request) -> bool:
    """Whether this client may know how slices are, and where."""
    try:
        admission.status_is_open_to(request.headers.raw)
    except UnauthorizedError:
        return False
    return True
