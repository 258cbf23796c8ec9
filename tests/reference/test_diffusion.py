"""The masked-block reference model: training matches decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.families.masked_language.target import MaskedTarget
from mmspec.pipelines import MMSpecPipeline
from mmspec.scenes import sample_scene
from mmspec.scenes.render import render
from reference import autoencoder, diffusion, image, latents, parallel, reader, smol, smol_replies, vq
from reference.diffusion import DiffusionLoss, Layout, blocks_layout, convert, train_diffusion
from reference.processors import build_processor
from reference.vlm_model import SHAPES_BY_SIZE, build_model
from tests.tiny_models import randomise

BLOCK, MASK, END = 4, 9, 8


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, processor = tmp_path_factory.mktemp("llava"), build_processor()
    model = randomise(build_model(SHAPES_BY_SIZE["tiny"], processor), 5)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def test_no_two_trainings_draw_the_same_scenes() -> None:
    keys = [each.STAGE for each in (reader, vq, image, latents, autoencoder, parallel, diffusion)]
    assert len({*keys, smol.WORDS_SEEDS, smol.SPEECH_SEEDS, smol_replies.STAGE}) == len(keys) + 3


def sequence() -> tuple[Tensor, Tensor]:
    """[2, 14] tokens, and which are learnt: one answer, and two."""
    tokens = torch.randint(10, 30, (2, 14), generator=torch.Generator().manual_seed(0))
    learnt = torch.zeros_like(tokens, dtype=torch.bool)
    learnt[0, 5:13] = learnt[1, 3:6] = learnt[1, 9:14] = True
    return tokens, learnt


def numbered(learnt: Tensor) -> Tensor:
    """[2, 14] number of each answer, -1 elsewhere."""
    begins = learnt & ~torch.cat([torch.zeros_like(learnt[:, :1]), learnt[:, :-1]], 1)
    return (begins.flatten().long().cumsum(0).view_as(learnt) - 1).masked_fill(~learnt, -1)


def test_a_block_is_masked_as_it_is_decided() -> None:
    """Masks are within one answer: tokens before it are visible, and places after it have the end token."""
    tokens, learnt = sequence()
    learnt[0, 9] = False  # answers at 5 to 8 and at 10 to 12: both in the block of places 8 to 11
    turns, found = numbered(learnt), set[bool]()
    for seed in range(20):
        made = blocks_layout(tokens, turns, MASK, END, BLOCK, torch.Generator().manual_seed(seed))
        noisy, clean = made.tokens[0, 16:], torch.cat([tokens[0], torch.tensor([END, END])])
        shown = noisy != MASK
        assert torch.equal(noisy[:5], tokens[0, :5]), "no answer"
        is_first = bool(((noisy[9:12] == END) | ~shown[9:12]).all())
        found.add(is_first)
        if is_first:
            goals = {int(place): int(goal) for place, goal in places_and_goals(made, 16) if 9 <= place < 12}
            assert set(goals.values()) <= {END}
        else:
            assert torch.equal(noisy[8:10], tokens[0, 8:10]), "the first answer and the prompt behind it"
        assert all(noisy[place] in (MASK, clean[place]) for place in (4, 5, 6, 7, 12))
        assert all(noisy[place] in (MASK, END) for place in (13, 14, 15)), "behind the last answer"
    assert found == {True, False}


def places_and_goals(made: Layout, length: int) -> list[tuple[int, int]]:
    """Of the first row."""
    at = made.at.where(made.at < length, made.at - length) + 1
    return [
        (int(place), int(goal)) for row, place, goal in zip(made.row, at, made.goal, strict=True) if row == 0
    ]


def test_what_is_learnt_is_what_the_target_scores(llava: Path) -> None:
    """Logits of a layout equal those of a forward pass over the block after unmasked earlier blocks."""
    model, processor = convert(llava, BLOCK)
    model, tokenizer = model.double().eval(), processor.tokenizer
    target = MaskedTarget(model)
    mask = target.mask_token_id
    assert (target.block_length, target.predicts, mask) == (BLOCK, "next", len(tokenizer) - 1)
    ids = tokenizer(["<bos><user>describe the image.<assistant>a red star left of a blue star"])["input_ids"]
    tokens = torch.tensor(ids)
    begin = tokens.shape[1] - 7
    learnt = torch.zeros_like(tokens, dtype=torch.bool)
    learnt[:, begin:] = True
    learner = DiffusionLoss(model, BLOCK, END)
    seeds = (torch.Generator().manual_seed(seed) for seed in range(99))
    layouts = (blocks_layout(tokens, numbered(learnt), mask, END, BLOCK, each) for each in seeds)
    layout = next(each for each in layouts if each.goal.numel() > 4)
    found = learner.logits(layout, torch.zeros(0, 1, 1))
    length = layout.tokens.shape[1] // 2
    for row, at, logits in zip(layout.row.tolist(), layout.at.tolist(), found, strict=True):
        place = (at - length if at >= length else at) + 1
        block = place // BLOCK
        clean, noisy = layout.tokens[row].split(length)
        shown = torch.where(torch.arange(length) // BLOCK < block, clean, noisy)[: (block + 1) * BLOCK]
        of = torch.arange(len(shown)) // BLOCK
        alone = model(shown[None], attention_mask=(of[:, None] >= of)[None, None]).logits[0, place - 1]
        assert torch.allclose(logits, alone.float(), atol=1e-4)


def test_a_converted_model_says_the_same_token_by_token(llava: Path, tmp_path: Path) -> None:
    """Before training. The model is then trained, saved and decoded in both modes."""
    out = train_diffusion(tmp_path / "out", start=llava, block_length=BLOCK, steps=1, batch_size=1)
    image = render(sample_scene(3), 96)
    asked: dict[str, Any] = {"images": image, "max_new_tokens": 9, "do_sample": False}
    before: Any = MMSpecPipeline.from_pretrained(llava, accelerator="none")
    model, processor = convert(llava, BLOCK)
    model.save_pretrained(tmp_path / "new")
    processor.save_pretrained(tmp_path / "new")
    new: Any = MMSpecPipeline.from_pretrained(tmp_path / "new", accelerator="none", mode="autoregressive")
    assert new("describe the image.", **asked).tokens == before("describe the image.", **asked).tokens
    for mode, names in (("blocks", ("freedave", "threshold")), ("autoregressive", ("self_speculation",))):
        pipe: Any = MMSpecPipeline.from_pretrained(out, mode=mode)
        pipe.set_accelerator("none")
        plain = pipe("describe the image.", **asked)
        for name in names:
            pipe.set_accelerator(name)
            said = pipe("describe the image.", **asked)
            assert len(said.tokens[0]) == 9
            assert said.tokens == plain.tokens or said.stats.exactness == "lossy"
    assert pipe.default_accelerator == "self_speculation"
