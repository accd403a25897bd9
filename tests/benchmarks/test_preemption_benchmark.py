import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.simulated_engine import MODEL
from support.two_priorities import two_priorities

from benchmarks.preemption import Answer, Load, Row, answers, different, table


def answer(first_s: float = 0.1, text: str = "a b", **more: object) -> Answer:
    made = Answer("prompt", "key", text.split(), first_s, 2.0, whole=True)
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.mark.unit
def test_a_row_tells_what_both_keys_saw_and_what_went_wrong() -> None:
    lows = [answer(), answer(paused=True, longest_gap_s=1.5), answer(whole=False)]
    row = Row("on", 2.0, [answer(0.05), answer(0.15), answer(0.1)], lows, different=1)
    assert row.cells()[:3] == ["on", "3", "100"]
    assert row.cells()[4:] == ["3", "2.0", "1 of 3", "1.5", "1", "1"]
    assert len({line.count("|") for line in table([row]).splitlines()}) == 1


@pytest.mark.http
def test_texts_of_an_engine_alone_are_held_against_those_that_clients_had(tmp_path: Path) -> None:
    load = Load(MODEL, clients=6, low_words=20, low_tokens=40, highs_per_s=8, high_words=10, high_tokens=4)
    with two_priorities(tmp_path) as service, ThreadPoolExecutor(1) as pool:
        asking = answers(load, service.address, service.keys["low"], service.keys["high"], 1.0)
        highs, lows = pool.submit(asyncio.run, asking).result()
        assert all(given.whole for given in (*highs, *lows))
        engines = [address for address, _ in service.engines]
        lows[0].texts[3] = "another"
        assert pool.submit(asyncio.run, different(load, engines, lows[:4])).result() == 1
