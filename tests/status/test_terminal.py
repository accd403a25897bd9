import pytest
from rich.console import Console
from support.page_service import entry

from serving.state.records import (
    BatchRecord,
    DecisionRecord,
    Demand,
    RefusedDeploy,
    Rollout,
    SliceFailures,
    SliceRecord,
    SliceState,
    Snapshot,
    Suspicion,
    UsageRecord,
    Wanted,
)
from serving.status import terminal
from serving.status.document import status
from serving.status.rates import STEP_S, Rates

pytestmark = pytest.mark.unit
LLAMA = "llama"
WHY = "1 of 2 hosts of slice b are there; worker 1 is missing"
WANTED = Wanted(LLAMA, "v6e 2x4 (2 hosts x 4 chips)", slices=4, missing=1, missing_for_s=12.0, why=WHY)


def drawn(entries: list[SliceRecord], demands: list[Demand], decisions: list[DecisionRecord]) -> str:
    """What a terminal of 160 columns shows after a minute."""
    window, steps = Rates(), 30
    for step in range(steps):
        moved = [
            SliceRecord(**{**vars(one), "output_tokens": 200 * step if one.serves else 0, "beat": step})
            for one in entries
        ]
        beating = [Demand(**{**vars(one), "beat": step}) for one in demands]
        window.observe(moved, beating, step * STEP_S)
    seen = Snapshot(tuple(moved), tuple(beating), (WANTED,), tuple(decisions))
    return _plain(terminal.service(status(seen, window, steps * STEP_S)))


def test_the_terminal_shows_what_the_page_shows() -> None:
    entries = [
        entry(LLAMA, 0, running=12, kv_usage=0.4),
        entry(LLAMA, 1, SliceState.LOST, reason="host 1 (127.100.1.1) is gone"),
        entry(LLAMA, 2, SliceState.STARTING, phase="compiling", phases=(("loading weights", 28.0),)),
    ]
    demands = [Demand("router", LLAMA, held=7, ttft_p50_s=0.25, ttft_p90_s=1.5)]
    text = drawn(entries, demands, [DecisionRecord(50, LLAMA, "", 4, "a queue of 14 a slice")])
    for said in (
        "slices 1 of 4 · running 12 · queue 7 (7 in routers, 0 in engines) · output 100 tokens/s",
        "TTFT p50 250 ms, p90 1.5 s",
        f"waiting 12 s for 1 whole, free of v6e 2x4 (2 hosts x 4 chips): {WHY}",
        "■■■■ 1: 127.100.0.1",
        "lost: host 1 (127.100.1.1) is",
        "starting: compiling",
        "12.4 of 31.0 GiB",
        "10 s ago",
        "a queue of 14 a slice",
        "simulated",
        "█",
    ):
        assert said in text, text


def test_names_and_reasons_are_never_taken_for_markup() -> None:
    hostile = "[red]x[/] [link=file:///etc]y"
    text = drawn([entry(LLAMA, 0, SliceState.LOST, slice=hostile, reason=hostile)], [], [])
    assert text.replace("\n", " ").count("[red]x[/]") == 2


@pytest.mark.parametrize("text", ["[red]x[/] y", "can't open [/dev/vfio/0]"])
def test_a_list_of_slices_takes_no_reason_for_markup(text: str) -> None:
    looked = _plain(terminal.slices([], [entry(LLAMA, 0, SliceState.LOST, slice=text, reason=text)]))
    assert looked.count(text) == 2


def test_a_narrow_terminal_cuts_no_name_and_no_reason() -> None:
    name, reason = "llama-3.1-8b-instruct-long", "host 1 is gone (ActorUnavailableErrorOfRay)"
    listed = terminal.slices([], [entry(name, 0, SliceState.LOST, reason=reason)])
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(listed)
    rows = [line.split("│")[1:4] for line in captured.get().splitlines() if "│" in line]
    model, _, state = ("".join(cell.strip() for cell in column) for column in zip(*rows, strict=True))
    assert (name in model, reason.replace(" ", "") in state.replace(" ", "")) == (True, True)


def test_models_of_several_applications_are_told_apart() -> None:
    wanted = [
        Wanted(LLAMA, "v6e 2x4", slices=2, missing=1, missing_for_s=1.0, application=name)
        for name in ("blue", "green")
    ]
    entries = [entry(LLAMA, 0, application="blue"), entry(LLAMA, 1, application="green")]
    looked = _plain(terminal.slices(wanted, entries))
    watched = _plain(terminal.service(status(Snapshot(tuple(entries), wanted=tuple(wanted)), Rates(), 0.0)))
    for text in (looked, watched):
        assert "llama (blue)" in text
        assert "llama (green)" in text
    assert "(blue)" not in _plain(terminal.slices(wanted[:1], entries[:1]))


def test_what_several_applications_decided_roll_run_and_used_is_told_apart() -> None:
    wanted = [Wanted(LLAMA, "v6e 2x4", 2, 0, 0.0, application=name) for name in ("blue", "green")]
    seen = Snapshot(
        wanted=tuple(wanted),
        decisions=(DecisionRecord(1.0, LLAMA, "v6e 2x4", 2, "load", application="green"),),
        rollouts=(Rollout("green", "green#m", LLAMA, "v6e 2x4", "1", slices=3, changed=1),),
        batches=(BatchRecord("batch_1", "in_progress", 9, 1, 0, created=1.0, at=1.0, application="green"),),
        usage=(UsageRecord("0a1b", "2026-01-01", 1, 1, 1, 1, 0.1, at=1.0, application="green"),),
    )
    text = _plain(terminal.service(status(seen, Rates(), 2.0)))
    assert text.count("(green)") == 5  # the model's own line with them
    assert text.count("(blue)") == 1


def test_nothing_served_is_said() -> None:
    assert "no model is served" in _plain(terminal.service(status(Snapshot(), Rates(), 0.0)))


def _plain(shown: object) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def test_a_quarantined_slice_and_a_refused_request_are_shown() -> None:
    failed = SliceFailures("slice-3", "10.0.0.7", "v6e-8", 2, 90.0, "its chips are held [x]", "", "r")
    suspicions = {"router": {"f00d": Suspicion(at=70.0, guilty=True, model=LLAMA)}}
    seen = Snapshot(suspicions=suspicions, slice_failures=(failed,))
    text = _plain(terminal.service(status(seen, Rates(), 100.0)))
    assert (
        "quarantined: slice slice-3, for 50 s yet; 2 failures on 10.0.0.7, the last one: its chips are held [x]"
        in text
    )
    assert "refused: request f00d of llama, under which two slices died 30 s ago" in text


def test_a_deployment_that_serve_refused_is_shown() -> None:
    seen = Snapshot(refused_deploys=(RefusedDeploy("app", "models.0.slcie: unknown key [x]", 40.0),))
    text = _plain(terminal.service(status(seen, Rates(), 100.0)))
    said = "deployment of app refused 60 s ago, what ran before runs on: models.0.slcie: unknown key [x]"
    assert said in " ".join(text.split())


def test_batches_are_shown_with_how_far_they_are_unless_their_process_is_gone() -> None:
    batches = (
        BatchRecord("batch_b", "in_progress", 10, 4, 1, created=70.0, at=99.0),
        BatchRecord("batch_w", "in_progress", 1, 0, 0, created=70.0, at=99.0, why="The storage hangs."),
        BatchRecord("batch_old", "in_progress", 10, 4, 1, created=70.0, at=9.0),
    )
    text = _plain(terminal.service(status(Snapshot(batches=batches), Rates(), 100.0)))
    assert "batch batch_b: in progress, 30 s old, 4 of 10 lines answered, 1 refused" in text
    assert "0 of 1 lines answered, waits: The storage hangs." in " ".join(text.split())
    assert "batch_old" not in text


def test_who_used_what_today_stands_in_a_table_unless_the_store_is_gone() -> None:
    used = UsageRecord("0123456789ab", "2026-11-22", 3, 12_345, 600, 70, 0.0125, at=99.0)
    old = UsageRecord("ba9876543210", "2026-11-22", 3, 0, 0, 0, 0.0, at=9.0)
    text = _plain(terminal.service(status(Snapshot(usage=(used, old)), Rates(), 100.0)))
    assert "used on 2026-11-22" in text
    (row,) = [line for line in text.splitlines() if "0123456789ab" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "0123456789ab",
        "3",
        "12,345",
        "600",
        "70",
        "0.0125",
    ]
    assert "ba9876543210" not in text


def test_a_cluster_without_a_service_says_what_to_type() -> None:
    assert _plain(terminal.slices([], [])).strip() == "nothing is deployed: `serve run` a YAML"
