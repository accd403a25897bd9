"""The page in a real Chromium, over the router's own HTTP surface and a simulated engine; slices are made up."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from support import simulated_engine
from support.browser import PHONE, chromium, opened, screenshot
from support.page_service import Shown, entry, shown
from support.servers import asgi_server

from serving.router.http import auth
from serving.state.records import (
    BatchRecord,
    DecisionRecord,
    Demand,
    RefusedDeploy,
    SliceFailures,
    SliceState,
    Suspicion,
    UsageRecord,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
MODEL = simulated_engine.MODEL
READABLE = 4.5  # WCAG AA: contrast of text to what is behind it

# Of every piece of text that is seen: what stands out too little from its background.
_FAINT = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour, under) => {
    canvas.fillStyle = `rgb(${under.join(" ")})`; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((one) => (one /= 255) <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const above = [];
    for (let one = element; one; one = one.parentElement) above.push(getComputedStyle(one).backgroundColor);
    return above.reduceRight((under, colour) => rgb(colour, under), [255, 255, 255]);
  };
  return [...document.querySelectorAll("body *")].flatMap((element) => {
    const said = [...element.childNodes].filter((node) => node.nodeType === 3 && node.data.trim()).map((node) => node.data.trim());
    if (!said.length || !element.checkVisibility() || element.matches(":disabled, option, .skip")) return [];
    const under = behind(element), style = getComputedStyle(element);
    const [a, b] = [light(rgb(element instanceof SVGElement ? style.fill : style.color, under)), light(under)].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    return contrast < READABLE ? [`${said.join(" ")}: ${contrast.toFixed(2)}`] : [];
  });
}""".replace("READABLE", str(READABLE))


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with simulated_engine.serving() as (address, _):
        yield address


def busy(upstream: str) -> Shown:
    """Slices in every state, a queue, and five minutes of figures."""
    service = Shown([MODEL, "qwen3-32b"], wanted=3, why="2 hosts without TPU_NAME (10.0.0.1, 10.0.0.2)")
    service.decisions = [DecisionRecord(20, MODEL, "", 3, "queue of 14 a slice, over 4 for 10 s")]
    lost = entry(MODEL, 1, SliceState.LOST, reason="slice slice-1: host 1 (127.100.1.1) is gone")
    starting = entry(MODEL, 2, SliceState.STARTING, phase="compiling", phases=(("loading weights", 28.0),))
    for step in range(30):
        serving = entry(MODEL, 0, address=upstream, output_tokens=2000 * step, kv_usage=0.4, running=12)
        service.entries = [serving, lost, starting]
        service.demands = [Demand("router", MODEL, held=7, ttft_p50_s=0.2, ttft_p90_s=0.3, beat=step)]
        service.step()
    return service


def said(page: "Page") -> "Page":
    """Wait until the answer under way is whole."""
    from playwright.sync_api import expect

    expect(page.locator("#talk")).to_have_attribute("aria-busy", "false")
    return page


def ask(page: "Page", prompt: str) -> str:
    """Ask and return the whole answer."""
    turns = page.locator(".turn.assistant").count()
    page.get_by_label("Message").fill(prompt)
    page.get_by_role("button", name="Send").click()
    page.locator(".turn.assistant").nth(turns).wait_for()
    return said(page).locator(".turn.assistant").nth(turns).inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_it_draws_every_state_readably(browser: "Browser", upstream: str, scheme: str, device: str) -> None:
    how: dict[str, Any] = (
        {"viewport": PHONE, "has_touch": True, "is_mobile": True} if device == "phone" else {}
    )
    with (
        shown(busy(upstream)) as service,
        opened(browser, service.address, color_scheme=scheme, **how) as page,
    ):
        for state in ("serving", "lost", "starting"):
            page.locator(f".slice.{state}").wait_for()
        assert page.locator(".slice.serving .chip").count() == 8
        assert "7 in the router" in (page.locator(".tile.warn").get_attribute("title") or "")
        assert "queue of 14 a slice" in page.locator("#decisions").inner_text()
        assert page.locator(".slice.missing").count() == 2  # one of the first model, three of the other
        assert "2 hosts without TPU_NAME" in page.locator(".slice.missing").first.inner_text()
        assert "simulated" in page.locator(".slice.serving").inner_text()
        assert "planned" in page.locator(".slice.serving").inner_text()
        colour = page.locator(".slice.lost .chip .body").first.evaluate("box => getComputedStyle(box).fill")
        red, green, blue = (int(one) for one in colour.removeprefix("rgb(").removesuffix(")").split(","))
        assert red > green + 80
        assert red > blue + 80
        assert page.evaluate(_FAINT) == []
        sideways = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(sideways) == 0
        screenshot(page, f"states-{scheme}-{device}")


def test_the_page_paints_and_says_when(browser: "Browser", upstream: str) -> None:
    """The figure is for README; a machine with other work has no bound."""
    # The page may be complete before the browser has painted any of it.
    script = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    with shown(busy(upstream)) as service:
        paints = []
        for _ in range(5):  # the best of them: whatever else the machine does only ever adds
            with opened(browser, service.address) as page:
                page.locator(".slice.serving").wait_for()
                paints.append(round(page.wait_for_function(script).json_value()))
        print(f"first contentful paint after {sorted(paints)} ms")
        assert len(paints) == 5


def test_a_chat_streams_with_its_times(browser: "Browser", upstream: str) -> None:
    with shown(busy(upstream)) as service, opened(browser, service.address) as page:
        page.locator(".slice.serving").wait_for()
        page.get_by_text("Parameters").click()
        page.get_by_label("Most tokens").fill("40")
        page.get_by_label("System prompt").fill("Be brief.")
        with page.expect_request("**/v1/chat/completions") as sent:
            answer = ask(page, "Hello there")
        body = json.loads(sent.value.post_data or "")
        assert (body["model"], body["stream"], body["max_tokens"]) == (MODEL, True, 40)
        assert [turn["role"] for turn in body["messages"]] == ["system", "user"]
        assert len(answer.split()) > 10
        figures = page.locator("#figures").inner_text()
        assert figures.startswith("TTFT ")
        # No pace where a busy machine lets the browser have all of the answer at one moment.
        assert re.search(r"· ([\d.k]+|\u2013) tokens/s · \d+ tokens ·", figures)
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "And then?")
        turns = json.loads(sent.value.post_data or "")["messages"]
        assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
        assert turns[2]["content"] in answer


def test_the_keyboard_is_enough(browser: "Browser", upstream: str) -> None:
    focused = "() => document.activeElement.id || document.activeElement.textContent"
    with shown(busy(upstream)) as service, opened(browser, service.address) as page:
        page.locator(".slice.serving").wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "Skip to the chat"
        page.keyboard.press("Enter")
        assert page.evaluate(focused) == "chat"
        seen = []
        while page.evaluate(focused) != "prompt":
            page.keyboard.press("Tab")
            seen.append(page.evaluate(focused))
            assert len(seen) < 10, seen
        assert "model" in seen
        page.keyboard.type("Hello")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("there")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.keyboard.press("Enter")
        assert json.loads(sent.value.post_data or "")["messages"][-1]["content"] == "Hello\nthere"
        said(page)
        assert page.evaluate(focused) == "prompt"
        outline = page.locator("#prompt").evaluate("box => getComputedStyle(box).outlineStyle")
        assert outline == "solid"


def test_every_control_has_a_name(browser: "Browser", upstream: str) -> None:
    with shown(busy(upstream)) as service, opened(browser, service.address) as page:
        page.locator(".slice.serving").wait_for()
        page.get_by_text("Parameters").click()
        page.get_by_text("The next request as code").click()
        page.get_by_role("button", name="API key").click()
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll("button, input, select, textarea, progress, meter, svg[role], [role=img], dialog, section")]
              .filter((one) => !(one.labels?.length || one.ariaLabel || one.getAttribute("aria-label") || one.getAttribute("aria-labelledby") || one.textContent.trim()))
              .map((one) => one.outerHTML)"""
        )
        assert unnamed == []
        live = page.locator("[aria-live=polite], [role=log], [role=alert], [role=status]")
        assert live.count() >= 5


HOSTILE = [
    "<img src=x onerror=window.pwned=1>",
    "</script><script>window.pwned=1</script>",
    "\"><svg onload=window.pwned=1><a href='javascript:window.pwned=1'>x</a>",
    "'; window.pwned=1; //\u2028${window.pwned=1}",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_a_service_says_becomes_markup(browser: "Browser", text: str) -> None:
    async def answer(_: Request) -> StreamingResponse:
        events = [{"choices": [{"delta": {"content": text, "reasoning_content": text}}]}, {"choices": []}]
        lines = [f"data: {json.dumps(one)}\n\n" for one in events] + ["data: [DONE]\n\n"]
        return StreamingResponse(iter(lines), media_type="text/event-stream")

    model = "".join(filter(str.isprintable, text))  # the YAML takes no other name
    with asgi_server(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])) as engine:
        service = Shown([model], [entry(model, 0, address=engine)], wanted=2)
        service.entries.append(
            entry(model, 1, SliceState.LOST, reason=text, slice=text, shape=text, hosts=(text,), phase=text)
        )
        service.entries.append(entry(model, 2, SliceState.STARTING, phase=text, phases=((text, 1.0),)))
        service.decisions = [DecisionRecord(1, model, "", 1, text)]
        service.failures = [SliceFailures(text, text, text, 2, 0.0, text, "", text)]
        with shown(service), opened(browser, service.address) as page:
            page.locator(".slice.lost").wait_for()
            page.get_by_text("The next request as code").click()
            page.get_by_label("Python").check()
            assert text in ask(page, text)
            assert page.locator(".turn.user .said").inner_text() == text
            assert page.locator(".model h3").inner_text().startswith(model[:20])
            allowed = page.evaluate(
                "() => [window.pwned ?? null, document.querySelectorAll('img, iframe, object, svg[onload], [href^=javascript]').length,"
                " document.scripts.length]"
            )
            assert allowed == [None, 0, 1]


def test_what_an_operator_should_know_of_is_shown_while_it_holds(browser: "Browser", upstream: str) -> None:
    from playwright.sync_api import expect

    service = Shown([MODEL], [entry(MODEL, 0, address=upstream)])
    service.failures = [
        SliceFailures("slice-3", "10.0.0.7", "v6e-8", 2, 1000.0, "its chips are held by pid 7", "", "r")
    ]
    service.suspicions = {"f00d": Suspicion(at=0.0, guilty=True, model=MODEL)}
    service.refused_deploys = [RefusedDeploy("app", "no such key", 0.0)]
    with shown(service), opened(browser, service.address) as page:
        troubles = page.locator("#troubles li")
        expect(troubles).to_have_count(3)
        assert troubles.nth(0).inner_text().startswith("refused deployment of app, ")
        assert troubles.nth(0).inner_text().endswith("; what ran before runs on: no such key")
        assert re.fullmatch(
            "quarantined slice slice-3, for .+ yet; 2 failures on 10.0.0.7, the last one: its chips are held by pid 7",
            troubles.nth(1).inner_text(),
        )
        assert troubles.nth(2).inner_text().startswith(f"refused request f00d of {MODEL}")
        service.failures, service.suspicions, service.refused_deploys = [], {}, []
        expect(page.locator("#troubles")).to_be_hidden()


def test_batches_are_shown_with_their_progress_until_they_are_over(browser: "Browser", upstream: str) -> None:
    from playwright.sync_api import expect

    service = Shown([MODEL], [entry(MODEL, 0, address=upstream)])
    service.batches = [BatchRecord("batch_b", "in_progress", 10, 4, 1, created=0.0, at=0.0, why="It hangs.")]
    with shown(service), opened(browser, service.address) as page:
        batches = page.locator("#batches li")
        expect(batches).to_have_count(1)
        assert re.fullmatch(
            r"batch_b, in progress, .+ old:\s+4 of 10 lines answered, 1 refused, waits: It hangs\.",
            batches.first.inner_text(),
        )
        assert page.get_by_label("batch batch_b").get_attribute("value") == "5"
        service.batches = []
        expect(page.locator("#batches-section")).to_be_hidden()


def test_usage_of_today_is_shown_by_key(browser: "Browser", upstream: str) -> None:
    from playwright.sync_api import expect

    service = Shown([MODEL], [entry(MODEL, 0, address=upstream)])
    service.usage = [UsageRecord("0123456789ab", "2026-11-22", 3, 12_345, 600, 70, 0.0125, at=0.0)]
    with shown(service), opened(browser, service.address) as page:
        rows = page.locator("#usage tbody tr")
        expect(rows).to_have_count(1)
        expect(rows.first.locator("td")).to_have_text(["0123456789ab", "3", "12,345", "600", "70", "0.0125"])
        service.usage = []
        expect(page.locator("#usage-section")).to_be_hidden()


def test_an_error_is_shown_in_the_services_words(browser: "Browser", upstream: str) -> None:
    service = Shown([MODEL, "empty"], [entry(MODEL, 0, address=upstream)])
    with shown(service), opened(browser, service.address, ("400", "503")) as page:
        page.locator(".slice.serving").wait_for()
        page.get_by_text("Parameters").click()
        page.get_by_label("Most tokens").fill("1000000")
        assert "maximum context length" in ask(page, "Hello")
        page.get_by_label("Most tokens").fill("16")
        page.get_by_label("Model", exact=True).select_option("empty")
        assert "No slice of 'empty' is ready" in ask(page, "Hello")
        page.get_by_label("Model", exact=True).select_option(MODEL)
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "Once more")
        # What was refused is no part of the conversation.
        assert json.loads(sent.value.post_data or "")["messages"] == [
            {"role": "user", "content": "Once more"}
        ]


def test_an_answer_is_shown_as_it_comes_and_says_so_if_it_breaks_off(browser: "Browser") -> None:
    from playwright.sync_api import expect

    seen = threading.Event()

    async def pieces() -> AsyncIterator[str]:
        yield 'data: {"choices": [{"delta": {"content": "Half of"}}]}\n\n'
        await asyncio.to_thread(seen.wait, 10)
        yield 'data: {"error": {"message": "The slice is lost.", "code": "slice_lost"}}\n\n'

    async def broken(_: Request) -> StreamingResponse:
        return StreamingResponse(pieces(), media_type="text/event-stream")

    with asgi_server(Starlette(routes=[Route("/{path:path}", broken, methods=["POST"])])) as engine:
        service = Shown([MODEL], [entry(MODEL, 0, address=engine)])
        with shown(service), opened(browser, service.address) as page:
            page.locator(".slice.serving").wait_for()
            page.get_by_label("Message").fill("Hello")
            page.get_by_role("button", name="Send").click()
            expect(page.locator(".turn.assistant .said")).to_have_text("Half of")
            expect(page.locator("#talk")).to_have_attribute("aria-busy", "true")
            seen.set()
            expect(said(page).locator(".turn.assistant .error")).to_have_text("The slice is lost.")


def test_an_answer_can_be_stopped(browser: "Browser") -> None:
    from playwright.sync_api import expect

    hung_up = threading.Event()

    async def endless() -> AsyncIterator[str]:
        try:
            while True:
                yield 'data: {"choices": [{"delta": {"content": "more "}}]}\n\n'
                await asyncio.sleep(0.05)
        finally:
            hung_up.set()

    async def answer(_: Request) -> StreamingResponse:
        return StreamingResponse(endless(), media_type="text/event-stream")

    with asgi_server(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])) as engine:
        service = Shown([MODEL], [entry(MODEL, 0, address=engine)])
        with shown(service), opened(browser, service.address) as page:
            page.locator(".slice.serving").wait_for()
            page.get_by_label("Message").fill("Hello")
            page.get_by_role("button", name="Send").click()
            expect(page.locator(".turn.assistant .said")).to_contain_text("more more")
            page.keyboard.press("Escape")
            expect(said(page).locator(".turn.assistant")).to_contain_text("stopped")
            assert hung_up.wait(60)


KEY, KEYS = auth.new("page")
STORED = "() => [sessionStorage.getItem('serving.key'), localStorage.length, document.cookie]"


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(browser: "Browser", upstream: str) -> None:
    from playwright.sync_api import expect

    service = Shown([MODEL], [entry(MODEL, 0, address=upstream)], keys=KEYS, private_status=True)
    with shown(service), opened(browser, service.address, ("401",)) as page:
        dialog, field = page.get_by_role("dialog"), page.get_by_label("Key", exact=True)
        expect(dialog).to_contain_text("asks for an API key")
        expect(field).to_be_focused()
        expect(field).to_have_attribute("type", "password")
        screenshot(page, "key-asked")
        page.keyboard.type("clé")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_contain_text("can't be sent")
        for wrong in ("sk-wrong", HOSTILE[0].replace(" ", "/")):
            field.fill(wrong)
            page.keyboard.press("Enter")
            expect(dialog).to_contain_text("does not know this key")
            expect(field).to_have_value("")
        field.fill(KEY)
        page.keyboard.press("Enter")
        page.locator(".slice.serving").wait_for()
        assert len(ask(page, "Hello").split()) > 5
        assert page.evaluate(STORED) == [KEY, 0, ""]
        page.get_by_text("The next request as code").click()
        assert "$API_KEY" in page.locator("#code").inner_text()
        page.get_by_label("Python").check()
        assert 'os.environ["API_KEY"]' in page.locator("#code").inner_text()
        assert KEY not in page.content()
        page.reload()
        page.locator(".slice.serving").wait_for()
        assert not dialog.is_visible()
        page.get_by_role("button", name="API key").click()
        page.get_by_role("button", name="Forget").click()
        assert page.evaluate(STORED) == [None, 0, ""]


def test_a_dialog_that_is_left_is_not_forced_on_the_user(browser: "Browser", upstream: str) -> None:
    from playwright.sync_api import expect

    service = Shown([MODEL], [entry(MODEL, 0, address=upstream)], keys=KEYS, private_status=True)
    with shown(service), opened(browser, service.address, ("401",)) as page:
        dialog = page.get_by_role("dialog")
        dialog.wait_for()
        page.keyboard.press("Escape")
        expect(page.locator("#link")).to_contain_text("an API key is needed")
        with page.expect_response("**/status.json"):
            pass  # it asks the service again, but not the user
        assert not dialog.is_visible()
        page.get_by_role("button", name="API key").click()
        page.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        page.locator(".slice.serving").wait_for()


def test_a_chat_asks_for_a_key_where_the_status_is_open(browser: "Browser", upstream: str) -> None:
    service = Shown([MODEL], [entry(MODEL, 0, address=upstream)], keys=KEYS)
    with shown(service), opened(browser, service.address, ("401",)) as page:
        page.locator(".slice.serving").wait_for()
        page.get_by_label("Message").fill("Hello")
        page.get_by_role("button", name="Send").click()
        page.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        page.locator(".turn.assistant .said:not(:empty)").wait_for()
        assert "TTFT" in said(page).locator("#figures").inner_text()


def test_a_page_left_open_survives_a_restart(browser: "Browser", upstream: str) -> None:
    from playwright.sync_api import expect

    first = Shown([MODEL], [entry(MODEL, 0, address=upstream)])
    second = Shown([MODEL], [entry(MODEL, 5, address=upstream)])
    with chromium_page_over(browser, first) as page:
        port = urlsplit(first.address).port or 0
        expect(page.locator("#link")).to_contain_text("no connection")
        assert page.locator(".slice.serving").count() == 1  # the last view stays, faded
        screenshot(page, "service-gone")
        with shown(second, port):
            expect(page.locator("#link")).to_contain_text("live")
            expect(page.locator(".slice.serving")).to_contain_text("slice-5")
            assert len(ask(page, "Hello").split()) > 5


@contextmanager
def chromium_page_over(browser: "Browser", service: Shown) -> "Iterator[Page]":
    """A page whose service has ended since it was opened."""
    with shown(service):
        tab = opened(
            browser, service.address, ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")
        )
        page = tab.__enter__()
        page.locator(".slice.serving").wait_for()
    try:
        yield page
    finally:
        tab.__exit__(None, None, None)


@pytest.mark.parametrize("prompt", ["Hello", 'It\'s "quoted" \\ $HOME `id` é 😀\nand a second line'])
def test_the_request_as_code_runs(browser: "Browser", upstream: str, prompt: str) -> None:
    with (
        shown(busy(upstream)) as service,
        opened(browser, service.address, permissions=["clipboard-read", "clipboard-write"]) as page,
    ):
        page.locator(".slice.serving").wait_for()
        page.get_by_text("The next request as code").click()
        page.get_by_label("Message").fill(prompt)
        page.get_by_role("button", name="Copy").click()
        page.get_by_text("copied").wait_for()
        curl = page.evaluate("() => navigator.clipboard.readText()")
        page.get_by_label("Python").check()
        python = page.locator("#code").inner_text()
        answer = ask(page, prompt).removeprefix(MODEL).strip()
    with shown(busy(upstream), urlsplit(service.address).port or 0):
        by_curl = subprocess.run(
            ["bash", "-c", curl], capture_output=True, text=True, timeout=30, check=True
        ).stdout
        pieces = [json.loads(line[6:]) for line in by_curl.splitlines() if line.startswith("data: {")]
        told = "".join(one["choices"][0]["delta"].get("content") or "" for one in pieces if one["choices"])
        by_python = subprocess.run(
            [sys.executable, "-c", python], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    assert told == by_python.strip("\n") == answer
