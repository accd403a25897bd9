"""A real Chromium for tests of the page. What its console says is kept: a page that complains fails its test."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

# Kept after a run, to be looked at; git ignores it.
SCREENSHOTS = Path(__file__).parents[2] / ".screenshots"
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
_PATIENCE_MS = 60_000  # a condition that is awaited; a machine with other work may be slow to meet it
_QUIET = (  # no look-ups of its maker's hosts
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
)


@contextmanager
def chromium() -> "Iterator[Browser]":
    """Debian's Chromium, without a window. Where there is none the test fails and says what to install."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    assert found, "the page is tested in a real browser: install Chromium (Debian: apt-get install chromium)"
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=_PATIENCE_MS)

    with sync_playwright() as playwright:
        # Containers run tests as root, where Chromium's own sandbox can't start; all it opens here is our page.
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu", *_QUIET]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: "Browser", address: str, complaints: tuple[str, ...] = (), **context: Any
) -> "Iterator[Page]":
    """The page of a service in a tab of its own; afterwards the console has said nothing but the expected `complaints`."""
    made = browser.new_context(**{"viewport": DESKTOP, "base_url": address, **context})
    made.set_default_timeout(_PATIENCE_MS)
    said: list[str] = []

    def heard(message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            said.append(f"{message.type}: {message.text} ({message.location.get('url')})")

    page = made.new_page()
    page.on("console", heard)
    page.on("pageerror", lambda error: said.append(f"exception: {error}"))
    try:
        page.goto(address)
        yield page
    finally:
        made.close()
    assert [one for one in said if not any(expected in one for expected in complaints)] == []


def screenshot(page: "Page", name: str, *, whole: bool = True) -> None:
    SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=whole)
