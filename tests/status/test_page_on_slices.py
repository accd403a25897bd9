"""The page over a whole service: simulated slices, real Ray and Serve, HAProxy, a host that is killed, in a real Chromium."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from support.browser import chromium, opened, screenshot
from support.leases import Leases
from support.service import MODEL, Service, service

pytestmark = [pytest.mark.cluster, pytest.mark.browser]
BORROWS = "two hosts, 2"
STARTUP = "download=1,load=2,compile=4,warmup=1"


@pytest.fixture(scope="module")
def running(leases: Leases) -> Iterator[Service]:
    with service(leases, slices=2, replicas=1, engine="simulated", startup=STARTUP) as started:
        yield started


def test_the_terminal_shows_the_same_until_interrupted(running: Service) -> None:
    with subprocess.Popen(
        [str(Path(sys.executable).parent / "serving"), "status", "--watch"],
        env=running.cluster.environment | {"COLUMNS": "160"},
        stdout=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout
        looks = 0
        for line in watching.stdout:
            looks += "slices 1 of 1 · running 0 · queue 0" in line
            if looks == 3:
                break
        watching.send_signal(signal.SIGINT)
        assert watching.wait(10) == 130


@contextmanager
def load(running: Service, clients: int) -> Iterator[None]:
    """Clients that stream one answer after the other; what they are told is not this test's business."""
    done = threading.Event()

    def client(number: int) -> None:
        while not done.wait(0.1):
            with suppress(httpx.HTTPError):
                running.post("/v1/completions", prompt=f"{number} " * 200, max_tokens=300, stream=True)

    with ThreadPoolExecutor(clients) as pool:
        for number in range(clients):
            pool.submit(client, number)
        try:
            yield
        finally:
            done.set()


def test_a_killed_host_turns_its_slice_red_and_a_new_one_comes_up(running: Service) -> None:
    from playwright.sync_api import expect

    with load(running, 8), chromium() as browser, opened(browser, running.address) as page:
        expect(page.locator(".slice.serving")).to_have_count(1)
        page.get_by_label("Message").fill("Which slice are you?")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#figures")).to_contain_text("tokens/s")
        expect(page.locator("#talk")).to_have_attribute("aria-busy", "false")
        assert page.locator(".turn.assistant .said").inner_text()
        for figure in ("output tokens/s", "TTFT p50"):  # both are measured, by slices and by the router
            shown = page.locator(".tile", has_text=figure).locator("dd")
            expect(shown).to_have_text(re.compile(r"^[1-9]"))
        screenshot(page, "under-load", whole=False)

        (victim,) = (entry.slice for entry in running.serving())
        (spare,) = {entry.name for entry in running.cluster.status()} - {victim}
        running.cluster.kill_host(victim, 1)
        lost = page.locator(".slice.lost", has_text=victim)
        lost.wait_for()
        assert "host 1" in lost.inner_text()
        colour = lost.locator(".chip .body").first.evaluate("box => getComputedStyle(box).fill")
        assert colour == "rgb(197, 34, 31)"
        expect(page.locator("#news")).to_contain_text(f"{victim} of {MODEL} is lost")

        starting = page.locator(".slice.starting", has_text=spare)
        starting.wait_for()
        screenshot(page, "killed-host", whole=False)
        expect(
            starting.locator("progress[value]")
        ).to_be_visible()  # there is an earlier start to measure it by
        expect(starting).to_contain_text("compiling")
        screenshot(page, "starting", whole=False)
        expect(page.locator(".slice.serving")).to_have_count(1)
        expect(page.locator(".slice.serving", has_text=spare)).to_be_visible()
        expect(page.locator(".slice.lost")).to_have_count(0)
        screenshot(page, "recovered", whole=False)
