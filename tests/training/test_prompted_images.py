"""Drafters of every family learn from images that their target generates, given only prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModel, PreTrainedModel

from mmspec.errors import InputError
from mmspec.pipelines.drafter_prompts import ImagePrompts
from mmspec.training.data.images import PromptedImages
from mmspec.training.drafter import train_drafter
from mmspec.training.recipes import RECIPES
from tests.tiny_models import tiny_anole, tiny_emu3, tiny_emu3_5, tiny_janus, tiny_lumina
from tests.tiny_models.glm_image import tiny_glm_pipeline

METHOD = "cjd"
SETTINGS = {"width": 16, "num_heads": 2, "context": 4, "learnt_window": 6, "window": 8, "corrected": 4}
PROMPTS = ("a red circle", "a blue square", "a circle", "the small square")


def glm_image(folder: Path) -> None:
    pipe = tiny_glm_pipeline()
    pipe.vision_language_encoder.save_pretrained(folder)
    pipe.processor.save_pretrained(folder.parent / "processor")


def drawer(make: Callable[[], tuple[PreTrainedModel, Any]]) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        model, words = make()
        model.save_pretrained(folder)
        words.save_pretrained(folder)

    return save


FAMILIES: dict[str, Callable[[Path], None]] = {
    "janus": drawer(tiny_janus),
    "emu3": drawer(tiny_emu3),
    "emu3_5": drawer(tiny_emu3_5),
    "anole": drawer(tiny_anole),
    "lumina_mgpt": drawer(tiny_lumina),
    "glm_image": glm_image,
}


SIZES = {"glm_image": 64, "lumina_mgpt": 96, "emu3": 8, "emu3_5": 64}  # the others draw small images


def prompts_in(folder: Path, *lines: str) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join([*(json.dumps({"prompt": prompt}) for prompt in PROMPTS), *lines, ""]))
    return file


def test_too_few_prompts_are_an_error_before_any_weights_are_read(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a red ring"}\n{"prompt": "a star"}\n')
    with pytest.raises(
        InputError, match="data must have more than the 2 rows that are held out; got '2 rows'"
    ):
        ImagePrompts(file)


@pytest.mark.parametrize(("family", "method"), [(family, METHOD) for family in FAMILIES])
@pytest.mark.every(6)
def test_heads_of_every_family(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = PromptedImages.trial
    monkeypatch.setattr(PromptedImages, "trial", lambda data: replace(whole(data), new_tokens=8))
    FAMILIES[family](tmp_path / family)
    file, losses = prompts_in(tmp_path), []
    size = SIZES.get(family)
    out = train_drafter(
        tmp_path / family,
        tmp_path / "out",
        ImagePrompts(file, size, size),
        method=method,
        settings=SETTINGS if method == METHOD else {"width": 16, "window": 8},
        steps=3,
        batch_size=2,
        on_step=lambda step, loss: losses.append(loss),
    )
    # distributions of random targets are peaked: their divergence from stale ones has no small bound
    assert len(losses) == 3 and all(loss > 0 and math.isfinite(loss) for loss in losses)
    record = json.loads((out / "training.json").read_text())
    assert record["stages"][0]["acceptance"] >= 1 and file.name in record["command"]
    head = AutoModel.from_pretrained(out)
    assert type(head) is RECIPES[method].head and head.config.width == 16
