"""The shipped heads: small, documented, made for the shipped model, and of use to it."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from mmspec import MMSpecPipeline
from mmspec.scenes import render, sample_scene

ASSETS = Path(__file__).parents[2] / "assets"
RUN_BY = {
    "scenes-llava-eagle": "eagle",
    "scenes-llava-eagle3": "eagle3",
    "scenes-llava-vispec": "eagle",
    "scenes-llava-flash": "flash",
    "scenes-llava-medusa": "medusa",
    "scenes-llava-hydra": "hydra",
    "scenes-hybrid-dflash": "dflash",
    "scenes-hybrid-dspark": "dspark",
}
LEAST = 3.0  # tokens a forward; heads of random weights get 1.0 to 1.1
NEW_TOKENS = 64


@functools.cache
def pipeline(model: str) -> MMSpecPipeline:
    return MMSpecPipeline.from_pretrained(str(ASSETS / model), accelerator="none", dtype=torch.float32)


def answer(model: str, accelerator: str, drafter: str | None = None):
    pipe = pipeline(model)
    if drafter is None:
        pipe.set_accelerator(accelerator)
    else:
        pipe.set_accelerator(accelerator, drafter=drafter)
    image = Image.fromarray(render(sample_scene(21_001)))
    return pipe("describe the picture in detail.", images=image, max_new_tokens=NEW_TOKENS)


def test_heads_are_small_and_carry_their_cards() -> None:
    for name in RUN_BY:
        folder = ASSETS / name
        files = [path for path in folder.iterdir() if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 3_000_000, name
        assert not [path for path in files if path.suffix in (".bin", ".pt", ".pkl")], "safetensors only"
        record, card = json.loads((folder / "training.json").read_text()), (folder / "README.md").read_text()
        assert name == f"{record['target']}-{record['method']}"
        assert all(str(stage["steps"]) in card for stage in record["stages"]), "the card is of these weights"


@pytest.mark.parametrize(("name", "accelerator"), RUN_BY.items())
def test_it_says_the_same_in_fewer_forwards(name: str, accelerator: str) -> None:
    model = name.rpartition("-")[0]
    plain, fast = answer(model, "none"), answer(model, accelerator, str(ASSETS / name))
    assert fast.tokens == plain.tokens
    assert fast.stats.acceptance_length > LEAST


def test_the_layer_inside_a_checkpoint_drafts() -> None:
    plain, fast = answer("scenes-hybrid", "none"), answer("scenes-hybrid", "mtp")
    assert fast.tokens == plain.tokens
    assert fast.stats.acceptance_length > LEAST
