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
from mmspec.training.data.scenes import SHARES, SceneTalk, scene_data, scene_talk
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


def test_equal_steps_give_equal_sequences_and_others_do_not() -> None:
    one, again, other = (data().batch(step, 0) for step in (4, 4, 5))
    for left, right in zip(one.examples, again.examples, strict=True):
        assert torch.equal(left.learnt, right.learnt)
        assert all(torch.equal(value, right.inputs[name]) for name, value in left.inputs.items())
    assert one.seed == again.seed != other.seed


def test_a_sequence_is_a_prompt_with_its_images_and_a_reply_that_ends() -> None:
    tokenizer = data().reader.processor.tokenizer
    for seed, kind in enumerate([*SHARES] * 2, 10_000_000):
        example = data().reader.example(scene_talk(seed, kind))
        ids = example.inputs["input_ids"][0]
        spans = find_images(data().reader.target.config, example.inputs)
        assert len(spans) == {"two images": 2, "clip": 4}.get(kind, 1)
        assert spans[-1].stop <= example.answer < len(ids)
        assert example.learnt.tolist() == [place >= example.answer for place in range(len(ids))]
        assert ids[-1] == tokenizer.eos_token_id and tokenizer.unk_token_id not in ids
        said = len(ids) - example.answer
        bounds = {"description": (60, 400), "question": (2, 6), "caption": (8, 60)}
        assert bounds.get(kind, (8, 400))[0] <= said <= bounds.get(kind, (8, 400))[1]


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
