"""The image page in a browser: load, run, fill in, stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmspec.demo.image_generation import ImageGeneration
from mmspec.pipelines import ImagePipeline
from tests.demo.conftest import PHONE, columns_fit, served, visiting

PROMPT = "a red ring left of a small blue cross"


@pytest.fixture(scope="module")
def demo() -> ImageGeneration:
    pipe = ImagePipeline.from_pretrained("assets/scenes-llamagen", accelerator="none", dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    one = ImageGeneration(pipe, "scenes-llamagen", [PROMPT])
    one.warm_up()
    return one


@pytest.fixture(scope="module")
def url(demo: ImageGeneration) -> Iterator[str]:
    with served(demo.blocks()) as address:
        yield address


def state(page: Any, name: str) -> None:
    page.wait_for_selector(f"#figures [data-state={name}]")


@pytest.mark.slow
def test_an_image_is_drawn_as_the_pipeline_draws_it(browser, url, demo, tmp_path):
    with visiting(browser, url) as page:
        page.locator("#prompt textarea").press("Enter")
        state(page, "done")
        page.wait_for_selector("#heat .mm-heat img")
        page.wait_for_selector("#draw")
        with page.expect_download() as download:
            page.click("#canvas [aria-label='Download']")
        download.value.save_as(tmp_path / "image.png")
        nfe = int(page.locator("#figures dd").nth(1).inner_text())
    demo.pipe.set_accelerator("sjd")
    wanted = demo.pipe(PROMPT, seed=0)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "image.png")), np.asarray(wanted.images[0]))
    assert nfe == wanted.stats.target_forwards < 128


def test_the_image_fills_in_and_stop_ends_the_model_within_a_round(browser, url, demo, monkeypatch):
    counted: list[None] = []
    score = demo.pipe.target.score

    def slowly(*args: Any) -> Any:
        counted.append(None)
        time.sleep(0.05 if len(counted) < 20 else 0.3)  # still runs when a busy machine stops it
        return score(*args)

    monkeypatch.setattr(demo.pipe.target, "score", slowly)
    with visiting(browser, url) as page:
        page.click("#draw")
        page.wait_for_selector("#canvas img")
        first = page.locator("#canvas img").get_attribute("src")
        page.wait_for_function(
            "before => document.querySelector('#canvas img').getAttribute('src') != before", arg=first
        )
        page.click("#stop")
        state(page, "stopped")
        page.wait_for_selector("#draw")
        stopped = len(counted)
        assert 0 < stopped < 60
        page.wait_for_timeout(400)
        assert len(counted) == stopped
        page.locator("#prompt textarea").fill(" ")
        page.click("#draw")
        assert "prompt must not be empty" in page.locator(".toast-body").inner_text()
        page.wait_for_selector("#draw")


@pytest.mark.slow
def test_the_page_fits_a_phone_and_states_what_a_toy_model_draws(browser, url):
    with visiting(browser, url, PHONE) as page:
        page.wait_for_selector("#draw")
        assert columns_fit(page)
        assert "6 shapes" in page.inner_text(".mm-toy") and "8 colours" in page.inner_text(".mm-toy")


def test_an_option_of_0_keeps_the_default_of_each_method(demo):
    for name in ("sjd", "cjd", "gsd"):
        demo.pipe.set_accelerator(name)
        nodes = demo.pipe.accelerator.drafter.max_nodes
        assert demo.methods.enter(name, window=None, delta=None).drafter.max_nodes == nodes


def test_only_methods_that_fit_are_offered_and_only_their_options_are_used(demo):
    assert {"none", "sjd", "gsd", "lantern", "zipar", "eagle"} <= set(demo.methods.names)
    assert not {"masked", "flash", "draft_model"} & set(demo.methods.names)
    assert demo.methods.taking("delta") == ["gsd", "lantern"]
    assert "zipar" not in demo.methods.taking("window")
    assert demo.methods.enter("gsd", window=8, delta=0.3).exactness == "tv<=0.3"
    assert demo.methods.enter("none", window=8, delta=0.3).exactness == "exact"
