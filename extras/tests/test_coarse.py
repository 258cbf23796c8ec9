"""Coarse tokens and their refiner (CTF): clusters, initial weights, the target, a tiny training."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from extras.reference.coarse import CoarseLoss, coarsened, full_clusters, train_coarse
from mmspec.errors import CheckpointError, InputError
from mmspec.pipelines import ImagePipeline, MMSpecPipeline
from mmspec.training.data.scenes import scene_data
from mmspec.training.drafter import train_drafter
from mmspec_extras.families.ctf.modeling import CTFForCausalLM, CTFRefiner
from mmspec_extras.families.ctf.target import CTFTarget
from reference.image_data import image_batch
from reference.image_model import SHAPES_BY_SIZE
from reference.image_scores import score_image_model

TINY = SHAPES_BY_SIZE["tiny"]
PROMPT = "a small red star"
CLUSTERS = 48  # enough for a tree of 40 siblings


@pytest.fixture(scope="module")
def trained(start: Path) -> tuple[Path, list[float]]:
    losses: list[float] = []
    how = {"clusters": CLUSTERS, "refiner_layers": 1, "steps": 6, "batch_size": 4}
    out = start.parent / "coarse"
    train_coarse(out, start=start, on_step=lambda step, loss: losses.append(loss), **how)
    return out, losses


@pytest.fixture(scope="module")
def pipe(trained: tuple[Path, list[float]]) -> ImagePipeline:
    return MMSpecPipeline.from_pretrained(trained[0], accelerator="none")


def test_no_cluster_is_empty() -> None:
    equal = full_clusters(torch.ones(12, 4), 5)
    assert sorted(equal.unique().tolist()) == [0, 1, 2, 3, 4]
    with pytest.raises(InputError, match="clusters.*1 to 12"):
        full_clusters(torch.ones(12, 4), 13)


def test_with_a_cluster_for_each_entry_images_are_those_of_the_llamagen(start: Path) -> None:
    model = coarsened(start, torch.arange(TINY.entries), 1)
    plain = MMSpecPipeline.from_pretrained(start, accelerator="none")
    images = ImagePipeline(model, plain.processor, "none", vq=plain.vq, text_encoder=plain.text_encoder)
    one, other = (each(PROMPT, seed=3, output_type="pt") for each in (plain, images))
    assert one.tokens == other.tokens and torch.equal(one.images, other.images)


def test_every_cell_of_the_refiner_sees_all_others(trained: tuple[Path, list[float]]) -> None:
    model = CTFForCausalLM.from_pretrained(trained[0], dtype=torch.float64)
    coarse = torch.randint(CLUSTERS, (1, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model.refiner(coarse)
        for cell in (0, 255):
            changed = coarse.clone()
            changed[0, cell] = (coarse[0, cell] + 1) % CLUSTERS
            after = model.refiner(changed)
            inside = before.isfinite() & after.isfinite()
            differs = ((before - after).abs() > 1e-12).where(inside, False).any(-1)[0]
            assert differs.sum() >= 255
        alone = torch.cat([model.refiner(row[None]) for row in torch.cat([coarse, changed])])
        torch.testing.assert_close(model.refiner(torch.cat([coarse, changed])), alone)


def test_images_are_the_refined_coarse_tokens_and_drafts_change_nothing(pipe: ImagePipeline) -> None:
    drawn = pipe(PROMPT, seed=5, output_type="pt")
    codes = torch.tensor(drawn.tokens)
    assert int(codes.max()) < CLUSTERS and drawn.stats.target_forwards == codes.shape[1]
    assert torch.equal(pipe.target.tokens_of(pipe.target.refine(codes)), codes), (
        "entries are of their clusters"
    )
    means = [
        pipe.vq.quantize.embedding.weight[pipe.model.refiner.cluster_of == one].mean(0) for one in (0, 7)
    ]
    torch.testing.assert_close(pipe.target.codebook[[0, 7]], torch.stack(means))
    greedy = pipe(PROMPT, temperature=0.0, output_type="pt")
    for name, wanted, how in (("copy", drawn, {"seed": 5}), ("sjd", greedy, {"temperature": 0.0})):
        pipe.set_accelerator(name)
        again = pipe(PROMPT, output_type="pt", **how)
        assert again.tokens == wanted.tokens and torch.equal(again.images, wanted.images)
    pipe.set_accelerator("none")


def test_what_is_learnt_is_what_decodes(pipe: ImagePipeline) -> None:
    """Greedy images without guidance are the likeliest coarse tokens of one forward pass over them."""
    model = deepcopy(pipe.model)
    torch.manual_seed(4)
    for weight in model.parameters():  # so that the output depends on the visible tokens
        weight.data += 0.1 * torch.randn_like(weight)
    varied = ImagePipeline(model, pipe.processor, "none", vq=pipe.vq, text_encoder=pipe.text_encoder)
    coarse = torch.tensor(varied(PROMPT, temperature=0.0, guidance_scale=1.0, output_type="latent").tokens)
    assert len(coarse.unique()) > 2
    words = pipe.tokenizer(PROMPT, add_special_tokens=False, return_tensors="pt")["input_ids"]
    batch = image_batch(np.arange(1), pipe.tokenizer, dropped=0.0)
    left = batch.words.shape[1] - words.shape[1], 0
    mask, words = (torch.nn.functional.pad(each, left) for each in (torch.ones_like(words), words))
    batch = replace(batch, words=words, word_mask=mask, tokens=varied.target.refine(coarse))
    learner = CoarseLoss(model, pipe.text_encoder)
    with torch.no_grad():
        assert torch.equal(learner.read(batch, coarse).argmax(-1), coarse)
        _, figures = learner(batch)
    assert figures["refined"] == 1 and figures["fine"] > 0, "fine tokens are those that the refiner chooses"


def test_a_tiny_training_learns_and_its_folder_says_how(trained: tuple[Path, list[float]]) -> None:
    folder, losses = trained
    assert np.mean(losses[-2:]) < np.mean(losses[:2])
    record = json.loads((folder / "training.json").read_text())
    assert "train coarse" in record["command"] and "--clusters 48" in record["command"]
    weights = load_file(folder / "model.safetensors")
    assert weights["refiner.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert isinstance(MMSpecPipeline.from_pretrained(folder).model.refiner, CTFRefiner)


def test_it_is_scored_and_drafted_for_by_its_coarse_tokens(trained: tuple[Path, list[float]]) -> None:
    scores = score_image_model(trained[0], 3, guidance_scales=(2.0,), batch_size=4)
    assert 0 < scores["entropy_mean"] < np.log(CLUSTERS) and 0 <= scores["reconstructed"]["share"] <= 1
    out = trained[0].parent / "head"
    train_drafter(trained[0], out, scene_data, steps=1, batch_size=2)
    plain, drafted = (
        MMSpecPipeline.from_pretrained(trained[0], accelerator=name, **which)(PROMPT, seed=1).tokens
        for name, which in (("none", {}), ("eagle", {"drafter": out}))
    )
    assert drafted == plain


def test_clusters_that_cannot_be_are_refused(pipe: ImagePipeline) -> None:
    model = deepcopy(pipe.model)
    model.refiner.cluster_of.clamp_(min=1)
    with pytest.raises(CheckpointError, match="none of them empty"):
        CTFTarget(model, pipe.vq)
