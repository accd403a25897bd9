from dataclasses import replace

import pytest

from benchmarks.filled_steps import Load, play, table

pytestmark = pytest.mark.unit
LOAD = Load(seats=4, per_s=4.0, seconds=4.0, tokens=20, line_tokens=40)


def test_the_same_requests_come_with_a_batch_and_without_and_wait_for_its_prompts() -> None:
    load = replace(LOAD, seats=16, seconds=8.0)
    without, filled = play(load), play(replace(load, line_prompt_tokens=2000))
    assert [one.arrived_s for one in without.requests] == [one.arrived_s for one in filled.requests]
    assert (without.lines, without.given_up) == (0, 0)
    assert filled.lines > 0
    assert filled.first_ms(99) > without.first_ms(99)


def test_a_line_is_given_up_where_a_request_finds_no_seat() -> None:
    busy = replace(LOAD, per_s=20.0, seconds=2.0, line_prompt_tokens=16)
    assert play(busy).given_up > 0
    assert play(replace(busy, seats=64, spare=0.9)).given_up == 0


def test_what_leaves_most_seats_free_costs_less() -> None:
    full = replace(LOAD, seats=16, seconds=8.0, line_prompt_tokens=650)
    assert play(replace(full, spare=0.9)).token_ms() < play(full).token_ms()


def test_a_row_for_each() -> None:
    rows = table([play(LOAD), play(replace(LOAD, line_prompt_tokens=16))]).splitlines()
    assert rows[2].startswith("| 1 | no batch |  |")
    assert len({row.count("|") for row in rows}) == 1


def test_requests_that_go_past_slices_that_read_a_line_wait_less() -> None:
    load = replace(LOAD, slices=2, seats=16, seconds=20.0, line_prompt_tokens=2000, line_tokens=200)
    assert play(load).first_ms(90) < 0.9 * play(replace(load, passes=False)).first_ms(90)


def test_lines_are_read_more_slowly_where_requests_would_miss_their_target() -> None:
    load = replace(LOAD, seats=16, seconds=60.0, line_prompt_tokens=2000)
    target_s = 1.1e-3 * play(replace(load, line_prompt_tokens=0)).first_ms(99)
    freely, within = play(load), play(replace(load, target_s=target_s))
    assert within.first_ms(95) < 1e3 * target_s < freely.first_ms(95)
    assert 0 < within.lines < freely.lines
