"""Take the screenshots of the demos in docs/images, at the width of a desktop and of a phone.

Needs playwright and the system's chromium. Start the two demos first:

    mmspec demo caption --accelerator flash --port 7871
    mmspec demo generate --port 7872
    python docs/screenshots.py http://127.0.0.1:7871 http://127.0.0.1:7872 [FOLDER]
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).with_name("images")
WIDTHS = {"": 1280, "-phone": 390}
PATIENCE = 600_000  # milliseconds; drawing with all methods takes minutes on a CPU
#: Name of each demo, with the tab and the buttons to click, and what appears at the end.
DEMOS = {
    "demo-caption": (["#ask"], ".mm-verdict"),
    "demo-generate": (["role=tab[name=Compare]", "#compare"], "#cards [data-done]"),
}


def take(browser: Any, url: str, name: str, folder: Path) -> None:
    """Run a demo once, and save the whole page at each width with 256 colours."""
    clicks, done = DEMOS[name]
    page = browser.new_page(color_scheme="light")
    page.set_default_timeout(PATIENCE)
    page.goto(url)
    for click in clicks:
        page.click(click)
    page.wait_for_selector(done)
    for suffix, width in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(1000)  # the layout moves
        shot = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
        path = folder / f"{name}{suffix}.png"
        shot.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
        print(f"{path}: {path.stat().st_size:,} bytes")
    page.close()


def main() -> None:
    """Take all screenshots."""
    urls, folder = sys.argv[1:3], Path(sys.argv[3]) if sys.argv[3:] else IMAGES
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for url, name in zip(urls, DEMOS, strict=True):
            take(browser, url, name, folder)
        browser.close()


if __name__ == "__main__":
    main()
