"""Pages of the demos in a real browser: the system's Chromium, without a window."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import gradio
import pytest

from mmspec.cli.demo import launch
from mmspec.cli.serve import listen

PATIENCE = 20_000  # milliseconds
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine: install the system's package `chromium`")
    with sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield one
        one.close()


@contextlib.contextmanager
def served(blocks: gradio.Blocks) -> Iterator[str]:
    """Serve a page at a free port; yields its address."""
    with listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()[:2]
    try:
        yield launch(blocks, host, port)
    finally:
        blocks.close(verbose=False)


@contextlib.contextmanager
def visiting(browser: Any, url: str, size: dict[str, int] = DESKTOP, scheme: str = "light") -> Iterator[Any]:
    """Open a page, and check afterwards that it sent requests to its own server only."""
    context = browser.new_context(viewport=size, color_scheme=scheme)
    context.set_default_timeout(PATIENCE)
    page, asked, complaints = context.new_page(), set(), []
    page.on("request", lambda request: asked.add(request.url.split("?")[0]))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    yield page
    context.close()
    assert {one for one in asked if not one.startswith((url, "data:", "blob:"))} == set()
    assert complaints == []


def columns_fit(page: Any) -> bool:
    """Whether nothing is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def background(page: Any) -> int:
    """Brightness of the page's background, 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.querySelector('.gradio-container')).backgroundColor")
    if colour in ("rgba(0, 0, 0, 0)", "transparent"):
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return max(int(part) for part in colour.split("(")[1].split(")")[0].split(",")[:3])
