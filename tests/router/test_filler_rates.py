"""What routers are told of the lines that are due, with `batch.may_scale`."""

from typing import Any

import pytest

from serving.config import BatchSpec
from serving.router.filler import Filler
from serving.router.scheduling.slice_table import SliceTable

pytestmark = pytest.mark.unit


class Keeper:
    """The store's process: lines of batches wait for two models, of which the YAML has one, and for its adapter."""

    async def call(self, path: str, body: Any) -> dict[str, Any]:
        assert (path, body["router"]) == ("/lines/take", "router")
        line = {
            "batch": "b",
            "line": 0,
            "key": "k",
            "path": "/v1/completions",
            "body": "{}",
            "model": "llama",
        }
        return {"lines": [line], "drop": [], "rates": {"gone": 9.0, "llama": 1.0, "sql": 2.0}}


class NoSeats:
    """Admission without a free seat, which keeps the rates that it is told."""

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}

    def room(self, model: str, spare: float) -> int:
        del model, spare
        return 0

    def filling(self, model: str) -> int:
        del model
        return 0

    def expect(self, rates: dict[str, float]) -> None:
        self.rates = rates


async def test_a_batch_of_a_model_that_the_yaml_no_longer_has_keeps_no_other_from_its_seats() -> None:
    admission: Any = NoSeats()
    keeper: Any = Keeper()
    table = SliceTable({"llama": 1}, {"llama": "v6e"}, adapters={"sql": "llama"})
    api: Any = None
    filler = Filler(api, admission, table, keeper, BatchSpec(may_scale=True), "router")
    await filler.step()
    assert admission.rates == {"llama": 3.0}
    assert [line.batch for line in filler._waiting["llama"]] == ["b"]
