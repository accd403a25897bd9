"""`/v1/models`: every model and adapter by the name to ask for, in OpenAI's shape or Anthropic's."""

import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from serving.planning import Plan
from serving.router.admission.controller import AdmissionController
from serving.router.http import anthropic_models
from serving.router.http.visits import tells
from serving.router.scheduling.slice_table import SliceTable


class ModelList:
    """The cards of one service's models; how its slices are only for whom may know."""

    def __init__(self, plans: Mapping[str, Plan], table: SliceTable, admission: AdmissionController) -> None:
        """`plans`: of each model, that of its preferred pool."""
        self._plans = plans
        self._table = table
        self._admission = admission
        self._started = int(time.time())

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/v1/models", self.models)
        router.add_api_route("/v1/models/{name:path}", self.model)
        return router

    async def models(self, request: Request) -> JSONResponse:
        """Every model and adapter by the name to ask for, with its slice, how many serve, and whether they are simulated.

        In Anthropic's shape where the request has the header `anthropic-version`.
        """
        names = [*self._plans, *self._table.adapters]
        if anthropic_models.VERSION in request.headers:
            cards = [self._anthropic_card(request, name) for name in names]
            return JSONResponse(anthropic_models.page(cards, request.query_params))
        card = self._card if tells(self._admission, request) else self._name_card
        return JSONResponse({"object": "list", "data": [card(name) for name in names]})

    async def model(self, request: Request, name: str) -> JSONResponse:
        """The same of one of them."""
        if not name:  # a client joined the path with a slash
            return await self.models(request)
        self._table.resolve(name)
        if anthropic_models.VERSION in request.headers:
            return JSONResponse(self._anthropic_card(request, name))
        return JSONResponse(self._card(name) if tells(self._admission, request) else self._name_card(name))

    def _name_card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "tpu-serving"}

    def _anthropic_card(self, request: Request, name: str) -> dict[str, Any]:
        longest = self._card(name)["max_model_len"] if tells(self._admission, request) else None
        return anthropic_models.card(name, self._started, longest)

    def _card(self, name: str) -> dict[str, Any]:
        model = self._table.resolve(name)
        plan = self._plans[model]
        entries = self._table.entries(model)
        serving = [entry for entry in entries if entry.serves]
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "tpu-serving",
            "root": plan.model.model,
            "parent": None if name == model else model,
            "max_model_len": serving[0].max_model_len if serving else None,
            "slice": str(plan.slice),
            "parallel": {"tensor": plan.tensor, "pipeline": plan.pipeline},
            "slices_ready": len(serving),
            "simulated": any(entry.simulated for entry in entries),
        }
