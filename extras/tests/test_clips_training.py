"""Clips of scenes by next-block prediction: training matches decoding; a tiny training and its scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from extras.reference.clips import BlockLoss, begin_clips, blocks_see, clip_batch, score_clips, train_clips
from mmspec.errors import InputError
from mmspec.pipelines import MMSpecPipeline
from mmspec.scenes import IMAGE_TOKENS, sample_scene
from mmspec.scenes.render import animate, render_clip, sample_clip
from mmspec_extras.families.nbp.modeling import NBPForCausalLM
from reference.image_model import SHAPES_BY_SIZE, build_caption_tokenizer

TINY = SHAPES_BY_SIZE["tiny"]
FRAMES, CELLS = 2, 2 * TINY.grid**2
PROMPT = "a small red star on sand."


@pytest.fixture(scope="module")
def trained(start: Path) -> tuple[Path, list[float]]:
    losses: list[float] = []
    out = start.parent / "clips"
    how = {"frames": FRAMES, "steps": 6, "batch_size": 2}
    train_clips(out, start=start, on_step=lambda step, loss: losses.append(loss), **how)
    return out, losses


def test_a_place_sees_its_block_and_all_before() -> None:
    sees = blocks_see(slots=2, size=3, cells=9)
    # two slots, t0, t1 alone; t2 with two special tokens; t3 t4 t5; the last block is not read
    blocks = [0, 1, 2, 3, 4, 4, 4, 5, 5, 5]
    assert sees.tolist() == [[other <= own for other in blocks] for own in blocks]


def test_what_is_learnt_is_what_decodes(start: Path) -> None:
    """Greedy clips without guidance are the likeliest tokens of one forward pass over the same clips."""
    pipe = MMSpecPipeline.from_pretrained(start)
    model = begin_clips(start, FRAMES).eval()
    torch.manual_seed(4)
    for weight in model.parameters():  # so that the output depends on the visible tokens
        weight.data += 0.05 * torch.randn_like(weight)
    pipe = type(pipe)(model, pipe.processor, "none", vq=pipe.vq, text_encoder=pipe.text_encoder)
    drawn = pipe(PROMPT, temperature=0.0, guidance_scale=1.0, output_type="latent")
    tokens = torch.tensor(drawn.tokens)
    assert drawn.stats.target_forwards == TINY.grid + CELLS // TINY.grid - 1
    words = pipe.tokenizer(PROMPT, add_special_tokens=False, return_tensors="pt")["input_ids"]
    batch = clip_batch(np.arange(1), pipe.tokenizer, FRAMES, dropped=0.0)
    padding = batch.words.shape[1] - words.shape[1]
    mask = torch.nn.functional.pad(torch.ones_like(words), (padding, 0))
    words = torch.nn.functional.pad(words, (padding, 0))
    batch = replace(batch, words=words, word_mask=mask, tokens=tokens)
    with torch.no_grad():
        logits = BlockLoss(model, pipe.text_encoder).read(batch)
    assert torch.equal(logits.argmax(-1), tokens)
    assert len(tokens.unique()) > 3

    def spoiled(cell: int) -> Tensor:
        changed = tokens.clone()
        changed[0, cell] = (tokens[0, cell] + 1) % TINY.entries
        with torch.no_grad():
            other = BlockLoss(model, pipe.text_encoder).read(replace(batch, tokens=changed))
        return ((other - logits).abs() > 1e-4).any(-1)[0].nonzero().flatten()

    grid = TINY.grid
    assert int(spoiled(3)[0]) == 4, "in the first block, the next token"
    assert int(spoiled(2 * grid + 5)[0]) == 3 * grid, "behind it, all of the next block, and none of its own"


def test_clips_move_and_their_places_with_them() -> None:
    scene = sample_scene(12, profile=IMAGE_TOKENS)
    assert animate(scene, 4) == animate(scene, 4) and sample_clip(5) == animate(sample_scene(5), 8)
    clips = [animate(sample_scene(seed, profile=IMAGE_TOKENS), 3) for seed in range(40)]
    moving = next(seed for seed, clip in enumerate(clips) if set(clip.directions) != {"still"})
    batch = clip_batch(np.array([moving]), build_caption_tokenizer(), 3, dropped=0.0)
    first, last = batch.place_labels.unflatten(1, (3, -1))[0, [0, 2], :, 0]
    assert not torch.equal(first, last) and batch.pixels.shape == (3, 3, 64, 64)
    shown = render_clip(clips[moving], 64)
    np.testing.assert_allclose(batch.pixels[2].permute(1, 2, 0), shown[2] / 127.5 - 1, atol=1e-6)


def test_a_tiny_training_learns_draws_and_is_scored(trained: tuple[Path, list[float]]) -> None:
    folder, losses = trained
    assert np.mean(losses[-2:]) < np.mean(losses[:2])
    record = json.loads((folder / "training.json").read_text())
    assert "train clips" in record["command"] and "--frames 2" in record["command"]
    assert load_file(folder / "model.safetensors")["model.special_tokens.weight"].dtype == torch.float16
    assert isinstance(MMSpecPipeline.from_pretrained(folder).model, NBPForCausalLM)
    scores = score_clips(folder, 2, accelerators=("none", "sparse_context:context_blocks=3"), batch_size=2)
    plain, real = scores["none"], scores["real"]
    assert plain["forwards"] == TINY.grid + CELLS // TINY.grid - 1 and "forwards" not in real
    assert len(plain["frames"]) == FRAMES and real["frames"][0] > 0.8
    assert 0 <= plain["frames"][1] <= 1 and "sparse_context:context_blocks=3" in scores


def test_what_cannot_be_is_refused(start: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="frames"):
        train_clips(tmp_path, start=start, frames=1, steps=1)
    with pytest.raises(InputError, match="seed"):
        score_clips(start, 2, seed=10**9)
