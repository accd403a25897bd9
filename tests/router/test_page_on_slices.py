"""The page over a whole service: simulated slices, real Ray and Serve, HAProxy, a host that is killed, in a real Chromium."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import chromium, opened, screenshot
from service import MODEL, Service, leftovers, service

pytestmark = [pytest.mark.cluster, pytest.mark.browser]
STARTUP = "download=1,load=2,compile=4,warmup=1"


@pytest.fixture(scope="module")
def running(short_directory: Path) -> Iterator[Service]:
    with service(short_directory, slices=3, replicas=2, engine="simulated", startup=STARTUP) as started:
        yield started
    assert leftovers(started.cluster.id) == []


def test_a_killed_host_turns_its_slice_red_and_a_new_one_comes_up(running: Service) -> None:
    from playwright.sync_api import expect

    with chromium() as browser, opened(browser, running.address) as page:
        expect(page.locator(".slice.serving")).to_have_count(2)
        page.get_by_label("Message").fill("Which slice are you?")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#figures")).to_contain_text("tokens/s")
        expect(page.locator("#talk")).to_have_attribute("aria-busy", "false")
        assert page.locator(".turn.assistant .said").inner_text()

        victim, spare = running.serving()[1].slice, "slice-2"
        running.cluster.kill_host(victim, 1)
        lost = page.locator(".slice.lost", has_text=victim)
        lost.wait_for()
        assert "host 1" in lost.inner_text()
        assert "rgb(197, 34, 31)" in lost.locator(".chip .body").first.evaluate(
            "box => getComputedStyle(box).fill"
        )
        expect(page.locator("#news")).to_contain_text(f"{victim} of {MODEL} is lost")

        starting = page.locator(".slice.starting", has_text=spare)
        starting.wait_for(timeout=60_000)
        expect(
            starting.locator("progress[value]")
        ).to_be_visible()  # there is an earlier start to measure it by
        expect(starting).to_contain_text("compiling", timeout=20_000)
        screenshot(page, "killed-host")
        expect(page.locator(".slice.serving")).to_have_count(2, timeout=60_000)
        expect(page.locator(".slice.serving", has_text=spare)).to_be_visible()
        expect(page.locator(".slice.lost")).to_have_count(0, timeout=20_000)
        screenshot(page, "recovered")
