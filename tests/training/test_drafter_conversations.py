"""Scenes as sequences for drafters of vision-language models, and a head that learns from them."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from transformers import AutoModel

from mmspec.compressors.spans import find_pictures
from mmspec.models.flash import FlashHead
from mmspec.targets import VisionLanguageTarget
from mmspec.training.drafter import train_drafter
from mmspec.training.drafter_conversations import SceneConversations
from mmspec.training.vlm_model import SHAPES_BY_SIZE, build_model
from mmspec.training.vlm_processor import build_processor


@functools.cache
def data() -> SceneConversations:
    torch.manual_seed(0)
    processor = build_processor()
    model = build_model(SHAPES_BY_SIZE["tiny"], processor).eval().requires_grad_(False)
    return SceneConversations(VisionLanguageTarget(model), processor, batch_size=6, seed=3)


def test_equal_steps_give_equal_sequences_and_others_do_not() -> None:
    one, again, other = (data().batch(step, 0) for step in (4, 4, 5))
    for left, right in zip(one.examples, again.examples, strict=True):
        assert left.answer == right.answer
        assert all(torch.equal(value, right.inputs[name]) for name, value in left.inputs.items())
    assert one.seed == again.seed != other.seed


def test_a_sequence_is_a_prompt_with_one_picture_and_a_reply_that_ends() -> None:
    tokenizer = data().processor.tokenizer
    lengths = set()
    for example in data().batch(0, 0).examples:
        ids = example.inputs["input_ids"][0]
        (span,) = find_pictures(data().target.config, example.inputs)
        assert span.stop <= example.answer < len(ids)
        assert ids[-1] == tokenizer.eos_token_id and tokenizer.unk_token_id not in ids
        assert "attention_mask" not in example.inputs
        lengths.add(len(ids) - example.answer)
    assert max(lengths) > 60 > min(lengths), "descriptions and shorter replies"


def test_a_head_is_trained_and_saved(tmp_path: Path) -> None:
    target = tmp_path / "target"
    data().target.model.save_pretrained(target)
    data().processor.save_pretrained(target)
    losses: list[float] = []
    folder = train_drafter(
        target,
        tmp_path / "flash",
        method="flash",
        steps=2,
        batch_size=1,
        on_step=lambda step, loss: losses.append(loss),
    )
    head = AutoModel.from_pretrained(folder)
    assert isinstance(head, FlashHead) and head.config.target_type == "llama"
    made = json.loads((folder / "training.json").read_text())
    assert made["method"] == "flash" and made["stages"][0]["acceptance"] >= 1.0
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
