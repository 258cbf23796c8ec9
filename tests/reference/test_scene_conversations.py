"""Scenes as sequences for drafters of vision-language models, and a head that learns from them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from mmspec.methods.flash.head import FlashHead
from mmspec.targets import VisionLanguageTarget
from mmspec.training.data.conversations import ConversationReader
from mmspec.training.data.scenes import SHARES, SceneTalk, scene_data
from mmspec.training.drafter import train_drafter
from mmspec.visual_tokens.spans import find_images
from reference.processors import build_processor
from reference.vlm_model import SHAPES_BY_SIZE, build_model


@functools.cache
def data() -> SceneTalk:
    torch.manual_seed(0)
    processor = build_processor()
    model = build_model(SHAPES_BY_SIZE["tiny"], processor).eval().requires_grad_(False)
    return SceneTalk(ConversationReader(VisionLanguageTarget(model), processor), batch_size=6, seed=3)


def test_kinds_have_their_shares_and_of_several_images_the_target_may_speak_itself() -> None:
    assert sum(SHARES.values()) == pytest.approx(1)
    own, counts = SceneTalk(data().reader, batch_size=6, seed=3, regenerate=4), []
    for step in range(4):
        for one, other in zip(own.batch(step, 0).examples, data().batch(step, 0).examples, strict=True):
            counts.append(len(find_images(data().reader.target.config, one.inputs)))
            alike = one.inputs["input_ids"].tolist() == other.inputs["input_ids"].tolist()
            assert alike == (counts[-1] == 1) and (alike or len(one.learnt) - one.answer <= 5)
    assert counts.count(1) > counts.count(2) > 0 and counts.count(4) > 0


def test_a_head_is_trained_and_saved(tmp_path: Path) -> None:
    target = tmp_path / "target"
    data().reader.target.model.save_pretrained(target)
    data().reader.processor.save_pretrained(target)
    how: dict[str, Any] = {"settings": {"block": 3, "bias_rank": 4}, "steps": 2, "batch_size": 1}
    folder = train_drafter(target, tmp_path / "flash", scene_data, method="flash", regenerate=4, **how)
    head = AutoModel.from_pretrained(folder)
    assert isinstance(head, FlashHead) and head.config.target_type == "llama" and head.config.block == 3
    made = json.loads((folder / "training.json").read_text())
    assert made["method"] == "flash" and made["stages"][0]["acceptance"] >= 1.0
    assert " --method flash:block=3:bias_rank=4 " in made["command"]
    assert made["command"].endswith("--steps 2 --regenerate 4")
