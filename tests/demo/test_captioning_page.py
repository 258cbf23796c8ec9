"""The captioning page in a browser: load, run, stream, stop, refuse."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmspec.demo.captioning import Captioning, picture_examples
from mmspec.demo.uploads import UPLOAD_LIMITS
from mmspec.pipelines import VisionLanguagePipeline
from tests.demo.conftest import PHONE, columns_fit, served, visiting

SCENE = "assets/images/scene.png"


@pytest.fixture(scope="module")
def demo() -> Captioning:
    pipe = VisionLanguagePipeline.from_pretrained(
        "assets/scenes-llava", accelerator="flash", dtype=torch.float32
    )
    one = Captioning(pipe, "scenes-llava", picture_examples(Path("assets")))
    one.warm_up()
    return one


@pytest.fixture(scope="module")
def url(demo: Captioning) -> Iterator[str]:
    with served(demo.blocks()) as address:
        yield address


@pytest.fixture
def forwards(demo: Captioning, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for every forward of plain decoding, each of which takes as long as a larger model's."""
    counted: list[None] = []
    score = demo.plain.target.score

    def slowly(*args: Any) -> Any:
        counted.append(None)
        time.sleep(0.05)
        return score(*args)

    monkeypatch.setattr(demo.plain.target, "score", slowly)
    return counted


def upload(page: Any, path: Any) -> None:
    """Replace the image of the page, which opens with an example."""
    page.wait_for_selector("#image img, #image input[type=file]", state="attached")
    if page.locator("#image img").count():
        page.click("#image [aria-label='Remove Image']")
    page.locator("#image input[type=file]").set_input_files(path)


def ask(page: Any, question: str) -> None:
    page.locator("#question textarea").fill(question)
    page.click("#ask")


def lane(page: Any, name: str) -> Any:
    return page.locator(f"[data-lane={name}]").last


def test_plain_decoding_races_in_the_mode_of_the_model():
    pipe = VisionLanguagePipeline.from_pretrained("assets/scenes-diffusion", mode="autoregressive")
    assert Captioning(pipe, "scenes-diffusion").plain.target.by_blocks is pipe.target.by_blocks is False


@pytest.mark.slow
def test_a_race_gives_one_answer_twice_and_says_who_proposed_what(browser, url, demo):
    expected = demo.plain("describe the picture in detail.", images=SCENE, max_new_tokens=192)
    with visiting(browser, url) as page:
        upload(page, SCENE)
        page.wait_for_selector("#image img")
        page.wait_for_selector(".mm-empty")
        ask(page, "describe the picture in detail.")
        page.wait_for_selector(".mm-verdict")
        for name in ("none", "flash"):
            assert lane(page, name).locator(".mm-text").inner_text().split() == expected.text[0].split()
        assert lane(page, "none").locator(".mm-drafted").count() == 0
        assert lane(page, "flash").locator(".mm-drafted").count() > 0
        assert "The same tokens" in page.inner_text(".mm-verdict")
        assert lane(page, "none").locator("dd").first.inner_text() == "1.00"
        assert float(lane(page, "flash").locator("dd").first.inner_text()) > 2
        ask(page, "how many objects are there?")
        page.wait_for_function("document.querySelectorAll('.mm-verdict').length == 2")
        assert page.locator(".mm-question").all_inner_texts() == [
            "describe the picture in detail.",
            "how many objects are there?",
        ]
        page.click("#clear")
        page.wait_for_selector(".mm-empty")


def test_words_stream_and_stop_ends_the_model_within_a_round(browser, url, forwards):
    with visiting(browser, url) as page:
        upload(page, SCENE)
        page.wait_for_selector("#image img")
        ask(page, "describe the picture in detail.")
        page.wait_for_selector("[data-lane=none] .mm-own")
        some = lane(page, "none").locator(".mm-text").inner_text()
        page.wait_for_function(
            "least => document.querySelector('[data-lane=none] .mm-text').innerText.length > least",
            arg=len(some),
        )
        page.click("#stop")
        page.wait_for_selector("#ask")
        stopped = len(forwards)
        assert 0 < stopped < 100
        assert lane(page, "none").locator(".mm-tag").all_inner_texts() == ["stopped"]
        page.wait_for_timeout(500)
        assert len(forwards) == stopped


def test_an_image_is_selected_at_the_start_and_enter_asks_on_a_phone(browser, url, demo):
    with visiting(browser, url, PHONE) as page:
        page.wait_for_selector("#image img")
        assert "6 shapes" in page.inner_text(".mm-toy")
        page.locator("#question textarea").fill("what is in the picture?")
        page.locator("#question textarea").press("Enter")
        page.wait_for_selector(".mm-verdict")
        assert columns_fit(page)
        answer = lane(page, "none").locator(".mm-text").inner_text()
    (expected,) = demo.plain("what is in the picture?", images=SCENE, max_new_tokens=192).text
    assert answer.split() == expected.split()


def large_picture() -> bytes:
    file = io.BytesIO()
    Image.new("1", (5000, 5000)).save(file, "PNG")
    return file.getvalue()


BAD = {
    "words.png": (b"no picture at all", "text data"),
    "cut.png": (Path(SCENE).read_bytes()[:9000], "damaged"),
    "bomb.png": (large_picture(), "16,777,216 pixels"),
}


def test_bad_uploads_and_questions_are_refused_by_name(browser, url, tmp_path):
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(UPLOAD_LIMITS.max_video_bytes + 1)
    with visiting(browser, url) as page:
        toasts = page.locator(".toast-body")
        for name, (data, said) in BAD.items():
            upload(page, {"name": name, "mimeType": "image/png", "buffer": data})
            assert said in toasts.filter(has_text=name).first.inner_text()
            page.wait_for_selector("#image input[type=file]", state="attached")
            assert page.locator("#image img").count() == 0, "it is removed"
        upload(page, large)
        toasts.filter(has_text=re.compile("maximum allowed size", re.IGNORECASE)).first.wait_for()
        assert page.locator("#image img").count() == 0
        ask(page, " ")
        toasts.filter(has_text="question must not be empty").first.wait_for()
        page.wait_for_selector("#ask")
