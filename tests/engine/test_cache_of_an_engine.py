"""The real engine tells what its prefix cache drops, and a router forgets that it sent it there."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.one_engine import MODEL, address_of, started
from support.recorded import COMPLETIONS, ask

from serving.router.scheduling.slice_table import SliceTable
from serving.state.records import SliceRecord, SliceState

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT_TOKENS = 1900  # nine of them fill the cache of a simulated host
SHAPE = "v6e 1x1"


@dataclass
class Engine:
    address: str
    folder: Path
    load: Callable[[], dict[str, Any]]

    def read(self, prompt: list[int]) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        httpx.post(self.address + COMPLETIONS, json=body, timeout=60).raise_for_status()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with started() as (process, folder):
        address = address_of(process)
        asks, answers = process.stdin, process.stdout
        assert asks
        assert answers

        def load() -> dict[str, Any]:
            print(file=asks, flush=True)
            found: dict[str, Any] = next(json.loads(line) for line in answers if line.startswith("{"))
            return found

        yield Engine(address, folder, load)


def prompt(number: int) -> list[int]:
    return [1 + (number * 7 + place * (number + 1)) % 300 for place in range(PROMPT_TOKENS)]


def heard(table: SliceTable, load: dict[str, Any]) -> None:
    """The router's next look at the store: the engine's slice has a little more to do than an empty one."""
    real = SliceRecord("real", MODEL, SliceState.SERVING, "serving", SHAPE, running=1)
    empty = SliceRecord("empty", MODEL, SliceState.SERVING, "serving", SHAPE)
    fields = {**real.__dict__, "cache_age_s": load["cache_age_s"]}
    table.update([SliceRecord(**fields), empty], time.monotonic())


def chosen(table: SliceTable, number: int, tried: tuple[str, ...] = ()) -> str:
    return table.choose(MODEL, tried, ask(COMPLETIONS, model=MODEL, prompt=prompt(number))).replica


def known(table: SliceTable) -> set[int]:
    return {name for sent in table.everything() if sent.replica == "real" for name in sent.names}


def test_a_router_does_not_choose_a_slice_for_what_its_engine_has_dropped(engine: Engine) -> None:
    table = SliceTable({MODEL: 2}, {MODEL: SHAPE})
    heard(table, engine.load())
    assert chosen(table, 0, tried=("empty",)) == "real"
    engine.read(prompt(0))
    heard(table, engine.load())
    assert chosen(table, 0) == "real"
    first, last = known(table), 0
    assert first
    assert engine.load()["cache_age_s"] == 0

    while first & known(table):
        last += 1
        assert last < 500, engine.load()
        assert chosen(table, last, tried=("empty",)) == "real"
        engine.read(prompt(last))
        heard(table, engine.load())

    assert engine.load()["cache_age_s"] > 0
    assert chosen(table, 0) == "empty"
    assert chosen(table, last) == "real"
    before = engine.load()["cached_tokens"]
    engine.read(prompt(0))
    assert engine.load()["cached_tokens"] == before
    engine.read(prompt(last))
    assert engine.load()["cached_tokens"] > before + PROMPT_TOKENS // 2


def test_nothing_is_left_at_which_others_could_hear_the_engine(engine: Engine) -> None:
    assert not list(engine.folder.glob("kv-events-*"))
