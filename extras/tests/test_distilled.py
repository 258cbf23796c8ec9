"""Distilled Decoding: the flow between noise and tokens, decoding by a student, a tiny training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extras.reference import distilled
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.errors import InputError
from mmspec.pipelines import ImagePipeline, MMSpecPipeline
from mmspec_extras.families.distilled.flow import noise_of, posterior, token_of
from mmspec_extras.methods.distilled.drafter import first_cells
from reference.image_data import ImageBatch, image_batch
from reference.image_scores import distributions_of

PROMPT = "a small red star"
CELLS = 256
CODES = torch.randn(5, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LOG_P = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64).log()


@pytest.fixture(scope="module")
def trained(start: Path) -> tuple[Path, list[float]]:
    losses: list[float] = []
    out = start.parent / "student"
    how: dict[str, Any] = {"start": start, "images": 4, "batch_size": 4}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(distilled, "CHUNK", 4)
        patched.setattr(distilled, "DRAWS", 1)
        distilled.train_distilled(out, steps=4, **how)
        (out.parent / "student.training.pt").unlink()
        drawn = {file: file.stat().st_mtime_ns for file in (out.parent / "student.images").iterdir()}
        how["on_step"] = lambda _, loss: losses.append(loss)
        distilled.train_distilled(out, steps=24, **how)
    assert drawn and all(file.stat().st_mtime_ns == when for file, when in drawn.items()), "made once"
    return out, losses


@pytest.fixture(scope="module")
def pipe(trained: tuple[Path, list[float]]) -> ImagePipeline:
    pipe: Any = MMSpecPipeline.from_pretrained(trained[0])
    torch.manual_seed(4)
    for weight in pipe.model.parameters():  # so that the output depends on what is read
        weight.data += 0.1 * torch.randn_like(weight)
    return pipe


def test_the_flow_follows_the_score_of_the_density() -> None:
    x, time = torch.randn(7, 3, dtype=torch.float64, requires_grad=True), 0.4
    squares = (x[:, None] - (1 - time) * CODES).square().sum(-1)
    (score,) = torch.autograd.grad((LOG_P - squares / (2 * time**2)).logsumexp(-1).sum(), x)
    velocity = (x - posterior(x, time, LOG_P, CODES) @ CODES) / time
    torch.testing.assert_close(velocity, -(x + time * score) / (1 - time))


def test_noise_is_normal_and_leads_to_its_tokens_with_their_probabilities() -> None:
    random, log_p = torch.Generator().manual_seed(0), LOG_P.expand(4000, -1)
    tokens = torch.multinomial(log_p.exp(), 1, generator=random)[:, 0]
    noise = noise_of(tokens, log_p, CODES, random)
    assert (token_of(noise, log_p, CODES) == tokens).float().mean() > 0.99
    covariance = noise.T.cov()
    assert noise.mean(0).abs().max() < 0.06 and (covariance - torch.eye(3)).abs().max() < 0.08
    fresh = token_of(torch.randn(4000, 3, generator=random, dtype=torch.float64), log_p, CODES)
    assert (fresh.bincount(minlength=5) / 4000 - LOG_P.exp()).abs().max() < 0.03


def test_forward_passes_begin_with_rows_and_two_part_as_published() -> None:
    assert (first_cells(16, 16, 1), first_cells(16, 16, 2)) == ([0], [0, 80])
    for steps in range(1, 17):
        begins = first_cells(16, 16, steps)
        assert begins == sorted(set(begins)) and len(begins) == steps and begins[-1] < CELLS


def test_cells_depend_on_their_noise_and_on_what_precedes_them(pipe: ImagePipeline) -> None:
    drawn = {}
    for steps in (1, 2, 4):
        pipe.set_accelerator("distilled", generation_steps=steps)
        assert pipe.accelerator.exactness == "lossy"
        output = pipe([PROMPT, "a blue ring"], seed=[5, 6], output_type="latent")
        assert output.stats.target_forwards == steps
        drawn[steps] = output.tokens[0]
        alone = pipe("a blue ring", seed=6, output_type="latent").tokens
        assert alone == [output.tokens[1]] != [output.tokens[0]], "as in a batch"
    assert drawn[1][:80] == drawn[2][:80] and drawn[2][:32] == drawn[4][:32]
    assert len({*map(tuple, drawn.values())}) == 3 and len(set(drawn[1])) > 3
    assert pipe([PROMPT], seed=7, output_type="latent").tokens[0] != drawn[4]
    pipe.set_accelerator("none")  # with the two forward passes of the config
    assert pipe([PROMPT], seed=5, output_type="latent").tokens[0] == drawn[2]


def batch_of(pipe: ImagePipeline, tokens: torch.Tensor) -> ImageBatch:
    """The prompt with one image, as in training."""
    words = pipe.tokenizer(PROMPT, add_special_tokens=False, return_tensors="pt")["input_ids"]
    batch = image_batch(np.arange(1), pipe.tokenizer, dropped=0.0)
    left = batch.words.shape[1] - words.shape[1], 0
    mask, words = (torch.nn.functional.pad(each, left) for each in (torch.ones_like(words), words))
    return replace(batch, words=words, word_mask=mask, tokens=tokens)


def test_the_teacher_is_that_of_plain_decoding(start: Path) -> None:
    teacher: Any = MMSpecPipeline.from_pretrained(start, accelerator="none")
    tokens = torch.tensor(teacher(PROMPT, seed=1, output_type="latent").tokens)
    with torch.inference_mode():
        (request,) = teacher.prepare(PROMPT, {}).requests
        wanted = distributions_of(teacher, request, tokens, 3.0)
    log_p = distilled.log_probabilities(teacher.model, teacher.text_encoder, batch_of(teacher, tokens), 3.0)
    torch.testing.assert_close(log_p.exp(), wanted, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("steps", [1, 2])
def test_what_is_learnt_is_what_decodes(pipe: ImagePipeline, steps: int) -> None:
    pipe.set_accelerator("distilled", generation_steps=steps)
    tokens = torch.tensor(pipe(PROMPT, seed=5, output_type="latent").tokens)
    noise = RandomStream.from_seed(5, 1).normal(torch.arange(CELLS)[None], Purpose.DRAFT, 8, torch.float32)
    batch, begin = batch_of(pipe, tokens), torch.tensor(first_cells(16, 16, steps)[-1])
    noisy = distilled.NoisyImages(batch.words, batch.word_mask, batch.dropped, tokens, noise, begin)
    learner = distilled.DistilledLoss(pipe.model, pipe.text_encoder, pipe.vq.quantize.embedding.weight)
    with torch.no_grad():
        assert torch.equal(learner.read(noisy).argmax(-1), tokens[:, int(begin) :])
        _, figures = learner(noisy)
        _, others = learner(replace(noisy, noise=-noise))
    assert figures["right"] == 1 and others["right"] < 1 and figures["distance"] >= 0


def test_a_tiny_training_learns_and_its_folder_says_how(trained: tuple[Path, list[float]]) -> None:
    folder, losses = trained
    assert np.mean(losses[-4:]) < np.mean(losses[:4])
    record = json.loads((folder / "training.json").read_text())
    assert "train distilled" in record["command"] and "--images 4" in record["command"]


def test_forward_passes_that_cannot_be_are_refused(pipe: ImagePipeline, start: Path) -> None:
    for steps in (0, 17):
        with pytest.raises(InputError, match="generation_steps"):
            pipe.set_accelerator("distilled", generation_steps=steps)
    with pytest.raises(InputError, match="student"):
        MMSpecPipeline.from_pretrained(start, accelerator="distilled")
